"""Checkpoints: the state by leaf path in one safetensors file. `docs/checkpoint.md` specifies it on one page."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fixstep.runtime._files import explain_os_error, open_ordinary, remove_abandoned, sync_folder, write_atomically
from fixstep.runtime._manifest import leaf_to_json, parse_leaves
from fixstep.runtime._signature import Array, LeafSpec, check
from fixstep.runtime._strict_json import dump_json, json_problems, parse_json
from fixstep.runtime._tensors import decode_leaves, encode_leaves, read_metadata
from fixstep.targets.errors import CheckpointError, TemplateError

CHECKPOINT_VERSION = 1

_ENTRY = "fixstep"  # of the metadata: one, since the library writes several in an order that changes from run to run
_NO_DIGEST = "0" * 64


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, read and checked.

    Attributes:
        leaves: the state by leaf path, in template order; read-only arrays.
        program: the digest of the program whose state it is.
        steps: steps taken since the state was made.
        position: where the loop was, as JSON keeps it (a tuple comes back as a list).
        template: the leaves that it says it has.
    """

    leaves: Mapping[str, Array] = dataclasses.field(repr=False)
    program: str
    steps: int
    position: dict[str, Any]
    template: tuple[LeafSpec, ...] = dataclasses.field(repr=False)


def write_checkpoint(
    path: str | os.PathLike[str],
    leaves: Mapping[str, Array],
    *,
    program: str,
    template: Sequence[LeafSpec],
    steps: int,
    position: Mapping[str, Any],
) -> None:
    """Write a checkpoint; the file appears whole and synced, or not at all, and the same input gives the same bytes.

    Args:
        path: the file to write; an old one is replaced only when the new one is on the disk.
        leaves: the state by leaf path, unchanged during the call.
        program: the digest of the program.
        template: the leaves of the state.
        steps: steps taken since the state was made.
        position: where the loop is; what JSON can hold exactly.

    Raises:
        CheckpointError: if the leaves do not fit the template, the position does not fit JSON, or the file cannot be
            written. An old file is unchanged.
    """
    try:
        arrays = dict(zip((spec.path for spec in template), check(dict(leaves), tuple(template), "state"), strict=True))
        contents = {
            "version": CHECKPOINT_VERSION,
            "sha256": _NO_DIGEST,
            "program": program,
            "steps": steps,
            "position": dict(position),
            "template": [leaf_to_json(spec) for spec in template],
        }
        _check_contents(contents)
        blank = encode_leaves(arrays, template, metadata={_ENTRY: dump_json(contents)})
    except (TemplateError, ValueError) as exc:
        raise CheckpointError(f"{os.fspath(path)}: cannot be written: {exc}\nNothing was written.") from exc
    before, after = _around(blank, _NO_DIGEST)

    def write(file: BinaryIO) -> None:
        file.write(before)
        file.write(hashlib.sha256(blank).hexdigest().encode())
        file.write(after)

    try:
        write_atomically(path, write)
    except OSError as exc:
        raise CheckpointError(explain_os_error("write", path, exc)) from exc


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint and check it, to the last byte.

    Raises:
        CheckpointError: if the file cannot be read, is none, is damaged, or is of another version.
    """
    where = os.fspath(path)
    try:
        metadata, data = read_whole(path)
        contents = _parse_contents(metadata)
        if contents["version"] != CHECKPOINT_VERSION:
            raise CheckpointError(
                f"{where}: checkpoint version {contents['version']}, and this fixstep reads {CHECKPOINT_VERSION}: "
                "use the fixstep that wrote it"
            )
        _check_digest(data, contents.get("sha256"))
        _check_contents(contents)
        template = parse_leaves(contents.get("template"), "template")
        leaves = decode_leaves(data, template)
        return Checkpoint(leaves, contents["program"], contents["steps"], contents["position"], template)
    except OSError as exc:
        raise CheckpointError(explain_os_error("read", path, exc)) from exc
    except ValueError as exc:
        raise CheckpointError(f"{where}: {exc}. Use the checkpoint before it.") from exc


def is_checkpoint(metadata: Mapping[str, str]) -> bool:
    """Whether the metadata of a safetensors file says that it is a checkpoint."""
    return _ENTRY in metadata


def read_whole(path: str | os.PathLike[str], attempts: int = 10) -> tuple[dict[str, str], bytes]:
    """Metadata and bytes of one file; the library reads metadata by path only, so it opens the file once more."""
    with open_ordinary(path) as file:
        metadata = read_metadata(path)
        if attempts > 1 and not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return read_whole(path, attempts - 1)  # it was replaced in between
        return metadata, file.read()


def _parse_contents(metadata: Mapping[str, str]) -> dict[str, Any]:
    if not is_checkpoint(metadata):
        raise ValueError(f"not a fixstep checkpoint: its metadata has no entry {_ENTRY!r}")
    text = metadata[_ENTRY].encode()
    contents = parse_json(text, limit=len(text))
    if not isinstance(contents, dict) or type(contents.get("version")) is not int:
        raise ValueError("not a fixstep checkpoint: its metadata states no version")
    return contents


def _check_digest(data: bytes, digest: Any) -> None:
    """Compare the SHA-256 of the whole file, which covers the library's header too, however it is laid out."""
    if not isinstance(digest, str) or len(digest) != len(_NO_DIGEST) or not digest.isascii():
        raise ValueError(f"damaged: expected a SHA-256 in the metadata, got {digest!r:.80}")
    before, after = _around(data, digest)
    got = hashlib.sha256(before)
    got.update(_NO_DIGEST.encode())
    got.update(after)
    if got.hexdigest() != digest:
        raise ValueError(f"damaged: expected SHA-256 {digest}, got {got.hexdigest()}")


