"""What JAX computes of an artifact's own StableHLO, and how far its results move when the start does."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fixstep.runtime._artifact import Artifact
from fixstep.runtime._signature import Array, LeafSpec

# Runs from a start that was moved. Where a leaf fails whose bound is mostly noise there are more: a search that takes
# any step size once it has nothing left to find shows how far they scatter in some runs only.
RUNS = 4
MORE_RUNS = 16

# Half precision inside of a step hides that wider leaves moved by a unit in their own last place. There the start also
# moves by this part of a unit of the narrower type, so that some of what is rounded to it becomes another number.
HALF_UNIT = 0.25

_STEP = re.compile(r"^metrics of step \d+/")
_NARROWED = re.compile(rb"\(tensor<[^>]*f(?:32|64)>\) -> tensor<[^>]*?(b?f16)>")
_FUNCTION = re.compile(rb"^\s*func\.func (?:public |private )?@\"?(\w+)", re.MULTILINE)
_UNITS = {b"f16": 2.0**-10, b"bf16": 2.0**-7}


class Calls(NamedTuple):
    """What is called: `init`, `step` for each batch, and then `evaluate` and `predict`, where there are such.

    Attributes:
        artifact: the artifact.
        start: the first state.
        batches: the leaves of each batch.
        inputs: of `predict`.
    """

    artifact: Artifact
    start: list[Array]
    batches: list[list[Array]]
    inputs: list[Array]


@dataclasses.dataclass(frozen=True)
class Runs:
    """What JAX gave.

    Attributes:
        leaves: each leaf by path.
        noise: how far each moved when the start moved by one unit in the last place.
        init_unit: the unit of the type that `init` computes in.
    """

    leaves: dict[str, Array]
    noise: dict[str, float]
    init_unit: float


def reference(artifact: Artifact, function: str) -> Any:
    """The function as JAX exported it, before the rewrites; `.call` takes and returns flat lists of leaves."""
    return jax.export.deserialize(bytearray(artifact.member(f"reference/{function}.jax")))


def has(artifact: Artifact, function: str) -> bool:
    """Whether there is a function of this name."""
    return function in artifact.manifest["functions"]


def zeros(artifact: Artifact, function: str) -> list[Array]:
    """Accumulators of a function at their start."""
    return [np.zeros(spec.shape, spec.numpy_dtype) for spec in artifact.signature(function, "accumulators")]


def run_reference(calls: Calls, rng: np.random.Generator) -> Runs:
    """The calls in JAX, once as they are and RUNS times moved."""
    leaves = _run_jax(calls)
    text = bytes(calls.artifact.member("program.mlir"))
    narrow = max((_UNITS[name] for name in _NARROWED.findall(text)), default=0.0)
    moves = [0.0] * RUNS + [HALF_UNIT * narrow] * bool(narrow)
    return Runs(leaves, _noise(calls, leaves, moves, rng), _init_unit(text))


def run_more(calls: Calls, runs: Runs, rng: np.random.Generator) -> Runs:
    """The same with the noise of MORE_RUNS besides."""
    more = _noise(calls, runs.leaves, [0.0] * MORE_RUNS, rng)
    return dataclasses.replace(runs, noise={path: max(noise, more[path]) for path, noise in runs.noise.items()})


def deviation(got: Array, expected: Array) -> float:
    """The largest difference; infinite where one is NaN or infinite and the other is not the same."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if got.size == 0:
        return 0.0
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    if got.dtype.kind in "iub":
        return float(np.max(np.abs(got.astype(object) - expected.astype(object)))) if (got != expected).any() else 0.0
    a, b = got.astype(wide), expected.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(same, 0.0, np.abs(a - b))
    return float(np.where(np.isnan(difference), np.inf, difference).max())


def _noise(calls: Calls, leaves: dict[str, Array], moves: list[float], rng: np.random.Generator) -> dict[str, float]:
    """How far each leaf moves at most when everything at the start does, by `_moved` with each of `moves`."""
    noise = dict.fromkeys(leaves, 0.0)
    for least in moves:

        def moved(arrays: list[Array], least: float = least) -> list[Array]:
            return [_moved(array, rng, least) for array in arrays]

        batches = [moved(arrays) for arrays in calls.batches]
        results = _run_jax(Calls(calls.artifact, moved(calls.start), batches, moved(calls.inputs)))
        for path, leaf in leaves.items():
            noise[path] = max(noise[path], deviation(results[path], leaf))
    return _carried_on(noise)


