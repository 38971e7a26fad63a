"""Conversions to and from float8.

Stands against IREE rounding what lies just below the smallest normal number to zero instead of up, and reading the
negative NaN of float8_e4m3fn as -480.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from fixstep.frontend.rewrites._real import Array, copy_sign, full, is_real, widened
from fixstep.frontend.rewrites._replace import replacement

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def _narrows(*dtypes: np.dtype[Any]) -> bool:
    return is_real(dtypes[0]) and dtypes[-1].name in FLOAT8


def _widens(*dtypes: np.dtype[Any]) -> bool:
    return dtypes[0].name == "float8_e4m3fn" and is_real(dtypes[-1])


@replacement("stablehlo.convert", applies=_narrows, takes_result_dtype=True)
def to_float8(x: Array, dtype: np.dtype[Any]) -> Array:
    """A float as float8; what rounds up to the smallest normal number is made that number first."""
    x = widened(x)
    limits = ml_dtypes.finfo(dtype)
    normal, step = float(limits.smallest_normal), float(limits.smallest_subnormal)
    size = jnp.abs(x)
    rounds_up = (size >= full(x, normal - step / 2)) & (size < full(x, normal))
    return jnp.where(rounds_up, copy_sign(full(x, normal), x), x).astype(dtype)


@replacement("stablehlo.convert", applies=_widens, takes_result_dtype=True)
def from_float8(x: Array, dtype: np.dtype[Any]) -> Array:
    """A float8_e4m3fn as a wider float, NaN of either sign as NaN."""
    is_nan = (lax.bitcast_convert_type(x, np.uint8) & full(x, 0x7F, np.uint8)) == full(x, 0x7F, np.uint8)
    return jnp.where(is_nan, full(x, np.nan, dtype), x.astype(dtype))
