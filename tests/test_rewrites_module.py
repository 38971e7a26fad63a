"""What a module carries for XLA alone goes; what has no lowering is named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _iree import Compiled, module
from jax import export, lax
from jax._src.interpreters import mlir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites import rewrite_module, unlowerable_operations

X = np.eye(4, dtype=np.float32) * 3


def exported(function, *args, **options):
    shapes = [jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype) for leaf in args]
    lowered = export.export(jax.jit(function, keep_unused=True, **options), platforms=["cpu"])(*shapes)
    return stablehlo.deserialize_portable_artifact(mlir.make_ir_context(), lowered.mlir_module_serialized)


def adam_step(w, m, g):
    m = 0.9 * m + 0.1 * g
    return w - 0.1 * m, m


def test_donation_is_stripped():
    donated = exported(adam_step, X, X, X, donate_argnums=(0, 1))
    assert "tf.aliasing_output" in str(donated)
    rewrite_module(donated)
    text = str(donated)
    assert all(word not in text for word in ("tf.aliasing_output", "jax.buffer_donor", "jax.result_info", "mhlo.num"))
    w, m, g = (np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32) for i in range(3))
    outputs, after = Compiled(text).call([w, m, g])
    for got, want in zip(outputs, jax.jit(adam_step)(w, m, g), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert all((a == b).all() for a, b in zip(after, (w, m, g), strict=True))


def test_unguarded_donation_overwrites_inputs():
    """Fails when IREE is mended."""
    w, m, g = (np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32) for i in range(3))
    _, after = Compiled(str(exported(adam_step, X, X, X, donate_argnums=(0, 1)))).call([w, m, g])
    assert any((a != b).any() for a, b in zip(after, (w, m, g), strict=True))


def test_sharding_is_stripped():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))

    def f(x):
        return lax.with_sharding_constraint(x * 2, sharding) + 1

    sharded = exported(f, X)
    rewrite_module(sharded)
    text = str(sharded)
    assert all(word not in text for word in ("sdy.", "mhlo.sharding", "@Sharding"))
    outputs, _ = Compiled(text).call([X])
    np.testing.assert_array_equal(outputs[0], X * 2 + 1)


def test_calls_are_inlined():
    text = str(module(lambda x: jax.jit(jnp.sin)(x) + jax.jit(jnp.sin)(x * 2) + jax.nn.relu(x), X))
    assert text.count("func.func") == 1
    assert " call " not in text


def eigenvalues(x):
    return jnp.linalg.eigvals(x).real


def fft(x):
    return jnp.fft.fft(x[:3, 0]).real


@pytest.mark.parametrize(
    ("function", "rewritten", "name", "why"),
    [
        (eigenvalues, True, "custom_call lapack_sgeev_ffi", "linear algebra"),
        (eigenvalues, False, "custom_call lapack_sgeev_ffi", "linear algebra"),
        (fft, False, "fft", "length 3, which is no power of two"),
    ],
)
def test_operations_without_a_lowering_are_named(function, rewritten, name, why):
    ((found, line, reason),) = unlowerable_operations(module(function, X, rewritten=rewritten))
    assert (found, why in reason) == (name, True)
    file, _, number = line.rpartition(":")
    assert file == __file__
    assert 0 < int(number) - function.__code__.co_firstlineno <= 4


def test_a_library_s_line_gives_way_to_the_users():
    def f(x):
        return optax.tree.norm({"x": jnp.linalg.eigvals(x).real})  # this line

    lines = {line for _, line, _ in unlowerable_operations(module(f, X))}
    assert lines == {f"{__file__}:{f.__code__.co_firstlineno + 1}"}


def test_nothing_is_named_where_all_is_well():
    assert unlowerable_operations(module(adam_step, X, X, X)) == []
