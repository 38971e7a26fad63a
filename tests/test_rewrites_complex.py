"""Operations on complex numbers that are done by parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _iree import run
from jax import lax

rng = np.random.default_rng(0)
Z = (rng.standard_normal((3, 4)) + 1j * rng.standard_normal((3, 4))).astype(np.complex64)
ROW = (rng.standard_normal(9) + 1j * rng.standard_normal(9)).astype(np.complex64)
# Its real parts are equal in pairs.
PAIRS = (np.arange(12) // 2 % 3 + 1j * rng.permutation(12)).astype(np.complex64).reshape(2, 6)


def pad_and_windowed_sum(x):
    padded = lax.pad(x, np.complex64(2 - 3j), [(1, 2, 1), (-1, 0, 0)])
    return padded, lax.reduce_window(x, np.zeros((), x.dtype), lax.add, (2, 2), (1, 2), "SAME")


def cumulative(x):
    backwards = lax.cumprod(x, axis=1, reverse=True)
    return jnp.cumsum(x, 1), jnp.cumprod(x, 0), backwards, lax.cumsum(x, axis=0, reverse=True)


def convolved(x, row):
    window = x.reshape(1, 3, 4, 1)
    numbers = ("NHWC", "HWIO", "NHWC")
    image = lax.conv_general_dilated(window, x[:2, :2, None, None], (1, 1), "SAME", dimension_numbers=numbers)
    return jnp.convolve(row, x[0]), image


def sorted_by_parts(pairs):
    by_number = lax.sort((pairs, jnp.arange(12.0).reshape(2, 6)), dimension=1, num_keys=1)
    return jnp.sort(pairs), jnp.argsort(pairs, 0), by_number, lax.sort((pairs.imag, pairs), num_keys=1)


@pytest.mark.parametrize(
    "case",
    [(pad_and_windowed_sum, Z), (cumulative, Z), (convolved, Z, ROW), (sorted_by_parts, PAIRS)],
    ids=lambda case: case[0].__name__,
)
def test_by_parts(case):
    run(case[0], *case[1:]).check(rtol=1e-5, atol=1e-6)


def test_gradients():
    def value(x):
        z = lax.complex(x, 1 - x)
        return jnp.abs(z**2.5 / (z + 2) + jnp.tanh(z) * jnp.cumprod(z) + jnp.sort(z)).sum()

    run(jax.grad(value), rng.standard_normal(6).astype(np.float32)).check(rtol=1e-4, atol=1e-5)


INF, NAN = np.inf, np.nan
VALUES = np.array(
    [1 + 2j, -1 + 0.5j, 0, 1j, complex(INF, 1), complex(1, -INF), complex(-INF, INF), complex(NAN, 1), 1e30 + 1e30j,
     1e-30 - 1e-30j, 3 - 1j, -8 + 0.01j, 11 + 2j, 1e-4j, 0.3 + 1.5707963j],
    np.complex64,
)  # fmt: skip
FIRST, SECOND = (v.reshape(-1) for v in np.meshgrid(VALUES, VALUES))
POWERS = np.array([0, 1, 2, -1, 1j, 2 + 1j, -0.5, 0.5 - 1j], np.complex64)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_zeros_infinities_and_extremes(dtype):
    """A part that is nothing beside the other is compared with it."""

    def functions(x, y, base, exponent):
        unary = (jnp.tanh, jnp.tan, jnp.sinh, jnp.cosh, jnp.expm1, jnp.sign)
        return x / y, base**exponent, [f(base[:15]) for f in unary]

    base, exponent = (v.reshape(-1) for v in np.meshgrid(VALUES, POWERS))
    with jax.enable_x64(dtype == np.complex128):
        ran = run(functions, *(v.astype(dtype) for v in (FIRST, SECOND, base, exponent)))
    for got, want in zip(ran.outputs, ran.expected, strict=True):
        size = np.where(np.isfinite(want), np.abs(want), 0)
        for part in (np.real, np.imag):
            with np.errstate(invalid="ignore"):
                close = np.abs(part(got) - part(want)) <= 2e-5 * size + 1e-29
            same = (part(got) == part(want)) | np.isnan(part(got)) & np.isnan(part(want))
            assert (close | same).all(), (got[~(close | same)], want[~(close | same)])
