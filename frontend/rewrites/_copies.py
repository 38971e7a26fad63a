"""Copies a value before an operation that IREE would let write it in place.

Stands against two faults with one cause: the operand that `sort`, `scatter` and `dynamic_update_slice` work on is
written in place without a copy when it is a function argument (https://github.com/iree-org/iree/issues/24665,
https://github.com/iree-org/iree/issues/16168), so a step destroys its input; or when it is an iota or another constant,
so that two permutations in one step use one overwritten iota and are wrong. Values that are computed are copied
properly.

The copy must be one that the compiler cannot fold: the bits of the value, xor a zero behind an optimization barrier.
Every bit stays, NaN payloads and signed zeros too. A barrier on the value itself, or `jnp.copy`, does not help.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites._walk import Dataflow, element_count, is_argument, is_public, operations, symbol

_VIEWS = frozenset(
    f"stablehlo.{name}"
    for name in (
        "bitcast_convert", "broadcast_in_dim", "convert", "optimization_barrier", "reshape", "reverse", "slice",
        "transpose", "real", "imag", "complex", "concatenate", "pad", "tuple", "get_tuple_element", "custom_call", "select"
    )
)  # fmt: skip
"""Operations whose result may share its operand's storage once the compiler has simplified it."""


def guard_copies(module: Any) -> int:
    """Copy what would be written in place, in place.

    Returns:
        The number of copies made.
    """
    dataflow = Dataflow(module)
    guard = _Guard(dataflow)
    for op in operations(module):
        for index in _tied_operands(op):
            guard.visit(op, index)
    for op, index in guard.edges:
        with ir.InsertionPoint(op), op.location:
            op.operands[index] = opaque_copy(op.operands[index])
    return len(guard.edges)


def _tied_operands(op: Any) -> range:
    if op.name == "stablehlo.sort":
        return range(len(op.operands))
    if op.name == "stablehlo.scatter":
        return range((len(op.operands) - 1) // 2)
    if op.name == "stablehlo.dynamic_update_slice":
        return range(1)
    return range(0)


class _Guard:
    """Collects the operands at which a copy has to stand: as far outside of loops as the value comes unwritten."""

    def __init__(self, dataflow: Dataflow) -> None:
        self.edges: list[tuple[Any, int]] = []
        self._dataflow = dataflow
        self._seen: set[tuple[Any, int]] = set()
        self._visiting: set[Any] = set()

    def visit(self, op: Any, index: int) -> None:
        """Look at one operand of one operation, which will be written in place."""
        value = op.operands[index]
        if (op, index) in self._seen or element_count(value.type) == 0:
            return
        self._seen.add((op, index))
        loop = self._loop(value)
        if loop is not None:
            # The value is a loop's carry: what enters the loop and what each turn hands on are looked at instead.
            owner, number = loop
            self.visit(owner, number)
            self.visit(_terminator(owner.regions[1]), number)
        elif self._is_shared(value):
            self.edges.append((op, index))

    def _loop(self, value: Any) -> tuple[Any, int] | None:
        if is_argument(value):
            argument = ir.BlockArgument(value)
            owner = argument.owner.owner.operation
            return (owner, argument.arg_number) if owner.name == "stablehlo.while" else None
        owner = value.owner
        return (owner, ir.OpResult(value).result_number) if owner.name == "stablehlo.while" else None

    def _is_shared(self, value: Any) -> bool:
        """Whether the value may be the storage of an argument or of a constant."""
        if value in self._visiting:
            return False
        self._visiting.add(value)
        try:
            return self._argument_shared(value) if is_argument(value) else self._result_shared(value)
        finally:
            self._visiting.discard(value)

    def _argument_shared(self, value: Any) -> bool:
        argument = ir.BlockArgument(value)
        owner = argument.owner.owner.operation
        if owner.name == "func.func":
            if is_public(owner):
                return True
            calls = self._dataflow.callers.get(symbol(owner), [])
            return any(self._is_shared(call.operands[argument.arg_number]) for call in calls)
        if owner.name == "stablehlo.while":
            return self._carry_shared(owner, argument.arg_number)
        return True

    def _carry_shared(self, loop: Any, number: int) -> bool:
        return self._is_shared(loop.operands[number]) or self._is_shared(_terminator(loop.regions[1]).operands[number])

    def _result_shared(self, value: Any) -> bool:
        op = value.owner
        number = ir.OpResult(value).result_number
        if op.name == "stablehlo.while":
            return self._carry_shared(op, number)
        if op.name in ("stablehlo.case", "stablehlo.if"):
            return any(self._is_shared(_terminator(region).operands[number]) for region in op.regions)
        if op.name in ("func.call", "stablehlo.composite"):
            return self._call_shared(op, number)
        if _is_splat(op):
            return False
        if op.name in _VIEWS and any(self._is_shared(operand) for operand in op.operands):
            return True
        return not self._dataflow.depends_on_argument(value)

    def _call_shared(self, call: Any, number: int) -> bool:
        from fixstep.frontend.rewrites._walk import callee

        function = self._dataflow.functions[callee(call)]
        return self._is_shared(_terminator(function.regions[0]).operands[number])


def _terminator(region: Any) -> Any:
    return list(region.blocks[0].operations)[-1].operation


def _is_splat(op: Any) -> bool:
    """Whether every element is the same constant: the compiler fills a fresh buffer with it."""
    if op.name == "stablehlo.constant":
        return ir.DenseElementsAttr(op.attributes["value"]).is_splat
    if op.name == "stablehlo.broadcast_in_dim" and not is_argument(op.operands[0]):
        return _is_splat(op.operands[0].owner)
    return False


def opaque_copy(value: Any) -> Any:
    """A copy of a value that the compiler cannot see through, built at the current insertion point."""
    element = ir.RankedTensorType(value.type).element_type
    if isinstance(element, ir.ComplexType):
        return stablehlo.complex(opaque_copy(stablehlo.real(value)), opaque_copy(stablehlo.imag(value)))
    if isinstance(element, ir.IntegerType):
        return _xor_zero(value)
    width = ir.FloatType(element).width
    bits = stablehlo.bitcast_convert(_with_element(value.type, ir.IntegerType.get_unsigned(width)), value)
    return stablehlo.bitcast_convert(value.type, _xor_zero(bits))


def _xor_zero(value: Any) -> Any:
    type_ = ir.RankedTensorType(value.type)
    scalar = ir.RankedTensorType.get([], type_.element_type)
    attribute = ir.DenseElementsAttr.get_splat(scalar, ir.IntegerAttr.get(type_.element_type, 0))
    zero = stablehlo.optimization_barrier([stablehlo.constant(attribute)])
    zeros = stablehlo.broadcast_in_dim(value.type, zero, ir.DenseI64ArrayAttr.get([]))
    return stablehlo.xor(value, zeros)


def _with_element(type_: Any, element: Any) -> Any:
    return ir.RankedTensorType.get(ir.RankedTensorType(type_).shape, element)


_: Callable[..., Any]
