"""Indices out of range do what JAX does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _iree import run
from jax import lax

A, B = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
M = np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32)
J = np.array([-3, 99, 2, 5, 5, -99, 15, 16], np.int32)
U = np.array([3, 200, 255, 1], np.uint8)


def gather_modes(a, j):
    modes = ("clip", "fill", "promise_in_bounds")
    return a[j], [a.at[j].get(mode=mode) for mode in modes], jnp.take(a, j, mode="wrap"), a[-3], a[j[1]]


def gather_shapes(m, j, u):
    return (
        m[j],
        m[:, j],
        m[j, j],
        m[u],
        jnp.take_along_axis(m, jnp.broadcast_to(j[:5], (6, 5)), 0),
        jax.vmap(lambda row, i: row[i])(m, j[:6]),
    )


def dynamic_slices(m, j):
    """IREE clamps these; the rewrites leave them alone."""
    return (
        lax.dynamic_slice(m, (j[0], j[1]), (2, 3)),
        lax.dynamic_slice(m, (j[5], j[2]), (2, 3)),
        jax.vmap(lambda i: lax.dynamic_slice(m, (i, i), (2, 3)))(j),
        lax.dynamic_update_slice(m * 2, m[:2, :3], (j[1], j[0])),
    )


def scatter_modes(a, b, j):
    methods = ("set", "add", "subtract", "multiply", "min", "max")
    return [getattr(a.at[j], name)(b[:8], mode=mode) for name in methods for mode in (None, "drop", "clip")]


def scatter_shapes(m, j, u):
    return (
        m.at[j].set(1.0),
        m.at[:, j].add(2.0),
        m.at[j, j].set(3.0),
        m.at[u].add(1.0),
        jax.vmap(lambda row, i: row.at[i].set(7.0))(m, j[:6]),
        jax.vmap(lambda row, i: row.at[i].add(7.0))(m, j[:6]),
        m.at[j[1]].set(9.0),
        m.at[j[0], j[2]].add(1.0),
        m.at[2:4, j[3]].set(5.0),
        m.at[j].apply(jnp.tanh),
        m.at[j, j[0]].apply(jnp.sin),
        m.at[jnp.array([0, 3, 0])].apply(lambda v: v * 3),  # one place twice
        m.at[j].apply(jnp.cos, mode="clip"),
    )


def gradients(m, j):
    def sum_of_squares(take):
        return jax.grad(lambda v: (take(v) ** 2).sum())(m)

    return (
        sum_of_squares(lambda v: v[j]),
        sum_of_squares(lambda v: v[j[2:5], j[2:5] - 2]),
        sum_of_squares(lambda v: jnp.take(v, j, axis=0, mode="fill", fill_value=0)),
        sum_of_squares(lambda v: lax.dynamic_slice(v, (j[0], j[1]), (2, 3))),
    )


def segments(m, j):
    return (
        jax.ops.segment_sum(m, j[:6], 4),
        jax.ops.segment_max(m, j[:6], 4),
        jnp.bincount(j, length=7),
    )


def constant_indices(a):
    j = np.array([1, 77, -40])
    return a.at[j].set(3.0, mode="drop"), a.at[j].add(3.0, mode="drop"), a[j]


def whole_arrays(m):
    """No index at all; IREE wants a dimension to scatter along."""
    numbers = lax.ScatterDimensionNumbers((1, 2), (), ())
    rows = jnp.stack([m, m * 2, m * 3])
    return (
        m.at[:].set(m * 2),
        m.at[...].add(m),
        m[0, 0].at[()].set(m[1, 1]),
        m[0, 0].at[...].max(3.0),
        m.at[:].apply(jnp.sin),
        jax.vmap(lambda row: row.at[:].set(row[::-1]))(m),
        lax.scatter_add(m, jnp.zeros((3, 0), jnp.int32), rows, numbers),
        lax.scatter(m, jnp.zeros((3, 0), jnp.int32), rows, numbers),
        jax.grad(lambda v: (v.at[:].set(v**2) * v.at[:].get() ** 3).sum())(m),
    )


def every_second(m, j):
    """Read by index; IREE's vectors cannot read with a step."""
    k = jnp.abs(j[:3]) % 2
    return (
        m[:, ::-2],
        m[:, ::2].T[::-1],
        m[:, ::2][::-1],
        m[:, ::2][:, k],
        m[:, ::2][k],
        jnp.take_along_axis(m[:, ::2], (m[:, ::2] > 0).astype(jnp.int32), 1),
        jnp.concatenate([m[:, ::2], m[:, 1::2][:, ::-1]], 1),
        jnp.diagonal(m)[::2][::-1],
        jnp.convolve(m[0, ::2], m[1, ::2]),
        jax.grad(lambda v: (v[:, ::-2] ** 3).sum())(m),
    )


