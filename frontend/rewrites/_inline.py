"""Puts the bodies of private functions in the place of their calls, so that the passes after it see whole functions.

JAX lowers each `jit` within a step, and the slices that a scan takes and updates, as calls. Whether an update may
happen in place can only be told where the value comes from. IREE inlines the same calls later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir, passmanager

from fixstep.frontend.rewrites._walk import callee, is_public, operations, symbol, terminator


def inline_calls(module: Any) -> None:
    """Replace every call of a private function by its body, merge equal operations and drop unused functions."""
    functions = {symbol(op): op for op in operations(module) if op.name == "func.func"}
    done: set[str] = set()
    for name in functions:
        _inline_into(name, functions, done)
    entered = {callee(op) for op in operations(module)}
    for name, function in functions.items():
        if not is_public(function) and name not in entered:
            function.erase()
    passmanager.PassManager.parse("builtin.module(cse)").run(module.operation)


def _inline_into(name: str, functions: dict[str, Any], done: set[str]) -> None:
    """Inline all calls within a function, the functions that it calls first."""
    if name in done:
        return
    done.add(name)
    for call in operations(functions[name]):
        inner = callee(call)
        if inner is None or _is_kept(call):
            continue
        _inline_into(inner, functions, done)
        with ir.InsertionPoint(call):
            results = clone_body(functions[inner], list(call.operands), call.location)
        for old, new in zip(call.results, results, strict=True):
            old.replace_all_uses_with(new)
        call.erase()


def _is_kept(op: Any) -> bool:
    """Whether IREE has an implementation of its own of a composite, better than the decomposition."""
    return op.name == "stablehlo.composite" and str(ir.StringAttr(op.attributes["name"]).value) == "chlo.top_k"


def clone_body(function: Any, arguments: Sequence[Any], location: Any) -> list[Any]:
    """The body of a function, copied to the current insertion point.

    Args:
        function: a function of one block.
        arguments: what its arguments become.
        location: where it is called from; each operation keeps its own location within.

    Returns:
        The values that the function returns.
    """
    block = function.regions[0].blocks[0]
    values = dict(zip(block.arguments, arguments, strict=True))
    body = [op.operation for op in block.operations]
    for op in body[:-1]:
        new = op.clone().operation
        for inner in operations(new):
            for index, operand in enumerate(inner.operands):
                if operand in values:
                    inner.operands[index] = values[operand]
            inner.location = ir.Location.callsite(inner.location, [location])
        values.update(zip(op.results, new.results, strict=True))
    return [values.get(value, value) for value in terminator(function.regions[0]).operands]
