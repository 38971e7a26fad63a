"""Traces a function and evaluates the jaxpr again with the rules applied, in every nested jaxpr.

Where no rule applies the same primitive is bound with the same parameters, so JAX's numbers stay. Each equation keeps
the user's source location, which is what a message about an operation without a lowering shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.linear_util
import numpy as np
from jax._src import core
from jax._src.interpreters import partial_eval
from jax._src.lax import lax as lax_internal

from fixstep.frontend._reapply import bind_equation, interpret
from fixstep.frontend.rewrites._rules import apply_rules

Structure = Callable[..., list[Any]]
STRUCTURES: dict[core.Primitive, Structure] = {}
"""How to evaluate the primitives that hold jaxprs: `structure(rewriter, inputs, taken, params) -> outputs`."""


def structure(*primitives: core.Primitive) -> Callable[[Structure], Structure]:
    """Register how primitives that hold jaxprs are evaluated."""

    def register(function: Structure) -> Structure:
        for primitive in primitives:
            STRUCTURES[primitive] = function
        return function

    return register


def rewrite_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function with every rule applied, to be traced by `jax.jit` or `jax.export`.

    It is meant as the last transformation: differentiate and batch first. Custom derivatives are gone from the result.

    Args:
        fn: a function of pytrees of arrays that returns a pytree of arrays.

    Returns:
        A function with the same signature, name and result types.
    """

    @functools.wraps(fn)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        outputs = Rewriter().evaluate(closed.jaxpr, closed.consts, jax.tree.leaves((args, kwargs)), None)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return rewritten


class Rewriter:
    """Evaluates jaxprs with the rules applied.

    `taken` is the condition under which the code runs at all: a traced bool where it came from the branch of a `cond`
    that became a select (_control.py), None elsewhere.
    """

    def __init__(self) -> None:
        # Keyed by identity; the value keeps the original alive, so that the identity stays its own. JAX lowers a
        # jaxpr that occurs twice only once, which needs the rewritten ones to be the same object too.
        self._rewritten: dict[int, tuple[core.ClosedJaxpr, core.ClosedJaxpr]] = {}

    def evaluate(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], taken: Any | None) -> list[Any]:
        """The outputs of a jaxpr for given inputs."""
        return interpret(jaxpr, consts, args, lambda eqn, inputs: self._equation(eqn, inputs, taken))

    def rewrite(self, closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
        """The jaxpr with the rules applied and the same inputs and outputs."""
        known = self._rewritten.get(id(closed))
        if known is not None:
            return known[1]

        def run(*args: Any) -> list[Any]:
            return self.evaluate(closed.jaxpr, closed.consts, args, None)

        new = self.trace(run, closed.in_avals, closed.jaxpr.debug_info)
        self._rewritten[id(closed)] = (closed, new)
        return new

    def rewrite_open(self, jaxpr: core.Jaxpr) -> tuple[core.Jaxpr, list[Any]]:
        """A jaxpr without constants, rewritten: with the constants of the new one as its first inputs."""
        new = self.rewrite(core.ClosedJaxpr(jaxpr, ()))
        return partial_eval.convert_constvars_jaxpr(new.jaxpr), list(new.consts)

    def trace(self, function: Callable[..., list[Any]], in_avals: Sequence[Any], debug_info: Any) -> core.ClosedJaxpr:
        """A jaxpr of a function of flat arguments."""
        wrapped = jax.extend.linear_util.wrap_init(function, debug_info=debug_info)
        jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, list(in_avals))
        return core.ClosedJaxpr(jaxpr, consts)

    def expand(self, function: Callable[..., Any], *args: Any, taken: Any | None = None) -> list[Any]:
        """The outputs of a function that is itself written in primitives to be rewritten."""
        closed = jax.make_jaxpr(function)(*args)
        return self.evaluate(closed.jaxpr, closed.consts, args, taken)

    def _equation(self, eqn: core.JaxprEqn, inputs: list[Any], taken: Any | None) -> list[Any]:
        handler = STRUCTURES.get(eqn.primitive)
        if handler is not None and not _has_references(eqn):
            return handler(self, inputs, taken, dict(eqn.params))
        with jax.enable_x64(_is_64_bit(eqn) or jax.config.jax_enable_x64):
            operands = [_operand(value, atom.aval) for value, atom in zip(inputs, eqn.invars, strict=True)]
            outputs = apply_rules(eqn.primitive, operands, eqn.params)
            if outputs is not None:
                return [_as_declared(out, var.aval) for out, var in zip(outputs, eqn.outvars, strict=True)]
        return bind_equation(eqn, inputs, eqn.params)


def _has_references(eqn: core.JaxprEqn) -> bool:
    """Whether mutable references pass through the equation; those equations stay as they are."""
    return any("Ref" in type(atom.aval).__name__ for atom in (*eqn.invars, *eqn.outvars))


def _is_64_bit(eqn: core.JaxprEqn) -> bool:
    dtypes = [getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars)]
    return any(isinstance(t, np.dtype) and t.name in ("int64", "uint64", "float64", "complex128") for t in dtypes)


def _operand(value: Any, aval: Any) -> Any:
    """A literal as an array of its type, everything else as it is."""
    if isinstance(value, jax.Array) or not isinstance(getattr(aval, "dtype", None), np.dtype):
        return value
    return np.asarray(value, dtype=aval.dtype)


def _as_declared(value: Any, aval: Any) -> Any:
    """A rule's result, checked to have the type of the equation's, weak type included."""
    got = core.typeof(value)
    if got.shape != aval.shape or got.dtype != aval.dtype:
        raise AssertionError(f"a rewrite rule returned {got.str_short()} where {aval.str_short()} was expected")
    if getattr(got, "weak_type", False) != getattr(aval, "weak_type", False):
        return lax_internal._convert_element_type(value, aval.dtype, weak_type=aval.weak_type)
    return value
