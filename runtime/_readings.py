"""Handlers that offer further numbers to the logs: a number of the state, and times."""

from __future__ import annotations

import time
from collections.abc import Callable

from fixstep.runtime._events import LoopState
from fixstep.runtime._leaves import number_leaf, read_number

_WINDOW_S = 1.0


class StateNumber:
    """Logs one number of the state, such as the learning rate, wherever metrics are logged.

    Args:
        path: the leaf path, `opt_state/hyperparams/learning_rate`.
        name: its name in the logs; by default the last part of the path.
    """

    def __init__(self, path: str, *, name: str | None = None) -> None:
        self._path = path
        self.logged_values: dict[str, Callable[[LoopState], float]] = {name or path.rpartition("/")[2]: self._read}

    def on_started(self, state: LoopState) -> None:
        """Refuses a leaf that is not there.

        Raises:
            TemplateError: if the state has no such leaf, or it is not one number.
        """
        number_leaf(state.session, self._path)

    def _read(self, state: LoopState) -> float:
        return read_number(state.session, self._path)


class Throughput:
    """Logs how fast the run is: `steps_per_second` over the last second or more, and `seconds` since the start.

    With `examples_per_step`, also `examples_per_second`. Times count what this process did; validation and checkpoints
    are part of them.

    Args:
        examples_per_step: the batch size.
    """

    def __init__(self, *, examples_per_step: int | None = None) -> None:
        self.logged_values: dict[str, Callable[[LoopState], float]] = {
            "steps_per_second": self._rate,
            "seconds": self._elapsed,
        }
        if examples_per_step is not None:
            self.logged_values["examples_per_second"] = lambda state: self._rate(state) * examples_per_step
        self._began_s = 0.0
        # The last two readings that are a second apart: a rate since the last one alone could be that of one step.
        self._marks = ((0.0, 0), (0.0, 0))

    def on_started(self, state: LoopState) -> None:
        """Starts the clock."""
        self._began_s = time.perf_counter()
        self._marks = ((self._began_s, state.steps),) * 2

    def _rate(self, state: LoopState) -> float:
        now = time.perf_counter()
        if now - self._marks[1][0] >= _WINDOW_S:
            self._marks = (self._marks[1], (now, state.steps))
        since_s, steps = self._marks[0]
        return (state.steps - steps) / max(now - since_s, 1e-9)

    def _elapsed(self, state: LoopState) -> float:
        return time.perf_counter() - self._began_s
