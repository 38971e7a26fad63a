"""What happens between gradients and parameters: optimizers, frozen leaves, loss scales, accumulation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _training import (
    BATCH,
    LABELS,
    LIBRARIES,
    LINEAR,
    MLP,
    TARGETS,
    X,
    compiled,
    curve,
    jitted,
    mlp_apply,
    mlp_init,
    xent,
)

from fixstep.frontend import DynamicScale, infer_template, trainer
from fixstep.targets.errors import ProgramError


def by_hand(optimizer, steps, params=None, apply=mlp_apply):
    params = mlp_init(jax.random.key(0)) if params is None else params

    @jax.jit
    def step(params, opt_state):
        value, gradients = jax.value_and_grad(lambda params: xent(apply(params, X), LABELS).mean())(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = optimizer.init(params), []
    for _ in range(steps):
        params, opt_state, value = step(params, opt_state)
        losses.append(float(value))
    return params, losses


OPTIMIZERS = {
    "schedule": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 10)),
    "clip": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5, momentum=0.9)),
    "mask": optax.adamw(0.05, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 3),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=0.05),
    "partition": optax.partition(
        {"a": optax.sgd(0.1), "b": optax.adam(0.1)}, lambda params: {"first": "a", "last": "b"}
    ),
    "lookahead": optax.contrib.schedule_free_sgd(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_the_curve_of_jax(name):
    program = trainer(MLP, xent, OPTIMIZERS[name], batch=BATCH)
    np.testing.assert_allclose(curve(program, [BATCH] * 12)[1], by_hand(OPTIMIZERS[name], 12)[1], rtol=1e-5)


def test_an_optimizer_that_looks_at_the_loss_is_given_it():
    optimizer = optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5))
    template, state, step = jitted(trainer(MLP, xent, optimizer, batch=BATCH))
    (path,) = (path for path in template.state if path.endswith("scale"))
    scales = []
    for _ in range(6):
        state, _ = step(state, BATCH)
        scales.append(float(state[path]))
    assert scales[-1] < scales[0] == 1


def test_the_learning_rate_is_a_leaf_that_is_read_and_set(tmp_path):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    session = compiled(trainer(MLP, xent, optimizer, batch=BATCH), tmp_path)
    session.step(BATCH)
    before = session.state()
    path = "opt_state/hyperparams/learning_rate"
    assert before[path] == np.float32(0.5)
    session.load_state({**before, path: np.float32(0)})
    session.step(BATCH)
    np.testing.assert_array_equal(session.state()["params/last/w"], before["params/last/w"])
    session.load_state({**before, path: np.float32(0.25)})
    session.step(BATCH)
    quarter = session.state()["params/last/w"] - before["params/last/w"]
    session.load_state(before)
    session.step(BATCH)
    np.testing.assert_allclose(session.state()["params/last/w"] - before["params/last/w"], 2 * quarter, rtol=1e-4)


# --- frozen parameters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trainable",
    ["params/last/*", ["params/last/w", "*last/b"], lambda path: path.startswith("params/last/")],
    ids=["pattern", "patterns", "function"],
)
def test_frozen_leaves_stay_bit_for_bit(trainable, tmp_path):
    """Fails if frozen parameters train: weight decay alone would move them, and so would a momentum of 0."""
    optimizer = optax.adamw(0.05, weight_decay=0.1)
    session = compiled(trainer(MLP, xent, optimizer, batch=BATCH, trainable=trainable), tmp_path)
    before = session.state()
    losses = [float(session.step(BATCH)["loss"]) for _ in range(10)]
    after = session.state()
    moved = {path for path in after if path.startswith("params/") and after[path].tobytes() != before[path].tobytes()}
    assert moved == {"params/last/w", "params/last/b"}
    assert {path for path in after if "/mu/" in path} == {"opt_state/0/mu/last/w", "opt_state/0/mu/last/b"}
    first = mlp_init(jax.random.key(0))
    _, expected = by_hand(
        optimizer, 10, first["last"], lambda last, x: mlp_apply({"first": first["first"], "last": last}, x)
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        ("params/lst/*", "trainable: no parameter fits 'params/lst/\\*'; the floating ones are: params/first/b"),
        (lambda path: False, "trainable: it leaves no parameter to train"),
    ],
)
def test_what_leaves_nothing_to_train_is_refused(trainable, expected):
    with pytest.raises(ProgramError, match=expected):
        trainer(MLP, xent, optax.sgd(0.1), batch=BATCH, trainable=trainable)


def test_integer_leaves_among_the_parameters_are_not_trained():
    def init(key):
        return {**mlp_init(key), "table": jnp.arange(3), "key": jax.random.key(1)}

    state, _ = curve(trainer((init, mlp_apply), xent, optax.adam(0.1), batch=BATCH, precision="mixed_bf16"), [BATCH])
    assert state["params/table"].tolist() == [0, 1, 2]
    assert state["params/key"].tolist() == jax.random.key_data(jax.random.key(1)).tolist()


# --- loss scales ----------------------------------------------------------------------------------------------------

SQUARED = {"loss": lambda p, t: (p - t) ** 2, "optimizer": optax.adam(0.1), "batch": (X, TARGETS)}
BAD = {"inf": np.inf, "NaN": np.nan, "-inf": -np.inf}


def bad_batch(value):
    wrong = X.copy()
    wrong[3, 1] = value
    return (wrong, TARGETS)


def with_scale(**options):
    return trainer(LINEAR, **SQUARED, loss_scale=DynamicScale(**options))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    return compiled(with_scale(initial=8, period=3, minimum=2, maximum=16), tmp_path_factory.mktemp("scaled"))


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_an_overflow_skips_the_update_whole(scaled, value):
    """Fails if NaN counts as finite, if the overflowed update is applied, or if the optimizer's count moves."""
    scaled.step((X, TARGETS))
    before = scaled.state()
    scaled.step(bad_batch(value))
    after = scaled.state()
    changed = {path for path in after if after[path].tobytes() != before[path].tobytes()}
    assert changed - {"loss_scale/scale"} == {"loss_scale/finite_steps"}
    assert after["loss_scale/scale"] == max(before["loss_scale/scale"] / 2, 2)
    assert after["loss_scale/finite_steps"] == 0
    assert after["opt_state/0/count"] == before["opt_state/0/count"]


