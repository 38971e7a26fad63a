"""Elementary functions and conversions over their whole range: against JAX alone, and through the compiler."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _iree import run
from jax import lax

from fixstep.frontend.rewrites import _arctangent, _exponential, _float64, _roots_and_powers, _trigonometry

FLOATS = ["float16", "bfloat16", "float32", "float64"]
EXPONENTS = {"float16": 4, "bfloat16": 37, "float32": 37, "float64": 300}


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def numbers(name, seed=0):
    """Numbers of every size and sign, and the special ones; no subnormal ones, which devices flush as they like."""
    r = np.random.default_rng(seed)
    exponent = EXPONENTS[name]
    sizes = np.concatenate(
        [
            10.0 ** r.uniform(-exponent, exponent, 300),
            r.uniform(0, 10, 300),
            r.uniform(0, 1e4, 300),
            np.arange(20) / 2,
            np.arange(1, 20) * np.pi / 2,
            [0.0, np.inf, np.nan, 1e4, 3.2e4],
        ]
    )
    with np.errstate(over="ignore"):
        return r.permutation(np.concatenate([sizes, -sizes])).astype(dtype_of(name))


def in_last_places(got, want, dtype):
    """The distance of each result from the true one in units in the last place; infinite if only one is NaN."""
    limits = ml_dtypes.finfo(dtype)
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    with np.errstate(all="ignore"):
        unit = np.maximum(2.0 ** np.floor(np.log2(np.abs(want))) * float(limits.eps), float(limits.smallest_normal))
        distance = np.abs(got - want) / unit
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    distance = np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))
    return np.where(np.abs(want) < float(limits.smallest_normal), np.where(np.abs(got) < 1e-30, 0, distance), distance)


UNARY = {
    "sin": (jnp.sin, np.sin, 2),
    "cos": (jnp.cos, np.cos, 2),
    "tan": (jnp.tan, np.tan, 4),
    "arctan": (jnp.arctan, np.arctan, 3),
    "arcsin": (jnp.arcsin, np.arcsin, 4),
    "arccos": (jnp.arccos, np.arccos, 4),
    "tanh": (jnp.tanh, np.tanh, 8),
    "exp": (jnp.exp, np.exp, 64),  # IREE's exp of float32 is exp2, which keeps fewer digits of a large one
    "log": (jnp.log, np.log, 4),
    "log1p": (jnp.log1p, np.log1p, 4),
    "expm1": (jnp.expm1, np.expm1, 4),
    "cbrt": (jnp.cbrt, np.cbrt, 4),
    "arctanh": (jnp.arctanh, np.arctanh, 8),
}


@pytest.mark.parametrize("name", FLOATS)
def test_unary_functions_through_the_compiler(name):
    with jax.enable_x64(True):
        x = numbers(name)
        result = run(lambda v: [function(v) for function, _, _ in UNARY.values()], x)
    for got, (label, (_, true, bound)) in zip(result.outputs, UNARY.items(), strict=True):
        with np.errstate(all="ignore"):
            want = true(x.astype(np.float64)).astype(x.dtype)
        worst = in_last_places(got, want, x.dtype)
        place = int(np.argmax(worst))
        assert worst[place] <= bound, f"{label} of {x[place]}: {got[place]}, truly {want[place]}"


BINARY = {
    "arctan2": (jnp.arctan2, np.arctan2, 4),
    "power": (lax.pow, np.power, 400),  # of a large logarithm IREE's exp2 and log2 keep fewer digits
    "fmod": (lax.rem, np.fmod, 0),
}
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 0.5, -0.5, np.inf, -np.inf, np.nan, 7.0, -1e30])


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("special", [False, True])
def test_binary_functions_through_the_compiler(name, special):
    with jax.enable_x64(True):
        x, y = numbers(name), numbers(name, 1)
        if special:
            x, y = (grid.reshape(-1).astype(name) for grid in np.meshgrid(SPECIAL, SPECIAL))
        result = run(lambda a, b: [function(a, b) for function, _, _ in BINARY.values()], x, y)
    for got, (label, (_, true, bound)) in zip(result.outputs, BINARY.items(), strict=True):
        with np.errstate(all="ignore"):
            # The remainder of two float32 is exact in float32; in float64 it would be that of other numbers.
            want = true(x, y) if label == "fmod" else true(x.astype(np.float64), y.astype(np.float64)).astype(name)
        worst = in_last_places(got, want, x.dtype)
        place = int(np.argmax(worst))
        assert worst[place] <= bound, f"{label} of {x[place]}, {y[place]}: {got[place]}, truly {want[place]}"
        if special:
            np.testing.assert_array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_replacements_alone(name):
    """The functions that take the place of operations, run by JAX one operation at a time, so that XLA keeps them."""
    cases = [
        (_trigonometry.sine, np.sin),
        (_trigonometry.cosine, np.cos),
        (_trigonometry.tangent, np.tan),
        (_roots_and_powers.cube_root, np.cbrt),
    ]
    if name == "float64":
        cases += [(_exponential.exponential, np.exp), (_exponential.logarithm, np.log)]
        cases += [(_exponential.logistic, lambda v: 1 / (1 + np.exp(-v)))]
        cases += [(_float64.log1p, np.log1p), (_float64.expm1, np.expm1), (_float64.tanh, np.tanh)]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        x = jnp.asarray(numbers(name))
        for function, true in cases:
            with np.errstate(all="ignore"):
                want = true(np.asarray(x, np.float64)).astype(name)
            assert in_last_places(function(x), want, x.dtype).max() <= 8, function.__name__
        want = np.arctan2(np.asarray(x, np.float64), np.asarray(x, np.float64)[::-1]).astype(name)
        assert in_last_places(_arctangent.arctangent2(x, x[::-1]), want, x.dtype).max() <= 4
        if name == "float64":
            with np.errstate(invalid="ignore"):
                want = np.fmod(np.asarray(x), np.asarray(x)[::-1])
            np.testing.assert_array_equal(_float64.remainder(x, x[::-1]), want)


def test_magnitudes_of_complex_numbers():
    parts = np.array([0.0, 1e-30, 3.0, -4.0, 1e30, np.inf, np.nan], np.float32)
    real, imaginary = np.meshgrid(parts, parts)
    run(lambda a, b: jnp.abs(lax.complex(a, b)), real, imaginary).check(rtol=1e-6)


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
EDGES = [2.0**k + d for k in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, -0.5, 0, 1)]


@pytest.mark.parametrize("name", FLOATS)
def test_floats_become_integers_as_in_jax(name):
    values = np.array([0.0, 0.5, 1.9, 1e30, np.inf, *EDGES])
    with jax.enable_x64(True), np.errstate(over="ignore"):
        x = np.concatenate([values, -values, [np.nan]]).astype(dtype_of(name))
        run(lambda v: [lax.convert_element_type(v, target) for target in INTEGERS], x).check()


def test_nan_in_orders_and_comparisons():
    """Right without a rewrite."""
    x = np.array([1.0, np.nan, -np.inf, 3.0, -0.0, 0.0, np.inf, 2.0], np.float32)

    def f(x):
        y = x[::-1]
        return jnp.argmax(x), jnp.argmin(x), jnp.sort(x), jnp.max(x), jnp.maximum(x, y), x < y, x != y, jnp.sign(x)

    run(f, x).check()


UNGUARDED = {
    "sine": (jnp.sin, np.array([1e6, 1e12], np.float32)),
    "cosine": (jnp.cos, np.array([1e6, 1e12], np.float32)),
    "tangent": (jnp.tan, np.array([1e6, 1e12], np.float32)),
    "arctangent2": (jnp.arctan, np.array([0.6527042, 0.6527], np.float32)),
    "power": (lambda x: lax.pow(x, x), np.array([0.0, -3.0], np.float32)),
    "cube_root": (jnp.cbrt, np.array([np.inf, 8.0], np.float32)),
    "log1p": (jnp.log1p, np.array([1e-20, 1e-17])),
    "expm1": (jnp.expm1, np.array([1e-20, 1e-17])),
    "integer": (lambda x: x.astype(jnp.int32), np.array([np.nan, 1e20], np.float32)),
    "magnitude": (lambda x: jnp.abs(lax.complex(x, x)), np.array([1e30, 1e-30], np.float32)),
}


@pytest.mark.parametrize("case", UNGUARDED.values(), ids=UNGUARDED.keys())
def test_unguarded_functions_are_wrong(case):
    """Fails when IREE is mended: then the replacement can go."""
    function, x = case
    with jax.enable_x64(x.dtype == np.float64):
        assert not run(function, x, rewritten=False).is_right(rtol=1e-6)
        run(function, x).check(rtol=1e-6)


@pytest.mark.parametrize("function", [jnp.sin, jnp.tanh, jnp.arctan, jnp.cbrt, lambda x: lax.rem(x, x)])
def test_unguarded_float64_functions_do_not_link(function):
    """Fails when IREE is mended: then the replacement can go."""
    with jax.enable_x64(True), pytest.raises(RuntimeError, match=r"undefined symbol|failed to legalize"):
        run(function, np.ones(3), rewritten=False)
