"""Long sorts as a sorting network.

Stands against IREE sorting by exchange of neighbours, whose time grows with the square of the length (seconds for a
shuffle of 60,000), and which does not compile beyond 8,192 elements where a result is not used.

K. E. Batcher, Sorting networks and their applications (1968): log2(n) (log2(n) + 1) / 2 rounds, in each of which every
element is compared with one partner. The place that an element came from decides between equals, so the order is that
of a stable sort.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import ann
from jax._src.lax import lax as lax_internal

from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule

LONGEST_EXCHANGED = 512


@rule(lax.sort_p)
def sort(*operands: Array, dimension: int, is_stable: bool, num_keys: int) -> list[Array] | None:
    """A sort along a dimension that is too long to sort by exchange."""
    length = operands[0].shape[dimension]
    if length <= LONGEST_EXCHANGED or 0 in operands[0].shape:
        return None
    size = 1 << (length - 1).bit_length()
    moved = [jnp.moveaxis(operand, dimension, -1) for operand in operands]
    margin = [(0, 0, 0)] * (moved[0].ndim - 1) + [(0, size - length, 0)]
    padded = [lax.pad(operand, np.zeros((), operand.dtype), margin) for operand in moved]
    place = lax.broadcasted_iota(np.int32, padded[0].shape, padded[0].ndim - 1)
    rounds = [(1 << p, 1 << q) for p in range(1, size.bit_length()) for q in reversed(range(p))]
    spans, distances = (np.array(column, np.int32) for column in zip(*rounds, strict=True))

    def turn(number: Array, values: tuple[Array, ...]) -> tuple[Array, ...]:
        return _round(values, jnp.asarray(spans)[number], jnp.asarray(distances)[number], length, num_keys)

    *ordered, _ = lax.fori_loop(0, len(rounds), turn, (*padded, place))
    return [jnp.moveaxis(lax.slice_in_dim(o, 0, length, axis=-1), -1, dimension) for o in ordered]


def _round(values: tuple[Array, ...], span: Array, distance: Array, length: int, num_keys: int) -> tuple[Array, ...]:
    """Compare each element with the one at `distance`; each is to end up on its side, as the span's direction says."""
    last = values[0].ndim - 1
    position = lax.iota(np.int32, values[0].shape[last])
    partners = tuple(jnp.take(v, position ^ distance, axis=last, mode="clip") for v in values)
    first = _comes_first(values, partners, length, num_keys)
    lower = (position & distance) == 0
    ascending = (position & span) == 0
    keep = first == (lower == ascending)
    return tuple(jnp.where(keep, mine, other) for mine, other in zip(values, partners, strict=True))


def _comes_first(a: tuple[Array, ...], b: tuple[Array, ...], length: int, num_keys: int) -> Array:
    """Whether a comes before b: what pads the array comes last, and equals keep their places."""
    before, after = _less(a, b, num_keys), _less(b, a, num_keys)
    earlier = a[-1] < b[-1]
    real_a, real_b = a[-1] < length, b[-1] < length
    return jnp.where(real_a & real_b, before | (~after & earlier), earlier)


def _less(a: tuple[Array, ...], b: tuple[Array, ...], num_keys: int) -> Array:
    pairs: list[Any] = [v for pair in zip(a[:-1], b[:-1], strict=True) for v in pair]
    return lax_internal._sort_lt_comparator(*pairs, num_keys=num_keys)


@rule(lax.top_k_p)
def largest(operand: Array, *, k: int, axis: int, **_: Any) -> list[Array] | None:
    """The k largest along an axis that is too long to sort by exchange; NaN is largest, as in JAX."""
    if operand.shape[axis] <= LONGEST_EXCHANGED or 0 in operand.shape:
        return None
    # The bits of all numbers turned over sort from the largest to the smallest.
    keys = lax.bitwise_not(_ordered_bits(operand))
    places = lax.broadcasted_iota(np.int32, operand.shape, axis)
    _, values, indices = sort(keys, operand, places, dimension=axis, is_stable=True, num_keys=1) or []
    return [lax.slice_in_dim(v, 0, k, axis=axis) for v in (values, indices)]


@rule(ann.approx_top_k_p)
def approximately_largest(
    operand: Array, *, k: int, reduction_dimension: int, is_max_k: bool, aggregate_to_topk: bool, **_: Any
) -> list[Array] | None:
    """`approx_max_k` and `approx_min_k`, exactly, as JAX has them on every device but a TPU."""
    if not aggregate_to_topk:
        return None
    axis = reduction_dimension % operand.ndim
    turned = operand if is_max_k else -operand
    values, indices = largest(turned, k=k, axis=axis) or lax.top_k(turned, k, axis=axis)
    return [values if is_max_k else -values, indices]


def _ordered_bits(x: Array) -> Array:
    """Integers in the order of the numbers: of floats the total order of IEEE 754."""
    if not jnp.issubdtype(x.dtype, np.floating):
        return x
    width = 8 * x.dtype.itemsize
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{width}"))
    sign = lax.shift_right_arithmetic(bits, lax.full_like(bits, width - 1))
    return lax.bitwise_xor(bits, lax.bitwise_and(sign, lax.full_like(bits, (1 << (width - 1)) - 1)))
