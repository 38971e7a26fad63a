"""The fixed point of a step: the types of the state that one step returns as it took them.

A step is compiled for one set of types, so what it returns must fit what it takes. The state that a user starts with
often does not: an f16 model's adam moments become f32 in the first step. `find_fixpoint` finds the types that stay:

    types = those of the canonical seed
    repeat:
        following = the types that one step, traced at `types`, returns
        stop if following == types; otherwise types = following

One round is not enough in general: a type can travel one leaf per step, so a chain of k copies needs k rounds. Only
types are looked at; nothing of the step is computed, and the first values are cast once, at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from fixstep.frontend._flat import Output, Trace, step_splitter, trace
from fixstep.frontend._moves import (
    Types,
    dtype_advice,
    leaf_history,
    no_fixpoint,
    shape_advice,
    static_error,
    tree_error,
)
from fixstep.frontend._program import Program
from fixstep.frontend._seed import Layout, narrows, shown, weak_dtype, weak_fits
from fixstep.runtime._signature import LeafSpec, shown_path
from fixstep.targets.errors import FixpointError, ProgramError

_SHAPE_ROUNDS = 2  # further rounds that show how a shape goes on changing: three types in its history


@dataclasses.dataclass(frozen=True)
class Change:
    """A leaf that moved to another type.

    Attributes:
        path: its leaf path.
        before: its type before the round, `float16[8]`.
        after: its type after it.
        round: the round, from 1.
        narrowed: whether the new type holds fewer numbers or fewer digits, as the step's own output has it.
    """

    path: str
    before: str
    after: str
    round: int
    narrowed: bool

    def __str__(self) -> str:
        """One line of the report."""
        narrowed = ", narrowed" if self.narrowed else ""
        return f"{self.path}: {self.before} → {self.after} (round {self.round}{narrowed})"


@dataclasses.dataclass(frozen=True, eq=False)
class Fixpoint:
    """The result of `find_fixpoint`.

    Attributes:
        types: the state's leaves at the fixed point.
        changes: each move, in order.
        rounds: in how many rounds something moved.
        step: the step as traced at the fixed point.
    """

    types: Types
    changes: tuple[Change, ...]
    rounds: int
    step: Trace


def find_fixpoint(program: Program, seed: Layout, batch: Layout, *, x64: bool) -> Fixpoint:
    """Trace the step until the types of its state stay.

    Args:
        program: whose step it is.
        seed: structure and types of the canonical seed.
        batch: structure and types of the batch.
        x64: whether to trace with 64-bit types.

    Raises:
        FixpointError: if the types repeat without staying, a shape changes, or the tree does.
        ProgramError: if the step raises.
    """
    history: list[Types] = [seed.leaves]
    steps: list[Trace] = []
    while True:
        types = history[-1]
        steps.append(_trace_step(program, dataclasses.replace(seed, leaves=types), batch, history, x64=x64))
        following = _returned_types(seed, types, steps[-1].outputs[0])
        if following == types:
            return Fixpoint(types, _changes(history), len(history) - 1, steps[-1])
        if not _same_shapes(types, following):
            raise _shape_error(program, seed, batch, [*history, following], steps[-1], x64=x64)
        if following in history:
            raise _cycle_error(history, following, steps[-1], batch)
        history.append(following)


def _trace_step(program: Program, state: Layout, batch: Layout, history: Sequence[Types], *, x64: bool) -> Trace:
    hint = ""
    if len(history) > 1:
        moved = [i for i in range(len(history[0])) if history[0][i] != history[-1][i]]
        lines = [f"\n    {shown_path(history[0][i].path, 'state')}: {leaf_history(history, i)}" for i in moved[:10]]
        hint = f"\n  traced in round {len(history)}, after the step had changed these state leaves:{''.join(lines)}"
    return trace("step", program.step, (state, batch), step_splitter(state), x64=x64, hint=hint)


def _returned_types(seed: Layout, types: Types, output: Output) -> Types:
    """The types of the state that a step returned, once its structure is known to be the one that it took."""
    returned = output.layout
    if returned.treedef != seed.treedef or returned.static.keys() != seed.static.keys():
        raise tree_error(dataclasses.replace(seed, leaves=types), returned)
    changed = static_error(seed, returned)
    if changed:
        raise changed
    return tuple(map(_next_type, types, returned.leaves, output.weak))


def _next_type(old: LeafSpec, new: LeafSpec, weak: bool) -> LeafSpec:
    """The type of a leaf in the next round. A weakly typed output does not decide: its leaf moves only to a kind that
    holds it (an int leaf that becomes a weak float).
    """
    if not weak:
        return new
    dtype = old.dtype if weak_fits(new.dtype, old.dtype) else weak_dtype(new.dtype)
    return dataclasses.replace(new, dtype=dtype)


def _same_shapes(before: Types, after: Types) -> bool:
    return all(old.shape == new.shape and old.key == new.key for old, new in zip(before, after, strict=True))


def _moving(history: Sequence[Types]) -> list[int]:
    return [i for i in range(len(history[0])) if len({types[i] for types in history}) > 1]


def _shape_error(
    program: Program, seed: Layout, batch: Layout, history: list[Types], step: Trace, *, x64: bool
) -> FixpointError:
    changed = zip(history[-2], history[-1], strict=True)
    wrong = [i for i, (old, new) in enumerate(changed) if (old.shape, old.key) != (new.shape, new.key)]
    before = len(history) - 2
    for _ in range(_SHAPE_ROUNDS - 1):
        state = dataclasses.replace(seed, leaves=history[-1])
        try:
            again = _trace_step(program, state, batch, history, x64=x64)
            history = [*history, _returned_types(seed, history[-1], again.outputs[0])]
        except (FixpointError, ProgramError):  # the step does not take what it returned: one move says enough
            break
    advice = {i: shape_advice([types[i] for types in history[before:]], batch) for i in wrong}
    reason = "the state has no fixed point: the step changes the shape of its leaves:"
    return no_fixpoint(reason, history, _moving(history), step.closed, batch, advice)


def _cycle_error(history: list[Types], following: Types, step: Trace, batch: Layout) -> FixpointError:
    cycle = [*history[history.index(following) :], following]
    advice = {i: dtype_advice(history[0][i]) for i in _moving(cycle)}
    reason = f"the state has no fixed point: the types of its leaves repeat every {len(cycle) - 1} rounds:"
    whole = [*history, following]
    return no_fixpoint(reason, whole, _moving(whole), step.closed, batch, advice)


def _changes(history: Sequence[Types]) -> tuple[Change, ...]:
    return tuple(
        Change(new.path, shown(old), shown(new), number, narrows(old, new))
        for number, (before, after) in enumerate(itertools.pairwise(history), start=1)
        for old, new in zip(before, after, strict=True)
        if old != new
    )
