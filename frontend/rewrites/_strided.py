"""Slices with a step are copied before something reads them by index.

Stands against IREE not compiling a reversal or a gather of every second element for CPUs with vectors (`x[:, ::-2]`,
the transform behind `dct`, a convolution): it reads the elements where they lie, which its vectors cannot. A barrier
behind the slice makes a copy of it.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites._walk import operations

_BY_INDEX = ("stablehlo.reverse", "stablehlo.gather")
# Operations that the compiler turns into another view of the same memory.
_VIEWS = ("stablehlo.transpose", "stablehlo.slice", "stablehlo.reshape", "stablehlo.broadcast_in_dim")


def copy_strided_slices(module: Any) -> int:
    """Put a barrier behind each slice with a step along its last dimension that is read by index, in place.

    Returns:
        The number of barriers made.
    """
    count = 0
    for op in operations(module):
        if op.name != "stablehlo.slice" or not _steps(op) or not _is_read_by_index(op.results[0]):
            continue
        with ir.InsertionPoint.after(op), op.location:
            copied = stablehlo.optimization_barrier([op.results[0]])
        op.results[0].replace_all_uses_except(copied, copied.owner.operation)
        count += 1
    return count


def _steps(slice_: Any) -> bool:
    strides = list(ir.DenseI64ArrayAttr(slice_.attributes["strides"]))
    return bool(strides) and strides[-1] != 1


def _is_read_by_index(value: Any) -> bool:
    users = [use.owner for use in value.uses]
    return any(op.name in _BY_INDEX or (op.name in _VIEWS and _is_read_by_index(op.results[0])) for op in users)
