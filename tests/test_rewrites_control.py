"""Conditionals become selects; an untaken branch does nothing that can be seen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _iree import Compiled, lower, module, run
from jax import lax

from fixstep.frontend.rewrites import rewrite_function, unlowerable_operations

X = np.random.default_rng(0).standard_normal(8).astype(np.float32)


def growing(v):
    return lax.while_loop(lambda c: c[0].sum() < 100.0, lambda c: (c[0] * 1.5 + 1, c[1] + 1), (v, 0))


def two_branches(x, n):
    return lax.cond(n > 3, growing, lambda v: (v - 1, 0), x)


def three_branches(x, n):
    return lax.switch(n, [lambda: x, lambda: x * 2, lambda: jnp.sin(x)])


def nested_branches(x, n):
    return lax.cond(n > 0, lambda: lax.cond(n > 1, lambda: growing(x)[0], lambda: -x), lambda: x * 2)


def in_a_scan(x, n):
    return lax.scan(lambda c, v: (lax.cond(v > 0, lambda: c + v * n, lambda: c), c), np.float32(0), x)


def scan_in_a_branch(x, n):
    def turn(c, v):
        return lax.while_loop(lambda u: u < c + 1, lambda u: u + 0.5, v), c

    return lax.cond(n > 0, lambda: lax.scan(turn, jnp.float32(0), x), lambda: (jnp.float32(0), x))


def of_a_batch(x, n):
    return jax.vmap(lambda v: lax.cond(v > 0, jnp.sin, jnp.cos, v))(x) * n


def grad_of_a_cond(x, n):
    return jax.grad(lambda v: lax.cond(n > 0, lambda u: (u**2).sum(), lambda u: jnp.sqrt(jnp.abs(u)).sum(), v))(x)


def with_random_bits(x, n):
    key = jax.random.key(n)
    return lax.cond(n > 0, lambda: jax.random.normal(key, (8,)), lambda: x)


CASES = [
    two_branches,
    three_branches,
    nested_branches,
    in_a_scan,
    scan_in_a_branch,
    of_a_batch,
    grad_of_a_cond,
    with_random_bits,
]


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_cond(function):
    text = lower(function, X, np.int32(0))
    assert "stablehlo.case" not in text
    compiled = Compiled(text, "local-task")
    for n in (-1, 0, 1, 2, 5):
        want = jax.tree.leaves(jax.jit(function)(X, np.int32(n)))
        outputs, _ = compiled.call([X, np.array(n, np.int32)])
        for got, expected in zip(outputs, want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [-1, 1, 7])
def test_the_select_keeps_the_numbers(function, n):
    want, got = jax.jit(function)(X, np.int32(n)), jax.jit(rewrite_function(function))(X, np.int32(n))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), got, want)


def test_a_loop_in_an_untaken_branch_makes_no_turn():
    def f(x, n):
        forever = lambda v: lax.while_loop(lambda c: c[0] > -1e9, lambda c: c + 0.0, v)  # noqa: E731
        return lax.cond(n > 3, lambda v: jax.jit(forever)(v), lambda v: v, x)

    run(f, X, np.int32(0)).check()


@pytest.mark.parametrize(
    "case",
    # A MultiSteps that gets an infinite gradient multiplies it by a mask, which XLA and IREE fold each in its own way.
    [(optax.MultiSteps(optax.adam(1e-2), 2), 1.0), (optax.apply_if_finite(optax.adam(1e-2), 2), np.inf)],
    ids=["multi_steps", "apply_if_finite"],
)
def test_optimizers_with_conditions(case):
    optimizer, factor = case

    def step(params, state, grad):
        updates, state = optimizer.update({"w": grad}, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": X}
    state = optimizer.init(params)
    run(step, params, state, X * np.float32(factor)).check(rtol=1e-6)
    run(step, params, optimizer.update({"w": X}, state, params)[1], X).check(rtol=1e-6)


def test_a_branch_with_effects_stays_and_is_named():
    def f(x):
        lax.cond(x[0] > 0, lambda: jax.debug.callback(lambda: None), lambda: None)
        return x

    jaxpr = str(jax.make_jaxpr(rewrite_function(f))(X))
    assert "cond[" in jaxpr
    # jax.export refuses callbacks itself, so a cond is put into the module by hand.
    found = unlowerable_operations(module(lambda x, n: three_branches(x, n), X, np.int32(0), rewritten=False))
    assert [(name, why) for name, _, why in found] == [("case", "a conditional whose branches have effects")]
    assert found[0][1].startswith(__file__)


def test_unguarded_cond_is_a_case():
    """Chance decides which calls IREE computes wrongly (issue 24753), so only the form is tested."""
    assert "stablehlo.case" in lower(two_branches, X, np.int32(0), rewritten=False)
