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
    found = list(frames(location))
    for file, line in found:
        if not file.startswith((*_INSTALLED, _OURS)):
            return f"{file}:{line}"
    return f"{found[0][0]}:{found[0][1]}" if found else None
