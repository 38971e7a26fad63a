"""Metrics that are read from sums: what a step adds to them, and in which types the device keeps them.

The average of a ratio is not the average of its values: the precision of an epoch is all true positives over all
predicted ones, and a short batch weighs as much as it has examples. A step may therefore return, in place of a number,
what has to be added up (`Ratio`, `ExpRatio`, `MeanRatio`, `Total`). The metric of one step is its value; the metric of
an epoch is read from the sums at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fixstep.frontend._seed import SEPARATOR, kind
from fixstep.runtime._signature import LeafSpec

COUNT = LeafSpec("count", "int32", ())


class Sums:
    """A metric that is read from sums. Where metrics are told apart it is one; to JAX it is a pytree."""

    @property
    def value(self) -> Any:
        """The metric of one call."""
        raise NotImplementedError

    def parts(self) -> dict[str, Any]:
        """What is added up, by the word that its accumulator begins with."""
        raise NotImplementedError

    def __float__(self) -> float:
        return float(self.value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Ratio(Sums):
    """A metric `total / weight`, both added up over the calls: a mean, a precision.

    Attributes:
        total: a scalar; an integer is added up exactly.
        weight: likewise; where it is 0 the metric is NaN.
    """

    total: Any
    weight: Any

    @property
    def value(self) -> Any:
        """The metric of one call."""
        total, weight = jnp.asarray(self.total), jnp.asarray(self.weight)
        wide = jnp.float64 if jnp.float64 in (total.dtype, weight.dtype) else jnp.float32
        return total.astype(wide) / weight.astype(wide)

    def parts(self) -> dict[str, Any]:
        """As `Sums.parts`."""
        return {"sum": self.total, "weight": self.weight}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ExpRatio(Sums):
    """A metric `exp(total / weight)`, both added up over the calls: a perplexity, a geometric mean.

    Attributes:
        total: a scalar, a sum of logarithms.
        weight: of how many.
    """

    total: Any
    weight: Any

    @property
    def value(self) -> Any:
        """The metric of one call."""
        return jnp.exp(Ratio(self.total, self.weight).value)

    def parts(self) -> dict[str, Any]:
        """As `Sums.parts`."""
        return {"logsum": self.total, "weight": self.weight}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MeanRatio(Sums):
    """The mean of several ratios `total / weight`, each of sums over the calls: a precision averaged over the classes.

    Attributes:
        total: (C,), one for each ratio; integers are added up exactly.
        weight: (C,); where one is 0 its ratio is 0.
        counted: (C,); a ratio whose sum here is 0 is left out of the mean, and a mean of none is NaN.
    """

    total: Any
    weight: Any
    counted: Any

    @property
    def value(self) -> Any:
        """The metric of one call."""
        empty = jnp.asarray(self.weight) == 0
        ratios = jnp.where(empty, 0, Ratio(self.total, jnp.where(empty, 1, self.weight)).value)
        counts = jnp.asarray(self.counted) != 0
        return Ratio(jnp.sum(jnp.where(counts, ratios, 0)), jnp.sum(counts.astype(jnp.int32))).value

    def parts(self) -> dict[str, Any]:
        """As `Sums.parts`."""
        return {"ratios": self.total, "weight": self.weight, "counted": self.counted}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Total(Sums):
    """A metric that is added up over the calls: a count, a confusion matrix.

    Attributes:
        total: an array of any shape; integers are added up exactly.
    """

    total: Any

    @property
    def value(self) -> Any:
        """The metric of one call."""
        return jnp.asarray(self.total)

    def parts(self) -> dict[str, Any]:
        """As `Sums.parts`."""
        return {"total": self.total}


def take_sums(metrics: Any) -> tuple[Any, dict[str, Any]]:
    """A tree of metrics with the value of each in place of its sums; and the sums, by the path of their accumulator."""

    pairs, treedef = jax.tree_util.tree_flatten_with_path(metrics, is_leaf=lambda node: isinstance(node, Sums))
    sums: dict[str, Any] = {}
    values = []
    for path, node in pairs:
        values.append(node.value if isinstance(node, Sums) else node)
        if isinstance(node, Sums):
            name = jax.tree_util.keystr(path, simple=True, separator=SEPARATOR)
            sums |= {f"{word}{SEPARATOR}{name}": part for word, part in node.parts().items()}
    return treedef.unflatten(values), sums


def accumulator(spec: LeafSpec) -> LeafSpec:
    """The accumulator that a leaf is added to.

    Integers are added to 64 bits, two words of uint32, which every target has: float32 would stop counting at 2^24.
    All others have the type that adding the leaf to a float32 zero gives, so at least float32.
    """
    if kind(spec.dtype) in ("bool", "int"):
        return LeafSpec(spec.path, "uint32", (*spec.shape, 2))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        zero, leaf = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), spec.numpy_dtype)
        try:
            dtype = jax.eval_shape(lambda total, value: total + value, zero, leaf).dtype.name
        except ValueError:  # the eight-bit floats do not promote by themselves; float32 holds them all
            dtype = "float32"
    return LeafSpec(spec.path, dtype, spec.shape)


def accumulators(metrics: Sequence[LeafSpec], sums: Sequence[LeafSpec]) -> tuple[LeafSpec, ...]:
    """The accumulators of a function: one for each scalar metric and for each sum, then `count`.

    Metrics that are no scalars, complex ones, and PRNG keys have no average and are left out.

    Args:
        metrics: what it returns to be looked at.
        sums: what it returns to be added up, by path as `take_sums` gives it.
    """
    own = [dataclasses.replace(spec, path=f"sum{SEPARATOR}{spec.path}") for spec in metrics if _has_average(spec)]
    summed = {spec.path.partition(SEPARATOR)[2] for spec in sums}
    plain = [spec for spec in own if spec.path.partition(SEPARATOR)[2] not in summed]
    return (*map(accumulator, plain), *map(accumulator, sums), COUNT)


def _has_average(spec: LeafSpec) -> bool:
    return spec.shape == () and spec.key is None and kind(spec.dtype) != "complex"


def add(total: Any, value: Any, spec: LeafSpec, *, weight: Any = None) -> Any:
    """An accumulator with a value added to it, `weight` times (an int32 scalar); `spec` is the accumulator's own."""
    value = jnp.asarray(value)
    if spec == COUNT or kind(value.dtype.name) not in ("bool", "int"):
        value = value.astype(spec.dtype)
        return total + (value if weight is None else value * weight.astype(spec.dtype))
    low, high = _words(value)
    if weight is not None:
        low, high = _times(low, high, weight.astype(jnp.uint32))
    new_low = total[..., 0] + low
    carry = (new_low < low).astype(jnp.uint32)
    return jnp.stack([new_low, total[..., 1] + high + carry], axis=-1)


def _times(low: Any, high: Any, factor: Any) -> tuple[Any, Any]:
    """The product of a 64-bit integer in two words and one of 32 bits, from products of halves of words."""
    half = jnp.uint32(0xFFFF)
    a, b, c, d = low & half, low >> 16, factor & half, factor >> 16
    middle = (a * c >> 16) + (a * d & half) + (b * c & half)
    carried = b * d + (a * d >> 16) + (b * c >> 16) + (middle >> 16)
    return middle << 16 | a * c & half, carried + high * factor


def _words(value: Any) -> tuple[Any, Any]:
    """The low and the high 32 bits of an integer as 64 bits, in two's complement."""
    signed = jnp.issubdtype(value.dtype, jnp.signedinteger)
    if value.dtype.itemsize == 8:
        bits = jax.lax.bitcast_convert_type(value, jnp.uint64) if signed else value
        return bits.astype(jnp.uint32), (bits >> 32).astype(jnp.uint32)
    if not signed:
        low = value.astype(jnp.uint32)
        return low, jnp.zeros_like(low)
    low = jax.lax.bitcast_convert_type(value.astype(jnp.int32), jnp.uint32)
    return low, jnp.where(value < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
