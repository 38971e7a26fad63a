"""Small training steps of every kind, for the cross-target suite.

A case is a function that returns (init, step, batches): `init` as a `Program` takes it, and the batches of the run.
Where the environment names a folder FIXSTEP_ZOO with a `steps.py` (REG: name to a function that returns step, state,
batches; OPT: name to options), its steps are cases too.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

Built = tuple[Any, Callable[[Any, Any], Any], list[Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One training step; with `x64` it is built and traced with 64-bit types."""

    name: str
    kind: str
    build: Callable[[], Built]
    x64: bool = False


CASES: dict[str, Case] = {}


def case(kind: str, *, x64: bool = False) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        CASES[build.__name__] = Case(build.__name__, kind, build, x64)
        return build

    return register


def rows(n: int = 4, size: int = 8, width: int = 6, classes: int = 4, dtype: Any = np.float32) -> list[Any]:
    """Batches of features x and labels y."""
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.standard_normal((size, width)).astype(dtype),
            "y": rng.integers(0, classes, size).astype(np.int32),
        }
        for _ in range(n)
    ]


def images(n: int = 3, channels: int = 1) -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.standard_normal((4, 8, 8, channels)).astype(np.float32),
            "y": rng.integers(0, 4, 4).astype(np.int32),
        }
        for _ in range(n)
    ]


def dense(key: Any, *shape: int, dtype: Any = jnp.float32) -> Any:
    return (jax.random.normal(key, shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1)).astype(dtype)


def mlp_params(key: Any, dtype: Any = jnp.float32) -> Any:
    a, b = jax.random.split(key)
    return {"w1": dense(a, 6, 16, dtype=dtype), "b1": jnp.zeros(16, dtype), "w2": dense(b, 16, 4, dtype=dtype)}


def mlp(params: Any, x: Any) -> Any:
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"]


def cross_entropy(logits: Any, labels: Any) -> Any:
    hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -(jax.nn.log_softmax(logits) * hot).sum(-1).mean()


def mlp_loss(params: Any, batch: Any) -> Any:
    return cross_entropy(mlp(params, batch["x"].astype(params["w1"].dtype)), batch["y"])


def trained(
    optimizer: optax.GradientTransformation,
    params: Callable[[Any], Any] = mlp_params,
    loss: Callable[[Any, Any], Any] = mlp_loss,
    batches: list[Any] | None = None,
) -> Built:
    """A step of an optimizer on a loss."""

    def init(key: Any) -> Any:
        first = params(key)
        return {"params": first, "opt": optimizer.init(first)}

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

    return init, step, batches or rows()


def descent(params: Callable[[Any], Any], loss: Callable[[Any, Any], Any], batches: list[Any] | None = None) -> Built:
    """A step of plain gradient descent."""
    return trained(optax.sgd(0.05), params, loss, batches)


# optimizers


@case("optimizer")
def momentum() -> Built:
    return trained(optax.sgd(0.05, momentum=0.9))


@case("optimizer")
def adam() -> Built:
    return trained(optax.adam(0.01))


@case("optimizer")
def adamw_on_a_schedule() -> Built:
    return trained(optax.adamw(optax.cosine_decay_schedule(0.01, 40)))


@case("optimizer")
def adafactor() -> Built:
    return trained(optax.adafactor(0.01))


@case("optimizer")
def lion_with_clipping() -> Built:
    return trained(optax.chain(optax.clip_by_global_norm(0.5), optax.lion(0.003)))


@case("optimizer")
def every_second_step() -> Built:
    return trained(optax.MultiSteps(optax.adam(0.01), every_k_schedule=2))


@case("optimizer")
def skipped_if_not_finite() -> Built:
    return trained(optax.apply_if_finite(optax.adam(0.01), 5))


@case("optimizer")
def moments_in_bfloat16() -> Built:
    return trained(optax.adam(0.01, mu_dtype="bfloat16"))


# convolution, normalisation, attention, recurrence


