"""Convolutions as slices and a matrix product, against JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _iree import run
from jax import lax

from fixstep.frontend.rewrites import _convolution, rewrite_function

NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
# name: (shape of x, shape of w, arguments)
CASES = {
    "same": ((2, 6, 6, 3), (3, 3, 3, 4), {"padding": "SAME"}),
    "valid": ((2, 6, 6, 3), (3, 3, 3, 4), {"padding": "VALID"}),
    "1x1": ((2, 4, 4, 3), (1, 1, 3, 5), {"padding": "VALID"}),
    "stride": ((2, 7, 7, 3), (3, 3, 3, 4), {"window_strides": (2, 2), "padding": "SAME"}),
    "uneven": ((2, 7, 5, 3), (2, 4, 3, 4), {"window_strides": (2, 1), "padding": [(1, 2), (3, 0)]}),
    # Cropping beside padding is left out: there XLA on the CPU (jaxlib 0.10.2) does not give what it defines.
    "cropped": ((2, 8, 8, 2), (3, 3, 2, 4), {"padding": [(-1, -2), (-1, 0)]}),
    "dilated kernel": ((2, 8, 8, 2), (3, 3, 2, 4), {"padding": "SAME", "rhs_dilation": (2, 3)}),
    "transposed": ((2, 4, 4, 2), (3, 3, 2, 4), {"padding": [(2, 2), (2, 2)], "lhs_dilation": (2, 2)}),
    "depthwise": ((2, 6, 6, 4), (3, 3, 1, 8), {"padding": "SAME", "feature_group_count": 4}),
    "grouped": ((2, 6, 6, 4), (3, 3, 2, 6), {"padding": "SAME", "feature_group_count": 2}),
    "large kernel": ((2, 9, 9, 2), (7, 7, 2, 3), {"padding": "VALID"}),
    "nchw": ((2, 3, 6, 6), (4, 3, 3, 3), {"padding": "SAME", "dimension_numbers": NCHW}),
    "one dimension": (
        (2, 9, 3), (4, 3, 5),
        {"padding": "SAME", "dimension_numbers": ("NHC", "HIO", "NHC"), "window_strides": (1,)},
    ),
    "three dimensions": (
        (2, 4, 4, 4, 2), (2, 2, 2, 2, 3),
        {"padding": "SAME", "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"), "window_strides": (1, 1, 1)},
    ),
}  # fmt: skip


def make(name, dtype=np.float32):
    x_shape, w_shape, arguments = CASES[name]
    arguments = {"window_strides": (1, 1), "dimension_numbers": NHWC, **arguments}
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(dtype) for shape in (x_shape, w_shape))

    def value_and_grads(x, w):
        def loss(x, w):
            y = lax.conv_general_dilated(x, w, **arguments)
            return (y * y * jnp.asarray(0.5, y.dtype)).mean(), y

        grads, y = jax.grad(loss, (0, 1), has_aux=True)(x, w)
        return y, grads

    return value_and_grads, x, w


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_against_jax(name):
    function, x, w = make(name)
    rewritten = rewrite_function(function)
    assert "conv_general_dilated" not in str(jax.make_jaxpr(rewritten)(x, w))
    for got, want in zip(
        jax.tree.leaves(jax.jit(rewritten)(x, w)), jax.tree.leaves(jax.jit(function)(x, w)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["same", "stride", "transposed", "depthwise", "grouped", "nchw"])
def test_value_and_gradients_compiled(name):
    function, x, w = make(name)
    run(function, x, w).check(rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_types_are_kept(dtype):
    with jax.enable_x64(True):
        function, x, w = make("same", jnp.dtype(dtype))
        tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-12}[dtype]
        run(function, x, w).check(rtol=tolerance, atol=tolerance)


def test_under_vmap():
    function, x, w = make("same")
    many = jax.vmap(function, (0, None))
    xs = np.stack([x, x * 2])
    for got, want in zip(jax.tree.leaves(rewrite_function(many)(xs, w)), jax.tree.leaves(many(xs, w)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_what_costs_too_much_stays(monkeypatch):
    monkeypatch.setattr(_convolution, "MOST_PATCH_BYTES", 1000)
    function, x, w = make("same")
    assert "conv_general_dilated" in str(jax.make_jaxpr(rewrite_function(function))(x, w))


def test_an_empty_batch_stays():
    def empty(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)

    shape = jax.eval_shape(rewrite_function(empty), jnp.zeros((0, 4, 4, 2)), jnp.zeros((3, 3, 2, 4))).shape
    assert shape == (0, 4, 4, 4)
