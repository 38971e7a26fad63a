"""Fixtures that every test file may use."""

import signal
import sys
from pathlib import Path

import numpy as np
import pytest


def pytest_configure():
    # A shell that runs the tests in the background leaves the interrupt ignored, here and in what is started from here.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def modules_of_one_test(tmp_path_factory):
    """Forgets the modules that a test writes and imports, so that another test's module of that name is its own."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        folders = [getattr(sys.modules[name], "__file__", None) or "", *getattr(sys.modules[name], "__path__", [])]
        if any(Path(folder).is_relative_to(tmp_path_factory.getbasetemp()) for folder in folders):
            del sys.modules[name]


@pytest.fixture(scope="session")
def tiny_program():
    """Two leaves of state, a batch of two leaves, metrics, evaluate, predict and init: compiles in a second."""
    import jax
    import jax.numpy as jnp

    from fixstep.frontend import Program

    def init(key):
        return {"w": jax.random.normal(key, (4, 3)), "steps": jnp.int32(0)}

    def loss(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    def step(state, batch):
        value, grad = jax.value_and_grad(loss)(state["w"], batch)
        return {"w": state["w"] - 0.1 * grad, "steps": state["steps"] + 1}, {"loss": value}

    return Program(
        name="tiny",
        init=init,
        step=step,
        evaluate=lambda state, batch: {"loss": loss(state["w"], batch)},
        predict=lambda state, inputs: {"y": inputs["x"] @ state["w"]},
        batch={"x": jax.ShapeDtypeStruct((8, 4), "float32"), "y": jax.ShapeDtypeStruct((8, 3), "float32")},
        inputs={"x": jax.ShapeDtypeStruct((8, 4), "float32")},
    )


@pytest.fixture(scope="session")
def tiny_artifact(tiny_program, tmp_path_factory) -> Path:
    """The artifact of `tiny_program` for the CPU."""
    from fixstep.frontend import compile

    path = tmp_path_factory.mktemp("tiny") / "tiny.fixstep"
    compile(tiny_program, path, targets=["cpu"])
    return path


def tiny_batch(seed: int = 0) -> dict[str, np.ndarray]:
    """A batch that fits `tiny_program`."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((8, 4)).astype(np.float32),
        "y": rng.standard_normal((8, 3)).astype(np.float32),
    }
