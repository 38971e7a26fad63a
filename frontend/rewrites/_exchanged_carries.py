"""Copies a carry that a loop hands on in another carry's place.

Stands against a fault of IREE 3.13: where a turn of a loop only moves buffers among its carries in a circle, as in
`a, b = b, a`, the branch back to the loop's head loses one of them, and the call fails with "indirect buffer reference
slot 0 is out range". A copy is a buffer of its own, so that nothing is left to exchange.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from fixstep.frontend.rewrites._copies import opaque_copy
from fixstep.frontend.rewrites._walk import is_argument, operations, terminator

_SAME_BUFFER = ("stablehlo.reshape", "stablehlo.bitcast_convert", "stablehlo.optimization_barrier")


def guard_exchanged_carries(module: Any, number: int) -> None:
    """Copy each carry that a turn hands on under another number.

    Args:
        module: the module.
        number: copies made before; each copy has a number of its own.
    """
    for loop in operations(module):
        if loop.name != "stablehlo.while":
            continue
        handed_on = terminator(loop.regions[1])
        arguments = loop.regions[1].blocks[0].arguments
        for index, value in enumerate(handed_on.operands):
            source = _source(value)
            if source in list(arguments) and source != arguments[index]:
                number += 1
                with ir.InsertionPoint(handed_on), handed_on.location:
                    handed_on.operands[index] = opaque_copy(value, number)


def _source(value: Any) -> Any:
    """Where a value comes from, through operations that may leave it in the same buffer."""
    while not is_argument(value):
        owner, number = value.owner, ir.OpResult(value).result_number
        if owner.name == "stablehlo.while":
            # A carry that the inner loop never changes is the value that entered it.
            if _source(terminator(owner.regions[1]).operands[number]) != owner.regions[1].blocks[0].arguments[number]:
                return value
        elif owner.name not in _SAME_BUFFER:
            return value
        value = owner.operands[number]
    return value
