"""What a traced function holds besides its arguments: arrays and keys that would be frozen into the artifact, and calls
back to the host, which a compiled function cannot make.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from fixstep.frontend._lines import jaxpr_of, line_of_equation
from fixstep.frontend._seed import SEPARATOR, is_key
from fixstep.runtime._signature import describe

LARGE_BYTES = 64 * 1024
_SEARCH_DEPTH = 4

_HOST_CALLS = frozenset(
    {"pure_callback", "io_callback", "debug_callback", "debug_print", "infeed", "outfeed", "xla_pmap_callback"}
)


@dataclasses.dataclass(frozen=True)
class Capture:
    """An array or key that a function closes over.

    Attributes:
        function: which one: `step`, `evaluate`, `predict`.
        name: the variable that holds it, and where that is: "`table`, a closure variable of step".
        kind: `float32[512,512]`, or `PRNG key threefry2x32[]`.
        byte_length: its size in bytes.
    """

    function: str
    name: str
    kind: str
    byte_length: int

    def __str__(self) -> str:
        """One sentence for the report."""
        size = _size(self.byte_length)
        return f"{self.function} closes over {self.name}: {self.kind} ({size}), frozen into the artifact"


@dataclasses.dataclass(frozen=True)
class HostCall:
    """A call back to Python in a traced function.

    Attributes:
        operation: the primitive: `pure_callback`, `io_callback`, `debug_callback`, `debug_print`.
        line: the user's file, line and code, or an empty text.
    """

    operation: str
    line: str

    def __str__(self) -> str:
        """Name and place."""
        return f"{self.operation}" + (f" at {self.line}" if self.line else "")


def find_effects(jaxpr: Any) -> tuple[HostCall, ...]:
    """The calls back to the host in a jaxpr and in all jaxprs inside it, each place once."""
    found = (
        HostCall(equation.primitive.name, str(line_of_equation(equation) or ""))
        for equation in equations(jaxpr_of(jaxpr))
        if equation.primitive.name in _HOST_CALLS
    )
    return tuple(dict.fromkeys(found))


def find_captures(closed: core.ClosedJaxpr, function: Callable[..., Any], name: str) -> tuple[Capture, ...]:
    """The arrays of at least `LARGE_BYTES` and the PRNG keys that a traced function closes over, by name.

    Args:
        closed: its jaxpr.
        function: the function itself, whose variables are searched for the names.
        name: the word for it in messages.
    """
    captures: list[Capture] = []
    reported: list[Any] = []
    for constant, raw_key in _constants(closed):
        if any(constant is seen for seen in reported):
            continue
        reported.append(constant)
        if is_key(constant):
            kind = f"PRNG key {jax.random.key_impl(constant)}{list(constant.shape)}"
            size = int(jax.random.key_data(constant).nbytes)
        elif raw_key:
            kind, size = f"PRNG key {describe('uint32', np.shape(constant))}", int(np.asarray(constant).nbytes)
        else:
            size = int(np.asarray(constant).nbytes)
            kind = describe(np.asarray(constant).dtype.name, np.shape(constant))
            if size < LARGE_BYTES:
                continue
        captures.append(Capture(name, _holder(constant, function, name), kind, size))
    return tuple(captures)


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a plain jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner(equation):
            yield from equations(jaxpr_of(inner))


def _inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            if jaxpr_of(item) is not None:
                yield item


def _constants(closed: core.ClosedJaxpr) -> Iterator[tuple[Any, bool]]:
    """Every constant of a jaxpr and of those inside it, and whether it is the raw data of a PRNG key."""
    keys = _raw_keys(closed.jaxpr) if closed.consts else set()
    for variable, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        yield constant, variable in keys
    for equation in equations(closed.jaxpr):
        for inner in _inner(equation):
            if isinstance(inner, core.ClosedJaxpr) and inner.consts:
                inner_keys = _raw_keys(inner.jaxpr)
                for variable, constant in zip(inner.jaxpr.constvars, inner.consts, strict=True):
                    yield constant, variable in inner_keys


def _raw_keys(jaxpr: Any) -> set[Any]:
    """The variables of a jaxpr that are made into PRNG keys in it or in a jaxpr inside it (`jax.random.PRNGKey`)."""
    found: set[Any] = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "random_wrap":
            found.update(v for v in equation.invars if not isinstance(v, core.Literal))
        for inner in map(jaxpr_of, _inner(equation)):
            inside = _raw_keys(inner)
            if len(inner.invars) == len(equation.invars):
                pairs = zip(inner.invars, equation.invars, strict=True)
                found.update(outer for v, outer in pairs if v in inside and not isinstance(outer, core.Literal))
    return found


def _holder(constant: Any, function: Callable[..., Any], name: str) -> str:
    """The variable that holds a constant; the same array first, else one of the same shape and values."""
    candidates = list(_variables(function, name, 0, set()))
    for same in (_identical, _equal):
        for value, where in candidates:
            if same(constant, value):
                return where
    return "an array without a name"


def _identical(constant: Any, value: Any) -> bool:
    return constant is value or getattr(constant, "val", None) is value


def _equal(constant: Any, value: Any) -> bool:
    if is_key(constant) or is_key(value):
        return is_key(constant) and is_key(value) and _equal(jax.random.key_data(constant), jax.random.key_data(value))
    if np.shape(constant) != np.shape(value):
        return False
    mine = np.asarray(constant)
    # JAX may have made the constant narrower than the array that the variable holds.
    return bool(np.array_equal(mine, np.asarray(value).astype(mine.dtype)))


def _variables(function: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[Any, str]]:
    """Every array that a function can reach, with the words for the variable that holds it."""
    if depth > _SEARCH_DEPTH or id(function) in seen:
        return
    seen.add(id(function))
    for held, variable, where in _held(function, name):
        for value, path in _arrays(held, variable):
            yield value, f"`{path}`, {where}"
        for inner in _functions(held):
            yield from _variables(inner, getattr(inner, "__name__", variable), depth + 1, seen)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield from _variables(wrapped, name, depth, seen)


def _held(function: Any, name: str) -> Iterator[tuple[Any, str, str]]:
    """What a function holds: the value, the variable's name, and what kind of variable it is."""
    if isinstance(function, functools.partial):
        for index, value in enumerate(function.args):
            yield value, f"args[{index}]", f"an argument of the partial {name}"
        for key, value in function.keywords.items():
            yield value, key, f"an argument of the partial {name}"
        yield function.func, "func", f"the function of the partial {name}"
        return
    if inspect.ismethod(function):
        yield function.__self__, "self", f"the object that {name} is bound to"
        yield function.__func__, "func", f"the function of {name}"
        return
    if not inspect.isfunction(function):
        if not inspect.isclass(function) and callable(function) and hasattr(function, "__dict__"):
            yield function, "self", f"the object {name}"
            yield type(function).__call__, "func", f"the function of {name}"
        return
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that is not assigned yet
            yield cell.cell_contents, key, f"a closure variable of {name}"
    if "site-packages" not in function.__code__.co_filename:  # libraries do not hold the user's arrays in globals
        for key in dict.fromkeys(_global_names(function.__code__)):
            if key in function.__globals__:
                yield function.__globals__[key], key, f"a global variable of {function.__module__}"
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            yield parameter.default, key, f"a default argument of {name}"


