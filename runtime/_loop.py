"""The training loop: epochs over data, validation, non-finite metrics, signals, and resuming where a run stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fixstep.runtime._data import Source, as_source, no_batches
from fixstep.runtime._events import EVENTS, LoopState, Next, check_handlers
from fixstep.runtime._handlers import Checkpoints
from fixstep.runtime._signals import StopSignals
from fixstep.targets.errors import CheckpointError, DataError, NonFiniteError, ProgramError

if TYPE_CHECKING:
    from fixstep.runtime._session import Session
    from fixstep.runtime._signature import Array

ON_NONFINITE = ("stop", "skip", "continue")
SKIPPED_IN_A_ROW_LIMIT = 100


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        steps: steps since the state was made.
        epochs: whole epochs since then.
        averages: each metric's mean over the last epoch of this run, or over the part of it that was run.
        validation: the same over the validation data, after the last whole epoch; empty without it.
        stopped: `finished`, `max_steps`, the name of a signal, or the name of the handler's class that asked for it.
        skipped: batches whose step was undone because the watched metric was not finite.
        checkpoint: the newest checkpoint, where there is one.
    """

    steps: int
    epochs: int
    averages: dict[str, float]
    validation: dict[str, float]
    stopped: str
    skipped: int = 0
    checkpoint: Path | None = None


class Loop:
    """Trains a session.

    Args:
        session: what is trained.
        handlers: what is called at the loop's events (see `Handler`), in this order; `Checkpoints` always last, so that
            a checkpoint holds nothing that the others have not seen.
        watch: the metric that must stay finite.
        on_nonfinite: what happens when it does not. `stop` undoes the step and raises NonFiniteError. `skip` undoes the
            step, leaves the batch out, and goes on; 100 in a row raise NonFiniteError. Both read the metric after every
            step, which waits for the device each time. `continue` reads nothing.

    Raises:
        ValueError: if `on_nonfinite` is none of these, or the step has metrics but not the watched one.
        TypeError: if a handler is none.
    """

    def __init__(
        self,
        session: Session,
        handlers: Iterable[object] = (),
        *,
        watch: str = "loss",
        on_nonfinite: Literal["stop", "skip", "continue"] = "stop",
    ) -> None:
        if on_nonfinite not in ON_NONFINITE:
            raise ValueError(f"on_nonfinite: expected one of {', '.join(ON_NONFINITE)}, got {on_nonfinite!r}")
        self.session = session
        self.handlers = tuple(handlers)
        check_handlers(self.handlers)
        self.watch = None if on_nonfinite == "continue" else _watched(session, watch)
        self.on_nonfinite = on_nonfinite

    def run(
        self,
        data: Any,
        *,
        epochs: int = 3,
        validate: Any = None,
        max_steps: int | None = None,
        resume: bool = False,
    ) -> RunResult:
        """Trains until `epochs` epochs are done, counted from the start of the run that is resumed.

        An exception of the data, of a handler or of the session ends the run and is raised as it is; a `Checkpoints`
        handler has then saved the state as it was after the last good step. SIGINT and SIGTERM (in the main thread)
        end the run after the step at hand, with a checkpoint; then the signal is delivered as if it had just come, so
        SIGINT raises KeyboardInterrupt. A second signal acts at once.

        Args:
            data: a source (`ArrayData`, `load_source(...)`, anything with `batches(epoch, start)`), or an iterable of
                batches that can be gone through once an epoch.
            epochs: how many epochs the whole run has.
            validate: data for `evaluate` after each epoch.
            max_steps: where given, the run stops when the state has taken so many steps.
            resume: whether to continue from the latest checkpoint of the `Checkpoints` handler's folder. Then the run
                ends bit for bit as if it had not stopped. Without a checkpoint there it starts from the beginning.

        Raises:
            NonFiniteError: see `on_nonfinite`.
            DataError: if an epoch has no batch, or the data is not that of the checkpoint.
            CheckpointError: if the folder has checkpoints and `resume` is false.
            ProgramError: if `validate` is given and the artifact has no `evaluate`.
        """
        if epochs < 1 or (max_steps is not None and max_steps < 1):
            raise ValueError(f"expected epochs and max_steps of at least 1, got {epochs} and {max_steps}")
        if validate is not None and "evaluate" not in self.session.functions:
            raise ProgramError(
                "validation data was given, but the artifact has no evaluate function: "
                "leave it out, or compile a program with evaluate=..."
            )
        with StopSignals() as signals:
            return _Run(self, as_source(data), validate, epochs, max_steps, resume, signals).result()


