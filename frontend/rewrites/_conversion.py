"""Conversion of floats to integers.

Stands against IREE leaving it undefined what NaN and values outside of the integer's range become. XLA on the CPU, and
so JAX, turns NaN to 0 and saturates.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fixstep.frontend.rewrites._real import Array, full, widened
from fixstep.frontend.rewrites._replace import replacement


def _is_float_to_integer(*dtypes: np.dtype[Any]) -> bool:
    return dtypes[0].name in ("bfloat16", "float16", "float32", "float64") and dtypes[-1].kind in "iu"


@replacement("stablehlo.convert", applies=_is_float_to_integer, takes_result_dtype=True)
def float_to_integer(x: Array, dtype: np.dtype[Any]) -> Array:
    """A float as an integer: NaN is 0, everything else rounds towards zero and saturates."""
    x = widened(x)
    limits = jnp.iinfo(dtype)
    lowest, above = float(limits.min), float(int(limits.max) + 1)
    highest = np.nextafter(x.dtype.type(above), x.dtype.type(0))
    inside = jnp.clip(jnp.where(jnp.isnan(x), full(x, 0.0), x), full(x, lowest), full(x, highest))
    result = inside.astype(dtype)
    return jnp.where(x >= full(x, above), full(x, limits.max, dtype), result)
