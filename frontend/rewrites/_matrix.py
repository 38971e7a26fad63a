"""Small helpers that the files on linear algebra share.

Each of them computes on batches of one dimension: an array of shape (batch, rows, columns). Their loops visit one
column at a time and change the whole array under a mask, which keeps the program short and its shapes fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fixstep.frontend.rewrites._real import HALVES, Array


def flat(x: Array, rank: int = 2) -> Array:
    """An array with all its batch dimensions as one, before `rank` others."""
    kept = x.shape[x.ndim - rank :]
    return lax.reshape(x, (math.prod(x.shape[: x.ndim - rank]), *kept))


def unflat(x: Array, like: Array, rank: int = 2) -> Array:
    """The result of one with the batch dimensions of another array, before that one's last `rank`."""
    return lax.reshape(x, (*like.shape[: like.ndim - rank], *x.shape[1:]))


def widened(x: Array) -> Array:
    """A half as float32; others as they are."""
    return x.astype(np.float32) if x.dtype.name in HALVES else x


def loop(count: int, body: Callable[[Array, Any], Any], start: Any) -> Any:
    """`lax.fori_loop` from 0 with a counter of 32 bits."""
    return lax.fori_loop(np.int32(0), np.int32(count), body, start)


def rows(x: Array) -> Array:
    """The row number of each element."""
    return lax.broadcasted_iota(np.int32, x.shape, x.ndim - 2)


def columns(x: Array) -> Array:
    """The column number of each element."""
    return lax.broadcasted_iota(np.int32, x.shape, x.ndim - 1)


def row(x: Array, index: Array) -> Array:
    """One row, of shape (batch, 1, columns)."""
    return lax.dynamic_slice_in_dim(x, index, 1, x.ndim - 2)


def column(x: Array, index: Array) -> Array:
    """One column, of shape (batch, rows, 1)."""
    return lax.dynamic_slice_in_dim(x, index, 1, x.ndim - 1)


def transposed(x: Array) -> Array:
    """Each matrix transposed."""
    return jnp.swapaxes(x, -1, -2)


def adjoint(x: Array) -> Array:
    """Each matrix transposed and conjugated."""
    return transposed(x).conj() if is_complex(x) else transposed(x)


def product(x: Array, y: Array) -> Array:
    """The product of each pair of matrices, in full precision."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def identity(x: Array, height: int, width: int) -> Array:
    """Identity matrices with the batch and dtype of another array."""
    return jnp.broadcast_to(np.eye(height, width, dtype=x.dtype), (x.shape[0], height, width))


def zeros(x: Array) -> Array:
    """Zeros of the same shape and dtype."""
    return lax.full_like(x, 0)


def lower_part(x: Array, *, diagonal: bool = True) -> Array:
    """The lower triangle, zero elsewhere."""
    return jnp.where(_mask(np.tril, x, 0 if diagonal else -1), x, zeros(x))


def upper_part(x: Array) -> Array:
    """The upper triangle with the diagonal, zero elsewhere."""
    return jnp.where(_mask(np.triu, x, 0), x, zeros(x))


def lower_mask(x: Array) -> Array:
    """Whether each element is below the diagonal."""
    return _mask(np.tril, x, -1)


def on_diagonal(x: Array) -> Array:
    """Whether each element is on the diagonal."""
    return _mask(np.eye, x, 0)


def _mask(kind: Any, x: Array, offset: int) -> Array:
    """A mask of a batch of matrices, as a constant.

    Were it computed from row and column numbers, IREE would take it out of the program into an initializer, which it
    then fails to run ("indirect buffer reference slot 0 is out range of the declared binding capacity").
    """
    height, width = x.shape[-2:]
    mask = np.eye(height, width, dtype=bool) if kind is np.eye else kind(np.ones((height, width), bool), offset)
    return lax.broadcast_in_dim(mask, x.shape, (x.ndim - 2, x.ndim - 1))


def is_complex(x: Array) -> bool:
    """Whether the elements are complex."""
    return bool(x.dtype.kind == "c")


def real_dtype(x: Array) -> np.dtype[Any]:
    """The dtype of the elements' parts."""
    return np.dtype(np.finfo(x.dtype).dtype)


def square(x: Array) -> Array:
    """The squared magnitude of each element."""
    if is_complex(x):
        return lax.real(x) * lax.real(x) + lax.imag(x) * lax.imag(x)
    return x * x


def as_type_of(x: Array, like: Array) -> Array:
    """Real numbers in the dtype of another array."""
    return lax.complex(x, zeros(x)) if is_complex(like) else x


def nan_unless(good: Array, x: Array) -> Array:
    """NaN in each matrix that is not good; `good` has shape (batch, 1, 1)."""
    nan = complex(np.nan, np.nan) if is_complex(x) else np.nan
    return jnp.where(good, x, lax.full_like(x, nan))


def all_finite(x: Array) -> Array:
    """Whether a matrix has no NaN and no infinity, of shape (batch, 1, 1)."""
    return jnp.all(jnp.isfinite(larger_part(x)), axis=(1, 2), keepdims=True)


def larger_part(x: Array) -> Array:
    """The magnitude of each element, of a complex one that of its larger part: a scale that does not overflow."""
    return jnp.maximum(jnp.abs(lax.real(x)), jnp.abs(lax.imag(x))) if is_complex(x) else jnp.abs(x)


def joined(parts: Sequence[Array], axis: int) -> Array:
    """Arrays one after the other, those without elements left out: IREE fails on them."""
    full = [part for part in parts if part.size]
    return full[0] if len(full) == 1 else jnp.concatenate(full, axis=axis)
