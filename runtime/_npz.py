"""Reading .npz files: no pickle, every size checked before it is used, large arrays mapped instead of read."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fixstep.runtime._signature import Array, LeafSpec
from fixstep.targets.errors import DataError

# Below this an array is read, so that its checksum is verified; from here on it is mapped, so that a data set may be
# larger than memory, and its checksum is not.
MAP_FROM_BYTES = 64 << 20

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then the lengths of name and extra field


def load_npz(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The arrays of a .npz file by name; names are leaf paths (`x`, `inputs/x`).

    Uncompressed arrays of 64 MiB and more are memory-mapped; the others are read. All are read-only.

    Raises:
        DataError: if the file is absent, no .npz, damaged, empty, or holds Python objects.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            arrays = {_name(path, info): _array(path, file, archive, info) for info in archive.infolist()}
    except FileNotFoundError as exc:
        raise DataError(f"{path}: no such file") from exc
    except IsADirectoryError as exc:
        raise DataError(f"{path}: a folder, expected a .npz file") from exc
    except zipfile.BadZipFile as exc:
        raise DataError(f"{path}: damaged, or not a .npz file ({exc}); write it with numpy.savez") from exc
    except (zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as exc:
        if isinstance(exc, DataError):
            raise
        raise DataError(f"{path}: damaged ({exc}); write it again with numpy.savez") from exc
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror or exc})") from exc
    if not arrays:
        raise DataError(f"{path}: holds no arrays; write it with numpy.savez(path, x=..., y=...)")
    return arrays


def as_template_dtypes(arrays: Mapping[str, Array], specs: Iterable[LeafSpec]) -> dict[str, Array]:
    """The arrays, with those that numpy stored as raw bytes (bfloat16, float8) as what the template says they are."""
    dtypes = {spec.path: spec.numpy_dtype for spec in specs}
    return {
        name: array.view(dtypes[name])
        if array.dtype.kind == "V" and name in dtypes and array.dtype.itemsize == dtypes[name].itemsize
        else array
        for name, array in arrays.items()
    }


def _name(path: Path, info: zipfile.ZipInfo) -> str:
    if not info.filename.endswith(".npy"):
        raise DataError(f"{path}: holds {info.filename!r}, which is no array; write the file with numpy.savez")
    return info.filename.removesuffix(".npy")


def _array(path: Path, file: BinaryIO, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as member:
        dtype, shape, fortran = _header(member)
        header_length = member.tell()
        if dtype.hasobject:
            raise DataError(
                f"{path}: {_name(path, info)!r} holds Python objects, which are never loaded; "
                "store numbers, for example numpy.asarray(value, dtype='float32')"
            )
        byte_length = dtype.itemsize
        for n in shape:
            byte_length *= n
        if header_length + byte_length != info.file_size:
            raise DataError(
                f"{path}: {_name(path, info)!r} is damaged: expected {header_length + byte_length} bytes "
                f"by its header, got {info.file_size}"
            )
        order: Any = "F" if fortran else "C"
        if info.compress_type == zipfile.ZIP_STORED and byte_length >= MAP_FROM_BYTES:
            offset = _data_offset(file, info) + header_length
            return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape, order=order)
        return np.frombuffer(member.read(), dtype=dtype).reshape(shape, order=order)


def _header(member: Any) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(member)
    else:  # (3, 0) is written for field names outside latin-1 alone, and a structured array fits no leaf
        raise ValueError(f"array format {version}, expected (1, 0) or (2, 0)")
    if any(n < 0 for n in shape):
        raise ValueError(f"array shape {shape}")
    return dtype, shape, fortran


def _data_offset(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Where the member's bytes start: behind its local header, whose extra field the directory does not know."""
    file.seek(info.header_offset)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise ValueError(f"no member at byte {info.header_offset}")
    return int(info.header_offset) + _LOCAL_HEADER.size + int(name_length) + int(extra_length)
