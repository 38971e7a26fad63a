"""What is wrong with a manifest whose parts are each valid: that they do not fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fixstep.runtime._signature import LeafSpec
from fixstep.runtime._sizes import SIZE

if TYPE_CHECKING:
    from fixstep.runtime._manifest import Manifest


def contradictions(manifest: Manifest, state_name: str) -> list[str]:
    """Parts of a manifest that are each valid and do not fit together."""
    problems = []
    if "step" not in manifest.functions:
        problems.append("/functions: step is missing")
    if "init" not in manifest.functions and state_name not in manifest.members:
        problems.append(f"/functions: neither init nor a member {state_name} says what the first state is")
    if not manifest.targets:
        problems.append("/targets: expected at least one target, got none")
    texts = [target.text for target in manifest.targets]
    problems += [f"/targets: {text!r} occurs twice" for text in sorted(set(texts)) if texts.count(text) > 1]
    for target in manifest.targets:
        if target.module not in manifest.members:
            problems.append(f"/targets: the module {target.module!r} of {target.text!r} is no member")
    held = {role: getattr(manifest.template, role) for role in ("state", "batch", "inputs")}
    problems += _size_contradictions(manifest)
    for function in manifest.functions.values():
        arguments = {group.role: group.leaves for group in function.arguments}
        results = {group.role: group.leaves for group in function.results}
        for word, groups in (("arguments", arguments), ("results", results)):
            for role in groups.keys() & held.keys():
                if _types(groups[role]) != _types(held[role]):
                    problems.append(f"/functions/{function.name}/{word}: {role} differs from the template's")
        both = "accumulators"
        if both in arguments and _types(arguments[both]) != _types(results[both]):
            problems.append(f"/functions/{function.name}: the accumulators of arguments and results differ")
    return sorted(problems)


def _size_contradictions(manifest: Manifest) -> list[str]:
    """Axes that are said to have the batch's size and do not."""
    sizes = manifest.sizes
    if sizes is None:
        return []
    problems = [
        f"/functions/{function.name}/arguments: expected one int32 scalar as size"
        for function in manifest.functions.values()
        for group in function.arguments
        if group.role == "size" and _types(group.leaves) != _types((SIZE,))
    ]
    results = {
        (function.name, group.role): group.leaves
        for function in manifest.functions.values()
        for group in function.results
    }
    held = {
        "batch": manifest.template.batch,
        "inputs": manifest.template.inputs,
        "metrics": results.get(("step", "metrics"), ()),
        "evaluation": results.get(("evaluate", "metrics"), ()),
        "outputs": results.get(("predict", "outputs"), ()),
    }
    for role, axes in sizes.axes.items():
        shapes = {leaf.path: leaf.shape for leaf in held[role]}
        problems += [
            f"/sizes/axes/{role}: {path!r} has no axis {axis} of {sizes.high}"
            for path, own in axes.items()
            for axis in own
            if shapes.get(path, ())[axis : axis + 1] != (sizes.high,)
        ]
    return problems


def _types(leaves: tuple[LeafSpec, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(leaf.path, leaf.dtype, leaf.shape) for leaf in leaves]
