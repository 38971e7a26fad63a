"""Sums over several axes of a product with a row."""

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