def conv(x: Any, w: Any, *, stride: int = 1, groups: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


@case("convolution")
def two_convolutions() -> Built:
    def params(key: Any) -> Any:
        a, b, c = jax.random.split(key, 3)
        return {"a": dense(a, 3, 3, 1, 4), "b": dense(b, 3, 3, 4, 4), "c": dense(c, 4, 4)}

    def loss(p: Any, batch: Any) -> Any:
        x = jax.nn.relu(conv(batch["x"], p["a"]))
        return cross_entropy(jax.nn.relu(conv(x, p["b"], stride=2)).mean((1, 2)) @ p["c"], batch["y"])

    return descent(params, loss, images())


@case("convolution")
def depthwise_convolution() -> Built:
    def params(key: Any) -> Any:
        a, b = jax.random.split(key)
        return {"a": dense(a, 3, 3, 1, 4), "b": dense(b, 4, 4)}

    def loss(p: Any, batch: Any) -> Any:
        return cross_entropy(conv(batch["x"], p["a"], groups=4).mean((1, 2)) @ p["b"], batch["y"])

    return descent(params, loss, images(channels=4))


@case("convolution")
def max_pooling() -> Built:
    def params(key: Any) -> Any:
        a, b = jax.random.split(key)
        return {"a": dense(a, 3, 3, 1, 4), "b": dense(b, 64, 4)}

    def loss(p: Any, batch: Any) -> Any:
        x = conv(batch["x"], p["a"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(x.reshape(4, -1) @ p["b"], batch["y"])

    return descent(params, loss, images())


@case("normalisation")
def batch_norm_with_running_mean() -> Built:
    def init(key: Any) -> Any:
        return {"params": mlp_params(key), "mean": jnp.zeros(16), "var": jnp.ones(16)}

    def step(state: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            h = batch["x"] @ p["w1"] + p["b1"]
            mean, var = h.mean(0), h.var(0)
            h = (h - mean) * jax.lax.rsqrt(var + 1e-5)
            return cross_entropy(jax.nn.relu(h) @ p["w2"], batch["y"]), (mean, var)

        (value, (mean, var)), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        new = jax.tree.map(lambda p, g: p - 0.05 * g, state["params"], grads)
        running = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}
        return {"params": new, **running}, {"loss": value}

    return init, step, rows()


@case("normalisation")
def layer_norm_gelu() -> Built:
    def loss(p: Any, batch: Any) -> Any:
        x = batch["x"]
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return cross_entropy(jax.nn.gelu(x @ p["w1"] + p["b1"]) @ p["w2"], batch["y"])

    return descent(mlp_params, loss)


def attention_of(dtype: Any) -> Built:
    def params(key: Any) -> Any:
        names = ("q", "k", "v", "o")
        return {n: dense(k, 8, 8, dtype=dtype) for n, k in zip(names, jax.random.split(key, 4), strict=True)}

    def loss(p: Any, batch: Any) -> Any:
        x = batch["x"].astype(dtype)
        q, k, v = (x @ p[n] for n in "qkv")
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(8).astype(dtype)
        scores = jnp.where(np.tril(np.ones((6, 6), bool)), scores, jnp.asarray(-1e9, dtype).astype(dtype))
        out = jax.nn.softmax(scores) @ v @ p["o"]
        return ((out - x).astype(jnp.float32) ** 2).mean()

    rng = np.random.default_rng(0)
    return descent(params, loss, [{"x": rng.standard_normal((2, 6, 8)).astype(np.float32)} for _ in range(3)])


@case("attention")
def causal_attention() -> Built:
    return attention_of(jnp.float32)


@case("attention")
def attention_in_bfloat16() -> Built:
    return attention_of(jnp.bfloat16)


@case("recurrence")
def lstm() -> Built:
    def params(key: Any) -> Any:
        a, b = jax.random.split(key)
        return {"x": dense(a, 3, 16), "h": dense(b, 4, 16)}

    def loss(p: Any, batch: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = (jnp.zeros((2, 4)), jnp.zeros((2, 4)))
        _, hs = jax.lax.scan(cell, start, batch["x"])
        return ((hs.sum(-1) - batch["y"]) ** 2).mean()

    rng = np.random.default_rng(0)
    made = [{"x": rng.standard_normal((5, 2, 3)), "y": rng.standard_normal((5, 2))} for _ in range(3)]
    return descent(params, loss, jax.tree.map(lambda a: a.astype(np.float32), made))


# random numbers


def noisy(draw: Callable[[Any], Any], impl: str = "threefry2x32") -> Built:
    def init(key: Any) -> Any:
        return {"key": jax.random.key(7, impl=impl), "sum": jnp.zeros((3, 4))}

    def step(state: Any, batch: Any) -> Any:
        key, now = jax.random.split(state["key"])
        drawn = draw(now).astype(jnp.float32)
        return {"key": key, "sum": 0.5 * state["sum"] + drawn}, {"mean": drawn.mean() + batch["x"].mean()}

    return init, step, rows()


@case("random numbers")
def normal_numbers() -> Built:
    return noisy(lambda key: jax.random.normal(key, (3, 4)))


@case("random numbers")
def permutation_and_categorical() -> Built:
    def draw(key: Any) -> Any:
        a, b = jax.random.split(key)
        return jax.random.permutation(a, 12).reshape(3, 4) + jax.random.categorical(b, jnp.zeros((3, 4, 5)))

    return noisy(draw)


@case("random numbers")
def rbg_keys() -> Built:
    return noisy(lambda key: jax.random.uniform(key, (3, 4)), impl="rbg")


@case("random numbers")
def dropout() -> Built:
    def init(key: Any) -> Any:
        return {"params": mlp_params(key), "key": jax.random.key(3)}

    def step(state: Any, batch: Any) -> Any:
        key, now = jax.random.split(state["key"])

        def loss(p: Any) -> Any:
            h = jax.nn.relu(batch["x"] @ p["w1"] + p["b1"])
            h = jnp.where(jax.random.bernoulli(now, 0.8, h.shape), h / 0.8, 0)
            return cross_entropy(h @ p["w2"], batch["y"])

        value, grads = jax.value_and_grad(loss)(state["params"])
        new = jax.tree.map(lambda p, g: p - 0.05 * g, state["params"], grads)
        return {"params": new, "key": key}, {"loss": value}

    return init, step, rows()


# indices and order


@case("indices")
def one_hot_times_a_matrix() -> Built:
    def loss(p: Any, batch: Any) -> Any:
        words = jax.nn.one_hot(jnp.tile(batch["y"][:, None], (1, 8)), 32) @ p["table"]
        return (jnp.tanh(words @ p["out"]) ** 2).mean()

    return descent(lambda key: {"table": dense(key, 32, 16), "out": dense(key, 16, 4)}, loss)


@case("indices")
def embedding() -> Built:
    def params(key: Any) -> Any:
        return {"table": dense(key, 4, 5)}

    def loss(p: Any, batch: Any) -> Any:
        return ((p["table"][batch["y"]] - 1.0) ** 2).mean()

    return descent(params, loss)


@case("indices")
def scatter_with_duplicates_and_out_of_range() -> Built:
    def step(state: Any, batch: Any) -> Any:
        value = batch["x"].mean(1)
        added = state["t"].at[batch["y"]].add(value)
        dropped = added.at[batch["y"] * 3].add(value, mode="drop")
        filled = dropped.at[batch["y"] + 2].get(mode="fill", fill_value=2.0)
        return {"t": 0.9 * dropped, "m": jnp.maximum(state["m"].at[batch["y"]].max(value), -1.0)}, {"s": filled.sum()}

    return {"t": jnp.zeros(4), "m": jnp.zeros(4)}, step, rows()


@case("indices")
def segments() -> Built:
    def step(state: Any, batch: Any) -> Any:
        sums = jax.ops.segment_sum(batch["x"], batch["y"], 4)
        return {"s": 0.5 * state["s"] + sums}, {"max": jax.ops.segment_max(batch["x"], batch["y"], 4).max()}

    return {"s": jnp.zeros((4, 6))}, step, rows()


@case("order")
def ranks_alone() -> Built:
    """A sort whose keys nothing reads."""

    def step(state: Any, batch: Any) -> Any:
        ranks = jnp.argsort(batch["x"][:, 0])
        return {"w": state["w"] + ranks}, {"first": ranks[0]}

    return {"w": jnp.zeros(8, jnp.int32)}, step, rows()


@case("order")
def sorting() -> Built:
    def step(state: Any, batch: Any) -> Any:
        x = batch["x"] + state["w"]
        order = jnp.argsort(x, axis=1)
        top, _ = jax.lax.top_k(x, 2)
        new = 0.9 * state["w"] + 0.1 * jnp.sort(x, axis=0).mean(0)
        return {"w": new}, {"top": top.sum(), "first": order[:, 0].sum(), "median": jnp.median(x)}

    return {"w": jnp.zeros(6)}, step, rows()


@case("order")
def cumulative() -> Built:
    def step(state: Any, batch: Any) -> Any:
        total = jnp.cumsum(batch["x"], 1)
        new = 0.5 * state["w"] + total + jax.lax.cummax(batch["x"], axis=0)
        return {"w": new}, {"product": jnp.cumprod(batch["x"], 1).mean(), "last": jnp.argmax(new).astype(jnp.int32)}

    return {"w": jnp.zeros((8, 6))}, step, rows()


# control flow


@case("control flow")
def cond_and_switch() -> Built:
    def step(state: Any, batch: Any) -> Any:
        x = batch["x"].mean(0)
        w = jax.lax.cond(state["n"] % 2 == 0, lambda w: w + x, lambda w: w * 0.5, state["w"])
        w = jax.lax.switch(state["n"] % 3, [lambda w: w, jnp.tanh, lambda w: -w], w)
        return {"w": w, "n": state["n"] + 1}, {"norm": (w**2).sum()}

    return {"w": jnp.ones(6), "n": jnp.int32(0)}, step, rows()


@case("control flow")
def while_loop() -> Built:
    def step(state: Any, batch: Any) -> Any:
        target = jnp.abs(batch["x"].mean()) + 1.0
        guess, count = jax.lax.while_loop(
            lambda c: (jnp.abs(c[0] ** 2 - target) > 1e-3) & (c[1] < 50),
            lambda c: (0.5 * (c[0] + target / c[0]), c[1] + 1),
            (jnp.float32(3.0), 0),
        )
        return {"w": 0.5 * state["w"] + guess}, {"rounds": count}

    return {"w": jnp.float32(1.0)}, step, rows()


@case("control flow")
def backtracking() -> Built:
    """A line search whose turns do not read the last loss, and hand on one value twice."""

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)

        def moved(size: Any) -> Any:
            return jax.tree.map(lambda p, g: p - size * g, state["params"], grads)

        def turn(carries: Any) -> Any:
            size = carries[0] * 0.5
            tried = moved(size)
            return size, mlp_loss(tried, batch), tried, tried

        start = (jnp.float32(8), loss + 1, moved(jnp.float32(8)), state["params"])
        size, found, params, _ = jax.lax.while_loop(lambda c: c[1] > loss, turn, start)
        return {"params": params, "loss": found}, {"size": size, "loss": found}

    return lambda key: {"params": mlp_params(key), "loss": jnp.float32(0)}, step, rows()


@case("optimizer")
def lbfgs() -> Built:
    optimizer = optax.lbfgs(memory_size=3)

    def init(key: Any) -> Any:
        params = {"w": dense(key, 6, 4)}
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return cross_entropy(batch["x"] @ params["w"], batch["y"]) + (params["w"] ** 2).sum()

        value, grads = jax.value_and_grad(loss)(state["params"])
        options = {"value": value, "grad": grads, "value_fn": loss}
        updates, opt = optimizer.update(grads, state["opt"], state["params"], **options)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

    return init, step, rows()


@case("numerics")
def special_functions() -> Built:
    def loss(params: Any, batch: Any) -> Any:
        x = jnp.abs(batch["x"] @ params["w"])
        return (jax.lax.igamma(x + 0.5, x + 1.0) + jax.scipy.special.i0e(x) + jax.lax.erf(x)).mean()

    return descent(lambda key: {"w": dense(key, 6, 4)}, loss)


@case("control flow")
def accumulated_gradients() -> Built:
    def init(key: Any) -> Any:
        return mlp_params(key)

    def step(params: Any, batch: Any) -> Any:
        parts = jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), batch)
        zeros = jax.tree.map(jnp.zeros_like, params)

        def one(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(mlp_loss)(params, part)), None

        grads, _ = jax.lax.scan(one, zeros, parts)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), {}

    return init, step, rows()


