"""The command run: options, handlers, data, and what is printed before and after."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from fixstep.runtime._checkpoints import Checkpoints
from fixstep.runtime._cli import DONE, Run
from fixstep.runtime._data import ArrayData, Source, load_npz, load_source
from fixstep.runtime._events import On
from fixstep.runtime._filters import every
from fixstep.runtime._loop import ON_NONFINITE, Loop, RunResult
from fixstep.runtime._metrics_log import MetricsLog
from fixstep.runtime._monitors import EarlyStop, HaltOnNonFinite, ReduceOnPlateau
from fixstep.runtime._npz import as_template_dtypes
from fixstep.runtime._partial import load_leaves
from fixstep.runtime._predict import batch_size
from fixstep.runtime._progress import LogLines, Progress, shown
from fixstep.runtime._readings import StateNumber, Throughput
from fixstep.runtime._session import Session, load
from fixstep.runtime._signature import check
from fixstep.targets.errors import DataError, TemplateError

Mode = Literal["min", "max"]
# Options that say more of another one, which must be given too.
_NEEDS = {
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
    "in-part": "start-from",
}


def run_command(parser: argparse.ArgumentParser) -> Run:
    """Train: run an artifact's step over data.

    Data is a .npz file, whose arrays are named by leaf path and share their first axis, the examples; or the name
    module:function of a function that returns an iterable of batches for each epoch (it gets the epoch's number,
    from 1, if it takes an argument).

    A METRIC is `loss`, the average over an epoch, or `validation/loss`; less is better, and more with `max:` before
    it, as in max:validation/accuracy. A LEAF is the path of one number in the state, which `fixstep inspect` lists.

    SIGINT and SIGTERM finish the step, save a checkpoint, and exit with 130 and 143; a second one ends at once.
    The same command with --resume goes on where the run stopped, and ends bit for bit as if it had not.
    """
    parser.add_argument("artifact", type=Path, help="a .fixstep file")
    _add_data_options(parser)
    _add_saving_options(parser)
    _add_handler_options(parser)
    parser.add_argument("--config", metavar="FILE", help="a TOML file of options by their long names, as in epochs = 9")
    parser.add_argument("--dry-run", action="store_true", help="do one step of everything, and keep nothing of it")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    return _run


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data and length").add_argument
    add("--data", required=True, metavar="SOURCE", help="training data: a .npz file or module:function")
    add("--validate", metavar="SOURCE", help="data to evaluate after each epoch")
    add("--validate-every", type=_positive, metavar="N", help="also after every N steps")
    add("--validate-epochs", type=_positive, metavar="N", help="after every Nth epoch alone")
    add("--epochs", type=_count, default=3, metavar="N", help="epochs of the whole run (default 3)")
    add("--iterations", type=_count, metavar="N", help="at most N batches of each epoch")
    add("--max-steps", type=_count, metavar="N", help="stop when so many steps were taken in all")
    add("--prefetch", type=_count, default=0, metavar="N", help="prepare N batches ahead in a thread (default 0)")
    add("--seed", type=_seed, metavar="N", help="of the first state and of the order (default 0)")
    add("--no-shuffle", action="store_true", help="take a .npz file's examples in order")
    add("--target", metavar="TARGET", help="cpu:host or cpu; by default the best one present")
    add("--device", metavar="DEVICE", help="which device of the target")


def _add_saving_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpoints").add_argument
    add("--checkpoint-dir", type=Path, metavar="DIR", help="where checkpoints and metrics go; none without it")
    add("--checkpoint-every", type=_positive, metavar="N", help="steps between them inside an epoch")
    add("--checkpoint-every-s", type=_real, metavar="S", help="seconds after which the next step saves one")
    add("--keep", type=_positive, default=3, metavar="N", help="the newest N stay (default 3)")
    add("--best", type=_metric, metavar="METRIC", help="keep the best in DIR/best, as it comes")
    add("--keep-best", type=_positive, metavar="N", help="and those that it outdid, N in all (default 1)")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--start-from", type=Path, metavar="FILE", help="begin with the state of a checkpoint, leaf by leaf")
    add("--in-part", action="store_true", help="of that, take the leaves that fit, and say which")


def _add_handler_options(parser: argparse.ArgumentParser) -> None:
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
    add("--watch", default="loss", metavar="METRIC", help="the step's metric to be finite (default loss)")
    add(
        "--on-nonfinite", choices=(*ON_NONFINITE, "halt"), default="stop", help="if it is not: undo the step and stop "
        "(default), undo it and skip the batch, continue, or keep the step and halt"
    )  # fmt: skip


def _run(arguments: argparse.Namespace) -> int:
    for option, needed in _NEEDS.items():
        if _value(arguments, option) not in (None, False) and _value(arguments, needed) is None:
            what = ", the folder of the checkpoints" if needed == "checkpoint-dir" else ""
            raise DataError(f"--{option} needs --{needed}{what}")
    with _exit_on_signals():
        session = _open(arguments)
        data = _source("--data", arguments.data, session, arguments)
        validate = _source("--validate", arguments.validate, session, arguments) if arguments.validate else None
        if arguments.dry_run:
            return _dry_run(arguments, session, data, validate)
        checkpoints = _checkpoints(arguments)
        loop = _loop(arguments, session, checkpoints)
        if not arguments.quiet:
            _say_start(arguments, session, data, checkpoints)
        result = _train(loop, arguments, data, validate)
    if not arguments.quiet:
        _say_end(result)
    return DONE


def _value(arguments: argparse.Namespace, option: str) -> Any:
    return getattr(arguments, option.replace("-", "_"))


def _given(arguments: argparse.Namespace, **options: str) -> dict[str, Any]:
    """The values of the options that were given, under a handler's names for them."""
    values = {name: _value(arguments, option) for name, option in options.items()}
    return {name: value for name, value in values.items() if value is not None}


