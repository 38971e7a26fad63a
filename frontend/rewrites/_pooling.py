"""Derivatives of pooling by maximum or minimum, from shifted slices.

Stands against IREE having no lowering of `select_and_scatter` and of windows that reduce pairs. The element that a
window selects is found by going through the window's places in order, which keeps JAX's rule for ties (the first) and
for NaN (what comes after a NaN takes its place). What a place sends back is gathered rather than scattered: each
element of the operand asks the few windows that cover it whether they selected it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax.windowed_reductions import select_and_gather_add_p, select_and_scatter_add_p

from fixstep.frontend._extremes import highest, lowest
from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import Primitive, rule

# Windows of more places than this are gone through in a loop rather than written out.
_WRITTEN_OUT = 32


@rule(select_and_scatter_add_p)
def select_and_scatter_add(
    source: Array,
    operand: Array,
    *,
    select_prim: Primitive,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Array:
    """The gradient of pooling: each element of the source goes to the place that its window selects."""
    padded = lax.pad(operand, _worst(select_prim, operand.dtype), [(low, high, 0) for low, high in padding])
    windows = _Windows(window_dimensions, window_strides, [1] * operand.ndim, source.shape)

    def visit(place: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        best, chosen = carry
        key = windows.at(padded, place)
        keep = lax.bitwise_and(select_prim.bind(best, key), lax.ne(chosen, lax.full_like(chosen, -1)))
        return lax.select(keep, best, key), lax.select(keep, chosen, lax.full_like(chosen, place))

    start = (lax.full(source.shape, 0, operand.dtype), lax.full(source.shape, -1, np.dtype(np.int32)))
    _, chosen = _fold(windows.count, visit, start)
    return _send_back(source, chosen, operand.shape, windows, [low for low, _ in padding])


@rule(select_and_gather_add_p)
def select_and_gather_add(
    tangents: Array,
    operand: Array,
    *,
    select_prim: Primitive,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> Array:
    """The tangent of pooling: of each window the tangent of the element that it selects."""
    margin = [(low, high, step - 1) for (low, high), step in zip(padding, base_dilation, strict=True)]
    worst = _worst(select_prim, operand.dtype)
    keys = lax.pad(operand, worst, margin)
    values = lax.pad(tangents, np.zeros((), tangents.dtype), margin)
    real = None
    if any(low or high or step for low, high, step in margin):
        real = lax.pad(lax.full(operand.shape, True), np.zeros((), np.bool_), margin)
    shape = [
        (keys.shape[d] - (n - 1) * window_dilation[d] - 1) // window_strides[d] + 1 if n > 1 or window_strides[d] > 1
        else keys.shape[d]
        for d, n in enumerate(window_dimensions)
    ]  # fmt: skip
    windows = _Windows(window_dimensions, window_strides, window_dilation, shape)

    def visit(place: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        best, value = carry
        key = windows.at(keys, place)
        keep = select_prim.bind(best, key)
        if real is not None:  # padding is passed over, even where the best so far is NaN
            keep = lax.bitwise_or(keep, lax.bitwise_not(windows.at(real, place)))
        return lax.select(keep, best, key), lax.select(keep, value, windows.at(values, place))

    start = (lax.full(shape, worst, operand.dtype), lax.full(shape, 0, tangents.dtype))
    return _fold(windows.count, visit, start)[1]


class _Windows:
    """The windows of a padded array, one for each element of the result."""

    def __init__(
        self, lengths: Sequence[int], strides: Sequence[int], dilation: Sequence[int], shape: Sequence[Any]
    ) -> None:
        self.lengths, self.strides, self.dilation, self.shape = lengths, strides, dilation, shape
        self.count = math.prod(lengths)

    def at(self, padded: Array, place: Any) -> Array:
        """The element at one place of every window; places are numbered in row-major order."""
        starts = [index * step for index, step in zip(_unravel(place, self.lengths), self.dilation, strict=True)]
        spans = [
            padded.shape[d] if self.lengths[d] == 1 and self.strides[d] == 1
            else (self.shape[d] - 1) * self.strides[d] + 1
            for d in range(padded.ndim)
        ]  # fmt: skip
        part = _slice(padded, starts, spans)
        return lax.slice(part, [0] * part.ndim, part.shape, list(self.strides))


def _send_back(source: Array, chosen: Array, shape: Sequence[Any], windows: _Windows, low: Sequence[int]) -> Array:
    """The sum, for each element of the operand, of the sources whose windows selected it.

    Element i of the padded operand is at place i - s w of window w. With i = s b + r the windows that cover it are
    w = b - q, at place s q + r, for q from 0 to the length over the stride: so the operand is seen as blocks of s.
    """
    strides, lengths, ndim = windows.strides, windows.lengths, source.ndim
    reach = [-(-lengths[d] // strides[d]) for d in range(ndim)]
    margin = [(n - 1, n - 1, 0) for n in reach]
    wide_source = lax.pad(source, np.zeros((), source.dtype), margin)
    wide_chosen = lax.pad(chosen, np.array(-1, np.int32), margin)
    spans = [n + reach[d] - 1 if reach[d] > 1 else n for d, n in enumerate(source.shape)]
    blocks = [part for d in range(ndim) for part in ((spans[d], strides[d]) if strides[d] > 1 else (spans[d],))]
    axes = [d + sum(n > 1 for n in strides[:d]) for d in range(ndim)]

    def visit(number: Any, carry: tuple[Array]) -> tuple[Array]:
        back = _unravel(number, reach)
        starts = [reach[d] - 1 - back[d] for d in range(ndim)]
        place: Any = 0
        beyond: Any = False
        for d in range(ndim):
            within = back[d] * strides[d]
            if strides[d] > 1:
                within = within + lax.broadcasted_iota(np.int32, blocks, axes[d] + 1)
                beyond = beyond | (within >= lengths[d])
            place = place * lengths[d] + within
        place = jnp.where(beyond, -2, place)  # such a place has the number of another one
        covered = lax.broadcast_in_dim(_slice(wide_chosen, starts, spans), blocks, axes)
        sent = lax.broadcast_in_dim(_slice(wide_source, starts, spans), blocks, axes)
        selected = lax.eq(covered, jnp.broadcast_to(place.astype(np.int32), blocks))
        return (lax.add(carry[0], lax.select(selected, sent, lax.full_like(sent, 0))),)

    (total,) = _fold(math.prod(reach), visit, (lax.full(blocks, 0, source.dtype),))
    total = lax.reshape(total, [spans[d] * strides[d] if strides[d] > 1 else spans[d] for d in range(ndim)])
    ends = [
        (-low[d], low[d] + shape[d] - total.shape[d], 0) if low[d] or lengths[d] > 1 or strides[d] > 1 else (0, 0, 0)
        for d in range(ndim)
    ]
    return lax.pad(total, np.zeros((), source.dtype), ends)


def _fold(count: int, visit: Callable[[Any, Any], Any], start: Any) -> Any:
    """Visit 0 to count - 1, written out where that is short."""
    if count > _WRITTEN_OUT:
        return lax.fori_loop(np.int32(0), np.int32(count), visit, start)
    for number in range(count):
        start = visit(number, start)
    return start


def _unravel(number: Any, lengths: Sequence[int]) -> list[Any]:
    """A place by dimension, from its number in row-major order."""
    indices: list[Any] = []
    for length in reversed(lengths):
        if length == 1:
            indices.append(0)
        elif isinstance(number, int):
            number, index = divmod(number, length)
            indices.append(index)
        else:
            indices.append(lax.rem(number, np.int32(length)))
            number = lax.div(number, np.int32(length))
    return indices[::-1]


def _slice(x: Array, starts: Sequence[Any], spans: Sequence[Any]) -> Array:
    if all(isinstance(start, int) for start in starts):
        return lax.slice(x, starts, [start + span for start, span in zip(starts, spans, strict=True)])
    return lax.dynamic_slice(x, [jnp.asarray(start, np.int32) for start in starts], spans)


def _worst(select_prim: Primitive, dtype: np.dtype[Any]) -> Any:
    """What every other value is selected before."""
    return dtype.type((lowest if select_prim is lax.ge_p else highest)(dtype))
