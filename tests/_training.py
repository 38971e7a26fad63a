"""What the tests of the trainer share: small models of each library, data, and curves."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from fixstep.frontend import compile, infer_template
from fixstep.runtime import load

rng = np.random.default_rng(0)
X = rng.normal(size=(16, 3)).astype(np.float32)
LABELS = (X[:, 0] > X[:, 1]).astype(np.int32)
TARGETS = (X @ np.float32([1, -2, 0.5]))[:, None]
BATCH = (X, LABELS)
xent = optax.softmax_cross_entropy_with_integer_labels


class LinenNet(linen.Module):
    """Batch normalisation and dropout; no bias goes into the normalisation, whose gradient would be rounding alone."""

    @linen.compact
    def __call__(self, x, *, train):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(linen.Dense(8, use_bias=False)(x))
        x = linen.Dropout(0.25, deterministic=not train)(linen.relu(x))
        return linen.Dense(2)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 8, use_bias=False, key=one)
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.25)
        self.last = eqx.nn.Linear(8, 2, key=two)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jax.nn.relu(x), key=key)), state


LIBRARIES = {
    "linen": LinenNet(),
    "nnx": lambda key: NnxNet(nnx.Rngs(key)),
    "equinox": lambda key: eqx.nn.make_with_state(EquinoxNet)(key),
}


def mlp_init(key):
    one, two = jax.random.split(key)
    return {
        "first": {"w": jax.random.normal(one, (3, 8)) / 2, "b": jnp.zeros(8)},
        "last": {"w": jax.random.normal(two, (8, 2)) / 3, "b": jnp.zeros(2)},
    }


def mlp_apply(params, x):
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return hidden @ params["last"]["w"] + params["last"]["b"]


MLP = (mlp_init, mlp_apply)
LINEAR = (lambda key: {"w": 0.1 * jax.random.normal(key, (3, 1))}, lambda params, x: x @ params["w"])


def compiled(program, tmp_path, *, verify=False):
    """A session of the program on the CPU."""
    compile(program, tmp_path / "program.fixstep", targets=["cpu"], verify=verify)
    return load(tmp_path / "program.fixstep", target="cpu")


def jitted(program):
    """`(template, first state by path, step)` of a program in JAX alone; `step(state, batch) -> (state, metrics)`."""
    template = infer_template(program)
    paths = [leaf.path for leaf in template.state_leaves]
    names = [leaf.path for leaf in template.metric_leaves]
    with template.context():
        if template.flat_init is None:
            first = template.seed_values
        else:
            first = jax.jit(template.flat_init)(np.uint32(0), np.uint32(0))
        run = jax.jit(template.flat_step)

    def step(state, batch):
        with template.context():
            leaves, metrics = run(list(state.values()), jax.tree.leaves(batch))
        return dict(zip(paths, leaves, strict=True)), {n: float(m) for n, m in zip(names, metrics, strict=True)}

    return template, dict(zip(paths, first, strict=True)), step


def curve(program, batches):
    """The final state and the losses of a program in JAX alone."""
    _, state, step = jitted(program)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, losses
