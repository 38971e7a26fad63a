"""Keeps what goes into a loop and what comes out of it the same, and apart from what stands around it.

Stands against two faults of IREE 3.13. Where it hoists something out of a loop, it tests the condition before the first
turn and then at the end of each. A carry that no turn reads is then dropped from what goes in, and one that every turn
gives the same value, or the same value as another, from what comes out; but when the loop is handed to the device, both
are taken to have the types of what goes in. The compiler ends with a signal, or refuses what it made itself. So such a
carry gets its new value where the loop's condition holds, and else the old one. A turn is taken only where it holds,
which the compiler does not know.

And where it sorts what runs together, it lets what makes a carry join what uses both that and the loop's result, as if
the loop were not in between ("circular dependency: input operation uses partition output"). Nothing joins across a
barrier, so one carry of each loop begins as an opaque copy, which has one in it.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites._copies import opaque_copy
from fixstep.frontend.rewrites._walk import element_count, operations, terminator


def keep_carries(module: Any, copies: int) -> None:
    """Make what a turn makes of a carry depend on that carry, and differ from what it makes of any other.

    A carry that stays as it is, is left: it is dropped on both sides. And let the smallest carry enter as a copy.

    Barriers on the carries themselves would be cheaper, but IREE frees what comes out of one, which may be a part of
    another buffer, and what two loops get from one barrier is measured in the first and not known in the second.

    Args:
        module: one whose calls are inlined.
        copies: how many copies were made before.
    """
    loops = [op for op in operations(module) if op.name == "stablehlo.while"]
    for number, loop in enumerate(loops, start=copies + 1):
        condition, body = loop.regions
        indices = _indices(body)
        if indices:
            _keep(condition, body, indices)
        candidates = [index for index, value in enumerate(loop.operands) if not _is_counter(value)]
        if candidates:
            smallest = min(candidates, key=lambda index: element_count(loop.operands[index].type))
            with ir.InsertionPoint(loop), loop.location:
                loop.operands[smallest] = opaque_copy(loop.operands[smallest], number)


def _is_counter(value: Any) -> bool:
    """The compiler keeps integers alone on the host, which a barrier would prevent."""
    type_ = ir.RankedTensorType(value.type)
    return not type_.rank and isinstance(type_.element_type, ir.IntegerType)


def _indices(body: Any) -> list[int]:
    """The carries that no turn reads, or that get what the compiler may see to be the same in every turn or twice."""
    carries, results = list(body.blocks[0].arguments), list(terminator(body).operands)
    moving = _depending(body, carries)
    return [
        index
        for index, (carry, result) in enumerate(zip(carries, results, strict=True))
        if result != carry
        and (next(iter(carry.uses), None) is None or result not in moving or results.count(result) > 1)
    ]


def _depending(body: Any, carries: list[Any]) -> set[Any]:
    """The values of a turn that depend on a carry."""
    found = set(carries)
    for op in body.blocks[0].operations:
        if any(operand in found for inner in operations(op) for operand in inner.operands):
            found.update(op.operation.results)
    return found


def _keep(condition: Any, body: Any, indices: list[int]) -> None:
    end = terminator(body)
    carries = list(body.blocks[0].arguments)
    with ir.InsertionPoint(end), end.location:
        holds = _copied(condition, carries)
        for index in indices:
            end.operands[index] = stablehlo.select(holds, end.operands[index], carries[index])


def _copied(condition: Any, carries: list[Any]) -> Any:
    """The condition once more, of the carries as a turn gets them."""
    values = dict(zip(condition.blocks[0].arguments, carries, strict=True))
    end = terminator(condition)
    for op in condition.blocks[0].operations:
        if op.operation == end:
            break
        copy = op.operation.clone()
        for inner in operations(copy):
            for index, operand in enumerate(inner.operands):
                inner.operands[index] = values.get(operand, operand)
        values.update(zip(op.operation.results, copy.results, strict=True))
    (holds,) = end.operands
    return values.get(holds, holds)
