"""Fourier transforms of every kind and length, beside numpy in float64, JAX and through IREE, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _iree import run

from fixstep.frontend.rewrites import rewrite_function

# Powers of two, products of small and of large factors, primes that are one product and primes that are not.
LENGTHS = {
    "float32": [1, 2, 3, 16, 60, 67, 128, 210, 331, 1000, 4096, 3 * 1021],
    "float64": [7, 64, 143, 512, 1009],
}
EPSILON = {"float32": 1.2e-7, "float64": 2.3e-16}
KINDS = {
    "fft": (np.fft.fft, jnp.fft.fft),
    "ifft": (np.fft.ifft, jnp.fft.ifft),
    "rfft": (np.fft.rfft, jnp.fft.rfft),
    "irfft": (np.fft.irfft, jnp.fft.irfft),
}


def data(shape, dtype, kind):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)
    return (x if kind == "rfft" else x + 1j * rng.standard_normal(shape)).astype(
        dtype if kind == "rfft" else np.result_type(dtype, np.complex64)
    )


def error(got, want):
    return np.sqrt(np.sum(np.abs(got - want) ** 2) / np.sum(np.abs(want) ** 2))


@pytest.mark.parametrize(("dtype", "length"), [(dtype, n) for dtype, lengths in LENGTHS.items() for n in lengths])
def test_accuracy(dtype, length):
    """Within a few roundings of the exact transform, as numpy's own is."""
    with jax.enable_x64(dtype == "float64"):
        for kind, (exact, function) in KINDS.items():
            for n in {length, length + 1} if kind == "irfft" else {length}:
                x = data((2, n // 2 + 1 if kind == "irfft" else n), dtype, kind)
                arguments = (n,) if kind == "irfft" else ()
                got = jax.jit(rewrite_function(lambda x, f=function, a=arguments: f(x, *a)))(x)
                want = exact(x.astype(np.complex128 if kind != "rfft" else np.float64), *arguments)
                assert got.dtype == jax.eval_shape(lambda x, f=function, a=arguments: f(x, *a), x).dtype
                assert error(np.asarray(got), want) < 4 * EPSILON[dtype] * np.sqrt(np.log2(n) + 1)


SEVERAL = {
    "fft2": lambda x: jnp.fft.fft2(x),
    "ifftn": lambda x: jnp.fft.ifftn(x),
    "rfft2": lambda x: jnp.fft.rfft2(x.real),
    "irfft2": lambda x: jnp.fft.irfft2(x, s=(5, 9)),
    "irfftn": lambda x: jnp.fft.irfftn(x),
    "rfft first axis": lambda x: jnp.fft.rfft(x.real, axis=0),
    "filter": lambda x: jnp.fft.irfft(jnp.fft.rfft(x.real, n=11) * 2, n=11),
}


def with_gradient(function):
    def both(real, imaginary):
        def loss(real, imaginary):
            y = function(real + 1j * imaginary)
            return jnp.sum(jnp.abs(y + 0.3) ** 2) + jnp.sum(jnp.real(y))

        return function(real + 1j * imaginary), jax.grad(loss, argnums=(0, 1))(real, imaginary)

    return both


def parts():
    rng = np.random.default_rng(1)
    return [rng.standard_normal((3, 5, 6)).astype(np.float32) for _ in range(2)]


@pytest.mark.parametrize("name", SEVERAL)
def test_several_axes(name):
    function = with_gradient(SEVERAL[name])
    got, want = jax.jit(rewrite_function(function))(*parts()), jax.jit(function)(*parts())
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5 * np.abs(w).max())


def test_batched():
    function = jax.vmap(jax.vmap(jnp.fft.rfft))
    x = parts()[0]
    np.testing.assert_allclose(jax.jit(rewrite_function(function))(x), np.fft.rfft(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_axes_through_iree(name):
    run(with_gradient(SEVERAL[name]), *parts()).check(rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("length", [8, 128, 210, 331])
def test_lengths_through_iree(length):
    def function(x):
        return jnp.fft.ifft(jnp.fft.fft(x) * 2), jnp.fft.rfft(x.real), jnp.fft.irfft(x)

    run(function, data((2, length), np.float32, "fft")).check(rtol=1e-4, atol=1e-4)


def test_double_through_iree():
    with jax.enable_x64(True):
        run(lambda x: jnp.fft.fft(x), data((2, 30), np.float64, "fft")).check(rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [7, 8])
def test_cosine_transforms(size):
    """Their constants are made of others, which the compiler does not compute beforehand."""
    x = np.random.default_rng(0).standard_normal((3, size)).astype(np.float32)
    run(lambda v: (jax.scipy.fft.dct(v), jax.scipy.fft.idctn(v)), x).check(rtol=1e-5, atol=1e-5)