def _around(data: bytes, digest: str) -> tuple[memoryview, memoryview]:
    """What stands before and after the digest, which no other 64 digits precede in a file."""
    start = data.find(digest.encode())
    return memoryview(data)[:start], memoryview(data)[start + len(digest) :]


def _check_contents(contents: Mapping[str, Any]) -> None:
    """Everything but the template, when it is written and when it is read."""
    program, steps, position = (contents.get(key) for key in ("program", "steps", "position"))
    problems = json_problems(position, "position", depth=1)
    if not isinstance(position, dict):
        problems.append(f"position: expected an object, got {position!r:.60}")
    if not isinstance(program, str) or not program:
        problems.append(f"program: expected a digest, got {program!r:.60}")
    if type(steps) is not int or steps < 0:
        problems.append(f"steps: expected an integer from 0, got {steps!r:.60}")
    if problems:
        raise ValueError("; ".join(problems))


def explain_mismatch(expected: Sequence[LeafSpec], got: Sequence[LeafSpec]) -> str:
    """The difference of two templates by leaf path, one line a leaf; empty if they are equal.

    Args:
        expected: the leaves of the program at hand.
        got: the leaves of the checkpoint.
    """
    ours = {spec.path: spec for spec in expected}
    theirs = {spec.path: spec for spec in got}
    lines = []
    for path in sorted(ours.keys() & theirs.keys()):
        if ours[path] != theirs[path]:
            lines.append(f"  {_shown(path)}: expected {_with_key(ours[path])}, got {_with_key(theirs[path])}")
    lines += [
        f"  {_shown(path)}: expected {_with_key(ours[path])}, missing" for path in sorted(ours.keys() - theirs.keys())
    ]
    lines += [
        f"  {_shown(path)}: unexpected, got {_with_key(theirs[path])}" for path in sorted(theirs.keys() - ours.keys())
    ]
    if not lines and [spec.path for spec in expected] != [spec.path for spec in got]:
        lines.append("  the same leaves in another order")
    return "\n".join(lines)


def _shown(path: str) -> str:
    return path or "<the state itself>"


def _with_key(spec: LeafSpec) -> str:
    return f"{spec} (a {spec.key} key)" if spec.key else str(spec)


_NAME = re.compile(r"step-([0-9]{8,18})\.safetensors")


@dataclasses.dataclass(frozen=True)
class Latest:
    """The newest whole checkpoint of a folder.

    Attributes:
        path: the file, or None if the folder holds no checkpoint at all.
        notes: one text for each newer file that was passed over, and why.
    """

    path: Path | None
    notes: tuple[str, ...] = ()


class CheckpointDirectory:
    """A folder of checkpoints named by step, `step-00000120.safetensors`; other files in it are left alone.

    Args:
        path: the folder; it is made when the first checkpoint is saved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._last: Path | None = None
        self._whole: set[Path] = set()

    def save(self, step: int, writer: Callable[[Path], object]) -> Path:
        """Save one checkpoint; nothing else is changed or removed.

        Args:
            step: the step in its name. A checkpoint of the same step is replaced.
            writer: writes a checkpoint to the path it is given, whole or not at all, as `write_checkpoint` does.

        Returns:
            The file.

        Raises:
            CheckpointError: if the folder cannot be made; and what `writer` raises.
        """
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
            raise ValueError(f"step: expected an integer from 0 below 10**18, got {step!r}")
        path = self.path / f"step-{step:08d}.safetensors"
        try:
            if not self.path.is_dir():
                self.path.mkdir(parents=True, exist_ok=True)
                sync_folder(self.path.parent)
            remove_abandoned(self.path)
        except OSError as exc:
            raise CheckpointError(explain_os_error("make", self.path, exc)) from exc
        writer(path)
        self._last = path
        self._whole.add(path)
        return path

    def latest(self) -> Latest:
        """The newest checkpoint that is whole; damaged ones are passed over, with a note for each.

        Raises:
            CheckpointError: if there are checkpoints and none can be read, so that nobody starts anew by accident.
        """
        notes: list[str] = []
        for path in self.files():
            problem = self._problem(path)
            if problem is None:
                return Latest(path, tuple(notes))
            notes.append(problem)
        if notes:
            lines = "\n".join(f"  {note}" for note in notes)
            raise CheckpointError(f"{self.path}: no checkpoint in the folder can be read:\n{lines}")
        return Latest(None)

    def prune(self, keep: int) -> None:
        """Remove old checkpoints: all that are older than the newest `keep` whole ones.

        The one saved last by this object is never removed, nor is a damaged one that is newer than those kept.

        Args:
            keep: how many stay, at least 1.

        Raises:
            CheckpointError: if a file cannot be removed.
        """
        if keep < 1:
            raise ValueError(f"keep: expected at least 1 checkpoint, got {keep}")
        kept = 1 if self._last is not None else 0
        for path in self.files():
            if path == self._last:
                continue
            if kept < keep:
                kept += self._problem(path) is None
                continue
            try:
                path.unlink(missing_ok=True)
                self._whole.discard(path)
            except OSError as exc:
                raise CheckpointError(explain_os_error("remove", path, exc)) from exc

    def files(self) -> list[Path]:
        """The checkpoints in the folder, whole or not, the newest step first."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise CheckpointError(explain_os_error("read", self.path, exc)) from exc
        found = {int(match[1]): name for name in names if (match := _NAME.fullmatch(name))}
        return [self.path / found[step] for step in sorted(found, reverse=True)]

    def _problem(self, path: Path) -> str | None:
        """Why a checkpoint cannot be read; each file is looked at once."""
        if path in self._whole:
            return None
        try:
            read_checkpoint(path)
        except CheckpointError as exc:
            return str(exc)
        self._whole.add(path)
        return None
