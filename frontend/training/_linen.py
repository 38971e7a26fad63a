"""Flax linen modules."""

from __future__ import annotations

import inspect
from typing import Any

import jax
from flax import linen

from fixstep.frontend.training._models import Model, mode_of
from fixstep.targets.errors import ProgramError


def linen_model(module: linen.Module, example: Any, variables: Any) -> Model:
    """The model of a linen module: collections other than `params` are its state.

    A module that takes one of `train`, `training`, `deterministic`, `use_running_average` is told in which mode it is.

    Args:
        module: the module; called with the inputs.
        example: inputs, for `module.init`.
        variables: the first variables, `{"params": ..., ...}`, or a function of a key; made by the module where it is
            None.
    """
    names = frozenset(inspect.signature(module.__call__).parameters) if callable(module) else frozenset()

    def init(key: Any) -> tuple[Any, Any]:
        if variables is None:
            # The mode in which no module needs a key for dropout; the statistics are made all the same.
            made = module.init(key, example, **mode_of(names, training=False))
        else:
            made = variables(key) if callable(variables) else variables
        if not hasattr(made, "keys") or (made and "params" not in made):
            raise ProgramError(f"model: expected first variables {{'params': ...}} of the module, got {made!r:.80}")
        collections = dict(made)
        return collections.pop("params", {}), collections

    def apply(params: Any, state: Any, inputs: Any, key: Any, training: bool) -> tuple[Any, Any]:
        streams = {} if key is None else {"dropout": key, "params": jax.random.fold_in(key, 0)}
        options = mode_of(names, training)
        mutable = sorted(state) if training else []
        if not mutable:
            return module.apply({"params": params, **state}, inputs, rngs=streams, **options), state
        prediction, changed = module.apply(
            {"params": params, **state}, inputs, rngs=streams, mutable=mutable, **options
        )
        return prediction, {**state, **changed}

    return Model(init, apply, given=variables is not None and not callable(variables))
