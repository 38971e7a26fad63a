"""Eigenvalues and eigenvectors of symmetric and Hermitian matrices.

Stands against IREE having no lowering of `eigh`, which JAX computes in LAPACK. A matrix A of norm r is shifted to the
positive definite A + 2 r, whose Cholesky factor L has columns that Jacobi rotations make orthogonal: L J = V S, and the
eigenvectors are V. The eigenvalues are taken from A itself, as v^H A v. Ascending, as in LAPACK; the signs (for complex
matrices the phases) of eigenvectors differ from LAPACK's, and gradients through them do not depend on those.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax._src.lax import linalg

from fixstep.frontend.rewrites import _cholesky
from fixstep.frontend.rewrites._jacobi import lengths, orthogonal_rows, sorted_rows
from fixstep.frontend.rewrites._matrix import (
    adjoint,
    all_finite,
    as_type_of,
    flat,
    is_complex,
    larger_part,
    lower_part,
    nan_unless,
    on_diagonal,
    product,
    square,
    transposed,
    unflat,
)
from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule


@rule(linalg.eigh_p)
def eigh(a: Array, *, lower: bool, subset_by_index: tuple[int, int] | None, **_: Any) -> tuple[Array, Array] | None:
    """Eigenvectors in columns, and eigenvalues."""
    n = a.shape[-1]
    if a.size == 0 or subset_by_index not in (None, (0, n)):
        return None
    vectors, values = _decompose(flat(a) if lower else adjoint(flat(a)))
    return unflat(vectors, a), unflat(values, a)


def _decompose(a: Array) -> tuple[Array, Array]:
    """Eigenvectors and eigenvalues of matrices of which the lower triangle is read."""
    strict = lower_part(a, diagonal=False)
    diagonal = jnp.where(on_diagonal(a), a, lax.full_like(a, 0))
    if is_complex(a):
        diagonal = as_type_of(lax.real(diagonal), a)
    a = strict + diagonal + adjoint(strict)
    good = all_finite(a)
    size = jnp.max(larger_part(a), axis=(1, 2), keepdims=True)
    good_size = good & (size > lax.full_like(size, 0))
    scale = jnp.where(good_size, size, lax.full_like(size, 1))
    scaled = jnp.where(good, a / as_type_of(scale, a), lax.full_like(a, 0))
    norm = jnp.sqrt(jnp.sum(square(scaled), axis=(1, 2), keepdims=True))
    shift = as_type_of(norm + norm + jnp.where(good_size, lax.full_like(norm, 0), lax.full_like(norm, 1)), a)
    factor = _cholesky.factor(jnp.where(on_diagonal(a), scaled + shift, scaled))
    found = orthogonal_rows(transposed(factor))
    found = found / as_type_of(lengths(found), a)
    # Row i is v_i^T, so v_i^H A v_i is the sum over conj(v_i) times (A v_i).
    image = product(found, transposed(scaled))
    values = jnp.sum(lax.real(found.conj() * image) if is_complex(a) else found * image, axis=2, keepdims=True)
    found, values = sorted_rows(found, values, descending=False)
    values = values * scale
    return nan_unless(good, transposed(found)), nan_unless(good, values)[:, :, 0]
