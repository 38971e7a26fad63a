"""Batches of several sizes: examples weigh the same, whatever batch they came in."""

import jax
import numpy as np
import optax
import pytest
from _training import LABELS, MLP, X, compiled, mlp_apply, mlp_init, xent

from fixstep.frontend import metrics, trainer

OPTIMIZER = optax.sgd(0.5)
BATCH = (X, LABELS)


def program(**options):
    (b,) = jax.export.symbolic_shape("b", constraints=["b <= 16"])
    batch = (jax.ShapeDtypeStruct((b, 3), "float32"), jax.ShapeDtypeStruct((b,), "int32"))
    return trainer(MLP, xent, OPTIMIZER, batch=batch, metrics={"accuracy": metrics.accuracy}, **options)


def joined(params, x, labels):
    """A step on a batch by hand."""
    value, gradients = jax.value_and_grad(lambda params: xent(mlp_apply(params, x), labels).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), float(value)


def test_a_short_batch_weighs_as_much_as_it_has_examples(tmp_path):
    """Fails if epochs are means over batches."""
    session = compiled(program(), tmp_path)
    params, losses = mlp_init(jax.random.key(0)), []
    for part in (slice(0, 13), slice(13, 16)):
        params, value = joined(params, X[part], LABELS[part])
        losses.append(value)
        assert float(session.step((X[part], LABELS[part]))["loss"]) == pytest.approx(value, rel=1e-5)
    assert session.averages()["loss"] == pytest.approx((13 * losses[0] + 3 * losses[1]) / 16, rel=1e-6)
    for part in (slice(0, 15), slice(15, 16)):
        session.evaluate((X[part], LABELS[part]))
    logits = mlp_apply(params, X)
    averages = session.averages("evaluate")
    assert averages["loss"] == pytest.approx(float(xent(logits, LABELS).mean()), rel=1e-5)
    assert averages["accuracy"] == (logits.argmax(-1) == LABELS).mean()


def test_accumulated_gradients_are_weighted_by_examples(tmp_path):
    """Fails if an update is a mean over calls."""
    session = compiled(program(accumulate=3), tmp_path)
    params = mlp_init(jax.random.key(0))
    for _ in range(3):
        for part in (slice(0, 11), slice(11, 12), slice(12, 16)):
            session.step((X[part], LABELS[part]))
        params, _ = joined(params, X, LABELS)
        np.testing.assert_allclose(session.state()["params/first/w"], params["first"]["w"], rtol=2e-5, atol=1e-7)
