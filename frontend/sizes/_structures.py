"""Primitives that hold jaxprs: each inner one is evaluated on padded arrays too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core

from fixstep.frontend.sizes._mask import Masker, Unmaskable, is_symbolic, rule


@rule("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
def call(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """A function call: its body in its place. Derivatives were taken before."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            jaxpr, consts = _opened(eqn.params[name])
            return masker.evaluate(jaxpr, consts, operands)
    raise Unmaskable("its function is not found")


def _opened(jaxpr: Any) -> tuple[core.Jaxpr, list[Any]]:
    return (jaxpr.jaxpr, list(jaxpr.consts)) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, [])


@rule("cond")
def cond(masker: Masker, eqn: Any, index: Any, *operands: Any) -> Any:
    """A choice between branches."""

    def branch(closed: core.ClosedJaxpr) -> Any:
        return lambda *args: masker.evaluate(closed.jaxpr, closed.consts, args)

    return jax.lax.switch(index, [branch(closed) for closed in eqn.params["branches"]], *operands)


@rule("while")
def while_loop(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """A loop; what its condition asks of the whole batch is masked inside."""
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts, carry = operands[:first], operands[first : first + second], operands[first + second :]
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    return jax.lax.while_loop(
        lambda c: masker.evaluate(test.jaxpr, test.consts, [*cond_consts, *c])[0],
        lambda c: masker.evaluate(body.jaxpr, body.consts, [*body_consts, *c]),
        list(carry),
    )


@rule("scan")
def scan(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """A scan; one over the examples keeps its carry in the rounds that are padding."""
    closed, length = eqn.params["jaxpr"], eqn.params["length"]
    consts_end = eqn.params["num_consts"]
    carry_end = consts_end + eqn.params["num_carry"]
    consts, carry, xs = operands[:consts_end], operands[consts_end:carry_end], operands[carry_end:]

    def body(carried: tuple[Any, list[Any]], x: list[Any]) -> tuple[Any, Any]:
        round_, before = carried
        outputs = masker.evaluate(closed.jaxpr, closed.consts, [*consts, *before, *x])
        after, ys = outputs[: len(before)], outputs[len(before) :]
        if is_symbolic(length):
            real = round_ < masker.extent(length)
            after = [jnp.where(real, new, old) for new, old in zip(after, before, strict=True)]
        return (round_ + (-1 if eqn.params["reverse"] else 1), after), ys

    rounds = masker.concrete(length)
    first = np.int32(rounds - 1 if eqn.params["reverse"] else 0)
    (_, last), ys = jax.lax.scan(
        body,
        (jnp.asarray(first), list(carry)),
        list(xs),
        length=rounds,
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*last, *ys]
