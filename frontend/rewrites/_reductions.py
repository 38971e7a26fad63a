"""Sums over several axes, the last one first.

Stands against IREE failing to compile the sum over all axes of a matrix times a row: `jnp.sum(a * w)` gives
"'vector.contract' op invalid accumulator/result vector shape".
"""

from __future__ import annotations

from typing import Any

from jax import lax

from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule


@rule(lax.reduce_sum_p)
def sum_over_axes(x: Array, *, axes: tuple[int, ...], **params: Any) -> Array | None:
    """A sum over the last axis and others."""
    last = x.ndim - 1
    if len(axes) < 2 or last not in axes or x.shape[last] == 1:
        return None
    first = lax.reduce_sum_p.bind(x, axes=(last,), **params)
    return lax.reduce_sum_p.bind(first, axes=tuple(axis for axis in axes if axis != last), **params)
