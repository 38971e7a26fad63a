"""The options of `fixstep run`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, Literal

from fixstep.runtime._loop import ON_NONFINITE
from fixstep.targets.errors import DataError

Mode = Literal["min", "max"]
# Options that say more of another one, or of one of two, which must be given too.
_NEEDS: dict[str, str | tuple[str, ...]] = {
    "resume": "checkpoint-dir",
    "checkpoint-every": "checkpoint-dir",
    "checkpoint-every-s": "checkpoint-dir",
    "best": "checkpoint-dir",
    "keep-best": "best",
    "validate-every": "validate",
    "validate-epochs": "validate",
    "early-stop-patience": "early-stop",
    "early-stop-min-delta": "early-stop",
    "reduce": "reduce-on",
    "reduce-on": "reduce",
    "reduce-factor": "reduce",
    "reduce-patience": "reduce",
    "reduce-min-delta": "reduce",
    "reduce-cooldown": "reduce",
    "reduce-minimum": "reduce",
    "in-part": ("start-from", "weights"),
    "under": "weights",
    "cast": "weights",
}


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """What is trained on, and how long."""
    add = parser.add_argument_group("data and length").add_argument
    add("--data", required=True, metavar="SOURCE", help="training data: a .npz file or module:function")
    add("--validate", metavar="SOURCE", help="data to evaluate after each epoch")
    add("--validate-every", type=_positive, metavar="N", help="also after every N steps")
    add("--validate-epochs", type=_positive, metavar="N", help="after every Nth epoch alone")
    add("--epochs", type=_count, default=3, metavar="N", help="epochs of the whole run (default 3)")
    add("--iterations", type=_count, metavar="N", help="at most N batches of each epoch")
    add("--max-steps", type=_count, metavar="N", help="stop when so many steps were taken in all")
    add("--batch-size", type=_positive, metavar="N", help="examples a batch, where the artifact takes several sizes")
    add("--prefetch", type=_count, default=0, metavar="N", help="prepare N batches ahead in a thread (default 0)")
    add("--seed", type=_seed, metavar="N", help="of the first state and of the order (default 0)")
    add("--no-shuffle", action="store_true", help="take a .npz file's examples in order")
    add("--target", metavar="TARGET", help="cpu:host or cpu; by default the best one present")
    add("--device", metavar="DEVICE", help="which device of the target")


def add_saving_options(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, and what a run begins with."""
    add = parser.add_argument_group("checkpoints").add_argument
    add("--checkpoint-dir", type=Path, metavar="DIR", help="where checkpoints and metrics go; none without it")
    add("--checkpoint-every", type=_positive, metavar="N", help="steps between them inside an epoch")
    add("--checkpoint-every-s", type=_real, metavar="S", help="seconds after which the next step saves one")
    add("--keep", type=_positive, default=3, metavar="N", help="the newest N stay (default 3)")
    add("--best", type=_metric, metavar="METRIC", help="keep the best in DIR/best, as it comes")
    add("--keep-best", type=_positive, metavar="N", help="and those that it outdid, N in all (default 1)")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--start-from", type=Path, metavar="FILE", help="begin with the state of a checkpoint, leaf by leaf")
    add("--weights", type=Path, metavar="FILE", help="begin with the weights of a safetensors file, by name")
    add("--under", metavar="LEAF", help="the leaf path below which their names begin (default params)")
    add("--cast", action="store_true", help="round floats to the types of the leaves")
    add("--in-part", action="store_true", help="of either, take what fits, and say which")


def add_handler_options(parser: argparse.ArgumentParser) -> None:
    """What follows the metrics, and logs."""
    add = parser.add_argument_group("what is followed").add_argument
    add("--log", type=Path, metavar="FILE", help="metrics as .csv or .jsonl (default metrics.csv in DIR)")
    add("--log-every", type=_positive, metavar="N", help="also a row every N steps")
    add("--tensorboard", type=Path, metavar="DIR", help="metrics for TensorBoard (needs fixstep[tensorboard])")
    add("--print-every", type=_positive, metavar="N", help="also print a line every N steps")
    add("--log-state", action="append", default=[], metavar="LEAF", help="log a number of the state; may be repeated")
    add("--log-times", action="store_true", help="log seconds and steps per second")
    add("--early-stop", type=_metric, metavar="METRIC", help="stop when it has not improved for a while")
    add("--early-stop-patience", type=_positive, metavar="N", help="that is N times in a row (default 5)")
    add("--early-stop-min-delta", type=_real, metavar="X", help="improvements are greater than X (default 0)")
    add("--reduce", metavar="LEAF", help="reduce a number of the state, such as the learning rate, on a plateau")
    add("--reduce-on", type=_metric, metavar="METRIC", help="the metric that has to improve")
    add("--reduce-factor", type=_real, metavar="X", help="multiply by X (default 0.1)")
    add("--reduce-patience", type=_positive, metavar="N", help="after N times in a row (default 5)")
    add("--reduce-min-delta", type=_real, metavar="X", help="improvements are greater than X (default 0)")
    add("--reduce-cooldown", type=_count, metavar="N", help="then not count N times (default 0)")
    add("--reduce-minimum", type=_real, metavar="X", help="never below X (default 0)")
    add(
        "--handler",
        action="append",
        default=[],
        metavar="NAME",
        help="your own, what module:name() returns; may be repeated",
    )
    add("--watch", default="loss", metavar="METRIC", help="the step's metric to be finite (default loss)")
    add(
        "--on-nonfinite", choices=(*ON_NONFINITE, "halt"), default="stop", help="if it is not: undo the step and stop "
        "(default), undo it and skip the batch, continue, or keep the step and halt"
    )  # fmt: skip


def check_needed(arguments: argparse.Namespace) -> None:
    """Refuse an option that says more of one which was not given.

    Raises:
        DataError: naming both.
    """
    for option, needed in _NEEDS.items():
        either = (needed,) if isinstance(needed, str) else needed
        if value_of(arguments, option) not in (None, False) and all(value_of(arguments, n) is None for n in either):
            what = ", the folder of the checkpoints" if needed == "checkpoint-dir" else ""
            raise DataError(f"--{option} needs {' or '.join(f'--{name}' for name in either)}{what}")


def value_of(arguments: argparse.Namespace, option: str) -> Any:
    """The value of an option by its long name."""
    return getattr(arguments, option.replace("-", "_"))


def given(arguments: argparse.Namespace, **options: str) -> dict[str, Any]:
    """The values of the options that were given, under a handler's names for them."""
    values = {name: value_of(arguments, option) for name, option in options.items()}
    return {name: value for name, value in values.items() if value is not None}


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected an integer from 0, got {text!r}")
    return int(text)


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"expected a number from 0, got {text!r}")
    return value


def _metric(text: str) -> tuple[str, Mode]:
    """A metric's name, and whether less is better or, with `max:` before it, more."""
    name = text.removeprefix("max:").removeprefix("min:")
    if not name:
        raise argparse.ArgumentTypeError("expected the name of a metric, such as validation/loss, or max:accuracy")
    return name, "max" if text.startswith("max:") else "min"


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"expected an integer from 0 to 2^64 - 1, got {text!r}")
    return int(text)
