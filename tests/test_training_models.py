"""Models of each library, with layers that have a state: the same curve as the training written with `jax.jit`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _training import BATCH, LABELS, LIBRARIES, MLP, LinenNet, X, compiled, curve, jitted, mlp_apply, mlp_init, xent
from flax import linen, nnx

from fixstep.frontend import infer_template, metrics, trainer
from fixstep.frontend.training._models import dropout_key
from fixstep.targets.errors import ProgramError

STEPS = 20
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def by_hand_linen(key):
    net = LinenNet()
    variables = net.init(key, X, train=False)
    params, statistics = variables["params"], variables["batch_stats"]

    @jax.jit
    def step(params, statistics, opt_state, key):
        key, own = jax.random.split(key)

        def loss(params):
            logits, changed = net.apply(
                {"params": params, "batch_stats": statistics},
                X,
                train=True,
                rngs={"dropout": own},
                mutable=["batch_stats"],
            )
            return xent(logits, LABELS).mean(), changed["batch_stats"]

        (value, changed), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), changed, opt_state, key, value

    opt_state, key, losses = OPTIMIZER.init(params), dropout_key(key), []
    for _ in range(STEPS):
        params, statistics, opt_state, key, value = step(params, statistics, opt_state, key)
        losses.append(float(value))
    logits = net.apply({"params": params, "batch_stats": statistics}, X, train=False)
    return losses, float(xent(logits, LABELS).mean())


def by_hand_nnx(key):
    graph, params, rest = nnx.split(LIBRARIES["nnx"](key), nnx.Param, ...)

    @jax.jit
    def step(params, rest, opt_state):
        def loss(params):
            model = nnx.merge(graph, params, rest, copy=True)
            model.train()
            return xent(model(X), LABELS).mean(), nnx.state(model, nnx.Not(nnx.Param))

        (value, changed), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), changed, opt_state, value

    opt_state, losses = OPTIMIZER.init(params), []
    for _ in range(STEPS):
        params, rest, opt_state, value = step(params, rest, opt_state)
        losses.append(float(value))
    model = nnx.merge(graph, params, rest)
    model.eval()
    return losses, float(xent(model(X), LABELS).mean())


def by_hand_equinox(key):
    model, state = LIBRARIES["equinox"](key)
    arrays, static = eqx.partition(model, eqx.is_array)
    batched = {"axis_name": "batch", "out_axes": (0, None)}

    @jax.jit
    def step(arrays, state, opt_state, key):
        key, own = jax.random.split(key)
        keys = jax.random.split(own, 16)

        def loss(arrays):
            model = eqx.combine(arrays, static)
            logits, changed = jax.vmap(lambda x, k: model(x, state, key=k), **batched)(X, keys)
            return xent(logits, LABELS).mean(), changed

        (value, changed), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, arrays)
        return optax.apply_updates(arrays, updates), changed, opt_state, key, value

    opt_state, key, losses = OPTIMIZER.init(arrays), dropout_key(key), []
    for _ in range(STEPS):
        arrays, state, opt_state, key, value = step(arrays, state, opt_state, key)
        losses.append(float(value))
    model = eqx.nn.inference_mode(eqx.combine(arrays, static))
    logits, _ = jax.vmap(lambda x: model(x, state), **batched)(X)
    return losses, float(xent(logits, LABELS).mean())


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_with_state_trains_as_written_with_jax(library, tmp_path):
    """Fails if statistics or keys are not carried, or if evaluation is not in inference mode."""
    by_hand = {"linen": by_hand_linen, "nnx": by_hand_nnx, "equinox": by_hand_equinox}[library]
    expected, evaluated = by_hand(jax.random.key(0))
    program = trainer(LIBRARIES[library], xent, OPTIMIZER, batch=BATCH, metrics={"accuracy": metrics.accuracy})
    session = compiled(program, tmp_path)
    before = session.state()
    got = [float(session.step(BATCH)["loss"]) for _ in range(STEPS)]
    np.testing.assert_allclose(got, expected, rtol=2e-5)  # float32 over 20 steps: rounding in another order
    assert float(session.evaluate(BATCH)["loss"]) == pytest.approx(evaluated, rel=2e-5)
    moved = {path for path, leaf in session.state().items() if (leaf != before[path]).any()}
    assert {path for path in before if path.startswith("model_state") and not path.endswith(("key", "/0"))} <= moved
    assert ("key" in before) == ("key" in moved) == (library != "nnx")
    first, second = (float(session.evaluate(BATCH)["loss"]) for _ in range(2))
    assert first == second
    np.testing.assert_array_equal(session.predict(X)["output"], session.predict(X)["output"])


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_that_was_made_trains_like_one_that_is_made_by_the_artifact(library):
    model = LIBRARIES[library]
    if library == "linen":
        made = (model.init(jax.random.key(0), X, train=False), model)
    else:
        made = model(jax.random.key(0))
    programs = [trainer(m, xent, OPTIMIZER, batch=BATCH, seed=0) for m in (model, made)]
    assert callable(programs[0].init)
    assert not callable(programs[1].init)
    curves = [curve(program, [BATCH] * 5)[1] for program in programs]
    np.testing.assert_allclose(*curves, rtol=1e-5)


def test_the_seed_is_that_of_dropout_where_parameters_are_given():
    model = (LinenNet().init(jax.random.key(0), X, train=False), LinenNet())
    keys = [trainer(model, xent, OPTIMIZER, batch=BATCH, seed=seed).init["key"] for seed in (0, 0, 1)]
    data = [jax.random.key_data(key).tolist() for key in keys]
    assert data[0] == data[1] != data[2]


def test_a_model_without_dropout_carries_no_key():
    for model in (MLP, linen.Dense(2), eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))):
        state = infer_template(trainer(model, xent, OPTIMIZER, batch=BATCH)).state
        assert "key" not in state
        assert not any(path.startswith("model_state") for path in state)


def test_an_apply_may_take_a_key_and_the_mode():
    def apply(params, x, *, key, training):
        noise = jax.random.normal(key, x.shape) if training else jnp.zeros_like(x)
        return mlp_apply(params, x + noise)

    program = trainer((mlp_init, apply), xent, OPTIMIZER, batch=BATCH)
    state = program.init(jax.random.key(0))
    expected = mlp_apply(state["params"], X)
    np.testing.assert_array_equal(program.predict(state, X), expected)
    after, first = program.step(state, BATCH)
    assert float(first["loss"]) != float(program.evaluate(state, BATCH)["loss"])
    assert (jax.random.key_data(after["key"]) != jax.random.key_data(state["key"])).any()


def test_given_parameters_go_through_the_policy(tmp_path):
    params = jax.tree.map(np.asarray, mlp_init(jax.random.key(3)))
    params["table"] = np.arange(3, dtype=np.int32)
    program = trainer((params, mlp_apply), xent, optax.adam(0.1), batch=BATCH, precision="bf16")
    session = compiled(program, tmp_path)
    state = session.state()
    assert state["params/first/w"].dtype.name == "bfloat16"
    assert state["params/table"].dtype == np.int32
    assert state["opt_state/0/mu/first/w"].dtype == np.float32
    assert "opt_state/0/mu/table" not in state
    np.testing.assert_allclose(state["params/first/w"].astype(np.float32), params["first"]["w"], rtol=2**-8)


def test_several_outputs_have_a_weighted_loss(tmp_path):
    def init(key):
        return {"a": 0.1 * jax.random.normal(key, (3, 1)), "b": 0.1 * jax.random.normal(key, (3, 2))}

    targets = (X[:, :1], LABELS)
    loss = [(2.0, lambda p, t: (p - t) ** 2), (0.5, xent)]
    program = trainer((init, lambda p, x: (x @ p["a"], x @ p["b"])), loss, optax.sgd(0.1), batch=(X, targets))

    @jax.jit
    def step(params):
        def total(params):
            square = jnp.mean((X @ params["a"] - X[:, :1]) ** 2)
            return 2.0 * square + 0.5 * xent(X @ params["b"], LABELS).mean()

        value, gradient = jax.value_and_grad(total)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    params, expected = init(jax.random.key(0)), []
    for _ in range(10):
        params, value = step(params)
        expected.append(float(value))
    np.testing.assert_allclose(curve(program, [(X, targets)] * 10)[1], expected, rtol=1e-5)
    session = compiled(program, tmp_path)
    session.step((X, targets))
    shown = session.averages()
    assert list(shown) == ["loss", "loss_0", "loss_1"]
    assert shown["loss"] == pytest.approx(2 * shown["loss_0"] + 0.5 * shown["loss_1"], rel=1e-6)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (LABELS, "expected a sequence of 2 targets, one for each weight, got a"),
        ((LABELS, LABELS, LABELS), "expected a sequence of 2 targets, one for each weight, got 3 of them"),
    ],
)
def test_as_many_targets_as_losses(targets, expected):
    program = trainer((mlp_init, lambda p, x: (x, x)), [(1, xent), (1, xent)], optax.sgd(0.1), batch=(X, targets))
    with pytest.raises(ProgramError, match=expected):
        infer_template(program)


def test_a_model_that_raises_is_told_with_its_line():
    def apply(params, x):
        return x @ params["w"]

    with pytest.raises(ProgramError, match=r"(?s)model raised KeyError.*in apply"):
        trainer((lambda key: {"v": jnp.ones(3)}, apply), xent, optax.sgd(0.1), batch=BATCH)


def test_a_function_that_makes_no_module_is_refused():
    with pytest.raises(ProgramError, match="this function makes a dict"):
        trainer(lambda key: {"w": jnp.zeros(3)}, xent, optax.sgd(0.1), batch=BATCH)


@pytest.mark.parametrize("library", LIBRARIES)
def test_half_precision_keeps_statistics_in_float32(library):
    program = trainer(LIBRARIES[library], xent, optax.adam(0.01), batch=BATCH, precision="f16", loss_scale="dynamic")
    template, state, step = jitted(program)
    floats = {path: spec[0] for path, spec in template.state.items() if "float" in spec[0]}
    assert {dtype for path, dtype in floats.items() if path.startswith("params/")} == {"float16"}
    assert {dtype for path, dtype in floats.items() if not path.startswith("params/")} == {"float32"}
    assert template.changes == ()
    losses = []
    for _ in range(30):
        state, values = step(state, BATCH)
        losses.append(values["loss"])
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
