"""Derivatives of pooling: every window, stride and padding, ties and NaN, beside JAX and through IREE."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _iree import run
from jax import lax

from fixstep.frontend.rewrites import rewrite_function

# shape, window, strides, padding
POOLS = {
    "apart": ((2, 6, 6, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "apart, a rest": ((2, 7, 5, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "overlapping": ((2, 7, 8, 3), (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "stride one": ((1, 6, 5, 2), (1, 3, 2, 1), (1, 1, 1, 1), "SAME"),
    "stride beyond the window": ((1, 9, 10, 2), (1, 2, 2, 1), (1, 3, 4, 1), "VALID"),
    "uneven": ((10,), (5,), (2,), ((1, 3),)),
    "channels first": ((2, 3, 6, 7), (1, 1, 3, 2), (1, 1, 2, 1), ((0, 0), (0, 0), (2, 1), (0, 1))),
    "global": ((2, 7, 7, 3), (1, 7, 7, 1), (1, 1, 1, 1), "VALID"),
    "long": ((200,), (40,), (1,), "SAME"),
    "long, wide stride": ((2, 200), (1, 60), (1, 45), ((0, 0), (7, 8))),
}


def pool(pooling, reducer, initial):
    _, window, strides, padding = pooling

    def apply(x):
        return lax.reduce_window(x, np.array(initial, x.dtype), reducer, window, strides, padding)

    return apply


def data(shape, dtype=np.float32, kind="ties"):
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, shape) if kind == "ties" else rng.standard_normal(shape)
    x = np.array(x, dtype)
    if kind == "nan":
        x[rng.random(shape) < 0.2] = np.nan
        x[rng.random(shape) < 0.2] = -np.inf
    return x


def weights(like):
    return ((np.arange(like.size) * 7) % 16 - 7).astype(like.dtype).reshape(like.shape)


def gradient(apply):
    def step(x):
        y, pull = jax.vjp(apply, x)
        return y, pull(weights(y))[0]

    return step


def tangent(apply):
    return lambda x: jax.jvp(apply, (x,), (weights(x),))


def check_in_jax(function, *args, rtol=0.0):
    got, want = jax.jit(rewrite_function(function))(*args), jax.jit(function)(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g.astype(np.float32), w.astype(np.float32), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("kind", ["ties", "nan"])
@pytest.mark.parametrize("pooling", POOLS.values(), ids=POOLS)
def test_gradient(pooling, kind):
    check_in_jax(gradient(pool(pooling, lax.max, -np.inf)), data(pooling[0], kind=kind))


@pytest.mark.parametrize("pooling", POOLS.values(), ids=POOLS)
def test_tangent(pooling):
    # Which of several equal elements JAX takes here depends on how XLA lays out its loops.
    check_in_jax(tangent(pool(pooling, lax.max, -np.inf)), data(pooling[0], kind="normal"))


@pytest.mark.parametrize("kind", ["ties", "nan"])
def test_tangent_of_one_axis(kind):
    check_in_jax(tangent(pool(POOLS["uneven"], lax.max, -np.inf)), data((10,), kind=kind))


@pytest.mark.parametrize("derivative", [gradient, tangent], ids=lambda f: f.__name__)
def test_minimum(derivative):
    pooling = POOLS["overlapping"]
    check_in_jax(derivative(pool(pooling, lax.min, np.inf)), data(pooling[0], kind="normal"))


def test_second_derivative_and_batch():
    apply = pool(POOLS["uneven"], lax.max, -np.inf)
    loss = jax.grad(lambda x: (apply(jnp.sin(x)) ** 3).sum())
    check_in_jax(jax.vmap(jax.grad(lambda x: (loss(x) ** 2).sum())), data((3, 10), kind="normal"), rtol=1e-5)


def test_dilation():
    def apply(x):
        return lax.reduce_window(
            x, -np.inf, lax.max, (3, 2), (2, 1), ((2, 1), (0, 3)), base_dilation=(2, 3), window_dilation=(2, 1)
        )

    check_in_jax(tangent(apply), data((6, 5), kind="normal"))


@pytest.mark.parametrize("pooling", POOLS.values(), ids=POOLS)
def test_through_iree(pooling):
    apply = pool(pooling, lax.max, -np.inf)
    run(lambda x, y: (gradient(apply)(x), tangent(apply)(y)), data(pooling[0]), data(pooling[0], kind="normal")).check()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_half(dtype):
    pooling = POOLS["overlapping"]
    run(gradient(pool(pooling, lax.max, -np.inf)), data(pooling[0], dtype)).check()


def test_double():
    pooling = POOLS["overlapping"]
    with jax.enable_x64(True):
        run(gradient(pool(pooling, lax.max, -np.inf)), data(pooling[0], np.float64)).check()
