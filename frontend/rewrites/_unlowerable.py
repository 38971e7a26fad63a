"""Names the operations for which IREE 3.13 has no lowering, and the user's line that each came from."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from fixstep.frontend._locations import user_line
from fixstep.frontend.rewrites._walk import callers, enclosing_function, operations, symbol

_COLLECTIVE = "a collective of several devices; a step runs on one"
_CALLBACK = "a callback into Python, which is absent when the artifact runs"
_LINEAR_ALGEBRA = "linear algebra that JAX computes in a library"
_DYNAMIC = "an array whose shape is known only at run time"

_REASONS = {
    **{
        f"stablehlo.{name}": _COLLECTIVE
        for name in (
            "all_gather", "all_reduce", "all_to_all", "collective_broadcast", "collective_permute", "cross-replica-sum",
            "partition_id", "recv", "reduce_scatter", "replica_id", "send"
        )
    },
    **{
        f"stablehlo.{name}": _DYNAMIC
        for name in (
            "dynamic_broadcast_in_dim", "dynamic_conv", "dynamic_gather", "dynamic_iota", "dynamic_pad",
            "dynamic_reshape", "real_dynamic_slice", "get_dimension_size", "set_dimension_size"
        )
    },
    "stablehlo.cholesky": _LINEAR_ALGEBRA,
    "stablehlo.triangular_solve": _LINEAR_ALGEBRA,
    "stablehlo.infeed": _CALLBACK,
    "stablehlo.outfeed": _CALLBACK,
    "stablehlo.case": "a conditional whose branches have effects",
    "stablehlo.select_and_scatter": "the gradient of a pooling window",
    "stablehlo.rng": "a random number generator of the device; use jax.random",
}  # fmt: skip

_CALL_REASONS = {
    "lapack": _LINEAR_ALGEBRA,
    "callback": _CALLBACK,
    "ducc_fft": "a Fourier transform that JAX computes in a library",
}


def unlowerable_operations(module: Any) -> list[tuple[str, str, str]]:
    """The operations that the compiler is known to refuse.

    Args:
        module: a `jaxlib.mlir.ir.Module`, before or after `rewrite_module`, with its locations.

    Returns:
        For each, in the module's order and each once: its name (`custom_call lapack_spotrf_ffi`, `all_reduce`), the
        user's `file:line`, or "" where that is unknown, and why it has no lowering.
    """
    found: dict[tuple[str, str, str], None] = {}
    with module.context:
        reached_by = callers(module)
        for op in operations(module):
            refused = _refused(op)
            if refused is not None:
                name, why = refused
                found[name, line_of(op, reached_by), why] = None
    return list(found)


def _refused(op: Any) -> tuple[str, str] | None:
    """The name of an operation and the reason, if it has no lowering."""
    name = op.name.removeprefix("stablehlo.")
    if op.name == "stablehlo.custom_call":
        target = str(ir.StringAttr(op.attributes["call_target_name"]).value)
        reasons = [why for part, why in _CALL_REASONS.items() if part in target]
        return f"{name} {target}", reasons[0] if reasons else "a call into a library that is part of JAX"
    if op.name == "stablehlo.fft":
        why = _fft_reason(op)
        return None if why is None else (name, why)
    if op.name in _REASONS:
        return name, _REASONS[op.name]
    return None


def _fft_reason(op: Any) -> str | None:
    lengths = [int(n) for n in ir.DenseI64ArrayAttr(op.attributes["fft_length"])]
    if len(lengths) != 1:
        return "a Fourier transform over more than one axis"
    if lengths[0] & (lengths[0] - 1):
        return f"a Fourier transform of length {lengths[0]}, which is no power of two"
    return None


def line_of(op: Any, reached_by: dict[str, list[Any]] | None = None) -> str:
    """The user's line that an operation came from, as `file:line`, or "".

    An operation whose own location names no file has that of the call that it is reached by.
    """
    calls = [] if reached_by is None else _calls_of(op, reached_by, set())
    return next((line for each in (op, *calls) if (line := user_line(each.location))), "")


def _calls_of(op: Any, reached_by: dict[str, list[Any]], seen: set[str]) -> list[Any]:
    """The calls by which the function of an operation is reached, nearest first."""
    name = symbol(enclosing_function(op))
    if name in seen:
        return []
    seen.add(name)
    direct = reached_by.get(name, [])
    return [*direct, *(outer for call in direct for outer in _calls_of(call, reached_by, seen))]
