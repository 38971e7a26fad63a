"""Runs the cases of the cross-target suite on every target that this machine has.

Every family in targets/ whose device is present takes part by itself. FIXSTEP_SUITE_TARGETS names the targets instead
(`cpu:host,cuda`), which are then compiled even where no device runs them. FIXSTEP_SUITE_RESULTS names a file that each
result is appended to, for the matrix in docs/.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from _suite_cases import CASES, Case

from fixstep import targets
from fixstep.frontend import Program, compile, verify_artifact
from fixstep.runtime import Artifact, load
from fixstep.targets.errors import CompileError, FixstepError, TargetError, TemplateError

NAMED = os.environ.get("FIXSTEP_SUITE_TARGETS")
TARGETS = tuple(NAMED.split(",")) if NAMED else tuple(targets.families())
# Compiling takes most of the time: without a device it is done where the target was asked for.
ABSENT = {text: reason for text in TARGETS if (reason := targets.parse(text).unavailable({})) and not NAMED}
# One step shows each wrong operation, and fifty what they add up to.
SHORT, LONG = 1, 50

# What a device or an ahead-of-time program can never do, by target: it has to be refused when compiling.
_HOST_CALLS = dict.fromkeys(
    ("host_callback", "zoo:op_debug_print", "zoo:op_pure_callback"), "the device cannot call Python"
)
NEVER: dict[str, dict[str, str]] = {
    "cpu": _HOST_CALLS,
    "vulkan": _HOST_CALLS,
    "cuda": _HOST_CALLS,
}

# What fails today and should not, by target: an entry that passes has to be taken out.
TODAY: dict[str, dict[str, str]] = {
    "cpu": {},
    "vulkan": {"ranges_of_columns": "a slice of columns at a computed place does not compile (memref.collapse_shape)"},
    "cuda": {},
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case on a target.

    Attributes:
        status: `refused` when compiling, with a message of ours; `absent` if no device runs it here.
        why: the message, or the worst leaf.
    """

    status: Literal["passes", "refused", "fails", "absent"]
    why: str


def listed(lists: dict[str, dict[str, str]], target: str, name: str) -> str | None:
    """The reason that a list gives for a case on a target."""
    return lists.get(target.partition(":")[0], {}).get(name)


def surprise(name: str, target: str, outcome: Outcome) -> str | None:
    """How the outcome of a case that ran differs from what the lists say; None if it does not."""
    never, today = listed(NEVER, target, name), listed(TODAY, target, name)
    if never:
        return None if outcome.status == "refused" else f"listed as impossible ({never}), but: {outcome}"
    if today:
        return f"listed as failing ({today}), but it passes" if outcome.status == "passes" else None
    return outcome.why if outcome.status in ("refused", "fails") else None


@functools.cache
def outcomes(name: str) -> dict[str, Outcome]:
    """Compile a case for every target, compare it with JAX on each that has a device, and check the state's rules."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(case.x64):
        init, step, batches = case.build()
        program = Program(init=init, step=step, batch=batches[0], name="case")
        found, compiled = _compile(program, Path(folder))
        found |= _compare(compiled, batches)
    _record(case, found)
    return found


def _compile(program: Program, folder: Path) -> tuple[dict[str, Outcome], list[tuple[str, Path]]]:
    """One artifact for all targets; where one of them refuses, one artifact each."""
    wanted = [target for target in TARGETS if target not in ABSENT]
    found = {target: Outcome("absent", reason) for target, reason in ABSENT.items()}
    together = folder / "all.fixstep"
    try:
        compile(program, together, targets=wanted, verify=False)
    except FixstepError:
        pass
    else:
        return found, [(target, together) for target in wanted]
    compiled = []
    for number, target in enumerate(wanted):
        path = folder / f"{number}.fixstep"
        try:
            compile(program, path, targets=[target], verify=False)
        except (CompileError, TargetError) as exc:
            found[target] = Outcome("refused", str(exc))
        else:
            compiled.append((target, path))
    return found, compiled


def _compare(compiled: list[tuple[str, Path]], batches: list[Any]) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for path in dict.fromkeys(path for _, path in compiled):
        mine = [target for target, own in compiled if own == path]
        for target in mine:
            found[target] = _rules(path, target, batches[0])
        for steps in (SHORT, LONG):
            try:
                results, _ = verify_artifact(path, steps=steps, example=batches)
            except FixstepError as exc:
                present = [target for target in mine if found[target].status == "passes"]
                found |= {target: Outcome("fails", f"over {steps} steps: {exc}") for target in present}
                break
            for result in results:
                if not result.passed and found[result.target].status == "passes":
                    found[result.target] = Outcome("fails", f"over {steps} steps: {result.describe()}")
    return found


def _rules(path: Path, target: str, batch: Any) -> Outcome:
    """Types out are types in, and a refused call leaves the state as it was."""
    entry = next(e for e in Artifact.open(path).manifest["targets"] if e["text"] == target)
    reason = targets.parse(target).unavailable(entry["requires"])
    if reason is not None:
        return Outcome("absent", reason)
    try:
        session = load(path, target=target)
        before = session.state()
        try:
            session.step({"wrong": np.zeros(3)})
        except TemplateError:
            pass
        else:
            return Outcome("fails", "a wrong batch was taken")
        if {p: a.tobytes() for p, a in before.items()} != {p: a.tobytes() for p, a in session.state().items()}:
            return Outcome("fails", "a refused call changed the state")
        session.step(batch)
        after = session.state()
    except FixstepError as exc:
        return Outcome("fails", str(exc))
    types = [{p: (a.dtype, a.shape) for p, a in state.items()} for state in (before, after)]
    return Outcome("passes", "") if types[0] == types[1] else Outcome("fails", f"types moved: {types}")


def _record(case: Case, found: dict[str, Outcome]) -> None:
    file = os.environ.get("FIXSTEP_SUITE_RESULTS")
    if file:
        line = {"case": case.name, "kind": case.kind} | {
            "targets": {t: dataclasses.asdict(o) for t, o in found.items()}
        }
        with Path(file).open("a") as out:
            out.write(json.dumps(line) + "\n")
