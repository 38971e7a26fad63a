"""The artifact file: written once, read strictly, never trusted. `docs/artifact.md` specifies it on one page."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fixstep.runtime import _zip
from fixstep.runtime._files import (
    aligned_buffer,
    explain_os_error,
    file_length,
    open_ordinary,
    read_exactly,
    write_atomically,
)
from fixstep.runtime._manifest import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    MANIFEST_VERSION,
    MAX_MANIFEST_BYTE_LENGTH,
    STATE_NAME,
    CompiledTarget,
    Function,
    Manifest,
    Template,
    check_version,
    parse_manifest,
)
from fixstep.runtime._signature import Array, LeafSpec
from fixstep.runtime._sizes import Sizes
from fixstep.runtime._strict_json import dump_json, json_problems, parse_json
from fixstep.targets.errors import ArtifactError

_DAMAGED = "The file is damaged or was changed: copy it again, or compile it again."


def write_artifact(
    path: str | os.PathLike[str], manifest: Mapping[str, Any], members: Mapping[str, bytes]
) -> dict[str, Any]:
    """Write an artifact; the file appears whole or not at all, and the same input gives the same bytes.

    Args:
        path: the file to write.
        manifest: as `docs/artifact.md` says, without `members`, which is filled in here; `format` and `version` are
            filled in where they are missing. It is not changed.
        members: the data of every member but the manifest, by name. Members are written in the order of their names.

    Returns:
        The manifest as written.

    Raises:
        ArtifactError: if the manifest or a name is not valid, the members are too large, or the file cannot be written.
    """
    where = os.fspath(path)
    if MANIFEST_NAME in members:
        raise ArtifactError(
            f"{where}: {MANIFEST_NAME} is made from the manifest, not given as a member. Nothing was written."
        )
    ordered = {name: members[name] for name in sorted(members)}
    described = {name: {"byte_length": len(data), "sha256": _sha256(data)} for name, data in ordered.items()}
    complete = _canonical({"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, **manifest, "members": described})
    try:
        _raise_first(json_problems(complete, "manifest"))
        parse_manifest(complete)
        text = dump_json(complete).encode()
        if len(text) > MAX_MANIFEST_BYTE_LENGTH:
            raise ValueError(f"the manifest has {len(text)} bytes, more than the {MAX_MANIFEST_BYTE_LENGTH} allowed")
        pieces = list(_zip.pack({MANIFEST_NAME: text, **ordered}, _comment(text)))
    except ValueError as exc:
        raise ArtifactError(f"{where}: cannot be written: {exc}\nNothing was written.") from exc

    def write(file: BinaryIO) -> None:
        file.writelines(pieces)

    try:
        write_atomically(path, write)
    except OSError as exc:
        raise ArtifactError(explain_os_error("write", path, exc)) from exc
    return complete


def _raise_first(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems[:5]))


def _canonical(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Keys sorted, after format and version, so that equal manifests have equal bytes."""
    first = {key: manifest[key] for key in ("format", "version")}
    return {**first, **_sorted({key: value for key, value in manifest.items() if key not in first})}


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _comment(manifest: bytes | memoryview) -> bytes:
    return _zip.COMMENT_START + _sha256(manifest).encode()


@dataclasses.dataclass(frozen=True)
class Artifact:
    """An artifact that was read and checked whole, to the last byte.

    The data lies in memory of its own: the file may be replaced or deleted while the artifact is in use.

    Attributes:
        path: the file, or None if it was opened from bytes.
        manifest: the manifest as a plain dict; not to be changed.
        details: the same, typed.
    """

    path: Path | None
    manifest: dict[str, Any] = dataclasses.field(repr=False)
    details: Manifest = dataclasses.field(repr=False)
    _data: Mapping[str, memoryview] = dataclasses.field(repr=False)

    @classmethod
    def open(cls, source: str | os.PathLike[str] | bytes | bytearray | memoryview) -> Artifact:
        """Read and check an artifact.

        Args:
            source: its path, or the bytes of the file.

        Raises:
            ArtifactError: saying what is wrong with the file, where, and what to do.
        """
        if isinstance(source, bytes | bytearray | memoryview):
            path, where, data = None, "<bytes>", _private_copy(source)
        else:
            path, where = Path(source), os.fspath(source)
            data = _read(path)
        manifest, details, members = _check(where, data)
        return cls(path, manifest, details, members)

    @property
    def template(self) -> Template:
        """The leaves of the state, the batch and the inputs."""
        return self.details.template

    @property
    def functions(self) -> Mapping[str, Function]:
        """The functions by name."""
        return self.details.functions

    @property
    def sizes(self) -> Sizes | None:
        """The sizes that a batch may have, or None where it has one."""
        return self.details.sizes

    @property
    def targets(self) -> tuple[CompiledTarget, ...]:
        """What it was compiled for, in the order of preference that the frontend gave."""
        return self.details.targets

    @property
    def program(self) -> str:
        """The digest of the program, which a checkpoint carries too."""
        return self.details.program

    def signature(self, function: str, role: str) -> tuple[LeafSpec, ...]:
        """The leaves that a function takes, or gives, in a role (`state`, `batch`, `metrics`, ...).

        Raises:
            KeyError: naming the functions, or the roles, that there are.
        """
        if function not in self.functions:
            raise KeyError(f"no function {function!r}; there are {', '.join(sorted(self.functions))}")
        return self.functions[function].leaves(role)

    def member(self, name: str) -> memoryview:
        """The data of a member, a read-only view of uint8 that starts at a multiple of 64 bytes in memory.

        Raises:
            KeyError: naming the members that there are.
        """
        if name not in self._data:
            raise KeyError(f"no member {name!r}; there are {', '.join(self._data)}")
        return self._data[name]

    def initial_state(self) -> dict[str, Array]:
        """The state that the program begins with, by leaf path, from the member `state.safetensors`: read-only arrays.

        Raises:
            KeyError: if the artifact has no such member; then its function `init` makes the state.
        """
        return _decode_state(self.member(STATE_NAME), self.template)


