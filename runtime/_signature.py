"""The signature of a step: which leaves its state, batch and inputs have, and the check that values fit it.

A leaf path is the text that the frontend made once (`params/dense/w`); everything here only compares and prints it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from fixstep.targets.errors import TemplateError

Array = np.ndarray[Any, np.dtype[Any]]

_EXTENSION_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in dir(ml_dtypes)
    if name.startswith(("bfloat", "float", "int", "uint")) and isinstance(getattr(ml_dtypes, name), type)
}


@functools.lru_cache
def dtype_from_name(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name such as `float32` or `bfloat16`.

    Raises:
        ValueError: if no such dtype is known.
    """
    extension: np.dtype[Any] | None = _EXTENSION_DTYPES.get(name)
    if extension is not None:
        return extension
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise ValueError(f"unknown dtype {name!r}") from None
    if dtype.kind not in "biufc" or dtype.name != name:
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One leaf of a template: its path, dtype name and shape.

    Attributes:
        path: the leaf path, `""` for a value that is itself a leaf.
        dtype: the name of its dtype, `float32`.
        shape: its dimensions.
        key: the implementation of the typed PRNG key whose uint32 data this leaf holds, if it holds one.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    key: str | None = None

    def __post_init__(self) -> None:
        dtype_from_name(self.dtype)
        if any(not isinstance(n, int) or n < 0 for n in self.shape):
            raise ValueError(f"{self.path}: bad shape {self.shape}")

    @functools.cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as numpy holds it."""
        return dtype_from_name(self.dtype)

    @functools.cached_property
    def byte_length(self) -> int:
        """Bytes of the leaf's elements."""
        count = 1
        for n in self.shape:
            count *= n
        return count * self.numpy_dtype.itemsize

    def __str__(self) -> str:
        """`float32[16,8]`."""
        return describe(self.dtype, self.shape)


