"""Copies a value before an operation that IREE would let write it in place.

Stands against faults with one cause: `sort`, `scatter` and `dynamic_update_slice` write the operand they work on in
place, without a copy where they take this for its last use. A function argument is then destroyed
(https://github.com/iree-org/iree/issues/24665, https://github.com/iree-org/iree/issues/16168); of an iota that two
permutations share, the second is wrong; and a value that anything else reads can be overwritten first, because the
schedule of IREE 3.13 puts readers and the writer of one buffer in any order.

So each such operand becomes a copy of its own, which nothing else can share. What is already known to be its own is
not copied: a splat, and within a loop the carry that the update alone uses, which would cost a whole copy each turn.

The copy must be one that the compiler can neither fold nor merge with another: the bits of the value, xor a zero that
is hidden behind an optimization barrier and made from a number that no other copy has. Every bit stays, NaN payloads
and signed zeros too. A barrier on the value itself, or `jnp.copy`, does not help.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites._walk import element_count, is_argument, operations, terminator

_UPDATES = ("stablehlo.scatter", "stablehlo.dynamic_update_slice")


def guard_copies(module: Any) -> int:
    """Copy what would be written in place; calls have to be inlined before.

    Returns:
        The number of copies made.
    """
    guard = _Guard()
    for op in operations(module):
        for index in _tied_operands(op):
            guard.visit(op, index)
    for number, (op, index) in enumerate(guard.edges, start=1):
        with ir.InsertionPoint(op), op.location:
            op.operands[index] = opaque_copy(op.operands[index], number)
    return len(guard.edges)


def _tied_operands(op: Any) -> range:
    """The operands that an operation may write in place."""
    if op.name == "stablehlo.sort":
        return range(len(op.operands))
    if op.name == "stablehlo.scatter":
        return range((len(op.operands) - 1) // 2)
    if op.name == "stablehlo.dynamic_update_slice":
        return range(1)
    return range(0)


class _Guard:
    """Collects the operands at which a copy has to stand, as far outside of loops as that is enough."""

    def __init__(self) -> None:
        self.edges: list[tuple[Any, int]] = []
        self._seen: set[tuple[Any, int]] = set()

    def visit(self, op: Any, index: int) -> None:
        """Look at one operand of an operation that writes it in place, or hands it to a loop that does."""
        value = op.operands[index]
        if (op, index) in self._seen or element_count(value.type) == 0:
            return
        self._seen.add((op, index))
        if not is_argument(value) and _is_splat(value.owner):
            return
        if not _used_once(value):
            self.edges.append((op, index))
        elif (carried := _carry(value)) is not None:
            loop, number = carried
            self._visit_carry(loop, number)
        elif op.name == "stablehlo.return" and _is_updated_carry(value, op, index):
            return
        elif _continues_chain(value, op):
            return  # a chain of updates: its first one has a copy of its own
        else:
            self.edges.append((op, index))

    def _visit_carry(self, loop: Any, number: int) -> None:
        """The value is a loop's carry: look at what enters the loop, and at what each turn hands on."""
        self.visit(loop, number)
        self.visit(terminator(loop.regions[1]), number)


def _used_once(value: Any) -> bool:
    return len(list(value.uses)) == 1


def _carry(value: Any) -> tuple[Any, int] | None:
    """The loop and the number of the carry, if the value is one (in its body, its condition or after it)."""
    if is_argument(value):
        argument = ir.BlockArgument(value)
        owner = argument.owner.owner.operation
        number = argument.arg_number
    else:
        owner = value.owner
        number = ir.OpResult(value).result_number
        # After the loop one copy is cheaper than one in each turn.
        if owner.name == "stablehlo.while":
            handed_on = terminator(owner.regions[1])
            if not _is_updated_carry(handed_on.operands[number], handed_on, number):
                return None
    if owner.name != "stablehlo.while":
        return None
    # The condition's argument is the same carry under another name; a reader there is one more use.
    in_condition = list(owner.regions[0].blocks[0].arguments[number].uses)
    return None if in_condition else (owner, number)


def _is_updated_carry(value: Any, op: Any, index: int) -> bool:
    """Whether what a turn hands on is its own carry, updated in place."""
    body = op.parent.operation.regions[1].blocks[0]
    while not is_argument(value):
        owner = value.owner
        if owner.name not in _UPDATES or not _used_once(value):
            return False
        value = owner.operands[ir.OpResult(value).result_number]
    return bool(value == body.arguments[index])


def _continues_chain(value: Any, op: Any) -> bool:
    """Whether the value is an update of a value with a copy of its own, in the same block.

    A chain that starts from a splat has no copy: two equal ones may be merged into one.
    """
    while not is_argument(value):
        owner = value.owner
        if owner.name not in _UPDATES or owner.operation.block != op.operation.block:
            return False
        value = owner.operands[ir.OpResult(value).result_number]
        if not is_argument(value) and _is_splat(value.owner):
            return False
        if is_argument(value) or value.owner.name not in _UPDATES:
            return True
    return False


def _is_splat(op: Any) -> bool:
    """Whether every element is the same constant: the compiler fills a fresh buffer with it."""
    if op.name == "stablehlo.constant":
        try:
            return bool(op.attributes["value"].is_splat)
        except TypeError:  # the bindings have no class for complex constants
            return False
    if op.name == "stablehlo.broadcast_in_dim" and not is_argument(op.operands[0]):
        return _is_splat(op.operands[0].owner)
    return False


def opaque_copy(value: Any, number: int) -> Any:
    """A copy of a value that the compiler cannot see through, built at the current insertion point.

    Args:
        value: a tensor of any element type.
        number: one that no other copy has.
    """
    element = ir.RankedTensorType(value.type).element_type
    if isinstance(element, ir.ComplexType):
        real, imaginary = stablehlo.real(value), stablehlo.imag(value)
        return stablehlo.complex(opaque_copy(real, number), opaque_copy(imaginary, number))
    if isinstance(element, ir.IntegerType):
        return _xor_zero(value, number)
    bits_type = ir.RankedTensorType.get(
        ir.RankedTensorType(value.type).shape, ir.IntegerType.get_signless(ir.FloatType(element).width)
    )
    bits = _xor_zero(stablehlo.bitcast_convert(bits_type, value), number)
    return stablehlo.bitcast_convert(value.type, bits)


def _xor_zero(value: Any, number: int) -> Any:
    element = ir.RankedTensorType(value.type).element_type
    word = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
    attribute = ir.DenseElementsAttr.get_splat(word, ir.IntegerAttr.get(word.element_type, number))
    constant = stablehlo.constant(attribute)
    zero = stablehlo.xor(stablehlo.optimization_barrier([constant]), constant)
    if ir.IntegerType(element).width == 1:
        unequal = stablehlo.ComparisonDirectionAttr.get("NE")
        zero = stablehlo.compare(zero, stablehlo.xor(constant, constant), unequal)
    else:
        zero = stablehlo.convert(ir.RankedTensorType.get([], element), zero)
    return stablehlo.xor(value, stablehlo.broadcast_in_dim(value.type, zero, ir.DenseI64ArrayAttr.get([])))
