"""Cumulative sums in blocks, and in float32 where the type is narrower.

Stands against IREE adding a cumulative sum up one element after the other in the type of the array: over 4,096 terms
bfloat16 is 88 % off where JAX is 1 % off, and a float32 sum over a million is 2e-5 off where JAX is 3e-7 off.
"""

from __future__ import annotations

import numpy as np
from jax import lax

from fixstep.frontend.rewrites._real import HALVES, Array
from fixstep.frontend.rewrites._rules import rule

_BLOCK = 128


@rule(lax.cumsum_p)
def cumulative_sum(x: Array, *, axis: int, reverse: bool) -> Array | None:
    """A cumulative sum of floats."""
    if x.dtype.name in HALVES:
        wide = _blocked(lax.convert_element_type(x, np.float32), axis, reverse)
        return lax.convert_element_type(wide, x.dtype)
    if x.dtype.kind != "f" or x.shape[axis] <= _BLOCK:
        return None
    return _blocked(x, axis, reverse)


def _blocked(x: Array, axis: int, reverse: bool) -> Array:
    """The sums within blocks, plus the cumulative sum of the blocks before each."""
    length = x.shape[axis]
    if length <= _BLOCK:
        return lax.cumsum(x, axis=axis, reverse=reverse)
    count = -(-length // _BLOCK)
    # Zeros go to the far end of the direction of summing.
    missing = count * _BLOCK - length
    margin = [(0, 0, 0)] * x.ndim
    margin[axis] = (missing, 0, 0) if reverse else (0, missing, 0)
    blocks = lax.pad(x, np.zeros((), x.dtype), margin)
    blocks = lax.reshape(blocks, (*x.shape[:axis], count, _BLOCK, *x.shape[axis + 1 :]))
    within = lax.cumsum(blocks, axis=axis + 1, reverse=reverse)
    edge = 0 if reverse else _BLOCK - 1
    totals = lax.index_in_dim(within, edge, axis + 1, keepdims=False)
    before = (
        lax.slice_in_dim(totals, 1, count, axis=axis) if reverse else lax.slice_in_dim(totals, 0, count - 1, axis=axis)
    )
    before = _blocked(before, axis, reverse)
    shift = [(0, 0, 0)] * x.ndim
    shift[axis] = (0, 1, 0) if reverse else (1, 0, 0)
    before = lax.pad(before, np.zeros((), x.dtype), shift)
    kept = [d for d in range(blocks.ndim) if d != axis + 1]
    summed = lax.add(within, lax.broadcast_in_dim(before, within.shape, kept))
    summed = lax.reshape(summed, (*x.shape[:axis], count * _BLOCK, *x.shape[axis + 1 :]))
    start = missing if reverse else 0
    return lax.slice_in_dim(summed, start, start + length, axis=axis)
