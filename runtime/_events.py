"""The loop's events: what it tells its handlers, and what they may answer. `docs/loop.md` shows them in order."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fixstep.runtime._filters import Filter, after, always, before, every, once

if TYPE_CHECKING:
    from fixstep.runtime._metrics import Metrics
    from fixstep.runtime._session import Session

IN_EPOCH = ("epoch_started", "iteration_started", "iteration_completed")
"""The events at which an epoch can be halted."""

EVENTS = ("started", *IN_EPOCH, "validated", "epoch_completed", "epoch_halted", "halted", "completed", "stopped")


class Next(enum.Enum):
    """A handler's answer; None is CONTINUE."""

    CONTINUE = "continue"
    HALT_EPOCH = "halt_epoch"
    HALT_LOOP = "halt_loop"


CONTINUE = Next.CONTINUE
HALT_EPOCH = Next.HALT_EPOCH
"""End this epoch, without its validation, after this event: `epoch_halted` fires, and the next epoch begins."""
HALT_LOOP = Next.HALT_LOOP
"""End the run after this event: `halted` fires."""


@dataclasses.dataclass(kw_only=True)
class LoopState:
    """Where the loop stands; handlers read it.

    Attributes:
        session: the session that is trained.
        epochs: the epochs of the whole run.
        epoch: the epoch that runs, from 1.
        batch: how many of its batches were gone through, skipped ones too.
        iteration: the same since the start of the run, over all epochs.
        batches_per_epoch: how many batches an epoch has, where the data says so.
        left_out: examples that each epoch leaves out because they do not fill a batch.
        validates: whether there is validation data.
        validation_left_out: examples that each validation leaves out.
        metrics: those of the last step, still on the device.
        averages: each metric's mean over the last epoch that ended (of the epoch so far, when the run ends inside one).
        validation: the same over the validation data, from the last validation; empty before the first.
        validations: how many validations there were.
        validated_at: the value of `steps` at the last one; -1 before the first.
        values: further numbers to log, by name, from handlers that offer some; call one to read it.
        steps_per_second: of this run's part of the last epoch that ended, without validation and checkpoints.
        skipped: batches whose step was undone because the watched metric was not finite.
        skipped_in_epoch: the same in this epoch.
        skipped_in_a_row: the same since the last step that counted.
        resume: whether the run was asked to resume.
        begun: whether `epoch_started` has fired for this epoch.
        halting: whether a handler has asked to end the epoch.
        trained: whether the epoch's batches are through: what comes is its validation and its end.
        closed: whether the epoch is over, so that a checkpoint stands at the start of the next.
        stopped: why the run ends, once that is known.
        checkpoint: the newest checkpoint that this run wrote or started from.
        data: what the order of the batches depends on.
    """

    session: Session
    epochs: int
    epoch: int = 1
    batch: int = 0
    iteration: int = 0
    batches_per_epoch: int | None = None
    left_out: int = 0
    validates: bool = False
    validation_left_out: int = 0
    metrics: Metrics | None = None
    averages: dict[str, float] = dataclasses.field(default_factory=dict)
    validation: dict[str, float] = dataclasses.field(default_factory=dict)
    validations: int = 0
    validated_at: int = -1
    values: dict[str, Callable[[], float]] = dataclasses.field(default_factory=dict)
    steps_per_second: float = 0.0
    skipped: int = 0
    skipped_in_epoch: int = 0
    skipped_in_a_row: int = 0
    resume: bool = False
    begun: bool = False
    halting: bool = False
    trained: bool = False
    closed: bool = False
    stopped: str | None = None
    checkpoint: Path | None = None
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    validator: Callable[[], object] | None = dataclasses.field(default=None, repr=False)
    positioner: Callable[[], dict[str, Any]] = dataclasses.field(default=dict, repr=False)

    @property
    def steps(self) -> int:
        """Steps since the state was made; a step that was undone does not count."""
        return self.session.steps

    @property
    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps of the loop and its handlers, beside the state and the accumulators."""
        return self.positioner()

    def validate(self) -> None:
        """Evaluate over the run's validation data, now: `validation` is new, and `validated` fires.

        Raises:
            RuntimeError: if the run has no validation data.
        """
        if self.validator is None:
            raise RuntimeError("there is no validation data: give some to the loop, run(data, validate=...)")
        self.validator()

    def number(self, event: str, *, per_epoch: bool = False) -> int:
        """The number of an event's present occurrence, from 1, in the whole run or in its epoch.

        It follows from where the loop is, so a resumed run numbers on. What happens to epochs has the epoch's number,
        and what happens once a run is number 1.
        """
        if event == "iteration_completed":  # a batch that was skipped was not completed
            return self.batch - self.skipped_in_epoch if per_epoch else self.iteration - self.skipped
        if event == "iteration_started":
            return (self.batch if per_epoch else self.iteration) + 1
        if event == "validated":
            return self.validations
        return self.epoch if event.startswith("epoch_") else 1


class Handler(Protocol):
    """Something that the loop calls. A handler may leave out any of these methods, and need not derive from this.

    A handler that keeps something over the steps also has `state() -> dict`, which JSON can hold exactly, and
    `load_state(dict)`: checkpoints carry it, and a resumed run hands it back before `on_started`. A handler with
    numbers for the logs has `logged_values`, a mapping from name to a function of LoopState. A new run needs new
    handlers: they keep what they have seen.
    """

    def on_started(self, state: LoopState) -> Next | None:
        """Called first, in each process; raising here ends the run with nothing changed."""

    def on_epoch_started(self, state: LoopState) -> Next | None:
        """Called before the first batch of an epoch; not when a run is resumed in its middle."""

    def on_iteration_started(self, state: LoopState) -> Next | None:
        """Called before each step, with its batch at hand; halting here leaves that batch out."""

    def on_iteration_completed(self, state: LoopState) -> Next | None:
        """Called after each step that counted. Reading `state.metrics` waits for the device."""

    def on_validated(self, state: LoopState) -> Next | None:
        """Called after each validation; that of an epoch's end is before `epoch_completed`."""

    def on_epoch_completed(self, state: LoopState) -> Next | None:
        """Called after each whole epoch, when its averages and validation are known."""

    def on_epoch_halted(self, state: LoopState) -> Next | None:
        """Called instead of that when a handler ended the epoch."""

    def on_halted(self, state: LoopState) -> Next | None:
        """Called when the run ends early: a handler, a signal or the limit of steps; `state.stopped` says which."""

    def on_completed(self, state: LoopState) -> Next | None:
        """Called when all epochs are done."""

    def on_stopped(self, state: LoopState) -> Next | None:
        """Called last, once for every handler that was started, also when the run fails."""


