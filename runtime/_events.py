"""What the loop tells its handlers, and what they may answer."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fixstep.runtime._metrics import Metrics
    from fixstep.runtime._session import Session

EVENTS = ("on_start", "on_step", "on_validate", "on_epoch", "on_stop")


class Next(enum.Enum):
    """A handler's answer: go on (as None says too), or end the run after this event."""

    CONTINUE = "continue"
    STOP = "stop"


CONTINUE = Next.CONTINUE
STOP = Next.STOP


@dataclasses.dataclass(kw_only=True)
class LoopState:
    """Where the loop stands; handlers read it.

    Attributes:
        session: the session that is trained.
        epochs: the epochs of the whole run.
        epoch: the epoch that runs, from 1.
        batch: how many of its batches were used.
        batches_per_epoch: how many it has, where the data says so.
        left_out: examples that each epoch leaves out because they do not fill a batch.
        validates: whether there is validation data.
        validation_left_out: examples that each validation leaves out.
        metrics: those of the last step, still on the device.
        averages: each metric's mean over the last whole epoch (of the epoch so far, when the run stops inside one).
        validation: the same over the validation data, empty without it.
        steps_per_second: of this run's part of the last whole epoch, without validation and checkpoints.
        skipped: batches whose step was undone because the watched metric was not finite.
        resume: whether the run was asked to resume.
        stopped: why the run ends, once that is known.
        checkpoint: the newest checkpoint that this run wrote or started from.
        data: what the order of the batches depends on.
        closed: whether `epoch` is over, so that a checkpoint stands at the start of the next.
    """

    session: Session
    epochs: int
    epoch: int = 1
    batch: int = 0
    batches_per_epoch: int | None = None
    left_out: int = 0
    validates: bool = False
    validation_left_out: int = 0
    metrics: Metrics | None = None
    averages: dict[str, float] = dataclasses.field(default_factory=dict)
    validation: dict[str, float] = dataclasses.field(default_factory=dict)
    steps_per_second: float = 0.0
    skipped: int = 0
    resume: bool = False
    stopped: str | None = None
    checkpoint: Path | None = None
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    closed: bool = False

    @property
    def steps(self) -> int:
        """Steps since the state was made; a step that was undone does not count."""
        return self.session.steps

    @property
    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps of the loop, beside the state and the accumulators."""
        epoch, batch = (self.epoch + 1, 0) if self.closed else (self.epoch, self.batch)
        return {"epoch": epoch, "batch": batch, "skipped": self.skipped, "data": self.data}


class Handler(Protocol):
    """Something that the loop calls. A handler may leave out any of these methods, and need not derive from this."""

    def on_start(self, state: LoopState) -> Next | None:
        """Called before the first step; raising here ends the run with nothing changed."""

    def on_step(self, state: LoopState) -> Next | None:
        """Called after each step that counted. Reading `state.metrics` waits for the device."""

    def on_validate(self, state: LoopState) -> Next | None:
        """Called after each validation, before `on_epoch`."""

    def on_epoch(self, state: LoopState) -> Next | None:
        """Called after each epoch, when its averages and validation are known."""

    def on_stop(self, state: LoopState) -> Next | None:
        """Called once for every handler that was started, also when the run fails; `state.stopped` says why."""


def check_handlers(handlers: Iterable[object]) -> None:
    """Refuses what the loop would never call.

    Raises:
        TypeError: if an object has none of the events' methods, or one `on_…` that is no event.
    """
    for handler in handlers:
        name = type(handler).__name__
        if isinstance(handler, type):
            raise TypeError(f"expected a handler, got the class {handler.__name__}: make one, {handler.__name__}(...)")
        named = [attribute for attribute in dir(handler) if attribute.startswith("on_")]
        unknown = [attribute for attribute in named if attribute not in EVENTS]
        if unknown:
            raise TypeError(f"handler {name} has {', '.join(unknown)}, but the events are {', '.join(EVENTS)}")
        if not named:
            raise TypeError(f"handler {name} has none of the methods {', '.join(EVENTS)}")
