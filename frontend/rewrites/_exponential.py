"""Exponentials, logarithms and powers of float64, in its own arithmetic.

Stands against SPIR-V having them for 32 bits only ("'spirv.GL.Exp' op operand #0 must be 16/32-bit float"). The
reduction of the argument and the division in the logarithm's series are those of every C library; a power is
exp(y log x) with the logarithm, and the product with it, as sums of two float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fixstep.frontend.rewrites._real import Array, full, is_double
from fixstep.frontend.rewrites._replace import replacement

# ln 2 in two parts: the first has 32 bits, so that its product with an exponent is exact.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_LN2_REST = float.fromhex("0x1.9ff0342542fc3p-88")  # what float64 leaves of the two parts
# Beyond these the result is infinite, or 0.
_LARGEST, _SMALLEST = 709.782712893384, -745.2


@replacement("stablehlo.exponential", applies=is_double)
def exponential(x: Array) -> Array:
    """exp(x), to one unit in the last place."""
    return _exponential(x, full(x, 0.0))


@replacement("stablehlo.log", applies=is_double)
def logarithm(x: Array) -> Array:
    """log(x), to one unit in the last place."""
    exponent, f = _reduced(x)
    half_square = full(x, 0.5) * f * f
    s = f / (full(x, 2.0) + f)
    square = s * s
    rest = square * _series(square, [2.0 / (2 * k + 3) for k in range(10)])
    low = s * (half_square + rest) + exponent * full(x, _LN2_LOW)
    return _special_logarithms(x, exponent * full(x, _LN2_HIGH) - ((half_square - low) - f))


@replacement("stablehlo.logistic", applies=is_double)
def logistic(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return full(x, 1.0) / (full(x, 1.0) + exponential(-x))


def exponential_and_logarithm(dtype: np.dtype[Any]) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """The two functions for a dtype: those of this file for float64, which are not replaced again, else JAX's."""
    return (exponential, logarithm) if is_double(dtype) else (jnp.exp, jnp.log)


def positive_power(x: Array, y: Array) -> Array:
    """x ** y of a positive x; NaN of any other."""
    exponent, f = _reduced(x)
    # The logarithm as a sum of two: 2 atanh(s) with s = f / (2 + f), and the exponent's share.
    below = full(x, 2.0) + f
    s = f / below
    below_low = f - (below - full(x, 2.0))
    product, product_low = _product(s, below)
    s_low = (((f - product) - product_low) - s * below_low) / below
    square = s * s
    rest = s * square * _series(square, [2.0 / (2 * k + 3) for k in range(11)])
    high = exponent * full(x, _LN2_HIGH)
    total, low = _sum(high, full(x, 2.0) * s)
    total, low_2 = _sum(total, exponent * full(x, _LN2_LOW))
    total, low_3 = _sum(total, rest)
    low = (low + low_2 + low_3) + full(x, 2.0) * s_low + exponent * full(x, _LN2_REST)
    bounded = jnp.clip(y, -(2.0**900), 2.0**900)
    power, power_low = _product(total, bounded)
    power_low = power_low + low * bounded
    infinite = jnp.where(x > full(x, 1.0), y > full(x, 0.0), y < full(x, 0.0))
    edge = jnp.where(infinite, full(x, np.inf), full(x, 0.0))
    result = _exponential(power, power_low)
    result = jnp.where(jnp.isinf(x) | jnp.isinf(y), edge, result)
    return jnp.where((x > full(x, 0.0)) & ~jnp.isnan(y), result, full(x, np.nan))


def _exponential(x: Array, low: Array) -> Array:
    """exp(x + low), where low is too small to count beside x."""
    bounded = jnp.clip(x, _SMALLEST, _LARGEST)
    count = jnp.round(bounded * full(x, 1 / math.log(2)))
    high = bounded - count * full(x, _LN2_HIGH)
    rest = count * full(x, _LN2_LOW) - low
    r = high - rest
    tail = r * r * _series(r, [1 / math.factorial(k) for k in range(2, 14)])
    # The error of r, and then the terms from the smallest on.
    result = full(x, 1.0) + (high + (((high - r) - rest) + tail - (high - r)))
    whole = count.astype(np.int64)
    half = whole >> full(whole, 1)
    result = result * _power_of_two(half) * _power_of_two(whole - half)
    result = jnp.where(x > full(x, _LARGEST), full(x, np.inf), result)
    return jnp.where(x < full(x, _SMALLEST), full(x, 0.0), jnp.where(jnp.isnan(x), x, result))


def _reduced(x: Array) -> tuple[Array, Array]:
    """A float64 e and f with x = 2^e (1 + f), 1 + f between sqrt(1/2) and sqrt(2); of a positive, finite x."""
    tiny = x < full(x, 2.0**-1022)
    bits = lax.bitcast_convert_type(jnp.where(tiny, x * full(x, 2.0**54), x), np.int64)
    # Shifted so that the exponent changes at sqrt(1/2).
    shifted = bits - full(bits, 0x3FE6A09E667F3BCD)
    exponent = shifted >> full(bits, 52)
    mantissa = bits - (exponent << full(bits, 52))
    exponent = exponent - jnp.where(tiny, full(bits, 54), full(bits, 0))
    return exponent.astype(np.float64), lax.bitcast_convert_type(mantissa, np.float64) - full(x, 1.0)


def _special_logarithms(x: Array, result: Array) -> Array:
    result = jnp.where(x == full(x, 0.0), full(x, -np.inf), result)
    result = jnp.where(x == full(x, np.inf), x, result)
    return jnp.where((x < full(x, 0.0)) | jnp.isnan(x), full(x, np.nan), result)


def _series(x: Array, coefficients: list[float]) -> Array:
    """The sum over k of coefficients[k] x^k."""
    total = full(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + full(x, coefficient)
    return total


def _power_of_two(exponent: Array) -> Array:
    return lax.bitcast_convert_type((exponent + full(exponent, 1023)) << full(exponent, 52), np.float64)


def _sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b, rounded, and what rounding took (Knuth)."""
    total = a + b
    share = total - a
    return total, (a - (total - share)) + (b - share)


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """a * b, rounded, and what rounding took (Dekker); of numbers below 2^990."""
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(x: Array) -> tuple[Array, Array]:
    scaled = x * full(x, 2.0**27 + 1)
    high = scaled - (scaled - x)
    return high, x - high