# element types


def typed(dtype: Any) -> Built:
    """Arithmetic, comparison and reduction in one dtype."""
    rng = np.random.default_rng(0)
    kind = jnp.dtype(dtype)
    if kind.kind == "b":
        made = [{"x": rng.integers(0, 2, (3, 5)).astype(bool)} for _ in range(3)]

        def flip(state: Any, batch: Any) -> Any:
            return {"w": ~state["w"] ^ batch["x"]}, {"any": (state["w"] & batch["x"]).any()}

        return {"w": jnp.zeros((3, 5), bool)}, flip, made
    whole = jax.dtypes.issubdtype(kind, np.integer)
    values = [rng.integers(0, 100, (3, 5)) if whole else rng.standard_normal((3, 5)) for _ in range(3)]
    half = jnp.asarray(2 if whole else 0.5, kind)

    def step(state: Any, batch: Any) -> Any:
        new = state["w"] * half + batch["x"]
        metrics = {"sum": jnp.real(new).sum(dtype=jnp.real(new).dtype), "max": jnp.real(new).max()}
        return {"w": jnp.where(jnp.real(new) > 1, new, new - half)}, metrics

    return {"w": jnp.zeros((3, 5), kind)}, step, [{"x": value.astype(kind)} for value in values]


for _name in ("bool", "int8", "uint8", "int16", "uint16", "uint32", "float16", "bfloat16", "complex64"):
    CASES[f"type_{_name}"] = Case(f"type_{_name}", "element types", lambda name=_name: typed(name))