class _Run:
    """One call of `Loop.run`."""

    def __init__(
        self,
        loop: Loop,
        source: Source,
        validate: Any,
        epochs: int,
        max_steps: int | None,
        resume: bool,
        signals: StopSignals,
    ) -> None:
        self.loop = loop
        self.session = loop.session
        self.source = source
        self.validation_source = None if validate is None else as_source(validate)
        self.max_steps = max_steps
        self.signals = signals
        self.checkpoints = [handler for handler in loop.handlers if isinstance(handler, Checkpoints)]
        self.others = [handler for handler in loop.handlers if not isinstance(handler, Checkpoints)]
        self.started: list[object] = []
        self.skipped_in_a_row = 0
        self.epoch_began_s, self.epoch_began_steps = 0.0, 0
        self.state = LoopState(
            session=loop.session,
            epochs=epochs,
            batches_per_epoch=getattr(source, "batches_per_epoch", None),
            left_out=getattr(source, "left_out", 0),
            validates=validate is not None,
            validation_left_out=getattr(self.validation_source, "left_out", 0),
            resume=resume,
            data=dict(getattr(source, "identity", {})),
        )

    def result(self) -> RunResult:
        state = self.state
        self._restore()
        try:
            self._start()
            self._epochs()
        except Exception as exc:
            state.stopped = "error"
            self._stop(exc)
            raise
        if state.batch > 0:
            state.averages = self.session.averages("step")
        state.stopped = state.stopped or "finished"
        self._stop(None)
        if self.signals.received is not None:
            saved = (
                f"; saved {state.checkpoint}" if state.checkpoint else "; nothing was saved, as no Checkpoints were set"
            )
            print(f"fixstep: stopped by {state.stopped} after step {state.steps}{saved}", file=sys.stderr)
        return RunResult(
            steps=state.steps,
            epochs=state.epoch - 1,
            averages=state.averages,
            validation=state.validation,
            stopped=state.stopped,
            skipped=state.skipped,
            checkpoint=state.checkpoint,
        )

    def _restore(self) -> None:
        state = self.state
        if state.resume:
            if not self.checkpoints:
                raise CheckpointError("resume=True needs a Checkpoints handler, which knows the folder")
            latest = self.checkpoints[0].latest()
            for note in latest.notes:
                print(f"fixstep: passed over a damaged checkpoint: {note}", file=sys.stderr)
            state.checkpoint = latest.path
            if state.checkpoint is not None:
                self._continue_from(self.session.restore(state.checkpoint))
                return
        self.session.reset_averages("step")

    def _continue_from(self, position: dict[str, Any]) -> None:
        state = self.state
        try:
            state.epoch, state.batch = int(position["epoch"]), int(position["batch"])
            state.skipped, data = int(position["skipped"]), dict(position["data"])
        except (KeyError, TypeError, ValueError) as exc:
            raise CheckpointError(
                f"{state.checkpoint}: holds no position of a loop (saved with session.save?): "
                "restore it with session.restore, and run without resume"
            ) from exc
        differing = [
            f"  {key}: expected {data.get(key)}, got {state.data.get(key)}"
            for key in sorted(data.keys() | state.data.keys())
            if data.get(key) != state.data.get(key)
        ]
        if differing:
            lines = ["the data is not that of the checkpoint, so the run would not be the same:", *differing]
            raise DataError("\n".join([*lines, f"Resume {state.checkpoint} with the data that the run began with."]))

    def _start(self) -> None:
        # Checkpoints first: where they refuse, nobody else has written anything.
        for handler in (*self.checkpoints, *self.others):
            self._fire("on_start", [handler])
            self.started.append(handler)

    def _stop(self, exc: Exception | None) -> None:
        failures: list[Exception] = []
        for handler in (*self.others, *self.checkpoints):
            if handler not in self.started:
                continue
            try:
                self._fire("on_stop", [handler])
            except Exception as failure:  # the others must still be stopped
                failures.append(failure)
        if exc is None and failures:
            exc = failures.pop(0)
            _note(exc, failures)
            raise exc
        if exc is not None:
            _note(exc, failures)

    def _fire(self, event: str, handlers: Iterable[object]) -> None:
        assert event in EVENTS
        for handler in handlers:
            method = getattr(handler, event, None)
            answer = None if method is None else method(self.state)
            if answer is Next.STOP:
                self.state.stopped = self.state.stopped or type(handler).__name__
            elif answer is not None and answer is not Next.CONTINUE:
                raise TypeError(
                    f"{type(handler).__name__}.{event} returned {answer!r}, expected None, CONTINUE or STOP"
                )

    def _interrupted(self) -> bool:
        if self.state.stopped is None and self.signals.received is not None:
            self.state.stopped = self.signals.received.name
        return self.state.stopped is not None

    def _ended(self) -> bool:
        if not self._interrupted() and self.max_steps is not None and self.state.steps >= self.max_steps:
            self.state.stopped = "max_steps"
        return self.state.stopped is not None

    def _epochs(self) -> None:
        state = self.state
        while state.epoch <= state.epochs and not self._ended():
            if not self._train():
                return
            self._average()
            if not self._validate():
                return
            self._close()

    def _train(self) -> bool:
        """The batches that the epoch still has; false if the run ends before the epoch does."""
        state = self.state
        self.epoch_began_s, self.epoch_began_steps = time.perf_counter(), state.steps
        with _closing(self.source.batches(state.epoch, state.batch)) as batches:
            for batch in batches:
                # Only here, with a further batch at hand, is it known that the epoch is not over.
                if self._ended():
                    return False
                self._step(batch)
                if self._interrupted():
                    return False
        if state.batch == 0:
            raise no_batches(self.source, state.epoch)
        return True

    def _step(self, batch: Any) -> None:
        state = self.state
        metrics = self.session.step(batch)
        if self.loop.watch is not None:
            value = metrics[self.loop.watch].numpy()
            if not _finite(value):
                self._undo(self.loop.watch, value)
                return
        self.skipped_in_a_row = 0
        state.batch += 1
        state.metrics = metrics
        self._fire("on_step", (*self.others, *self.checkpoints))

    def _undo(self, name: str, value: Any) -> None:
        state = self.state
        step = state.steps
        self.session.rollback()
        where = (
            f"{name} became {value} at epoch {state.epoch}, batch {state.batch + 1} (step {step}); the step was undone"
        )
        if self.loop.on_nonfinite == "stop":
            raise NonFiniteError(
                f"{where}. Lower the learning rate, scale the loss, or look at that batch; "
                "on_nonfinite='skip' (--on-nonfinite skip) leaves such batches out"
            )
        state.batch += 1
        state.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= SKIPPED_IN_A_ROW_LIMIT:
            raise NonFiniteError(
                f"{where}, as were the {SKIPPED_IN_A_ROW_LIMIT - 1} before it: skipping batches does not help. "
                "Lower the learning rate or scale the loss, and start from an earlier checkpoint"
            )

    def _average(self) -> None:
        """The epoch's averages; reading them waits for its last step, so that the time is that of all steps."""
        state = self.state
        state.averages = self.session.averages("step")
        seconds = time.perf_counter() - self.epoch_began_s
        state.steps_per_second = (state.steps - self.epoch_began_steps) / max(seconds, 1e-9)

    def _validate(self) -> bool:
        """The epoch's validation; false if a signal came in the middle."""
        state = self.state
        if self.validation_source is None:
            return True
        self.session.reset_averages("evaluate")
        count = 0
        with _closing(self.validation_source.batches(state.epoch)) as batches:
            for batch in batches:
                if self._interrupted():
                    return False
                self.session.evaluate(batch)
                count += 1
        if count == 0:
            raise no_batches(self.validation_source, state.epoch, "the validation data")
        state.validation = self.session.averages("evaluate")
        self._fire("on_validate", self.others)
        return True

    def _close(self) -> None:
        """Ends the epoch. Until the handlers have seen it, a checkpoint says that it is open: they see it again."""
        state = self.state
        self._fire("on_epoch", self.others)
        self.session.reset_averages("step")
        state.closed = True
        self._fire("on_epoch", self.checkpoints)
        state.epoch, state.batch, state.closed = state.epoch + 1, 0, False


def _watched(session: Session, watch: str) -> str | None:
    results = session.artifact.manifest["functions"]["step"]["results"]
    names = [leaf["path"] for result in results if result["role"] == "metrics" for leaf in result["leaves"]]
    if names and watch not in names:
        raise ValueError(
            f"the step has no metric {watch!r} to watch; it has {', '.join(names)}: "
            "pass watch=... (--watch), or on_nonfinite='continue' (--on-nonfinite continue)"
        )
    return watch if names else None


def _finite(value: Array) -> bool:
    if value.ndim == 0 and value.dtype.kind != "c":
        return math.isfinite(value)  # the usual case, much faster than numpy's for a single number
    return bool(np.isfinite(value).all())


def _note(exc: Exception, failures: list[Exception]) -> None:
    for failure in failures:
        exc.add_note(f"while stopping, this failed too: {type(failure).__name__}: {failure}")


@contextlib.contextmanager
def _closing(batches: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """Closes a generator that is left early, so that its own cleanup runs now."""
    try:
        yield batches
    finally:
        close = getattr(batches, "close", None)
        if callable(close):
            close()
