"""Gives each carry of a loop a buffer of its own.

Stands against a fault of IREE 3.13: values that enter a loop together may lie in one allocation, which the branch to
the loop's head then names several times. Where it also has to reorder them, one reference is lost, and the call fails
with "indirect buffer reference slot 0 is out range". Behind a barrier of its own each value is a reference of its own.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites._walk import operations


def separate_carries(module: Any) -> None:
    """Put a barrier before each carry that enters a loop.

    Not before what a turn hands on: there it would cost a copy of each array that the turn updates in place. Scalars
    stay, because the compiler keeps counters on the host, which a barrier would prevent.
    """
    for loop in operations(module):
        if loop.name != "stablehlo.while":
            continue
        for index, value in enumerate(loop.operands):
            if ir.RankedTensorType(value.type).rank:
                with ir.InsertionPoint(loop), loop.location:
                    loop.operands[index] = stablehlo.optimization_barrier([value])
