"""What the loop costs: a tiny step in a loop with five handlers, beside bare calls of `session.step`.

    python benchmarks/loop.py [--steps 100000] [--target cpu]

Prints microseconds a step, the median over blocks of 1,000 steps, for each tenth of the run, so that a cost which grows
is seen. Bare calls and loop take turns, block by block, so that other load falls on both. `read` is the loop that reads
the loss after every step, which is its default; `unread` is the one with on_nonfinite="continue".
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from fixstep.runtime import Checkpoints, EarlyStop, LogLines, Loop, MetricsLog, On, Session, every, load

BLOCK = 1000


def program() -> object:
    import jax
    import jax.numpy as jnp

    from fixstep.frontend import Program

    def step(state, batch):
        return {"w": state["w"] * 0.99 + batch["x"].mean()}, {"loss": batch["x"].sum()}

    return Program(name="tiny", init={"w": jnp.zeros(4)}, step=step, batch={"x": jax.ShapeDtypeStruct((4,), "float32")})


class Turns:
    """An epoch in blocks of steps; between them a block of bare calls of another session, out of the timing."""

    def __init__(self, session: Session, blocks: int, batch: object) -> None:
        self.session, self.blocks, self.batch = session, blocks, batch
        self.bare: list[float] = []
        self.loop: list[float] = []

    def batches(self, epoch: int, start: int = 0):
        for _ in range(self.blocks):
            began = time.perf_counter()
            for _ in range(BLOCK):
                self.session.step(self.batch)
            self.bare.append((time.perf_counter() - began) / BLOCK * 1e6)
            began = time.perf_counter()
            for _ in range(BLOCK):
                yield self.batch
            self.loop.append((time.perf_counter() - began) / BLOCK * 1e6)


def measure(artifact: Path, folder: Path, steps: int, **options) -> Turns:
    """One epoch of so many steps."""
    turns = Turns(load(artifact), steps // BLOCK, {"x": np.ones(4, np.float32)})
    with open("/dev/null", "w") as nowhere:
        handlers = [
            EarlyStop("loss"),
            MetricsLog(folder / "metrics.csv", every=BLOCK),
            LogLines(every=BLOCK, stream=nowhere),
            On("iteration_completed", lambda state: None, when=every(10)),
            Checkpoints(folder / "checkpoints", every=10 * BLOCK),
        ]
        Loop(load(artifact), handlers, **options).run(turns, epochs=1)
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--target", default="cpu")
    arguments = parser.parse_args()
    from fixstep.frontend import compile

    with tempfile.TemporaryDirectory() as name:
        artifact = Path(name) / "tiny.fixstep"
        compile(program(), artifact, targets=[arguments.target])
        for label, options in (("read", {}), ("unread", {"on_nonfinite": "continue"})):
            folder = Path(name) / label
            folder.mkdir()
            turns = measure(artifact, folder, arguments.steps, **options)
            print(f"{label}: microseconds a step; bare, loop, difference, for each tenth of {arguments.steps} steps")
            tenth = len(turns.loop) // 10
            for start in range(0, 10 * tenth, tenth):
                call = statistics.median(turns.bare[start : start + tenth])
                loop = statistics.median(turns.loop[start : start + tenth])
                print(f"  {call:7.1f} {loop:7.1f} {loop - call:7.1f}")


if __name__ == "__main__":
    main()
