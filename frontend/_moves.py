"""What is said about a step without a fixed point: which leaves move, how, from which line, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from fixstep.frontend._lines import Line, origin
from fixstep.frontend._seed import SEPARATOR, Layout, shown
from fixstep.runtime._signature import LeafSpec, shown_path
from fixstep.targets.errors import FixpointError

Types = tuple[LeafSpec, ...]
_SHOWN_LEAVES = 20


def no_fixpoint(
    reason: str, history: Sequence[Types], moving: Sequence[int], closed: Any, batch: Layout, advice: dict[int, str]
) -> FixpointError:
    """The error that shows each moving leaf with its history.

    Args:
        reason: what goes wrong, as the first line.
        history: the types of all state leaves, round by round, the seed's first.
        moving: the numbers of the leaves to show.
        closed: the jaxpr of a step in which they moved, whose inputs are the state's leaves and the batch's.
        batch: the layout of the batch.
        advice: what to do, by leaf.
    """
    lines = [reason]
    inputs = [f"the state leaf {spec.path!r}" for spec in history[0]] + [
        f"the batch leaf {spec.path!r}" for spec in batch.leaves
    ]
    for index in sorted(moving, key=lambda i: (i not in advice, history[0][i].path))[:_SHOWN_LEAVES]:
        lines.append(f"  {shown_path(history[0][index].path, 'state')}: {leaf_history(history, index)}")
        lines.append(f"      from {_place(origin(closed, index), inputs)}")
        if index in advice:
            lines.append(f"      {advice[index]}")
    if len(moving) > _SHOWN_LEAVES:
        lines.append(f"  and {len(moving) - _SHOWN_LEAVES} more leaves")
    return FixpointError("\n".join(lines))


def leaf_history(history: Sequence[Types], index: int) -> str:
    """`float32[3] → float32[6] → float32[12]`: the types that a leaf went through."""
    steps: list[str] = []
    for types in history:
        text = shown(types[index])
        if not steps or steps[-1] != text:
            steps.append(text)
    return " → ".join(steps)


def _place(found: Line | int | str, inputs: Sequence[str]) -> str:
    if isinstance(found, int):
        return f"{inputs[found]}, which the step returns in this place unchanged"
    return str(found)


def shape_advice(moves: Sequence[LeafSpec], batch: Layout) -> str:
    """What to do about a leaf whose shape, or whose kind of key, the step changes.

    Args:
        moves: its types from before its shape changed.
        batch: the layout of the batch.
    """
    before, after = moves[:2]
    if before.key != after.key:
        return "Keep it what it is: a PRNG key stays one of its implementation (jax.random.split, jax.random.fold_in)."
    sizes = {spec.shape[0] for spec in batch.leaves if spec.shape}
    if before.shape == () and _count(after) != 1:
        if after.shape[0] in sizes:
            return "This is one value per example: reduce it to a scalar, for example with .mean()."
        return "Reduce it to a scalar, for example with .mean() or .sum()."
    if _count(before) == _count(after):
        return f"Give it its shape back, for example with .reshape({before.shape})."
    counts = [_count(spec) for spec in moves]
    if len(before.shape) == len(after.shape) and len(counts) > 2 and sorted(set(counts)) == counts:
        return "It grows: keep an array of fixed size, and write into it with .at[index].set(value) or jnp.roll."
    return f"Return it in the shape {before.shape} that it had."


def dtype_advice(spec: LeafSpec) -> str:
    """What to do about a leaf whose dtype never settles."""
    return f"Choose one type for it and return it so, for example with .astype({spec.dtype!r})."


def _count(spec: LeafSpec) -> int:
    count = 1
    for n in spec.shape:
        count *= n
    return count


def tree_error(before: Layout, after: Layout) -> FixpointError:
    """The error for a step that returns a state of another structure, as a diff by leaf path."""
    old, new = {spec.path: spec for spec in before.leaves}, {spec.path: spec for spec in after.leaves}
    missing, extra = [path for path in old if path not in new], [path for path in new if path not in old]
    lines = ["the step returns a state of another structure than it takes:"]
    for path in sorted(missing):
        near = difflib.get_close_matches(path, extra, n=1)
        renamed = f" (did it become {near[0]!r}?)" if near else ""
        lines.append(f"  - {shown_path(path, 'state')}: {shown(old[path])}, missing in what it returns{renamed}")
    for path in sorted(extra):
        lines.append(f"  + {shown_path(path, 'state')}: {shown(new[path])}, not in the state that it takes")
    nodes = list(_node_differences(_skeleton(before), _skeleton(after), ""))
    lines += [f"  ! {shown_path(path, 'state')}: {text}" for path, text in nodes]
    lines.append("Return exactly the leaves and containers of the state that the step takes.")
    return FixpointError("\n".join(lines))


def static_error(before: Layout, after: Layout) -> FixpointError | None:
    """The error for a step that changes a leaf that is no array, or None where it changes none."""
    names = _all_paths(before)
    lines = [
        f"  {names[i]}: {value!r:.60} → {after.static[i]!r:.60}"
        for i, value in before.static.items()
        if not _same(value, after.static[i])
    ]
    if not lines:
        return None
    return FixpointError(
        "\n".join(["the step changes parts of the state that are no arrays, so they are fixed:", *sorted(lines)])
    )


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))


class _Leaf:
    """Stands for a leaf where only the structure is looked at."""


def _skeleton(layout: Layout) -> Any:
    return layout.treedef.unflatten([_Leaf()] * layout.treedef.num_leaves)


def _all_paths(layout: Layout) -> list[str]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(_skeleton(layout))
    return [jax.tree_util.keystr(path, simple=True, separator=SEPARATOR) for path, _ in pairs]


def _node_differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, str]]:
    """Containers of another type, and containers whose static data differ, from the root down."""
    if isinstance(old, _Leaf) and isinstance(new, _Leaf):
        return
    if type(old) is not type(new):
        yield path, f"expected {_kind(old)}, got {_kind(new)}"
        return
    before, after = _children(old), _children(new)
    if before.keys() == after.keys():
        if _one_level(old)[1] != _one_level(new)[1]:
            yield path, f"the static data of this {type(old).__name__} differ"
        for key, child in before.items():
            yield from _node_differences(child, after[key], f"{path}/{key}" if path else key)
        return
    for key, child in before.items():
        where = f"{path}/{key}" if path else key
        if key in after:
            yield from _node_differences(child, after[key], where)
        elif not jax.tree.leaves(child):  # otherwise its leaves are in the list of the missing
            yield where, f"expected {_kind(child)}, missing in what it returns"
    for key, child in after.items():
        if key not in before and not jax.tree.leaves(child):
            yield f"{path}/{key}" if path else key, f"got {_kind(child)} that is not in the state that it takes"


def _one_level(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return pairs, treedef


def _children(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator=SEPARATOR): child
        for path, child in _one_level(tree)[0]
        if path
    }


def _kind(node: Any) -> str:
    if isinstance(node, _Leaf):
        return "an array"
    if node is None:
        return "None"
    name = type(node).__name__
    return f"a {name}" if jax.tree.leaves(node) else f"an empty {name}"