def _decode_state(data: memoryview, template: Template) -> dict[str, Array]:
    # Imported here, because most artifacts have no such member and the start of a process is waited for.
    from fixstep.runtime._tensors import decode_leaves

    return decode_leaves(data, template.state)


def _private_copy(source: bytes | bytearray | memoryview) -> memoryview:
    view = memoryview(source).cast("B")
    if len(view) > _zip.MAX_BYTE_LENGTH:
        raise ArtifactError(f"<bytes>: {len(view)} bytes, more than the {_zip.MAX_BYTE_LENGTH} an artifact may have")
    buffer = aligned_buffer(len(view)).data
    buffer[:] = view
    return buffer.toreadonly()


def _read(path: Path) -> memoryview:
    try:
        with open_ordinary(path) as file:
            byte_length = file_length(file)
            if byte_length > _zip.MAX_BYTE_LENGTH:
                raise ArtifactError(
                    f"{path}: {byte_length} bytes, more than the {_zip.MAX_BYTE_LENGTH} an artifact may have"
                )
            return read_exactly(file, byte_length)
    except OSError as exc:
        raise ArtifactError(explain_os_error("read", path, exc)) from exc
    except EOFError as exc:
        raise ArtifactError(f"{path}: {exc} {_DAMAGED}") from exc


def _check(where: str, data: memoryview) -> tuple[dict[str, Any], Manifest, dict[str, memoryview]]:
    """Every check of a file, from the outside to the inside; the first that fails is reported."""
    try:
        entries, comment = _zip.unpack(data)
        views = {entry.name: data[entry.data : entry.end] for entry in entries}
        text = _manifest_text(entries, views, comment)
    except ValueError as exc:
        raise ArtifactError(f"{where}: {exc}. {_DAMAGED}") from exc
    # From here on the manifest is what somebody wrote on purpose: what is wrong with it is no damage.
    try:
        raw = parse_json(text, limit=MAX_MANIFEST_BYTE_LENGTH)
        check_version(raw)
    except ValueError as exc:
        raise ArtifactError(f"{where}: {MANIFEST_NAME}: {exc}.") from exc
    try:
        details = parse_manifest(raw)
    except ValueError as exc:
        raise ArtifactError(f"{where}: {MANIFEST_NAME}: {exc}\nCompile it again with this version of fixstep.") from exc
    members = {name: view for name, view in views.items() if name != MANIFEST_NAME}
    problems = list(_member_problems(details, members))
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems)
        raise ArtifactError(f"{where}: the members are not those of the manifest:\n{shown}\n{_DAMAGED}")
    try:
        if STATE_NAME in members:
            _decode_state(members[STATE_NAME], details.template)
    except ValueError as exc:
        raise ArtifactError(f"{where}: {STATE_NAME}: {exc}. Compile it again with this version of fixstep.") from exc
    try:
        _zip.check_layout(data, entries, comment)
    except ValueError as exc:
        raise ArtifactError(f"{where}: {exc}. {_DAMAGED}") from exc
    return raw, details, members


def _manifest_text(entries: list[_zip.Entry], views: Mapping[str, memoryview], comment: bytes) -> memoryview:
    """The bytes of the manifest, which the comment of the container vouches for."""
    if entries[0].name != MANIFEST_NAME:
        raise ValueError(f"the first member is {entries[0].name!r}, expected {MANIFEST_NAME!r}")
    text = views[MANIFEST_NAME]
    if len(text) > MAX_MANIFEST_BYTE_LENGTH:
        raise ValueError(f"{MANIFEST_NAME} has {len(text)} bytes, more than the {MAX_MANIFEST_BYTE_LENGTH} allowed")
    if _comment(text) != comment:
        raise ValueError(f"{MANIFEST_NAME} does not have the SHA-256 that the end of the file states")
    return text


def _member_problems(details: Manifest, members: Mapping[str, memoryview]) -> Iterable[str]:
    for name, member in details.members.items():
        if name not in members:
            yield f"{name}: expected {member.byte_length} bytes, missing"
        elif len(members[name]) != member.byte_length:
            yield f"{name}: expected {member.byte_length} bytes, got {len(members[name])}"
        elif (got := _sha256(members[name])) != member.sha256:
            yield f"{name}: expected SHA-256 {member.sha256}, got {got}"
    for name in members:
        if name not in details.members:
            yield f"{name}: unexpected, {len(members[name])} bytes"