def _init_unit(text: bytes) -> float:
    """The unit of float32 where `init` computes in it: random numbers often are drawn in it, whatever they become."""
    pieces = _FUNCTION.split(text)
    bodies = [body for name, body in zip(pieces[1::2], pieces[2::2], strict=True) if name == b"init"]
    return float(jnp.finfo(jnp.float32).eps) if any(b"f32>" in body for body in bodies) else 0.0


def _carried_on(noise: dict[str, float]) -> dict[str, float]:
    """A metric's noise in a step is at least that of the steps before it.

    A metric that is rounded coarsely on its way (a loss computed in bfloat16, or one that became tiny by cancellation)
    shows none in most single steps.
    """
    largest: dict[str, float] = {}
    carried = {}
    for path, value in noise.items():  # in the order of the steps
        metric = _STEP.sub("metrics/", path)
        largest[metric] = max(largest.get(metric, 0.0), value)
        carried[path] = largest[metric]
    return carried


def _run_jax(calls: Calls) -> dict[str, Array]:
    artifact, start, batches, inputs = calls
    found: dict[str, Array] = {}
    with jax.enable_x64(True):
        if has(artifact, "init"):
            words = [np.uint32(0), np.uint32(0)]
            found |= _labelled("init", artifact.signature("init", "state"), _jitted(artifact, "init")(*words))
        step = _jitted(artifact, "step")
        state = start
        for index, arrays in enumerate(batches):
            results = step(*state, *zeros(artifact, "step"), *arrays)
            state = [np.asarray(leaf) for leaf in results[: len(start)]]
            found |= _labelled(f"metrics of step {index + 1}", artifact.signature("step", "metrics"), results)
        found |= _labelled("state", artifact.signature("step", "state"), state)
        if has(artifact, "evaluate"):
            results = _jitted(artifact, "evaluate")(*state, *zeros(artifact, "evaluate"), *batches[-1])
            found |= _labelled("evaluate", artifact.signature("evaluate", "metrics"), results)
        if has(artifact, "predict"):
            results = _jitted(artifact, "predict")(*state, *inputs)
            outputs = tuple(
                dataclasses.replace(s, path=s.path or "output") for s in artifact.signature("predict", "outputs")
            )
            found |= _labelled("predict", outputs, results)
    return found


def _jitted(artifact: Artifact, function: str) -> Callable[..., Any]:
    """The reference, compiled once for all runs."""
    return _jit(bytes(artifact.member(f"reference/{function}.jax")))


@functools.lru_cache(maxsize=8)
def _jit(exported: bytes) -> Callable[..., Any]:
    function = jax.export.deserialize(bytearray(exported))
    jitted = jax.jit(function.call)
    # Two-bit integers are exported as bytes: JAX does not write them down.
    dtypes = [aval.dtype for aval in function.in_avals]

    def call(*args: Any) -> Any:
        return jitted(*(a if a.dtype == d else np.asarray(a).astype(d) for a, d in zip(args, dtypes, strict=True)))

    return call


def _labelled(prefix: str, specs: tuple[LeafSpec, ...], results: Sequence[Any]) -> dict[str, Array]:
    """The last results under their paths."""
    last = results[len(results) - len(specs) :]
    return {
        f"{prefix}/{spec.path}": np.asarray(leaf).astype(spec.numpy_dtype, copy=False)
        for spec, leaf in zip(specs, last, strict=True)
    }


def _moved(array: Array, rng: np.random.Generator, least: float = 0.0) -> Array:
    """Each float moved by one unit in the last place, or `least` times itself if that is more, up or down; zeros,
    infinities and other types stay.
    """
    dtype = array.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return array
    step = (rng.integers(0, 2, array.shape) * 2 - 1) * max(float(ml_dtypes.finfo(dtype).eps), least)
    wide: Array = array.astype(np.float64 if dtype.itemsize < 8 else np.longdouble)
    return np.asarray(np.where(np.isfinite(wide), wide * (1 + step), wide)).astype(dtype)
