"""Loops whose turns move buffers among their carries."""

import itertools

import jax
import numpy as np
import pytest
from _iree import run

PERMUTATIONS = [
    *itertools.permutations(range(2)),
    *itertools.permutations(range(3)),
    *((1, 2, 3, 0), (3, 2, 0, 1), (1, 0, 3, 2), (2, 0, 3, 1)),
]


def exchanging(permutation):
    """Five turns that hand on the carries in another order, one of them changed."""

    def loop(count, *values):
        def turn(i, carries):
            moved = [carries[p] for p in permutation]
            return (moved[0] * 0.5 + i, *moved[1:])

        return jax.lax.fori_loop(0, count, turn, tuple(value * 1.5 for value in values))

    return loop


def merely_exchanging(count, a, b):
    return jax.lax.fori_loop(0, count, lambda i, c: (c[1], c[0]), (a * 2, b * 3))


def exchanged_through_a_reshape(count, a, b):
    def turn(i, carries):
        x, y = carries
        return y.reshape(2, 2), x.reshape(4)

    return jax.lax.fori_loop(0, count, turn, ((a * 2).reshape(2, 2), b * 3))


def exchanged_around_an_inner_loop(count, a, b):
    def turn(i, carries):
        x, y = carries
        x, y, _ = jax.lax.fori_loop(0, 2, lambda j, c: (c[0], c[1], c[2] + 1), (x, y, i))
        return y, x

    return jax.lax.fori_loop(0, count, turn, (a * 2, b * 3))


def duplicated(count, a, b):
    return jax.lax.fori_loop(0, count, lambda i, c: (c[1], c[1], c[0] + 1), (a * 2, b * 3, a + b))


def fibonacci(count, a, b):
    return jax.lax.fori_loop(0, count, lambda i, c: (c[1], c[0] + c[1]), (a, b))


def arrays(count):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(4).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("permutation", PERMUTATIONS, ids=str)
def test_exchanged_carries(permutation):
    run(exchanging(permutation), np.int32(5), *arrays(len(permutation))).check(rtol=1e-6)


@pytest.mark.parametrize(
    "loop",
    [merely_exchanging, exchanged_through_a_reshape, exchanged_around_an_inner_loop, duplicated, fibonacci],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("count", [4, 5])
def test_carries_in_other_ways(loop, count):
    run(loop, np.int32(count), *arrays(2)).check(rtol=1e-6)


def test_unguarded_exchange_fails():
    """Fails when IREE is mended: then the rewrite can go."""
    with pytest.raises(Exception, match="indirect buffer reference slot 0 is out range"):
        run(exchanging((1, 0)), np.int32(5), *arrays(2), rewritten=False)
