"""Primitives that hold jaxprs: each inner one is evaluated on padded arrays too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fixstep.frontend import _reapply
from fixstep.frontend.sizes._mask import Masker, is_symbolic, rule


@rule(*_reapply.CALLS, "cond", "while")
def structure(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """A call, a choice or a loop; what its condition asks of the whole batch is masked inside."""
    return _reapply.STRUCTURES[eqn.primitive.name](masker.evaluate, eqn, operands)


@rule("scan")
def scan(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """A scan; one over the examples keeps its carry in the rounds that are padding."""
    length = eqn.params["length"]
    if not is_symbolic(length):
        return _reapply.scan(masker.evaluate, eqn, operands)
    closed = eqn.params["jaxpr"]
    consts_end = eqn.params["num_consts"]
    carry_end = consts_end + eqn.params["num_carry"]
    consts, carry, xs = operands[:consts_end], operands[consts_end:carry_end], operands[carry_end:]
    reverse, rounds = eqn.params["reverse"], masker.concrete(length)

    def body(carried: tuple[Any, list[Any]], x: list[Any]) -> tuple[Any, Any]:
        round_, before = carried
        outputs = masker.evaluate(closed.jaxpr, closed.consts, [*consts, *before, *x])
        real = round_ < masker.extent(length)
        after = [jnp.where(real, new, old) for new, old in zip(outputs, before, strict=False)]
        return (round_ + (-1 if reverse else 1), after), outputs[len(before) :]

    first = jnp.asarray(rounds - 1 if reverse else 0, np.int32)
    (_, last), ys = jax.lax.scan(
        body, (first, list(carry)), list(xs), length=rounds, reverse=reverse, unroll=eqn.params["unroll"]
    )
    return [*last, *ys]
