"""Hides constants from the compiler where a reduction would fold them.

Stands against IREE reducing an array made of constants to one element of it instead of their sum:
`(-jnp.ones(16)).sum() * s` gave `-s`. An optimization barrier on the operand keeps the reduction.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites._walk import constant_values, element_count, operations

_REDUCTIONS = ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.dot_general", "stablehlo.convolution")


def hide_constants(module: Any) -> int:
    """Put a barrier before each operand of a reduction that depends on no argument, in place.

    Returns:
        The number of barriers made.
    """
    constants = constant_values(module)
    count = 0
    for op in operations(module):
        if op.name not in _REDUCTIONS:
            continue
        reduced = len(op.operands) // 2 if "reduce" in op.name else len(op.operands)
        for index in range(reduced):
            value = op.operands[index]
            if element_count(value.type) > 1 and value in constants:
                with ir.InsertionPoint(op), op.location:
                    op.operands[index] = stablehlo.optimization_barrier([value])
                count += 1
    return count
