"""Mistakes in a loss or metric that train without a word: shapes that broadcast, and softmax of softmax.

A difference of predictions (n, 1) and targets (n,) is (n, n): every prediction meets every target. A loss that takes
logits is minimal elsewhere if it is given probabilities. Both are seen in the trace of the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import core

from fixstep.frontend._lines import describe_error, jaxpr_of
from fixstep.targets.errors import FixstepError, ProgramError

PREDICTION, TARGET = "prediction", "target"
_COMPARISONS = frozenset({"sub", "eq", "ne", "lt", "le", "gt", "ge"})
_SAME_VALUE = frozenset({"convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "copy", "stop_gradient"})
_SHIFTED = _SAME_VALUE | {"sub", "neg", "add", "mul", "div", "max", "abs", "transpose", "select_n", "slice"}
_SUMMED = _SHIFTED | {"reduce_sum", "sign"}
_CALLS = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint"})


def refuse_mistakes(name: str, function: Callable[[Any, Any], Any], prediction: Any, target: Any, kinds: Any) -> None:
    """Refuse a loss or metric whose arguments do not go together.

    Args:
        name: the word for it in messages.
        function: called with the two.
        prediction: what the model returned.
        target: what it should have.
        kinds: for each array of the prediction `softmax`, `sigmoid` or an empty text.

    Raises:
        ProgramError: with both shapes.
    """
    try:
        closed = jax.make_jaxpr(function)(prediction, target)
    except FixstepError:
        raise
    except Exception as exc:
        shapes = f"predictions {_shapes(prediction)}, targets {_shapes(target)}"
        raise ProgramError(f"{name} raised {describe_error(exc)}\n  it was called with {shapes}") from exc
    leaves, targets = jax.tree.leaves(prediction), jax.tree.leaves(target)
    if len(leaves) == len(targets) == 1 and leaves[0].shape != targets[0].shape:
        _refuse_broadcast(name, closed, leaves[0].shape, targets[0].shape)
    for index, made in enumerate(jax.tree.leaves(kinds)):
        if made and _takes_logits(closed.jaxpr, index):
            raise ProgramError(
                f"{name}: it takes logits (it normalises its predictions by a softmax or sigmoid of its own), and the "
                f"model's predictions of shape {leaves[index].shape} are the output of a {made} already; "
                f"let the model return what goes into its {made}"
            )


def _shapes(tree: Any) -> str:
    shapes = [f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)]
    return ", ".join(shapes) or "nothing"


# --- shapes ---------------------------------------------------------------------------------------------------------


class _Origin:
    """Of what an array of the trace is made: prediction, target, both; and along which axes it is only repeated."""

    def __init__(self, of: frozenset[str], repeated: frozenset[int] = frozenset(), *, raw: bool = False) -> None:
        self.of = of
        self.repeated = repeated
        self.raw = raw


_NOTHING = _Origin(frozenset())


def _refuse_broadcast(name: str, closed: Any, prediction: Any, target: Any) -> None:
    origins: dict[Any, _Origin] = {}
    first, second = closed.jaxpr.invars
    origins[first] = _Origin(frozenset({PREDICTION}), raw=True)
    origins[second] = _Origin(frozenset({TARGET}), raw=True)
    table = _mixed(closed.jaxpr, origins, math.prod(n for n in target if isinstance(n, int)))
    if table is not None:
        raise ProgramError(
            f"{name}: predictions of shape {prediction} against targets of shape {target} broadcast to {table}; "
            "give both one shape, for example with prediction.reshape(target.shape); labels that are numbers of "
            "classes have the predictions' shape without its last axis"
        )


def _mixed(jaxpr: Any, origins: dict[Any, _Origin], target_size: int) -> tuple[Any, ...] | None:
    """The shape in which predictions meet targets that are not theirs, or None."""

    def of(variable: Any) -> _Origin:
        return _NOTHING if isinstance(variable, core.Literal) else origins.get(variable, _NOTHING)

    for equation in jaxpr.eqns:
        inputs = [of(variable) for variable in equation.invars]
        inner = _called_jaxpr(equation)
        if inner is not None and len(inner.invars) == len(inputs):
            inside = dict(zip(inner.invars, inputs, strict=True))
            table = _mixed(inner, inside, target_size)
            if table is not None:
                return table
            for outer, variable in zip(equation.outvars, inner.outvars, strict=True):
                origins[outer] = _NOTHING if isinstance(variable, core.Literal) else inside.get(variable, _NOTHING)
            continue
        table = _meeting(equation, inputs, target_size)
        if table is not None:
            return table
        for variable in equation.outvars:
            origins[variable] = _following(equation, inputs, variable)
    return None


def _meeting(equation: Any, inputs: list[_Origin], target_size: int) -> tuple[Any, ...] | None:
    """The shape in which an equation brings predictions and targets together that do not belong together."""
    shape: tuple[Any, ...] = equation.outvars[0].aval.shape
    name = equation.primitive.name
    if name == "gather":
        picked, where = inputs
        indices = equation.invars[1].aval.shape[:-1]
        if picked.of == {PREDICTION} and TARGET in where.of and all(isinstance(n, int) for n in indices):
            return indices if math.prod(indices) > target_size else None
        return None
    if len(inputs) != 2 or {frozenset({PREDICTION}), frozenset({TARGET})} != {i.of for i in inputs}:
        return None
    ranks = [len(variable.aval.shape) for variable in equation.invars]
    if set(ranks) != {len(shape)} or name in ("dot_general", "concatenate"):
        return None
    lacking = [_repeated(v.aval.shape, i, shape) for v, i in zip(equation.invars, inputs, strict=True)]
    raw = all(origin.raw for origin in inputs)
    crossed = all(lacking) and not lacking[0] & lacking[1]
    # A table of classes for each example is meant; a table of examples by examples is not.
    apart = all(n == 1 or axis in lacking[0] | lacking[1] for axis, n in enumerate(shape))
    one_sided = any(lacking) and name in _COMPARISONS
    return shape if (crossed and (apart or raw)) or (one_sided and raw) else None


def _repeated(own: tuple[Any, ...], origin: _Origin, shape: tuple[Any, ...]) -> frozenset[int]:
    """The axes along which an operand is the same everywhere, and the result is longer than 1."""
    return frozenset(axis for axis, n in enumerate(shape) if n != 1 and (own[axis] == 1 or axis in origin.repeated))


def _following(equation: Any, inputs: list[_Origin], output: Any) -> _Origin:
    of = frozenset().union(*(i.of for i in inputs))
    name, shape = equation.primitive.name, output.aval.shape
    raw = name in _SAME_VALUE and inputs[0].raw
    if name == "broadcast_in_dim":
        kept = equation.params["broadcast_dimensions"]
        own = equation.invars[0].aval.shape
        repeated = {axis for axis, n in enumerate(shape) if n != 1 and axis not in kept}
        repeated |= {axis for i, axis in enumerate(kept) if shape[axis] != 1 and own[i] == 1}
        repeated |= {axis for i, axis in enumerate(kept) if i in inputs[0].repeated}
        return _Origin(of, frozenset(repeated), raw=raw)
    operands = [i for v, i in zip(equation.invars, inputs, strict=True) if v.aval.shape]
    if operands and all(v.aval.shape in ((), shape) for v in equation.invars):
        return _Origin(of, frozenset.intersection(*(i.repeated for i in operands)), raw=raw)
    return _Origin(of, raw=raw)


# --- logits ---------------------------------------------------------------------------------------------------------


def output_kinds(closed: Any) -> list[str]:
    """For each output of a jaxpr `softmax` or `sigmoid` if that is the last thing done to it, else an empty text."""
    return [_kind(closed.jaxpr, variable) for variable in closed.jaxpr.outvars]


def _kind(jaxpr: Any, variable: Any) -> str:
    made = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    while not isinstance(variable, core.Literal) and variable in made:
        equation = made[variable]
        name = equation.primitive.name
        inner = _called_jaxpr(equation)
        if inner is not None:
            found = _kind(inner, inner.outvars[equation.outvars.index(variable)])
            if found:
                return found
            inside = inner.outvars[equation.outvars.index(variable)]
            if inside not in inner.invars or len(inner.invars) != len(equation.invars):
                return ""
            variable = equation.invars[inner.invars.index(inside)]
            continue
        if name == "logistic":
            return "sigmoid"
        if name == "div":
            return "softmax" if _is_softmax(equation, made) else ""
        if name not in _SAME_VALUE:
            return ""
        variable = equation.invars[0]
    return ""


def _is_softmax(division: Any, made: Mapping[Any, Any]) -> bool:
    """Whether a division is that of exponentials by their own sum."""
    numerator = made.get(_source(division.invars[0], made))
    if numerator is None or numerator.primitive.name != "exp":
        return False
    variable = division.invars[1]
    while not isinstance(variable, core.Literal) and variable in made:
        equation = made[variable]
        if equation.primitive.name == "reduce_sum":
            summed = made.get(_source(equation.invars[0], made))
            return summed is not None and summed.primitive.name == "exp" and summed.invars[0] is numerator.invars[0]
        if equation.primitive.name not in _SAME_VALUE:
            return False
        variable = equation.invars[0]
    return False


def _source(variable: Any, made: Mapping[Any, Any]) -> Any:
    """The variable behind conversions of its dtype, or None for a number."""
    while not isinstance(variable, core.Literal) and _converted(made.get(variable)):
        variable = made[variable].invars[0]
    return None if isinstance(variable, core.Literal) else variable


def _converted(equation: Any) -> bool:
    return equation is not None and equation.primitive.name == "convert_element_type"


def _takes_logits(jaxpr: Any, index: int) -> bool:
    """Whether a function takes the logarithm of a sum of exponentials of its input number `index`."""
    return _normalises(jaxpr, {jaxpr.invars[index]: "shifted"})[0]


def _normalises(jaxpr: Any, marks: dict[Any, str]) -> tuple[bool, dict[Any, str]]:
    def mark(variable: Any) -> str:
        return "" if isinstance(variable, core.Literal) else marks.get(variable, "")

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        held = [mark(variable) for variable in equation.invars]
        inner = _called_jaxpr(equation)
        if inner is not None and len(inner.invars) == len(held):
            found, inside = _normalises(inner, {v: m for v, m in zip(inner.invars, held, strict=True) if m})
            if found:
                return True, marks
            outputs = ["" if isinstance(v, core.Literal) else inside.get(v, "") for v in inner.outvars]
            marks |= {v: m for v, m in zip(equation.outvars, outputs, strict=True) if m}
            continue
        following = ""
        if "summed" in held and name in ("log", "log1p"):
            return True, marks
        if ("shifted" in held and name in ("exp", "exp2")) or ("summed" in held and name in _SUMMED):
            following = "summed"
        elif "shifted" in held and name in _SHIFTED:
            following = "shifted"
        marks |= dict.fromkeys(equation.outvars, following) if following else {}
    return False, marks


def _called_jaxpr(equation: Any) -> Any:
    """The jaxpr that an equation calls with its own operands, or None."""
    if equation.primitive.name not in _CALLS:
        return None
    return next((jaxpr_of(value) for value in equation.params.values() if jaxpr_of(value) is not None), None)
