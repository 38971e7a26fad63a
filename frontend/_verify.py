"""The artifact against JAX, leaf by leaf: a few steps from the same state on the same batches.

One rule tells rounding from fault for every step, leaf and target. JAX runs the original StableHLO several times, each
time from a start whose floats are moved by one unit in the last place; how far its own results move is the noise that
the step makes of rounding. A leaf passes if the compiled result is no further from JAX's than NOISE times that, plus a
few roundings of the leaf's dtype at the leaf's own scale. No step is excused by name.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fixstep import targets
from fixstep.frontend._seed import is_key
from fixstep.runtime._artifact import Artifact
from fixstep.runtime._session import load
from fixstep.runtime._signature import Array, LeafSpec, describe, flatten
from fixstep.runtime._sizes import Sizes
from fixstep.targets.errors import DataError

# Perturbed runs of JAX. Their largest deviation is a lower estimate of the noise: only the start is moved, while a
# program that rounds otherwise moves every operation. Hence the factor; a fault is larger by orders of magnitude.
RUNS = 4
NOISE = 32.0
# And so many more where a leaf fails whose bound is mostly noise: a search that takes any step size once it has nothing
# left to find shows how far they scatter in some runs only. What JAX repeats exactly is judged as strictly as before.
MORE_RUNS = 16
# Roundings allowed whatever JAX shows: sums are added in another order, and the elementary functions of XLA and IREE
# differ by a few units in the last place.
ROUNDINGS = 64.0

# Half precision inside of a step hides that wider leaves moved by a unit in their own last place. There the start also
# moves by this part of a unit of the narrower type, so that some of what is rounded to it becomes another number.
HALF_UNIT = 0.25

_STEP = re.compile(r"^metrics of step \d+/")
_NARROWED = re.compile(rb"\(tensor<[^>]*f(?:32|64)>\) -> tensor<[^>]*?(b?f16)>")
_FUNCTION = re.compile(rb"^\s*func\.func (?:public |private )?@\"?(\w+)", re.MULTILINE)
_UNITS = {b"f16": 2.0**-10, b"bf16": 2.0**-7}


@dataclasses.dataclass(frozen=True)
class LeafResult:
    """One leaf compared.

    Attributes:
        path: the leaf path, with its role: `state/params/w`.
        dtype: the name of its dtype.
        error: the largest deviation from JAX, in the leaf's own unit.
        bound: the largest that passes.
        scale: the largest magnitude of JAX's leaf.
    """

    path: str
    dtype: str
    error: float
    bound: float
    scale: float

    @property
    def passed(self) -> bool:
        """Whether the deviation is within the bound; a NaN never is."""
        return self.error <= self.bound

    @property
    def severity(self) -> float:
        """The error as a multiple of the bound, for ordering."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound and np.isfinite(self.error) else float("inf")