def ranges(m, j):
    """Windows that are longer than 1, in range and not."""
    n = j[2]
    numbers = lax.ScatterDimensionNumbers((0, 1), (), (0, 1))
    start, window = jnp.stack([j[2], j[2] - 1]), m[:2, :3]
    several = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    many, windows = jnp.stack([jnp.stack([n, n * 9, n - 3]), jnp.stack([n, n - 2, n])], 1), m[:3, :4].reshape(3, 2, 2)
    return (
        m.at[1:3].add(m[:2]),
        m.at[..., 1:4].multiply(2.0),
        m.at[2:4, 1:3].min(0.0),
        m.at[1:3, 2].max(m[:2, 1]),
        m.at[2:].subtract(1.0),
        jax.vmap(lambda row: row.at[1:3].multiply(3.0))(m),
        [lax.scatter_add(m, start, window, numbers, mode=mode) for mode in ("drop", "clip")],
        [lax.scatter_add(m, start * 9, window, numbers, mode=mode) for mode in ("drop", "clip")],
        jax.grad(lambda v: (v.at[1:3].multiply(v[2:4]) ** 2).sum())(m),
        jax.vmap(jax.grad(lambda v, i: (lax.dynamic_slice(v, (i,), (2,)) ** 2).sum()))(m, j[:6]),
        jax.vmap(lambda v, i: lax.dynamic_update_slice(v, v[:2] * 9, (i,)))(m, j[:6]),
        [lax.scatter_add(m, many, windows, several, mode=mode) for mode in ("drop", "clip")],
        [lax.scatter(m, many[:2], windows[:2], several, mode=mode) for mode in ("drop", "clip")],
    )


def signs_of_zero(a, j):
    z = a * 0
    return 1 / z.at[j].add(-0.0), 1 / z.at[j].min(5.0)


@pytest.mark.parametrize(
    "case",
    [
        (gather_modes, A, J),
        (gather_shapes, M, J, U),
        (dynamic_slices, M, J),
        (scatter_modes, A, B, J),
        (scatter_shapes, M, J, U),
        (gradients, M, J),
        (segments, M, J),
        (constant_indices, A),
        (whole_arrays, M),
        (ranges, M, J),
        (every_second, M, J),
        (signs_of_zero, A, J),
    ],
    ids=lambda case: case[0].__name__,
)
def test_out_of_range(case):
    run(case[0], *case[1:]).check(rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "complex64"])
def test_out_of_range_in_other_dtypes(dtype):
    a = (np.arange(16) % 2).astype(jnp.dtype(dtype))

    def f(a, j):
        added = a if a.dtype == bool else a.at[j].add(a[1])
        return a.at[j].set(a[0]), added, a[j], a.at[j[1]].set(a[1])

    run(f, a, J).check()


def test_unguarded_gather_reads_other_memory():
    """Fails when IREE is mended (issue 24881): then the clamp can go."""

    def f(a, j):
        return a.at[j].get(mode="promise_in_bounds")

    assert not run(f, A, np.array([99, 50, 30], np.int32), rewritten=False).is_right()
    run(f, A, np.array([99, 50, 30], np.int32)).check()


def test_unguarded_scatter_writes_elsewhere():
    """Index 20 of 16 lies within the next rows of the buffer that holds the result, so the fault can be seen."""

    def f(m, j):
        return (m * 2).at[0, j].set(7.0, mode="drop")

    j = np.array([6, 8, 1], np.int32)
    assert not run(f, M, j, rewritten=False).is_right()
    run(f, M, j).check()
