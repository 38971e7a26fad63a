"""Programs built from a model, a loss and an optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from fixstep.frontend import trainer
from fixstep.frontend._template import infer_template
from fixstep.targets.errors import ProgramError

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = (X @ np.float32([1, -2, 0.5]))[:, None]
MODEL = (lambda key: {"w": 0.1 * jax.random.normal(key, (3, 1))}, lambda params, x: x @ params["w"])


def squared(prediction, target):
    return jnp.mean((prediction - target) ** 2)


def run(program, steps, batch):
    template = infer_template(program)
    leaves = jax.tree.leaves(batch)
    state = jax.jit(template.flat_init)(np.uint32(0), np.uint32(0))
    step = jax.jit(template.flat_step)
    for _ in range(steps):
        state, metrics = step(state, leaves)
    return template, state, [float(m) for m in metrics]


@pytest.mark.parametrize("loss", [squared, lambda p, t: (p - t) ** 2], ids=["scalar", "per example"])
def test_a_pair_of_functions_trains(loss):
    program = trainer(MODEL, loss, optax.adam(0.1), batch=(X, Y), metrics={"error": lambda p, t: jnp.abs(p - t)})
    template, state, (error, value) = run(program, 200, (X, Y))
    assert [leaf.path for leaf in template.metric_leaves] == ["error", "loss"]
    assert [leaf.path for leaf in template.evaluation_leaves] == ["error", "loss"]
    assert value < 1e-3
    assert error < 0.05
    (prediction,) = template.flat_predict(state, [X])
    np.testing.assert_allclose(prediction, Y, atol=0.1)
    assert template.state["params/w"] == ("float32", (3, 1))
    assert template.changes == ()


def test_the_loss_of_a_step_is_that_of_evaluate_before_it():
    program = trainer(MODEL, squared, optax.sgd(0.1), batch=(X, Y))
    state = program.init(jax.random.key(0))
    after, metrics = program.step(state, (X, Y))
    loss = float(metrics["loss"])
    assert loss == pytest.approx(float(program.evaluate(state, (X, Y))["loss"]), rel=1e-6)
    assert float(program.evaluate(after, (X, Y))["loss"]) < loss


def test_a_linen_module_trains():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2)(linen.relu(linen.Dense(8)(x)))

    labels = (X[:, 0] > 0).astype(np.int32)
    program = trainer(
        Net(),
        optax.softmax_cross_entropy_with_integer_labels,
        optax.adam(0.05),
        batch=(X, labels),
        metrics={"accuracy": lambda logits, labels: logits.argmax(-1) == labels},
        name="net",
    )
    assert program.name == "net"
    template, _, (accuracy, _) = run(program, 100, (X, labels))
    assert accuracy == 1
    assert template.state["params/Dense_1/kernel"] == ("float32", (3, 8))
    assert template.state_leaves[0].path == "opt_state/0/count"


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_params_keep_their_dtype(dtype):
    model = (lambda key: {"w": jnp.zeros((3, 1), dtype)}, MODEL[1])
    template = infer_template(trainer(model, squared, optax.adam(0.1), batch=(X.astype(dtype), Y)))
    assert template.state["params/w"] == (dtype, (3, 1))


def flat_model(params, x):
    return (x @ params["w"])[:, 0]


@pytest.mark.parametrize(
    ("apply", "target", "shapes"),
    [
        (MODEL[1], Y[:, 0], r"predictions of shape \(16, 1\) against targets of shape \(16,\) broadcast to \(16, 16\)"),
        (flat_model, Y, r"predictions of shape \(16,\) against targets of shape \(16, 1\) broadcast to \(16, 16\)"),
    ],
)
@pytest.mark.parametrize("where", ["loss", "metrics"])
def test_a_loss_that_broadcasts_is_refused(apply, target, shapes, where):
    def right(p, t):
        return jnp.mean((p.reshape(-1) - t.reshape(-1)) ** 2)

    options = {"loss": squared} if where == "loss" else {"loss": right, "metrics": {"error": squared}}
    program = trainer((MODEL[0], apply), optimizer=optax.sgd(0.1), batch=(X, target), **options)
    with pytest.raises(ProgramError, match=("loss: " if where == "loss" else "error: ") + shapes):
        infer_template(program)


def test_a_loss_that_reshapes_by_itself_is_not_refused():
    program = trainer(MODEL, lambda p, t: (p[:, 0] - t) ** 2, optax.sgd(0.1), batch=(X, Y[:, 0]))
    assert run(program, 50, (X, Y[:, 0]))[2][0] < 0.1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model": 3},
            r"model: expected a pair \(init, apply\), a Flax linen or nnx module, an Equinox module.*, got 3",
        ),
        ({"loss": 3}, r"loss: expected a function \(prediction, target\) -> scalar, got 3"),
        ({"optimizer": 3}, "optimizer: expected an optax.GradientTransformation, got 3"),
        ({"batch": X}, r"batch: expected a pair \(inputs, targets\), got a ndarray"),
        ({"metrics": {"loss": squared}}, "'loss' is the name of the loss itself"),
        ({"metrics": {"error": "mse"}}, "error: expected a function"),
    ],
)
def test_bad_arguments(changes, expected):
    arguments = {"model": MODEL, "loss": squared, "optimizer": optax.sgd(0.1), "batch": (X, Y)} | changes
    with pytest.raises(ProgramError, match=expected):
        trainer(**arguments)
