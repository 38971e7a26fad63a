"""Sums: of narrow types, of constants, of many terms, and cumulative ones."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _iree import lower, run
from jax import lax

LENGTH = 4096
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def halves(dtype, *shape):
    return np.random.default_rng(0).uniform(0, 1, shape).astype(dtype)


def error(got, true):
    return float(np.max(np.abs(np.asarray(got).astype(np.float64) - true) / np.abs(true)))


def matrix_product(x):
    return x @ x.T, x.T @ jnp.ones((x.shape[0], 1), x.dtype)


def gradient_of_a_product(x):
    return jax.grad(lambda v: (v @ jnp.ones((LENGTH, 2), x.dtype)).astype(np.float32).sum())(x)


def convolution(x):
    return lax.conv(x[None, :, None, :], jnp.ones((1, x.shape[0], 1, 512), x.dtype), (1, 512), "VALID")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_accumulate_in_float32(dtype):
    x = halves(dtype, 8, LENGTH)
    wide = x.astype(np.float64)
    ones = np.ones((8, 512))
    true = [
        wide @ wide.T,
        np.stack([(wide[:, i : i + 512] * ones).sum() for i in range(0, LENGTH, 512)]).reshape(1, 1, 1, 8),
    ]
    result = run(lambda v: [matrix_product(v)[0], convolution(v)], x)
    for got, jax_result, exact in zip(result.outputs, result.expected, true, strict=True):
        assert error(got, exact) <= 1.1 * error(jax_result, exact) + 1e-7


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_unguarded_products_lose_digits(dtype):
    """Fails when IREE is mended: then the rule can go."""
    x = halves(dtype, 8, LENGTH)
    true = x.astype(np.float64) @ x.astype(np.float64).T
    result = run(lambda v: v @ v.T, x, rewritten=False)
    assert error(result.outputs[0], true) > 5 * error(result.expected[0], true)


def test_partial_sums_do_not_overflow():
    x = np.concatenate([np.full(2048, 200.0), np.full(2048, -200.0)]).astype(np.float16)
    run(lambda v: v @ jnp.full((LENGTH,), 2.0, jnp.float16), x).check()


def test_gradients_are_wide_and_chosen_types_stay():
    text = lower(gradient_of_a_product, halves(np.float16, 8, LENGTH))
    assert all("-> tensor<8x2xf32>" in line or "f32>" in line for line in text.splitlines() if "dot_general" in line)
    for dtype in (np.float32, np.float16):
        x = np.ones((4, 4), dtype)
        text = lower(lambda v: lax.dot(v, v, preferred_element_type=np.float32), x)
        assert text.count("stablehlo.convert") == 0


@pytest.mark.parametrize("result", ["int8", "int32"])
def test_narrow_integers_are_widened_outside_of_their_product(result):
    text = lower(lambda v: lax.dot(v, v, preferred_element_type=result), np.ones((4, 4), np.int8))
    widened, kept, product = (
        text.index(f"stablehlo.{op}") for op in ("convert", "optimization_barrier", "dot_general")
    )
    assert widened < kept < product
    assert "(tensor<4x4xi32>, tensor<4x4xi32>) -> tensor<4x4xi32>" in text[product:]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [*HALVES, np.dtype(np.float32)], ids=str)
def test_cumulative_sums(dtype, reverse):
    x = halves(dtype, LENGTH, 2)
    wide = x.astype(np.float64)
    true = np.cumsum(wide[::-1], 0)[::-1] if reverse else np.cumsum(wide, 0)
    result = run(lambda v: (lax.cumsum(v, axis=0, reverse=reverse), lax.cumsum(v[:200], axis=0, reverse=reverse)), x)
    assert result.written == []
    assert error(result.outputs[0], true) <= 4 * error(result.expected[0], true)
    assert error(result.outputs[1], true[:200] - (true[200] if reverse else 0)) <= 8 * float(ml_dtypes.finfo(dtype).eps)


def test_unguarded_cumulative_sums_lose_digits():
    """Fails when IREE is mended: then the rule can go."""
    x = halves(ml_dtypes.bfloat16, LENGTH)
    assert not run(jnp.cumsum, x, rewritten=False).is_right(rtol=0.1)


@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
def test_unsigned_windows(dtype):
    x = (np.arange(20) * 37).astype(dtype)

    def f(v):
        return (
            lax.cumsum(v),
            lax.cumprod(v),
            lax.cummax(v),
            lax.cummin(v, reverse=True),
            jnp.flip(v),
            lax.reduce_window(v, np.array(0, dtype), lax.add, (4,), (4,), "VALID"),
            lax.reduce_window(v, np.array(0, dtype), lax.max, (4,), (4,), "VALID"),
        )

    run(f, x).check()


def test_unguarded_unsigned_windows_do_not_compile():
    """Fails when IREE is mended: then the rule can go."""
    with pytest.raises(RuntimeError, match="failed to legalize"):
        run(lax.cumsum, np.arange(20, dtype=np.uint32), rewritten=False)


CONSTANTS = {
    "ones": lambda s: (-jnp.ones(16)).sum() * s,
    "no_argument": lambda s: (-jnp.ones(16)).sum(),
    "product": lambda s: (-jnp.ones(300)).prod() * s,
    "window": lambda s: lax.reduce_window(-jnp.ones(16), 0.0, lax.add, (4,), (4,), "VALID") * s,
    "exp": lambda s: jnp.exp(-jnp.ones(16)).sum() * s,
    "variance": lambda s: jnp.var(-jnp.ones(16) * 2) * s,
    "bfloat16": lambda s: (-jnp.ones(16, jnp.bfloat16)).sum() * s.astype(jnp.bfloat16),
    "random": lambda s: jax.random.normal(jax.random.key(0), (16,)).sum() * s,
    "matmul": lambda s: (-jnp.ones((16, 16)) @ jnp.ones(16)).sum() * s,
}


def test_reductions_of_constants():
    run(lambda s: [f(s) for f in CONSTANTS.values()], np.float32(3)).check(rtol=1e-6)


@pytest.mark.parametrize("name", ["window", "bfloat16", "product"])
def test_unguarded_reductions_of_constants_are_wrong(name):
    """Fails when IREE is mended: then the barriers can go."""
    assert not run(CONSTANTS[name], np.float32(3), rewritten=False).is_right(rtol=1e-6)


def test_large_sums_of_float32():
    x = np.ones(1 << 25, np.float32)
    run(jnp.sum, x).check()


def test_unguarded_large_sums_of_float32_stop_growing():
    """Fails when the flag of the CPU target is no longer needed."""
    x = np.ones(1 << 25, np.float32)
    result = run(jnp.sum, x, rewritten=False, without_flags=("--iree-llvmcpu-reassociate-fp-reductions",))
    assert float(result.outputs[0]) == 2.0**24


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = np.array([1.0, 1e-12])
        run(jnp.sum, x).check()


def test_unguarded_float64_is_demoted():
    """Fails when the flag of the CPU target is no longer needed."""
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"element type|type mismatch"):
        run(jnp.sum, np.array([1.0, 1e-12]), without_flags=("--iree-input-demote-f64-to-f32",))
