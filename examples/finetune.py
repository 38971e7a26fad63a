"""Fine-tuning by low-rank updates (LoRA): weights from a file, a few numbers trained, and weights to a file.

    python examples/finetune.py FOLDER

A classifier of handwritten digits is trained, and its weights are written under the model's names, such as `first/w`.
They are read again and stay as they are, while products of two thin matrices adapt them to mirrored digits; the sums
are written under the same names, and read by JAX.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_data import main as write_digits
from safetensors.numpy import load_file, save_file

from fixstep.frontend import compile, metrics, trainer
from fixstep.runtime import ArrayData, Loop, load, load_npz, load_weights, save_weights

BATCH, RANK, EPOCHS = 60, 4, 20
EXAMPLES = (jax.ShapeDtypeStruct((BATCH, 64), "float32"), jax.ShapeDtypeStruct((BATCH,), "int32"))


def init(key):
    first, second = jax.random.split(key)
    return {
        "first": {"w": jax.random.normal(first, (64, 64)) / 8, "b": jnp.zeros(64)},
        "second": {"w": jax.random.normal(second, (64, 10)) / 8, "b": jnp.zeros(10)},
    }


def apply(params, x):
    """The scores of ten classes, (B, 10); x: (B, 64) float32, 0 to 16."""
    hidden = jax.nn.relu(x / 16 @ params["first"]["w"] + params["first"]["b"])
    return hidden @ params["second"]["w"] + params["second"]["b"]


def init_low_rank(key):
    """The weights, to be read from a file, and updates that are zero at first: a random thin matrix times zeros."""
    base = init(key)
    keys = dict(zip(base, jax.random.split(key, len(base)), strict=True))
    updates = {
        name: {
            "down": jax.random.normal(keys[name], (layer["w"].shape[0], RANK)) / 8,
            "up": jnp.zeros((RANK, layer["w"].shape[1])),
        }
        for name, layer in base.items()
    }
    return {"base": base, "lora": updates}


def merged(params):
    """The weights with their updates added, under the names of the model."""
    layers = {}
    for name, layer in params["base"].items():
        update = params["lora"][name]
        layers[name] = {"w": layer["w"] + update["down"] @ update["up"], "b": layer["b"]}
    return layers


def program(model, **options):
    return trainer(
        model,
        optax.softmax_cross_entropy_with_integer_labels,
        optax.adam(3e-3),
        batch=EXAMPLES,
        metrics={"accuracy": metrics.accuracy},
        **options,
    )


base = program((init, apply))
tuned = program((init_low_rank, lambda params, x: apply(merged(params), x)), trainable="params/lora/*")


def digits(folder, part, *, mirrored=False):
    """Inputs and labels under the leaf paths of the batch, a pair: `0` and `1`."""
    data = load_npz(folder / f"digits-{part}.npz")
    images = data["x"][:, :, ::-1] if mirrored else data["x"]
    return {"0": images.reshape(-1, 64), "1": data["y"]}


def accuracy(session, data):
    session.reset_averages("evaluate")
    for batch in data.batches(1):
        session.evaluate(batch)
    return session.averages("evaluate")["accuracy"]


def nested(leaves):
    """A tree of two levels from leaves by path, which is how a file holds it."""
    tree = {}
    for path, leaf in leaves.items():
        layer, name = path.split("/")
        tree.setdefault(layer, {})[name] = leaf
    return tree


def main(folder):
    write_digits(folder)
    compile(base, folder / "base.fixstep", targets=["cpu"])
    session = load(folder / "base.fixstep")
    Loop(session).run(ArrayData(digits(folder, "train"), BATCH), epochs=EPOCHS)
    save_weights(session, folder / "base.safetensors")

    compile(tuned, folder / "tuned.fixstep", targets=["cpu"])
    session = load(folder / "tuned.fixstep")
    load_weights(session, folder / "base.safetensors", under="params/base")
    test = ArrayData(digits(folder, "test", mirrored=True), BATCH, shuffle=False)
    before = accuracy(session, test)
    Loop(session).run(ArrayData(digits(folder, "train", mirrored=True), BATCH), epochs=EPOCHS)
    print(f"accuracy on mirrored digits: {before:.3f} before, {accuracy(session, test):.3f} after")

    save_weights(session, folder / "lora.safetensors", under="params/lora")
    weights = merged({part: nested(load_file(folder / f"{part}.safetensors")) for part in ("base", "lora")})
    save_file({f"{name}/{leaf}": np.asarray(array) for name, layer in weights.items() for leaf, array in layer.items()},
              folder / "tuned.safetensors")  # fmt: skip

    x = digits(folder, "test", mirrored=True)["0"][:BATCH]
    in_jax = apply(nested(load_file(folder / "tuned.safetensors")), x)
    difference = np.abs(np.asarray(in_jax) - session.predict(x)["output"]).max()
    print(f"the scores of tuned.safetensors in JAX differ by {difference:.1e} at most")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/finetune"))
