"""Keeps each carry of a loop a carry.

Stands against a fault of IREE 3.13: where it hoists something out of a loop, it tests the condition before the first
turn and then at the end of each. A carry that no turn reads is then dropped from what goes in, and one that every turn
gives the same value, or the same value as another, from what comes out; but when the loop is handed to the device, both
are taken to have the types of what goes in. The compiler ends with a signal, or refuses what it made itself. A value
behind a barrier that the carry's old value stands behind too depends on it, and on no other.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites._walk import operations, terminator


def keep_carries(module: Any) -> None:
    """Put a barrier behind what a turn makes of a carry that it does not read, or shares with another carry.

    A carry that stays as it is needs none: it is dropped on both sides.
    """
    for loop in operations(module):
        if loop.name == "stablehlo.while":
            _keep(loop.regions[1])


def _keep(body: Any) -> None:
    carries, end = list(body.blocks[0].arguments), terminator(body)
    results = list(end.operands)
    moved = _depending(body, carries)
    for index, (carry, result) in enumerate(zip(carries, results, strict=True)):
        is_read = any(True for _ in carry.uses)
        if result != carry and not (is_read and result in moved and results.count(result) == 1):
            with ir.InsertionPoint(end), end.location:
                end.operands[index] = stablehlo.optimization_barrier([result, carry])[0]


def _depending(body: Any, carries: list[Any]) -> set[Any]:
    """The values of a turn that depend on a carry; the others are, or may become, the same in every turn."""
    found = set(carries)
    for op in body.blocks[0].operations:
        if any(operand in found for inner in operations(op) for operand in inner.operands):
            found.update(op.operation.results)
    return found
