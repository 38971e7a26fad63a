"""Fifty kills at random moments: the resumed run leaves the files of the uninterrupted one, to the bit."""

import random
import subprocess
import sys
import time

import pytest

KILLS = 50

TRAIN = """
import sys
import numpy as np
from fixstep.runtime import (
    ArrayData, Checkpoints, EarlyStop, Loop, MetricsLog, On, ReduceOnPlateau, StateNumber, every, load,
)
artifact, folder = sys.argv[1:]
rate = "opt/hyperparams/learning_rate"


class Counter:
    count = 0

    def state(self):
        return {"count": self.count}

    def load_state(self, state):
        self.count = state["count"]

    def on_iteration_completed(self, state):
        self.count += 1


rng = np.random.default_rng(0)
x = rng.standard_normal((163, 4)).astype("f4")
y = (x @ rng.standard_normal((4, 3)) + rng.standard_normal((163, 3))).astype("f4")
handlers = [
    On("iteration_completed", lambda state: state.validate(), when=every(13)),
    EarlyStop("loss", patience=9),
    MetricsLog(folder + "/metrics.csv", every=5),
    StateNumber(rate),
    ReduceOnPlateau(rate, "validation/loss", factor=0.5, patience=2, cooldown=1),
    Counter(),
    Checkpoints(folder, every=7, keep=2, best="validation/loss", keep_best=2),
]
session = load(artifact, seed=3)
data, validation = ArrayData({"x": x, "y": y}, 8, seed=1), ArrayData({"x": x[:40], "y": y[:40]}, 8, shuffle=False)
print("go", flush=True)
result = Loop(session, handlers).run(data, epochs=10, validate=validation, resume=True, prefetch=2)
print(result.averages, result.validation, result.steps, result.stopped, handlers[-2].count, flush=True)
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    import jax
    import jax.numpy as jnp
    import optax

    from fixstep.frontend import Program, compile

    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.3)

    def loss(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    def init(key):
        w = jax.random.normal(key, (4, 3))
        return {"w": w, "opt": optimizer.init(w), "key": jax.random.key(1)}

    def step(state, batch):
        key, noise = jax.random.split(state["key"])
        value, grad = jax.value_and_grad(loss)(state["w"], batch)
        updates, opt = optimizer.update(grad + 0.01 * jax.random.normal(noise, grad.shape), state["opt"])
        return {"w": state["w"] + updates, "opt": opt, "key": key}, {"loss": value}

    program = Program(
        name="killed",
        init=init,
        step=step,
        evaluate=lambda state, batch: {"loss": loss(state["w"], batch)},
        batch={"x": jax.ShapeDtypeStruct((8, 4), "float32"), "y": jax.ShapeDtypeStruct((8, 3), "float32")},
    )
    path = tmp_path_factory.mktemp("killed") / "killed.fixstep"
    compile(program, path, targets=["cpu"])
    return path


def train(artifact, folder, kill_after_s=None):
    """The last line of a run, empty if it was killed before it came; and how long the training took."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", TRAIN, str(artifact), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "go\n", process.stderr.read()
        began = time.monotonic()
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            process.kill()
        out, error = process.communicate()
    assert error == ""
    return out, time.monotonic() - began


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*") if ".partial" not in path.name
    }


def test_fifty_kills_leave_no_trace(artifact, tmp_path):
    expected, seconds = train(artifact, tmp_path / "whole")
    assert "200 finished 200" in expected
    whole = files(tmp_path / "whole")
    assert len([name for name in whole if name.startswith("best")]) == 2
    moments = random.Random(2)  # of the kills; the machine adds chance of its own
    kills = runs = 0
    while kills < KILLS:
        out, _ = train(artifact, tmp_path / str(runs), moments.uniform(0, 0.35 * seconds))
        kills += out == ""
        if kills == KILLS and out == "":
            out, _ = train(artifact, tmp_path / str(runs))
        if out:  # it came to its end
            assert out == expected
            assert files(tmp_path / str(runs)) == whole
            runs += 1
    assert runs >= 1
