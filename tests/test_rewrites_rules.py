"""The list of rules, and what the evaluation of a rewritten function must keep."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _iree import module
from jax import lax

from fixstep.frontend.rewrites import _replace, _rules, _unlowerable, rewrite_function

# The file of tests of each file of rules, where it is not the one of the same name.
TESTED_IN = {
    "_accumulate": "sums",
    "_arctangent": "numbers",
    "_cholesky": "linear_algebra",
    "_complex_functions": "complex",
    "_conversion": "numbers",
    "_cumulative": "sums",
    "_exponential": "numbers",
    "_float64": "numbers",
    "_eigh": "spectra",
    "_lu": "linear_algebra",
    "_qr": "linear_algebra",
    "_random": "copies",
    "_roots_and_powers": "numbers",
    "_scatter": "indices",
    "_svd": "spectra",
    "_triangular": "linear_algebra",
    "_tridiagonal": "linear_algebra",
    "_trigonometry": "numbers",
    "_unsigned": "sums",
}


def test_every_rule_has_a_test():
    files = {name.partition(".")[0] for name in [*_rules.all_rules(), *_replace.all_replacements()]}
    tests = {file: f"test_rewrites_{TESTED_IN.get(file, file.strip('_'))}.py" for file in files}
    assert {file: test for file, test in tests.items() if not (Path(__file__).parent / test).exists()} == {}


def nested(x, key):
    """Every kind of nesting, with a rule or a cond within."""

    @jax.custom_vjp
    def scaled(v):
        return v * 2

    scaled.defvjp(lambda v: (scaled(v), None), lambda _, g: (g * 3,))
    draw = jax.random.normal(key, (3,))
    branch = lax.cond(x > 0, lambda v: lax.while_loop(lambda c: c < 9, lambda c: c + 1, v), lambda v: v - 1, x)
    total, seen = lax.scan(lambda c, v: (lax.cond(v > 1, lambda: c + v, lambda: c), jnp.cumsum(v + seen_at(c))), x, XS)
    solved, _ = jax.scipy.sparse.linalg.cg(lambda v: v * 2, jnp.ones(3))
    return {
        "branch": branch,
        "remat": jax.checkpoint(lambda v: jnp.sin(v).at[0].set(0.0))(draw),
        "custom_jvp": jax.nn.relu(draw),
        "custom_vjp": jax.grad(lambda v: scaled(v).sum())(draw),
        "scan": (total, seen),
        "switch": lax.switch(jnp.int32(x), [lambda: 1, lambda: 2, lambda: 3]),
        "linear_solve": solved,
        "jit": jax.jit(lambda v: (v, None, [v[0]]))(draw),
        "vmap": jax.vmap(lambda v: lax.cond(v > 0, jnp.sin, jnp.cos, v))(draw),
    }


XS = np.arange(3, dtype=np.float32)


def seen_at(c):
    return jnp.ones(2) * c


def key_data(tree):
    return jax.tree.map(
        lambda v: jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else np.asarray(v), tree
    )


@pytest.mark.parametrize("x", [np.float32(1.5), np.float32(-1.5)])
def test_nested_functions_keep_their_values_and_types(x):
    key = jax.random.key(3)
    want, got = jax.jit(nested)(x, key), jax.jit(rewrite_function(nested))(x, key)
    assert jax.tree.structure(want) == jax.tree.structure(got)
    assert [jax.typeof(v) for v in jax.tree.leaves(want)] == [jax.typeof(v) for v in jax.tree.leaves(got)]
    jax.tree.map(np.testing.assert_array_equal, key_data(want), key_data(got))


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.vmap, lambda f: jax.grad(lambda v: f(v).sum()), lambda f: jax.jit(jax.checkpoint(f))]
)
@pytest.mark.parametrize(
    "function",
    [
        lambda v: v.at[jnp.array([0, 9, -1])].set(2.0),
        lambda v: v.at[jnp.array([0, 9, -1])].add(2.0),
        lambda v: lax.cond(v[0] > 0, jnp.sin, lambda u: u * 2, v),
        lambda v: lax.scan(lambda c, u: (c.at[1].mul(u), c[0]), v, v)[1],
    ],
    ids=["set", "add", "cond", "scan"],
)
def test_transformed_functions_keep_their_values(function, transform):
    x = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    transformed = transform(function) if transform is jax.vmap else jax.vmap(transform(function))
    np.testing.assert_allclose(jax.jit(rewrite_function(transformed))(x), jax.jit(transformed)(x), rtol=1e-6, atol=1e-6)


def test_arguments_by_name_and_typed_keys_pass_through():
    def f(state, *, key):
        """Kept."""
        return {"key": jax.random.split(key, 1)[0], "w": state["w"]}

    rewritten = rewrite_function(f)
    assert rewritten.__name__ == "f"
    key = jax.random.key(1)
    out = jax.jit(rewritten)({"w": 1.0}, key=key)
    assert out["key"].dtype == key.dtype
    assert (jax.random.key_data(out["key"]) == jax.random.key_data(jax.random.split(key, 1)[0])).all()


def test_64_bit_values_stay_where_x64_is_on_only_within():
    def f(x):
        return jnp.cumsum(jnp.sin(x)), x.at[jnp.array([0, 7])].set(1.0)

    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal(300)
        want, got = jax.jit(f)(x), jax.jit(rewrite_function(f))(x)
        assert [v.dtype for v in got] == [np.float64, np.float64]
        np.testing.assert_allclose(got[0], want[0], rtol=1e-12)


def test_equations_keep_the_users_line():
    def f(x):
        return jax.nn.relu(x) + jnp.linalg.eigvals(x).real  # this line

    here = f.__code__.co_firstlineno + 1
    found = _unlowerable.unlowerable_operations(module(f, np.eye(3, dtype=np.float32)))
    assert [(name, line) for name, line, _ in found] == [("custom_call lapack_sgeev_ffi", f"{__file__}:{here}")]
