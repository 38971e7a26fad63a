"""Replaces operations of a lowered module by functions written in JAX.

A lowered module holds every operation, those too that JAX makes only while it lowers, so what IREE computes wrongly is
replaced there wherever it came from. A file of replacements has one subject and registers them on import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import export
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites._inline import clone_body, inline_calls
from fixstep.frontend.rewrites._walk import operations

_DTYPES = {
    "i1": "bool",
    **{f"i{n}": f"int{n}" for n in (2, 4, 8, 16, 32, 64)},
    **{f"ui{n}": f"uint{n}" for n in (2, 4, 8, 16, 32, 64)},
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    "bf16": "bfloat16",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A function that takes the place of an operation.

    Attributes:
        function: from the operation's operands to its result, in JAX; nothing of it is replaced again.
        applies: from the dtypes of operands and result to whether the operation is one to replace.
        takes_result_dtype: whether the function is also given the dtype that its result must have.
    """

    function: Callable[..., Any]
    applies: Callable[..., bool]
    takes_result_dtype: bool


REPLACEMENTS: dict[str, list[Replacement]] = {}
"""Replacements by operation (`stablehlo.sine`), in the order of registration."""


def replacement(
    name: str, *, applies: Callable[..., bool], takes_result_dtype: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function to take the place of an operation.

    Args:
        name: the operation, `stablehlo.sine`.
        applies: called with the dtypes of the operands and then of the result.
        takes_result_dtype: give the function the dtype that its result must have, after the operands.

    Returns:
        A decorator that returns the function unchanged.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        REPLACEMENTS.setdefault(name, []).append(Replacement(function, applies, takes_result_dtype))
        return function

    return register


def all_replacements() -> list[str]:
    """Every replacement as `file.function`, sorted: the list that a test holds against the tests."""
    return sorted(
        {
            f"{entry.function.__module__.rpartition('.')[2]}.{entry.function.__name__}"
            for entries in REPLACEMENTS.values()
            for entry in entries
        }
    )


def replace_operations(module: Any) -> int:
    """Replace what the registered functions stand in for, in place.

    Returns:
        The number of operations replaced.
    """
    bodies: dict[tuple[Any, ...], Any] = {}
    count = 0
    for op in operations(module):
        entries = REPLACEMENTS.get(op.name)
        if not entries:
            continue
        dtypes = [dtype_of(value.type) for value in (*op.operands, *op.results)]
        if any(dtype is None for dtype in dtypes):  # `in` would find None equal to float64
            continue
        for entry in entries:
            if entry.applies(*dtypes):
                _replace(op, entry, dtypes, bodies)
                count += 1
                break
    return count


def dtype_of(type_: Any) -> np.dtype[Any] | None:
    """The dtype of a tensor's elements, or None if it has none that JAX and IREE share."""
    if not isinstance(type_, ir.RankedTensorType):
        return None
    name = _DTYPES.get(str(type_.element_type))
    if name is None:
        return None
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def _replace(op: Any, entry: Replacement, dtypes: list[Any], bodies: dict[tuple[Any, ...], Any]) -> None:
    shapes = [tuple(ir.RankedTensorType(value.type).shape) for value in op.operands]
    key = (
        entry.function,
        *((str(dtype), shape) for dtype, shape in zip(dtypes, shapes, strict=False)),
        str(dtypes[-1]),
    )
    if key not in bodies:
        arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
        bodies[key] = _lowered(entry, arguments, dtypes[-1], op.context)
    main = next(f for f in operations(bodies[key]) if f.name == "func.func")
    with ir.InsertionPoint(op):
        results = clone_body(main, list(op.operands), op.location)
    for old, new in zip(op.results, results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


def _lowered(entry: Replacement, arguments: list[Any], result: Any, context: Any) -> Any:
    """A module whose one function computes what takes the place of an operation."""

    def main(*operands: Any) -> Any:
        value = entry.function(*operands, result) if entry.takes_result_dtype else entry.function(*operands)
        assert value.dtype == result, f"{entry.function.__name__} gave {value.dtype} where {result} was expected"
        return value

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        exported = export.export(jax.jit(main, keep_unused=True), platforms=["cpu"])(*arguments)
    module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
    inline_calls(module)
    return module
