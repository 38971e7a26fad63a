"""Flax nnx modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from fixstep.frontend.training._models import Model


def nnx_model(make: Callable[[Any], Any], *, given: bool) -> Model:
    """The model of an nnx module: variables other than `nnx.Param` are its state, its own keys for dropout too.

    Args:
        make: `make(key) -> module`.
        given: whether it returns the same module, with its values, whatever the key.
    """

    def parts(key: Any) -> tuple[Any, Any, Any]:
        graph, params, rest = nnx.split(make(key), nnx.Param, ...)
        return graph, params, rest

    # How the module is put together is known once it has been made abstractly.
    structure: list[Any] = []

    def look(key: Any) -> tuple[Any, Any]:
        graph, params, rest = parts(key)
        structure[:] = [graph]
        return params, rest

    like_params, like_rest = jax.eval_shape(look, jax.random.key(0))
    graph = structure[0]

    def init(key: Any) -> tuple[Any, Any]:
        _, params, rest = parts(key)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def apply(params: Any, state: Any, inputs: Any, key: Any, training: bool) -> tuple[Any, Any]:
        module = nnx.merge(graph, _filled(like_params, params), _filled(like_rest, state))
        if training:
            module.train()
        else:
            module.eval()
        prediction = module(inputs)
        if not training:
            return prediction, state
        return prediction, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))

    return Model(init, apply, given)


def _filled(like: Any, values: Any) -> Any:
    """An nnx state like another, with the values of a dict in it."""
    filled = jax.tree.map(lambda leaf: leaf, like)
    nnx.replace_by_pure_dict(filled, copy.copy(values))
    return filled
