"""Elementary functions of float64.

Stands against IREE's CPU target computing log1p as log(1 + x) and expm1 as exp(x) - 1 in float64, which loses every
digit of a small argument without a word, and against tanh, cbrt and fmod, which do not link or do not lower there.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from fixstep.frontend.rewrites._exponential import exponential, logarithm
from fixstep.frontend.rewrites._real import Array, copy_sign, full, is_double
from fixstep.frontend.rewrites._replace import replacement


@replacement("stablehlo.log_plus_one", applies=is_double)
def log1p(x: Array) -> Array:
    """log(1 + x): the logarithm of the rounded sum, and a correction for what rounding took."""
    total = full(x, 1.0) + x
    correction = (x - (total - full(x, 1.0))) / total
    finite = jnp.isfinite(total) & (total > full(x, 0.0))
    result = logarithm(total) + jnp.where(finite, correction, full(x, 0.0))
    return jnp.where(total == full(x, 1.0), x, result)


@replacement("stablehlo.exponential_minus_one", applies=is_double)
def expm1(x: Array) -> Array:
    """exp(x) - 1, by W. Kahan's device: with u = exp(x) rounded, (u - 1) x / log(u)."""
    u = exponential(x)
    small = jnp.abs(x) < full(x, 0.5)
    safe = jnp.where(small & (u != full(x, 1.0)), u, full(x, 2.0))
    near = (u - full(x, 1.0)) * (x / logarithm(safe))
    return jnp.where(u == full(x, 1.0), x, jnp.where(small, near, u - full(x, 1.0)))


@replacement("stablehlo.tanh", applies=is_double)
def tanh(x: Array) -> Array:
    """The hyperbolic tangent, e / (e + 2) with e = exp(2 |x|) - 1."""
    size = jnp.minimum(jnp.abs(x), full(x, 22.0))
    e = expm1(full(x, 2.0) * size)
    result = jnp.where(size == full(x, 22.0), full(x, 1.0), e / (e + full(x, 2.0)))
    return jnp.where(jnp.isnan(x), x, copy_sign(result, x))


@replacement("stablehlo.remainder", applies=is_double)
def remainder(x: Array, y: Array) -> Array:
    """The exact remainder of a truncated division, in integers.

    With |x| = m 2^d u and |y| = n u, where u is the unit of y's last place, the remainder is (m 2^d mod n) u: the power
    of two is multiplied in eleven bits at a time, which a 64-bit word has room for.
    """
    m, m_exponent = _integer(x)
    n, n_exponent = _integer(y)
    divisor = jnp.maximum(n, jnp.ones_like(n))
    left = jnp.maximum(m_exponent - n_exponent, jnp.zeros_like(m_exponent))

    def turn(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, left = carry
        shift = jnp.minimum(left, jnp.full(left.shape, 11, np.int64))
        return lax.rem(rest << shift.astype(np.uint64), divisor), left - shift

    carry = (lax.rem(m, divisor), left)
    for _ in range(3):
        carry = turn(carry)
    rest, _ = lax.while_loop(lambda carry: jnp.any(carry[1] > jnp.zeros_like(carry[1])), turn, carry)
    size = _scaled(rest.astype(np.float64), n_exponent)
    size = jnp.where(jnp.abs(x) < jnp.abs(y), jnp.abs(x), size)
    defined = jnp.isfinite(x) & (y != full(y, 0.0)) & ~jnp.isnan(y)
    return jnp.where(defined, copy_sign(size, x), full(x, np.nan))


def _integer(x: Array) -> tuple[Array, Array]:
    """Integers m and e with |x| = m 2^(e - 1075)."""
    bits = lax.bitcast_convert_type(x, np.uint64)
    exponent = (bits >> full(x, 52, np.uint64)) & full(x, 0x7FF, np.uint64)
    mantissa = bits & full(x, (1 << 52) - 1, np.uint64)
    normal = exponent > full(x, 0, np.uint64)
    mantissa = jnp.where(normal, mantissa | full(x, 1 << 52, np.uint64), mantissa)
    return mantissa, jnp.maximum(exponent, full(x, 1, np.uint64)).astype(np.int64)


def _scaled(x: Array, exponent: Array) -> Array:
    """x 2^(exponent - 1075), in two steps because one power may be too small a number."""
    half = exponent >> full(exponent, 1)
    return x * _power_of_two(half - full(exponent, 538)) * _power_of_two(exponent - half - full(exponent, 537))


def _power_of_two(exponent: Array) -> Array:
    bits = (exponent + full(exponent, 1023)) << full(exponent, 52)
    return lax.bitcast_convert_type(bits, np.float64)
