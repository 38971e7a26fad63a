"""Compares, in one run on one machine, a process that loads an artifact with a process that jits the same step.

    python benchmarks/start.py [--target cpu:host] [--repeat 5]

Prints time from process start to first loss, peak memory, and the overhead of a tiny step with 60 leaves, each as a
ratio of jax.jit's figure to fixstep's (higher is better for fixstep). Rounds alternate, so that other load falls on
both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LOAD = """
import sys
import numpy as np
from fixstep.runtime import load
session = load(sys.argv[1])
rng = np.random.default_rng(0)
batch = {"x": rng.uniform(0, 16, (60, 8, 8)).astype(np.float32), "y": rng.integers(0, 10, 60).astype(np.int32)}
loss = float(session.step(batch)["loss"])
"""

JIT = """
import sys
import numpy as np
import jax
from examples.digits import init, step
state = jax.jit(init)(jax.random.key(0))
rng = np.random.default_rng(0)
batch = {"x": rng.uniform(0, 16, (60, 8, 8)).astype(np.float32), "y": rng.integers(0, 10, 60).astype(np.int32)}
state, metrics = jax.jit(step, donate_argnums=0)(state, batch)
loss = float(metrics["loss"])
"""

REPORT = r"""
import json, re
# Not ru_maxrss: a child begins with that of its parent.
peak_kb = int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read()).group(1))
print(json.dumps({"loss": loss, "peak_mb": peak_kb / 1024}))
"""


def measure(code: str, *arguments: str) -> dict[str, float]:
    """Run the code in a fresh process: seconds to its end, peak memory in MB, and the loss."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": ""}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code + REPORT, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    return {"seconds": time.perf_counter() - start, **json.loads(done.stdout)}


def tiny_step_program() -> object:
    """60 leaves of state, each moved a little: the time of a call is its overhead."""
    import jax
    import jax.numpy as jnp

    from fixstep.frontend import Program

    def step(state, batch):
        return jax.tree.map(lambda leaf: leaf * 0.99 + batch["x"].mean(), state), {"loss": batch["x"].sum()}

    state = {f"leaf{i:02d}": jnp.zeros(4) for i in range(60)}
    return Program(name="tiny60", init=state, step=step, batch={"x": jax.ShapeDtypeStruct((4,), "float32")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu:host")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from fixstep.frontend import bench_artifact, compile, import_program

    with tempfile.TemporaryDirectory() as folder:
        digits, tiny = Path(folder) / "digits.fixstep", Path(folder) / "tiny60.fixstep"
        compile(import_program("examples.digits:program"), digits, targets=[arguments.target])
        compile(tiny_step_program(), tiny, targets=[arguments.target])
        measure(LOAD, str(digits)), measure(JIT)  # once, so that the files are in the page cache for both
        pairs = [(measure(LOAD, str(digits)), measure(JIT)) for _ in range(arguments.repeat)]
        tiny_timing = bench_artifact(tiny)
        digits_timing = bench_artifact(digits)

    def line(what: str, key: str, unit: str) -> None:
        ours = statistics.median(ours[key] for ours, _ in pairs)
        theirs = statistics.median(theirs[key] for _, theirs in pairs)
        ratio = statistics.median(theirs[key] / ours[key] for ours, theirs in pairs)
        print(f"{what:<34} fixstep {ours:8.3f} {unit:<3} jax.jit {theirs:8.3f} {unit:<3} ratio {ratio:6.2f}")

    line("process start to first loss", "seconds", "s")
    line("peak memory of that process", "peak_mb", "MB")
    for what, timing in (("a step of 60 tiny leaves", tiny_timing), ("a step of the digits example", digits_timing)):
        print(
            f"{what:<34} fixstep {timing.compiled_ms:8.3f} ms  jax.jit {timing.jit_ms:8.3f} ms  "
            f"ratio {1 / timing.ratio:6.2f}"
        )


if __name__ == "__main__":
    main()
