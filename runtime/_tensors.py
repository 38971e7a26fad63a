"""Leaves in the safetensors format, by leaf path: a header and one run of data, streamed without a second copy.

`docs/checkpoint.md` says which safetensors type holds which dtype. Other programs read these files with the safetensors
library. It is not used here: its calls differ between its versions, they hold every tensor twice, and a reader that
refuses damage has to check every length, offset and byte itself.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fixstep.runtime._signature import Array, LeafSpec, describe
from fixstep.runtime._strict_json import dump_json, parse_json

MAX_HEADER_BYTE_LENGTH = 100_000_000  # of the safetensors library too
_ALIGNMENT = 64
_METADATA = "__metadata__"

# Dtypes by their safetensors type. A dtype that safetensors lacks keeps its bits in an unsigned integer; complex128 is
# (real, imaginary) in a last dimension of 2.
_NATIVE = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_BITS = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}


@dataclasses.dataclass(frozen=True)
class Stored:
    """How one leaf stands in a file: tensor name, safetensors type and shape, alignment and length in bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    alignment: int
    byte_length: int

    def __str__(self) -> str:
        """`F32[16,8]`."""
        return describe(self.kind, self.shape)


def stored(spec: LeafSpec) -> Stored:
    """How a leaf is stored.

    Raises:
        ValueError: for a dtype that cannot be stored.
    """
    itemsize = spec.numpy_dtype.itemsize
    shape, kind = spec.shape, _NATIVE.get(spec.dtype)
    if spec.dtype == "complex128":
        kind, shape, itemsize = "F64", (*shape, 2), 8
    elif kind is None:
        kind = _BITS.get(itemsize)
    if kind is None:
        raise ValueError(f"{spec.path}: the dtype {spec.dtype} cannot be stored")
    # One name is taken by the format itself; a slash more keeps all names apart.
    name = spec.path + "/" if spec.path.rstrip("/") == _METADATA else spec.path
    return Stored(name, kind, shape, itemsize, spec.byte_length)


def _in_file_order(specs: Iterable[LeafSpec]) -> list[LeafSpec]:
    """Larger elements first, so that each leaf is aligned without padding, which the format forbids."""
    return sorted(specs, key=lambda spec: -stored(spec).alignment)


def make_header(specs: Sequence[LeafSpec], metadata: Mapping[str, str]) -> bytes:
    """The start of a file: the length of the header in 8 bytes, and the header, padded so that data is aligned.

    Args:
        specs: the leaves, in any order; the header lists them in file order.
        metadata: text by name; it stands first, in this order.

    Raises:
        ValueError: for paths that occur twice or are no Unicode, dtypes that cannot be stored, or too long a header.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for spec in _in_file_order(specs):
        item = stored(spec)
        if item.name in entries:
            raise ValueError(f"the leaf path {spec.path!r} occurs twice")
        end = offset + item.byte_length
        entries[item.name] = {"dtype": item.kind, "shape": list(item.shape), "data_offsets": [offset, end]}
        offset = end
    text = dump_json(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTE_LENGTH:
        raise ValueError(f"the header has {len(text)} bytes, more than the {MAX_HEADER_BYTE_LENGTH} allowed")
    return struct.pack("<Q", len(text)) + text


def data_pieces(leaves: Mapping[str, Array], specs: Sequence[LeafSpec]) -> Iterable[memoryview]:
    """The bytes of each leaf in file order, little-endian, row-major; views where the leaf is so already."""
    for spec in _in_file_order(specs):
        array = np.asarray(leaves[spec.path], order="C")
        yield array.reshape(-1).view(np.uint8).data


def header_byte_length(first: bytes | memoryview, file_byte_length: int) -> int:
    """The length of the header that the first 8 bytes of a file state, checked against the length of the file.

    Raises:
        ValueError: if the file cannot be what it says.
    """
    if len(first) < 8:
        raise ValueError(f"{len(first)} bytes, too short to be a safetensors file")
    length = int(struct.unpack("<Q", first[:8])[0])
    if length > MAX_HEADER_BYTE_LENGTH:
        raise ValueError(f"a header of {length} bytes is stated, at most {MAX_HEADER_BYTE_LENGTH} are allowed")
    if length % 8:
        raise ValueError(f"a header of {length} bytes is stated, expected a multiple of 8")
    if 8 + length > file_byte_length:
        raise ValueError(
            f"a header of {length} bytes is stated, in a file of {file_byte_length} bytes: it was cut short"
        )
    return length


def parse_header(text: bytes | memoryview) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata and tensor entries of a header.

    Raises:
        ValueError: if it is none.
    """
    entries = parse_json(text, limit=MAX_HEADER_BYTE_LENGTH)
    if not isinstance(entries, dict):
        raise ValueError("the header is not a JSON object")
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise ValueError("the metadata is not an object of texts")
    return metadata, entries


