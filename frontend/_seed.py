"""The leaves of a pytree as fixstep sees them: their types, which of them are static, and how a tree is built again.

A seed is canonical: every leaf is an array with a strong type. A numpy or JAX array keeps its dtype. A Python number,
or an array that JAX marks as weakly typed, takes the type that JAX gives such a number without x64 (float32, int32,
complex64, and bool), also where x64 is on, because it must not decide the type of what it meets.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fixstep.runtime._signature import Array, LeafSpec, describe, dtype_from_name, shown_path
from fixstep.targets.errors import FixpointError, ProgramError

SEPARATOR = "/"
KEY_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}

_WEAK_DTYPES = {"bool": "bool", "int": "int32", "float": "float32", "complex": "complex64"}
_KIND_RANK = {"bool": 0, "int": 1, "float": 2, "complex": 3}


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """How a pytree is put together from a flat list of arrays.

    Attributes:
        treedef: its structure, static leaves counted.
        leaves: its array leaves, in order.
        static: its leaves that are no arrays (functions, names), by their position in the tree.
    """

    treedef: Any
    leaves: tuple[LeafSpec, ...]
    static: Mapping[int, Any]

    def build(self, arrays: Sequence[Any]) -> Any:
        """The tree that holds `arrays`, one per leaf, with typed keys made from their uint32 data again."""
        dynamic = iter(
            jax.random.wrap_key_data(array, impl=spec.key) if spec.key else array
            for array, spec in zip(arrays, self.leaves, strict=True)
        )
        return self.treedef.unflatten(
            self.static[i] if i in self.static else next(dynamic) for i in range(self.treedef.num_leaves)
        )

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """What a trace takes in place of each array leaf; make them where x64 is as the leaves need it."""
        return [jax.ShapeDtypeStruct(spec.shape, spec.numpy_dtype) for spec in self.leaves]


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A pytree taken apart.

    Attributes:
        layout: its structure and the types of its array leaves.
        values: its array leaves as they were: arrays, Python numbers, typed keys, tracers, shape structs.
        weak: for each of them, whether its type does not decide.
    """

    layout: Layout
    values: tuple[Any, ...]
    weak: tuple[bool, ...]


def is_python_number(value: Any) -> bool:
    """Whether it is a Python bool, int, float or complex (a numpy scalar is not, although `np.float64` is a float)."""
    return isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic)


def is_key(value: Any) -> bool:
    """Whether it is an array of typed PRNG keys (`jax.random.key`)."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def kind(dtype: str) -> str:
    """`bool`, `int` (signed or not), `float` or `complex`."""
    numpy_dtype = dtype_from_name(dtype)
    for name, category in (("bool", jnp.bool_), ("int", jnp.integer), ("float", jnp.floating)):
        if jnp.issubdtype(numpy_dtype, category):
            return name
    return "complex"


def weak_fits(weak_dtype: str, dtype: str) -> bool:
    """Whether a weakly typed value goes into a leaf of `dtype` as a Python number of its kind would."""
    return _KIND_RANK[kind(weak_dtype)] <= _KIND_RANK[kind(dtype)]


def weak_dtype(dtype: str) -> str:
    """The strong dtype of a weakly typed value that meets no other."""
    return _WEAK_DTYPES[kind(dtype)]


def key_data(value: Any) -> Any:
    """The uint32 data of typed keys; everything else as it is."""
    return jax.random.key_data(value) if is_key(value) else value


def flatten(tree: Any, what: str, *, static: bool = False, numbers: bool = True) -> Flat:
    """Take a pytree apart and type its leaves.

    Args:
        tree: the pytree.
        what: the word for it in messages: `state`, `batch`, `metrics`.
        static: whether leaves that are no arrays are kept aside; otherwise they are errors.
        numbers: whether Python numbers are leaves; otherwise they are errors.

    Raises:
        ProgramError: listing every leaf that cannot be one, and every path that several leaves share.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    specs: list[LeafSpec] = []
    values: list[Any] = []
    weak: list[bool] = []
    aside: dict[int, Any] = {}
    wrong: list[str] = []
    for position, (path, value) in enumerate(pairs):
        name = jax.tree_util.keystr(path, simple=True, separator=SEPARATOR)
        if static and _is_static(value):
            aside[position] = value
            continue
        spec = _spec(name, value) if numbers or not is_python_number(value) else _number_refused(value)
        if isinstance(spec, str):
            wrong.append(f"  {shown_path(name, what)}: {spec}")
            continue
        specs.append(spec)
        values.append(value)
        weak.append(is_python_number(value) or bool(getattr(value, "weak_type", False)))
    wrong += [
        f"  {shown_path(path, what)}: {count} leaves share this path; rename a key so that each has its own"
        for path, count in Counter(spec.path for spec in specs).items()
        if count > 1
    ]
    if wrong:
        raise ProgramError("\n".join([f"leaves of the {what} cannot be compiled:", *wrong]))
    return Flat(Layout(treedef, tuple(specs), aside), tuple(values), tuple(weak))


