"""An added zero and the sign of zero."""

import jax.numpy as jnp
import numpy as np
import pytest
from _iree import module, run

X = np.array([-2.0, -0.0, 0.0, 3.0], np.float32)

FUNCTIONS = {
    "right": lambda x: 1 / (x * 0 + 0.0),
    "left": lambda x: 1 / (0.0 + x * 0),
    "minus zero": lambda x: 1 / (x * 0 + jnp.float32(-0.0)),
    "array of zeros": lambda x: 1 / (x * 0 + jnp.zeros(4)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_sign_is_that_of_jax(name):
    run(FUNCTIONS[name], X).check()


def test_other_additions_stay():
    assert str(module(lambda x, n: (x + 1.0, n + 0, x + x), X, np.int32(3)).operation).count("stablehlo.add") == 3


def test_unguarded_sign_is_another():
    assert not run(FUNCTIONS["right"], X, rewritten=False).is_right()
