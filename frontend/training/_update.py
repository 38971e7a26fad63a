"""From gradients to new parameters: accumulated over calls, skipped on an overflow, in types that are wide enough."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from fixstep.frontend.training._precision import cast_like, widen
from fixstep.frontend.training._scale import DynamicScale, all_finite


class Optimizer(Protocol):
    """What is needed of an optimizer; an `optax.GradientTransformation` is one."""

    def init(self, params: Any, /) -> Any:
        """The optimizer's first state."""

    def update(self, updates: Any, state: Any, params: Any = None, /) -> Any:
        """The pair (updates to add to the parameters, new state)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """How gradients change the parts `params`, `opt_state`, `loss_scale` and `accumulated` of a state.

    Attributes:
        optimizer: the optimizer.
        scale: the loss scale.
        accumulate: over how many calls gradients are summed.
        wide: whether the optimizer works at least in float32, whatever the parameters' dtype.
    """

    optimizer: Optimizer
    scale: DynamicScale | float | None
    accumulate: int
    wide: bool

    def first(self, trained: Any) -> dict[str, Any]:
        """The parts of the first state, of the parameters that are trained."""
        parts: dict[str, Any] = {"opt_state": self.optimizer.init(widen(trained) if self.wide else trained)}
        if isinstance(self.scale, DynamicScale):
            parts["loss_scale"] = self.scale.first()
        if self.accumulate > 1:
            parts["accumulated"] = {
                "gradients": jax.tree.map(jnp.zeros_like, widen(trained)),
                "loss": jnp.float32(0),
                "examples": jnp.int32(0),
                "calls": jnp.int32(0),
            }
        return parts

    def factor(self, state: Any) -> Any:
        """What the loss is multiplied by before it is differentiated, or None."""
        return state["loss_scale"]["scale"] if isinstance(self.scale, DynamicScale) else self.scale

    def unscaled(self, gradients: Any, state: Any) -> Any:
        """The gradients of the loss itself, at least in float32 where there is a scale."""
        factor = self.factor(state)
        if factor is None:
            return gradients
        return jax.tree.map(lambda g: (g / jnp.asarray(factor, g.real.dtype)).astype(g.dtype), widen(gradients))

    def __call__(
        self, state: Any, trained: Any, gradients: Any, loss: Any, examples: Any, value: Callable[[Any], Any]
    ) -> tuple[Any, dict[str, Any]]:
        """The new parameters, and the new parts of the state.

        Args:
            state: the state before.
            trained: its parameters that are trained.
            gradients: of the mean loss of this call, unscaled.
            loss: that mean.
            examples: of how many examples, int32.
            value: the loss as a function of the parameters, for optimizers that search.
        """
        if self.accumulate == 1:
            return self._apply(state, trained, gradients, loss, None, value)
        sums = state["accumulated"]
        weight = examples.astype(jnp.float32)
        summed = {
            "gradients": jax.tree.map(
                lambda total, g: total + g.astype(total.dtype) * weight.astype(total.real.dtype),
                sums["gradients"],
                gradients,
            ),
            "loss": sums["loss"] + loss.astype(jnp.float32) * weight,
            "examples": sums["examples"] + examples,
            "calls": sums["calls"] + 1,
        }
        ready = summed["calls"] >= self.accumulate
        whole = summed["examples"].astype(jnp.float32)
        mean = jax.tree.map(lambda total: total / whole.astype(total.real.dtype), summed["gradients"])
        if not self.wide:
            mean = cast_like(mean, trained)
        params, parts = self._apply(state, trained, mean, summed["loss"] / whole, ready, None)
        parts["accumulated"] = jax.tree.map(lambda new: jnp.where(ready, jnp.zeros_like(new), new), summed)
        return params, parts

    def _apply(
        self, state: Any, trained: Any, gradients: Any, loss: Any, ready: Any, value: Callable[[Any], Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        """One update of the optimizer, which counts where the call is `ready` and the gradients are finite."""
        params, gradients = (widen(trained), widen(gradients)) if self.wide else (trained, gradients)
        more = self._more(gradients, loss, value)
        updates, opt_state = self.optimizer.update(gradients, state["opt_state"], params, **more)
        new = {"params": _added(trained, params, updates), "opt_state": opt_state}
        old = {"params": trained, "opt_state": state["opt_state"]}
        parts: dict[str, Any] = {}
        counts = ready
        if self.scale is not None:
            finite = all_finite(gradients)
            counts = finite if ready is None else ready & finite
            if isinstance(self.scale, DynamicScale):
                moved = self.scale.following(state["loss_scale"], finite)
                parts["loss_scale"] = moved if ready is None else choose(ready, moved, state["loss_scale"])
        kept = new if counts is None else choose(counts, new, old)
        return kept["params"], {"opt_state": kept["opt_state"], **parts}

    def _more(self, gradients: Any, loss: Any, value: Callable[[Any], Any] | None) -> dict[str, Any]:
        """What optimizers that look at the loss take besides (optax calls them transformations with extra args)."""
        kinds = [p.kind for p in inspect.signature(self.optimizer.update).parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return {}
        more = {"value": loss, "grad": gradients}
        return more if value is None else {**more, "value_fn": value}


def _added(trained: Any, params: Any, updates: Any) -> Any:
    """The sum of parameters and updates, each in its parameter's dtype."""
    return jax.tree.map(lambda old, p, u: jnp.asarray(p + u).astype(old.dtype), trained, params, updates)


def choose(condition: Any, new: Any, old: Any) -> Any:
    """The leaves of one of two trees; leaves that are no arrays are the new ones."""

    def chosen(new: Any, old: Any) -> Any:
        if not (hasattr(new, "dtype") or isinstance(new, bool | int | float | complex)):
            return new
        return jnp.where(condition, new, old)

    return jax.tree.map(chosen, new, old)
