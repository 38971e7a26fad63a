"""Sorts keep the order of equals, and long ones are sorted by a network."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _iree import lower, run
from jax import lax

from fixstep.frontend.rewrites import rewrite_function


def keys(dtype, *shape):
    """Many equals, and for floats the special numbers."""
    values = np.random.default_rng(0).integers(0, 7, shape).astype(dtype)
    if values.dtype.kind not in "biu":
        flat = values.reshape(-1)
        flat[1:6] = [np.nan, -0.0, 0.0, np.inf, -np.inf]
    return values


def sorts(k):
    places = lax.broadcasted_iota(np.int32, k.shape, k.ndim - 1)
    return (
        jnp.argsort(k),
        jnp.argsort(k, descending=True),
        jnp.sort(k, axis=0),
        lax.sort((k, places, k[..., ::-1]), num_keys=1),
        lax.sort((k, k[..., ::-1], places), num_keys=2),
    )


DTYPES = [np.bool_, np.int8, np.uint32, np.float16, ml_dtypes.bfloat16, np.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("shape", [(16,), (3, 7)], ids=str)
def test_equals_keep_their_order(dtype, shape):
    run(sorts, keys(dtype, *shape)).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("shape", [(600,), (2, 700), (513, 2)], ids=str)
def test_a_network_sorts_as_jax_does(dtype, shape):
    k = keys(dtype, *shape)
    for got, want in zip(jax.tree.leaves(jax.jit(rewrite_function(sorts))(k)), jax.tree.leaves(sorts(k)), strict=True):
        np.testing.assert_array_equal(
            np.asarray(got).view(f"V{got.itemsize}"), np.asarray(want).view(f"V{want.itemsize}")
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("length", [40, 3000])
def test_largest(dtype, length):
    run(lambda v: (lax.top_k(v, 9), lax.top_k(v.reshape(2, -1), 3)), keys(dtype, length)).check()


@pytest.mark.parametrize("length", [40, 3000])
def test_approximately_largest(length):
    x = np.random.default_rng(0).permutation(length).astype(np.float32)

    def both(v):
        rows = v.reshape(2, -1)
        return lax.approx_max_k(v, 9), lax.approx_min_k(rows, 3), lax.approx_max_k(rows, 1, reduction_dimension=0)

    run(both, x).check()
    gradient = jax.grad(lambda v: (lax.approx_min_k(v, 5)[0] * jnp.arange(5.0)).sum())
    run(gradient, x).check()


def test_long_sorts_and_shuffles():
    data = np.array([0, 3], np.uint32)

    def f(x, data):
        key = jax.random.wrap_key_data(data)
        return jnp.argsort(x), jax.random.permutation(key, 20_000), x

    run(f, keys(np.float32, 20_000), data).check()


def test_gradient_of_a_long_sort():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    run(lambda v: jax.grad(lambda u: (jnp.sort(u) * jnp.arange(1000.0)).sum())(v), x).check(rtol=1e-6)


def test_unguarded_sorts_exchange_equals():
    """Fails when IREE is mended: then the turned comparison can go."""
    assert not run(jnp.argsort, keys(np.int32, 16), rewritten=False).is_right()


def test_unguarded_long_sorts_do_not_compile():
    """Fails when IREE is mended."""
    with pytest.raises(RuntimeError, match="exceeded stack allocation limit"):
        run(jnp.argsort, keys(np.float32, 10_000), rewritten=False)


def test_every_result_of_a_sort_is_used():
    """IREE's compiler for GPUs ends with a signal on one whose keys nothing reads; `ranks_alone` is such a step."""
    x = np.array([3.0, 1.0, 2.0, 1.0], np.float32)
    assert re.search(r"optimization_barrier (%\w+)#0, \1#1", lower(jnp.argsort, x))
    run(jnp.argsort, x).check()
