"""The command run: its handlers, its data, and what is printed before and after. `_run_options.py` has its options."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from fixstep.runtime._checkpoints import Checkpoints
from fixstep.runtime._cli import DONE, Run
from fixstep.runtime._data import ArrayData, Source, load_npz, load_source
from fixstep.runtime._events import On
from fixstep.runtime._filters import every
from fixstep.runtime._load import load
from fixstep.runtime._loop import Loop, RunResult
from fixstep.runtime._metrics_log import MetricsLog
from fixstep.runtime._monitors import EarlyStop, HaltOnNonFinite, ReduceOnPlateau
from fixstep.runtime._npz import as_template_dtypes
from fixstep.runtime._partial import Loaded, load_leaves
from fixstep.runtime._predict import batch_size
from fixstep.runtime._progress import LogLines, Progress, shown
from fixstep.runtime._readings import StateNumber, Throughput
from fixstep.runtime._run_options import (
    add_data_options,
    add_handler_options,
    add_saving_options,
    check_needed,
    given,
    value_of,
)
from fixstep.runtime._session import Session
from fixstep.runtime._signature import check
from fixstep.runtime._user_code import import_callable
from fixstep.runtime._weights import load_weights
from fixstep.targets.errors import DataError, TemplateError


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
    add_data_options(parser)
    add_saving_options(parser)
    add_handler_options(parser)
    parser.add_argument("--config", metavar="FILE", help="a TOML file of options by their long names, as in epochs = 9")
    parser.add_argument("--dry-run", action="store_true", help="do one step of everything, and keep nothing of it")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    return _run


def _run(arguments: argparse.Namespace) -> int:
    check_needed(arguments)
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


def _loop(arguments: argparse.Namespace, session: Session, checkpoints: Checkpoints | None) -> Loop:
    halts = arguments.on_nonfinite == "halt"
    handlers = _handlers(arguments, checkpoints)
    if halts:
        handlers.append(HaltOnNonFinite([arguments.watch]))
    try:
        return Loop(
            session, handlers, watch=arguments.watch, on_nonfinite="continue" if halts else arguments.on_nonfinite
        )
    except (TypeError, ValueError) as exc:
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
    best = given(arguments, keep_best="keep-best")
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
    """The handlers that the options ask for: the user's first, and what logs before what changes the state."""
    handlers: list[object] = [] if checkpoints is None else [checkpoints]
    handlers += [
        import_callable(name, "handler", "class, or function that returns one")() for name in arguments.handler
    ]
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
            options = given(arguments, patience="early-stop-patience", min_delta="early-stop-min-delta")
            handlers.append(EarlyStop(metric, mode=mode, **options))
        if arguments.reduce is not None:
            metric, mode = arguments.reduce_on
            names = ("factor", "patience", "min_delta", "cooldown", "minimum")
            options = given(arguments, **{name: f"reduce-{name.replace('_', '-')}" for name in names})
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
        _tell(arguments, arguments.start_from, loaded, "taken as the first state")
    if arguments.weights is not None:
        options = given(arguments, under="under")
        how = {"strict": not arguments.in_part, "cast": arguments.cast}
        loaded = load_weights(session, arguments.weights, **how, **options)
        _tell(arguments, arguments.weights, loaded, f"{len(loaded.kept)} leaves taken")
    return session


def _tell(arguments: argparse.Namespace, path: Path, loaded: Loaded, whole: str) -> None:
    if not arguments.quiet:
        print(f"{path}: {loaded if arguments.in_part else whole}")


def _source(option: str, value: str, session: Session, arguments: argparse.Namespace) -> Source:
    """The data that an option names, compared with the template before anything runs."""
    if not value.endswith(".npz") and ":" in value:
        return load_source(value)
    specs = session.signature("step")
    arrays = as_template_dtypes(load_npz(value), specs)
    if len(arrays) == len(specs) == 1 and specs[0].path == "":  # a batch that is one array has no name to match
        arrays = {"": next(iter(arrays.values()))}
    shuffle = option == "--data" and not arguments.no_shuffle
    size = _size(session, arguments)
    rest = len(next(iter(arrays.values()))) % size if all(array.ndim for array in arrays.values()) else 0
    drop_last = not _takes(session, rest)
    try:
        data = ArrayData(arrays, size, shuffle=shuffle, seed=arguments.seed or 0, drop_last=drop_last)
        first = next(data.batches(1))
        if session.artifact.sizes is None:
            check(first, specs, "batch")
        else:
            session.artifact.sizes.fit(first, "batch", specs)
    except (DataError, TemplateError) as exc:
        raise type(exc)(f"{option} {value}: {exc}") from exc
    return data


def _size(session: Session, arguments: argparse.Namespace) -> int:
    """The batch size that was asked for, or the largest that the artifact takes."""
    largest = batch_size(session.signature("step"))
    asked: int = largest if arguments.batch_size is None else arguments.batch_size
    if asked != largest and not _takes(session, asked):
        sizes = session.artifact.sizes
        there = (
            f"{sizes.low} to {sizes.high}, multiples of {sizes.multiple}" if sizes is not None else f"{largest} alone"
        )
        raise DataError(f"--batch-size {asked}: the artifact takes {there}")
    return asked


def _takes(session: Session, size: int) -> bool:
    """Whether the artifact takes batches of a size other than its largest."""
    sizes = session.artifact.sizes
    return sizes is not None and sizes.low <= size <= sizes.high and size % sizes.multiple == 0


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
        changed |= {option: 1 for option in ("log_every", "validate_every") if value_of(arguments, option) is not None}
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
