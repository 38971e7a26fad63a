"""Fourier transforms of any length, from products with small matrices.

Stands against IREE having a lowering of powers of two alone, and of neither inverse transforms nor several axes. A
length is split into factors (J. W. Cooley and J. W. Tukey): for n = p q the vector is a matrix of p rows and q columns,
whose columns are transformed, multiplied by powers of the n-th root of unity, and whose rows are then transformed. A
large prime is a convolution of a length that splits (L. I. Bluestein). Real and imaginary parts are arrays of their
own, so that no complex arithmetic is needed; the roots of unity are computed in float64 and stored as constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fixstep.frontend.rewrites._matrix import real_dtype
from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule

# A transform of up to this length is one product with a matrix.
_DIRECT = 64
# A prime factor beyond this is transformed by a convolution.
_LARGEST_FACTOR = 160

Pair = tuple[Array, Array | None]
"""Real and imaginary parts, the last axis the one transformed; the latter may be None for zero."""


@rule(lax.fft_p)
def fourier(x: Array, *, fft_type: Any, fft_lengths: Sequence[int]) -> Array | None:
    """A transform over the last axes."""
    if x.size == 0 or 0 in fft_lengths:
        return None
    kind, count = fft_type.name, len(fft_lengths)
    axes = [x.ndim - count + i for i in range(count)]
    if kind == "RFFT":
        pair: Pair = _along(_half, (x, None), axes[-1])
        return _join(_over(pair, axes[:-1], inverse=False))
    if kind == "IRFFT":
        pair = _over((lax.real(x), lax.imag(x)), axes[:-1], inverse=True)
        return _along(lambda part: (_from_half(part, fft_lengths[-1]), None), pair, axes[-1])[0]
    return _join(_over((lax.real(x), lax.imag(x)), axes, inverse=kind == "IFFT"))


def _over(pair: Pair, axes: Sequence[int], *, inverse: bool) -> Pair:
    """The complex transform over several axes, the last first."""
    for axis in reversed(axes):
        pair = _along(_inverse if inverse else _forward, pair, axis)
    return pair


def _along(transform: Any, pair: Pair, axis: int) -> Pair:
    """A transform of the last axis applied to another."""
    return _moved(transform(_moved(pair, axis, -1)), -1, axis)


def _moved(pair: Pair, source: int, destination: int) -> Pair:
    real, imaginary = pair
    moved = None if imaginary is None else jnp.moveaxis(imaginary, source, destination)
    return jnp.moveaxis(real, source, destination), moved


def _join(pair: Pair) -> Array:
    real, imaginary = pair
    return lax.complex(real, lax.full_like(real, 0) if imaginary is None else imaginary)


def _half(pair: Pair) -> Pair:
    """The transform of real numbers, of which the second half mirrors the first."""
    length = pair[0].shape[-1]
    real, imaginary = _forward(pair)
    kept = length // 2 + 1
    last = real.ndim - 1
    assert imaginary is not None
    imaginary = lax.slice_in_dim(imaginary, 0, kept, axis=last)
    # XLA gives exact zeros where the imaginary part is none.
    index = lax.broadcasted_iota(np.int32, imaginary.shape, last)
    none = index == np.int32(0)
    if length % 2 == 0:
        none = none | (index == np.int32(length // 2))
    return lax.slice_in_dim(real, 0, kept, axis=last), jnp.where(none, lax.full_like(imaginary, 0), imaginary)


def _from_half(pair: Pair, length: int) -> Array:
    """The real numbers with a given first half of their transform."""
    real, imaginary = pair
    assert imaginary is not None
    last = real.ndim - 1
    index = lax.broadcasted_iota(np.int32, imaginary.shape, last)
    none = index == np.int32(0)
    if length % 2 == 0:
        none = none | (index == np.int32(length // 2))
    imaginary = jnp.where(none, lax.full_like(imaginary, 0), imaginary)
    mirrored = slice(1, (length + 1) // 2)
    real = jnp.concatenate([real, jnp.flip(real[..., mirrored], axis=last)], axis=last)
    imaginary = jnp.concatenate([imaginary, -jnp.flip(imaginary[..., mirrored], axis=last)], axis=last)
    return _inverse((real, imaginary))[0]


def _forward(pair: Pair) -> Pair:
    """The complex transform of the last axis."""
    return _transform(pair, sign=-1)


def _inverse(pair: Pair) -> Pair:
    """The inverse of the complex transform of the last axis."""
    real, imaginary = _transform(pair, sign=1)
    length = lax.full_like(real, real.shape[-1])
    return real / length, None if imaginary is None else imaginary / length


def _transform(pair: Pair, sign: int) -> Pair:
    """The sum over j of x_j exp(sign 2 pi i j k / n)."""
    length = pair[0].shape[-1]
    first = _split(length)
    if first is None:
        return _convolved(pair, sign)
    if first == length:
        return _direct(pair, sign)
    second = length // first
    # x[j2 + q j1] is element (j1, j2) of a matrix of p rows; X[k1 + p k2] is element (k2, k1) of the result.
    columns = _moved(_reshaped(pair, (first, second)), -2, -1)
    columns = _transform(columns, sign)
    j2, k1 = np.arange(second)[:, None], np.arange(first)[None, :]
    columns = _times(columns, _root(sign * j2 * k1, length, pair[0]))
    result = _transform(_moved(columns, -2, -1), sign)
    result = _moved(result, -2, -1)
    shape = (*pair[0].shape[:-1], length)
    real, imaginary = result
    return lax.reshape(real, shape), None if imaginary is None else lax.reshape(imaginary, shape)


def _split(length: int) -> int | None:
    """A factor to transform first: the length itself where one product does, None where it is a large prime.

    Of the factors that one product does it is the one nearest to the root.
    """
    if length <= _DIRECT:
        return length
    factors = [d for d in range(2, math.isqrt(length) + 1) if length % d == 0]
    if not factors:
        return length if length <= _LARGEST_FACTOR else None
    small = [d for d in factors if d <= _DIRECT]
    return max(small) if small else factors[0]


def _direct(pair: Pair, sign: int) -> Pair:
    """One product with the matrix of the transform."""
    real, imaginary = pair
    index = np.arange(real.shape[-1])
    cosine, sine = _root(sign * index[:, None] * index[None, :], len(index), real)
    if imaginary is None:
        return _product(real, cosine), _product(real, sine)
    # One product instead of four: [real, imaginary] times [[cos, sin], [-sin, cos]].
    both = jnp.concatenate([real, imaginary], axis=-1)
    matrix = np.block([[cosine, sine], [-sine, cosine]])
    result = _product(both, matrix)
    length = len(index)
    last = result.ndim - 1
    return lax.slice_in_dim(result, 0, length, axis=last), lax.slice_in_dim(result, length, 2 * length, axis=last)


def _product(x: Array, matrix: np.ndarray[Any, Any]) -> Array:
    shape = x.shape
    flat = lax.reshape(x, (math.prod(shape[:-1]), shape[-1]))
    result = lax.dot(flat, jnp.asarray(matrix), precision=lax.Precision.HIGHEST)
    return lax.reshape(result, (*shape[:-1], matrix.shape[1]))


def _convolved(pair: Pair, sign: int) -> Pair:
    """With j k = (j^2 + k^2 - (k - j)^2) / 2 the transform is a convolution with a chirp, padded to a power of two."""
    length = pair[0].shape[-1]
    padded = 1 << (2 * length - 2).bit_length()
    index = np.arange(length)
    chirp = _root(sign * index * index, 2 * length, pair[0])
    angle = np.pi * ((index * index) % (2 * length)) / length
    kernel = np.zeros(padded, np.complex128)
    kernel[:length] = np.exp(-1j * sign * angle)
    kernel[padded - length + 1 :] = kernel[1:length][::-1]
    spectrum = np.fft.fft(kernel)
    dtype = real_dtype(pair[0])
    real, imaginary = _times(pair, chirp)
    margin = [(0, 0, 0)] * (real.ndim - 1) + [(0, padded - length, 0)]
    zero = np.zeros((), dtype)
    wide = _transform((lax.pad(real, zero, margin), lax.pad(_given(imaginary, real), zero, margin)), -1)
    wide = _times(wide, (spectrum.real.astype(dtype), spectrum.imag.astype(dtype)))
    real, imaginary = _inverse(wide)
    last = real.ndim - 1
    real = lax.slice_in_dim(real, 0, length, axis=last)
    return _times((real, lax.slice_in_dim(_given(imaginary, real), 0, length, axis=last)), chirp)


def _given(imaginary: Array | None, real: Array) -> Array:
    return lax.full_like(real, 0) if imaginary is None else imaginary


def _times(pair: Pair, factor: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> Pair:
    """The complex product with constants of the last axes."""
    real, imaginary = pair
    cosine, sine = factor
    if imaginary is None:
        return real * cosine, real * sine
    return real * cosine - imaginary * sine, real * sine + imaginary * cosine


def _root(power: np.ndarray[Any, Any], length: int, like: Array) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Cosines and sines of the angles 2 pi power / length, by the eighth of a turn that they lie in."""
    turn = np.mod(power, length)
    eighth = (8 * turn) // length
    # Within an eighth of a turn the angle is small, and both functions are exact to the last place of float64.
    rest = 2 * np.pi * (turn - eighth * (length / 8)) / length
    dtype = real_dtype(like)
    base = np.exp(2j * np.pi * np.arange(8) / 8)
    base = np.where(np.arange(8) % 2 == 0, np.round(base), base)
    value = base[eighth] * np.exp(1j * rest)
    return value.real.astype(dtype), value.imag.astype(dtype)


def _reshaped(pair: Pair, last: tuple[int, int]) -> Pair:
    real, imaginary = pair
    shape = (*real.shape[:-1], *last)
    return lax.reshape(real, shape), None if imaginary is None else lax.reshape(imaginary, shape)
