"""Control flow: `cond` becomes a select, loops and calls are entered.

Stands against IREE computing `stablehlo.case` wrongly beside other load (https://github.com/iree-org/iree/issues/24753):
17 to 74 % of the calls on local-task. Both branches are computed and the results selected, which is branch-free. A
`while` in a branch runs under the condition that its branch is taken, so that a loop that ends only where it is meant
to run makes no turn where it is not.

A `cond` whose branches have effects (callbacks) stays, and is reported as having no lowering.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax._src import core
from jax._src.ad_checkpoint import remat_p
from jax._src.custom_batching import custom_vmap_p
from jax._src.custom_derivatives import custom_jvp_call_p, custom_vjp_call_p
from jax._src.lax.control_flow.conditionals import cond_p
from jax._src.lax.control_flow.loops import scan_p, while_p
from jax._src.lax.control_flow.solves import linear_solve_p
from jax._src.pjit import jit_p

from fixstep.frontend._reapply import bind
from fixstep.frontend.rewrites._evaluate import Rewriter, structure

_BOOL = core.ShapedArray((), np.dtype(np.bool_))


@structure(jit_p)
def _jit(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    closed = params["jaxpr"]
    if taken is not None and _holds(closed.jaxpr, while_p, cond_p):
        return rewriter.evaluate(closed.jaxpr, closed.consts, inputs, taken)
    return bind(jit_p, inputs, {**params, "jaxpr": rewriter.rewrite(closed)})


@structure(core.closed_call_p, custom_jvp_call_p, custom_vjp_call_p)
def _inline(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    closed = params["call_jaxpr"]
    return rewriter.evaluate(closed.jaxpr, closed.consts, inputs, taken)


@structure(core.call_p)
def _call(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    return rewriter.evaluate(params["call_jaxpr"], (), inputs, taken)


@structure(custom_vmap_p)
def _custom_vmap(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    closed = params["call"]
    return rewriter.evaluate(closed.jaxpr, closed.consts, inputs, taken)


@structure(linear_solve_p)
def _linear_solve(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    lengths = params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    right_hand_sides = inputs[sum(lengths) :]
    closed = params["jaxprs"].solve
    arguments = [*inputs[first : first + lengths.solve], *right_hand_sides]
    return rewriter.evaluate(closed.jaxpr, closed.consts, arguments, taken)


@structure(remat_p)
def _remat(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    if taken is not None and _holds(params["jaxpr"], while_p, cond_p):
        return rewriter.evaluate(params["jaxpr"], (), inputs, taken)
    jaxpr, consts = rewriter.rewrite_open(params["jaxpr"])
    return bind(remat_p, [*consts, *inputs], {**params, "jaxpr": jaxpr})


@structure(scan_p)
def _scan(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    closed = params["jaxpr"]
    if taken is None or not _holds(closed.jaxpr, while_p, cond_p):
        return bind(scan_p, inputs, {**params, "jaxpr": rewriter.rewrite(closed)})

    def body(taken: Any, *args: Any) -> list[Any]:
        return rewriter.evaluate(closed.jaxpr, closed.consts, args, taken)

    guarded = rewriter.trace(body, [_BOOL, *closed.in_avals], _unnamed(closed.jaxpr.debug_info))
    return bind(scan_p, [taken, *inputs], {**params, "jaxpr": guarded, "num_consts": params["num_consts"] + 1})


@structure(while_p)
def _while(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    # The body runs only where the condition held, so nothing in it needs the guard once the condition has it.
    params["body_jaxpr"] = rewriter.rewrite(params["body_jaxpr"])
    condition = params["cond_jaxpr"]
    if taken is None:
        return bind(while_p, inputs, {**params, "cond_jaxpr": rewriter.rewrite(condition)})

    def guarded(taken: Any, *args: Any) -> list[Any]:
        (holds,) = rewriter.evaluate(condition.jaxpr, condition.consts, args, taken)
        return [lax.bitwise_and(lax.broadcast(taken, np.shape(holds)), holds)]

    params["cond_jaxpr"] = rewriter.trace(guarded, [_BOOL, *condition.in_avals], _unnamed(condition.jaxpr.debug_info))
    return bind(while_p, [taken, *inputs], {**params, "cond_nconsts": params["cond_nconsts"] + 1})


@structure(cond_p)
def _cond(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    index, *operands = inputs
    branches: Sequence[core.ClosedJaxpr] = params["branches"]
    if any(branch.effects for branch in branches):
        return bind(cond_p, inputs, {**params, "branches": tuple(rewriter.rewrite(branch) for branch in branches)})
    if len(branches) == 1:
        return rewriter.evaluate(branches[0].jaxpr, branches[0].consts, operands, taken)
    index = lax.convert_element_type(index, np.dtype(np.int32))
    index = lax.clamp(np.int32(0), index, np.int32(len(branches) - 1))
    results = []
    for number, branch in enumerate(branches):
        chosen = lax.eq(index, np.int32(number))
        runs = chosen if taken is None else lax.bitwise_and(taken, chosen)
        results.append(rewriter.evaluate(branch.jaxpr, branch.consts, operands, runs))
    which = lax.ne(index, np.int32(0)) if len(branches) == 2 else index
    return [_select(which, cases) for cases in zip(*results, strict=True)]


def _select(which: Any, cases: Sequence[Any]) -> Any:
    """The case of the branch taken; a value that all branches pass through needs no select."""
    if all(case is cases[0] for case in cases):
        return cases[0]
    return lax.select_n(which, *cases)


def _holds(jaxpr: core.Jaxpr, *primitives: core.Primitive) -> bool:
    """Whether one of the primitives occurs in a jaxpr or in one nested in it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive in primitives:
            return True
        if any(_holds(inner, *primitives) for inner in core.jaxprs_in_params(eqn.params)):
            return True
    return False


def _unnamed(debug_info: Any) -> Any:
    """Debug information without argument names, for a jaxpr that takes one argument more."""
    return debug_info._replace(arg_names=None, result_paths=None)
