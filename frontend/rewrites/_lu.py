"""LU decomposition with partial pivoting.

Stands against IREE having no lowering of `lu`, which JAX computes in LAPACK. The pivot is LAPACK's: the first of the
largest magnitude, where a complex number counts as the sum of its parts' magnitudes.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import linalg

from fixstep.frontend.rewrites._matrix import column, columns, flat, is_complex, loop, row, rows, unflat, zeros
from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule


@rule(linalg.lu_p)
def lu(a: Array) -> tuple[Array, Array, Array]:
    """L below the diagonal and U on and above it, the rows exchanged in turn, and the permutation they make."""
    factors, pivots, permutation = factor(flat(a))
    return unflat(factors, a), unflat(pivots, a), unflat(permutation, a)


@rule(linalg.lu_pivots_to_permutation_p)
def permutation_of_pivots(pivots: Array, *, permutation_size: int) -> Array:
    """The permutation that exchanging rows in turn makes."""
    exchanged = flat(pivots, 1)
    count = exchanged.shape[-1]
    start = lax.broadcasted_iota(np.int32, (exchanged.shape[0], permutation_size), 1)

    def turn(k: Array, order: Array) -> Array:
        return _exchange(order, k, column(exchanged, k), 1)

    return unflat(loop(count, turn, start) if start.size else start, pivots, 1)


def factor(a: Array) -> tuple[Array, Array, Array]:
    """The same of matrices of shape (batch, m, n)."""
    batch, m, n = a.shape
    count = min(m, n)
    pivots = lax.full((batch, count), 0, np.dtype(np.int32))
    order = lax.broadcasted_iota(np.int32, (batch, m), 1)
    if a.size == 0:
        return a, pivots, order

    def turn(k: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        a, pivots, order = carry
        chosen = _pivot(column(a, k), k)
        a = _exchange(a, k, chosen[:, :, None], 1)
        head = column(a, k)
        pivot = row(head, k)
        nonzero = pivot != zeros(pivot)
        scaled = jnp.where(nonzero, head / jnp.where(nonzero, pivot, lax.full_like(pivot, 1)), head)
        below = jnp.where(rows(head) > k, scaled, zeros(head))
        right = jnp.where(columns(row(a, k)) > k, row(a, k), lax.full_like(row(a, k), 0))
        a = a - below * right
        a = jnp.where((columns(a) == k) & (rows(a) > k), below, a)
        pivots = jnp.where(lax.broadcasted_iota(np.int32, pivots.shape, 1) == k, chosen, pivots)
        return a, pivots, _exchange(order, k, chosen, 1)

    return loop(count, turn, (a, pivots, order))  # type: ignore[no-any-return]


def _pivot(head: Array, k: Array) -> Array:
    """The row of the largest element of a column from row k on, of shape (batch, 1)."""
    size = jnp.abs(lax.real(head)) + jnp.abs(lax.imag(head)) if is_complex(head) else jnp.abs(head)
    size = jnp.where(rows(head) >= k, size, lax.full_like(size, -1))
    largest = jnp.max(size, axis=1, keepdims=True)
    where = jnp.where(size == largest, rows(head), lax.full_like(rows(head), head.shape[1]))
    # Where the largest is NaN nothing equals it: then no rows are exchanged.
    found = jnp.min(where, axis=1)
    return jnp.where(found < head.shape[1], found, lax.full_like(found, k))


def _exchange(x: Array, k: Array, chosen: Array, axis: int) -> Array:
    """Exchange index k of an axis with one chosen for each member of the batch."""
    index = lax.broadcasted_iota(np.int32, x.shape, axis)
    upper = lax.dynamic_slice_in_dim(x, k, 1, axis)
    lower = jnp.sum(jnp.where(index == chosen, x, zeros(x)), axis=axis, keepdims=True, dtype=x.dtype)
    return jnp.where(index == k, lower, jnp.where(index == chosen, upper, x))
