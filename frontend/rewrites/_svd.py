"""Singular value decomposition.

Stands against IREE having no lowering of `svd`, which JAX computes in LAPACK. With A = Q R, Jacobi rotations make the
columns of R^H orthogonal: they become V S, and A V = U S. Both bases are had from QR decompositions of these products,
which complete them where singular values are zero. Values descend, as in LAPACK; the signs of a pair of vectors (for
complex matrices the phases), and the vectors that belong to no value, differ from LAPACK's, and gradients do not depend
on those.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import linalg

from fixstep.frontend.rewrites import _qr
from fixstep.frontend.rewrites._jacobi import diagonal, lengths, orthogonal_rows, sorted_rows
from fixstep.frontend.rewrites._matrix import (
    adjoint,
    all_finite,
    as_type_of,
    flat,
    identity,
    is_complex,
    larger_part,
    nan_unless,
    product,
    square,
    transposed,
    unflat,
    upper_part,
)
from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule


@rule(linalg.svd_p)
def svd(
    a: Array, *, full_matrices: bool, compute_uv: bool, subset_by_index: tuple[int, int] | None, **_: Any
) -> tuple[Array, ...] | None:
    """Singular values, and with `compute_uv` U and V^H."""
    m, n = a.shape[-2:]
    if a.size == 0 or subset_by_index not in (None, (0, min(m, n))):
        return None
    tall = flat(a) if m >= n else adjoint(flat(a))
    good = all_finite(tall)
    tall = jnp.where(good, tall, lax.full_like(tall, 0))
    size = jnp.max(larger_part(tall), axis=(1, 2), keepdims=True)
    scale = jnp.where(size > lax.full_like(size, 0), size, lax.full_like(size, 1))
    values, left, right = _decompose(tall / as_type_of(scale, tall), full_matrices=full_matrices, compute_uv=compute_uv)
    values = nan_unless(good, values * scale)[:, :, 0]
    if not compute_uv:
        return (unflat(values, a),)
    left, right = nan_unless(good, left), nan_unless(good, right)
    u, vh = (left, adjoint(right)) if m >= n else (right, adjoint(left))
    return unflat(values, a), unflat(u, a), unflat(vh, a)


def _decompose(a: Array, *, full_matrices: bool, compute_uv: bool) -> tuple[Array, Array, Array]:
    """Values (batch, n, 1), and both matrices of vectors, of matrices at least as high as wide."""
    m, n = a.shape[1:]
    reflectors, _, _ = _qr.factor(a)
    r = upper_part(reflectors[:, :n])
    found = orthogonal_rows(r.conj() if is_complex(a) else r)  # row i is column i of R^H
    found, values = sorted_rows(found, lengths(found), descending=True)
    if not compute_uv:
        return values, a, a
    right = _orthonormal(transposed(found), n)
    return values, _orthonormal(product(a, right), m if full_matrices else n), right


def _orthonormal(columns: Array, width: int) -> Array:
    """Columns that are orthogonal, made of length one; more, and those of length zero, complete them to a basis."""
    reflectors, taus, _ = _qr.factor(columns)
    basis = _qr.multiply(reflectors, taus, identity(columns, columns.shape[1], width))
    ends = diagonal(reflectors)
    size = jnp.sqrt(square(ends)) if is_complex(ends) else jnp.abs(ends)
    nonzero = size > lax.full_like(size, 0)
    phase = ends / as_type_of(jnp.where(nonzero, size, lax.full_like(size, 1)), ends)
    phase = jnp.where(nonzero, phase, lax.full_like(phase, 1))
    if width > columns.shape[2]:
        phase = lax.pad(phase, np.ones((), phase.dtype), [(0, 0, 0), (0, 0, 0), (0, width - columns.shape[2], 0)])
    return basis * phase
