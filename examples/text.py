"""A character language model: a small causal transformer, trained with adamw on Python's own documentation."""

import jax
import jax.numpy as jnp
import optax

from fixstep.frontend import Program

BATCH, TIME, WIDTH, HEADS, LAYERS, VOCABULARY = 16, 64, 64, 4, 2, 128
optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, 100, 2000))
)


def init(key):
    keys = iter(jax.random.split(key, 4 + 4 * LAYERS))

    def weight(*shape):
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def layer():
        return {
            "norm1": jnp.ones(WIDTH),
            "qkv": weight(WIDTH, 3 * WIDTH),
            "out": weight(WIDTH, WIDTH),
            "norm2": jnp.ones(WIDTH),
            "up": weight(WIDTH, 4 * WIDTH),
            "down": weight(4 * WIDTH, WIDTH),
        }

    params = {
        "embedding": weight(VOCABULARY, WIDTH),
        "position": weight(TIME, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": jnp.ones(WIDTH),
        "head": weight(WIDTH, VOCABULARY),
    }
    return {"params": params, "optimizer": optimizer.init(params)}


def normalise(x, gain):
    return x * gain * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(layer, x):
    """x: (B, T, D). Each position looks at itself and at those before it."""
    q, k, v = jnp.split((x @ layer["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ layer["out"]


def logits(params, tokens):
    """tokens: (B, T) int32 below VOCABULARY. Returns (B, T, VOCABULARY)."""
    x = params["embedding"][tokens] + params["position"]
    for layer in params["layers"]:
        x = x + attention(layer, normalise(x, layer["norm1"]))
        x = x + jax.nn.gelu(normalise(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    return normalise(x, params["norm"]) @ params["head"]


def loss(params, batch):
    scores = logits(params, batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["tokens"][:, 1:]).mean()


def step(state, batch):
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}, {"loss": value}


def evaluate(state, batch):
    return {"loss": loss(state["params"], batch)}


def predict(state, inputs):
    """The most likely next character after each position."""
    return {"next": logits(state["params"], inputs["tokens"]).argmax(-1).astype(jnp.int32)}


program = Program(
    name="text",
    init=init,
    step=step,
    evaluate=evaluate,
    predict=predict,
    batch={"tokens": jax.ShapeDtypeStruct((BATCH, TIME + 1), "int32")},
    inputs={"tokens": jax.ShapeDtypeStruct((BATCH, TIME), "int32")},
)
