"""A small convolutional classifier of handwritten digits, trained with adam."""

import jax
import jax.numpy as jnp
import optax

from fixstep.frontend import Program

BATCH = 60
optimizer = optax.adam(2e-3)


def init(key):
    first, second, third = jax.random.split(key, 3)
    params = {
        "conv1": {"w": jax.random.normal(first, (3, 3, 1, 16)) / 3, "b": jnp.zeros(16)},
        "conv2": {"w": jax.random.normal(second, (3, 3, 16, 32)) / 12, "b": jnp.zeros(32)},
        "dense": {"w": jax.random.normal(third, (512, 10)) / 23, "b": jnp.zeros(10)},
    }
    return {"params": params, "optimizer": optimizer.init(params)}


def conv(layer, x, stride):
    y = jax.lax.conv_general_dilated(
        x, layer["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(y + layer["b"])


def logits(params, x):
    """x: (B, 8, 8) float32, 0 to 16. Returns (B, 10)."""
    h = conv(params["conv1"], x[..., None] / 16, 1)
    h = conv(params["conv2"], h, 2)
    return h.reshape(h.shape[0], -1) @ params["dense"]["w"] + params["dense"]["b"]


def metrics(params, batch):
    scores = logits(params, batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()
    return loss, {"loss": loss, "accuracy": (scores.argmax(-1) == batch["y"]).mean()}


def step(state, batch):
    grads, values = jax.grad(metrics, has_aux=True)(state["params"], batch)
    updates, optimizer_state = optimizer.update(grads, state["optimizer"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}, values


def evaluate(state, batch):
    return metrics(state["params"], batch)[1]


def predict(state, inputs):
    return {"digit": logits(state["params"], inputs["x"]).argmax(-1)}


images = jax.ShapeDtypeStruct((BATCH, 8, 8), "float32")
labels = jax.ShapeDtypeStruct((BATCH,), "int32")
program = Program(
    name="digits",
    init=init,
    step=step,
    evaluate=evaluate,
    predict=predict,
    batch={"x": images, "y": labels},
    inputs={"x": images},
)
