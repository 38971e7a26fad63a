"""Slices, gathers and scatters of a padded batch: indices count from its start, and end where the real part ends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from fixstep.frontend.sizes._mask import Masker, Unmaskable, is_symbolic, rule, symbolic_axes


def _from(masker: Masker, operand: Any, axis: int, start: Any, length: Any) -> Any:
    """The part of an array from a place that depends on the real size; behind its end lies anything."""
    padded = masker.concrete(length)
    widths = [(0, padded if k == axis else 0, 0) for k in range(np.ndim(operand))]
    longer = jax.lax.pad(operand, jnp.zeros((), operand.dtype), widths)
    return jax.lax.dynamic_slice_in_dim(longer, masker.extent(start), padded, axis)


@rule("slice")
def slice_(masker: Masker, eqn: Any, operand: Any) -> Any:
    """From a fixed start, the real part stays first; a start that depends on the size is found when it is known."""
    starts, strides = eqn.params["start_indices"], eqn.params["strides"]
    limits, shape = eqn.params["limit_indices"], eqn.outvars[0].aval.shape
    fixed = []
    for axis, start in enumerate(starts):
        if not is_symbolic(start):
            fixed.append((start, masker.concrete(limits[axis])))
            continue
        if strides is not None and strides[axis] != 1:
            raise Unmaskable("it takes every few examples, from a place that depends on the size of the batch")
        operand = _from(masker, operand, axis, start, shape[axis])
        fixed.append((0, masker.concrete(shape[axis])))
    return jax.lax.slice(operand, [a for a, _ in fixed], [b for _, b in fixed], strides)


@rule("rev")
def rev(masker: Masker, eqn: Any, operand: Any) -> Any:
    """Backwards from the end of the real part."""
    aval = eqn.invars[0].aval
    turned = masker.one(eqn, [operand])
    for axis in eqn.params["dimensions"]:
        length = aval.shape[axis]
        if is_symbolic(length):
            padded = masker.concrete(length)
            widths = [(0, padded if k == axis else 0, 0) for k in range(len(aval.shape))]
            longer = jax.lax.pad(turned, jnp.zeros((), turned.dtype), widths)
            turned = jax.lax.dynamic_slice_in_dim(longer, padded - masker.extent(length), padded, axis)
    return turned


def _started(masker: Masker, aval: Any, part: Any, starts: Any) -> list[Any]:
    """The starts of a dynamic slice, held within the real part as JAX holds them within the whole."""
    held = []
    for axis, start in enumerate(starts):
        length, size = aval.shape[axis], part[axis]
        if not is_symbolic(length):
            held.append(start)
            continue
        last = jnp.asarray(masker.extent(length) - masker.extent(size), jnp.asarray(start).dtype)
        held.append(jnp.clip(start, jnp.zeros_like(last), last))
        if is_symbolic(size) and str(size) != str(length):
            raise Unmaskable("a part of the batch whose length depends on its size is moved")
    return held


@rule("dynamic_slice")
def dynamic_slice(masker: Masker, eqn: Any, operand: Any, *starts: Any) -> Any:
    """Starts are held within the real part."""
    held = _started(masker, eqn.invars[0].aval, eqn.params["slice_sizes"], starts)
    return masker.one(eqn, [operand, *held])


@rule("dynamic_update_slice")
def dynamic_update_slice(masker: Masker, eqn: Any, operand: Any, update: Any, *starts: Any) -> Any:
    """Starts are held within the real part."""
    held = _started(masker, eqn.invars[0].aval, eqn.invars[1].aval.shape, starts)
    return masker.one(eqn, [operand, update, *held])


# An index that lies outside of every array.
_OUTSIDE = np.iinfo(np.int32).max


def _bounded(masker: Masker, aval: Any, indices: Any, dimensions: Any, window: Any, *, clip: bool) -> Any:
    """Indices, as int32, that mean on the padded array what they mean on the real one.

    Args:
        aval: of the array that is indexed.
        indices: their last axis has one component for each of `dimensions`.
        dimensions: the axes that the components go along.
        window: the lengths of what is taken or written at each place, by axis of the array.
        clip: whether places out of range are held at its ends; otherwise they are left out.
    """
    if indices.dtype.itemsize < 4:
        indices = indices.astype(np.int32)
    columns = []
    for component, axis in enumerate(dimensions):
        column = indices[..., component]
        last = jnp.asarray(masker.extent(aval.shape[axis]) - masker.extent(window[axis]), column.dtype)
        if clip:
            column = jnp.clip(column, jnp.zeros_like(last), last)
        elif is_symbolic(aval.shape[axis]) or is_symbolic(window[axis]):
            column = jnp.where(column > last, jnp.asarray(_OUTSIDE, column.dtype), column)
        columns.append(column)
    return jnp.stack(columns, axis=-1) if columns else indices


@rule("gather")
def gather(masker: Masker, eqn: Any, operand: Any, indices: Any) -> Any:
    """Indices out of the real range are treated as JAX treats those out of the whole."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    aval = eqn.invars[0].aval
    # XLA holds indices in range where JAX promises that they are.
    clip = GatherScatterMode.from_any(eqn.params["mode"]) != GatherScatterMode.FILL_OR_DROP
    bounded = _bounded(masker, aval, indices, numbers.start_index_map, sizes, clip=clip)
    widths = [(0, 0, 0)] * len(aval.shape)
    for axis in symbolic_axes(aval):
        if is_symbolic(sizes[axis]) and axis in numbers.start_index_map:
            # A part as long as the batch, less or more: taken at the padded length it may end behind the padding.
            widths[axis] = (0, masker.concrete(sizes[axis]), 0)
    longer = jax.lax.pad(operand, jnp.zeros((), operand.dtype), widths)
    return masker.one(eqn, [longer, bounded])


@rule(
    "scatter",
    "scatter-add",
    "scatter_add",
    "scatter-mul",
    "scatter_mul",
    "scatter-min",
    "scatter_min",
    "scatter-max",
    "scatter_max",
    "scatter-sub",
    "scatter_sub",
)
def scatter(masker: Masker, eqn: Any, operand: Any, indices: Any, updates: Any) -> Any:
    """What stands behind the real part of the updates is written nowhere: its indices lie out of range."""
    numbers = eqn.params["dimension_numbers"]
    aval, index_aval, update_aval = (variable.aval for variable in eqn.invars)
    window = _scatter_window(numbers, aval, update_aval)
    dimensions = numbers.scatter_dims_to_operand_dims
    for axis, length in enumerate(window):
        if is_symbolic(length) and (axis in dimensions or str(length) != str(aval.shape[axis])):
            raise Unmaskable("a part of the batch whose length depends on its size is written by index")
    clip = GatherScatterMode.from_any(eqn.params["mode"]) == GatherScatterMode.CLIP
    bounded = _bounded(masker, aval, indices, dimensions, window, clip=clip)
    valid = masker.valid(index_aval, range(len(index_aval.shape) - 1))
    if valid is not None:
        if not dimensions:
            raise Unmaskable("it writes to places that no index says")
        bounded = jnp.where(valid, bounded, jnp.asarray(_OUTSIDE, bounded.dtype))
    return masker.one(eqn, [operand, bounded, updates], mode=GatherScatterMode.FILL_OR_DROP)


def _scatter_window(numbers: Any, aval: Any, update_aval: Any) -> list[Any]:
    """The lengths of what is written at each place, by axis of the array."""
    lengths = iter(update_aval.shape[axis] for axis in numbers.update_window_dims)
    missing = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    return [1 if axis in missing else next(lengths) for axis in range(len(aval.shape))]