def test_the_scale_halves_to_a_floor_and_doubles_after_a_period():
    _, state, step = jitted(with_scale(initial=8, period=3, minimum=2, maximum=16))
    good, bad = (X, TARGETS), bad_batch(np.nan)
    seen = []
    for batch in [bad, bad, bad, good, good, bad, *[good] * 10]:
        state, _ = step(state, batch)
        seen.append(float(state["loss_scale/scale"]))
    assert seen == [4, 2, 2, 2, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 16]
    assert state["opt_state/0/count"] == 12
    for _ in range(6):
        state, _ = step(state, good)
    assert state["loss_scale/scale"] == 16


@pytest.mark.parametrize("scale", [256.0, DynamicScale(period=4)], ids=["static", "dynamic"])
def test_a_scale_changes_nothing_where_nothing_overflows(scale):
    batches = [(X, TARGETS)] * 12
    options = {**SQUARED, "optimizer": optax.sgd(0.05)}
    plain = curve(trainer(LINEAR, **options), batches)[1]
    # The scales are powers of two, so that they go in and out without rounding.
    assert curve(trainer(LINEAR, **options, loss_scale=scale), batches)[1] == plain


def test_a_static_scale_skips_too():
    _, state, step = jitted(trainer(LINEAR, **SQUARED, loss_scale=1024))
    after, _ = step(state, bad_batch(np.nan))
    assert all((after[path] == state[path]).all() for path in state)


def test_a_scale_saves_small_gradients_in_float16():
    """The gradients are about 1e-9: in float16 they are 0, and 2^15 times that is not."""
    options = {**SQUARED, "loss": lambda p, t: 1e-8 * (p - t) ** 2, "precision": "f16"}
    flat, _ = curve(trainer(LINEAR, **options), [(X, TARGETS)] * 3)
    moved, _ = curve(trainer(LINEAR, **options, loss_scale="dynamic"), [(X, TARGETS)] * 3)
    assert (flat["opt_state/0/mu/w"] == 0).all()
    assert (moved["opt_state/0/mu/w"] != 0).all()


def test_an_overflow_leaves_the_statistics_as_they_were():
    _, state, step = jitted(trainer(LIBRARIES["linen"], xent, optax.adam(0.1), batch=BATCH, loss_scale="dynamic"))
    after, _ = step(state, (bad_batch(np.inf)[0], LABELS))
    mean = "model_state/batch_stats/BatchNorm_0/mean"
    np.testing.assert_array_equal(after[mean], state[mean])
    assert (after["key"] != state["key"]).any()


def test_a_scale_that_is_too_large_finds_its_own_way_down():
    program = trainer(
        MLP, xent, optax.sgd(0.1), batch=BATCH, precision="mixed_f16", loss_scale=DynamicScale(initial=2.0**24)
    )
    _, state, step = jitted(program)
    losses = []
    for _ in range(30):
        state, values = step(state, BATCH)
        losses.append(values["loss"])
    assert losses[0] == losses[1] > losses[-1]
    assert 2.0**10 < state["loss_scale/scale"] < 2.0**24


@pytest.mark.parametrize("scale", [0, -1, float("inf"), True, "big"])
def test_what_is_no_scale_is_refused(scale):
    with pytest.raises(ProgramError, match="loss_scale: expected None, a number above 0, 'dynamic' or a DynamicScale"):
        trainer(LINEAR, **SQUARED, loss_scale=scale)


