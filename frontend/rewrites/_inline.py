"""Puts the bodies of private functions in the place of their calls, so that the passes after it see whole functions.

JAX lowers each `jit` within a step, and the slices that a scan takes and updates, as calls. Whether an update may
happen in place can only be told where the value comes from. IREE inlines the same calls later.
"""

from __future__ import annotations

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
    for op in operations(functions[name]):
        if op.name == "func.call":
            inner = str(callee(op))
            _inline_into(inner, functions, done)
            _expand(op, functions[inner])
        elif callee(op) is not None:
            _inline_into(str(callee(op)), functions, done)


def _expand(call: Any, function: Any) -> None:
    block = function.regions[0].blocks[0]
    values = dict(zip(block.arguments, call.operands, strict=True))
    body = [op.operation for op in block.operations]
    with ir.InsertionPoint(call):
        for op in body[:-1]:
            new = op.clone().operation
            for inner in operations(new):
                for index, operand in enumerate(inner.operands):
                    if operand in values:
                        inner.operands[index] = values[operand]
                inner.location = ir.Location.callsite(inner.location, [call.location])
            values.update(zip(op.results, new.results, strict=True))
    returned = [values.get(value, value) for value in terminator(function.regions[0]).operands]
    for result, value in zip(call.results, returned, strict=True):
        result.replace_all_uses_with(value)
    call.erase()
