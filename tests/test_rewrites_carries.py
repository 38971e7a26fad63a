"""Loops whose turns move buffers among their carries, or do not read them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _iree import run
from jax.lax import fori_loop, scan, while_loop

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


def an_unread_carry(v, w):
    """The last mean: a carry that no turn reads; the condition is of a float, so that the loop stays a loop."""

    def turn(carries):
        v = carries[0] * 0.5 + 1
        return v, jnp.sin(v), v.mean()

    return while_loop(lambda carries: carries[0].sum() < 7, turn, (v, w, jnp.float32(2)))


def read_by_the_condition_alone(v, w):
    def turn(carries):
        v = carries[0] * 0.5 + 1
        return v, v.sum() >= 7

    return while_loop(lambda carries: ~carries[1], turn, (v, w.sum() > 1e6))


def the_same_result_twice(v, w):
    def turn(carries):
        v = carries[0] * 0.5 + carries[1]
        return v, v, v.sum()

    return while_loop(lambda carries: carries[2] < 99, turn, (v, w, jnp.float32(0)))


def the_same_in_every_turn(v, w):
    constant = jnp.cos(w)

    def turn(carries):
        v, w, _, _ = carries
        return v * 0.5 + 1, w, jnp.float32(3), constant * 2

    return while_loop(lambda carries: carries[0].sum() < 7, turn, (v, w, jnp.float32(1), w))


def all_of_it_and_a_carry_that_stays(v, w):
    constant = jnp.cos(w)

    def turn(carries):
        count, v, w, _, _, _ = carries
        v = v * w + constant
        return count + 1, v, w, v, jnp.float32(3), v.sum()

    start = (jnp.int32(0), v, w, v, jnp.float32(1), v.sum())
    return while_loop(lambda carries: (carries[0] < 5) & (carries[5] < 100), turn, start)


def no_turn(v, w):
    def turn(carries):
        v = carries[0] * 0.5 + 1
        return v, jnp.sin(v), v.mean()

    return while_loop(lambda carries: carries[0].sum() < -7, turn, (v, w, jnp.float32(2)))


def one_in_another(v, w):
    def inner(v):
        def turn(carries):
            v = carries[0] * 0.5 + 1
            return v, v.sum()

        return while_loop(lambda carries: carries[1] < 3, turn, (v, jnp.float32(0)))

    def turn(carries):
        v, total = inner(carries[0] - 0.25)
        return v, total, total

    return while_loop(lambda carries: carries[1] < 5, turn, (v, jnp.float32(0), jnp.float32(9)))


def the_last_sum_of_a_scan(v, w):
    def turn(carries, x):
        v = carries[0] * x + 1
        return (v, v.sum()), v.mean()

    return scan(turn, (v, jnp.float32(0)), jnp.cumsum(w))


def loops_of_one_start(v, w):
    """The start of both is one value, in a branch of the test before the first turn, and outside of it."""

    def turn(carries):
        v, w, _ = carries
        return v * 1.5 + w, w * 0.75, v

    first = while_loop(lambda carries: carries[0].sum() < 7, turn, (v, w, w))
    return (
        first,
        while_loop(lambda carries: carries[0].sum() < 9, turn, (w, first[1], w)),
        fori_loop(0, 3, lambda i, c: (c[1], c[0] * 0.5), (w, first[2])),
    )


def used_beside_the_result(v, w):
    """What makes a carry is no part of what uses it together with the result of the loop, which is counted."""
    made = jnp.sin(v)
    end = fori_loop(0, 3, lambda i, x: jnp.cos(x) * w, made)
    return made @ jnp.outer(end, made), end


UNREAD = [
    an_unread_carry,
    read_by_the_condition_alone,
    the_same_result_twice,
    the_same_in_every_turn,
    all_of_it_and_a_carry_that_stays,
    no_turn,
    one_in_another,
    the_last_sum_of_a_scan,
    loops_of_one_start,
    used_beside_the_result,
]


@pytest.mark.parametrize("loop", UNREAD, ids=lambda f: f.__name__)
def test_carries_that_no_turn_reads_or_that_are_the_same(loop):
    run(loop, *[abs(array) for array in arrays(2)]).check(rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loop", [all_of_it_and_a_carry_that_stays, used_beside_the_result], ids=lambda f: f.__name__)
def test_unguarded_carries_fail(loop):
    """Fails when IREE is mended: then the rewrite can go."""
    with pytest.raises(RuntimeError, match=r"crash backtrace|does not dominate|circular dependency|error:"):
        run(loop, *arrays(2), rewritten=False)
