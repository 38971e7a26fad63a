"""The commands of the runtime: run, inspect, predict."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from fixstep.runtime._artifact import Artifact
from fixstep.runtime._checkpoint import CheckpointDirectory
from fixstep.runtime._checkpoints import Checkpoints
from fixstep.runtime._cli import DONE, Run
from fixstep.runtime._data import ArrayData, Source, load_npz, load_source
from fixstep.runtime._inspect import describe_artifact
from fixstep.runtime._loop import ON_NONFINITE, Loop, RunResult
from fixstep.runtime._metrics_log import MetricsLog
from fixstep.runtime._npz import as_template_dtypes
from fixstep.runtime._predict import batch_size, choose_inputs, predict_all, write_predictions
from fixstep.runtime._progress import Progress, shown
from fixstep.runtime._session import Session, load
from fixstep.runtime._signature import check, describe
from fixstep.targets.errors import CheckpointError, DataError, TemplateError


def inspect_command(parser: argparse.ArgumentParser) -> Run:
    """Show what an artifact holds: its template, functions, fixpoint report, targets, versions and sizes."""
    parser.add_argument("artifact", type=Path, help="a .fixstep file")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    parser.add_argument("--all", action="store_true", help="show long tables whole")
    return _inspect


def _inspect(arguments: argparse.Namespace) -> int:
    artifact = Artifact.open(arguments.artifact)
    if arguments.json:
        print(json.dumps(artifact.manifest, indent=1, ensure_ascii=False))
    else:
        print(describe_artifact(artifact, every_leaf=arguments.all))
    return DONE


def run_command(parser: argparse.ArgumentParser) -> Run:
    """Train: run an artifact's step over data.

    Data is a .npz file, whose arrays are named by leaf path and share their first axis, the examples; or the name
    module:function of a function that returns an iterable of batches for each epoch (it gets the epoch's number,
    from 1, if it takes an argument).

    SIGINT and SIGTERM finish the step, save a checkpoint, and exit with 130 and 143; a second one ends at once.
    The same command with --resume goes on where the run stopped, and ends bit for bit as if it had not.
    """
    parser.add_argument("artifact", type=Path, help="a .fixstep file")
    parser.add_argument("--data", required=True, metavar="SOURCE", help="training data: a .npz file or module:function")
    parser.add_argument("--validate", metavar="SOURCE", help="data to evaluate after each epoch")
    parser.add_argument("--epochs", type=_positive, default=3, metavar="N", help="epochs of the whole run (default 3)")
    parser.add_argument("--max-steps", type=_positive, metavar="N", help="stop when so many steps were taken in all")
    parser.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="where checkpoints go; none without it")
    parser.add_argument("--checkpoint-every", type=_positive, metavar="N", help="steps between them inside an epoch")
    parser.add_argument("--keep", type=_positive, default=3, metavar="N", help="the newest N stay (default 3)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--seed", type=_seed, metavar="N", help="of the first state and of the order (default 0)")
    parser.add_argument("--no-shuffle", action="store_true", help="take a .npz file's examples in order")
    parser.add_argument("--target", metavar="TARGET", help="cpu:host or cpu; by default the best one present")
    parser.add_argument("--device", metavar="DEVICE", help="which device of the target")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write metrics to a .csv or .jsonl file")
    parser.add_argument("--log-every", type=_positive, metavar="N", help="also a row every N steps")
    parser.add_argument("--watch", default="loss", metavar="METRIC", help="the metric to be finite (default loss)")
    parser.add_argument(
        "--on-nonfinite", choices=ON_NONFINITE, default="stop", help="if it is not: undo the step and stop (default), "
        "undo it and skip the batch, or continue"
    )  # fmt: skip
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    return _run


def _run(arguments: argparse.Namespace) -> int:
    if arguments.checkpoint_dir is None and (arguments.resume or arguments.checkpoint_every):
        option = "--resume" if arguments.resume else "--checkpoint-every"
        raise DataError(f"{option} needs --checkpoint-dir, the folder of the checkpoints")
    with _exit_on_signals():
        session = _open(arguments)
        data = _source("--data", arguments.data, session, arguments)
        validate = _source("--validate", arguments.validate, session, arguments) if arguments.validate else None
        checkpoints = _checkpoints(arguments)
        try:
            loop = Loop(
                session,
                _handlers(arguments, checkpoints),
                watch=arguments.watch,
                on_nonfinite=arguments.on_nonfinite,
            )
        except ValueError as exc:
            raise DataError(str(exc)) from exc
        if not arguments.quiet:
            _say_start(arguments, session, data, checkpoints)
        result = loop.run(
            data, epochs=arguments.epochs, validate=validate, max_steps=arguments.max_steps, resume=arguments.resume
        )
    if not arguments.quiet:
        _say_end(result)
    return DONE


def _checkpoints(arguments: argparse.Namespace) -> Checkpoints | None:
    if arguments.checkpoint_dir is None:
        return None
    return Checkpoints(arguments.checkpoint_dir, every=arguments.checkpoint_every, keep=arguments.keep)


def _handlers(arguments: argparse.Namespace, checkpoints: Checkpoints | None) -> list[object]:
    handlers: list[object] = [] if checkpoints is None else [checkpoints]
    if arguments.log is not None:
        handlers.append(MetricsLog(arguments.log, every=arguments.log_every))
    if not arguments.quiet:
        handlers.append(Progress(lines=True))
    return handlers


def _open(arguments: argparse.Namespace) -> Session:
    where = {"target": arguments.target, "device": arguments.device}
    try:
        return load(arguments.artifact, seed=arguments.seed, **where)
    except TemplateError:  # the program brings its own first state: the seed is that of the order alone
        return load(arguments.artifact, **where)


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


def predict_command(parser: argparse.ArgumentParser) -> Run:
    """Run an artifact's predict over a .npz file, with the state of a checkpoint.

    Every example has its prediction, in the order of the file. Arrays that predict does not take are ignored.
    """
    parser.add_argument("artifact", type=Path, help="a .fixstep file")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="PATH", help="a checkpoint, or a folder of them"
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="a .npz file")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the .npz file to write")
    parser.add_argument("--target", metavar="TARGET", help="cpu:host or cpu; by default the best one present")
    parser.add_argument("--device", metavar="DEVICE", help="which device of the target")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    return _predict


def _predict(arguments: argparse.Namespace) -> int:
    session = load(arguments.artifact, target=arguments.target, device=arguments.device)
    session.signature("predict")  # says so at once where there is none
    if not arguments.output.parent.is_dir():
        raise DataError(f"{arguments.output}: no folder to write to: make {arguments.output.parent}, or choose another")
    checkpoint = _checkpoint(arguments.checkpoint)
    session.restore(checkpoint)
    arrays, ignored = choose_inputs(load_npz(arguments.data), session.signature("predict"), arguments.data)
    predictions = predict_all(session, arrays)
    write_predictions(arguments.output, predictions)
    if not arguments.quiet:
        if ignored:
            print(f"ignored, as predict does not take them: {', '.join(ignored)}")
        shapes = ", ".join(f"{name} {describe(a.dtype.name, a.shape)}" for name, a in predictions.items())
        print(f"wrote {arguments.output}: {shapes}, with {checkpoint} ({session.steps} steps)")
    return DONE


def _checkpoint(path: Path) -> Path:
    if not path.is_dir():
        return path
    latest = CheckpointDirectory(path).latest().path
    if latest is None:
        raise CheckpointError(f"{path}: a folder without checkpoints")
    return latest


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"expected an integer from 0 to 2^64 - 1, got {text!r}")
    return int(text)
