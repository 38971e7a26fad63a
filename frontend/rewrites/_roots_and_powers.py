"""Powers, cube roots and complex magnitudes.

Stands against IREE computing pow as exp2(y log2 x): NaN for a power of zero with exponent zero and for negative bases
with an integer exponent; and against cube roots of infinity and squares under a complex magnitude that overflow.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from fixstep.frontend.rewrites._exponential import exponential_and_logarithm, positive_power
from fixstep.frontend.rewrites._real import Array, full, is_complex, is_double, is_real, widened
from fixstep.frontend.rewrites._replace import replacement


@replacement("stablehlo.power", applies=is_real)
def power(base: Array, exponent: Array) -> Array:
    """base ** exponent, with the special values of IEEE 754."""
    x, y = widened(base), widened(exponent)
    one, zero, nan = full(x, 1.0), full(x, 0.0), full(x, np.nan)
    size = jnp.abs(x)
    positive = positive_power if is_double(x.dtype) else lax.pow
    result = positive(jnp.where(size == zero, one, size), y)
    result = jnp.where(size == zero, jnp.where(y > zero, zero, full(x, np.inf)), result)
    integer = jnp.floor(y) == y
    half = y * full(y, 0.5)
    odd = integer & (jnp.floor(half) != half)
    result = jnp.where(odd & jnp.signbit(x), -result, result)
    result = jnp.where((x < zero) & jnp.isfinite(x) & ~integer, nan, result)
    result = jnp.where((size == one) & jnp.isinf(y), one, result)
    result = jnp.where(jnp.isnan(x) | jnp.isnan(y), nan, result)
    return jnp.where((y == zero) | (x == one), one, result).astype(base.dtype)


@replacement("stablehlo.cbrt", applies=is_real)
def cube_root(x: Array) -> Array:
    """The cube root: a first value by logarithm, improved by a step of Newton's method."""
    wide = widened(x)
    size = jnp.abs(wide)
    ordinary = (size > full(wide, 0.0)) & jnp.isfinite(size)
    a = jnp.where(ordinary, size, full(wide, 1.0))
    exp, log = exponential_and_logarithm(x.dtype)
    root = exp(log(a) / full(wide, 3.0))
    root = root - (root - a / (root * root)) / full(wide, 3.0)
    result = jnp.where(ordinary, root, size)
    return jnp.where(jnp.signbit(wide), -result, result).astype(x.dtype)


@replacement("stablehlo.abs", applies=is_complex)
def magnitude(z: Array) -> Array:
    """The magnitude of a complex number, scaled by its larger part."""
    real, imaginary = jnp.abs(lax.real(z)), jnp.abs(lax.imag(z))
    large, small = jnp.maximum(real, imaginary), jnp.minimum(real, imaginary)
    ordinary = (large > full(large, 0.0)) & jnp.isfinite(large)
    ratio = small / jnp.where(ordinary, large, full(large, 1.0))
    return jnp.where(ordinary, large * jnp.sqrt(full(large, 1.0) + ratio * ratio), large + small)
