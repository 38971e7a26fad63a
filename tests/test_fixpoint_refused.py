"""Steps without a fixed point, each refused in words that say which leaf, how it moves, where, and what to do."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fixstep.frontend._program import Program
from fixstep.frontend._template import infer_template
from fixstep.targets.errors import FixpointError, ProgramError

X = np.ones((8, 3), np.float32)


class Pair(NamedTuple):
    a: Any
    b: Any


def refusal(state, step, error=FixpointError, batch=X):
    with pytest.raises(error) as caught:
        infer_template(Program(init=state, step=step, batch=batch))
    return str(caught.value)


def f32(*shape):
    return np.zeros(shape, np.float32)


def test_two_leaves_that_swap_their_dtypes():
    state = {"a": f32(3), "b": np.zeros(3, np.float16), "still": f32()}
    message = refusal(state, lambda s, b: ({"a": s["b"], "b": s["a"], "still": s["still"]}, {}))
    assert message.splitlines() == [
        "the state has no fixed point: the types of its leaves repeat every 2 rounds:",
        "  a: float32[3] → float16[3] → float32[3]",
        "      from the state leaf 'b', which the step returns in this place unchanged",
        "      Choose one type for it and return it so, for example with .astype('float32').",
        "  b: float16[3] → float32[3] → float16[3]",
        "      from the state leaf 'a', which the step returns in this place unchanged",
        "      Choose one type for it and return it so, for example with .astype('float16').",
    ]


def test_three_leaves_that_rotate_and_one_that_settles():
    state = {"a": f32(), "b": np.float16(0), "c": np.int32(0), "d": np.float16(0)}
    message = refusal(
        state,
        lambda s, b: ({"a": s["b"], "b": s["c"], "c": s["a"], "d": s["d"] * jnp.float32(2)}, {}),
    )
    assert "repeat every 3 rounds" in message
    assert "a: float32[] → float16[] → int32[] → float32[]" in message
    # The one that settles moved, so it is shown, after the others and without advice.
    assert re.search(
        r"\n  d: float16\[\] → float32\[\]\n      from .*test_fixpoint_refused.py:\d+, in <lambda>: .*", message
    )


def test_a_leaf_that_grows():
    def step(state, batch):
        seen = jnp.concatenate([state["seen"], state["seen"]])
        return {"seen": seen}, {}

    message = refusal({"seen": f32(3)}, step)
    assert "the step changes the shape of its leaves" in message
    assert "seen: float32[3] → float32[6] → float32[12]\n" in message
    assert "in step: seen = jnp.concatenate(" in message
    assert "It grows: keep an array of fixed size" in message


def test_a_scalar_that_gets_a_dimension():
    def step(state, batch):
        return {"n": state["n"], "best": {"loss": jnp.full((1,), 2.0)}}, {}

    message = refusal({"n": np.int32(0), "best": {"loss": f32()}}, step)
    assert "  best/loss: float32[] → float32[1]\n" in message
    assert "with .reshape(())" in message
    assert "  n:" not in message


def test_a_loss_per_example_where_a_scalar_was():
    def step(state, batch):
        errors = jnp.sum(batch**2, axis=1)
        return {"loss": errors}, {}

    message = refusal({"loss": f32()}, step)
    assert "loss: float32[] → float32[8]\n" in message
    assert "in step: errors = jnp.sum(batch**2, axis=1)" in message
    assert "one value per example: reduce it to a scalar, for example with .mean()" in message


def test_a_shape_that_the_step_does_not_take_back():
    message = refusal({"w": f32(3)}, lambda s, b: ({"w": b @ s["w"]}, {}))
    assert "w: float32[3] → float32[8]\n" in message
    assert "Return it in the shape (3,) that it had." in message


def test_every_moving_leaf_is_shown():
    state = {f"w{i:02}": f32() for i in range(30)}
    message = refusal(state, lambda s, b: (jax.tree.map(lambda a: a[None], s), {}))
    assert len(re.findall(r"^  w\d\d: ", message, re.MULTILINE)) == 20
    assert message.endswith("and 10 more leaves")


def test_the_line_inside_a_jitted_step_is_found():
    @jax.jit
    def step(state, batch):
        wide = state["w"][None]
        return {"w": wide}, {}

    assert "in step: wide = state" in refusal({"w": f32()}, step)


def test_a_key_that_becomes_another_kind_of_key():
    def step(state, batch):
        return {"key": jax.random.key(0, impl="rbg")}, {}

    message = refusal({"key": jax.random.key(0)}, step)
    assert "key: key<threefry2x32>[] → key<rbg>[]" in message
    assert "in step: return" in message
    assert "jax.random.split" in message


@pytest.mark.parametrize(
    ("state", "returned", "expected"),
    [
        ({"a": f32(), "b": f32(2)}, {"a": f32()}, [r"- b: float32\[2\], missing in what it returns"]),
        ({"a": f32()}, {"a": f32(), "z": {"b": f32(2)}}, [r"\+ z/b: float32\[2\], not in the state that it takes"]),
        (
            {"momentum": f32()},
            {"momentun": f32()},
            [r"- momentum: .* \(did it become 'momentun'\?\)", r"\+ momentun: "],
        ),
        ({"p": [f32(), f32()]}, {"p": (f32(), f32())}, ["! p: expected a list, got a tuple"]),
        (
            {"p": Pair(f32(), f32())},
            {"p": (f32(), f32())},
            [r"- p/a", r"- p/b", r"\+ p/0", r"\+ p/1", "! p: expected a Pair, got a tuple"],
        ),
        (
            {"ema": None, "w": f32()},
            {"ema": f32(), "w": f32()},
            [r"\+ ema: float32\[\]", "! ema: expected None, got an array"],
        ),
        ((f32(), f32()), (f32(), f32(), f32()), [r"\+ 2: float32\[\]"]),
        (
            f32(),
            {"w": f32()},
            [r"- <the state itself>", r"\+ w", "! <the state itself>: expected an array, got a dict"],
        ),
        ({"a": f32(), "b": {}}, {"a": f32()}, [r"! b: expected an empty dict, missing in what it returns"]),
    ],
    ids=["missing", "extra", "renamed", "list", "namedtuple", "none", "longer", "leaf", "empty"],
)
def test_another_tree(state, returned, expected):
    message = refusal(state, lambda s, b: (returned, {}))
    assert message.startswith("the step returns a state of another structure than it takes:")
    for text in expected:
        assert re.search(f"^  {text}", message, re.MULTILINE), message
    assert len(message.splitlines()) == len(expected) + 2


def test_static_parts_that_change():
    message = refusal({"w": f32(), "mode": "train"}, lambda s, b: ({"w": s["w"], "mode": "eval"}, {}))
    assert "mode: 'train' → 'eval'" in message


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda s: s, r"expected it to return a pair \(state, metrics\), got a dict"),
        (lambda s: (s, 1.0, 2.0), r"expected it to return a pair \(state, metrics\), got 3 values"),
        (lambda s: None, "got a NoneType"),
        (lambda s: (jnp.float32(1), s), "got them in the other order: the state is first"),
        (lambda s: (s, {"name": "adam"}), "name: expected an array, got a str"),
        (lambda s: (s, {"a/b": 1.0, "a": {"b": 2.0}}), "a/b: 2 leaves share this path"),
    ],
)
def test_what_a_step_must_return(returned, expected):
    assert re.search(expected, refusal({"w": f32()}, lambda s, b: returned(s), ProgramError))


def test_evaluate_that_returns_the_state_too():
    program = Program(init={"w": f32()}, step=lambda s, b: (s, {}), evaluate=lambda s, b: (s, {"a": 1.0}), batch=X)
    with pytest.raises(ProgramError, match=r"evaluate: expected it to return metrics alone, got a pair"):
        infer_template(program)


def test_an_error_in_the_step_names_the_line_and_keeps_its_cause():
    def step(state, batch):
        prediction = batch @ state["w"]
        return state, prediction.sum()

    with pytest.raises(ProgramError, match=r"step raised TypeError: dot_general(?s:.*)prediction = batch @") as caught:
        infer_template(Program(init={"w": f32(4)}, step=step, batch=X))
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_error_in_a_later_round_says_what_had_moved():
    def step(state, batch):
        jax.lax.scan(lambda carry, x: (jnp.float16(carry), None), state["a"], batch)
        return {"a": state["b"], "b": state["b"]}, {}

    message = refusal({"a": np.float16(0), "b": f32()}, step, ProgramError)
    assert "traced in round 2, after the step had changed these state leaves:" in message
    assert "a: float16[] → float32[]" in message


def test_an_error_in_init_and_in_predict():
    with pytest.raises(ProgramError, match=r"init raised ValueError: no data(?s:.*)init=make_state"):
        infer_template(Program(init=raise_no_data, step=lambda s, b: (s, {}), batch=X))
    program = Program(init=X, step=lambda s, b: (s, {}), predict=lambda s, i: raise_no_data(i), inputs=X, batch=X)
    with pytest.raises(ProgramError, match="predict raised ValueError: no data"):
        infer_template(program)


def raise_no_data(key):
    raise ValueError("no data")


@pytest.mark.parametrize("made", ["given", "by init"])
def test_a_state_without_values(made):
    state = {"w": jax.ShapeDtypeStruct((3,), "float32")}
    message = refusal(state if made == "given" else lambda key: state, lambda s, b: (s, {}), ProgramError)
    assert "  w: float32[3]\n" in message


class Unregistered:
    pass


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        pytest.param(Unregistered(), "w: expected an array, got a Unregistered", id="unregistered"),
        (np.array([None]), "w: expected numbers, got an array of Python objects"),
        (np.array(["a"]), "w: expected an array of numbers, got dtype <U1"),
        (np.zeros(2, "datetime64[s]"), "w: expected an array of numbers, got dtype datetime64"),
        (np.zeros(2, np.longdouble), "w: expected an array of numbers, got dtype float128"),
        (2**40, "w: the Python int 1099511627776 does not fit int32"),
    ],
    ids=str,
)
def test_state_leaves_that_are_no_arrays(leaf, expected):
    assert expected in refusal({"w": leaf}, lambda s, b: (s, {}), ProgramError)
