"""One run of the loop: epochs over data, validation, metrics that are not finite, and going on where a run stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fixstep.runtime._data import Source, no_batches
from fixstep.runtime._dispatch import Handlers
from fixstep.runtime._events import LoopState
from fixstep.runtime._filters import Filter
from fixstep.runtime._position import position_of, take_position
from fixstep.runtime._prefetch import Prefetch
from fixstep.runtime._prepared import PreparedBatch
from fixstep.runtime._signals import StopSignals
from fixstep.targets.errors import CheckpointError, NonFiniteError

if TYPE_CHECKING:
    from fixstep.runtime._loop import Limits, Loop
    from fixstep.runtime._signature import Array

SKIPPED_IN_A_ROW_LIMIT = 100


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        steps: steps since the state was made.
        epochs: epochs that ended since then, whole or halted.
        averages: each metric's mean over the last epoch that ended, or over the part of an epoch that was run.
        validation: the same over the validation data, from the last validation; empty without one.
        stopped: `finished`, `max_steps`, the name of a signal, or the name of the handler that asked for it.
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


class Run:
    """One call of `Loop.run`, whose documentation says what the arguments mean."""

    def __init__(
        self,
        loop: Loop,
        source: Source,
        validation: Source | None,
        validate_when: Filter,
        limits: Limits,
        resume: bool,
        signals: StopSignals,
    ) -> None:
        self.loop = loop
        self.session = loop.session
        self.source = source
        self.validation = validation
        self.validates_in = validate_when.test()
        self.limits = limits
        self.signals = signals
        self.epoch_began_s, self.epoch_began_steps = 0.0, 0
        self.open_position: dict[str, Any] = {}
        identity = dict(getattr(source, "identity", {}))
        if limits.iterations is not None:
            identity["iterations"] = limits.iterations
        self.state = LoopState(
            session=loop.session,
            epochs=limits.epochs,
            batches_per_epoch=_least(getattr(source, "batches_per_epoch", None), limits.iterations),
            left_out=getattr(source, "left_out", 0),
            validates=validation is not None,
            validation_left_out=getattr(validation, "left_out", 0),
            resume=resume,
            data=identity,
            validator=None if validation is None else self._validate,
            positioner=self._position,
        )
        self.handlers = Handlers(loop.handlers, self.state)

    def result(self) -> RunResult:
        """Run it.

        Raises:
            Exception: what `Loop.run` says.
        """
        state = self.state
        self._restore()
        try:
            self.handlers.start()
            self._epochs()
            self._end()
        except Exception as exc:
            state.stopped = "error"
            self.handlers.stop(exc)
            raise
        self.handlers.stop(None)
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
            stopped=state.stopped or "finished",
            skipped=state.skipped,
            checkpoint=state.checkpoint,
        )

    def _restore(self) -> None:
        state, checkpoints = self.state, self.handlers.checkpoints
        if state.resume:
            if not checkpoints:
                raise CheckpointError("resume=True needs a Checkpoints handler, which knows the folder")
            latest = checkpoints[0].latest()
            for note in latest.notes:
                print(f"fixstep: passed over a damaged checkpoint: {note}", file=sys.stderr)
            state.checkpoint = latest.path
            if state.checkpoint is not None:
                position = self.session.restore(state.checkpoint)
                notes = self.handlers.load_states(take_position(state, position))
                for note in [*notes, *_resume_notes(self.source, state)]:
                    print(f"fixstep: {note}", file=sys.stderr)
                return
        self.session.reset_averages("step")

    def _position(self) -> dict[str, Any]:
        # While an epoch is being ended, a checkpoint says that it is open: its end happens again, as if for the first
        # time.
        if self.state.trained and not self.state.closed:
            return self.open_position
        return position_of(self.state, self.handlers.states())

    def _interrupted(self) -> bool:
        if self.state.stopped is None and self.signals.received is not None:
            self.state.stopped = self.signals.received.name
        return self.state.stopped is not None

    def _ended(self) -> bool:
        limit = self.limits.max_steps
        if not self._interrupted() and limit is not None and self.state.steps >= limit:
            self.state.stopped = "max_steps"
        return self.state.stopped is not None

    def _epochs(self) -> None:
        state = self.state
        while state.epoch <= state.epochs and not self._ended():
            if not state.begun:
                self.handlers.fire("epoch_started")
                state.begun = True
            if not self._train():
                return
            self.open_position = self._position()
            state.trained = True
            self._average()
            wanted = self.validation is not None and not state.halting and self.validates_in(state.epoch)
            if wanted and not self._validate(can_come_again=True):
                return
            self._close("epoch_halted" if state.halting else "epoch_completed")

    def _train(self) -> bool:
        """The batches that the epoch still has; false if the run ends before the epoch does."""
        state = self.state
        self.epoch_began_s, self.epoch_began_steps = time.perf_counter(), state.steps
        unused: list[Any] = []
        with _closing(self._batches()) as batches:
            if self._interrupted():
                return False
            for batch in () if state.halting else batches:
                # Only here, with a further batch at hand, is it known that the epoch is not over.
                if not self._ended():
                    self.handlers.iteration_started()
                if state.stopped is not None or state.halting:
                    unused.append(batch)
                    break
                self._step(batch)
                if self._interrupted() or state.halting:
                    break
        _give_back(self.source, unused)  # after those that were prefetched, which it goes before
        if state.stopped is not None:
            return False
        if state.batch == 0 and self.limits.iterations != 0 and not state.halting:
            raise no_batches(self.source, state.epoch)
        return True

    def _batches(self) -> Iterator[Any]:
        state, limits = self.state, self.limits
        batches = self.source.batches(state.epoch, state.batch)
        if limits.iterations is not None:
            batches = _limited(batches, max(limits.iterations - state.batch, 0))
        if limits.prefetch:
            return Prefetch(
                batches, limits.prefetch, self.session.prepare, lambda unused: _give_back(self.source, unused)
            )
        return batches

    def _step(self, batch: Any) -> None:
        state = self.state
        metrics = self.session.step(batch)
        if self.loop.watch is not None:
            value = metrics[self.loop.watch].numpy()
            if not _finite(value):
                self._undo(self.loop.watch, value)
                return
        state.skipped_in_a_row = 0
        state.batch += 1
        state.iteration += 1
        state.metrics = metrics
        self.handlers.iteration_completed()

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
        state.iteration += 1
        state.skipped += 1
        state.skipped_in_epoch += 1
        state.skipped_in_a_row += 1
        if state.skipped_in_a_row >= SKIPPED_IN_A_ROW_LIMIT:
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

    def _validate(self, *, can_come_again: bool = False) -> bool:
        """Evaluate over the validation data; at an epoch's end, which can come again, a signal breaks it off: False."""
        state, source = self.state, self.validation
        assert source is not None
        self.session.reset_averages("evaluate")
        count = 0
        with _closing(source.batches(state.epoch)) as batches:
            for batch in batches:
                if can_come_again and self._interrupted():
                    return False
                self.session.evaluate(batch)
                count += 1
        if count == 0:
            raise no_batches(source, state.epoch, "the validation data")
        state.validation = self.session.averages("evaluate")
        state.validations, state.validated_at = state.validations + 1, state.steps
        self.handlers.fire("validated")
        return True

    def _close(self, event: str) -> None:
        """End the epoch. Until the handlers have seen it, a checkpoint says that it is open: they see it again."""
        state = self.state
        self.handlers.fire(event, to_checkpoints=False)
        self.session.reset_averages("step")
        state.closed = True
        self.handlers.fire(event, to_others=False)
        state.epoch, state.batch, state.skipped_in_epoch = state.epoch + 1, 0, 0
        state.begun = state.halting = state.trained = state.closed = False

    def _end(self) -> None:
        state = self.state
        if state.batch > 0 and not state.trained:
            state.averages = self.session.averages("step")
        event = "completed" if state.stopped is None else "halted"
        state.stopped = state.stopped or "finished"
        self.handlers.fire(event)