for _name in ("int64", "uint64", "float64"):
    CASES[f"type_{_name}"] = Case(f"type_{_name}", "element types", lambda name=_name: typed(name), x64=True)
for _name in ("float8_e4m3fn", "float8_e5m2"):
    CASES[f"type_{_name}"] = Case(f"type_{_name}", "element types", lambda name=_name: typed(name))
CASES["type_int4"] = Case("type_int4", "element types", lambda: typed(ml_dtypes.int4))


@case("element types", x64=True)
def adam_in_float64() -> Built:
    def params(key: Any) -> Any:
        return jax.tree.map(lambda a: a.astype(jnp.float64), mlp_params(key))

    return trained(optax.adam(0.01), params, mlp_loss, rows(dtype=np.float64))


@case("element types")
def float16_parameters_with_a_loss_scale() -> Built:
    def loss(p: Any, batch: Any) -> Any:
        return mlp_loss(p, batch).astype(jnp.float32)

    return trained(optax.adam(0.01, eps=1e-4), lambda key: mlp_params(key, jnp.float16), loss)


@case("element types")
def empty_and_scalar_leaves() -> Built:
    def step(state: Any, batch: Any) -> Any:
        return {"e": state["e"] * 2, "s": state["s"] + batch["x"].sum(), "p": state["p"]}, {}

    return {"e": jnp.zeros((0, 3)), "s": jnp.float32(0), "p": jnp.arange(5, dtype=jnp.int8)}, step, rows()


