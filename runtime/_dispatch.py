"""Calling the handlers: in their order, each event once, their answers, their states, and what ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fixstep.runtime._checkpoints import Checkpoints
from fixstep.runtime._events import EVENTS, IN_EPOCH, Call, LoopState, Next, calls, is_stateful, logged_values, name_of
from fixstep.targets.errors import CheckpointError


class Handlers:
    """The handlers of one run, `Checkpoints` last; `state` is what they are called with."""

    def __init__(self, handlers: Iterable[object], state: LoopState) -> None:
        everybody = list(handlers)
        self.state = state
        self.checkpoints = [handler for handler in everybody if isinstance(handler, Checkpoints)]
        self.others = [handler for handler in everybody if not isinstance(handler, Checkpoints)]
        self._started: list[object] = []
        self._table: dict[tuple[str, bool], list[tuple[str, Call]]] = {
            (event, last): [(name_of(h), calls(h)[event]) for h in group if event in calls(h)]
            for event in EVENTS
            for last, group in ((False, self.others), (True, self.checkpoints))
        }
        # Every step asks for these two, so they are looked up once.
        self.iteration_started = self._caller("iteration_started")
        self.iteration_completed = self._caller("iteration_completed")
        for handler in everybody:
            for name, read in logged_values(handler).items():
                state.values[name] = _reader(read, state)

    def _caller(self, event: str) -> Callable[[], None]:
        table, state = self._table[event, False] + self._table[event, True], self.state

        def fire() -> None:
            for name, call in table:
                answer = call(state)
                if answer is not None:
                    self._answered(event, name, answer)

        return fire

    def fire(self, event: str, *, to_checkpoints: bool = True, to_others: bool = True) -> None:
        """Call everybody who listens to an event."""
        chosen = (self._table[event, False] if to_others else []) + (self._table[event, True] if to_checkpoints else [])
        for name, call in chosen:
            self._answered(event, name, call(self.state))

    def _answered(self, event: str, name: str, answer: Any) -> None:
        if answer is Next.HALT_LOOP:
            self.state.stopped = self.state.stopped or name
        elif answer is Next.HALT_EPOCH and event in IN_EPOCH:
            self.state.halting = True
        elif answer is Next.HALT_EPOCH:
            raise TypeError(f"{name} answered HALT_EPOCH to {event}; only {', '.join(IN_EPOCH)} can halt an epoch")
        elif answer is not None and answer is not Next.CONTINUE:
            raise TypeError(f"{name} answered {answer!r} to {event}, expected None, CONTINUE, HALT_EPOCH or HALT_LOOP")

    def start(self) -> None:
        """Fire `started`. Checkpoints come first: where they refuse, nobody else has written anything."""
        for handler in (*self.checkpoints, *self.others):
            call = calls(handler).get("started")
            self._answered("started", name_of(handler), None if call is None else call(self.state))
            self._started.append(handler)

    def stop(self, exc: Exception | None) -> None:
        """Fire `stopped` for all that were started, also if some fail; `exc` is what ended the run.

        Raises:
            Exception: the first failure of a handler, if the run itself did not fail; the others are its notes.
        """
        failures: list[Exception] = []
        for handler in (*self.others, *self.checkpoints):
            call = calls(handler).get("stopped")
            if call is None or not any(handler is started for started in self._started):
                continue
            try:
                self._answered("stopped", name_of(handler), call(self.state))
            except Exception as failure:  # the others must still be stopped
                failures.append(failure)
        first = failures.pop(0) if exc is None and failures else None
        told = exc or first
        if told is not None:
            for other in failures:
                told.add_note(f"while stopping, this failed too: {type(other).__name__}: {other}")
        if first is not None:
            raise first

    def _stateful(self) -> dict[str, Any]:
        """The handlers that checkpoints carry, by name; the second of a kind is `Name#2`."""
        named: dict[str, Any] = {}
        for handler in (*self.others, *self.checkpoints):
            if is_stateful(handler):
                name, number = type(handler).__name__, 1
                while (key := name if number == 1 else f"{name}#{number}") in named:
                    number += 1
                named[key] = handler
        return named

    def states(self) -> dict[str, Any]:
        """What the handlers want back after a resume, by name."""
        return {name: handler.state() for name, handler in self._stateful().items()}

    def load_states(self, states: dict[str, Any]) -> list[str]:
        """Hand the states of a checkpoint back.

        Returns:
            A note for each handler that the checkpoint does not know, and for each state that nobody takes; none where
            there is nothing in it.

        Raises:
            CheckpointError: if a handler cannot take its state.
        """
        handlers = self._stateful()
        for name, handler in handlers.items():
            if name in states:
                try:
                    handler.load_state(states[name])
                except Exception as exc:  # a user's handler may raise anything
                    raise CheckpointError(
                        f"the handler {name} does not take its state from the checkpoint: {type(exc).__name__}: {exc}"
                    ) from exc
        missing = [name for name in handlers.keys() - states.keys() if handlers[name].state()]
        dropped = [name for name in states.keys() - handlers.keys() if states[name]]
        return sorted(
            [f"the checkpoint has no state of {name}, which begins anew" for name in missing]
            + [f"the checkpoint's state of {name} is dropped: no such handler" for name in dropped]
        )


def _reader(read: Callable[[LoopState], float], state: LoopState) -> Callable[[], float]:
    return lambda: read(state)
