"""Linear algebra that JAX computes in LAPACK, beside JAX and through IREE, with gradients and batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _iree import run
from _matrices import matrix
from jax import lax
from jax._src.lax import linalg
from jax.scipy import linalg as sl

from fixstep.frontend.rewrites import rewrite_function

TOLERANCE = {"float32": 3e-5, "complex64": 3e-5, "float64": 1e-12, "complex128": 1e-12}


def positive(a):
    return a @ a.conj().swapaxes(-1, -2) + a.shape[-1] * np.eye(a.shape[-1], dtype=a.dtype)


def triangle(a):
    return a + 4 * jnp.eye(a.shape[-1], dtype=a.dtype)


def solve_triangular(left, lower, transpose, conjugate, unit, a, b):
    # The other triangle must not be read.
    return lax.linalg.triangular_solve(
        triangle(a) if not unit else a / 4, b if left else b.mT, left_side=left, lower=lower,
        transpose_a=transpose, conjugate_a=conjugate, unit_diagonal=unit,
    )  # fmt: skip


def lu_parts(a):
    factors, pivots, order = lax.linalg.lu(a)
    return factors, pivots, order


# name: (function of a square matrix, shape)
SQUARE = {
    "cholesky": lambda a: jnp.linalg.cholesky(positive(a)),
    "cho_solve": lambda a: sl.cho_solve(sl.cho_factor(positive(a)), a),
    "lu": lu_parts,
    "solve": lambda a: jnp.linalg.solve(triangle(a), a.mT),
    "inv": lambda a: jnp.linalg.inv(triangle(a)),
    "det": jnp.linalg.det,
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "qr": jnp.linalg.qr,
    "expm": lambda a: sl.expm(a / 3),
    "lu_solve": lambda a: sl.lu_solve(sl.lu_factor(triangle(a)), a, trans=1),
}


def with_gradient(function):
    """The function's results, and the gradient of a weighted sum of them."""

    def both(*args):
        def loss(*args):
            results = [r for r in jax.tree.leaves(function(*args)) if jnp.issubdtype(r.dtype, jnp.inexact)]
            return sum(jnp.real(r * jnp.cos(jnp.arange(r.size, dtype=r.dtype)).reshape(r.shape)).sum() for r in results)

        return function(*args), jax.grad(loss, argnums=tuple(range(len(args))))(*args)

    return both


def check_in_jax(function, *args, scale=1.0):
    got, want = jax.jit(rewrite_function(function))(*args), jax.jit(function)(*args)
    tolerance = scale * TOLERANCE[np.dtype(args[0].dtype).name]
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        size = np.max(np.abs(np.nan_to_num(w)), initial=1.0)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * size)


def check_in_iree(function, *args, scale=1.0):
    result = run(function, *args)
    tolerance = scale * TOLERANCE[np.dtype(args[0].dtype).name]
    size = max(np.max(np.abs(np.nan_to_num(w)), initial=1.0) for w in result.expected)
    result.check(rtol=tolerance, atol=tolerance * float(size))


def x64(dtype):
    return jax.enable_x64(np.dtype(dtype).name in ("float64", "complex128"))


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("name", SQUARE)
def test_square(name, dtype):
    with x64(dtype):
        check_in_jax(with_gradient(SQUARE[name]), matrix((2, 5, 5), dtype), scale=4)


@pytest.mark.parametrize("name", SQUARE)
def test_square_of_one_and_none(name):
    for shape in ((1, 1), (0, 3, 3)):
        check_in_jax(SQUARE[name], matrix(shape) + 2)


@pytest.mark.parametrize("name", SQUARE)
def test_square_batched(name):
    with x64(np.float64):
        check_in_jax(jax.vmap(jax.vmap(SQUARE[name])), matrix((2, 3, 4, 4), np.float64), scale=100)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("unit", [True, False])
