"""From a program to an artifact file: what `fixstep compile` does."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fixstep.frontend import _iree
from fixstep.frontend._dtypes import check_leaves, check_operations
from fixstep.frontend._lower import Lowered, groups_to_json, lower
from fixstep.frontend._program import Program
from fixstep.frontend._template import Template, infer_template
from fixstep.frontend._verify import Verification, verify_artifact
from fixstep.frontend.sizes import symbolic_axes
from fixstep.runtime._artifact import write_artifact
from fixstep.runtime._files import sync_folder
from fixstep.runtime._manifest import STATE_NAME, leaf_to_json
from fixstep.runtime._tensors import encode_leaves
from fixstep.targets import parse
from fixstep.targets._base import Target
from fixstep.targets.errors import MismatchError, TargetError


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What `compile` made.

    Attributes:
        path: the artifact file.
        template: the fixed point, with its report.
        verifications: the comparison with JAX on each target whose device is present.
        unverified: why a target was not compared, by target text.
    """

    path: Path
    template: Template
    verifications: tuple[Verification, ...]
    unverified: dict[str, str]


def compile(
    program: Program,
    path: str | os.PathLike[str],
    *,
    targets: Sequence[str] = ("cpu",),
    verify: bool = True,
) -> Compiled:
    """Compile a program for the given targets and write the artifact.

    Args:
        program: the training step.
        path: the file to write; it is replaced only when all targets compiled.
        targets: target texts such as `cpu`, `cpu:host`; one compiled module each.
        verify: compare a few steps with JAX, leaf by leaf, on each target whose device this machine has.

    Raises:
        ProgramError: if the program is malformed or its own code fails.
        FixpointError: if the state has no fixed point.
        TargetError: if a target is unknown or cannot hold a leaf's dtype.
        CompileError: if an operation cannot be compiled.
        MismatchError: if a compiled step does not compute what JAX computes; the artifact is not written.
        ArtifactError: if the file cannot be written.
    """
    parsed = _parse_targets(targets)
    template = infer_template(program)
    for target in parsed:
        check_leaves(target, template)
    lowered = lower(template)
    for target in parsed:
        check_operations(target, lowered)
    members: dict[str, bytes] = {"program.mlir": lowered.text.encode()}
    members |= {f"reference/{name}.jax": data for name, data in lowered.references.items()}
    if template.seed_values is not None:
        members[STATE_NAME] = _state_file(template)
    entries = []
    for target in parsed:
        module, requirements = _iree.compile_module(lowered.text, target, lowered.lines)
        name = f"modules/{re.sub(r'[^a-z0-9_.-]', '-', target.text)}.vmfb"
        members[name] = module
        flags = target.compile_flags(lowered.text)
        entries.append({"text": target.text, "module": name, "requires": requirements, "flags": flags})
    manifest = _manifest(program, template, lowered, entries)
    temporary = Path(path).with_name(Path(path).name + ".unverified") if verify else Path(path)
    write_artifact(temporary, manifest, members)
    return Compiled(Path(path), template, *_verified(temporary, Path(path), program, verify))


def _verified(
    temporary: Path, path: Path, program: Program, verify: bool
) -> tuple[tuple[Verification, ...], dict[str, str]]:
    """Compare the new artifact with JAX, and give it its name only if it agrees."""
    if not verify:
        return (), {}
    try:
        verifications, unverified = verify_artifact(temporary, example=program.batch, inputs=program.inputs)
        failed = [result for result in verifications if not result.passed]
        if failed:
            raise MismatchError("\n".join(result.describe() for result in failed))
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return verifications, unverified


def _parse_targets(texts: Sequence[str]) -> list[Target]:
    if isinstance(texts, str):
        raise TargetError(f"targets is a list: write targets=[{texts!r}]")
    if not texts:
        raise TargetError("no target given: expected at least one, such as cpu")
    return [parse(text) for text in dict.fromkeys(texts)]


def _state_file(template: Template) -> bytes:
    """The initial state that the program brings."""
    assert template.seed_values is not None
    paths = [leaf.path for leaf in template.state_leaves]
    return encode_leaves(dict(zip(paths, template.seed_values, strict=True)), template.state_leaves)


def _sizes(template: Template) -> dict[str, Any]:
    """The sizes that a batch may have, and which axes have it."""
    assert template.sizes is not None
    held = {
        "batch": (template.batch_leaves, template.padded["step"].structs),
        "inputs": (template.input_leaves, template.padded["predict"].structs if "predict" in template.padded else ()),
        "metrics": (template.metric_leaves, template.padded["step"].output[1]),
        "evaluation": (
            template.evaluation_leaves,
            template.padded["evaluate"].output[0] if "evaluate" in template.padded else (),
        ),
        "outputs": (template.output_leaves, template.padded["predict"].output if "predict" in template.padded else ()),
    }
    axes = {
        role: {
            leaf.path: list(symbolic_axes(struct))
            for leaf, struct in zip(leaves, structs, strict=True)
            if symbolic_axes(struct)
        }
        for role, (leaves, structs) in held.items()
    }
    return {**dataclasses.asdict(template.sizes), "compiled": list(template.sizes.compiled), "axes": axes}


def _manifest(program: Program, template: Template, lowered: Lowered, targets: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": "fixstep",
        "version": 1,
        "name": program.name or "program",
        "program": lowered.digest,
        "template": {
            "state": [leaf_to_json(leaf) for leaf in template.state_leaves],
            "batch": [leaf_to_json(leaf) for leaf in template.batch_leaves],
            "inputs": [leaf_to_json(leaf) for leaf in template.input_leaves],
        },
        "functions": {
            function.name: {
                "arguments": groups_to_json(function.arguments),
                "results": groups_to_json(function.results),
            }
            for function in lowered.functions
        },
        "fixpoint": {
            "rounds": template.rounds,
            "changes": [
                {
                    "path": change.path,
                    "from": change.before,
                    "to": change.after,
                    "round": change.round,
                    "narrowed": change.narrowed,
                }
                for change in template.changes
            ],
            "notes": list(template.notes),
        },
        **({"sizes": _sizes(template)} if template.sizes else {}),
        "targets": targets,
        "versions": {
            "fixstep": importlib.metadata.version("fixstep"),
            "jax": importlib.metadata.version("jax"),
            "iree": _iree.compiler_version(),
        },
    }
