"""One-sided Jacobi rotations, on which eigh and svd stand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from fixstep.frontend.rewrites._matrix import (
    adjoint,
    as_type_of,
    is_complex,
    joined,
    larger_part,
    loop,
    lower_mask,
    on_diagonal,
    product,
    real_dtype,
    rows,
    square,
)
from fixstep.frontend.rewrites._real import Array, copy_sign

# Convergence is quadratic: 5 to 8 sweeps for up to 64 vectors, 10 for 512. The bound only keeps a loop from not ending.
_SWEEPS = 40


def orthogonal_rows(vectors: Array) -> Array:
    """Rotate pairs of rows until all are orthogonal to each other.

    The pairs of a round have no row in common, so a round is one operation on two halves; in a tournament's order
    n - 1 rounds bring every pair together and each row back to its place.

    Args:
        vectors: (batch, n, length).

    Returns:
        The rows, orthogonal within a few units of rounding.
    """
    batch, n, length = vectors.shape
    half = (n + 1) // 2
    rounds = 2 * half - 1
    # A row of zeros is orthogonal to every other, so it stays as it is and is back in its place after each sweep.
    start = joined([vectors, jnp.zeros((batch, 2 * half - n, length), vectors.dtype)], 1)
    tolerance = np.array(np.finfo(real_dtype(vectors)).eps * 2 * np.sqrt(max(length, 4)), real_dtype(vectors))

    # Each loop carries one array: where several are carried around a loop within a loop, IREE loses one of them
    # ("indirect buffer reference slot 0 is out range").
    def turn(_: Array, both: Array) -> Array:
        upper, lower = _rotate(both[:, :half], both[:, half:])
        if half == 1:
            return jnp.concatenate([upper, lower], axis=1)
        return joined([upper[:, :1], lower[:, :1], upper[:, 1:-1], lower[:, 1:], upper[:, -1:]], 1)

    def sweep(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return loop(rounds, turn, carry[0]), carry[1] + np.int32(1)

    def unfinished(carry: tuple[Array, Array]) -> Array:
        return (_largest_cosine(carry[0]) > tolerance) & (carry[1] < np.int32(_SWEEPS))

    return lax.while_loop(unfinished, sweep, (start, np.int32(0)))[0][:, :n]


def _largest_cosine(vectors: Array) -> Array:
    """The largest cosine of an angle between two rows; rows of zeros have none."""
    size = lengths(vectors)
    unit = vectors / as_type_of(jnp.where(size > lax.full_like(size, 0), size, lax.full_like(size, 1)), vectors)
    cosines = larger_part(product(unit, adjoint(unit)))
    return jnp.max(jnp.where(on_diagonal(cosines), lax.full_like(cosines, 0), cosines))


def sorted_rows(vectors: Array, keys: Array, *, descending: bool) -> tuple[Array, Array]:
    """Rows and keys in the order of the keys, equal ones in their given order.

    Args:
        vectors: (batch, n, width).
        keys: (batch, n, 1), real and finite.
        descending: the largest first.
    """
    across = lax.reshape(keys, (keys.shape[0], 1, keys.shape[1]))
    before = across > keys if descending else across < keys
    earlier = (across == keys) & lower_mask(before)
    rank = jnp.sum((before | earlier).astype(np.int32), axis=2, keepdims=True, dtype=np.int32)
    taken = lax.reshape(rank, across.shape) == rows(before)
    order = product(taken.astype(keys.dtype), keys)
    return product(taken.astype(vectors.dtype), vectors), order


def lengths(vectors: Array) -> Array:
    """The length of each row, of shape (batch, n, 1)."""
    return jnp.sqrt(jnp.sum(square(vectors), axis=2, keepdims=True))


def _rotate(upper: Array, lower: Array) -> tuple[Array, Array]:
    """Rotate each pair of rows to be orthogonal."""
    alpha = jnp.sum(square(upper), axis=2, keepdims=True)
    beta = jnp.sum(square(lower), axis=2, keepdims=True)
    gamma = jnp.sum((upper.conj() if is_complex(upper) else upper) * lower, axis=2, keepdims=True)
    size = jnp.sqrt(square(gamma)) if is_complex(gamma) else jnp.abs(gamma)
    zero, one = lax.full_like(size, 0), lax.full_like(size, 1)
    turned = size > zero
    safe = jnp.where(turned, size, one)
    zeta = (beta - alpha) / (safe + safe)
    tangent = copy_sign(one, zeta) / (jnp.abs(zeta) + jnp.sqrt(one + zeta * zeta))
    cosine = one / jnp.sqrt(one + tangent * tangent)
    sine = tangent * cosine
    # The phase is that of the product, so that rows which are orthogonal already are hardly changed.
    phase = gamma / as_type_of(safe, gamma)
    c, s = as_type_of(cosine, upper), as_type_of(sine, upper) * phase
    new_upper = jnp.where(turned, c * upper - (s.conj() if is_complex(s) else s) * lower, upper)
    new_lower = jnp.where(turned, s * upper + c * lower, lower)
    return new_upper, new_lower


def diagonal(x: Array) -> Array:
    """The diagonal of each matrix, of shape (batch, 1, n)."""
    return jnp.sum(jnp.where(on_diagonal(x), x, lax.full_like(x, 0)), axis=1, keepdims=True)
