"""Strips what a module carries for XLA alone: donation, sharding and the names of results.

Stands against IREE writing donated arguments in place without checking that they are dead, which trains wrongly
(adam on a small network is 2e-3 off after one step), and against sharding operations that IREE does not lower.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from fixstep.frontend.rewrites._walk import operations

_ARGUMENT = ("tf.aliasing_output", "jax.buffer_donor", "mhlo.sharding", "sdy.sharding")
_RESULT = ("jax.result_info", "mhlo.sharding", "sdy.sharding")
_MODULE = ("mhlo.num_partitions", "mhlo.num_replicas", "mhlo.frontend_attributes", "jax.uses_shape_polymorphism")
_IDENTITY_CALLS = (
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "LayoutConstraint",
    "annotate_device_placement",
)


def clean(module: Any) -> None:
    """Strip donation, sharding and result names from a module, in place."""
    for name in _MODULE:
        if name in module.operation.attributes:
            del module.operation.attributes[name]
    for op in operations(module):
        if op.name == "func.func":
            _strip_lists(op)
        elif op.name.startswith("sdy.") or _is_sharding_call(op):
            _forward(op)
        else:
            for name in [a for a in _names(op) if a.startswith("sdy.") or a in ("mhlo.sharding",)]:
                del op.attributes[name]


def _names(op: Any) -> list[str]:
    return [item if isinstance(item, str) else item.name for item in op.attributes]


def _strip_lists(function: Any) -> None:
    """Drop attributes of a function's arguments and results."""
    for lists, dropped in (("arg_attrs", _ARGUMENT), ("res_attrs", _RESULT)):
        if lists not in function.attributes:
            continue
        kept = []
        for entry in ir.ArrayAttr(function.attributes[lists]):
            attributes = ir.DictAttr(entry)
            kept.append(
                ir.DictAttr.get(
                    {item.name: item.attr for item in attributes if item.name not in dropped},
                    context=function.context,
                )
            )
        function.attributes[lists] = ir.ArrayAttr.get(kept, context=function.context)


def _is_sharding_call(op: Any) -> bool:
    if op.name != "stablehlo.custom_call":
        return False
    return ir.StringAttr(op.attributes["call_target_name"]).value in _IDENTITY_CALLS


def _forward(op: Any) -> None:
    """Replace an operation that returns its operand by that operand; one without results goes."""
    if len(op.results) == 0:
        op.erase()
    elif len(op.operands) == len(op.results) and all(
        operand.type == result.type for operand, result in zip(op.operands, op.results, strict=True)
    ):
        for operand, result in zip(op.operands, op.results, strict=True):
            result.replace_all_uses_with(operand)
        op.erase()