def test_triangular_solve(left, lower, transpose, unit):
    a, b = matrix((3, 4, 4), np.complex64), matrix((3, 4, 2), np.complex64)
    check_in_jax(with_gradient(functools.partial(solve_triangular, left, lower, transpose, True, unit)), a, b)


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 4), (1, 3), (3, 1)])
def test_qr(shape, mode):
    check_in_jax(functools.partial(jnp.linalg.qr, mode=mode), matrix(shape, "complex64" if mode == "r" else "float32"))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 4)])
def test_qr_with_pivots(shape):
    check_in_jax(lambda a: sl.qr(a, pivoting=True, mode="economic"), matrix(shape))


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_product_of_reflections(left, transpose, dtype):
    def function(a, c):
        reflectors, taus = linalg.geqrf(a)
        q = linalg.householder_product(reflectors, taus)
        return reflectors, taus, q, linalg.ormqr(reflectors, taus, c, left=left, transpose=transpose)

    check_in_jax(function, matrix((2, 5, 3), dtype), matrix((2, 5, 4) if left else (2, 4, 5), dtype, seed=1))


def tridiagonal(dl, d, du, b):
    return lax.linalg.tridiagonal_solve(dl, d, du, b)


def bands(dtype=np.float32, n=6):
    """Bands of systems that need exchanges of rows."""
    dl, d, du = matrix((3, 2, n), dtype)
    dl[:, 0], du[:, -1] = 0, 0
    return dl, d * 0.1, du, matrix((2, n, 3), dtype, seed=1)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_tridiagonal_solve(dtype):
    with x64(dtype):
        check_in_jax(with_gradient(tridiagonal), *bands(dtype), scale=100)
        check_in_jax(tridiagonal, *bands(dtype, 1))
        dl, d, du, b = bands(dtype)
        d[0], dl[0] = 0, 0  # singular: NaN
        check_in_jax(tridiagonal, dl, d, du, b, scale=100)


def test_tridiagonal_solve_through_iree():
    check_in_iree(tridiagonal, *bands(), scale=10)


def test_special_matrices():
    """Zeros, ties between pivots, failing factors and NaN."""
    a = matrix((4, 4))
    singular = np.ones((4, 4), np.float32)
    nan = a.copy()
    nan[2, 1] = np.nan
    for special in (np.zeros((4, 4), np.float32), singular, np.eye(4, dtype=np.float32), -np.diag(a[0])):
        check_in_jax(lu_parts, special)
        check_in_jax(jnp.linalg.qr, special)
        check_in_jax(jnp.linalg.det, special)
        check_in_jax(jnp.linalg.cholesky, special)
    check_in_jax(jnp.linalg.cholesky, np.stack([positive(a), -positive(a), nan]))
    check_in_jax(jnp.linalg.qr, a * np.float32(1e30))
    check_in_jax(jnp.linalg.qr, a * np.float32(1e-30))


@pytest.mark.parametrize("name", SQUARE)
def test_square_through_iree(name):
    check_in_iree(with_gradient(SQUARE[name]), matrix((2, 5, 5)), scale=4)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@pytest.mark.parametrize("name", ["cholesky", "solve", "qr"])
def test_types_through_iree(name, dtype):
    with x64(dtype):
        check_in_iree(SQUARE[name], matrix((3, 3), dtype), scale=4)


def test_triangular_solve_through_iree():
    def function(a, b):
        return [solve_triangular(left, lower, False, False, False, a, b) for left in (0, 1) for lower in (0, 1)]

    check_in_iree(function, matrix((4, 4)), matrix((4, 2)))


def test_random_matrices_through_iree():
    def function(seed):
        key = jax.random.key(seed)
        return jax.random.orthogonal(key, 4, (2,)), jax.random.multivariate_normal(
            key, jnp.ones(3), jnp.eye(3) + 0.5, (5,)
        )

    run(function, np.uint32(3)).check(rtol=1e-5, atol=1e-5)
