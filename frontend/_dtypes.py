"""Refuses what a target cannot hold or do: leaves by their path, the rest by operation and line."""

from __future__ import annotations

import re

from fixstep.frontend._lower import Lowered
from fixstep.frontend._template import Template
from fixstep.runtime._signature import LeafSpec
from fixstep.targets._base import Target
from fixstep.targets.errors import TargetError

# The element types that some target lacks; those of 16 bits and more, and i8, every target can try.
_ELEMENT_TYPE = re.compile(r"(?<=[x<])(?:u?i[24]|f[468]E\w+)(?=[>,])")
_OPERATION = re.compile(r"= \"?(?:stablehlo|chlo)\.(\w+)")
_SHOWN = 10


def check_leaves(target: Target, template: Template) -> None:
    """Refuse leaves that the target cannot hold, all of them at once.

    Raises:
        TargetError: naming each leaf, and what to use instead of its dtype.
    """
    groups: dict[str, tuple[LeafSpec, ...]] = {
        "state": template.state_leaves,
        "batch": template.batch_leaves,
        "inputs": template.input_leaves,
        "metrics": template.metric_leaves,
        "outputs": template.output_leaves,
    }
    lines = [
        f"  {what} {leaf.path}: {leaf}; use {instead}"
        for what, leaves in groups.items()
        for leaf in leaves
        if (instead := target.unsupported(leaf.dtype)) is not None
    ]
    if lines:
        raise TargetError("\n".join([f"target {target.text} cannot hold these leaves:", *lines]))


def check_operations(target: Target, lowered: Lowered) -> None:
    """Refuse operations, and values that live only inside of the program.

    Raises:
        TargetError: naming the operations, with the user's line.
    """
    found: dict[str, None] = {}
    line = ""
    for number, text in enumerate(lowered.text.splitlines(), 1):
        line = lowered.lines.get(number, line)
        operation = _OPERATION.search(text)
        if operation is None:
            continue
        where = f", at {line}" * bool(line)
        why = target.lacks(operation.group(1))
        if why is not None:
            found.setdefault(f"  {operation.group(1)}{where}: {why}")
        for element_type in _ELEMENT_TYPE.findall(text):
            dtype = _dtype(element_type)
            instead = target.unsupported(dtype)
            if instead is not None:
                found.setdefault(f"  {operation.group(1)} of {dtype}{where}; use {instead}")
    if found:
        shown = list(found)[:_SHOWN]
        more = [f"  … and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise TargetError("\n".join([f"target {target.text} cannot compute this:", *shown, *more]))


def _dtype(element_type: str) -> str:
    """The dtype of an element type: `float8_e4m3fn` of `f8E4M3FN`, `uint4` of `ui4`."""
    narrow = re.fullmatch(r"f(\d)E(\d)M(\d)(\w*)", element_type)
    if narrow is not None:
        bits, exponent, mantissa, variant = narrow.groups()
        return f"float{bits}_e{exponent}m{mantissa}{variant.lower()}"
    return re.sub(r"^(u?)i", lambda found: f"{found.group(1)}int", element_type)
