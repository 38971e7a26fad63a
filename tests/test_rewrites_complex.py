"""Operations on complex numbers that are done by parts."""

import numpy as np
from _iree import run
from jax import lax


def test_pad_and_windowed_sum():
    def function(x, value):
        padded = lax.pad(x, value, [(1, 2, 1), (-1, 0, 0)])
        return padded, lax.reduce_window(x, np.zeros((), x.dtype), lax.add, (2, 2), (1, 2), "SAME")

    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, 4)) + 1j * rng.standard_normal((3, 4))).astype(np.complex64)
    run(function, x, np.complex64(2 - 3j)).check(rtol=1e-6)
