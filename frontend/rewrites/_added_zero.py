"""Leaves out an added zero, as XLA does.

Stands against a difference in the sign of zero: `0 * x + 0` is -0 in JAX for a negative x, because XLA takes `v + 0`
for `v`, and +0 in IREE, which follows IEEE 754 there. `1 / (0 * x + 0)` then has the other sign.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from fixstep.frontend.rewrites._walk import is_argument, operations


def drop_added_zeros(module: Any) -> None:
    """Put the other operand in the place of each floating-point addition of a constant zero."""
    for op in operations(module):
        if op.name != "stablehlo.add" or not _is_float(op.operands[0]):
            continue
        first, second = op.operands
        if _is_zero(second):
            op.results[0].replace_all_uses_with(first)
            op.erase()
        elif _is_zero(first):
            op.results[0].replace_all_uses_with(second)
            op.erase()


def _is_float(value: Any) -> bool:
    return isinstance(ir.RankedTensorType(value.type).element_type, ir.FloatType)


def _is_zero(value: Any) -> bool:
    """Whether every element is the constant +0 or -0."""
    if is_argument(value):
        return False
    owner = value.owner
    if owner.name == "stablehlo.broadcast_in_dim":
        return _is_zero(owner.operands[0])
    if owner.name != "stablehlo.constant":
        return False
    elements = ir.DenseElementsAttr(owner.attributes["value"])
    return bool(elements.is_splat) and ir.FloatAttr(elements.get_splat_value()).value == 0.0
