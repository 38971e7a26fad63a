"""Triangular systems.

Stands against IREE having no lowering of `triangular_solve`, which JAX computes in BLAS.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax._src.lax import linalg

from fixstep.frontend.rewrites._matrix import (
    column,
    flat,
    is_complex,
    loop,
    row,
    rows,
    transposed,
    unflat,
    widened,
    zeros,
)
from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule


@rule(linalg.triangular_solve_p)
def triangular_solve(
    a: Array, b: Array, *, left_side: bool, lower: bool, transpose_a: bool, conjugate_a: bool, unit_diagonal: bool
) -> Array:
    """x with op(a) x = b, or x op(a) = b."""
    matrix, right = widened(flat(a)), widened(flat(b))
    if conjugate_a and is_complex(matrix):
        matrix = matrix.conj()
    # x op(a) = b is op(a)^T x^T = b^T.
    if transpose_a == left_side:
        matrix = transposed(matrix)
        lower = not lower
    if left_side:
        result = substitute(matrix, right, lower=lower, unit_diagonal=unit_diagonal)
    else:
        result = transposed(substitute(matrix, transposed(right), lower=lower, unit_diagonal=unit_diagonal))
    return unflat(result, b).astype(b.dtype)


def substitute(a: Array, b: Array, *, lower: bool, unit_diagonal: bool = False) -> Array:
    """x with a x = b, by forward (lower) or backward substitution; the other triangle of a is not read.

    Args:
        a: (batch, n, n).
        b: (batch, n, m).
        lower: whether a is lower triangular rather than upper.
        unit_diagonal: take the diagonal of a as ones.
    """
    n = a.shape[-1]

    def turn(i: Array, b: Array) -> Array:
        k = i if lower else np.int32(n - 1) - i
        coefficients = column(a, k)
        known = row(b, k)
        if not unit_diagonal:
            known = known / row(coefficients, k)
        rest = rows(b) > k if lower else rows(b) < k
        b = b - jnp.where(rest, coefficients * known, zeros(b))
        return jnp.where(rows(b) == k, known, b)

    return loop(n, turn, b) if b.size else b
