"""Types of less than eight bits and eight-bit floats, as codes (their bits, a byte each) and as wider numbers.

Inside of a step an integer is carried in an int8 or uint8 and a float in a float32, always one of those that the narrow
type has. What goes in and out of it are the codes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

Array = Any

INTEGERS = {"int2": 2, "int4": 4, "uint2": 2, "uint4": 4}
# Whether it has infinities, a NaN for every code with all exponent and fraction bits set, or one for that of -0.
_FLOATS = {
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e5m2"), "infinite"),
    "float8_e4m3fn": "finite",
    **dict.fromkeys(("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"), "one zero"),
    "float8_e8m0fnu": "powers of two",
}
NARROW = frozenset({*INTEGERS, *_FLOATS})


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is carried in a wider one."""
    return getattr(dtype, "name", "") in NARROW


def carrier(dtype: Any) -> np.dtype[Any]:
    """The dtype that carries a narrow one inside of a step."""
    name = dtype.name
    if name in INTEGERS:
        return np.dtype(np.int8 if name.startswith("int") else np.uint8)
    return np.dtype(np.float32)


def narrowed(x: Array, dtype: Any) -> Array:
    """A number of any type as the carried value of a narrow type: converted as JAX converts it."""
    if dtype.name not in INTEGERS:
        return rounded(x.astype(np.float32), dtype)
    if jnp.issubdtype(x.dtype, np.floating):
        low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        held = jnp.clip(jnp.trunc(x.astype(jnp.promote_types(x.dtype, np.float32))), low, high)
        return jnp.where(jnp.isnan(held), 0, held).astype(carrier(dtype))
    return rounded(x.astype(carrier(dtype)), dtype)


def rounded(x: Array, dtype: Any) -> Array:
    """A carrier's number as one that the narrow type has: integers wrap around, floats go to the nearest."""
    if dtype.name in INTEGERS:
        unused = jnp.asarray(8 - INTEGERS[dtype.name], x.dtype)
        right = lax.shift_right_arithmetic if dtype.name.startswith("int") else lax.shift_right_logical
        return right(lax.shift_left(x, jnp.broadcast_to(unused, x.shape)), jnp.broadcast_to(unused, x.shape))
    return decode(encode(x, dtype), dtype)


def decode(codes: Array, dtype: Any) -> Array:
    """The carried numbers of codes (uint8)."""
    if dtype.name in INTEGERS:
        return rounded(lax.bitcast_convert_type(codes, carrier(dtype)), dtype)
    form = _Form.of(dtype)
    wide = codes.astype(np.int32)
    if form.kind == "powers of two":
        # The smallest is half of float32's smallest normal number.
        bits = jnp.where(wide == 0, 1 << 22, wide << 23)
        return jnp.where(wide == 255, np.float32(np.nan), lax.bitcast_convert_type(bits, np.float32))
    size = wide & 0x7F
    exponent, fraction = size >> form.fraction_bits, size & (1 << form.fraction_bits) - 1
    normal = (exponent - form.bias + 127) << 23 | fraction << (23 - form.fraction_bits)
    value = jnp.where(
        exponent == 0,
        fraction.astype(np.float32) * np.float32(form.smallest),
        lax.bitcast_convert_type(normal, np.float32),
    )
    value = jnp.where(wide >= 128, -value, value)
    if form.kind == "one zero":
        return jnp.where(wide == 0x80, np.float32(np.nan), value)
    if form.kind == "finite":
        return jnp.where(size == 0x7F, np.float32(np.nan), value)
    infinity = 0x7F >> form.fraction_bits << form.fraction_bits
    special = jnp.where(fraction != 0, np.float32(np.nan), jnp.where(wide >= 128, -np.inf, np.inf).astype(np.float32))
    return jnp.where(size >= infinity, special, value)


def encode(x: Array, dtype: Any) -> Array:
    """The codes (uint8) of the narrow type's nearest numbers, halves to the even code."""
    if dtype.name in INTEGERS:
        return lax.bitcast_convert_type(x, np.uint8) & np.uint8((1 << INTEGERS[dtype.name]) - 1)
    form = _Form.of(dtype)
    bits = lax.bitcast_convert_type(x, np.int32)
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    if form.kind == "powers of two":
        # Half the smallest normal number of float32, the smallest here, has no exponent of its own.
        code = jnp.where(bits <= 1 << 22, 0, jnp.minimum((bits + (1 << 22)) >> 23, 255))
        return jnp.where(is_nan | (bits <= 0), 255, code).astype(np.uint8)
    # A normal number of the narrow type is the float32's bits with a shorter fraction and another bias; carries of the
    # rounding go into the exponent as they should. A smaller one is a count of the smallest.
    shift = 23 - form.fraction_bits
    normal = _half_even(size, shift) - ((127 - form.bias) << form.fraction_bits)
    magnitude = lax.bitcast_convert_type(size, np.float32)
    tiny = jnp.round(jnp.minimum(magnitude, np.float32(1)) * np.float32(1 / form.smallest)).astype(np.int32)
    code = jnp.where(size < (128 - form.bias) << 23, tiny, normal)
    over = code > form.largest
    if form.kind == "one zero":
        signed = jnp.where((bits < 0) & (code != 0), code | 0x80, code)
        return jnp.where(is_nan | over, 0x80, signed).astype(np.uint8)
    outside = form.largest + 1 if form.kind == "infinite" else 0x7F
    code = jnp.where(over, outside, code)
    code = jnp.where(is_nan, form.nan, code)
    return jnp.where(bits < 0, code | 0x80, code).astype(np.uint8)


def _half_even(bits: Array, shift: int) -> Array:
    return bits + (1 << (shift - 1)) - 1 + (bits >> shift & 1) >> shift


@dataclasses.dataclass(frozen=True)
class _Form:
    """How an eight-bit float is put together.

    Attributes:
        kind: what it has beside numbers, as in `_FLOATS`.
        fraction_bits: bits of its fraction.
        bias: of its exponent.
        smallest: its smallest number above zero.
        largest: the code of its largest number.
        nan: a code of NaN.
    """

    kind: str
    fraction_bits: int
    bias: int
    smallest: float
    largest: int
    nan: int

    @classmethod
    def of(cls, dtype: Any) -> _Form:
        """The form of a dtype."""
        limits = ml_dtypes.finfo(dtype)
        largest = int(np.asarray(limits.max, dtype).view(np.uint8))
        nan = int(np.asarray(np.nan, dtype).view(np.uint8)) & 0x7F
        return cls(_FLOATS[dtype.name], limits.nmant, 1 - limits.minexp, float(limits.smallest_subnormal), largest, nan)
