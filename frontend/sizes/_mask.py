"""A traced function of a batch of any size, evaluated on a batch that is padded to a fixed one.

The jaxpr has the symbol in its shapes. It is evaluated with arrays of the padded size, each of which holds what JAX
computes at the real size in its first part along every symbolic axis, and anything behind it. Elementwise operations
keep that by themselves; those that mix elements along a symbolic axis get a mask first, and the size itself becomes an
argument of the compiled function. An operation without a rule is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core

from fixstep.frontend._lines import Line, line_of_equation
from fixstep.frontend._reapply import bind_equation, interpret
from fixstep.frontend.sizes._range import SizeRange, concrete

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""By name of a primitive: `rule(masker, equation, *operands) -> result`, or the results of one that has several."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of some primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Unmaskable(Exception):
    """An operation has no meaning on a padded batch; the text says why.

    Attributes:
        operation: its name, known where the equation is.
        line: the user's line.
    """

    operation: str | None = None
    line: Line | None = None

    def message(self) -> str:
        """What to tell the user."""
        return (
            f"{self.operation} cannot be compiled for a batch of any size"
            + (f", at {self.line}" if self.line else "")
            + f":\n  {self}. Give the batch a size in numbers, or write the line so that it does not depend on "
            "the order or the number of the examples"
        )


@dataclasses.dataclass(frozen=True)
class Masker:
    """Evaluates jaxprs on a padded batch.

    Attributes:
        range: the sizes that the symbol may have.
        padded: the size that batches are padded to.
        size: the real one, a traced int32 scalar.
    """

    range: SizeRange
    padded: int
    size: Any

    def evaluate(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The outputs of a jaxpr for padded inputs.

        Raises:
            Unmaskable: for the first operation that has no meaning on a padded batch.
        """
        return interpret(jaxpr, consts, args, self._equation)

    def _equation(self, eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
        if not mentions_symbol(eqn):
            return self.bind(eqn, inputs)
        found = RULES.get(eqn.primitive.name)
        try:
            if found is None:
                raise Unmaskable("it has no rule for a batch that is padded")
            result = found(self, eqn, *inputs)
        except Unmaskable as exc:
            exc.operation = exc.operation or eqn.primitive.name
            exc.line = exc.line or line_of_equation(eqn)  # inside of JAX's own functions there is none
            raise
        return list(result) if eqn.primitive.multiple_results else [result]

    def bind(self, eqn: core.JaxprEqn, inputs: Sequence[Any], **changed: Any) -> list[Any]:
        """The results of an equation's primitive at the padded size, as a list; `changed` replaces parameters."""
        params = {name: concrete(value, self.sizes) for name, value in eqn.params.items()} | changed
        return bind_equation(eqn, inputs, params)

    def one(self, eqn: core.JaxprEqn, inputs: Sequence[Any], **changed: Any) -> Any:
        """The result of a primitive that has one."""
        return self.bind(eqn, inputs, **changed)[0]

    @property
    def sizes(self) -> Mapping[str, int]:
        """The symbol's padded value."""
        return {self.range.symbol: self.padded}

    def concrete(self, value: Any) -> Any:
        """A dimension or shape at the padded size."""
        return concrete(value, self.sizes)

    def extent(self, dimension: Any, dtype: Any = np.int32) -> Any:
        """The real value of a dimension: a number, or a traced scalar looked up by the real size."""
        if not is_symbolic(dimension):
            return dimension
        if str(dimension) == self.range.symbol:
            return jax.lax.convert_element_type(self.size, dtype)
        values = [concrete(dimension, {self.range.symbol: n}) for n in range(self.range.low, self.range.high + 1)]
        table = jnp.asarray(np.asarray(values, dtype))
        return jax.lax.dynamic_index_in_dim(table, self.size - self.range.low, keepdims=False)

    def valid(self, aval: Any, axes: Sequence[int]) -> Any | None:
        """Where an array holds what it holds at the real size, along some axes; None where that is everywhere."""
        found = None
        shape = self.concrete(tuple(aval.shape))
        for axis in axes:
            if not is_symbolic(aval.shape[axis]):
                continue
            inside = jax.lax.broadcasted_iota(np.int32, shape, axis) < self.extent(aval.shape[axis])
            found = inside if found is None else found & inside
        return found

    def mask(self, value: Any, aval: Any, axes: Sequence[int], fill: Any) -> Any:
        """The array with `fill` behind its real part along some axes."""
        valid = self.valid(aval, axes)
        if valid is None:
            return value
        return jax.lax.select(valid, value, jnp.full(np.shape(value), fill, aval.dtype))


def is_symbolic(dimension: Any) -> bool:
    """Whether a dimension depends on the size."""
    return bool(jax.export.is_symbolic_dim(dimension))


def symbolic_axes(aval: Any) -> tuple[int, ...]:
    """The axes whose length depends on the size."""
    return tuple(axis for axis, n in enumerate(getattr(aval, "shape", ())) if is_symbolic(n))


def mentions_symbol(eqn: core.JaxprEqn) -> bool:
    """Whether the size occurs in an equation: in a shape, a parameter, or in a jaxpr inside it."""
    if any(symbolic_axes(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return True
    inner = core.jaxprs_in_params(eqn.params)
    return any(map(_mentions, eqn.params.values())) or any(mentions_symbol(e) for jaxpr in inner for e in jaxpr.eqns)


def _mentions(value: Any) -> bool:
    """Whether the size occurs in a parameter that is a dimension, or a shape."""
    return any(map(_mentions, value)) if isinstance(value, tuple | list) else is_symbolic(value)
