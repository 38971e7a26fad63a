"""A function of narrow types, evaluated with each of their values carried in a wider type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import core

from fixstep.frontend import _reapply
from fixstep.frontend._lines import Line, line_of_equation
from fixstep.frontend._reapply import bind_equation, interpret
from fixstep.frontend.narrow._codes import INTEGERS, carrier, decode, encode, is_narrow, narrowed, rounded
from fixstep.targets.errors import CompileError

# These say in a jaxpr of their own how an update is combined; the functions that make them write it anew.
_SCATTERS = {
    "scatter-add": lax.scatter_add,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}
# What looks at the bits of an element, whose number a wider type changes.
_OF_BITS = ("nextafter", "reduce_precision", "random_bits", "rng_uniform", "reduce", "reduce_window")


def without_narrow_types(function: Callable[..., Any], structs: Sequence[jax.ShapeDtypeStruct]) -> Callable[..., Any]:
    """The function of flat arguments with uint8 codes in place of narrow types; itself if it has none.

    Args:
        function: takes arrays and returns a list of them.
        structs: the types of its arguments.

    Raises (when traced):
        CompileError: naming an operation that has no meaning for carried values, and the user's line.
    """
    closed = jax.make_jaxpr(function)(*structs)
    if not mentions_narrow(closed.jaxpr):
        return function

    def carried(*arguments: Any) -> list[Any]:
        args = [
            decode(value, struct.dtype) if is_narrow(struct.dtype) else value
            for value, struct in zip(arguments, structs, strict=True)
        ]
        outputs = evaluate(closed.jaxpr, closed.consts, args)
        return [
            encode(value, aval.dtype) if is_narrow(aval.dtype) else value
            for value, aval in zip(outputs, closed.out_avals, strict=True)
        ]

    return carried


def evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr, narrow ones carried, for inputs of which the narrow ones are."""
    literal = lambda atom: _carried(atom.val, atom.aval)  # noqa: E731
    return interpret(jaxpr, [_constant(value) for value in consts], args, _equation, literal=literal)


def _constant(value: Any) -> Any:
    return _carried(value, value) if is_narrow(getattr(value, "dtype", None)) else value


def _carried(value: Any, aval: Any) -> Any:
    """A value that is known, in the carrier's type."""
    if not is_narrow(getattr(aval, "dtype", None)):
        return value
    return jnp.asarray(np.asarray(value, aval.dtype).astype(carrier(aval.dtype)))


def _equation(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    if not _equation_mentions(eqn):
        return bind_equation(eqn, inputs, eqn.params)
    name = eqn.primitive.name
    if name in _reapply.STRUCTURES:
        return _reapply.STRUCTURES[name](evaluate, eqn, inputs)
    after: Any = eqn.outvars[0].aval.dtype
    before: Any = eqn.invars[0].aval.dtype if eqn.invars else after
    if name == "convert_element_type":
        value = inputs[0] if is_narrow(before) else jnp.asarray(inputs[0], before)  # a literal is a Python number
        return [narrowed(value, after) if is_narrow(after) else value.astype(after)]
    if name == "bitcast_convert_type" and not {before.name, after.name} & INTEGERS.keys():
        return [_bitcast(inputs[0], before, after)]
    if name in _OF_BITS or name == "bitcast_convert_type":
        _refuse(eqn, f"it looks at the bits of {before.name if is_narrow(before) else after.name}")
    if name in _SCATTERS:
        return _rounded(eqn, [_scatter(eqn, inputs)])
    if name == "shift_right_logical" and before.name.startswith("int"):
        inputs = [inputs[0] & np.int8((1 << INTEGERS[before.name]) - 1), inputs[1]]
    if name in ("clz", "population_count"):
        found = bind_equation(eqn, [encode(inputs[0], before)], {})[0].astype(carrier(before))
        return [found - (8 - INTEGERS[before.name]) if name == "clz" else found]
    params = {key: _carrier_of(eqn, value) for key, value in eqn.params.items()}
    return _rounded(eqn, bind_equation(eqn, inputs, params))


def _rounded(eqn: core.JaxprEqn, outputs: list[Any]) -> list[Any]:
    return [
        rounded(value, variable.aval.dtype) if is_narrow(variable.aval.dtype) else value
        for value, variable in zip(outputs, eqn.outvars, strict=True)
    ]


def _bitcast(value: Any, before: Any, after: Any) -> Any:
    codes = encode(value, before) if is_narrow(before) else lax.bitcast_convert_type(value, np.uint8)
    return decode(codes, after) if is_narrow(after) else lax.bitcast_convert_type(codes, after)


def _scatter(eqn: core.JaxprEqn, inputs: list[Any]) -> Any:
    params = eqn.params
    return _SCATTERS[eqn.primitive.name](
        *inputs,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )


def _carrier_of(eqn: core.JaxprEqn, value: Any) -> Any:
    """A parameter with the carrier in place of a narrow dtype."""
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        _refuse(eqn, "its own function computes with a type below eight bits, or a float of eight")
    try:
        dtype = np.dtype(value) if isinstance(value, np.dtype | type) else None
    except TypeError:
        dtype = None
    return carrier(dtype) if dtype is not None and is_narrow(dtype) else value


def _refuse(eqn: core.JaxprEqn, why: str) -> None:
    line: Line | None = line_of_equation(eqn)
    raise CompileError(
        f"{eqn.primitive.name} cannot be compiled" + (f", at {line}" if line else "") + f":\n  {why}; use a wider type"
    )


def mentions_narrow(jaxpr: core.Jaxpr) -> bool:
    """Whether a narrow type occurs in a jaxpr, or in one inside of it."""
    variables = (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars)
    return any(map(_is_narrow_atom, variables)) or any(map(_equation_mentions, jaxpr.eqns))


def _equation_mentions(eqn: core.JaxprEqn) -> bool:
    return any(map(_is_narrow_atom, (*eqn.invars, *eqn.outvars))) or any(
        map(mentions_narrow, core.jaxprs_in_params(eqn.params))
    )


def _is_narrow_atom(atom: Any) -> bool:
    return is_narrow(getattr(atom.aval, "dtype", None))
