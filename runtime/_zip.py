"""The container of an artifact: a zip file of one exact layout, so that every byte of it is accounted for.

`docs/artifact.md` specifies it. Members are stored, their data aligned, their order and dates fixed: names, data and
comment determine the bytes of the file. Any zip program can read it; only `pack` writes it, and `unpack` reads nothing
else. Zip records are those of PKWARE's APPNOTE.TXT, all numbers little-endian.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import zlib
from collections.abc import Iterator, Mapping

ALIGNMENT = 64
MAX_BYTE_LENGTH = 2**32 - 2  # of a file without the zip64 extension
MAX_MEMBERS = 1024
COMMENT_START = b"fixstep manifest sha256 "
COMMENT_LENGTH = len(COMMENT_START) + 64

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_LOCAL_SIGNATURE, _CENTRAL_SIGNATURE, _END_SIGNATURE = b"PK\3\4", b"PK\1\2", b"PK\5\6"
_VERSION_NEEDED = 10  # 1.0: stored members, nothing else
_MADE_BY = 3 << 8 | 20  # on Unix, so that other programs apply _MODE
_MODE = 0o100644 << 16  # an ordinary file, rw-r--r--
_DATE, _TIME = 1 << 5 | 1, 0  # 1980-01-01 00:00, the first that zip knows
_EXTRA_ID = 0xD935  # the alignment field known from Android packages: the alignment in 2 bytes, then zeros
_EXTRA_LENGTH = 6
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*(/[A-Za-z0-9_][A-Za-z0-9_.+=-]*)*")
_MAX_NAME_LENGTH = 255


@dataclasses.dataclass(frozen=True)
class Entry:
    """One member: its name, where its header and its data start, and the length of its data, in bytes."""

    name: str
    header: int
    data: int
    byte_length: int

    @property
    def end(self) -> int:
        """The first byte after the data."""
        return self.data + self.byte_length


def name_problem(name: str) -> str | None:
    """Why a text may not be the name of a member; None if it may."""
    if len(name) > _MAX_NAME_LENGTH:
        return f"longer than {_MAX_NAME_LENGTH} characters"
    if _NAME.fullmatch(name) is None or any(part.endswith(".") for part in name.split("/")):
        return "not a plain relative path of letters, digits and _.+=- that starts each part with a letter or digit"
    return None


def place(byte_lengths: Mapping[str, int]) -> list[Entry]:
    """Where each member lies, in the given order."""
    entries = []
    offset = 0
    for name, byte_length in byte_lengths.items():
        data = offset + _LOCAL.size + len(name) + _EXTRA_LENGTH
        data += -data % ALIGNMENT
        entries.append(Entry(name, offset, data, byte_length))
        offset = data + byte_length
    return entries


def _local_header(entry: Entry, crc: int) -> bytes:
    name = entry.name.encode("ascii")
    extra_length = entry.data - entry.header - _LOCAL.size - len(name)
    head = _LOCAL.pack(
        _LOCAL_SIGNATURE, _VERSION_NEEDED, 0, 0, _TIME, _DATE, crc, entry.byte_length, entry.byte_length,
        len(name), extra_length,
    )  # fmt: skip
    extra = struct.pack("<3H", _EXTRA_ID, extra_length - 4, ALIGNMENT)
    return head + name + extra.ljust(extra_length, b"\0")


def _tail(entries: list[Entry], crcs: list[int], comment: bytes) -> bytes:
    """The central directory and the end record."""
    central = b"".join(
        _CENTRAL.pack(
            _CENTRAL_SIGNATURE, _MADE_BY, _VERSION_NEEDED, 0, 0, _TIME, _DATE, crc, entry.byte_length,
            entry.byte_length, len(entry.name), 0, 0, 0, 0, _MODE, entry.header,
        )
        + entry.name.encode("ascii")
        for entry, crc in zip(entries, crcs, strict=True)
    )  # fmt: skip
    count, offset = len(entries), entries[-1].end
    return central + _END.pack(_END_SIGNATURE, 0, 0, count, count, len(central), offset, len(comment)) + comment


def pack(members: Mapping[str, bytes | memoryview], comment: bytes) -> Iterator[bytes | memoryview]:
    """The bytes of a container, piece by piece.

    Raises:
        ValueError: for names that may not be, too many members, or more bytes than the format holds.
    """
    problems = [f"{name!r}: {why}" for name in members if (why := name_problem(name))] + _clashes(list(members))
    if problems:
        raise ValueError("bad member names: " + "; ".join(problems))
    if not 1 <= len(members) <= MAX_MEMBERS:
        raise ValueError(f"{len(members)} members, expected 1 to {MAX_MEMBERS}")
    entries = place({name: len(data) for name, data in members.items()})
    crcs = [zlib.crc32(data) for data in members.values()]
    tail = _tail(entries, crcs, comment)
    if entries[-1].end + len(tail) > MAX_BYTE_LENGTH:
        raise ValueError(f"{entries[-1].end + len(tail)} bytes, more than the {MAX_BYTE_LENGTH} that the format holds")
    for entry, crc, data in zip(entries, crcs, members.values(), strict=True):
        yield _local_header(entry, crc)
        yield data
    yield tail


def _clashes(names: list[str]) -> list[str]:
    """Names that occur twice, also on a system that ignores case."""
    seen: dict[str, str] = {}
    problems = []
    for name in names:
        other = seen.setdefault(name.lower(), name)
        if other == name and names.count(name) > 1:
            problems.append(f"{name!r} occurs twice")
        elif other != name:
            problems.append(f"{name!r} and {other!r} differ only in case")
    return sorted(set(problems))


def unpack(data: memoryview) -> tuple[list[Entry], bytes]:
    """The members of a container and its comment, read from the central directory.

    Nothing outside `data` is touched and the work is bounded by its length. The data and the local headers are not
    looked at; `check_layout` does that.

    Raises:
        ValueError: saying what is wrong.
    """
    end = len(data) - _END.size - COMMENT_LENGTH
    if end < 0 or data[end : end + 4] != _END_SIGNATURE or data[-COMMENT_LENGTH:][:8] != COMMENT_START[:8]:
        raise ValueError(_missing_end(data))
    _, disk, start_disk, here, count, length, offset, comment_length = _END.unpack_from(data, end)
    if disk or start_disk:
        raise ValueError("the end record speaks of several disks, expected one file")
    if 0xFFFF in (here, count) or 0xFFFFFFFF in (length, offset):
        raise ValueError("the end record asks for the zip64 extension, which the format does not use")
    if here != count or not 1 <= count <= MAX_MEMBERS:
        raise ValueError(f"the end record counts {here} and {count} members, expected 1 to {MAX_MEMBERS}")
    if comment_length != COMMENT_LENGTH or offset + length != end:
        raise ValueError(
            f"the end record places the directory at {offset} to {offset + length}, expected its end at {end}"
        )
    listed = _central_directory(data[offset:end], count)
    problems = _clashes([name for name, _, _ in listed])
    if problems:
        raise ValueError("bad member names: " + "; ".join(problems))
    entries = place({name: byte_length for name, byte_length, _ in listed})
    for entry, (name, _, header) in zip(entries, listed, strict=True):
        if entry.header != header or entry.end > offset:
            raise ValueError(
                f"the member {name!r} is listed at {header}, expected {entry.header} to {entry.end} before {offset}"
            )
    if entries[-1].end != offset:
        raise ValueError(f"{offset - entries[-1].end} bytes after the last member belong to none")
    return entries, bytes(data[-COMMENT_LENGTH:])


def _missing_end(data: memoryview) -> str:
    """Why a file does not end as a container does."""
    if len(data) == 0:
        return "the file is empty"
    if data[:4] != _LOCAL_SIGNATURE:
        return f"not a fixstep artifact: it starts with {bytes(data[:4])!r}, expected {_LOCAL_SIGNATURE!r}"
    window = bytes(data[-(2 * 65536) :])
    at = window.rfind(_END_SIGNATURE)
    if at < 0 or len(window) < at + _END.size:
        return "the end record is missing or damaged (was the file cut short?)"
    if window.startswith(COMMENT_START[:8], at + _END.size):
        rest = len(window) - at - _END.size - COMMENT_LENGTH
        return f"{rest} bytes follow the end record" if rest > 0 else "the end record was cut short"
    return "a zip file that fixstep did not write, or whose end record is damaged (was it packed again?)"


def _central_directory(data: memoryview, count: int) -> list[tuple[str, int, int]]:
    """Name, length and header offset of each member."""
    listed = []
    position = 0
    for index in range(count):
        if position + _CENTRAL.size > len(data):
            raise ValueError(f"the directory ends within entry {index}")
        fields = _CENTRAL.unpack_from(data, position)
        signature, _, _, flags, method, _, _, _, packed, byte_length, name_length, extra, note = fields[:13]
        attributes, header = fields[15:]
        position += _CENTRAL.size
        raw = bytes(data[position : position + name_length])
        position += name_length + extra + note
        if signature != _CENTRAL_SIGNATURE or position > len(data):
            raise ValueError(f"entry {index} of the directory is damaged")
        shown = repr(raw[:_MAX_NAME_LENGTH])[1:]
        problem = _raw_name_problem(raw) or _entry_problem(flags, method, packed, byte_length, attributes)
        if problem:
            raise ValueError(f"the member {shown}: {problem}")
        listed.append((raw.decode("ascii"), byte_length, header))
    if position != len(data):
        raise ValueError(f"the directory has {len(data) - position} bytes more than its {count} entries")
    return listed


def _raw_name_problem(raw: bytes) -> str | None:
    if not raw.isascii():
        return "the name is not ASCII"
    problem = name_problem(raw.decode("ascii"))
    return problem and f"the name is {problem}"


def _entry_problem(flags: int, method: int, packed: int, byte_length: int, attributes: int) -> str | None:
    if flags & 1:
        return "is encrypted, expected a plain member"
    if method != 0:
        return f"is compressed (method {method}), expected a stored member"
    if flags:
        return f"has the flags {flags:#06x}, expected none"
    if 0xFFFFFFFF in (packed, byte_length):
        return "asks for the zip64 extension, which the format does not use"
    if packed != byte_length:
        return f"is listed with {packed} and {byte_length} bytes"
    if attributes >> 16 & 0o170000 == 0o120000:
        return "is a symbolic link, expected a file"
    return None


def check_layout(data: memoryview, entries: list[Entry], comment: bytes) -> None:
    """Compare every byte that is not a member's data with what `pack` would have written.

    Raises:
        ValueError: naming the part that differs.
    """
    crcs = [zlib.crc32(data[entry.data : entry.end]) for entry in entries]
    for entry, crc in zip(entries, crcs, strict=True):
        if data[entry.header : entry.data] != _local_header(entry, crc):
            raise ValueError(
                f"the header of the member {entry.name!r}, bytes {entry.header} to {entry.data}, is damaged"
            )
    start = entries[-1].end
    if data[start:] != _tail(entries, crcs, comment):
        raise ValueError(f"the directory, bytes {start} to {len(data)}, is damaged")
