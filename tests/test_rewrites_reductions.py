"""Sums over several axes of a product with a row, and reductions over long axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _iree import run


def arrays():
    rng = np.random.default_rng(0)
    return rng.standard_normal((3, 5, 6)).astype(np.float32), rng.standard_normal(6).astype(np.float32)


def test_sums():
    def function(a, w):
        return jnp.sum(a * w), jnp.sum(a * w, axis=(1, 2)), jnp.sum(a * w, axis=(0, 2)), jnp.mean(a[0] * w)

    run(function, *arrays()).check(rtol=1e-5, atol=1e-5)


def test_sum_as_it_is_fails():
    """Fails when IREE is mended: then the rewrite can go."""
    with pytest.raises(RuntimeError, match=r"'vector\.contract' op invalid accumulator"):
        run(lambda a, w: jnp.sum(a * w), *arrays(), rewritten=False)


LONG = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "norm": jnp.linalg.norm,
    "product": lambda x: jnp.prod(1 + x * 1e-4),
    "largest": jnp.max,
    "smallest": jnp.min,
    "columns": lambda x: x[:80_000].reshape(-1, 2).sum(0),
    "any": lambda x: jnp.any(x > 4.5),
}


@pytest.mark.parametrize("length", [1_000_000, 1_000_003])  # with a divisor near the square root, and a prime
@pytest.mark.parametrize("kind", LONG)
def test_a_long_axis_is_as_accurate_as_in_jax(kind, length):
    x = np.random.default_rng(1).standard_normal(length).astype(np.float32) + np.float32(0.5)
    with jax.enable_x64(True):
        exact = np.asarray(LONG[kind](x.astype(np.float64)))
    theirs = np.abs(np.asarray(jax.jit(LONG[kind])(x), np.float64) - exact).max()
    (ours,) = run(LONG[kind], x).outputs
    allowed = 4 * theirs + 8 * float(np.finfo(np.float32).eps) * np.abs(exact).max()
    assert np.abs(np.asarray(ours, np.float64) - exact).max() <= allowed