def describe(dtype: str, shape: Iterable[int]) -> str:
    """Dtype and shape as all messages print them: `float32[16,8]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def shown_path(path: str, what: str) -> str:
    """A path as messages print it; the root of a tree that is one leaf has no path of its own."""
    return path or f"<the {what} itself>"


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested containers by leaf path, spelled as the frontend spells them.

    Mappings go by key, sequences by index, named tuples and dataclasses by field. `None` and empty containers hold no
    leaf. A mapping from whole leaf paths (`{"x/0": ...}`) flattens to itself.
    """
    children: Iterable[tuple[Any, Any]]
    if tree is None:
        return {}
    if isinstance(tree, Mapping):
        children = tree.items()
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        children = zip(tree._fields, tree, strict=True)
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        children = [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    else:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, child in children:
        leaves.update(flatten(child, f"{prefix}/{key}" if prefix else str(key)))
    return leaves


def as_array(value: Any) -> Array | str:
    """A numpy array of the value without a copy where possible, or what it is instead.

    Accepts numpy arrays and scalars, and whatever offers `__dlpack__` or `__array__`. Python numbers and lists carry no
    dtype, so they are refused rather than guessed.
    """
    if isinstance(value, np.ndarray):
        array = value
    elif isinstance(value, np.generic):
        array = np.asarray(value)
    elif isinstance(value, bool | int | float | complex | list | tuple | str | bytes):
        return f"a Python {type(value).__name__}, which has no dtype"
    else:
        try:
            array = _convert(value)
        except Exception as exc:  # a foreign object's conversion may raise anything
            return f"a {type(value).__name__} that does not convert to an array ({exc})"
    if array.dtype.hasobject:
        return "an array of Python objects"
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _convert(value: Any) -> Array:
    if hasattr(value, "__array__"):
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    raise TypeError("neither __array__ nor __dlpack__")


def check(tree: Any, specs: tuple[LeafSpec, ...], what: str, *, advice: str | None = None) -> list[Array]:
    """The leaves of `tree` in the order of `specs`, each with exactly the dtype and shape that its spec says.

    Args:
        tree: nested containers of arrays, or a mapping from leaf path to array.
        specs: what is expected.
        what: the word for the tree in messages: `batch`, `state`, `inputs`.
        advice: the last line of a message about shapes, in place of the usual one.

    Raises:
        TemplateError: listing every leaf that differs, then the missing and the unexpected paths, then one hint.
    """
    if isinstance(tree, dict) and len(tree) == len(specs):
        fast = _fast_check(tree, specs)
        if fast is not None:
            return fast
    leaves = flatten(tree)
    arrays: list[Array] = []
    wrong: list[tuple[LeafSpec, str]] = []
    missing: list[LeafSpec] = []
    for spec in specs:
        if spec.path not in leaves:
            # A list of numbers flattens like a container; what the template has there is one array.
            inside = [path for path in leaves if path.startswith(f"{spec.path}/" if spec.path else "")]
            if inside:
                wrong.append((spec, "a Python list or another container, which has no dtype"))
                for path in inside:
                    del leaves[path]
            else:
                missing.append(spec)
            continue
        array = as_array(leaves[spec.path])
        if isinstance(array, str):
            wrong.append((spec, array))
        elif array.dtype.name != spec.dtype or array.shape != spec.shape:
            wrong.append((spec, describe(array.dtype.name, array.shape)))
        else:
            arrays.append(array)
    expected = {spec.path for spec in specs}
    unexpected = sorted(path for path in leaves if path not in expected)
    if wrong or missing or unexpected:
        raise TemplateError(_report(what, wrong, missing, unexpected, leaves, advice))
    return arrays


def _fast_check(tree: dict[str, Any], specs: tuple[LeafSpec, ...]) -> list[Array] | None:
    """The usual case, a flat dict of fitting numpy arrays; None where the full check has to look."""
    arrays: list[Array] = []
    for spec in specs:
        value = tree.get(spec.path)
        if type(value) is not np.ndarray or value.dtype != spec.numpy_dtype or value.shape != spec.shape:
            return None
        arrays.append(value)
    return arrays


def _report(
    what: str,
    wrong: list[tuple[LeafSpec, str]],
    missing: list[LeafSpec],
    unexpected: list[str],
    leaves: Mapping[str, Any],
    advice: str | None,
) -> str:
    import difflib  # here, because the start of a process is what its user waits for

    lines = [f"the {what} {'do' if what == 'inputs' else 'does'} not fit the template:"]
    for spec, got in sorted(wrong, key=lambda pair: pair[0].path):
        lines.append(f"  {shown_path(spec.path, what)}: expected {spec}, got {got}")
    for spec in sorted(missing, key=lambda spec: spec.path):
        near = difflib.get_close_matches(spec.path.casefold(), [path.casefold() for path in unexpected], n=1)
        hint = next((f" (is it {path!r}?)" for path in unexpected if near == [path.casefold()]), "")
        lines.append(f"  {shown_path(spec.path, what)}: expected {spec}, missing{hint}")
    for path in unexpected:
        array = as_array(leaves[path])
        got = array if isinstance(array, str) else describe(array.dtype.name, array.shape)
        lines.append(f"  {shown_path(path, what)}: unexpected, got {got}")
    lines.append(_advice(what, wrong, advice))
    return "\n".join(lines)


def _advice(what: str, wrong: list[tuple[LeafSpec, str]], about_shapes: str | None) -> str:
    if about_shapes and any(got.startswith(f"{spec.dtype}[") for spec, got in wrong):
        return about_shapes
    for spec, got in wrong:
        got_dtype, _, rest = got.partition("[")
        got_shape = rest.rstrip("]").split(",")
        if (
            got_dtype == spec.dtype
            and len(got_shape) == len(spec.shape)
            and got_shape[1:] == [str(n) for n in spec.shape[1:]]
        ):
            return (
                f"The artifact was compiled for {spec.shape[0]} examples a batch: "
                "leave a short last batch out, or compile for another size."
            )
    for spec, got in wrong:
        if got.startswith("a Python"):
            return f"Convert it first, for example numpy.asarray(value, dtype={spec.dtype!r}). Nothing was run."
        if "[" in got and got.partition("[")[0] != spec.dtype:
            return f"Convert it first, for example array.astype({spec.dtype!r}). Nothing was run."
    return f"Pass the {what} with exactly the leaves of the template. Nothing was run."
