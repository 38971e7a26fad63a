"""The Cholesky factor.

Stands against IREE having no lowering of `cholesky`, which JAX computes in LAPACK.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import linalg

from fixstep.frontend.rewrites._matrix import (
    as_type_of,
    column,
    columns,
    flat,
    is_complex,
    loop,
    lower_part,
    nan_unless,
    on_diagonal,
    row,
    rows,
    unflat,
    zeros,
)
from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule


@rule(linalg.cholesky_p)
def cholesky(a: Array) -> Array:
    """The lower factor; NaN all over where a matrix is not positive definite."""
    return unflat(factor(flat(a)), a)


def factor(a: Array) -> Array:
    """The lower factor of matrices of shape (batch, n, n), of which the lower triangle is read.

    Right-looking: each column is divided by the root of its pivot, then taken out of those after it.
    """

    def turn(k: Array, a: Array) -> Array:
        pivots = column(a, k)
        pivot = row(pivots, k)
        root = as_type_of(jnp.sqrt(lax.real(pivot)), a) if is_complex(a) else jnp.sqrt(pivot)
        below = jnp.where(rows(pivots) > k, pivots / root, zeros(pivots))
        across = lax.reshape(below, (a.shape[0], 1, a.shape[1]))
        a = a - below * (across.conj() if is_complex(a) else across)
        return jnp.where(columns(a) == k, jnp.where(rows(a) == k, root, below), a)

    if a.shape[-1] == 0:
        return a
    result = lower_part(loop(a.shape[-1], turn, a))
    # A pivot that is zero, negative or NaN leaves a diagonal that is not above zero.
    diagonal = lax.real(result) if is_complex(result) else result
    good = jnp.where(on_diagonal(diagonal), diagonal > np.zeros((), diagonal.dtype), True)
    return nan_unless(jnp.all(good, axis=(1, 2), keepdims=True), result)
