"""Evaluating a jaxpr in another way: equation by equation, and the inner jaxprs of loops, branches and calls.

An evaluator (the rewrites, batches that are padded, types that are carried in wider ones) says what becomes of an
equation; the order of equations and where they come from in the user's code, and what a loop or a branch is, stay here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import core, source_info_util

# `evaluate(jaxpr, consts, args) -> outputs`
Evaluate = Callable[[core.Jaxpr, Sequence[Any], Sequence[Any]], list[Any]]

CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call"),
)


def interpret(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    equation: Callable[[core.JaxprEqn, list[Any]], list[Any]],
    *,
    literal: Callable[[core.Literal], Any] = lambda atom: atom.val,
) -> list[Any]:
    """The outputs of a jaxpr, with an evaluator's results for each equation; each keeps its place in the user's code.

    Args:
        jaxpr: what is evaluated.
        consts: its constants.
        args: its inputs.
        equation: `(equation, inputs) -> results`.
        literal: the value of an operand that is written out.
    """
    values: dict[core.Var, Any] = {}

    def read(atom: core.Atom) -> Any:
        return literal(atom) if isinstance(atom, core.Literal) else values[atom]

    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        context = source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack)
        with context, eqn.ctx.manager:
            outputs = equation(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(primitive: core.Primitive, inputs: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """The results of a primitive as a list."""
    outputs = primitive.bind(*inputs, **params)
    return list(outputs) if primitive.multiple_results else [outputs]


def bind_equation(eqn: core.JaxprEqn, inputs: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """The results of an equation's primitive as a list, with parameters as a jaxpr has them."""
    return bind(eqn.primitive, inputs, eqn.primitive.get_bind_params(dict(params)))


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
