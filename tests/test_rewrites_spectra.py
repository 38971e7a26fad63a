"""Eigenvalues and singular values: by what defines them, beside JAX where signs do not matter, and through IREE."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _iree import run
from _matrices import matrix

from fixstep.frontend.rewrites import rewrite_function

EPSILON = {"float32": 1.2e-7, "complex64": 1.2e-7, "float64": 2.3e-16, "complex128": 2.3e-16}


def symmetric(a):
    return (a + a.conj().swapaxes(-1, -2)) / 2


def x64(dtype):
    return jax.enable_x64(np.dtype(dtype).name in ("float64", "complex128"))


def rewritten(function, *args):
    return jax.tree.map(np.asarray, jax.jit(rewrite_function(function))(*args))


def wide(a):
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def check_eigh(a, values, vectors):
    n, eps = a.shape[-1], EPSILON[a.dtype.name]
    size = np.linalg.norm(wide(a), axis=(-2, -1), keepdims=True) + 1e-30
    assert (np.diff(values) >= 0).all()
    unit = vectors.conj().swapaxes(-1, -2) @ vectors - np.eye(n)
    assert np.abs(unit).max() < 20 * eps * np.sqrt(n)
    assert (np.abs(wide(a) @ vectors - wide(vectors) * values[..., None, :]) / size).max() < 10 * eps * np.sqrt(n)
    assert (np.abs(values - np.linalg.eigvalsh(wide(a))) / size[..., 0]).max() < 10 * eps * np.sqrt(n)


def check_svd(a, u, s, vh):
    eps = EPSILON[a.dtype.name]
    size = np.linalg.norm(wide(a), axis=(-2, -1), keepdims=True) + 1e-30
    n = max(a.shape[-2:])
    assert (np.diff(s) <= 0).all()
    for q in (u, vh.conj().swapaxes(-1, -2)):
        assert np.abs(q.conj().swapaxes(-1, -2) @ q - np.eye(q.shape[-1])).max() < 20 * eps * np.sqrt(n)
    k = s.shape[-1]
    assert (np.abs(wide(u)[..., :k] * s[..., None, :] @ vh[..., :k, :] - a) / size).max() < 20 * eps * np.sqrt(n)
    assert (np.abs(s - np.linalg.svd(wide(a), compute_uv=False)) / size[..., 0]).max() < 10 * eps * np.sqrt(n)


SPECIAL = {
    "zeros": np.zeros((4, 4)),
    "identity": np.eye(5),
    "equal and opposite": np.diag([1.0, -1, 1, -1, 0, 0]),
    "rank one": np.ones((6, 6)),
    "exchange": np.eye(5)[::-1].copy(),
    "large": symmetric(matrix((4, 4))) * 1e30,
    "small": symmetric(matrix((4, 4))) * 1e-30,
    "graded": symmetric(matrix((6, 6))) * np.outer(10.0 ** -np.arange(6), 10.0 ** -np.arange(6)),
    "cluster": np.eye(7) + 1e-6 * symmetric(matrix((7, 7))),
    "one": np.array([[-3.0]]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special(name):
    a = SPECIAL[name].astype(np.float32)
    check_eigh(a, *rewritten(lambda a: tuple(jnp.linalg.eigh(a)), a))
    check_svd(a, *rewritten(lambda a: tuple(jnp.linalg.svd(a)), a))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 3, 5, 5), "float32"), ((8, 8), "float64"), ((9, 9), "complex64"), ((33, 33), "float32")]
)
def test_eigh(shape, dtype):
    with x64(dtype):
        a = symmetric(matrix(shape, dtype))
        check_eigh(a, *rewritten(lambda a: tuple(jnp.linalg.eigh(a)), a))


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 6, 4), "float32"), ((3, 5), "complex128"), ((20, 20), "float32"), ((1, 3), "float64")]
)
def test_svd(shape, full, dtype):
    with x64(dtype):
        a = matrix(shape, dtype)
        check_svd(a, *rewritten(lambda a: tuple(jnp.linalg.svd(a, full_matrices=full)), a))


def test_triangles_and_nan():
    a = matrix((4, 4))
    for lower in (True, False):
        values = rewritten(lambda a, lower=lower: jax.lax.linalg.eigh(a, lower=lower, symmetrize_input=False)[1], a)
        np.testing.assert_allclose(values, np.linalg.eigvalsh(a, UPLO="L" if lower else "U"), atol=1e-5)
    b = np.stack([a, a])
    b[1, 2, 1] = np.nan
    for function in (lambda b: tuple(jnp.linalg.eigh(b)), lambda b: tuple(jnp.linalg.svd(b))):
        for got in rewritten(function, b):
            assert np.isfinite(got[0]).all()
            assert np.isnan(got[1]).all()


def spectral_loss(a):
    """Sums that do not depend on the signs of vectors."""
    values, vectors = jnp.linalg.eigh(symmetric_traced(a))
    u, s, vh = jnp.linalg.svd(a, full_matrices=False)
    weights = jnp.arange(a.shape[-1], dtype=a.dtype)
    return (
        jnp.sum(weights * values)
        + jnp.sum(vectors**2 * weights)
        + jnp.sum(s * weights)
        + jnp.sum((u * jnp.sqrt(weights + 1)) @ vh * weights)
    )


def symmetric_traced(a):
    return (a + a.T) / 2


COMPOSED = {
    "spectral": lambda a: jax.value_and_grad(spectral_loss)(a),
    "pinv": lambda a: jax.value_and_grad(lambda a: jnp.sum(jnp.linalg.pinv(a[:, :3]) ** 2))(a),
    "lstsq": lambda a: jnp.linalg.lstsq(a[:, :3], a[:, 3])[0],
    "matrix_rank": lambda a: jnp.linalg.matrix_rank(a.at[:, 0].set(a[:, 1])),
    "norms": lambda a: (jnp.linalg.norm(a, 2), jnp.linalg.norm(a, "nuc"), jnp.linalg.cond(a)),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composed(name):
    with jax.enable_x64(True):
        a = matrix((5, 5), np.float64)
        got, want = rewritten(COMPOSED[name], a), jax.jit(COMPOSED[name])(a)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (g.dtype, g.shape) == (w.dtype, w.shape)
            np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["spectral", "pinv"])
def test_through_iree(name):
    run(functools.partial(COMPOSED[name]), matrix((5, 5))).check(rtol=1e-3, atol=1e-3)


def test_vectors_through_iree():
    a = matrix((2, 6, 4))
    b = symmetric(matrix((9, 9), np.float32))
    result = run(lambda a, b: (jnp.linalg.svd(a), jnp.linalg.eigh(b)), a, b)
    assert result.written == []
    check_svd(a, *result.outputs[:3])
    check_eigh(b, *result.outputs[3:])