def _resume_notes(source: Source, state: LoopState) -> list[str]:
    """Let a source that has no epochs go to where the run was; what is to be said of its order."""
    seek = getattr(source, "seek", None)
    if callable(seek):
        seek(state.iteration)
    elif state.epoch > 1 and getattr(source, "order_is_its_own", False):
        return [
            "the data says nothing of its order (no set_epoch), so the run is the same only if each pass gives the same"
        ]
    return []


def _least(one: int | None, other: int | None) -> int | None:
    return min((n for n in (one, other) if n is not None), default=None)


def _finite(value: Array) -> bool:
    if value.ndim == 0 and value.dtype.kind != "c":
        return math.isfinite(value)  # the usual case, much faster than numpy's for a single number
    return bool(np.isfinite(value).all())


def _limited(batches: Iterator[Any], count: int) -> Iterator[Any]:
    with _closing(batches):
        yield from itertools.islice(batches, count)


def _give_back(source: Source, batches: list[Any]) -> None:
    """Return batches that were not used to a source that could not make them again."""
    give_back = getattr(source, "give_back", None)
    if callable(give_back):
        give_back([batch.batch if isinstance(batch, PreparedBatch) else batch for batch in batches])


@contextlib.contextmanager
def _closing(batches: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """Closes a generator that is left early, so that its own cleanup runs now."""
    try:
        yield batches
    finally:
        close = getattr(batches, "close", None)
        if callable(close):
            close()
