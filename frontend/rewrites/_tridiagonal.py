"""Tridiagonal systems, by Gaussian elimination with partial pivoting.

Stands against IREE having no lowering of `tridiagonal_solve`, which JAX computes in LAPACK (gtsv).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax._src.lax import linalg

from fixstep.frontend.rewrites._matrix import flat, is_complex, nan_unless, unflat, zeros
from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule

Row = tuple[Array, Array, Array]
"""The part of an equation that is left: its coefficient on the diagonal, the next one, and its right-hand side."""


@rule(linalg.tridiagonal_solve_p)
def tridiagonal_solve(dl: Array, d: Array, du: Array, b: Array, *, perturb_singular: bool) -> Array | None:
    """x with dl[i] x[i-1] + d[i] x[i] + du[i] x[i+1] = b[i]; NaN where a pivot is zero."""
    if perturb_singular or b.size == 0:
        return None
    # The equations first, each coefficient as a column beside the right-hand sides.
    lower, middle, upper = (flat(x, 1)[:, :, None] for x in (dl, d, du))
    lower, middle, upper, right = (jnp.swapaxes(x, 0, 1) for x in (lower, middle, upper, flat(b)))
    last = lax.full_like(upper[:1], 0)
    upper = jnp.concatenate([upper[:-1], last], axis=0)
    one = lax.full_like(last, 1)
    # A last equation, x[n] = 0, that no other one mentions ends the elimination.
    following = (
        jnp.concatenate([lower[1:], last], axis=0),
        jnp.concatenate([middle[1:], one], axis=0),
        jnp.concatenate([upper[1:], last], axis=0),
        jnp.concatenate([right[1:], lax.full_like(right[:1], 0)], axis=0),
    )
    _, finished = lax.scan(_eliminate, (middle[0], upper[0], right[0]), following)
    start = (zeros(right[0]), zeros(right[0]))
    _, x = lax.scan(_substitute, start, finished, reverse=True)
    good = jnp.all(finished[0] != zeros(finished[0]), axis=0)[:, :, None]
    return unflat(nan_unless(good, jnp.swapaxes(x, 0, 1)), b)


def _eliminate(row: Row, following: tuple[Array, Array, Array, Array]) -> tuple[Row, tuple[Array, ...]]:
    """One equation finished with up to three coefficients and its right-hand side, and what is left of the next."""
    pivot, beside, right = row
    below, middle, after, next_right = following
    keep = _size(pivot) >= _size(below)
    # The equation with the larger coefficient is the one finished.
    top = (jnp.where(keep, pivot, below), jnp.where(keep, beside, middle), jnp.where(keep, zeros(after), after))
    top_right = jnp.where(keep, right, next_right)
    other = (jnp.where(keep, below, pivot), jnp.where(keep, middle, beside), jnp.where(keep, after, zeros(after)))
    other_right = jnp.where(keep, next_right, right)
    some = top[0] != zeros(pivot)
    factor = jnp.where(some, other[0] / jnp.where(some, top[0], lax.full_like(pivot, 1)), zeros(pivot))
    left = (other[1] - factor * top[1], other[2] - factor * top[2], other_right - factor * top_right)
    return left, (*top, top_right)


def _substitute(known: tuple[Array, Array], row: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
    """The unknown of one equation from the two after it."""
    pivot, beside, second, right = row
    x = (right - beside * known[0] - second * known[1]) / pivot
    return (x, known[0]), x


def _size(x: Array) -> Array:
    """The magnitude that LAPACK compares pivots by."""
    return jnp.abs(lax.real(x)) + jnp.abs(lax.imag(x)) if is_complex(x) else jnp.abs(x)
