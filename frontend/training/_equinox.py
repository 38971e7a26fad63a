"""Equinox modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from fixstep.frontend.training._models import Model

# The name of the batch's axis, for layers that average over the batch.
AXIS = "batch"


def equinox_model(make: Callable[[Any], Any], *, given: bool) -> Model:
    """The model of an Equinox module, which is applied to each example of a batch (`jax.vmap`, the axis is `batch`).

    Args:
        make: `make(key) -> module`, or `-> (module, state)` as `eqx.nn.make_with_state` gives them.
        given: whether it returns the same module, with its values, whatever the key.
    """

    def parts(key: Any) -> tuple[Any, Any, Any]:
        made = make(key)
        module, state = made if isinstance(made, tuple) else (made, None)
        arrays, static = eqx.partition(module, eqx.is_array)
        return arrays, static, state

    # What is no array, and how the state is put together, is known once they have been made abstractly.
    structure: list[Any] = []

    def look(key: Any) -> int:
        _, static, state = parts(key)
        structure[:] = [static, jax.tree.structure(state)]
        return 0

    jax.eval_shape(look, jax.random.key(0))
    static, state_tree = structure

    def init(key: Any) -> tuple[Any, Any]:
        arrays, _, state = parts(key)
        return arrays, jax.tree.leaves(state)

    def apply(params: Any, state: Any, inputs: Any, key: Any, training: bool) -> tuple[Any, Any]:
        module = eqx.combine(params, static)
        if not training:
            module = eqx.nn.inference_mode(module)
        takes_key = "key" in inspect.signature(type(module).__call__).parameters
        keys = jax.random.split(key, jax.tree.leaves(inputs)[0].shape[0]) if takes_key and key is not None else None

        def one(example: Any, key: Any, state: Any) -> Any:
            options = {"key": key} if takes_key else {}
            return module(example, state, **options) if state_tree.num_leaves else (module(example, **options), None)

        whole = jax.tree.unflatten(state_tree, state)
        prediction, after = jax.vmap(one, axis_name=AXIS, in_axes=(0, 0, None), out_axes=(0, None))(inputs, keys, whole)
        return prediction, jax.tree.leaves(after) if training else state

    return Model(init, apply, given)
