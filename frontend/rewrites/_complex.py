"""What moves, sorts, sums up or convolves complex numbers, by real and imaginary parts.

Stands against IREE's compiler crashing on padding, windowed and cumulative sums and products, and on convolutions, and
against sorts that do not compile for Vulkan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import Rule, apply_rules, rule


def _complex_rule(primitive: Any) -> Callable[[Rule], Rule]:
    """Register a rule for complex numbers alone, told by the first operand."""

    def register(function: Rule) -> Rule:
        @rule(primitive)
        @functools.wraps(function)
        def applied(*operands: Array, **params: Any) -> Any:
            return function(*operands, **params) if operands[0].dtype.kind == "c" else None

        return applied

    return register


def _parts(x: Array) -> tuple[Array, Array]:
    return lax.real(x), lax.imag(x)


def _bound(primitive: Any, *operands: Array, **params: Any) -> Any:
    """What a primitive gives for real operands, by the rules for those."""
    results = apply_rules(primitive, operands, params)
    if results is None:
        return primitive.bind(*operands, **params)
    return results if primitive.multiple_results else results[0]


@_complex_rule(lax.pad_p)
def pad(x: Array, value: Array, *, padding_config: Any) -> Array:
    """Padding of complex numbers."""
    return lax.complex(*(lax.pad(p, v, padding_config) for p, v in zip(_parts(x), _parts(value), strict=True)))


@_complex_rule(lax.reduce_window_sum_p)
def windowed_sum(x: Array, **params: Any) -> Array:
    """The sum over windows of complex numbers."""
    return lax.complex(*(_bound(lax.reduce_window_sum_p, part, **params) for part in _parts(x)))


@_complex_rule(lax.cumsum_p)
def cumulative_sum(x: Array, **params: Any) -> Array:
    """The cumulative sum of complex numbers."""
    return lax.complex(*(_bound(lax.cumsum_p, part, **params) for part in _parts(x)))


@_complex_rule(lax.cumprod_p)
def cumulative_product(x: Array, *, axis: int, reverse: bool) -> Array:
    """The cumulative product of complex numbers."""

    def product(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]

    return lax.complex(*lax.associative_scan(product, _parts(x), reverse=reverse, axis=axis))


@_complex_rule(lax.conv_general_dilated_p)
def convolution(lhs: Array, rhs: Array, **params: Any) -> Array:
    """A convolution of complex numbers."""
    real_type = None if params["preferred_element_type"] is None else lax.real(lhs).dtype
    params = {**params, "preferred_element_type": real_type}
    (a, b), (c, d) = _parts(lhs), _parts(rhs)

    def convolved(x: Array, y: Array) -> Array:
        return _bound(lax.conv_general_dilated_p, x, y, **params)

    return lax.complex(convolved(a, c) - convolved(b, d), convolved(a, d) + convolved(b, c))


@rule(lax.sort_p)
def sort(*operands: Array, num_keys: int, **params: Any) -> list[Array] | None:
    """A sort by or of complex numbers: by their real parts, and among equal ones by the imaginary parts."""
    is_complex = [x.dtype.kind == "c" for x in operands]
    if not any(is_complex):
        return None
    split = [part for x in operands for part in (_parts(x) if x.dtype.kind == "c" else (x,))]
    results = iter(_bound(lax.sort_p, *split, num_keys=num_keys + sum(is_complex[:num_keys]), **params))
    return [lax.complex(next(results), next(results)) if pair else next(results) for pair in is_complex]


@_complex_rule(lax.cosh_p)
def hyperbolic_cosine(z: Array, **_: Any) -> Array:
    """cosh of complex numbers."""
    a, b = _parts(z)
    return lax.complex(jnp.cosh(a) * jnp.cos(b), jnp.sinh(a) * jnp.sin(b))


@_complex_rule(lax.sinh_p)
def hyperbolic_sine(z: Array, **_: Any) -> Array:
    """sinh of complex numbers."""
    a, b = _parts(z)
    return lax.complex(jnp.sinh(a) * jnp.cos(b), jnp.cosh(a) * jnp.sin(b))
