"""Matrices for the tests of linear algebra."""

import numpy as np


def matrix(shape, dtype=np.float32, seed=0):
    """A random matrix, or a stack of them; complex where the dtype is."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(dtype)