def _global_names(code: Any) -> list[str]:
    """The global names that a function uses, also in the functions written inside it."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            names += _global_names(constant)
    return names


def _arrays(held: Any, variable: str) -> Iterator[tuple[Any, str]]:
    """The arrays in a variable: in a pytree by path, in an object by attribute, in a module one level down."""
    for path, leaf in _leaves(held):
        name = f"{variable}/{path}" if path else variable
        if _is_array(leaf):
            yield leaf, name
        elif hasattr(leaf, "__dict__") and not inspect.isroutine(leaf) and not inspect.isclass(leaf):
            for key, value in vars(leaf).items():
                if inspect.ismodule(leaf) and not _is_array(value):
                    continue
                for inner_path, inner in _leaves(value):
                    if _is_array(inner):
                        yield inner, f"{name}.{key}" + (f"/{inner_path}" if inner_path else "")


def _functions(held: Any) -> Iterator[Any]:
    for _, leaf in _leaves(held):
        in_library = str(getattr(leaf, "__module__", "")).partition(".")[0] in ("jax", "numpy", "jaxlib")
        if callable(leaf) and not inspect.isclass(leaf) and not in_library:
            yield leaf


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator=SEPARATOR), leaf) for path, leaf in pairs]


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer)


def _size(byte_length: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if byte_length >= size:
            return f"{byte_length / size:.1f} {unit}"
    return f"{byte_length} bytes"