def _loop(arguments: argparse.Namespace, session: Session, checkpoints: Checkpoints | None) -> Loop:
    halts = arguments.on_nonfinite == "halt"
    handlers = _handlers(arguments, checkpoints)
    if halts:
        handlers.append(HaltOnNonFinite([arguments.watch]))
    try:
        return Loop(
            session, handlers, watch=arguments.watch, on_nonfinite="continue" if halts else arguments.on_nonfinite
        )
    except ValueError as exc:
        raise DataError(str(exc)) from exc


def _train(loop: Loop, arguments: argparse.Namespace, data: Source, validate: Source | None) -> RunResult:
    return loop.run(
        data,
        epochs=arguments.epochs,
        iterations=arguments.iterations,
        max_steps=arguments.max_steps,
        validate=validate,
        validate_when=every(arguments.validate_epochs or 1),
        prefetch=arguments.prefetch,
        resume=arguments.resume,
    )


def _checkpoints(arguments: argparse.Namespace) -> Checkpoints | None:
    if arguments.checkpoint_dir is None:
        return None
    best = _given(arguments, keep_best="keep-best")
    if arguments.best is not None:
        best |= {"best": arguments.best[0], "mode": arguments.best[1]}
    return Checkpoints(
        arguments.checkpoint_dir,
        every=arguments.checkpoint_every,
        every_s=arguments.checkpoint_every_s,
        keep=arguments.keep,
        **best,
    )


def _handlers(arguments: argparse.Namespace, checkpoints: Checkpoints | None) -> list[object]:
    """The handlers that the options ask for; what logs comes before what changes the state."""
    handlers: list[object] = [] if checkpoints is None else [checkpoints]
    if arguments.validate_every is not None:
        handlers.append(On("iteration_completed", lambda state: state.validate(), when=every(arguments.validate_every)))
    handlers += [StateNumber(path) for path in arguments.log_state]
    if arguments.log_times:
        handlers.append(Throughput())
    log = arguments.log
    if log is None and checkpoints is not None:
        log = checkpoints.directory / "metrics.csv"
    if log is not None:
        handlers.append(MetricsLog(log, every=arguments.log_every))
    if arguments.tensorboard is not None:
        from fixstep.runtime._tensorboard import TensorBoardLog  # an extra of its own

        handlers.append(TensorBoardLog(arguments.tensorboard, every=arguments.log_every))
    if arguments.print_every is not None and not arguments.quiet:
        handlers.append(LogLines(every=arguments.print_every))
    if not arguments.quiet:
        handlers.append(Progress(lines=True))
    return handlers + _followers(arguments)


def _followers(arguments: argparse.Namespace) -> list[object]:
    handlers: list[object] = []
    try:
        if arguments.early_stop is not None:
            metric, mode = arguments.early_stop
            options = _given(arguments, patience="early-stop-patience", min_delta="early-stop-min-delta")
            handlers.append(EarlyStop(metric, mode=mode, **options))
        if arguments.reduce is not None:
            metric, mode = arguments.reduce_on
            names = ("factor", "patience", "min_delta", "cooldown", "minimum")
            options = _given(arguments, **{name: f"reduce-{name.replace('_', '-')}" for name in names})
            handlers.append(ReduceOnPlateau(arguments.reduce, metric, mode=mode, **options))
    except ValueError as exc:
        raise DataError(str(exc)) from exc
    return handlers


