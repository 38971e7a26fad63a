"""Clamps the start indices of a gather.

Stands against IREE reading memory outside of the operand for an index out of range
(https://github.com/iree-org/iree/issues/24881). StableHLO clamps such an index, as XLA does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites._replace import dtype_of
from fixstep.frontend.rewrites._walk import operations


def clamp_gathers(module: Any) -> int:
    """Clamp the start indices of every gather of a module, in place.

    Returns:
        The number of gathers.
    """
    count = 0
    for op in operations(module):
        if op.name == "stablehlo.gather":
            with ir.InsertionPoint(op), op.location:
                op.operands[1] = _clamped(op)
            count += 1
    return count


def _clamped(op: Any) -> Any:
    operand_shape = ir.RankedTensorType(op.operands[0].type).shape
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    slice_sizes = ir.DenseI64ArrayAttr(op.attributes["slice_sizes"])
    indices = op.operands[1]
    dtype = dtype_of(indices.type)
    assert dtype is not None
    last = [
        min(operand_shape[dimension] - slice_sizes[dimension], np.iinfo(dtype).max)
        for dimension in numbers.start_index_map
    ]
    if not last:
        return indices
    shape = ir.RankedTensorType(indices.type).shape
    vector_dimension = numbers.index_vector_dim
    # The dimension of the index vectors may be left out where they have one component.
    broadcast = [vector_dimension] if vector_dimension < len(shape) else []
    limits = np.array(last if broadcast else last[0], dtype)
    high = _constant(limits, indices.type, broadcast)
    low = _constant(np.zeros((), dtype), indices.type, [])
    return stablehlo.maximum(stablehlo.minimum(indices, high), low)


def _constant(value: np.ndarray[Any, Any], type_: Any, dimensions: list[int]) -> Any:
    element = ir.RankedTensorType(type_).element_type
    own_type = ir.RankedTensorType.get(list(value.shape), element)
    numbers = [ir.IntegerAttr.get(element, int(n)) for n in value.reshape(-1)]
    attribute = ir.DenseElementsAttr.get(numbers, own_type)
    return stablehlo.broadcast_in_dim(type_, stablehlo.constant(attribute), ir.DenseI64ArrayAttr.get(dimensions))
