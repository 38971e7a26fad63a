"""Changes to the code that runs on the host, in the text form of IREE's virtual machine."""

from __future__ import annotations

import re

from fixstep.targets._base import CodeEdit

_BRANCH = re.compile(r"^(\s*)vm\.(?:cond_)?br .*!vm\.ref<")
_SUCCESSOR = re.compile(r"(\^bb\d+)\(([^:()]*) : ([^()]*)\)")


def separated_references(module: str) -> tuple[CodeEdit, ...]:
    """The edit that `separate_references` is, for a StableHLO module that has loops; others have no such branches."""
    if "stablehlo.while" not in module:
        return ()
    return (CodeEdit("vm", "separate references, 2", separate_references),)


def separate_references(code: str) -> str:
    """Branches that hand on every buffer and every fence once, however many of the values are the same.

    IREE 3.13 marks the last of several equal operands as moved, and then may reorder the copies so that the move comes
    first: the others get nothing. A call then fails with "indirect buffer reference slot 0 is out range", or does not
    wait for a fence. What a selection gives is a reference of its own, and the compiler cannot tell what it gives.
    """
    lines = []
    for number, line in enumerate(code.split("\n")):
        found = _BRANCH.match(line)
        if found is None:
            lines.append(line)
            continue
        selections: list[str] = []
        branch = _SUCCESSOR.sub(lambda f, n=number, s=selections: _separated(f, n, s), line)  # type: ignore[misc]
        lines += [found.group(1) + selection for selection in selections]
        lines.append(branch)
    return "\n".join(lines)


def _separated(found: re.Match[str], number: int, selections: list[str]) -> str:
    """One successor with its operands; `selections` takes the operations that have to stand before the branch."""
    block, operands, types = found.group(1), found.group(2).split(", "), found.group(3).split(", ")
    seen: set[str] = set()
    for index, (operand, type_) in enumerate(zip(operands, types, strict=True)):
        if operand in seen and type_.startswith("!vm.ref<"):
            own = f"%edited_{number}_{len(selections)}"
            selections.append(
                f"{own}_none = vm.const.ref.zero : {type_} {own}_is = vm.cmp.nz.ref {operand} : {type_} "
                f"{own} = vm.select.ref {own}_is, {operand}, {own}_none : {type_}"
            )
            operands[index] = own
        seen.add(operand)
    return f"{block}({', '.join(operands)} : {', '.join(types)})"
