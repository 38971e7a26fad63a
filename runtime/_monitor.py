"""A metric that is watched for getting better."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from fixstep.runtime._events import LoopState
from fixstep.targets.errors import ProgramError

MODES = ("min", "max")
VALIDATION = "validation/"


class Monitor:
    """The best value of a metric so far.

    A value that is not finite is never an improvement, and never becomes the best: a finite one after it is compared
    with the best finite one before.

    Args:
        metric: `loss` is the average over each epoch, `validation/loss` that over each validation.
        mode: whether less is better (`min`) or more (`max`).
        min_delta: an improvement is better than the best by more than this.

    Raises:
        ValueError: if the mode is neither, or `min_delta` is negative or not finite.
    """

    def __init__(self, metric: str, *, mode: Literal["min", "max"] = "min", min_delta: float = 0.0) -> None:
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise ValueError(f"min_delta: expected a number from 0, got {min_delta!r}")
        self.metric = metric
        self.best: float | None = None
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = float(min_delta)

    def check(self, state: LoopState) -> None:
        """Refuse a metric that this run will never have.

        Raises:
            ProgramError: naming the metrics that there are.
        """
        check_metrics(state, [self.metric])

    @property
    def of_validation(self) -> bool:
        """Whether the metric is new after each validation; otherwise after each epoch."""
        return self.metric.startswith(VALIDATION)

    def value(self, state: LoopState) -> float:
        """The metric's present value; NaN if it has none."""
        if self.of_validation:
            return state.validation.get(self.metric.removeprefix(VALIDATION), math.nan)
        return state.averages.get(self.metric, math.nan)

    def improves(self, value: float) -> bool:
        """Whether a value is an improvement; if so, it is the best from now on."""
        if not math.isfinite(value):
            return False
        if self.best is not None and not self._sign * (self.best - value) > self._min_delta:
            return False
        self.best = value
        return True

    def state(self) -> dict[str, Any]:
        """The best value, for a checkpoint."""
        return {"metric": self.metric, "best": self.best}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave; the best of another metric is not taken."""
        if state["metric"] == self.metric:
            self.best = None if state["best"] is None else float(state["best"])


def metric_names(state: LoopState) -> list[str]:
    """The scalar metrics that a run has: those of a step, then those of its validation."""
    names = scalar_metrics(state, "step")
    if state.validates:
        names += [f"{VALIDATION}{name}" for name in scalar_metrics(state, "evaluate")]
    return names


def check_metrics(state: LoopState, wanted: Iterable[str]) -> None:
    """Refuse metrics that a run will never have.

    Raises:
        ProgramError: naming the metrics that there are.
    """
    names = metric_names(state)
    absent = [name for name in wanted if name not in names]
    if absent:
        without = "" if state.validates else " (there is no validation data)"
        raise ProgramError(
            f"no metric {', '.join(map(repr, absent))} to follow; there are {', '.join(names) or 'none'}{without}"
        )


def scalar_metrics(state: LoopState, function: str) -> list[str]:
    """The names of a function's metrics that are one number."""
    results = state.session.artifact.manifest["functions"][function]["results"]
    leaves = [leaf for result in results if result["role"] == "metrics" for leaf in result["leaves"]]
    return [leaf["path"] for leaf in leaves if not leaf["shape"]]
