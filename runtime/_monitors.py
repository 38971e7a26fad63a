"""Handlers that follow a metric: stop early, lower a value on a plateau, halt on what is not finite."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, Literal

from fixstep.runtime._events import HALT_LOOP, LoopState, Next
from fixstep.runtime._leaves import number_leaf, read_number, write_number
from fixstep.runtime._monitor import VALIDATION, Monitor, check_metrics, metric_names


class EarlyStop:
    """Ends the run when a metric has not improved for a while.

    A value that is not finite is no improvement; what comes after it is compared with the best finite value. A resumed
    run remembers; one that had stopped early stops again at once, unless it was given more patience.

    Args:
        metric: `loss` is looked at after each epoch, `validation/loss` after each validation.
        patience: how many times in a row it may be no better; at the last of them the run ends.
        min_delta: an improvement is better than the best by more than this.
        mode: whether less is better (`min`) or more (`max`).

    Raises:
        ValueError: if a number is out of range or the mode is neither.
    """

    def __init__(
        self, metric: str, *, patience: int = 5, min_delta: float = 0.0, mode: Literal["min", "max"] = "min"
    ) -> None:
        self._monitor = Monitor(metric, mode=mode, min_delta=min_delta)
        self._patience = _count("patience", patience, 1)
        self._waited = 0

    def state(self) -> dict[str, Any]:
        """The best value, and how often in a row there was none better."""
        return {**self._monitor.state(), "waited": self._waited}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave; of another metric nothing."""
        if state["metric"] == self._monitor.metric:
            self._monitor.load_state(state)
            self._waited = int(state["waited"])

    def on_started(self, state: LoopState) -> Next | None:
        """Refuses a metric that the run does not have; ends a resumed run that had ended early."""
        self._monitor.check(state)
        return self._answer()

    def on_validated(self, state: LoopState) -> Next | None:
        """Looks at a metric of the validation."""
        return self._look(state) if self._monitor.of_validation else None

    def on_epoch_completed(self, state: LoopState) -> Next | None:
        """Looks at an average over the epoch."""
        return None if self._monitor.of_validation else self._look(state)

    def _look(self, state: LoopState) -> Next | None:
        self._waited = 0 if self._monitor.improves(self._monitor.value(state)) else self._waited + 1
        return self._answer()

    def _answer(self) -> Next | None:
        return HALT_LOOP if self._waited >= self._patience else None


class ReduceOnPlateau:
    """Multiplies a number in the state, such as the learning rate, by a factor when a metric stops improving.

    The number is a leaf of the state, as `optax.inject_hyperparams` makes one; nothing is compiled again.

    Args:
        path: the leaf path, `opt_state/hyperparams/learning_rate`.
        metric: `loss` is looked at after each epoch, `validation/loss` after each validation.
        factor: between 0 and 1.
        patience: how many times in a row the metric may be no better; at the last of them the number is reduced.
        min_delta: an improvement is better than the best by more than this.
        mode: whether less is better (`min`) or more (`max`).
        cooldown: how many times it then looks without counting.
        minimum: below this the number never goes.

    Raises:
        ValueError: if a number is out of range or the mode is neither.
    """

    def __init__(
        self,
        path: str,
        metric: str,
        *,
        factor: float = 0.1,
        patience: int = 5,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        cooldown: int = 0,
        minimum: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"factor: expected a number between 0 and 1, got {factor!r}")
        if not (math.isfinite(minimum) and minimum >= 0):
            raise ValueError(f"minimum: expected a number from 0, got {minimum!r}")
        self._path = path
        self._monitor = Monitor(metric, mode=mode, min_delta=min_delta)
        self._factor, self._minimum = factor, minimum
        self._patience, self._cooldown = _count("patience", patience, 1), _count("cooldown", cooldown, 0)
        self._waited, self._cooling = 0, 0

    def state(self) -> dict[str, Any]:
        """The best value, how often in a row there was none better, and how long it still cools down."""
        return {**self._monitor.state(), "waited": self._waited, "cooling": self._cooling}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave; of another metric nothing."""
        if state["metric"] == self._monitor.metric:
            self._monitor.load_state(state)
            self._waited, self._cooling = int(state["waited"]), int(state["cooling"])

    def on_started(self, state: LoopState) -> None:
        """Refuses a metric or a leaf that is not there."""
        self._monitor.check(state)
        number_leaf(state.session, self._path)

    def on_validated(self, state: LoopState) -> None:
        """Looks at a metric of the validation."""
        if self._monitor.of_validation:
            self._look(state)

    def on_epoch_completed(self, state: LoopState) -> None:
        """Looks at an average over the epoch."""
        if not self._monitor.of_validation:
            self._look(state)

    def _look(self, state: LoopState) -> None:
        better = self._monitor.improves(self._monitor.value(state))
        if self._cooling > 0:
            self._cooling, self._waited = self._cooling - 1, 0
            return
        self._waited = 0 if better else self._waited + 1
        if self._waited >= self._patience:
            self._waited, self._cooling = 0, self._cooldown
            old = read_number(state.session, self._path)
            if old > self._minimum:
                write_number(state.session, self._path, max(old * self._factor, self._minimum))


class HaltOnNonFinite:
    """Ends the run, without an exception, when a metric became infinite or NaN. Checkpoints hold it as it then is.

    The loop's own `on_nonfinite` undoes the step instead, so that the state stays good.

    Args:
        metrics: which; by default all of the step and of the validation that are one number.
        every: steps between looks inside an epoch (each reads the metrics, which waits for the device); averages and
            validations are always looked at.

    Raises:
        ValueError: if `every` is below 1.
    """

    def __init__(self, metrics: Iterable[str] | None = None, *, every: int = 1) -> None:
        self._wanted = None if metrics is None else tuple(metrics)
        self._every = _count("every", every, 1)
        self._names: list[str] = []

    def on_started(self, state: LoopState) -> None:
        """Refuses metrics that the run does not have."""
        self._names = metric_names(state) if self._wanted is None else list(self._wanted)
        check_metrics(state, self._names)

    def on_iteration_completed(self, state: LoopState) -> Next | None:
        """Looks at the step's metrics."""
        if state.steps % self._every or state.metrics is None:
            return None
        metrics = state.metrics
        return self._look({name: float(metrics[name]) for name in self._names if name in metrics}, state)

    def on_validated(self, state: LoopState) -> Next | None:
        """Looks at the validation."""
        return self._look({f"{VALIDATION}{name}": value for name, value in state.validation.items()}, state)

    def on_epoch_completed(self, state: LoopState) -> Next | None:
        """Looks at the averages."""
        return self._look(state.averages, state)

    def _look(self, values: dict[str, float], state: LoopState) -> Next | None:
        bad = [f"{n} is {values[n]}" for n in self._names if not math.isfinite(values.get(n, 0.0))]
        if not bad:
            return None
        print(f"fixstep: halts after step {state.steps}: {', '.join(bad)}", file=sys.stderr)
        return HALT_LOOP


def _count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return value