def _is_static(value: Any) -> bool:
    if isinstance(value, str | bytes | enum.Enum | type | np.dtype):
        return True
    return callable(value) and not hasattr(value, "dtype") and not dataclasses.is_dataclass(value)


def _number_refused(value: Any) -> str:
    kind_name = type(value).__name__
    return f"expected an array, got the Python {kind_name} {value!r}; give it a dtype, as in numpy.float32({value!r})"


def _spec(path: str, value: Any) -> LeafSpec | str:
    """The type of a leaf, or why it has none."""
    if is_python_number(value):
        if isinstance(value, int) and not -(2**31) <= value < 2**31:
            return f"the Python int {value} does not fit int32; give it a dtype, as in numpy.int64({value})"
        return LeafSpec(path, _WEAK_DTYPES[type(value).__name__], ())
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return _no_array(value)
    shape = tuple(shape)
    if not all(isinstance(n, int) for n in shape):
        if not isinstance(value, jax.core.Tracer):
            return f"expected a shape of numbers, got {shape}; only the batch and the inputs may have any size"
        # A trace at the symbolic size: what its outputs look like was seen at the largest one.
        shape = tuple(n if isinstance(n, int) else 0 for n in shape)
    if is_key(value):
        implementation = KEY_IMPLEMENTATIONS.get(str(dtype))
        if implementation is None:
            known = ", ".join(KEY_IMPLEMENTATIONS.values())
            return f"expected PRNG keys of one of the implementations {known}, got {dtype}"
        with jax.enable_x64(False):
            data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return LeafSpec(path, "uint32", tuple(data.shape), implementation)
    if getattr(value, "weak_type", False):
        return LeafSpec(path, weak_dtype(np.dtype(dtype).name), shape)
    return _array_spec(path, dtype, shape)


def _array_spec(path: str, dtype: Any, shape: tuple[int, ...]) -> LeafSpec | str:
    try:
        numpy_dtype = np.dtype(dtype)
        name = numpy_dtype.name
        if numpy_dtype.hasobject:
            return "expected numbers, got an array of Python objects"
        dtype_from_name(name)
        jnp.promote_types(name, name)
    except (TypeError, ValueError):
        return f"expected an array of numbers, got dtype {dtype}"
    return LeafSpec(path, name, shape)


def _no_array(value: Any) -> str:
    name = type(value).__name__
    hint = ""
    if dataclasses.is_dataclass(value):
        hint = "; make it a pytree with jax.tree_util.register_dataclass"
    elif isinstance(value, str | bytes):
        hint = "; keep text outside of what is compiled"
    return f"expected an array, got a {name}{hint}"


