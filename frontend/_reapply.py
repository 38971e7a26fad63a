"""Primitives that hold jaxprs, bound again with inner jaxprs that are evaluated another way.

An evaluator of jaxprs (batches that are padded, types that are carried in wider ones) gives its own way to evaluate an
inner jaxpr; what a loop or a branch is stays here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core

# `evaluate(jaxpr, consts, args) -> outputs`
Evaluate = Callable[[core.Jaxpr, Sequence[Any], Sequence[Any]], list[Any]]

CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call"),
)


def call(evaluate: Evaluate, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """A function call: its body in its place. Derivatives were taken before."""
    found = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params)
    if isinstance(found, core.ClosedJaxpr):
        return evaluate(found.jaxpr, found.consts, operands)
    return evaluate(found, (), operands)


def cond(evaluate: Evaluate, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """A choice between branches."""

    def branch(closed: core.ClosedJaxpr) -> Callable[..., list[Any]]:
        return lambda *args: evaluate(closed.jaxpr, closed.consts, args)

    index, *rest = operands
    return list(jax.lax.switch(index, [branch(closed) for closed in eqn.params["branches"]], *rest))


def while_loop(evaluate: Evaluate, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """A loop until a condition fails."""
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts, carry = operands[:first], operands[first : first + second], operands[first + second :]
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    return list(
        jax.lax.while_loop(
            lambda c: evaluate(test.jaxpr, test.consts, [*cond_consts, *c])[0],
            lambda c: evaluate(body.jaxpr, body.consts, [*body_consts, *c]),
            list(carry),
        )
    )


def scan(evaluate: Evaluate, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """A loop over the first axis of arrays."""
    closed, params = eqn.params["jaxpr"], eqn.params
    consts_end = params["num_consts"]
    carry_end = consts_end + params["num_carry"]
    consts, carry, xs = operands[:consts_end], operands[consts_end:carry_end], operands[carry_end:]

    def body(before: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = evaluate(closed.jaxpr, closed.consts, [*consts, *before, *x])
        return outputs[: len(before)], outputs[len(before) :]

    last, ys = jax.lax.scan(
        body, list(carry), list(xs), length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*last, *ys]


STRUCTURES: dict[str, Callable[[Evaluate, Any, Sequence[Any]], list[Any]]] = {
    **dict.fromkeys(CALLS, call),
    "cond": cond,
    "while": while_loop,
    "scan": scan,
}