@dataclasses.dataclass(frozen=True)
class Verification:
    """One target compared.

    Attributes:
        target: its text.
        steps: how many steps were compared.
        leaves: every leaf of every function, the worst first.
    """

    target: str
    steps: int
    leaves: tuple[LeafResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every leaf is within its bound."""
        return all(leaf.passed for leaf in self.leaves)

    def describe(self) -> str:
        """What to print: the verdict, and the leaves that failed or else the worst one."""
        failed = [leaf for leaf in self.leaves if not leaf.passed]
        if not failed:
            worst = f"; worst leaf {_line(self.leaves[0])}" if self.leaves else ""
            return f"{self.target}: agrees with JAX over {self.steps} steps{worst}{self._unjudged()}"
        shown = [f"  {_line(leaf)}" for leaf in failed[:20]]
        if len(failed) > 20:
            shown.append(f"  … and {len(failed) - 20} more")
        return "\n".join(
            [f"{self.target}: does not compute what JAX computes ({len(failed)} of {len(self.leaves)} leaves):", *shown]
        )

    def _unjudged(self) -> str:
        paths = [leaf.path for leaf in self.leaves if leaf.bound == float("inf")]
        if not paths:
            return ""
        more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
        why = "JAX's own numbers come or cease to be infinite or NaN when the start moves by one unit in the last place"
        return f"\n  not judged, since {why}: {', '.join(paths[:5])}{more}"


def _line(leaf: LeafResult) -> str:
    deviation = f"off by {leaf.error:.3g}, allowed {leaf.bound:.3g}, at a magnitude of {leaf.scale:.3g}"
    return f"{leaf.path} ({leaf.dtype}): {deviation}"


def verify_artifact(
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    steps: int = 2,
    example: Any = None,
    inputs: Any = None,
    seed: int = 0,
) -> tuple[tuple[Verification, ...], dict[str, str]]:
    """Compare an artifact with JAX on every target whose device this machine has.

    Args:
        path: the artifact.
        target: only this one.
        steps: how many training steps; then `evaluate` and `predict`, where the artifact has them, from the end state.
            Where a batch may have any size there are more if it takes more to try each compiled one, full and not.
        example: a batch, or a list of batches; made up from the template where leaves have no values.
        inputs: likewise for `predict`.
        seed: of the made-up data.

    Returns:
        The comparisons, and why a target was not compared, by target text.

    Raises:
        ArtifactError: if the file is damaged.
        DataError: if a batch does not fit the template.
    """
    artifact = Artifact.open(path)
    rng = np.random.default_rng(seed)
    batches = example if isinstance(example, list) and example else [example]
    tried = _tried_sizes(artifact.sizes)
    steps = max(steps, len(tried))
    data = [_values(artifact, "batch", batches[i % len(batches)], tried[i % len(tried)], rng) for i in range(steps)]
    given = _values(artifact, "inputs", inputs, tried[-1], rng) if _has(artifact, "predict") else []
    results: list[Verification] = []
    skipped: dict[str, str] = {}
    expected: _Runs | None = None
    for entry in artifact.manifest["targets"]:
        text = entry["text"]
        if target is not None and target not in (text, text.partition(":")[0]):
            continue
        reason = targets.parse(text).unavailable(entry["requires"])
        if reason is not None:
            skipped[text] = reason
            continue
        got, start = _run_compiled(path, text, artifact, data, given)
        if expected is None:
            expected = _run_reference(artifact, start, data, given, rng)
        found = _compare(got, expected)
        if any(not leaf.passed and NOISE * expected.noise[leaf.path] > leaf.bound / 2 for leaf in found):
            more = _noise(artifact, expected.leaves, start, data, given, [0.0] * MORE_RUNS, rng)
            noise = {path: max(value, more[path]) for path, value in expected.noise.items()}
            expected = dataclasses.replace(expected, noise=noise)
            found = _compare(got, expected)
        leaves = sorted(found, key=lambda leaf: -leaf.severity)
        results.append(Verification(text, steps, tuple(leaves)))
    return tuple(results), skipped


def _has(artifact: Artifact, function: str) -> bool:
    return function in artifact.manifest["functions"]


def _tried_sizes(sizes: Sizes | None) -> list[int | None]:
    """The sizes of the batches that are compared: the largest, and each compiled one less one example."""
    if sizes is None:
        return [None]
    below = [max(n - sizes.multiple, sizes.low) for n in sizes.compiled]
    return list(dict.fromkeys([sizes.high, *below]))


def _values(artifact: Artifact, role: str, example: Any, size: int | None, rng: np.random.Generator) -> list[Array]:
    """The example's leaves in template order, made up where it holds none; then its size, where that is an argument."""
    specs = artifact.signature("predict" if role == "inputs" else "step", role)
    leaves = {} if example is None else flatten_example(example)
    if artifact.sizes is None:
        return [_value(leaves.get(spec.path), spec, rng) for spec in specs]
    given = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, jax.ShapeDtypeStruct)}
    size = artifact.sizes.size_of(given, role)[0] or size
    assert size is not None
    at_size = artifact.sizes.specs(role, specs, size)
    return [*(_value(given.get(spec.path), spec, rng) for spec in at_size), np.asarray(size, np.int32)]


def flatten_example(example: Any) -> dict[str, Any]:
    """Leaves of any pytree by leaf path."""
    if isinstance(example, dict | list | tuple):
        return flatten(example)
    keyed, _ = jax.tree_util.tree_flatten_with_path(example)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in keyed}


def made_up(specs: tuple[LeafSpec, ...], rng: np.random.Generator) -> list[Array]:
    """Arrays that fit the specs: floats from a normal distribution, integers that are 0 or 1."""
    return [_value(None, spec, rng) for spec in specs]


def _value(leaf: Any, spec: LeafSpec, rng: np.random.Generator) -> Array:
    if leaf is not None and not isinstance(leaf, jax.ShapeDtypeStruct):
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        if array.shape != spec.shape or array.dtype != spec.numpy_dtype:
            raise DataError(f"{spec.path}: expected {spec}, got {describe(array.dtype.name, array.shape)}")
        return array
    kind = spec.numpy_dtype.kind
    if kind in "biu":
        # Zeros and ones are labels, tokens and indices of any program.
        return rng.integers(0, 2, spec.shape).astype(spec.numpy_dtype)
    real = rng.standard_normal(spec.shape)
    return np.asarray(real + 1j * rng.standard_normal(spec.shape) if kind == "c" else real).astype(spec.numpy_dtype)


@dataclasses.dataclass(frozen=True)
class _Runs:
    """Each leaf that JAX computed, by path; how far it moved when the start moved by one unit in the last place; and
    the unit of the type that `init` computes in.
    """

    leaves: dict[str, Array]
    noise: dict[str, float]
    init_unit: float


