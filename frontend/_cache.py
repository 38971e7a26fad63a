"""The compile cache: VMFBs by the content that made them.

The folder is `$FIXSTEP_CACHE_DIR`, else `$XDG_CACHE_HOME/fixstep`, else `~/.cache/fixstep`. It may be deleted at any
time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from fixstep.runtime._files import write_atomically

# Oldest entries are removed above this; a step is about 100 kB.
_LIMIT_BYTES = 1 << 30


def cache_folder() -> Path:
    """Where compiled modules and compiler logs are kept."""
    chosen = os.environ.get("FIXSTEP_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fixstep"


def cache_key(text: str, flags: Sequence[str], version: str) -> str:
    """A digest of everything that decides the compiler's output."""
    return hashlib.sha256("\0".join([version, *flags, text]).encode()).hexdigest()


def lookup(key: str) -> bytes | None:
    """The compiled module, or None if it is absent or damaged: a VMFB has no checksum of its own."""
    try:
        data = _path(key).read_bytes()
    except OSError:
        return None
    digest, module = data[:32], data[32:]
    if hashlib.sha256(module).digest() != digest:
        return None
    with contextlib.suppress(OSError):
        os.utime(_path(key))
    return module


def store(key: str, module: bytes) -> None:
    """Keep a compiled module; a folder that cannot be written only costs time, so that is not an error."""
    with contextlib.suppress(OSError):
        _path(key).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_path(key), lambda file: _write(file, module))
        _prune()


def _write(file: object, module: bytes) -> None:
    file.write(hashlib.sha256(module).digest())  # type: ignore[attr-defined]
    file.write(module)  # type: ignore[attr-defined]


def _path(key: str) -> Path:
    return cache_folder() / f"{key}.vmfb"


def _prune() -> None:
    entries = sorted((entry.stat().st_mtime, entry.stat().st_size, entry) for entry in cache_folder().glob("*.vmfb"))
    excess = sum(size for _, size, _ in entries) - _LIMIT_BYTES
    for _, size, entry in entries:
        if excess <= 0:
            return
        entry.unlink(missing_ok=True)
        excess -= size