@pytest.mark.parametrize("options", [{"initial": 0.5}, {"minimum": 0}, {"maximum": 1}, {"period": 0}])
def test_a_dynamic_scale_has_an_order(options):
    with pytest.raises(ProgramError, match="expected 0 < minimum <= initial <= maximum and a period >= 1"):
        DynamicScale(**options)


# --- accumulation ---------------------------------------------------------------------------------------------------


def parts(n):
    return [(X[i::n], TARGETS[i::n]) for i in range(n)]


def test_accumulated_updates_are_those_of_the_joined_batch(tmp_path):
    """Fails if there is an update every n+1 calls, of the last gradient only, or of a sum in place of a mean."""
    n, cycles = 4, 5
    # Adam would hide a sum in place of a mean: it divides by the gradients' size.
    optimizer = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: -0.05))
    options = {**SQUARED, "batch": (X[:4], TARGETS[:4]), "optimizer": optimizer}
    session = compiled(trainer(LINEAR, **options, accumulate=n), tmp_path)
    joined = trainer(LINEAR, **{**SQUARED, "optimizer": optimizer})
    _, state, step = jitted(joined)
    for _ in range(cycles):
        start = session.state()["params/w"]
        for call, batch in enumerate(parts(n)):
            np.testing.assert_array_equal(session.state()["params/w"], start)
            assert session.state()["accumulated/calls"] == call
            session.step(batch)
        state, _ = step(state, (X, TARGETS))
        np.testing.assert_allclose(session.state()["params/w"], state["params/w"], rtol=1e-5)
        assert session.state()["opt_state/1/count"] == state["opt_state/1/count"]
    assert (session.state()["accumulated/gradients/w"] == 0).all()


def test_an_overflow_in_one_part_skips_the_whole_update():
    options = {**SQUARED, "batch": (X[:4], TARGETS[:4]), "accumulate": 2, "loss_scale": DynamicScale(initial=8)}
    _, first, step = jitted(trainer(LINEAR, **options))
    good, bad = parts(4)[0], (bad_batch(np.inf)[0][:4], TARGETS[:4])
    state = first
    for batch in (bad, good):
        state, _ = step(state, batch)
    np.testing.assert_array_equal(state["params/w"], first["params/w"])
    assert (state["loss_scale/scale"], state["opt_state/0/count"], state["accumulated/calls"]) == (4, 0, 0)
    for batch in (good, good):
        state, _ = step(state, batch)
    assert (state["loss_scale/scale"], state["opt_state/0/count"]) == (4, 1)
    assert (state["params/w"] != first["params/w"]).all()


def test_half_precision_gradients_are_summed_in_float32():
    program = trainer(LINEAR, **{**SQUARED, "batch": (X[:4], TARGETS[:4])}, accumulate=2, precision="bf16")
    template = infer_template(program)
    assert template.state["params/w"][0] == "bfloat16"
    assert template.state["accumulated/gradients/w"][0] == "float32"
    assert template.changes == ()


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_what_is_no_number_of_calls_is_refused(n):
    with pytest.raises(ProgramError, match="accumulate: expected a number of calls, 1 or more"):
        trainer(LINEAR, **SQUARED, accumulate=n)


# --- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "params", "output"),
    [
        ("f16", "float16", "float32"),
        ("bf16", "bfloat16", "float32"),
        ("f32", "float32", "float32"),
        ("f64", "float64", "float64"),
        ("mixed_f16", "float32", "float32"),
        ("mixed_bf16", "float32", "float32"),
    ],
)
def test_the_dtypes_of_a_policy(precision, params, output):
    template = infer_template(trainer(MLP, xent, optax.adam(0.1), batch=BATCH, precision=precision))
    moments = "float64" if precision == "f64" else "float32"
    assert template.changes == ()
    assert template.state["params/first/w"][0] == params
    assert template.state["opt_state/0/mu/first/w"][0] == moments
    assert template.output_leaves[0].dtype == output


@pytest.mark.parametrize(
    ("precision", "compute"), [("mixed_bf16", "bfloat16"), ("f64", "float64"), ("mixed_f16", "float16")]
)
def test_the_model_computes_in_the_type_of_its_policy(precision, compute):
    seen = []

    def apply(params, x):
        seen.append({leaf.dtype.name for leaf in jax.tree.leaves((params, x))})
        return mlp_apply(params, x)

    infer_template(trainer((mlp_init, apply), xent, optax.adam(0.1), batch=BATCH, precision=precision))
    assert all(dtypes == {compute} for dtypes in seen)


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ProgramError, match="precision: expected one of f16, bf16, f32, f64, mixed_f16, mixed_bf16, or"):
        trainer(MLP, xent, optax.sgd(0.1), batch=BATCH, precision="fp8")
