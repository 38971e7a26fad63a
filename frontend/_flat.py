"""The user's functions over flat lists of arrays: traced abstractly, and as the plain functions that are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from fixstep.frontend._lines import describe_error
from fixstep.frontend._seed import Flat, Layout, flatten, is_python_number, key_data, to_leaf, weak_dtype
from fixstep.frontend._sums import Sums, take_sums
from fixstep.frontend._x64 import x64_context
from fixstep.runtime._signature import LeafSpec
from fixstep.targets.errors import FixstepError, ProgramError

# What a function returned, taken apart: for a step its state, its metrics, and what is added up of them.
Split = Callable[[Any], tuple[Flat, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """One part of what a traced function returns.

    Attributes:
        layout: its structure; a weakly typed leaf has the dtype that the trace gave it.
        weak: for each leaf, whether its type does not decide.
    """

    layout: Layout
    weak: tuple[bool, ...]

    @property
    def strong_leaves(self) -> tuple[LeafSpec, ...]:
        """The leaves, weakly typed ones in the type that such a number has by itself (float32, int32)."""
        return tuple(
            dataclasses.replace(spec, dtype=weak_dtype(spec.dtype)) if weak else spec
            for spec, weak in zip(self.layout.leaves, self.weak, strict=True)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """A function traced once, nothing of it computed.

    Attributes:
        closed: its jaxpr; outputs in the order of `outputs`, leaf by leaf.
        outputs: the parts of what it returns.
    """

    closed: core.ClosedJaxpr
    outputs: tuple[Output, ...]


def _call_user(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Calls the user's function; frames further out than this one are not theirs (`_lines.BOUNDARY`)."""
    return function(*arguments)


def trace(
    name: str, function: Callable[..., Any], arguments: Sequence[Layout], split: Split, *, x64: bool, hint: str = ""
) -> Trace:
    """Trace a user's function at the types of its arguments.

    Args:
        name: the word for it in messages.
        function: called with one tree per argument.
        arguments: the structure and types of each.
        split: takes what it returns apart.
        x64: whether it is traced with 64-bit types.
        hint: what an error in it should add.

    Raises:
        ProgramError: if the function raises, with the user's line; or what `split` raises.
    """
    parts: list[tuple[Flat, ...]] = []

    def flat(*arrays: Any) -> list[Any]:
        rest = iter(arrays)
        trees = [layout.build([next(rest) for _ in layout.leaves]) for layout in arguments]
        parts.append(split(_call_user(function, trees)))
        return [key_data(value) for part in parts[-1] for value in part.values]

    with x64_context(x64):
        structs = [struct for layout in arguments for struct in layout.structs]
        try:
            closed = jax.make_jaxpr(flat)(*structs)
        except FixstepError:
            raise
        except Exception as exc:
            raise ProgramError(f"{name} raised {describe_error(exc)}{hint}") from exc
    avals = iter(closed.out_avals)
    return Trace(closed, tuple(_output(part, [next(avals) for _ in part.values]) for part in parts[-1]))


def _output(part: Flat, avals: Sequence[Any]) -> Output:
    specs = tuple(
        LeafSpec(spec.path, aval.dtype.name, tuple(aval.shape), spec.key)
        for spec, aval in zip(part.layout.leaves, avals, strict=True)
    )
    weak = tuple(
        bool(aval.weak_type) or is_python_number(value) for value, aval in zip(part.values, avals, strict=True)
    )
    return Output(dataclasses.replace(part.layout, leaves=specs), weak)


def step_splitter(taken: Layout) -> Split:
    """Takes what a step returned apart: the state, the metrics, and what is to be added up of them.

    Raises (the splitter):
        ProgramError: if it is no pair, or a part holds leaves that are no arrays.
    """

    def split(returned: Any) -> tuple[Flat, ...]:
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            got = f"{len(returned)} values" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
            raise ProgramError(f"step: expected it to return a pair (state, metrics), got {got}")
        state, metrics = returned
        if taken.leaves and jax.tree.structure(metrics) == taken.treedef != jax.tree.structure(state):
            raise ProgramError(
                "step: expected a pair (state, metrics), got them in the other order: the state is first"
            )
        return flatten(state, "state that step returns", static=True), *_metrics(metrics)

    return split


def metrics_splitter(taken: Layout) -> Split:
    """Takes what `evaluate` returned apart: metrics, and what is to be added up of them."""

    def split(returned: Any) -> tuple[Flat, ...]:
        pair = isinstance(returned, tuple | list) and len(returned) == 2
        if pair and taken.leaves and jax.tree.structure(returned[0]) == taken.treedef:
            raise ProgramError("evaluate: expected it to return metrics alone, got a pair that begins with the state")
        return _metrics(returned)

    return split


def _metrics(metrics: Any) -> tuple[Flat, Flat]:
    """The metrics, and the sums behind them; a bare array or number is the loss."""
    bare = isinstance(metrics, Sums) or jax.tree_util.all_leaves([metrics])
    values, sums = take_sums({"loss": metrics} if bare else metrics)
    return flatten(values, "metrics"), flatten(sums, "sums of the metrics")


def split_outputs(outputs: Any) -> tuple[Flat, ...]:
    """The outputs of `predict`."""
    return (flatten(outputs, "outputs of predict"),)


def flat_function(
    function: Callable[..., Any], arguments: tuple[Layout, Layout], split: Split, leaves: Sequence[Sequence[LeafSpec]]
) -> Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], ...]]:
    """A user's function over flat lists of arrays in template order.

    Args:
        function: the user's function of two trees.
        arguments: their layouts.
        split: takes what it returns apart.
        leaves: the types of each part; outputs are cast to them.
    """

    def call(first: Sequence[Any], second: Sequence[Any]) -> tuple[list[Any], ...]:
        parts = split(_call_user(function, [arguments[0].build(first), arguments[1].build(second)]))
        return tuple(
            [to_leaf(value, spec) for value, spec in zip(part.values, specs, strict=True)]
            for part, specs in zip(parts, leaves, strict=True)
        )

    return call
