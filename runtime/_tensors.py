"""Leaves in the safetensors format, by leaf path, through its library. `docs/checkpoint.md` says what is stored how."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save

from fixstep.runtime._signature import Array, LeafSpec, describe, dtype_from_name

# The dtypes that every supported version of the library takes from numpy, and their safetensors types. Newer versions
# take a few more; these stay with carriers, so that a file does not depend on the version that wrote it.
_TYPES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_PARTS = {"complex64": "float32", "complex128": "float64"}
_METADATA = "__metadata__"


def stored(spec: LeafSpec) -> tuple[str, str, tuple[int, ...]]:
    """Name, dtype and shape of the tensor that holds the bits of a leaf."""
    # One name is taken by the format itself; a slash more keeps all names apart.
    name = spec.path + "/" if spec.path.rstrip("/") == _METADATA else spec.path
    if spec.dtype in _TYPES:
        return name, spec.dtype, spec.shape
    if spec.dtype in _PARTS:
        return name, _PARTS[spec.dtype], (*spec.shape, 2)
    if spec.numpy_dtype.itemsize == 1:
        return name, "uint8", spec.shape
    raise ValueError(f"{spec.path}: the dtype {spec.dtype} cannot be stored")


def encode_leaves(
    leaves: Mapping[str, Array], specs: Sequence[LeafSpec], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """A whole file, in memory; the same input gives the same bytes.

    Args:
        leaves: arrays by leaf path, each with the dtype and shape of its spec.
        specs: the leaves.
        metadata: at most one text by name; the library writes several in an order that changes from run to run.

    Raises:
        ValueError: for paths that occur twice or are no Unicode, and dtypes that cannot be stored.
    """
    tensors: dict[str, Array] = {}
    for spec in specs:
        name, dtype, shape = stored(spec)
        if name in tensors:
            raise ValueError(f"the leaf path {spec.path!r} occurs twice")
        array = np.asarray(leaves[spec.path], order="C")  # the library takes the memory as it lies
        tensors[name] = array.reshape(-1).view(dtype_from_name(dtype)).reshape(shape)
    try:
        data: bytes = save(tensors, None if metadata is None else dict(metadata))
    except SafetensorError as exc:
        raise ValueError(f"safetensors does not write it: {exc}") from exc
    return data


def decode_leaves(data: bytes | memoryview, specs: Sequence[LeafSpec]) -> dict[str, Array]:
    """The leaves of a whole file in the order of `specs`, as read-only arrays of their own memory.

    The library bounds the header and checks that the tensors cover the data without hole or overlap. That no byte
    changed since the file was written is for the caller to know, by a digest.

    Args:
        data: uint8, the bytes of a file.
        specs: the leaves that must be there, and no others.

    Raises:
        ValueError: if it is no safetensors file, listing the leaves that differ, or for a bool neither 0 nor 1.
    """
    found = dict(_deserialized(data))
    leaves: dict[str, Array] = {}
    problems = []
    for spec in specs:
        name, dtype, shape = stored(spec)
        expected, tensor = describe(_TYPES[dtype], shape), found.pop(name, None)
        got = tensor and describe(tensor["dtype"], tensor["shape"])
        if tensor is None or got != expected:
            problems.append(f"  {name}: expected {expected}, " + (f"got {got}" if tensor else "missing"))
            continue
        leaves[spec.path] = array = np.ndarray(spec.shape, spec.numpy_dtype, tensor["data"])
        _check_bools(spec.path, array)
        array.flags.writeable = False
    problems += [f"  {name}: unexpected" for name in found]
    if problems:
        raise ValueError("the tensors are not the leaves of the template:\n" + "\n".join(sorted(problems)))
    return leaves


def decode_tensors(data: bytes) -> dict[str, Array]:
    """Every tensor of a whole file by name, as it is stored: read-only arrays, from a writer that need not be this one.

    Raises:
        ValueError: if it is no safetensors file, or one of its types is unknown, naming the tensor.
    """
    dtypes = {of_file: name for name, of_file in _TYPES.items()}
    arrays: dict[str, Array] = {}
    for name, tensor in _deserialized(data):
        if tensor["dtype"] not in dtypes:
            raise ValueError(f"the tensor {name!r} has the type {tensor['dtype']}; those known are {', '.join(dtypes)}")
        arrays[name] = np.ndarray(tuple(tensor["shape"]), dtype_from_name(dtypes[tensor["dtype"]]), tensor["data"])
        _check_bools(name, arrays[name])
        arrays[name].flags.writeable = False
    return arrays


def _deserialized(data: bytes | memoryview) -> list[tuple[str, dict[str, Any]]]:
    try:
        return deserialize(bytes(data))  # type: ignore[no-untyped-call,no-any-return]
    except SafetensorError as exc:
        raise ValueError(f"not a whole safetensors file: {exc}") from exc


def _check_bools(name: str, array: Array) -> None:
    if array.dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError(f"{name}: a bool is neither 0 nor 1")


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a file; its data is not read, though its length is checked.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: if it is no safetensors file.
    """
    try:
        with safe_open(path, framework="np") as file:
            return dict(file.metadata() or {})
    except SafetensorError as exc:
        raise ValueError(f"not a whole safetensors file: {exc}") from exc
