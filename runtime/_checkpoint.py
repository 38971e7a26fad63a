"""Checkpoints: the state by leaf path in one safetensors file. `docs/checkpoint.md` specifies it on one page."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fixstep.runtime._files import (
    explain_os_error,
    file_length,
    open_ordinary,
    read_exactly,
    remove_abandoned,
    sync_folder,
    write_atomically,
)
from fixstep.runtime._manifest import leaf_to_json, parse_leaves
from fixstep.runtime._signature import Array, LeafSpec, check
from fixstep.runtime._strict_json import dump_json, json_problems, parse_json
from fixstep.runtime._tensors import (
    data_pieces,
    find_leaves,
    header_byte_length,
    leaf_arrays,
    make_header,
    parse_header,
)
from fixstep.targets.errors import CheckpointError, TemplateError

CHECKPOINT_FORMAT = "fixstep-checkpoint"
CHECKPOINT_VERSION = 1

_NO_DIGEST = "0" * 64
# The start of the metadata, before the digits of the SHA-256: with it they stand at one place in every file.
_START = f'{{"__metadata__":{{"format":"{CHECKPOINT_FORMAT}","version":"{CHECKPOINT_VERSION}","sha256":"'.encode()
_DIGEST_AT = 8 + len(_START)  # bytes from the start of the file
_CHUNK_BYTE_LENGTH = 2**20
_USE_ANOTHER = "Use the checkpoint before it."


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


@dataclasses.dataclass(frozen=True)
class _Contents:
    """All of a checkpoint but its leaves."""

    program: str
    steps: int
    position: dict[str, Any]
    template: tuple[LeafSpec, ...]
    digest: str
    header: bytes  # the first 8 bytes of the file too
    starts: Mapping[str, int]
    data_byte_length: int


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

    Leaves are streamed: no second copy of the state is made.

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
    where = os.fspath(path)
    try:
        arrays = dict(zip((spec.path for spec in template), check(dict(leaves), tuple(template), "state"), strict=True))
        metadata = _metadata(program, template, steps, position)
        blank = make_header(template, metadata)
    except (TemplateError, ValueError) as exc:
        raise CheckpointError(f"{where}: cannot be written: {exc}\nNothing was written.") from exc
    digest = hashlib.sha256(blank)
    for piece in data_pieces(arrays, template):
        digest.update(piece)
    header = _with_digest(blank, digest.hexdigest())

    def write(file: BinaryIO) -> None:
        file.write(header)
        for piece in data_pieces(arrays, template):
            file.write(piece)

    try:
        write_atomically(path, write)
    except OSError as exc:
        raise CheckpointError(explain_os_error("write", path, exc)) from exc


def _metadata(program: str, template: Sequence[LeafSpec], steps: int, position: Mapping[str, Any]) -> dict[str, str]:
    problems = json_problems(dict(position), "position")
    if not isinstance(program, str) or not program:
        problems.append(f"program: expected a digest, got {program!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        problems.append(f"steps: expected an integer from 0, got {steps!r}")
    if problems:
        raise ValueError("; ".join(problems))
    return {
        "format": CHECKPOINT_FORMAT,
        "version": str(CHECKPOINT_VERSION),
        "sha256": _NO_DIGEST,
        "program": program,
        "steps": str(steps),
        "position": dump_json(dict(position)),
        "template": dump_json([leaf_to_json(spec) for spec in template]),
    }


def _with_digest(header: bytes, digest: str) -> bytes:
    return header[:_DIGEST_AT] + digest.encode() + header[_DIGEST_AT + 64 :]


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint and check it, to the last byte.

    Raises:
        CheckpointError: if the file cannot be read, is none, is damaged, or is of another version.
    """
    with _errors(path), open_ordinary(path) as file:
        contents = _read_header(file)
        data = read_exactly(file, contents.data_byte_length)
        _compare_digest(contents, [data])
        leaves = leaf_arrays(data, contents.starts, contents.template)
        return Checkpoint(leaves, contents.program, contents.steps, contents.position, contents.template)


