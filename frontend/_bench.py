"""Times an artifact against `jax.jit` of the same function, in one process, in alternation."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fixstep.frontend._reference import reference, zeros
from fixstep.frontend._verify import made_up
from fixstep.runtime._load import load


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds per step, from several rounds.

    Attributes:
        target: the target's text.
        compiled_ms: median of the artifact's rounds.
        jit_ms: median of `jax.jit`'s rounds, with the state donated.
        ratio: median of the ratios of neighbouring rounds; below 1 the artifact is faster.
        spread: smallest and largest of those ratios.
    """

    target: str
    compiled_ms: float
    jit_ms: float
    ratio: float
    spread: tuple[float, float]


def bench_artifact(
    path: str | os.PathLike[str], *, target: str | None = None, rounds: int = 7, round_s: float = 0.5
) -> Timing:
    """Time the step of an artifact against `jax.jit` of the function it was compiled from.

    Both take the same made-up batch as numpy arrays and start from the same state. Rounds alternate, so that other
    load on the machine falls on both; the ratio is what to read.

    Args:
        path: the artifact.
        target: which target of it.
        rounds: how often both are timed.
        round_s: how long one round lasts, in seconds.

    Raises:
        ArtifactError: if the file is damaged.
        TargetError: if the target does not run here.
    """
    session = load(path, target=target)
    batch = made_up(session.signature("step"), np.random.default_rng(0))
    sizes = session.artifact.sizes
    size = [] if sizes is None else [np.asarray(sizes.high, np.int32)]
    named = {spec.path: array for spec, array in zip(session.signature("step"), batch, strict=True)}
    state_length = len(session.artifact.signature("step", "state"))

    def compiled() -> None:
        metrics = session.step(named)
        for metric in metrics.values():
            metric.numpy()

    with jax.enable_x64(True):
        carry_length = state_length + len(session.artifact.signature("step", "accumulators"))
        step = jax.jit(
            lambda carry, arrays: reference(session.artifact, "step").call(*carry, *arrays, *size), donate_argnums=0
        )
        carry: list[Any] = [jax.numpy.asarray(leaf) for leaf in session.state().values()]
        carry += [jax.numpy.asarray(leaf) for leaf in zeros(session.artifact, "step")]

        def jitted() -> None:
            nonlocal carry
            results = step(carry, batch)
            carry = list(results[:carry_length])
            jax.block_until_ready(results)

        for _ in range(3):  # jax.jit compiles again once its arguments are its own results
            compiled()
            jitted()
        pairs = [(_per_call_ms(compiled, round_s), _per_call_ms(jitted, round_s)) for _ in range(rounds)]
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    return Timing(
        session.choice.target,
        statistics.median(ours for ours, _ in pairs),
        statistics.median(theirs for _, theirs in pairs),
        statistics.median(ratios),
        (ratios[0], ratios[-1]),
    )


def _per_call_ms(call: Callable[[], None], round_s: float) -> float:
    calls = 0
    start = time.perf_counter()
    while True:
        call()
        calls += 1
        elapsed_s = time.perf_counter() - start
        if elapsed_s >= round_s:
            return elapsed_s / calls * 1e3