# numerics


@case("numerics")
def elementary_functions() -> Built:
    def step(state: Any, batch: Any) -> Any:
        x = batch["x"] + state["w"]
        y = jnp.tanh(x) + jax.nn.sigmoid(x) + jnp.exp(-jnp.abs(x)) + jnp.log1p(x**2) + jnp.sin(x) * jnp.cos(x)
        y = y + jax.lax.erf(x) + jnp.arctan2(x, 1 + x**2) + jnp.sqrt(1 + x**2) + jnp.abs(x) ** 1.5 + jnp.floor(x)
        return {"w": 0.1 * y.mean(0)}, {"y": y.sum()}

    return {"w": jnp.zeros(6)}, step, rows()


@case("numerics")
def infinities_and_out_of_range() -> Built:
    def step(state: Any, batch: Any) -> Any:
        x = batch["x"] * 1e30
        big = jnp.where(x > 0, x * 1e30, x)
        whole = big.astype(jnp.int32)
        return {"w": jnp.minimum(state["w"], whole.min(0))}, {
            "inf": jnp.isinf(big).sum(),
            "nan": jnp.isnan(big - big).sum(),
            "max": jnp.nan_to_num(big).max(),
        }

    return {"w": jnp.zeros(6, jnp.int32)}, step, rows()


def summed(*shape: int) -> Built:
    rng = np.random.default_rng(0)

    def step(state: Any, batch: Any) -> Any:
        x = batch["x"] * (1 + state["w"])
        return {"w": 0.5 * x.mean()}, {"sum": x.sum(), "norm": jnp.sqrt((x**2).sum())}

    return {"w": jnp.float32(0)}, step, [{"x": rng.random(shape).astype(np.float32)} for _ in range(2)]