def find_leaves(entries: Mapping[str, Any], specs: Sequence[LeafSpec], data_byte_length: int) -> dict[str, int]:
    """Where each leaf starts in the data, checked: every leaf there, as its spec says, no byte unused or used twice.

    Args:
        entries: the tensors of a header.
        specs: the leaves that must be there, and no others.
        data_byte_length: how many bytes follow the header.

    Raises:
        ValueError: listing the leaves that differ.
    """
    expected = {(item := stored(spec)).name: (spec.path, item) for spec in specs}
    problems = [f"  {name}: unexpected" for name in entries if name not in expected]
    starts: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for name, (path, item) in expected.items():
        span = _span(entries.get(name), item)
        if isinstance(span, str):
            problems.append(f"  {name}: expected {item}, {span}")
            continue
        starts[path] = span[0]
        spans.append(span)
    if problems:
        raise ValueError("the tensors are not the leaves of the template:\n" + "\n".join(sorted(problems)))
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise ValueError(f"the tensors leave a hole or overlap at byte {position} of the data")
        position = end
    if position != data_byte_length:
        raise ValueError(f"the tensors have {position} bytes, the file holds {data_byte_length} of data")
    return starts


def _span(entry: Any, item: Stored) -> tuple[int, int] | str:
    if entry is None:
        return "missing"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return f"got {entry!r:.60}"
    shape = entry["shape"]
    plain = isinstance(shape, list) and all(type(n) is int for n in shape)
    if entry["dtype"] != item.kind or not plain or tuple(shape) != item.shape:
        return f"got {entry['dtype']!r:.20} with shape {shape!r:.60}"
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int for n in offsets):
        return f"got the offsets {offsets!r:.60}"
    start, end = offsets
    if start < 0 or end - start != item.byte_length or start % item.alignment:
        return f"got the offsets {start} to {end}, not {item.byte_length} bytes at a multiple of {item.alignment}"
    return start, end


def leaf_arrays(data: memoryview, starts: Mapping[str, int], specs: Sequence[LeafSpec]) -> dict[str, Array]:
    """The leaves in the order of `specs`, as read-only views of the data.

    Args:
        data: uint8, at an address aligned for every element, unchanged while the arrays live.
        starts: from `find_leaves`.
        specs: the leaves.

    Raises:
        ValueError: for a bool that is neither 0 nor 1.
    """
    whole = np.asarray(data)
    leaves: dict[str, Array] = {}
    for spec in specs:
        start = starts[spec.path]
        raw = whole[start : start + spec.byte_length]
        if spec.dtype == "bool" and raw.size and int(raw.max()) > 1:
            raise ValueError(f"{spec.path}: a bool is neither 0 nor 1")
        array = raw.view(spec.numpy_dtype).reshape(spec.shape)
        array.flags.writeable = False
        leaves[spec.path] = array
    return leaves


def encode_leaves(leaves: Mapping[str, Array], specs: Sequence[LeafSpec]) -> bytes:
    """A whole file, in memory, of leaves that fit their specs; the artifact's initial state is one.

    Args:
        leaves: arrays by leaf path, each with the dtype and shape of its spec.
        specs: the leaves.

    Raises:
        ValueError: for leaves that cannot be stored.
    """
    return make_header(specs, {}) + b"".join(data_pieces(leaves, specs))


def decode_leaves(data: memoryview, specs: Sequence[LeafSpec]) -> dict[str, Array]:
    """The leaves of a whole file in the order of `specs`, as read-only views of the data.

    Args:
        data: uint8, the bytes of a file, at an aligned address, unchanged while the arrays live.
        specs: the leaves that must be there, and no others.

    Raises:
        ValueError: if the file is damaged or holds other leaves.
    """
    length = header_byte_length(data[:8], len(data))
    _, entries = parse_header(data[8 : 8 + length])
    body = data[8 + length :]
    return leaf_arrays(body, find_leaves(entries, specs, len(body)), specs)
