"""The runtime needs neither JAX nor the compiler."""

import csv
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

REFUSE_JAX = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "optax", "flatbuffers") or name.startswith("iree.compiler"):
            raise ImportError(f"{name} is refused here")

sys.meta_path.insert(0, Refuse())
"""

TRAIN = """
import numpy as np
from fixstep.runtime import ArrayData, Checkpoints, Loop, load
artifact, folder = sys.argv[1:]
session = load(artifact)
rng = np.random.default_rng(0)
data = ArrayData({"x": rng.standard_normal((64, 4)).astype("f4"), "y": rng.standard_normal((64, 3)).astype("f4")}, 8)
Loop(session, handlers=[Checkpoints(folder)]).run(data, epochs=2, validate=data)
session.save(folder + "/last.safetensors")
load(artifact).restore(folder + "/last.safetensors")
print("steps", session.steps, "jax" in sys.modules, "fixstep.frontend" in sys.modules)
"""


def test_the_runtime_loads_trains_and_saves_where_jax_cannot_be_imported(tiny_artifact, tmp_path):
    code = REFUSE_JAX + textwrap.dedent(TRAIN)
    command = [sys.executable, "-W", "error", "-c", code, str(tiny_artifact), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "steps 16 False False"


@pytest.mark.parametrize("command", ["compile", "verify", "bench"])
def test_a_command_that_needs_jax_says_how_to_get_it(command):
    code = (
        REFUSE_JAX.replace("ImportError(", "ModuleNotFoundError(").replace('here")', 'here", name=name)')
        + f"from fixstep.runtime._cli import main\nsys.exit(main(['{command}', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'fixstep[compile]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_digits_train_in_an_environment_with_the_runtime_alone(tmp_path):
    from fixstep.frontend import compile, import_program

    compile(import_program("examples.digits:program"), tmp_path / "digits.fixstep", targets=["cpu"])
    subprocess.run([sys.executable, ROOT / "examples" / "digits_data.py", tmp_path], check=True)
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", str(ROOT)], check=True)
    packages = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "jax" not in packages
    assert "iree-base-compiler" not in packages
    command = [
        *(tmp_path / "env" / "bin" / "fixstep", "run", "digits.fixstep", "--epochs", "20", "--log", "metrics.csv"),
        *("--data", "digits-train.npz", "--validate", "digits-test.npz", "--checkpoint-dir", "run"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    (name,) = [name for name in rows[-1] if "accuracy" in name and "valid" in name]
    assert float(rows[-1][name]) >= 0.97
