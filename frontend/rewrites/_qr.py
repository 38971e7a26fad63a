"""QR decomposition by Householder reflections.

Stands against IREE having no lowering of what JAX computes in LAPACK (geqrf, orgqr, ormqr, geqp3). The reflections
are LAPACK's, so R's diagonal has LAPACK's signs: a column that is zero below the diagonal is not reflected.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import linalg

from fixstep.frontend.rewrites._matrix import (
    adjoint,
    as_type_of,
    column,
    columns,
    flat,
    identity,
    is_complex,
    larger_part,
    loop,
    lower_part,
    product,
    row,
    rows,
    square,
    unflat,
    upper_part,
    zeros,
)
from fixstep.frontend.rewrites._real import Array, copy_sign
from fixstep.frontend.rewrites._rules import rule


@rule(linalg.qr_p)
def qr(a: Array, *, pivoting: bool, full_matrices: bool, use_magma: bool | None) -> tuple[Array, ...] | None:
    """Q and R, and the order of the columns where pivoting is asked for."""
    m, n = a.shape[-2:]
    if m == 0 or n == 0:
        return None
    reflectors, taus, order = factor(flat(a), pivoting=pivoting)
    wide = m if full_matrices else min(m, n)
    q = multiply(reflectors, taus, identity(reflectors, m, wide))
    r = upper_part(reflectors[:, :wide])
    return tuple(unflat(x, a) for x in ((q, r, order) if pivoting else (q, r)))


@rule(linalg.geqrf_p)
def geqrf(a: Array) -> tuple[Array, Array]:
    """R on and above the diagonal, the reflectors below it, and their factors tau."""
    reflectors, taus, _ = factor(flat(a))
    return unflat(reflectors, a), unflat(taus, a)


@rule(linalg.householder_product_p)
def householder_product(a: Array, taus: Array) -> Array:
    """The first columns of the product of reflections."""
    reflectors = flat(a)
    return unflat(multiply(reflectors, flat(taus, 1), identity(reflectors, *a.shape[-2:])), a)


@rule(linalg.ormqr_p)
def ormqr(a: Array, taus: Array, c: Array, *, left: bool, transpose: bool) -> Array:
    """The product of reflections, or its adjoint, with another matrix."""
    reflectors, factors, other = flat(a), flat(taus, 1), flat(c)
    if left:
        return unflat(multiply(reflectors, factors, other, inverse=transpose), c)
    return unflat(adjoint(multiply(reflectors, factors, adjoint(other), inverse=not transpose)), c)


def factor(a: Array, *, pivoting: bool = False) -> tuple[Array, Array, Array]:
    """Reflectors, taus and the order of columns of matrices of shape (batch, m, n)."""
    batch, m, n = a.shape
    count = min(m, n)
    taus = lax.full((batch, count), 0, a.dtype)
    order = lax.broadcasted_iota(np.int32, (batch, n), 1)
    if a.size == 0:
        return a, taus, order

    def turn(k: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        a, taus, order = carry
        if pivoting:
            a, order = _largest_first(a, order, k)
        head = column(a, k)
        v, tau, beta = _reflector(head, k)
        taken = v * ((tau.conj() if is_complex(tau) else tau) * product(adjoint(v), a))
        a = jnp.where(columns(a) > k, a - taken, a)
        new = jnp.where(rows(head) > k, v, jnp.where(rows(head) == k, beta, head))
        a = jnp.where(columns(a) == k, new, a)
        taus = jnp.where(lax.broadcasted_iota(np.int32, taus.shape, 1) == k, tau[:, :, 0], taus)
        return a, taus, order

    return loop(count, turn, (a, taus, order))  # type: ignore[no-any-return]


def multiply(reflectors: Array, taus: Array, c: Array, *, inverse: bool = False) -> Array:
    """Q c, or Q^H c, where Q is the product of the reflections in their order.

    Args:
        reflectors: (batch, m, at least count); what is on and above the diagonal is not read.
        taus: (batch, count).
        c: (batch, m, columns).
        inverse: multiply by Q^H.
    """
    count = taus.shape[-1]
    vectors = lower_part(reflectors, diagonal=False)
    factors = taus[:, None, :]
    if inverse and is_complex(factors):
        factors = factors.conj()

    def turn(i: Array, c: Array) -> Array:
        k = i if inverse else np.int32(count - 1) - i
        v = column(vectors, k)
        v = jnp.where(rows(v) == k, lax.full_like(v, 1), v)
        return c - v * (column(factors, k) * product(adjoint(v), c))

    return loop(count, turn, c) if c.size else c


def _reflector(head: Array, k: Array) -> tuple[Array, Array, Array]:
    """The reflection that takes a column's rows after k to zero: its vector, tau, and what row k becomes."""
    alpha = row(head, k)
    below = jnp.where(rows(head) > k, head, zeros(head))
    used = jnp.where(rows(head) >= k, head, zeros(head))
    size = jnp.max(larger_part(used), axis=1, keepdims=True)
    scale = jnp.where(size > zeros(size), size, lax.full_like(size, 1))
    norm = scale * jnp.sqrt(jnp.sum(square(used / as_type_of(scale, head)), axis=1, keepdims=True))
    upright = jnp.all(below == zeros(below), axis=1, keepdims=True)
    if is_complex(head):
        upright = upright & (lax.imag(alpha) == zeros(norm))
    beta = as_type_of(copy_sign(norm, -lax.real(alpha) if is_complex(alpha) else -alpha), head)
    one = lax.full_like(alpha, 1)
    v = jnp.where(rows(head) == k, one, jnp.where(upright, zeros(head), below / jnp.where(upright, one, alpha - beta)))
    tau = jnp.where(upright, zeros(alpha), (beta - alpha) / jnp.where(upright, one, beta))
    return v, tau, jnp.where(upright, alpha, beta)


def _largest_first(a: Array, order: Array, k: Array) -> tuple[Array, Array]:
    """Exchange column k with the longest of those from k on, seen from row k on."""
    rest = jnp.where(rows(a) >= k, a, zeros(a))
    length = jnp.sum(square(rest), axis=1)
    index = lax.broadcasted_iota(np.int32, order.shape, 1)
    length = jnp.where(index >= k, length, lax.full_like(length, -1))
    longest = jnp.max(length, axis=1, keepdims=True)
    chosen = jnp.min(jnp.where(length == longest, index, lax.full_like(index, a.shape[2] - 1)), axis=1, keepdims=True)
    return _exchange(a, k, chosen[:, :, None]), _exchange(order, k, chosen)


def _exchange(x: Array, k: Array, chosen: Array) -> Array:
    index = columns(x)
    former = column(x, k)
    latter = jnp.sum(jnp.where(index == chosen, x, zeros(x)), axis=-1, keepdims=True, dtype=x.dtype)
    return jnp.where(index == k, latter, jnp.where(index == chosen, former, x))