@case("numerics")
def corrections_for_rounding() -> Built:
    """Differences that are rounding and nothing else, and zeros that are not zero."""

    def step(state: Any, batch: Any) -> Any:
        x = batch["x"]
        total = state["w"] + 1e3 * x
        lost = 1e3 * x - (total - state["w"])
        big = jnp.where(x > 0, jnp.inf, x)
        return {"w": total}, {"lost": lost, "zero": big * 0.0, "inverse": 0.0 / jnp.round(x)}

    return {"w": jnp.full((8, 6), 0.1)}, step, rows()


@case("element types")
def integers_as_bfloat16() -> Built:
    def step(state: Any, batch: Any) -> Any:
        large = batch["y"] * 12345 + 1
        hot = (batch["x"] > 0).astype(jnp.bfloat16)
        return {"w": state["w"] + large.astype(jnp.bfloat16)}, {
            "small": large.astype(jnp.int8).astype(jnp.bfloat16),
            "hot": hot,
        }

    return {"w": jnp.zeros(8, jnp.bfloat16)}, step, rows()


@case("numerics")
def sum_over_sixty_thousand() -> Built:
    return summed(60_000)


@case("numerics")
def sum_over_a_million() -> Built:
    return summed(1_000_000)


@case("numerics")
def product_over_four_thousand_in_bfloat16() -> Built:
    def step(state: Any, batch: Any) -> Any:
        y = batch["x"] @ state["w"]
        return {"w": state["w"] * jnp.asarray(0.5, y.dtype)}, {"y": jnp.abs(y.astype(jnp.float32)).mean()}

    rng = np.random.default_rng(0)
    made = [{"x": rng.standard_normal((4, 4096)).astype(jnp.bfloat16)} for _ in range(2)]
    return {"w": jnp.asarray(rng.standard_normal((4096, 3)), jnp.bfloat16)}, step, made


# linear algebra, Fourier transforms, and what leaves the device


@case("linear algebra")
def cholesky() -> Built:
    def loss(p: Any, batch: Any) -> Any:
        a = p["a"] @ p["a"].T + 3 * jnp.eye(4)
        return jnp.log(jnp.diagonal(jnp.linalg.cholesky(a))).sum() + batch["x"].mean()

    return descent(lambda key: {"a": dense(key, 4, 4)}, loss)


@case("element types")
def sums_of_masked_integers() -> Built:
    """Products of a boolean mask that are added up along columns and along rows."""

    def step(state: Any, batch: Any) -> Any:
        mask = batch["x"] > 0
        product = mask.astype(jnp.int32) * state["w"]
        count = mask.astype(jnp.int32).sum(0)
        return {"w": state["w"] + count}, {"columns": product.sum(0), "rows": product.sum(1)}

    return {"w": jnp.ones((8, 6), jnp.int32)}, step, rows()


@case("element types")
def products_of_narrow_integers() -> Built:
    """Matrices, convolutions and sums whose factors are widened, in shapes that fill vectors and that do not."""

    def step(state: Any, batch: Any) -> Any:
        x = (batch["x"] * 40).astype(jnp.int8)  # (8, 6)
        metrics = {}
        for dtype in ("int8", "uint16"):
            a, b = x.astype(dtype), jnp.tile(x.astype(dtype), (2, 2))[:, :8]  # (8, 6), (16, 8)
            wide_a, wide_b = a.astype(jnp.int32), b.astype(jnp.int32)
            window = b.reshape(1, 16, 8, 1)
            metrics[dtype] = {
                "rows": wide_a @ wide_a.T,
                "aligned": wide_b @ wide_b.T,
                "preferred": jnp.dot(b.T, b, preferred_element_type=jnp.int32),
                "wrapping": a @ a.T,
                "vector": jnp.dot(b, b[0], preferred_element_type=jnp.int32),
                "summed": (wide_b[:, None] * wide_b[None]).sum(-1),
                "window": jax.lax.conv_general_dilated(
                    window, b[:3, :3, None, None], (1, 1), "SAME",
                    dimension_numbers=("NHWC", "HWIO", "NHWC"), preferred_element_type=jnp.int32,
                ),
            }  # fmt: skip
        return {"seen": state["seen"] + metrics["int8"]["aligned"][0, 0]}, metrics

    return {"seen": jnp.int32(0)}, step, rows()


