"""Which line of the user's code a value of a trace, or an error, came from."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from jax.extend import core

# The wrapper in which a trace of the user's function begins: frames further out belong to whoever started the trace.
BOUNDARY = "_call_user"

_UNKNOWN = "a line that is not known"
_HERE = str(Path(__file__).resolve().parent)
_JAX = str(Path(jax.__file__).resolve().parent)
_STANDARD = sysconfig.get_path("stdlib")


@dataclasses.dataclass(frozen=True)
class Line:
    """A place in source code.

    Attributes:
        file: the file's path.
        number: the line, from 1.
        function: the name of the function that it stands in.
    """

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        """`train.py:12, in step: loss = jnp.mean(error)`, relative to the current directory where it lies below it."""
        path = Path(self.file)
        with contextlib.suppress(ValueError):
            path = path.relative_to(Path.cwd())
        code = linecache.getline(self.file, self.number).strip()
        function = self.function.rpartition("<locals>.")[2]
        return f"{path}:{self.number}, in {function}" + (f": {code}" if code else "")


def _innermost(frames: Iterable[tuple[str, int, str]]) -> tuple[Line | None, bool]:
    """The innermost frame outside installed packages, else outside JAX, and whether the boundary was met.

    Args:
        frames: file, line and function, innermost first.
    """
    library: Line | None = None
    for file, number, function in frames:
        if function == BOUNDARY and file.startswith(_HERE):
            return library, True
        if file.startswith((_JAX, _HERE, "<frozen")):
            continue
        line = Line(file, number, function)
        installed = "site-packages" in file or "dist-packages" in file or file.startswith(_STANDARD)
        if not installed:
            return line, False
        library = library or line
    return library, False


def line_of_error(error: BaseException) -> Line | None:
    """The user's line that an exception came from, or None where no frame of theirs is left."""
    frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    starts = [i for i, (file, _, name) in enumerate(frames) if name == BOUNDARY and file.startswith(_HERE)]
    return _innermost(reversed(frames[starts[-1] :] if starts else frames))[0]


def describe_error(error: BaseException) -> str:
    """An exception raised by the user's code: its class, the beginning of its text, and the user's line."""
    # JAX adds where its own trace began, which is a line of ours, and a link.
    noise = ("while tracing the function", "See https")
    lines = [line for line in str(error).strip().splitlines() if not any(words in line for words in noise)]
    text = "\n".join(lines[:4])
    place = line_of_error(error)
    return f"{type(error).__name__}: {text}" + (f"\n  at {place}" if place else "")


def line_of_stack() -> Line | None:
    """The user's line that is being executed, or None where no frame of theirs is on the stack."""
    frames = [(frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in traceback.walk_stack(None)]
    return _innermost(frames)[0]


def line_of_equation(equation: Any) -> Line | None:
    """The user's line that an equation of a jaxpr was traced from, or None where none is known."""
    trace = equation.source_info.traceback
    if trace is None:
        return None
    return _innermost((f.file_name, f.line_num, f.function_name) for f in trace.frames)[0]


def origin(closed: core.ClosedJaxpr, index: int) -> Line | int | str:
    """Where output number `index` of a jaxpr comes from.

    Returns:
        The user's line that computed it; or the number of the input that it is, unchanged; or the words for a constant
        and for a line that is not known.
    """
    return _origin(closed.jaxpr, closed.jaxpr.outvars[index])


def _origin(jaxpr: Any, variable: Any) -> Line | int | str:
    if isinstance(variable, core.Literal) or variable in jaxpr.constvars:
        return "a constant of the step"
    if variable in jaxpr.invars:
        return int(jaxpr.invars.index(variable))
    for equation in jaxpr.eqns:
        if variable not in equation.outvars:
            continue
        line = line_of_equation(equation)
        if line is not None and "site-packages" not in line.file:
            return line
        return _inside(jaxpr, equation, equation.outvars.index(variable)) or line or _UNKNOWN
    return _UNKNOWN


def _inside(jaxpr: Any, equation: Any, index: int) -> Line | int | str | None:
    """The line inside an equation that has none of its own: a whole step under `jit`, or a key taken apart."""
    if equation.primitive.name == "random_unwrap":
        return _origin(jaxpr, equation.invars[0])
    inner = next((jaxpr_of(value) for value in equation.params.values() if jaxpr_of(value) is not None), None)
    if inner is None or len(inner.outvars) != len(equation.outvars):
        return None
    found = _origin(inner, inner.outvars[index])
    if isinstance(found, int) and len(inner.invars) == len(equation.invars):
        return _origin(jaxpr, equation.invars[found])
    return None if isinstance(found, int) or found == _UNKNOWN else found


def jaxpr_of(value: Any) -> Any:
    """The plain jaxpr of a parameter of an equation, or None where it is none."""
    if isinstance(value, core.ClosedJaxpr):
        return value.jaxpr
    return value if isinstance(value, core.Jaxpr) else None
