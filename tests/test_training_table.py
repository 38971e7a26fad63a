"""Optimizer × layer with a state × precision × loss scale: the types of the state are a fixed point from the start, and
the compiled curve is that of JAX.
"""

import itertools

import numpy as np
import optax
import pytest
from _training import BATCH, compiled, jitted, xent
from flax import linen

from fixstep.frontend import DynamicScale, infer_template, trainer


class Net(linen.Module):
    """One layer with a state, between dense ones."""

    layer: str

    @linen.compact
    def __call__(self, x, *, train):
        x = linen.Dense(8, use_bias=False)(x)
        if self.layer == "batch norm":
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        elif self.layer == "dropout":
            x = linen.Dropout(0.25, deterministic=not train)(x)
        else:
            x = linen.WeightNorm(linen.Dense(8))(x)
        return linen.Dense(2)(linen.relu(x))


OPTIMIZERS = {
    "momentum": optax.sgd(0.05, momentum=0.9),
    "adam": optax.adam(0.01),
    "schedule and clip": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.02, 50))
    ),
    "hyperparams": optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.01),
    "MultiSteps": optax.MultiSteps(optax.adam(0.02), 2),
    "lion": optax.lion(1e-3),
}
LAYERS = ["batch norm", "dropout", "weight norm"]
PRECISIONS = [None, "f32", "f64", "f16", "bf16", "mixed_f16", "mixed_bf16"]
SCALES = {"none": None, "static": 128.0, "dynamic": DynamicScale(initial=2.0**10, period=4)}

ROWS = list(itertools.product(OPTIMIZERS, LAYERS, PRECISIONS, SCALES))
# A third of the rows, in which every pair of two columns' values occurs; tracing all of them takes too long.
CHOSEN = [
    (o, layer, p, s)
    for o, layer, p, s in ROWS
    if (list(OPTIMIZERS).index(o) + LAYERS.index(layer) + PRECISIONS.index(p) + list(SCALES).index(s)) % 3 == 0
]
COMPILED = [
    ("momentum", "batch norm", "mixed_bf16", "none"),
    ("adam", "dropout", "mixed_f16", "dynamic"),
    ("schedule and clip", "batch norm", "f64", "static"),
    ("hyperparams", "weight norm", "bf16", "none"),
    ("MultiSteps", "dropout", "f16", "dynamic"),
    ("lion", "weight norm", None, "static"),
]


def program(optimizer, layer, precision, scale):
    return trainer(Net(layer), xent, OPTIMIZERS[optimizer], batch=BATCH, precision=precision, loss_scale=SCALES[scale])


def test_every_pair_of_values_is_among_the_chosen_rows():
    for first, second in itertools.combinations(range(4), 2):
        pairs = {(row[first], row[second]) for row in ROWS}
        assert {(row[first], row[second]) for row in CHOSEN} == pairs


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_types_are_a_fixed_point(optimizer, layer):
    for row in CHOSEN:
        if row[:2] == (optimizer, layer):
            template = infer_template(program(*row))
            assert template.changes == (), row
            floats = [spec.dtype for spec in template.state_leaves if not spec.path.startswith("params/")]
            assert not {"float16", "bfloat16"} & set(floats), row


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: "-".join(map(str, row)))
def test_the_compiled_curve_is_that_of_jax(row, tmp_path):
    made = program(*row)
    # Comparing what `compile` made is part of it where a step computes in other types than its leaves have.
    session = compiled(made, tmp_path, verify=row[2] in ("mixed_bf16", "f64"))
    template, _, step = jitted(made)
    state = session.state()
    # Half precision rounds at 2^-11 and 2^-8 in each operation; what XLA and IREE fuse is not rounded in between.
    tolerance = {"f16": 4e-3, "mixed_f16": 4e-3, "bf16": 3e-2, "mixed_bf16": 3e-2, "f64": 1e-12}.get(row[2], 2e-5)
    got, expected = [], []
    for _ in range(10):
        state, metrics = step(state, BATCH)
        expected.append(metrics["loss"])
        got.append(float(session.step(BATCH)["loss"]))
    np.testing.assert_allclose(got, expected, rtol=tolerance)
    assert {path: leaf.dtype.name for path, leaf in session.state().items()} == {
        path: dtype for path, (dtype, _) in template.state.items()
    }
    assert np.mean(expected[-3:]) < np.mean(expected[:3])
