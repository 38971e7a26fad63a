"""Every usual optimizer, in every precision, under every kind of loss scale, stays in its template."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fixstep.frontend._program import Program
from fixstep.frontend._template import infer_template

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.01, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(0.01),
    "adabelief": lambda: optax.adabelief(0.01),
    "adagrad": lambda: optax.adagrad(0.01),
    "lamb": lambda: optax.lamb(0.01),
    "radam": lambda: optax.radam(0.01),
    "rmsprop": lambda: optax.rmsprop(0.01),
    "yogi": lambda: optax.yogi(0.01),
    "lion": lambda: optax.lion(0.01),
    "adafactor": lambda: optax.adafactor(0.01),
}
DTYPES = ("float32", "float64", "bfloat16", "float16")
SCALES = ("none", "static", "dynamic")


def scaled_program(optimizer, dtype, scale):
    """A linear regression whose gradients are unscaled in float32, as mixed precision usually is."""

    def init(key):
        params = {"w": jax.random.normal(key, (4, 3), dtype), "b": jnp.zeros(3, dtype)}
        state = {"params": params, "opt_state": optimizer.init(params)}
        if scale == "dynamic":
            state["scale"], state["good_steps"] = jnp.float32(2.0**10), jnp.int32(0)
        return state

    def step(state, batch):
        factor = {"none": None, "static": jnp.float32(2.0**10), "dynamic": state.get("scale")}[scale]

        def loss_of(params):
            error = batch["x"] @ params["w"] + params["b"] - batch["y"]
            loss = jnp.mean(error**2)
            return loss if factor is None else loss.astype(factor.dtype) * factor

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        if factor is not None:
            loss, gradients = loss / factor, jax.tree.map(lambda g: g / factor, gradients)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        if scale == "dynamic":
            finite = jnp.isfinite(loss)
            new = jax.tree.map(
                lambda a, b: jnp.where(finite, a, b), new, {k: state[k] for k in ("params", "opt_state")}
            )
            good = jnp.where(finite, state["good_steps"] + 1, 0)
            new["scale"] = jnp.where(finite, jnp.where(good % 100 == 0, 2.0, 1.0), 0.5) * state["scale"]
            new["good_steps"] = good
        return new, {"loss": loss}

    example = {"x": jax.ShapeDtypeStruct((8, 4), dtype), "y": jax.ShapeDtypeStruct((8, 3), dtype)}
    return Program(init=init, step=step, batch=example)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_returns_the_types_it_takes(name, dtype, scale):
    template = infer_template(scaled_program(OPTIMIZERS[name](), dtype, scale))
    assert template.x64 == (dtype == "float64")
    params = {path: leaf[0] for path, leaf in template.state.items() if path.startswith("params/")}
    assert set(params.values()) == {dtype}
    assert not any(change.narrowed for change in template.changes)
    if dtype == "float32":
        assert template.changes == ()
    with template.context():
        state = [np.ones(leaf.shape, leaf.numpy_dtype) for leaf in template.state_leaves]
        batch = [np.ones(leaf.shape, leaf.numpy_dtype) for leaf in template.batch_leaves]
        # The user's own step, without the casts of the flat one: it returns what it takes.
        tree, example = template.state_layout.build(state), template.batch_layout.build(batch)
        step = jax.jit(template.program.step)
        runs = (dtype, scale) == ("bfloat16", "dynamic")  # to run them all takes a minute, and shows the same types
        returned = step(tree, example)[0] if runs else step.trace(tree, example).out_info[0]
    got = [(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(returned)]
    assert got == [(leaf.dtype, leaf.shape) for leaf in template.state_leaves]


# A run costs a compile, so one case of each kind also runs; the compiled step is fed its own outputs.
@pytest.mark.parametrize(
    ("name", "dtype", "scale"),
    [
        ("adam", "float64", "none"),
        ("adam", "bfloat16", "static"),
        ("lamb", "float16", "dynamic"),
        ("adafactor", "float32", "dynamic"),
    ],
)
def test_a_compiled_step_takes_what_it_returned(name, dtype, scale):
    template = infer_template(scaled_program(OPTIMIZERS[name](), dtype, scale))
    random = np.random.default_rng(0)
    batch = [random.normal(size=leaf.shape).astype(leaf.numpy_dtype) for leaf in template.batch_leaves]
    with template.context():
        state = jax.jit(template.flat_init)(np.uint32(0), np.uint32(1))
        step = jax.jit(template.flat_step)
        for _ in range(2):
            state, metrics = step(state, batch)
            assert [array.dtype.name for array in state] == [leaf.dtype for leaf in template.state_leaves]
            assert [array.dtype.name for array in metrics] == [leaf.dtype for leaf in template.metric_leaves]
        assert step._cache_size() == 1
        assert all(np.isfinite(np.asarray(metric, np.float64)).all() for metric in metrics)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_static_loss_scale_moves_the_first_moments_and_nothing_else(dtype):
    template = infer_template(scaled_program(optax.adam(0.01), dtype, "static"))
    assert [(c.path, c.before, c.after, c.round) for c in template.changes] == [
        ("opt_state/0/mu/b", f"{dtype}[3]", "float32[3]", 1),
        ("opt_state/0/mu/w", f"{dtype}[4,3]", "float32[4,3]", 1),
    ]
    assert template.rounds == 1
    assert template.state["opt_state/0/count"] == ("int32", ())
    with template.context():
        state = jax.jit(template.flat_init)(np.uint32(0), np.uint32(1))
    assert [array.dtype.name for array in state] == [leaf.dtype for leaf in template.state_leaves]


def test_a_float64_model_is_float64_from_the_start():
    template = infer_template(scaled_program(optax.adam(0.01), "float64", "none"))
    assert not jax.config.jax_enable_x64
    assert template.changes == ()
    assert {dtype for path, (dtype, _) in template.state.items() if not path.endswith("count")} == {"float64"}
    assert [leaf.dtype for leaf in template.metric_leaves] == ["float64"]


def test_float64_targets_leave_a_float32_model_float32():
    program = scaled_program(optax.adam(0.01), "float32", "none")
    batch = {"x": np.zeros((8, 4), np.float32), "y": np.zeros((8, 3), np.float64)}
    template = infer_template(Program(init=program.init, step=program.step, batch=batch))
    assert template.x64
    assert [leaf.dtype for leaf in template.metric_leaves] == ["float64"]
    assert {dtype for path, (dtype, _) in template.state.items() if not path.endswith("count")} == {"float32"}
    assert template.changes == ()


def test_an_init_without_dtypes_stays_float32_beside_float64_targets():
    def init(key):
        return {"w": jax.random.normal(key, (4,))}

    def step(state, batch):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * gradient}, loss

    batch = {"x": np.zeros((8, 4), np.float32), "y": np.zeros(8)}
    template = infer_template(Program(init=init, step=step, batch=batch))
    assert template.state == {"w": ("float32", (4,))}
    assert "batch leaf 'y' is float64" in template.notes[0]
    with template.context():
        (made,) = jax.jit(template.flat_init)(np.uint32(0), np.uint32(7))
    np.testing.assert_array_equal(made, init(jax.random.key(7))["w"])
