"""Arrays and keys that a function closes over, by name and size; and calls back to the host, by line."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from fixstep.frontend._captures import LARGE_BYTES, find_captures, find_effects
from fixstep.frontend._program import Program
from fixstep.frontend._template import infer_template

X = np.ones((8, 3), np.float32)
TABLE = np.ones((3, 128, 64), np.float32)
KEY = jax.random.key(0)
NAMESPACE = types.SimpleNamespace(table=jnp.ones((200, 100)))


def notes(step, **more):
    return infer_template(Program(init={"w": X}, step=step, batch=X, **more)).notes


def uses_global(state, batch):
    return state, {"loss": jnp.sum(batch[0, 0] * TABLE)}


def uses_namespace(state, batch):
    return state, {"loss": jnp.sum(NAMESPACE.table)}


def uses_closure():
    table = jnp.ones((256, 256))

    def step(state, batch):
        return state, {"loss": jnp.sum(table)}

    return step


def uses_tree():
    params = {"dense": {"w": jnp.ones((256, 256)), "b": jnp.ones(3)}}

    def step(state, batch):
        return state, {"loss": jnp.sum(params["dense"]["w"]) + jnp.sum(params["dense"]["b"])}

    return step


def uses_helper():
    table = np.ones((256, 256), np.float32)

    def helper(x):
        return jnp.sum(table) + x

    def step(state, batch):
        return state, {"loss": helper(jnp.sum(batch))}

    return step


def uses_float64():
    table = np.ones((256, 256))  # becomes float32 in the trace

    def step(state, batch):
        return state, {"loss": jnp.sum(batch[0, 0] * table)}

    return step


def uses_partial():
    def step(table, state, batch):
        return state, {"loss": jnp.sum(table)}

    return functools.partial(step, jnp.ones((256, 256)))


def uses_default(state, batch, scale=jnp.ones((256, 256))):  # noqa: B008
    return state, {"loss": jnp.sum(scale)}


class Model:
    def __init__(self):
        self.table = jnp.ones((256, 256))

    def step(self, state, batch):
        return state, {"loss": jnp.sum(self.table)}

    def __call__(self, state, batch):
        return self.step(state, batch)


def uses_scan():
    table = jnp.ones((256, 256))

    def step(state, batch):
        return state, {"loss": jax.lax.scan(lambda c, x: (c + jnp.sum(table * x[0]), None), jnp.float32(0), batch)[0]}

    return step


BIG = r"float32\[256,256\] \(256.0 KiB\), frozen into the artifact"


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (uses_global, r"^step closes over `TABLE`, a global variable of \S*: float32\[3,128,64\] \(96.0 KiB\), frozen"),
        (uses_namespace, r"`NAMESPACE.table`, a global variable of \S*: float32\[200,100\] \(78.1 KiB\)"),
        (uses_closure(), f"`table`, a closure variable of step: {BIG}"),
        (jax.jit(uses_closure()), f"`table`, a closure variable of step: {BIG}"),
        (uses_tree(), f"`params/dense/w`, a closure variable of step: {BIG}"),
        (uses_helper(), f"`table`, a closure variable of helper: {BIG}"),
        (uses_float64(), f"`table`, a closure variable of step: {BIG}"),
        (uses_partial(), rf"`args\[0\]`, an argument of the partial step: {BIG}"),
        (uses_default, f"`scale`, a default argument of step: {BIG}"),
        (Model().step, f"`self.table`, the object that step is bound to: {BIG}"),
        (Model(), f"`self.table`, the object step: {BIG}"),
        (uses_scan(), f"`table`, a closure variable of step: {BIG}"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_large_array_is_reported_by_name_and_size(step, expected):
    (note,) = notes(step)
    assert re.search(expected, note), note


def test_a_key_is_reported():
    def step(state, batch):
        return state, {"noise": jax.random.normal(KEY)}

    (note,) = notes(step)
    assert note.startswith("step closes over `KEY`, a global variable of ")
    assert "PRNG key threefry2x32[] (8 bytes), frozen into the artifact" in note


@pytest.mark.parametrize("jitted", [False, True])
def test_a_raw_key_is_reported(jitted):
    old_key = jax.random.PRNGKey(1)

    def step(state, batch):
        return state, {"noise": jax.random.normal(old_key)}

    (note,) = notes(jax.jit(step) if jitted else step)
    assert "`old_key`, a closure variable of step: PRNG key uint32[2] (8 bytes)" in note


def test_a_key_made_inside_and_small_arrays_are_not_reported():
    small = jnp.ones(LARGE_BYTES // 4 - 1)

    def step(state, batch):
        key = jax.random.key(3)
        return state, {"noise": jax.random.normal(key) + small.sum()}

    assert notes(step) == ()


def test_evaluate_and_predict_are_looked_at_too():
    table = jnp.ones((256, 256))
    found = notes(
        lambda state, batch: (state, {}),
        evaluate=lambda state, batch: {"loss": jnp.sum(table)},
        predict=lambda state, inputs: inputs * table[0, 0],
        inputs=X,
    )
    assert [note.split()[0] for note in found] == ["evaluate", "predict"]


def test_one_array_used_twice_is_one_capture():
    table = jnp.ones((256, 256))

    def function(x):
        return jax.jit(lambda x: jnp.sum(table) * x)(x) + jnp.sum(table)

    (capture,) = find_captures(jax.make_jaxpr(function)(1.0), function, "step")
    assert capture.byte_length == 256 * 256 * 4


def test_host_calls_are_found_wherever_they_are():
    shape = jax.ShapeDtypeStruct((), "float32")

    def function(x):
        x = jax.pure_callback(lambda x: x, shape, x)
        x = jax.jit(lambda x: io_callback(lambda x: x, shape, x))(x)
        x, _ = jax.lax.scan(lambda c, _: (jax.pure_callback(lambda c: c, shape, c), None), x, None, length=2)
        jax.lax.cond(x > 0, lambda: jax.debug.print("x {}", x), lambda: None)
        jax.debug.callback(lambda x: None, x)
        return x

    found = find_effects(jax.make_jaxpr(function)(jnp.float32(1)))
    assert [call.operation for call in found][:3] == ["pure_callback", "io_callback", "pure_callback"]
    assert {call.operation for call in found[3:]} <= {"debug_print", "debug_callback"}
    assert len(found) == 5
    assert all("test_captures.py" in call.line for call in found)
    assert "jax.debug.callback(lambda x: None, x)" in str(found[4])


def test_a_function_without_host_calls_has_none():
    assert find_effects(jax.make_jaxpr(lambda x: jnp.sum(x))(X)) == ()
