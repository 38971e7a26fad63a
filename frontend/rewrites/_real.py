"""Small helpers that the files of replacements share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

Array = Any
"""A jax.Array or a tracer; what JAX's functions return is untyped here, as the types of jax._src are not followed."""

HALVES = ("bfloat16", "float16")
SINGLE = "float32"
DOUBLE = "float64"


def is_real(*dtypes: np.dtype[Any]) -> bool:
    """Whether an operation works on ordinary floats."""
    return dtypes[0].name in (*HALVES, SINGLE, DOUBLE)


def is_double(*dtypes: np.dtype[Any]) -> bool:
    """Whether an operation works on float64."""
    return dtypes[0].name == DOUBLE


def is_complex(*dtypes: np.dtype[Any]) -> bool:
    """Whether an operation works on complex numbers."""
    return dtypes[0].kind == "c"


def widened(x: Array) -> Array:
    """A half as float32, which it is computed in; others as they are."""
    return x if x.dtype.name in (SINGLE, DOUBLE) else x.astype(np.float32)


def full(x: Array, value: Any, dtype: Any = None) -> Array:
    """An array of one value, of the shape of another and by default of its dtype."""
    return jnp.full(x.shape, value, x.dtype if dtype is None else dtype)


def copy_sign(size: Array, sign: Array) -> Array:
    """A number with the sign of another, zeros included."""
    return jnp.where(jnp.signbit(sign), -size, size)
