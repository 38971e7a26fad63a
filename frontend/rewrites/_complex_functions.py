"""Division and elementary functions of complex numbers, by real and imaginary parts.

Stands against IREE dividing by zero and by infinities to NaN where JAX has infinities and zeros; hyperbolic functions
and tangents of large numbers that are NaN, and of small ones that are off by 6e-8; and, on Vulkan, against powers and
signs that do not compile.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from fixstep.frontend.rewrites._arctangent import arctangent2
from fixstep.frontend.rewrites._exponential import exponential_and_logarithm
from fixstep.frontend.rewrites._real import Array, copy_sign, full, is_complex
from fixstep.frontend.rewrites._replace import replacement
from fixstep.frontend.rewrites._roots_and_powers import magnitude, power
from fixstep.frontend.rewrites._trigonometry import cosine, sine


@replacement("stablehlo.divide", applies=is_complex)
def quotient(x: Array, y: Array) -> Array:
    """x / y, scaled by the larger part of y; infinities as in annex G of the C standard.

    R. L. Smith, Algorithm 116: Complex division (1962).
    """
    a, b, c, d = lax.real(x), lax.imag(x), lax.real(y), lax.imag(y)
    turned = jnp.abs(c) < jnp.abs(d)
    ratio = jnp.where(turned, c, d) / jnp.where(turned, d, c)
    scale = jnp.where(turned, d + c * ratio, c + d * ratio)
    real = jnp.where(turned, a * ratio + b, a + b * ratio) / scale
    imaginary = jnp.where(turned, b * ratio - a, b - a * ratio) / scale
    for applies, special in reversed(_special_quotients(a, b, c, d)):
        lost = applies & jnp.isnan(real) & jnp.isnan(imaginary)
        real, imaginary = (jnp.where(lost, s, r) for s, r in zip(special, (real, imaginary), strict=True))
    return lax.complex(real, imaginary)


def _special_quotients(a: Array, b: Array, c: Array, d: Array) -> list[tuple[Array, tuple[Array, Array]]]:
    """What (a + bi) / (c + di) is where computing it gives NaN: conditions and parts, the first to hold decides."""
    infinity, zero = full(a, np.inf), full(a, 0.0)
    by_zero = (c == zero) & (d == zero) & ~(jnp.isnan(a) & jnp.isnan(b))
    directed = copy_sign(infinity, c)
    of_infinity = (jnp.isinf(a) | jnp.isinf(b)) & jnp.isfinite(c) & jnp.isfinite(d)
    p, q = _unit(a), _unit(b)
    by_infinity = (jnp.isinf(c) | jnp.isinf(d)) & jnp.isfinite(a) & jnp.isfinite(b)
    r, s = _unit(c), _unit(d)
    return [
        (by_zero, (directed * a, directed * b)),
        (of_infinity, (infinity * (p * c + q * d), infinity * (q * c - p * d))),
        (by_infinity, (zero * (a * r + b * s), zero * (b * r - a * s))),
    ]


def _unit(x: Array) -> Array:
    """1 for infinities and 0 for other numbers, with their signs."""
    return copy_sign(jnp.where(jnp.isinf(x), full(x, 1.0), full(x, 0.0)), x)


@replacement("stablehlo.power", applies=is_complex)
def complex_power(base: Array, exponent: Array) -> Array:
    """exp(exponent · log(base)); 1 where the exponent is 0, and of zero 0 if the exponent is a positive number."""
    size, angle = magnitude(base), arctangent2(lax.imag(base), lax.real(base))
    c, d = lax.real(exponent), lax.imag(exponent)
    zero, one, nan = full(size, 0.0), full(size, 1.0), full(size, np.nan)
    of_zero, to_zero = size == zero, (c == zero) & (d == zero)
    exp, log = exponential_and_logarithm(size.dtype)
    ordinary = jnp.where(of_zero, one, size)
    turn = d * log(ordinary) + c * angle
    scale = power(ordinary, c) * exp(-d * angle)
    power_of_zero = jnp.where((d == zero) & (c > zero), zero, nan)
    real = jnp.where(of_zero, power_of_zero, scale * cosine(turn))
    imaginary = jnp.where(of_zero, power_of_zero, scale * sine(turn))
    return lax.complex(jnp.where(to_zero, one, real), jnp.where(to_zero, zero, imaginary))


@replacement("stablehlo.sign", applies=is_complex)
def complex_sign(z: Array) -> Array:
    """z / |z|, and 0 of 0."""
    size = magnitude(z)
    zero = size == full(size, 0.0)
    divisor = jnp.where(zero, full(size, 1.0), size)
    return lax.complex(*(jnp.where(zero, full(size, 0.0), part(z) / divisor) for part in (lax.real, lax.imag)))


@replacement("stablehlo.tanh", applies=is_complex)
def complex_tanh(z: Array) -> Array:
    """The hyperbolic tangent.

    W. Kahan, Branch cuts for complex elementary functions (1987): by the tangent of the imaginary part and the sinus
    hyperbolicus of the real one; ±1 where that would overflow.
    """
    a, b = lax.real(z), lax.imag(z)
    one, zero = full(a, 1.0), full(a, 0.0)
    # From here on 1 - |tanh(a)| is less than half a unit in the last place.
    large = jnp.abs(a) > full(a, 20.0 if a.dtype == np.float64 else 10.0)
    exp, _ = exponential_and_logarithm(a.dtype)
    x = jnp.where(large, zero, a)
    sinh = (exp(x) - exp(-x)) * full(a, 0.5)
    sinh = jnp.where(jnp.abs(x) < full(a, 0.5), _small_sinh(x), sinh)
    cosh = jnp.sqrt(one + sinh * sinh)
    cos, sin = cosine(b), sine(b)
    # Both parts, times cos²(b), so that there is no tangent to overflow.
    divisor = cos * cos + sinh * sinh
    real = jnp.where(large, copy_sign(one, a), cosh * sinh / divisor)
    imaginary = jnp.where(large, copy_sign(zero, sin * cos), sin * cos / divisor)
    return lax.complex(real, imaginary)


@replacement("stablehlo.tan", applies=is_complex)
def complex_tangent(z: Array) -> Array:
    """The tangent: -i tanh(iz)."""
    turned = complex_tanh(lax.complex(-lax.imag(z), lax.real(z)))
    return lax.complex(lax.imag(turned), -lax.real(turned))


def _small_sinh(x: Array) -> Array:
    """The first terms of its series, for |x| < 0.5."""
    square = x * x
    total = full(x, 1.0)
    for n in range(15, 1, -2):
        total = full(x, 1.0) + square * total / full(x, n * (n - 1.0))
    return x * total


@replacement("stablehlo.exponential_minus_one", applies=is_complex)
def complex_expm1(z: Array) -> Array:
    """exp(z) - 1, without cancellation in the real part."""
    a, b = lax.real(z), lax.imag(z)
    exp, _ = exponential_and_logarithm(a.dtype)
    half = sine(b * full(b, 0.5))
    real = jnp.expm1(a) * cosine(b) - full(b, 2.0) * half * half
    return lax.complex(real, exp(a) * sine(b))
