"""What `fixstep inspect` prints of an artifact."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from fixstep.runtime._artifact import Artifact
from fixstep.runtime._signature import LeafSpec, shown_path
from fixstep.runtime._sizes import Sizes

SHOWN_LEAVES = 20

_Rows = list[tuple[str, ...]]


def describe_artifact(artifact: Artifact, *, every_leaf: bool = False) -> str:
    """The artifact as text: what it is, its template, functions, fixpoint report, targets, versions and sizes.

    Args:
        artifact: an opened artifact.
        every_leaf: whether long tables are shown whole; otherwise 20 leaves of each.
    """
    limit = None if every_leaf else SHOWN_LEAVES
    return "\n".join(_lines(artifact, limit))


def _lines(artifact: Artifact, limit: int | None) -> Iterator[str]:
    manifest = artifact.manifest
    total = sum(member["byte_length"] for member in manifest["members"].values())
    yield f"name      {manifest['name']}"
    yield f"program   {manifest['program']}"
    yield f"file      {artifact.path}, {_size(artifact.path.stat().st_size if artifact.path else total)}"
    yield "versions  " + ", ".join(f"{name} {version}" for name, version in sorted(manifest["versions"].items()))
    for role in ("state", "batch", "inputs"):
        leaves = getattr(artifact.template, role)
        if leaves or role != "inputs":
            yield ""
            yield f"{role}: {_count(len(leaves), 'leaf', 'leaves')}, {_size(sum(leaf.byte_length for leaf in leaves))}"
            yield from _leaf_table(leaves, role, limit)
            if artifact.sizes and role != "state":
                yield f"  {_any_size(artifact.sizes)}"
    yield from _functions(artifact, limit)
    yield from _fixpoint(manifest["fixpoint"], limit)
    yield from _targets(manifest)
    yield from _members(manifest)


def _leaf_table(leaves: tuple[LeafSpec, ...], what: str, limit: int | None) -> Iterator[str]:
    shown = leaves[:limit]
    rows: _Rows = [
        (
            shown_path(leaf.path, what),
            leaf.dtype,
            f"[{','.join(map(str, leaf.shape))}]",
            _size(leaf.byte_length),
            f"data of a {leaf.key} key" if leaf.key else "",
        )
        for leaf in shown
    ]
    yield from _aligned(rows, right=(3,))
    if len(shown) < len(leaves):
        yield f"  and {len(leaves) - len(shown)} more (--all shows them)"


def _any_size(sizes: Sizes) -> str:
    whole = f", in multiples of {sizes.multiple}" if sizes.multiple > 1 else ""
    compiled = ", ".join(map(str, reversed(sizes.compiled)))
    return f"of any size {sizes.symbol} from {sizes.low} to {sizes.high}{whole}; compiled for {compiled}"


def _functions(artifact: Artifact, limit: int | None) -> Iterator[str]:
    yield ""
    yield f"functions: {len(artifact.functions)}"
    for name, function in artifact.functions.items():
        arguments = ", ".join(_group(group.role, group.leaves) for group in function.arguments)
        results = ", ".join(_group(group.role, group.leaves) for group in function.results)
        yield f"  {name}({arguments}) -> {results}"
        for group in function.results:
            if group.role in ("metrics", "outputs") and group.leaves:
                shown = group.leaves[:limit]
                texts = [f"{leaf.path or 'output'} {leaf}" for leaf in shown]
                if len(shown) < len(group.leaves):
                    texts.append(f"and {len(group.leaves) - len(shown)} more (--all shows them)")
                yield f"      {group.role}: {', '.join(texts)}"


def _group(role: str, leaves: tuple[LeafSpec, ...]) -> str:
    return role if len(leaves) == 1 else f"{role} × {len(leaves)}"


def _fixpoint(report: dict[str, Any], limit: int | None) -> Iterator[str]:
    yield ""
    changes = report["changes"]
    if changes:
        rounds = _count(report["rounds"], "round", "rounds")
        yield f"fixpoint: {_count(len(changes), 'leaf', 'leaves')} moved in {rounds}"
    else:
        yield "fixpoint: no leaf moved"
    shown = changes[:limit]
    rows: _Rows = [
        (
            shown_path(change["path"], "state"),
            change["from"],
            "→",
            change["to"],
            f"round {change['round']}",
            "narrowed" if change["narrowed"] else "",
        )
        for change in shown
    ]
    yield from _aligned(rows)
    if len(shown) < len(changes):
        yield f"  and {len(changes) - len(shown)} more (--all shows them)"
    for note in report["notes"]:
        yield f"  note: {note}"


def _targets(manifest: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"targets: {len(manifest['targets'])}"
    for target in manifest["targets"]:
        yield f"  {target['text']}  {_size(manifest['members'][target['module']]['byte_length'])}"
        for key, value in target["requires"].items():
            yield from textwrap.wrap(
                f"requires {key}: {_value(value)}",
                width=100,
                initial_indent="      ",
                subsequent_indent="          ",
                break_on_hyphens=False,
            )


def _members(manifest: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"members: {len(manifest['members'])}"
    rows: _Rows = [(name, _size(member["byte_length"])) for name, member in manifest["members"].items()]
    yield from _aligned(rows, right=(1,))


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return str(value)


def _aligned(rows: _Rows, right: tuple[int, ...] = ()) -> Iterator[str]:
    """Rows of cells as lines, each column as wide as its widest cell; the columns in `right` end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _size(byte_length: int) -> str:
    if byte_length < 1000:
        return f"{byte_length} B"
    for unit, scale in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if byte_length < 1000 * scale or unit == "GB":
            return f"{byte_length / scale:.1f} {unit}"
    raise AssertionError
