"""Finds the user's line in the location that JAX gave an operation."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")})
_OURS = str(Path(__file__).resolve().parent)


def frames(location: Any) -> Iterator[tuple[str, int]]:
    """File and line of each Python frame in a `jaxlib.mlir.ir.Location`, the innermost first."""
    if isinstance(location, ir.CallSiteLoc):
        yield from frames(location.callee)
        yield from frames(location.caller)
    elif isinstance(location, ir.FusedLoc):
        for part in location.locations:
            yield from frames(part)
    elif isinstance(location, ir.NameLoc):
        yield from frames(location.child_loc)
    elif isinstance(location, ir.FileLineColLoc):
        yield location.filename, location.start_line


def user_line(location: Any) -> str | None:
    """`file:line` of the innermost frame that is neither in an installed package nor in fixstep.

    Falls back to the innermost frame of a library, where no frame of the user's is left.
    """
    library: str | None = None
    for file, line in frames(location):
        if file.startswith(_OURS):
            break  # further out is whoever called fixstep, not the step
        if not file.startswith(_INSTALLED):
            return f"{file}:{line}"
        library = library or f"{file}:{line}"
    return library
