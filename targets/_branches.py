"""Changes to the code that runs on the host, in the text form of IREE's virtual machine."""

from __future__ import annotations

import collections
import re

from fixstep.targets._base import CodeEdit

_BRANCH = re.compile(r"^(\s*)vm\.(?:cond_)?br .*!vm\.ref<")
_SUCCESSOR = re.compile(r"(\^bb\d+)\(([^:()]*) : ([^()]*)\)")
_FUNCTION = re.compile(r"\s*vm\.(?:func|initializer)\b")
_BLOCK = re.compile(r"\s*\^bb\d+")
_RESULTS = re.compile(r"^\s*%\S+(?:, %\S+)* = ")
_VALUE = re.compile(r"%[\w#]+")


def separated_references(module: str) -> tuple[CodeEdit, ...]:
    """The edit that `separate_references` is, for a StableHLO module that has loops; others have no such branches."""
    if "stablehlo.while" not in module:
        return ()
    return (CodeEdit("vm", "separate references, 3", separate_references),)


def separate_references(code: str) -> str:
    """Branches that hand on every buffer and every fence once, and none that is still needed under its own name.

    IREE 3.13 marks the last of several equal operands as moved, and then may reorder the copies so that the move comes
    first: the others get nothing. And it marks an operand as moved that a block behind the branch uses directly. A call
    then fails with "indirect buffer reference slot 0 is out range" or "ref is null", or does not wait for a fence. What
    a selection gives is a reference of its own, and the compiler cannot tell what it gives.
    """
    lines = code.split("\n")
    blocks = _blocks(lines)
    uses = _uses(lines, blocks)
    edited = []
    for number, line in enumerate(lines):
        found = _BRANCH.match(line)
        if found is not None:
            block = blocks[number]
            used = uses[block[0]]
            elsewhere = {value for value in _VALUE.findall(line) if used[value] - {block}}
            selections: list[str] = []
            line = _SUCCESSOR.sub(
                lambda f, n=number, e=elsewhere, s=selections: _separated(f, n, e, s),  # type: ignore[misc]
                line,
            )
            edited += [found.group(1) + selection for selection in selections]
        edited.append(line)
    return "\n".join(edited)


_Block = tuple[int, int]


def _blocks(lines: list[str]) -> list[_Block]:
    """For each line the numbers of its function and of its block."""
    found = []
    function = block = 0
    for line in lines:
        function += _FUNCTION.match(line) is not None
        block += _BLOCK.match(line) is not None
        found.append((function, block))
    return found


def _uses(lines: list[str], blocks: list[_Block]) -> dict[int, dict[str, set[_Block]]]:
    """By function, the blocks in which each value is used; to discard one is no use."""
    uses: dict[int, dict[str, set[_Block]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    for line, block in zip(lines, blocks, strict=True):
        if _BLOCK.match(line) is None and "vm.discard.refs" not in line:
            for value in _VALUE.findall(_RESULTS.sub("", line)):
                uses[block[0]][value].add(block)
    return uses


def _separated(found: re.Match[str], number: int, elsewhere: set[str], selections: list[str]) -> str:
    """One successor with its operands; `selections` takes the operations that have to stand before the branch."""
    block, operands, types = found.group(1), found.group(2).split(", "), found.group(3).split(", ")
    seen = set(elsewhere)
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
