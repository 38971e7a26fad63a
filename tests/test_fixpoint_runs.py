"""The template holds in a run: every leaf keeps the type that the fixpoint gave it, and the values are JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fixstep.frontend import Program, compile, infer_template
from fixstep.runtime import load

ADAM = optax.adam(0.05)


def regression(dtype, scale=None):
    def init(key):
        params = {"w": jax.random.normal(key, (4, 3)).astype(dtype), "b": jnp.zeros(3, dtype)}
        return {"params": params, "opt_state": ADAM.init(params), "epoch": 0, "key": jax.random.key(1)}

    def step(state, batch):
        def loss_of(params):
            error = batch["x"].astype(params["w"].dtype) @ params["w"] + params["b"] - batch["y"]
            loss = jnp.mean(error**2)
            return loss if scale is None else loss * jnp.float32(scale)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        if scale is not None:
            loss, gradients = loss / scale, jax.tree.map(lambda g: g / jnp.float32(scale), gradients)
        updates, opt_state = ADAM.update(gradients, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        key = jax.random.split(state["key"])[0]
        return {"params": params, "opt_state": opt_state, "epoch": state["epoch"] + 1, "key": key}, {"loss": loss}

    return init, step


# Relative tolerances: float64 and float32 sums in another order differ by a few units in the last place a step;
# bfloat16 keeps 3 digits, and a parameter that falls on the other side of a rounding differs by the last of them.
@pytest.mark.parametrize(
    ("x", "y", "params", "scale", "tolerance"),
    [
        ("float64", "float64", "float64", None, 1e-12),
        ("float32", "float64", "float32", None, 1e-5),
        ("float32", "float32", "float32", None, 1e-5),
        ("float32", "float32", "bfloat16", 256.0, 2e-2),
    ],
)
def test_two_epochs_keep_every_type(x, y, params, scale, tolerance, tmp_path):
    init, step = regression(params, scale)
    random = np.random.default_rng(0)
    data = [{"x": random.normal(size=(8, 4)).astype(x), "y": random.normal(size=(8, 3)).astype(y)} for _ in range(4)]
    program = Program(init=init, step=step, batch=data[0], name="regression")
    template = infer_template(program)
    compile(program, tmp_path / "a.fixstep", targets=["cpu"])
    session = load(tmp_path / "a.fixstep", seed=5)

    def types():
        return {path: (array.dtype.name, array.shape) for path, array in session.state().items()}

    assert types() == template.state
    with template.context():
        state = jax.jit(template.flat_init)(np.uint32(0), np.uint32(5))
        reference = jax.jit(template.flat_step)
        for batch in data * 2:
            metrics = session.step(batch)
            state, (loss,) = reference(state, list(batch.values()))
    assert types() == template.state
    assert metrics["loss"].numpy().dtype == np.result_type(x, y)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=tolerance)
    for (path, array), expected in zip(session.state().items(), state, strict=True):
        np.testing.assert_allclose(
            array.astype("float64"), np.asarray(expected, "float64"), rtol=tolerance, atol=tolerance, err_msg=path
        )
