"""Has every result of a sort used.

Stands against IREE's compiler for GPUs ending with a signal on a sort whose keys nothing reads (`argsort`): it takes
the keys for read-only, sorts a copy of them in memory that a workgroup shares, and cannot make that copy.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites._walk import operations


def use_sorted_keys(module: Any) -> int:
    """Put a barrier behind every sort with a result that nothing reads, in place.

    Returns:
        The number of sorts.
    """
    count = 0
    for op in operations(module):
        if op.name != "stablehlo.sort" or all(list(result.uses) for result in op.results):
            continue
        uses = [
            (use.owner, use.operand_number, index) for index, result in enumerate(op.results) for use in result.uses
        ]
        with ir.InsertionPoint.after(op), op.location:
            kept = stablehlo.OptimizationBarrierOp(list(op.results)).results
        for owner, number, index in uses:
            owner.operation.operands[number] = kept[index]
        count += 1
    return count
