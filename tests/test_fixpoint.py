"""What the fixpoint finds: seeds, rounds, kinds of state, values, and the flat functions."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from fixstep.frontend._program import Program
from fixstep.frontend._sums import COUNT, accumulators
from fixstep.frontend._template import infer_template
from fixstep.runtime._signature import LeafSpec
from fixstep.targets.errors import FixpointError

X = np.ones((8, 3), np.float32)


def template_of(init, step, batch=X, **more):
    return infer_template(Program(init=init, step=step, batch=batch, **more))


def keep(state, batch):
    """A step that returns its state as it is."""
    return state, {}


# --- seeds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x64_by", ["nothing", "batch", "setting"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0.5, "float32"),
        (3, "int32"),
        (True, "bool"),
        (1j, "complex64"),
        (jnp.asarray(0.5), "float32"),
        (jnp.asarray(3), "int32"),
        (np.float32(1), "float32"),
        (np.zeros(2, np.int16), "int16"),
    ],
    ids=repr,
)
def test_numbers_without_a_dtype_do_not_decide(value, dtype, x64_by):
    batch = X.astype(np.float64) if x64_by == "batch" else X
    with jax.enable_x64(x64_by == "setting"):
        template = template_of({"a": value}, keep, batch)
    assert template.state["a"][0] == dtype
    assert template.changes == ()
    assert template.x64 == (x64_by != "nothing")
    assert template.seed_values[0].dtype.name == dtype
    assert template.seed_values[0].item(0) == np.asarray(value).item(0)


@pytest.mark.parametrize("x64", [False, True])
def test_a_weak_leaf_made_by_init_does_not_decide(x64):
    with jax.enable_x64(x64):
        template = template_of(lambda key: {"a": jnp.asarray(0.5) * 2.0, "n": 0}, keep)
        assert template.state == {"a": ("float32", ()), "n": ("int32", ())}
        made = jax.jit(template.flat_init)(np.uint32(0), np.uint32(0))
    assert [(leaf.dtype.name, leaf.weak_type) for leaf in made] == [("float32", False), ("int32", False)]


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
@pytest.mark.parametrize("where", ["state", "init", "batch"])
def test_64_bit_leaves_stay_64_bit_with_x64_off(dtype, where):
    wide, narrow = np.ones(2, dtype), np.ones(2, np.float32)
    state, batch = (narrow, wide) if where == "batch" else (wide, narrow)
    init = (lambda key: {"a": wide}) if where == "init" else {"a": state}
    template = template_of(init, lambda state, batch: (state, {"sum": jnp.sum(batch)}), batch)
    assert not jax.config.jax_enable_x64
    assert template.x64
    assert template.state["a"][0] == state.dtype.name
    assert template.metric_leaves[0].dtype == batch.dtype.name
    assert any(dtype in note for note in template.notes)


def test_an_init_that_asks_for_float64_gets_it():
    template = template_of(lambda key: {"a": jnp.zeros(3, jnp.float64)}, keep)
    assert template.state == {"a": ("float64", (3,))}
    assert "init asks for float64 at " in template.notes[0]


def test_a_step_that_asks_for_float64_in_a_float32_program_is_noted():
    template = template_of({"a": X}, lambda state, batch: (state, {"m": batch.sum().astype("float64")}))
    assert template.metric_leaves[0].dtype == "float32"
    assert any("float64 at" in note and 'batch.sum().astype("float64")' in note for note in template.notes)


def test_a_64_bit_array_kept_by_jax_stays():
    with jax.enable_x64(True):
        array = jnp.zeros(3, jnp.float64)
    template = template_of(lambda key: {"a": array}, keep)
    assert template.state == {"a": ("float64", (3,))}


# --- rounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_a_chain_of_k_copies_needs_k_rounds(k):
    state = {f"x{i}": np.float32(i) for i in range(k + 1)} | {"x0": np.float64(0)}
    template = template_of(state, lambda s, b: ({"x0": s["x0"], **{f"x{i + 1}": s[f"x{i}"] for i in range(k)}}, {}))
    assert template.rounds == k
    assert [(c.path, c.before, c.after, c.round) for c in template.changes] == [
        (f"x{i}", "float32[]", "float64[]", i) for i in range(1, k + 1)
    ]
    assert {dtype for dtype, _ in template.state.values()} == {"float64"}


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "uint8", "bool"])
def test_a_weak_output_of_the_same_kind_does_not_move_its_leaf(dtype):
    value = {"float32": 1.0, "int32": 1, "bfloat16": 1.0, "uint8": 1, "bool": True}[dtype]
    template = template_of({"a": jnp.zeros((), dtype)}, lambda s, b: ({"a": value}, {}))
    assert template.changes == ()
    (state, _) = template.flat_step([jnp.zeros((), dtype)], [X])
    assert (state[0].dtype.name, state[0].weak_type) == (dtype, False)


def test_a_weak_output_moves_a_leaf_that_cannot_hold_its_kind():
    template = template_of({"n": jnp.int32(1)}, lambda s, b: ({"n": 0.5}, {}), X.astype(np.float64))
    assert [str(change) for change in template.changes] == ["n: int32[] → float32[] (round 1)"]


def test_a_counter_that_becomes_float_is_reported():
    template = template_of({"n": jnp.int32(7)}, lambda s, b: ({"n": s["n"] + jnp.float32(1)}, {}))
    (change,) = template.changes
    assert (change.path, change.before, change.after, change.narrowed) == ("n", "int32[]", "float32[]", False)
    assert template.seed_values[0] == np.float32(7)


def test_what_the_step_itself_narrows_is_marked():
    template = template_of({"a": np.float32([1.1])}, lambda s, b: ({"a": s["a"].astype(jnp.float16)}, {}))
    assert [(c.after, c.narrowed) for c in template.changes] == [("float16[1]", True)]
    assert template.seed_values[0] == np.float16(1.1)


def test_nothing_of_the_step_is_computed():
    calls = []

    def step(state, batch):
        jax.debug.callback(lambda: calls.append(1))
        return {"a": state["a"] * jnp.float32(1)}, {}

    template = template_of({"a": jnp.bfloat16(1)}, step)
    assert template.rounds == 1
    assert calls == []


# --- values --------------------------------------------------------------------------------------------------------


def to_int(state, batch):
    return {"a": state["a"].astype(jnp.int32)}, {}


def real(state, batch):
    return {"a": jnp.real(state["a"])}, {}


def to_int8(state, batch):
    return {"a": state["a"].astype(jnp.int8)}, {}


def to_half(state, batch):
    return {"a": state["a"].astype(jnp.float16)}, {}


@pytest.mark.parametrize(
    ("value", "step", "message"),
    [
        (np.float32([1, 2.5]), to_int, r"a: float32\[2\] → int32\[2\]: 2.5 is no integer"),
        (np.float32([np.nan]), to_int, "nan is no integer"),
        (np.float32(3e10), to_int, "30000001024.0 is out of range"),
        (np.int32(300), to_int8, r"a: int32\[\] → int8\[\]: 300 is out of range"),
        (np.complex64(1j), real, "imaginary part would be lost"),
        (np.float32(1e6), to_half, r"float32\[\] → float16\[\]: 1000000.0 is out of range"),
    ],
)
def test_values_that_the_cast_would_lose_are_refused(value, step, message):
    with pytest.raises(FixpointError, match=message):
        template_of({"a": value}, step)


@pytest.mark.parametrize(("value", "step"), [(np.float32([1, -2]), to_int), (np.int32(-128), to_int8)])
def test_values_that_survive_the_cast_are_kept(value, step):
    template = template_of({"a": value}, step)
    assert template.changes[0].narrowed
    np.testing.assert_array_equal(template.seed_values[0], value)


def test_values_are_cast_once_from_what_was_given():
    def step(state, batch):  # float32 → float16 in round 1, → float32 in round 2
        return {"a": state["b"], "b": state["c"], "c": state["c"]}, {}

    third = np.float32(1 / 3)
    template = template_of({"a": third, "b": np.float16(0), "c": np.float32(0)}, step)
    assert template.rounds == 2
    assert template.seed_values[0] == third


def test_what_init_computes_is_not_cast_to_what_may_not_hold_it():
    def init(key):
        return {"a": jax.random.normal(key, (2,))}

    with pytest.raises(FixpointError, match=r"that init computes(?s:.*)a: float32\[2\] → int32\[2\](?s:.*)astype"):
        template_of(init, to_int)


# --- kinds of state ------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: Any
    name: str = dataclasses.field(metadata={"static": True}, default="r")


@flax.struct.dataclass
class Struct:
    w: Any
    size: int = flax.struct.field(pytree_node=False, default=3)


def linen_state():
    module = linen.Dense(2)
    params = module.init(jax.random.key(0), X)["params"]
    return TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(1e-3))


STATES = {
    "none": ({"a": None, "b": np.zeros(2, np.float32)}, {"b"}),
    "empty containers": ({"a": {}, "b": (), "c": [], "d": np.zeros(2, np.float32)}, {"d"}),
    "a state without leaves": ({}, set()),
    "a bare array": (np.zeros(2, np.float32), {""}),
    "named tuple": (Point(np.float32(1), {"z": np.float32(2)}), {"x", "y/z"}),
    "dataclass": (Registered(np.float32(1)), {"w"}),
    "flax struct": (Struct(np.float32(1)), {"w"}),
    "frozen dict": (flax.core.freeze({"a": {"b": np.float32(1)}}), {"a/b"}),
    "nnx state": (nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0))), {"bias/value", "kernel/value"}),
    "equinox module": (
        eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)),
        {"layers/0/weight", "layers/0/bias", "layers/1/weight", "layers/1/bias"},
    ),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("made", ["given", "by init"])
def test_kinds_of_state(name, made):
    state, paths = STATES[name]

    def step(state, batch):
        return jax.tree.map(lambda a: a * 2 if eqx.is_array(a) else a, state), {"loss": jnp.float32(0)}

    template = template_of((lambda key: state) if made == "by init" else state, step)
    assert set(template.state) == paths
    assert template.changes == ()
    if made == "given":
        leaves = [np.asarray(leaf) for leaf in template.seed_values]
    else:
        leaves = jax.jit(template.flat_init)(np.uint32(0), np.uint32(0))
    (after, _) = jax.jit(template.flat_step)(leaves, [X])
    for old, new in zip(leaves, after, strict=True):
        np.testing.assert_array_equal(np.asarray(old) * 2, new)


def test_a_flax_train_state_trains():
    def step(state, batch):
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({"params": p}, batch) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=gradients), loss

    template = template_of(lambda key: linen_state(), step)
    assert template.state["step"] == ("int32", ())
    assert template.changes == ()


def test_an_equinox_module_trains():
    optimizer = optax.adam(1e-3)

    def init(key):
        model = eqx.nn.MLP(3, 2, 4, 1, key=key)
        return model, optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(state, batch):
        model, opt_state = state
        loss, gradients = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(batch) ** 2))(model)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (eqx.apply_updates(model, updates), opt_state), loss

    template = template_of(init, step)
    assert template.changes == ()
    assert template.state["0/layers/0/weight"] == ("float32", (4, 3))
    state = jax.jit(template.flat_init)(np.uint32(0), np.uint32(0))
    jax.jit(template.flat_step)(state, [X])


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("made", ["given", "by init"])
def test_typed_keys_travel_as_their_data(implementation, made):
    def make(key=None):
        return {"key": jax.random.key(5, impl=implementation), "keys": jax.random.split(jax.random.key(1), 3)}

    def step(state, batch):
        key, now = jax.random.split(state["key"])
        return {"key": key, "keys": state["keys"]}, {"noise": jax.random.normal(now)}

    template = template_of(make if made == "by init" else make(), step)
    width = 2 if implementation == "threefry2x32" else 4
    assert template.state_leaves == (
        LeafSpec("key", "uint32", (width,), implementation),
        LeafSpec("keys", "uint32", (3, 2), "threefry2x32"),
    )
    data = template.flat_init(0, 0) if made == "by init" else list(template.seed_values)
    (state, metrics) = jax.jit(template.flat_step)(data, [X])
    expected, values = step(make(), X)
    np.testing.assert_array_equal(state[0], jax.random.key_data(expected["key"]))
    np.testing.assert_array_equal(metrics[0], values["noise"])


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize(("high", "low"), [(0, 0), (0, 12345), (0, 2**31 + 5), (3, 17)])
def test_the_seed_words_make_the_key_of_that_seed(implementation, high, low):
    with jax.default_prng_impl(implementation):
        template = template_of(lambda key: {"key": key}, keep)
        with jax.enable_x64(True):
            expected = jax.random.key_data(jax.random.key(np.uint64((high << 32) + low)))
    (data,) = jax.jit(template.flat_init)(np.uint32(high), np.uint32(low))
    np.testing.assert_array_equal(data, expected)


def test_init_without_jit_gives_the_same_state():
    def init(key):
        return {"w": jax.random.normal(key, (3, 2))}

    template = template_of(init, keep)
    (made,) = jax.jit(template.flat_init)(np.uint32(0), np.uint32(11))
    np.testing.assert_array_equal(made, init(jax.random.key(11))["w"])
    assert template.seed_values is None


# --- functions besides the step -----------------------------------------------------------------------------------


def test_metrics_evaluation_and_outputs_are_typed():
    template = template_of(
        {"w": np.ones(3, np.float32)},
        lambda state, batch: (state, {"weak": 1.0, "n": 2, "ok": True, "per": batch[:, 0]}),
        evaluate=lambda state, batch: {"accuracy": jnp.mean(batch > 0)},
        predict=lambda state, inputs: {"y": inputs["x"] @ state["w"]},
        inputs={"x": X},
    )
    assert [(m.path, m.dtype, m.shape) for m in template.metric_leaves] == [
        ("n", "int32", ()),
        ("ok", "bool", ()),
        ("per", "float32", (8,)),
        ("weak", "float32", ()),
    ]
    assert template.evaluation_leaves == (LeafSpec("accuracy", "float32", ()),)
    assert template.input_leaves == (LeafSpec("x", "float32", (8, 3)),)
    assert template.output_leaves == (LeafSpec("y", "float32", (8,)),)
    state = list(template.seed_values)
    np.testing.assert_array_equal(template.flat_predict(state, [X])[0], np.full(8, 3.0))
    assert template.flat_evaluate(state, [X])[0] == 1
    assert [m.dtype.name for m in template.flat_step(state, [X])[1]] == ["int32", "bool", "float32", "float32"]


@pytest.mark.parametrize("batch", [X, X.astype(np.float64)], ids=["x32", "x64"])
def test_a_bare_scalar_is_the_loss_and_a_weak_one_is_float32(batch):
    template = template_of({"w": X}, lambda state, batch: (state, 0.5), batch)
    assert template.metric_leaves == (LeafSpec("loss", "float32", ()),)


def test_no_metrics():
    assert template_of({"w": X}, lambda state, batch: (state, None)).metric_leaves == ()


@pytest.mark.parametrize(
    ("dtype", "total"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float8_e4m3fn", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_accumulators_are_as_wide_as_a_sum_from_a_float32_zero(dtype, total):
    assert accumulators([LeafSpec("loss", dtype, ())], ()) == (LeafSpec("sum/loss", total, ()), COUNT)


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint8", "int64"])
def test_integers_are_added_up_in_two_words(dtype):
    assert accumulators([LeafSpec("n", dtype, ())], ()) == (LeafSpec("sum/n", "uint32", (2,)), COUNT)


def test_what_has_no_average_has_no_sum():
    metrics = [LeafSpec("z", "complex64", ()), LeafSpec("per", "float32", (8,)), LeafSpec("k", "uint32", (2,), "rbg")]
    assert accumulators(metrics, ()) == (COUNT,)


def test_host_calls_are_found_with_their_line():
    def step(state, batch):
        jax.debug.print("loss {}", batch.sum())
        return state, {}

    (call,) = template_of({"w": X}, step).host_calls["step"]
    assert call.operation.startswith("debug")
    assert 'jax.debug.print("loss {}", batch.sum())' in call.line
