"""Batches of any size: which sizes an artifact takes, and how a batch is padded to one that it was compiled for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from fixstep.runtime._signature import Array, LeafSpec, as_array, check, flatten, shown_path
from fixstep.targets.errors import TemplateError

SIZE = LeafSpec("size", "int32", ())


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that a batch may have.

    Attributes:
        symbol: the name of the dimension, `b`.
        low: the smallest.
        high: the largest, which is in the shapes of the template.
        multiple: every size is a multiple of this.
        compiled: the sizes that functions were compiled for, the largest first.
        axes: by role (`batch`, `inputs`, `metrics`, `evaluation`, `outputs`) and leaf path, the axes that have the
            batch's size.
    """

    symbol: str
    low: int
    high: int
    multiple: int
    compiled: tuple[int, ...]
    axes: Mapping[str, Mapping[str, tuple[int, ...]]]
    _specs: dict[tuple[str, int], tuple[LeafSpec, ...]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def padded(self, size: int) -> int:
        """The smallest compiled size that holds a batch."""
        return min(n for n in self.compiled if n >= size)

    def function(self, name: str, padded: int) -> str:
        """The compiled function for batches that are padded to a size."""
        return name if padded == self.high else f"{name}_{padded}"

    def specs(self, role: str, specs: tuple[LeafSpec, ...], size: int) -> tuple[LeafSpec, ...]:
        """The leaves of a role at a size, given those at the largest."""
        known = self._specs.get((role, size))
        if known is None:
            axes = self.axes.get(role, {})
            known = self._specs[role, size] = tuple(
                dataclasses.replace(
                    spec, shape=tuple(size if i in axes.get(spec.path, ()) else n for i, n in enumerate(spec.shape))
                )
                for spec in specs
            )
        return known

    def fit(self, tree: Any, role: str, specs: tuple[LeafSpec, ...]) -> tuple[list[Array], int]:
        """The leaves of a batch in order, each checked, and the batch's size.

        Raises:
            TemplateError: if a leaf does not fit, the leaves differ in their size, or it is out of range.
        """
        size, source = self.size_of(tree, role) if isinstance(tree, dict) else (None, "")
        if size is None:
            size, source = self.size_of(flatten(tree), role)
        if size is None:  # no leaf tells it: the check says what is missing
            size = self.high
        where = f"{self.symbol} of {shown_path(source, role)}"
        if not self.low <= size <= self.high or size % self.multiple:
            whole = f", a multiple of {self.multiple}" if self.multiple > 1 else ""
            raise TemplateError(
                f"the {role} {'have' if role == 'inputs' else 'has'} {size} examples ({where}), expected {self.low} "
                f"to {self.high}{whole}: split it, or compile for a larger range. Nothing was run."
            )
        advice = f"{where} is {size}, and every leaf needs the same. Nothing was run."
        return check(tree, self.specs(role, specs, size), role, advice=advice), size

    def size_of(self, leaves: Mapping[str, Any], role: str) -> tuple[int | None, str]:
        """The size of the first leaf that has one, and its path; None where none has."""
        for path, own in self.axes.get(role, {}).items():
            array = as_array(leaves[path]) if path in leaves else ""
            if not isinstance(array, str) and array.ndim > own[0]:
                return array.shape[own[0]], path
        return None, ""

    def pad(self, arrays: list[Array], role: str, specs: tuple[LeafSpec, ...], padded: int) -> list[Array]:
        """The arrays, filled up with zeros to a compiled size."""
        wanted = self.specs(role, specs, padded)
        return [
            array if array.shape == spec.shape else _filled(array, spec)
            for array, spec in zip(arrays, wanted, strict=True)
        ]

    def real(self, role: str, path: str, size: int) -> tuple[slice, ...]:
        """The part of a result that is no padding."""
        axes = self.axes.get(role, {}).get(path, ())
        return tuple(slice(size if axis in axes else None) for axis in range(max(axes, default=-1) + 1))


def _filled(array: Array, spec: LeafSpec) -> Array:
    out = np.zeros(spec.shape, spec.numpy_dtype)
    out[tuple(map(slice, array.shape))] = array
    return out