def _open(arguments: argparse.Namespace) -> Session:
    where = {"target": arguments.target, "device": arguments.device}
    try:
        session = load(arguments.artifact, seed=arguments.seed, **where)
    except TemplateError:  # the program brings its own first state: the seed is that of the order alone
        session = load(arguments.artifact, **where)
    if arguments.start_from is not None:
        loaded = load_leaves(session, arguments.start_from, strict=not arguments.in_part)
        if not arguments.quiet:
            print(f"{arguments.start_from}: {loaded if arguments.in_part else 'taken as the first state'}")
    return session


def _source(option: str, value: str, session: Session, arguments: argparse.Namespace) -> Source:
    """The data that an option names, compared with the template before anything runs."""
    if not value.endswith(".npz") and ":" in value:
        return load_source(value)
    specs = session.signature("step")
    arrays = as_template_dtypes(load_npz(value), specs)
    if len(arrays) == len(specs) == 1 and specs[0].path == "":  # a batch that is one array has no name to match
        arrays = {"": next(iter(arrays.values()))}
    shuffle = option == "--data" and not arguments.no_shuffle
    try:
        data = ArrayData(arrays, batch_size(specs), shuffle=shuffle, seed=arguments.seed or 0)
        check(next(data.batches(1)), specs, "batch")
    except (DataError, TemplateError) as exc:
        raise type(exc)(f"{option} {value}: {exc}") from exc
    return data


def _say_start(arguments: argparse.Namespace, session: Session, data: Source, checkpoints: Checkpoints | None) -> None:
    steps = ""
    if checkpoints is not None and arguments.resume:
        latest = checkpoints.latest().path
        steps = f"; resumes from {latest}" if latest else f"; no checkpoint in {arguments.checkpoint_dir}, starts anew"
    print(f"{session.artifact.manifest['name']} on {session.choice.target} ({session.choice.device}){steps}")
    if isinstance(data, ArrayData):
        order = data.order
        how = f"shuffled with seed {order.seed}" if order.shuffle else "in order"
        print(f"{order.examples} examples, {order.batches_per_epoch} batches of {order.batch_size} an epoch, {how}")
    sys.stdout.flush()


def _say_end(result: RunResult) -> None:
    parts = [f"{result.steps} steps, {result.epochs} whole {'epoch' if result.epochs == 1 else 'epochs'}"]
    if result.stopped == "max_steps":
        parts.append(f"stopped at --max-steps, so far {'  '.join(shown(result.averages))}")
    elif result.stopped != "finished":
        parts.append(f"halted by {result.stopped}, with {'  '.join(shown(result.averages))}")
    if result.checkpoint is not None:
        parts.append(f"checkpoint {result.checkpoint}")
    print("done: " + "; ".join(parts))


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """SIGINT exits with 130 and SIGTERM with 143: at once before the loop begins, and when it hands a signal on."""

    def exit_(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, exit_)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _FirstBatch:
    """A source of one batch an epoch."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The first batch of the source."""
        return itertools.islice(self._source.batches(epoch), 1)


def _dry_run(arguments: argparse.Namespace, session: Session, data: Source, validate: Source | None) -> int:
    """One step, one batch of validation, a checkpoint written and read back, a row in each log; nothing of it stays."""
    if arguments.resume:
        newest = Checkpoints(arguments.checkpoint_dir).latest().path
        if newest is not None:
            session.restore(newest)
    with tempfile.TemporaryDirectory(prefix="fixstep-dry-run-") as name:
        changed: dict[str, Any] = {"checkpoint_dir": Path(name) / "run", "resume": False, "quiet": True}
        changed |= {"epochs": 1, "iterations": 1, "max_steps": None, "validate_epochs": 1}
        changed |= {option: 1 for option in ("log_every", "validate_every") if _value(arguments, option) is not None}
        if arguments.log is not None:
            changed["log"] = Path(name) / arguments.log.name
        if arguments.tensorboard is not None:
            changed["tensorboard"] = Path(name) / "tensorboard"
        dry = argparse.Namespace(**{**vars(arguments), **changed})
        loop = _loop(dry, session, _checkpoints(dry))
        result = _train(loop, dry, data, None if validate is None else _FirstBatch(validate))
        assert result.checkpoint is not None
        session.restore(result.checkpoint)
        length = result.checkpoint.stat().st_size
    if not arguments.quiet:
        parts = [f"one step ({'  '.join(shown(result.averages))})"]
        if validate is not None:
            parts.append(f"one batch of validation ({'  '.join(shown(result.validation))})")
        print(f"dry run: {', '.join(parts)}, a checkpoint of {length:,} bytes written and read back; nothing was kept")
    return DONE


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