@case("element types")
def complex_numbers() -> Built:
    """Orders, sums along an axis, convolutions and powers of complex numbers, and a state of them."""

    def step(state: Any, batch: Any) -> Any:
        z = jax.lax.complex(batch["x"], state["w"].real + batch["x"][::-1])
        metrics = {
            "order": jnp.argsort(z, axis=1),
            "cumsum": jnp.cumsum(z, 1),
            "cumprod": jnp.cumprod(z, 1),
            "convolution": jnp.convolve(z[0], z[1]),
            "power": z**2.5,
            "sign": jnp.sign(z),
            "quotient": z[0] / z[1:],
        }
        return {"w": (state["w"] + z.mean(0)) / 2}, metrics

    return {"w": jnp.ones(6, jnp.complex64)}, step, rows()


@case("indices")
def every_second_element() -> Built:
    """Slices with a step that are reversed, gathered and joined."""

    def loss(p: Any, batch: Any) -> Any:
        x = batch["x"] * p["w"]
        taken = x[:, ::2][:, jnp.array([-1, 0])] + x[:, ::-3]
        return ((taken**2).sum() + (jnp.concatenate([x[:, ::2], x[:, 1::2][:, ::-1]], 1) ** 3).sum()) * 0.1

    return descent(lambda key: {"w": dense(key, 6)}, loss)


@case("indices")
def ranges_of_rows() -> Built:
    def loss(p: Any, batch: Any) -> Any:
        x = batch["x"] * p["w"]
        return (x.at[1:5].multiply(2.0).at[2:].add(x[2:]) ** 2).sum() * 0.1

    return descent(lambda key: {"w": dense(key, 6)}, loss)


@case("indices")
def ranges_of_columns() -> Built:
    def loss(p: Any, batch: Any) -> Any:
        x = batch["x"] * p["w"]
        return (x.at[1:5, 2:4].multiply(2.0).at[..., 1:4].add(1.0) ** 2).sum() * 0.1

    return descent(lambda key: {"w": dense(key, 6)}, loss)


@case("linear algebra")
def a_third_power() -> Built:
    """Its gradient adds products and products transposed."""

    def loss(p: Any, batch: Any) -> Any:
        return (jnp.linalg.matrix_power(batch["x"] @ p["w"], 3) * 0.1).mean()

    return descent(lambda key: {"w": dense(key, 6, 8)}, loss)


@case("linear algebra")
def solve() -> Built:
    def loss(p: Any, batch: Any) -> Any:
        a = jnp.tanh(p["a"]) + 3 * jnp.eye(6)
        return (jnp.linalg.solve(a, batch["x"].T) ** 2).mean()

    return descent(lambda key: {"a": dense(key, 6, 6)}, loss)


@case("Fourier transforms")
def fft_of_eight() -> Built:
    def step(state: Any, batch: Any) -> Any:
        f = jnp.fft.fft(batch["x"].T[:2].astype(jnp.complex64) + state["w"])
        return {"w": 0.1 * jnp.real(f).mean()}, {"power": (jnp.abs(f) ** 2).sum()}

    return {"w": jnp.float32(0)}, step, rows()


@case("host calls")
def host_callback() -> Built:
    def step(state: Any, batch: Any) -> Any:
        y = jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct((), jnp.float32), batch["x"].sum())
        return {"w": state["w"] + y}, {}

    return {"w": jnp.float32(0)}, step, rows()


def zoo(folder: str | None = os.environ.get("FIXSTEP_ZOO")) -> dict[str, Case]:
    """The cases of a folder with a `steps.py`; none where no folder is named."""
    if not folder:
        return {}
    spec = importlib.util.spec_from_file_location("fixstep_zoo", Path(folder) / "steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def build(name: str) -> Built:
        step, state, batches = module.REG[name]()
        return state, step, batches

    return {
        f"zoo:{name}": Case(f"zoo:{name}", "zoo", lambda name=name: build(name), bool(module.OPT[name].get("x64")))
        for name in module.REG
    }


CASES |= zoo()