def verify_checkpoint(path: str | os.PathLike[str]) -> None:
    """Check a checkpoint as `read_checkpoint` does, by its digest, without holding its leaves.

    Raises:
        CheckpointError: if it could not be read.
    """
    with _errors(path), open_ordinary(path) as file:
        contents = _read_header(file)
        _compare_digest(contents, _chunks(file, contents.data_byte_length))


@contextlib.contextmanager
def _errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what can go wrong while reading into one message with the path."""
    try:
        yield
    except OSError as exc:
        raise CheckpointError(explain_os_error("read", path, exc)) from exc
    except _VersionError as exc:
        raise CheckpointError(f"{os.fspath(path)}: {exc}") from exc
    except (ValueError, EOFError) as exc:
        raise CheckpointError(f"{os.fspath(path)}: {exc}. {_USE_ANOTHER}") from exc


class _VersionError(Exception):
    """A whole file that this version of fixstep cannot read."""


def _chunks(file: BinaryIO, byte_length: int) -> Iterator[memoryview]:
    for start in range(0, byte_length, _CHUNK_BYTE_LENGTH):
        yield read_exactly(file, min(_CHUNK_BYTE_LENGTH, byte_length - start))


def _compare_digest(contents: _Contents, data: Sequence[memoryview] | Iterator[memoryview]) -> None:
    digest = hashlib.sha256(_with_digest(contents.header, _NO_DIGEST))
    for piece in data:
        digest.update(piece)
    if digest.hexdigest() != contents.digest:
        raise ValueError(f"damaged: expected SHA-256 {contents.digest}, got {digest.hexdigest()}")


def _read_header(file: BinaryIO) -> _Contents:
    """Everything before the data, checked but for the digest."""
    byte_length = file_length(file)
    first = bytes(read_exactly(file, min(8, byte_length)))
    header_length = header_byte_length(first, byte_length)
    text = bytes(read_exactly(file, header_length))
    metadata, entries = parse_header(text)
    _check_version(metadata, first + text)
    data_byte_length = byte_length - 8 - header_length
    template = _template(metadata.get("template", ""))
    return _Contents(
        program=metadata.get("program", ""),
        steps=_steps(metadata.get("steps", "")),
        position=_position(metadata.get("position", "")),
        template=template,
        digest=metadata["sha256"],
        header=first + text,
        starts=find_leaves(entries, template, data_byte_length),
        data_byte_length=data_byte_length,
    )


def _check_version(metadata: Mapping[str, str], start: bytes) -> None:
    got = metadata.get("format")
    if got != CHECKPOINT_FORMAT:
        raise ValueError(f"not a fixstep checkpoint: its format is {got!r:.60}, expected {CHECKPOINT_FORMAT!r}")
    version = metadata.get("version", "")
    if version.isascii() and version.isdigit() and version != str(CHECKPOINT_VERSION):
        raise _VersionError(
            f"checkpoint version {version:.20}, and this fixstep reads {CHECKPOINT_VERSION}: "
            "use the fixstep that wrote it"
        )
    digits = start[_DIGEST_AT : _DIGEST_AT + 64]
    if start[8:_DIGEST_AT] != _START or digits != metadata.get("sha256", "").encode() or len(digits) != 64:
        raise ValueError("damaged: format, version and SHA-256 do not stand at the start of the header")


def _steps(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ValueError(f"the metadata's steps are {text!r:.60}, expected an integer from 0")
    return int(text)


def _position(text: str) -> dict[str, Any]:
    position = parse_json(text.encode(), limit=len(text.encode()))
    if not isinstance(position, dict):
        raise ValueError(f"the metadata's position is a {type(position).__name__}, expected an object")
    return position


def _template(text: str) -> tuple[LeafSpec, ...]:
    return parse_leaves(parse_json(text.encode(), limit=len(text.encode())), "template")


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
            verify_checkpoint(path)
        except CheckpointError as exc:
            return str(exc)
        self._whole.add(path)
        return None
