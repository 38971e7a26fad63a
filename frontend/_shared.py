"""Large constants that several functions of a module hold, once: each becomes a function that they call.

A program of any size has a copy of each function for every size that is compiled. The compiler finds equal constants,
but the text that travels along would hold each of them many times, at two digits a byte.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from fixstep.frontend.rewrites import _walk as walk

# Below this many elements a constant is shorter than the call.
_LEAST_ELEMENTS = 256


def share_constants(module: Any) -> None:
    """Replace the constants that occur more than once in a module by calls of private functions that return them."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for op in walk.operations(module):
        if op.name == "stablehlo.constant" and _elements(op.attributes["value"]) >= _LEAST_ELEMENTS:
            found[op.attributes["value"]].append(op)
    for number, (value, constants) in enumerate(found.items()):
        if len(constants) > 1:
            _share(module, f"shared_constant_{number}", value, constants)


def _elements(value: Any) -> int:
    if not isinstance(value, ir.DenseElementsAttr) or value.is_splat:
        return 0
    return len(value)


def _share(module: Any, name: str, value: Any, constants: list[Any]) -> None:
    type_ = constants[0].results[0].type
    with ir.InsertionPoint(module.body), constants[0].location:
        function = func.FuncOp(name, ([], [type_]), visibility="private")
        with ir.InsertionPoint(function.add_entry_block()):
            func.ReturnOp([constants[0].clone().results[0]])
    for op in constants:
        with ir.InsertionPoint(op), op.location:
            call = func.CallOp([type_], ir.FlatSymbolRefAttr.get(name), [])
        op.results[0].replace_all_uses_with(call.results[0])
        op.erase()
