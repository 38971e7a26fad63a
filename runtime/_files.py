"""Files that are whole or absent: atomic writing, bounded reading, and messages for what the system refuses."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

ALIGNMENT = 64
"""Bytes; what a file is read into starts at such an address, so that aligned offsets stay aligned in memory."""

_PARTIAL = re.compile(r"\.fixstep-[0-9a-f]{16}\.partial")
# A file that is still being written is touched all the time; one that rested this long belongs to nobody.
_ABANDONED_AFTER_S = 3600.0

_ADVICE = {
    errno.ENOSPC: "Free some space or write elsewhere.",
    errno.EDQUOT: "Free some space within the quota or write elsewhere.",
    errno.EFBIG: "The system limits the size of files here (ulimit -f, or the file system): write elsewhere.",
    errno.EACCES: "Change the permissions or use another place.",
    errno.EPERM: "Change the permissions or use another place.",
    errno.EROFS: "The file system is read-only: use another place.",
    errno.ENOTDIR: "A part of the path is a file, not a folder: check the path.",
    errno.EISDIR: "It is a folder: give the name of a file.",
    errno.ENAMETOOLONG: "Use a shorter name.",
    errno.EINVAL: "Give the name of an ordinary file.",
}


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a file that appears at `path` only when it is complete and on the disk.

    The bytes go to a temporary file in the same folder, which is synced and then renamed over `path`; the folder is
    synced last. Until the rename the old file is there, whole; after it, the new one. A process killed before the
    rename leaves a file `.fixstep-<16 hex digits>.partial`, which nothing reads and `remove_abandoned` removes. A link
    at `path` is followed.

    Args:
        path: where the file is to be. An existing ordinary file is replaced.
        write: called once with the open file.

    Raises:
        OSError: what the system refused. The old file is untouched and the temporary one is removed.
    """
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file():
        # A rename would put a file in the place of a device such as /dev/null.
        code = errno.EISDIR if final.is_dir() else errno.EINVAL
        raise OSError(code, "not an ordinary file", str(final))
    partial = final.parent / f".fixstep-{os.urandom(8).hex()}.partial"
    try:
        with open(partial, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, final)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can.

    Raises:
        OSError: if the system tried and failed.
    """
    if os.name != "posix":  # elsewhere a folder cannot be opened, and a rename is durable by itself
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
            raise
    finally:
        os.close(handle)


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder an hour ago or earlier."""
    for entry in folder.iterdir():
        if _PARTIAL.fullmatch(entry.name) is None:
            continue
        try:
            if time.time() - entry.stat().st_mtime > _ABANDONED_AFTER_S:
                entry.unlink()
        except OSError:
            continue  # somebody else was faster, or it is not ours to remove; it does no harm


def open_ordinary(path: str | os.PathLike[str]) -> BinaryIO:
    """Open an ordinary file for reading; a pipe or a device, which has no size, is refused.

    Raises:
        OSError: if the file is absent, not readable or not an ordinary file.
    """
    mode = os.stat(path).st_mode  # before opening, since the opening of a pipe would wait for a writer
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return open(path, "rb", buffering=0)


def file_length(file: BinaryIO) -> int:
    """The length of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def read_exactly(file: BinaryIO, byte_length: int) -> memoryview:
    """Read bytes into private memory that starts at a multiple of `ALIGNMENT`.

    The caller bounds `byte_length` first. The memory is ours alone: a file replaced later cannot change it.

    Returns:
        A read-only view of uint8.

    Raises:
        EOFError: if the file ends earlier.
    """
    buffer = aligned_buffer(byte_length)
    view = buffer.data
    filled = 0
    while filled < byte_length:
        count = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"it ended after {filled} of {byte_length} bytes; is it being written?")
        filled += count
    return view.toreadonly()


def aligned_buffer(byte_length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialised bytes, uint8 [byte_length], at an address that is a multiple of `ALIGNMENT`."""
    raw = np.empty(byte_length + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + byte_length]


def explain_os_error(action: str, path: str | os.PathLike[str], exc: OSError) -> str:
    """One message for what the system refused: what, where, why, and what to do.

    Args:
        action: what was tried: `write`, `read`, `make`, `remove`.
        path: the file.
        exc: what the system said.
    """
    reason = exc.strerror or str(exc)
    if exc.errno == errno.ENOENT and action == "write":
        advice = f"Make the folder {Path(path).parent} first."
    elif exc.errno == errno.ENOENT:
        advice = "Check the path."
    else:
        advice = _ADVICE.get(exc.errno or 0, "Try again, or use another place.")
    kept = " What was there before is unchanged." if action == "write" else ""
    return f"{os.fspath(path)}: cannot {action} it: {reason}. {advice}{kept}"
