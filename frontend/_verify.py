"""The artifact against JAX, leaf by leaf: a few steps from the same state on the same batches.

One rule tells rounding from fault for every step, leaf and target. JAX runs the original StableHLO several times, each
time from a start whose floats are moved by one unit in the last place; how far its own results move is the noise that
the step makes of rounding. A leaf passes if the compiled result is no further from JAX's than NOISE times that, plus a
few roundings of the leaf's dtype at the leaf's own scale. No step is excused by name.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fixstep import targets
from fixstep.frontend._reference import Calls, Runs, deviation, has, run_more, run_reference
from fixstep.frontend._seed import is_key
from fixstep.runtime._artifact import Artifact
from fixstep.runtime._load import load
from fixstep.runtime._signature import Array, LeafSpec, describe, flatten
from fixstep.runtime._sizes import Sizes
from fixstep.targets.errors import DataError

# The largest deviation among JAX's own runs is a lower estimate of the noise: only the start is moved, while a program
# that rounds otherwise moves every operation. Hence the factor; a fault is larger by orders of magnitude.
NOISE = 32.0
# Roundings allowed whatever JAX shows: sums are added in another order, and the elementary functions of XLA and IREE
# differ by a few units in the last place.
ROUNDINGS = 64.0


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
    given = _values(artifact, "inputs", inputs, tried[-1], rng) if has(artifact, "predict") else []
    results: list[Verification] = []
    skipped: dict[str, str] = {}
    expected: Runs | None = None
    for entry in artifact.manifest["targets"]:
        text = entry["text"]
        if target is not None and target not in (text, text.partition(":")[0]):
            continue
        reason = targets.parse(text).unavailable(entry["requires"])
        if reason is not None:
            skipped[text] = reason
            continue
        got, start = _run_compiled(path, text, artifact, data, given)
        calls = Calls(artifact, start, data, given)
        if expected is None:
            expected = run_reference(calls, rng)
        found = _compare(got, expected)
        # What JAX repeats exactly is judged as strictly as before.
        if any(not leaf.passed and NOISE * expected.noise[leaf.path] > leaf.bound / 2 for leaf in found):
            expected = run_more(calls, expected, rng)
            found = _compare(got, expected)
        leaves = sorted(found, key=lambda leaf: -leaf.severity)
        results.append(Verification(text, steps, tuple(leaves)))
    return tuple(results), skipped


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


def _compare(got: dict[str, Array], expected: Runs) -> list[LeafResult]:
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
        results.append(LeafResult(path, leaf.dtype.name, deviation(got[path], leaf), bound, scale))
    return results