class On:
    """Attaches a function to an event.

    Args:
        event: `started`, `epoch_started`, `iteration_started`, `iteration_completed`, `validated`, `epoch_completed`,
            `epoch_halted`, `halted`, `completed` or `stopped`.
        function: called with the loop's state; answers CONTINUE (or None), HALT_EPOCH or HALT_LOOP.
        when: a filter, such as `every(100)` or `once(3, per_epoch=True)`, or a function of the loop's state.

    Raises:
        ValueError: if there is no such event, or the filter counts what happens once an epoch within the epoch.
        TypeError: if the function or the filter is none.
    """

    def __init__(
        self,
        event: str,
        function: Callable[[LoopState], Next | None],
        *,
        when: Filter | Callable[[LoopState], object] = always,
    ) -> None:
        if event not in EVENTS:
            near = difflib.get_close_matches(str(event), EVENTS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"no event {event!r}{hint}; the events are {', '.join(EVENTS)}")
        if not callable(function):
            raise TypeError(f"{event}: expected a function of the loop's state, got {function!r:.60}")
        if not isinstance(when, Filter) and not callable(when):
            raise TypeError(
                f"{event}: expected a filter (always, first, every(n), after(n), before(n), once(n)) "
                f"or a function of the loop's state, got {when!r:.60}"
            )
        makers: tuple[object, ...] = (every, after, before, once)
        if when in makers:
            raise TypeError(f"{event}: the filter needs its number, such as {getattr(when, '__name__', '')}(10)")
        if isinstance(when, Filter) and when.per_epoch and not event.startswith("iteration_"):
            raise ValueError(f"{event}: per_epoch counts within an epoch, and {event} does not repeat in one")
        self.event = event
        self.function = function
        if isinstance(when, Filter):
            test = when.test()
            self._wanted: Callable[[LoopState], object] = lambda state: test(
                state.number(event, per_epoch=when.per_epoch)
            )
        else:
            self._wanted = when

    def call(self, state: LoopState) -> Next | None:
        """Call the function, if the filter lets the event's present occurrence through."""
        return self.function(state) if self._wanted(state) else None


Call = Callable[[LoopState], Next | None]


def calls(handler: object) -> dict[str, Call]:
    """What a handler has for each event that it listens to."""
    if isinstance(handler, On):
        return {handler.event: handler.call}
    return {event: getattr(handler, f"on_{event}") for event in EVENTS if hasattr(handler, f"on_{event}")}


def name_of(handler: object) -> str:
    """How messages call a handler."""
    if isinstance(handler, On):
        return getattr(handler.function, "__name__", type(handler.function).__name__)
    return type(handler).__name__


def check_handlers(handlers: Iterable[object]) -> None:
    """Refuse what the loop would never call, or could not save.

    Raises:
        TypeError: if an object listens to no event, has a method `on_…` that is no event's, or has `state` without
            `load_state`.
        ValueError: if two handlers log values of one name.
    """
    methods = ", ".join(f"on_{event}" for event in EVENTS)
    owners: dict[str, str] = {}
    for handler in handlers:
        name = name_of(handler)
        if isinstance(handler, type):
            raise TypeError(f"expected a handler, got the class {handler.__name__}: make one, {handler.__name__}(...)")
        named = [attribute for attribute in dir(handler) if attribute.startswith("on_")]
        unknown = [attribute for attribute in named if attribute.removeprefix("on_") not in EVENTS]
        if unknown:
            raise TypeError(f"handler {name} has {', '.join(unknown)}, but the events are {methods}")
        if not named and not isinstance(handler, On):
            hint = "; attach a function with On(event, function)" if callable(handler) else ""
            raise TypeError(f"handler {name} has none of the methods {methods}{hint}")
        if is_stateful(handler) != callable(getattr(handler, "state", None)):
            raise TypeError(f"handler {name} has state but no load_state: a resumed run could not hand it back")
        for offered in logged_values(handler):
            if offered in owners:
                raise ValueError(f"the handlers {owners[offered]} and {name} both log {offered!r}: name one otherwise")
            owners[offered] = name


def logged_values(handler: object) -> dict[str, Callable[[LoopState], float]]:
    """What a handler offers to the logs, by name."""
    return dict(getattr(handler, "logged_values", {}))


def is_stateful(handler: object) -> bool:
    """Whether checkpoints carry the handler's state."""
    return callable(getattr(handler, "state", None)) and callable(getattr(handler, "load_state", None))