def _run_compiled(
    path: str | os.PathLike[str], target: str, artifact: Artifact, data: list[list[Array]], inputs: list[Array]
) -> tuple[dict[str, Array], list[Array]]:
    """Every result of the compiled functions by path, and the state they started from."""
    session = load(path, target=target)
    start = list(session.state().values())
    found: dict[str, Array] = {}
    if "init" in session.functions:
        found |= {f"init/{name}": leaf for name, leaf in session.state().items()}
    batch_specs = artifact.signature("step", "batch")
    for index, arrays in enumerate(data):
        metrics = session.step(_named(batch_specs, arrays))
        found |= {f"metrics of step {index + 1}/{name}": metric.numpy() for name, metric in metrics.items()}
    found |= {f"state/{name}": leaf for name, leaf in session.state().items()}
    if "evaluate" in session.functions:
        metrics = session.evaluate(_named(batch_specs, data[-1]))
        found |= {f"evaluate/{name}": metric.numpy() for name, metric in metrics.items()}
    if "predict" in session.functions:
        found |= {
            f"predict/{name}": leaf
            for name, leaf in session.predict(_named(session.signature("predict"), inputs)).items()
        }
    return found, start


def _named(specs: tuple[LeafSpec, ...], arrays: list[Array]) -> dict[str, Array]:
    return {spec.path: array for spec, array in zip(specs, arrays[: len(specs)], strict=True)}


def _run_reference(
    artifact: Artifact, start: list[Array], data: list[list[Array]], inputs: list[Array], rng: np.random.Generator
) -> _Runs:
    base = _run_jax(artifact, start, data, inputs)
    text = bytes(artifact.member("program.mlir"))
    narrow = max((_UNITS[name] for name in _NARROWED.findall(text)), default=0.0)
    moves = [0.0] * RUNS + [HALF_UNIT * narrow] * bool(narrow)
    return _Runs(base, _noise(artifact, base, start, data, inputs, moves, rng), _init_unit(text))


def _noise(
    artifact: Artifact,
    base: dict[str, Array],
    start: list[Array],
    data: list[list[Array]],
    inputs: list[Array],
    moves: list[float],
    rng: np.random.Generator,
) -> dict[str, float]:
    """How far each leaf moves at most when everything at the start does, by `_moved` with each of `moves`."""
    noise = dict.fromkeys(base, 0.0)
    for least in moves:
        moved_data = [[_moved(array, rng, least) for array in arrays] for arrays in data]
        moved_start = [_moved(array, rng, least) for array in start]
        moved = _run_jax(artifact, moved_start, moved_data, [_moved(array, rng, least) for array in inputs])
        for path, leaf in base.items():
            noise[path] = max(noise[path], _deviation(moved[path], leaf))
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


def _run_jax(artifact: Artifact, start: list[Array], data: list[list[Array]], inputs: list[Array]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    with jax.enable_x64(True):
        if _has(artifact, "init"):
            words = [np.uint32(0), np.uint32(0)]
            found |= _labelled("init", artifact.signature("init", "state"), _jitted(artifact, "init")(*words))
        step = _jitted(artifact, "step")
        state = start
        for index, arrays in enumerate(data):
            results = step(*state, *zeros(artifact, "step"), *arrays)
            state = [np.asarray(leaf) for leaf in results[: len(start)]]
            found |= _labelled(f"metrics of step {index + 1}", artifact.signature("step", "metrics"), results)
        found |= _labelled("state", artifact.signature("step", "state"), state)
        if _has(artifact, "evaluate"):
            results = _jitted(artifact, "evaluate")(*state, *zeros(artifact, "evaluate"), *data[-1])
            found |= _labelled("evaluate", artifact.signature("evaluate", "metrics"), results)
        if _has(artifact, "predict"):
            results = _jitted(artifact, "predict")(*state, *inputs)
            outputs = tuple(
                dataclasses.replace(s, path=s.path or "output") for s in artifact.signature("predict", "outputs")
            )
            found |= _labelled("predict", outputs, results)
    return found


def reference(artifact: Artifact, function: str) -> Any:
    """The function as JAX exported it, before the rewrites; `.call` takes and returns flat lists of leaves."""
    return jax.export.deserialize(bytearray(artifact.member(f"reference/{function}.jax")))


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


def zeros(artifact: Artifact, function: str) -> list[Array]:
    """Accumulators of a function at their start."""
    return [np.zeros(spec.shape, spec.numpy_dtype) for spec in artifact.signature(function, "accumulators")]


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


def _compare(got: dict[str, Array], expected: _Runs) -> list[LeafResult]:
    results = []
    for path, leaf in expected.leaves.items():
        finite = np.abs(leaf[np.isfinite(leaf)].astype(np.complex128)) if leaf.dtype.kind != "b" else np.zeros(0)
        scale = float(finite.max()) if finite.size else 0.0
        bound = NOISE * expected.noise[path]
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            limits = jnp.finfo(leaf.dtype)
            # Devices make 0 of subnormal numbers, or not, as they like; XLA does on the CPU.
            unit = max(float(limits.eps), expected.init_unit if path.startswith("init/") else 0.0)
            bound += ROUNDINGS * unit * scale + float(limits.smallest_normal)
        results.append(LeafResult(path, leaf.dtype.name, _deviation(got[path], leaf), bound, scale))
    return results


def _deviation(got: Array, expected: Array) -> float:
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