def cast_values(values: Sequence[Any], before: Sequence[LeafSpec], after: Sequence[LeafSpec]) -> tuple[Array, ...]:
    """The seed's values in the types of the template.

    Raises:
        FixpointError: naming each leaf whose values do not survive: a fraction or a number out of range cast to an
            integer, a finite float that becomes infinite, an imaginary part.
    """
    arrays: list[Array] = []
    lost: list[str] = []
    for value, old, new in zip(values, before, after, strict=True):
        array = np.asarray(key_data(value))
        reason = _loss(array, new)
        if reason:
            lost.append(f"  {shown_path(old.path, 'state')}: {old} → {new}: {reason}")
        else:
            with np.errstate(all="ignore"):
                arrays.append(np.ascontiguousarray(array.astype(new.numpy_dtype)).reshape(new.shape))
    if lost:
        raise FixpointError(
            "\n".join(
                [
                    "the step changes the type of state leaves whose first values that type cannot hold:",
                    *lost,
                    "Return the leaf in its own type, for example with .astype(...), or start it in the new type.",
                ]
            )
        )
    return tuple(arrays)


def _loss(array: Array, new: LeafSpec) -> str:
    """What a cast of the values would lose beyond float rounding, or an empty text."""
    old_kind, new_kind = kind(array.dtype.name), kind(new.dtype)
    if old_kind == "complex" and new_kind != "complex":
        return "the imaginary part would be lost"
    if array.size == 0 or _KIND_RANK[old_kind] < _KIND_RANK[new_kind]:
        return ""
    if new_kind in ("bool", "int"):
        return _integer_loss(array, new, old_kind)
    with np.errstate(all="ignore"):
        overflown = np.isfinite(array) & ~np.isfinite(array.astype(new.numpy_dtype))
    return f"{array[overflown].flat[0]} is out of range" if overflown.any() else ""


def _integer_loss(array: Array, new: LeafSpec, old_kind: str) -> str:
    # `jnp.iinfo` knows the small integers of ml_dtypes too.
    low, high = (0, 1) if new.dtype == "bool" else (int(jnp.iinfo(new.dtype).min), int(jnp.iinfo(new.dtype).max))
    wide = array.astype(np.float64) if old_kind == "float" else array
    if old_kind == "float":
        broken = ~np.isfinite(wide) | (wide != np.trunc(wide))
        if broken.any():
            return f"{wide[broken].flat[0]} is no integer"
    for value in (wide.min(), wide.max()):
        if not low <= int(value) <= high:
            return f"{value} is out of range"
    return ""


def abstract_loss(before: LeafSpec, after: LeafSpec) -> bool:
    """Whether a cast may lose more than float rounding, judged without the values."""
    old_kind, new_kind = kind(before.dtype), kind(after.dtype)
    if _KIND_RANK[old_kind] > _KIND_RANK[new_kind]:
        return True
    if old_kind == "int" == new_kind:
        old, new = jnp.iinfo(before.dtype), jnp.iinfo(after.dtype)
        return bool(int(old.min) < int(new.min) or int(old.max) > int(new.max))
    return False


def narrows(before: LeafSpec, after: LeafSpec) -> bool:
    """Whether the new dtype holds fewer numbers or fewer digits than the old one."""
    if before.dtype == after.dtype:
        return False
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        try:
            common = jnp.promote_types(before.dtype, after.dtype).name
        except ValueError:  # the eight-bit floats have no promotion: compare their sizes alone
            common = after.dtype
    return common != after.dtype or after.numpy_dtype.itemsize < before.numpy_dtype.itemsize


def shown(spec: LeafSpec) -> str:
    """A leaf's type in messages: `float32[16,8]`, or `key<threefry2x32>[]` for typed keys."""
    if spec.key is None:
        return str(spec)
    return describe(f"key<{spec.key}>", spec.shape[:-1])


def to_leaf(value: Any, spec: LeafSpec) -> Any:
    """A value of a trace as a strongly typed array of the leaf's type; call it in the template's context."""
    array = key_data(value)
    if is_python_number(array):
        return jnp.asarray(array, dtype=spec.numpy_dtype)
    return jax.lax.convert_element_type(array, spec.numpy_dtype)
