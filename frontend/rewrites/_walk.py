"""Walking a StableHLO module: operations, callers, and what a value depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

CALLS = ("callee", "decomposition")
"""Attributes by which an operation names the function it enters (`func.call`, `stablehlo.composite`)."""


def operations(root: Any) -> Iterator[Any]:
    """Every operation below an operation, outer ones first; the list is made before the first is given out."""
    found: list[Any] = []

    def visit(op: Any) -> Any:
        found.append(op.operation)
        return ir.WalkResult.ADVANCE

    root.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return iter(found)


def callee(op: Any) -> str | None:
    """The name of the function that an operation enters."""
    for name in CALLS:
        if name in op.attributes:
            return str(ir.FlatSymbolRefAttr(op.attributes[name]).value)
    return None


def symbol(function: Any) -> str:
    """The name of a function."""
    return str(ir.StringAttr(function.attributes["sym_name"]).value)


def is_public(function: Any) -> bool:
    """Whether a function can be called from outside of the module."""
    attributes = function.attributes
    return "sym_visibility" not in attributes or ir.StringAttr(attributes["sym_visibility"]).value == "public"


def element_count(type_: Any) -> int:
    """Elements of a ranked tensor type with static dimensions."""
    count = 1
    for length in ir.RankedTensorType(type_).shape:
        count *= length
    return count


def enclosing_function(op: Any) -> Any:
    """The function that holds an operation."""
    while op.name != "func.func":
        op = op.parent.operation
    return op


def is_argument(value: Any) -> bool:
    """Whether a value is the argument of a block."""
    return isinstance(value.maybe_downcast() if hasattr(value, "maybe_downcast") else value, ir.BlockArgument)


def callers(module: Any) -> dict[str, list[Any]]:
    """The operations that enter each function, by the function's name."""
    found: dict[str, list[Any]] = {}
    for op in operations(module):
        entered = callee(op)
        if entered is not None:
            found.setdefault(entered, []).append(op)
    return found


def constant_values(module: Any) -> set[Any]:
    """The results that depend on no argument, in a module whose calls are inlined.

    To the compiler they are constants, whatever computes them. What flows round a loop, and what comes from behind a
    barrier, does not count: the compiler does not see through those.
    """
    constants: set[Any] = set()
    for op in operations(module):
        opaque = op.name in ("stablehlo.optimization_barrier", "stablehlo.rng_bit_generator", "stablehlo.while")
        if not opaque and all(operand in constants for operand in op.operands) and "case" not in op.name:
            constants.update(op.results)
    return constants


def terminator(region: Any) -> Any:
    """The last operation of a region of one block."""
    return list(region.blocks[0].operations)[-1].operation
