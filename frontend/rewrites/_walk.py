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


class Dataflow:
    """Where the values of a module come from."""

    def __init__(self, module: Any) -> None:
        self.callers: dict[str, list[Any]] = {}
        self.functions: dict[str, Any] = {}
        for op in operations(module):
            if op.name == "func.func":
                self.functions[symbol(op)] = op
            entered = callee(op)
            if entered is not None:
                self.callers.setdefault(entered, []).append(op)
        self._depends: dict[Any, bool] = {}

    def depends_on_argument(self, value: Any) -> bool:
        """Whether a value depends on an argument of a public function.

        A value that does not is a constant to the compiler, whatever computes it. Values that flow round a loop count
        as dependent: the compiler does not see through them.
        """
        known = self._depends.get(value)
        if known is not None:
            return known
        self._depends[value] = False  # a cycle adds nothing of its own
        result = self._argument_depends(value) if is_argument(value) else self._result_depends(value)
        self._depends[value] = result
        return result

    def _argument_depends(self, value: Any) -> bool:
        argument = ir.BlockArgument(value)
        owner = argument.owner.owner.operation
        if owner.name != "func.func":
            return True
        if is_public(owner):
            return True
        calls = self.callers.get(symbol(owner), [])
        return any(self.depends_on_argument(call.operands[argument.arg_number]) for call in calls)

    def _result_depends(self, value: Any) -> bool:
        op = value.owner.operation if hasattr(value.owner, "operation") else value.owner
        if op.name == "stablehlo.optimization_barrier":
            return True
        if len(op.regions) > 0 and op.name in ("stablehlo.while", "stablehlo.case", "stablehlo.if"):
            return True
        if any(self.depends_on_argument(operand) for operand in op.operands):
            return True
        return op.name == "stablehlo.rng_bit_generator"


def terminator(region: Any) -> Any:
    """The last operation of a region of one block."""
    return list(region.blocks[0].operations)[-1].operation
