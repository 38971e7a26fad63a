"""Scatters drop what is out of range, or clip it, as their mode says.

Stands against IREE writing memory outside of the operand for an index out of range, after which the process dies
(https://github.com/iree-org/iree/issues/24881); with constant indices the compiler itself crashes.

Every mode but `clip` drops; so does XLA on the CPU where `promise_in_bounds` is broken, as the gradient of `x[i]` does.
What is to be dropped is sent where it does no harm: for a sum, product, minimum or maximum to any place with the
update that changes nothing; for an assignment into a margin of the operand that is cut off afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from fixstep.frontend._extremes import highest, lowest
from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule

_scatter_sub_p = getattr(lax, "scatter_sub_p", None)
_REDUCING = [
    p for p in (lax.scatter_add_p, _scatter_sub_p, lax.scatter_mul_p, lax.scatter_min_p, lax.scatter_max_p) if p
]
_DROP = lax.GatherScatterMode.FILL_OR_DROP
_CLIP = lax.GatherScatterMode.CLIP


def _reducing_rule(primitive: Any) -> None:
    def scatter_reduce(operand: Array, indices: Array, updates: Array, **params: Any) -> Array | None:
        """A scatter that combines: updates out of range become the one that changes nothing."""
        if indices.shape[-1] == 0:
            return _without_index(primitive, scatter_reduce, operand, indices, updates, params)
        numbers = params["dimension_numbers"]
        ranges = _ranges(operand, indices, updates, numbers)
        if ranges and math.prod(indices.shape[:-1]) == 1 and not numbers.operand_batching_dims:
            return _combine_range(primitive, operand, indices, updates, params)
        if not ranges and not _needs_rule(operand, indices, params):
            return None
        inside = _inside(operand, indices, updates, numbers)
        nothing = lax.full_like(updates, _identity(primitive.name, updates.dtype))
        # Clipped indices may repeat even where the given ones do not, unless all are promised to be in range.
        mode = params["mode"]
        unique = params["unique_indices"] and mode != _DROP
        params = {**params, "mode": _CLIP, "unique_indices": unique, "indices_are_sorted": False}
        if not ranges or mode != _CLIP:
            updates = lax.select(_per_update(inside, updates, numbers), updates, nothing)
        if ranges:
            indices, updates, numbers = _element_by_element(
                operand, _clipped(operand, indices, updates, numbers), updates, numbers, ranges
            )
            params |= {"dimension_numbers": numbers, "unique_indices": False}
        return primitive.bind(operand, indices, updates, **params)

    rule(primitive)(scatter_reduce)


for _primitive in _REDUCING:
    _reducing_rule(_primitive)


@rule(lax.scatter_p)
def scatter(operand: Array, indices: Array, updates: Array, **params: Any) -> Array | None:
    """A scatter that assigns: what is out of range lands in a margin that is cut off."""
    if indices.shape[-1] == 0:
        return _without_index(lax.scatter_p, scatter, operand, indices, updates, params)
    if not _assigns(params["update_jaxpr"]) and 0 not in (*operand.shape, *indices.shape):
        return _apply(operand, indices, updates, params)
    numbers = params["dimension_numbers"]
    if params["mode"] == _CLIP and _ranges(operand, indices, updates, numbers):
        return _assign_ranges(operand, indices, updates, params)
    if not _needs_rule(operand, indices, params):
        return None
    if operand.dtype.kind == "c" and _assigns(params["update_jaxpr"]):
        # IREE's compiler crashes on a complex array with a margin.
        parts = [_assign(part(operand), indices, part(updates), params) for part in (lax.real, lax.imag)]
        return lax.complex(*parts)
    return _assign(operand, indices, updates, params)


def _without_index(
    primitive: Any, rule: Callable[..., Any], operand: Array, indices: Array, updates: Array, params: dict[str, Any]
) -> Array:
    """A scatter whose windows all begin at the start, as that of `x.at[:].set(y)`: IREE wants a dimension to scatter
    along, so the operand gets one of length 1.
    """
    numbers = params["dimension_numbers"]
    numbers = numbers._replace(
        inserted_window_dims=(*numbers.inserted_window_dims, operand.ndim), scatter_dims_to_operand_dims=(operand.ndim,)
    )
    places = jnp.zeros((*indices.shape[:-1], 1), np.int32)
    arguments = lax.expand_dims(operand, [operand.ndim]), places, updates
    params = {**params, "dimension_numbers": numbers}
    result = rule(*arguments, **params)
    return lax.squeeze(primitive.bind(*arguments, **params) if result is None else result, [operand.ndim])


def _ranges(operand: Array, indices: Array, updates: Array, numbers: Any) -> list[int]:
    """The dimensions along which a window is placed and longer than 1, as in `x.at[1:5].add(y)`; none of empty ones."""
    if 0 in (*operand.shape, *indices.shape):
        return []
    window = _window(operand, updates, numbers)
    return sorted(d for d in numbers.scatter_dims_to_operand_dims if window[d] > 1)


_COMBINED = {
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
}


def _combine_range(primitive: Any, operand: Array, indices: Array, updates: Array, params: dict[str, Any]) -> Array:
    """One window combined with what is there; IREE does not compile it as a scatter."""
    numbers = params["dimension_numbers"]
    window = _window(operand, updates, numbers)
    old = lax.dynamic_slice(operand, _starts(operand, indices, numbers), window)
    new = _COMBINED[primitive.name](old, lax.reshape(updates, window))
    return _scattered(operand, indices, lax.reshape(new, updates.shape), numbers, params["mode"])


def _element_by_element(
    operand: Array, indices: Array, updates: Array, numbers: Any, ranges: list[int]
) -> tuple[Array, Array, Any]:
    """Indices, updates and numbers in which each element along a range has an index of its own; all are in range."""
    window = _window(operand, updates, numbers)
    lengths = [window[d] for d in ranges]
    depth = indices.shape[-1]
    wide = indices if indices.dtype.itemsize >= 4 else indices.astype(np.int32)
    shape = (*indices.shape[:-1], *lengths, depth)
    places = lax.broadcast_in_dim(wide, shape, [*range(indices.ndim - 1), len(shape) - 1])
    for number, d in enumerate(ranges):
        along = lax.broadcasted_iota(places.dtype, shape, indices.ndim - 1 + number)
        component = np.arange(depth) == numbers.scatter_dims_to_operand_dims.index(d)
        places = places + along * jnp.asarray(component, places.dtype)
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windowed = dict(zip((d for d in range(operand.ndim) if d not in single), numbers.update_window_dims, strict=True))
    moved, kept = ([windowed[d] for d in windowed if (d in ranges) == chosen] for chosen in (True, False))
    others = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    updates = lax.transpose(updates, [*others, *moved, *kept])
    numbers = numbers._replace(
        update_window_dims=tuple(range(updates.ndim - len(kept), updates.ndim)),
        inserted_window_dims=tuple(sorted([*numbers.inserted_window_dims, *ranges])),
    )
    return places, updates, numbers


def _apply(operand: Array, indices: Array, updates: Array, params: dict[str, Any]) -> Array | None:
    """A scatter whose new values are computed from the old ones, one index after the other: one may come twice."""
    numbers = params["dimension_numbers"]
    if numbers.operand_batching_dims:
        return None
    kept = tuple(d for d in range(updates.ndim) if d not in numbers.update_window_dims)
    rows = math.prod(indices.shape[:-1])
    windows = tuple(updates.shape[d] for d in numbers.update_window_dims)
    places = lax.reshape(indices, (rows, 1, indices.shape[-1]))
    given = lax.reshape(lax.transpose(updates, (*kept, *numbers.update_window_dims)), (rows, 1, *windows))
    one = lax.ScatterDimensionNumbers(
        tuple(range(1, len(windows) + 1)), numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    )
    update = core.jaxpr_as_fun(core.ClosedJaxpr(params["update_jaxpr"], params["update_consts"]))

    def step(whole: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
        place, value = row
        old = lax.dynamic_slice(whole, _starts(whole, place, one), _window(whole, value, one))
        new = jax.vmap(lambda a, b: update(a, b)[0])(old.reshape(-1), value.reshape(-1)).reshape(value.shape)
        return _scattered(whole, place, new, one, params["mode"]), None

    return lax.scan(step, operand, (places, given))[0]


def _scattered(operand: Array, indices: Array, updates: Array, numbers: Any, mode: Any) -> Array:
    """An assignment at one place, out of range as the mode says."""
    inside = _inside(operand, indices, updates, numbers)
    if mode == _CLIP:
        indices = _clipped(operand, indices, updates, numbers)
        inside = jnp.ones_like(inside)
    return _assign_one(operand, indices, updates, inside, numbers)


def _assign_ranges(operand: Array, indices: Array, updates: Array, params: dict[str, Any]) -> Array:
    """An assignment of windows longer than 1, at places that are clipped, as of `dynamic_update_slice` by example."""
    numbers = params["dimension_numbers"]
    if math.prod(indices.shape[:-1]) == 1 and not numbers.operand_batching_dims:
        return _scattered(operand, indices, updates, numbers, _CLIP)
    indices = _clipped(operand, indices, updates, numbers)
    ranges = _ranges(operand, indices, updates, numbers)
    indices, updates, numbers = _element_by_element(operand, indices, updates, numbers, ranges)
    return lax.scatter(operand, indices, updates, numbers, mode=_CLIP)


def _clipped(operand: Array, indices: Array, updates: Array, numbers: Any) -> Array:
    """Indices whose windows lie within the operand."""
    window = _window(operand, updates, numbers)
    limit = np.iinfo(indices.dtype).max
    last = [min(max(operand.shape[d] - window[d], 0), limit) for d in numbers.scatter_dims_to_operand_dims]
    high = jnp.broadcast_to(jnp.asarray(last, indices.dtype), indices.shape)
    return lax.clamp(jnp.zeros_like(indices), indices, high)


def _assign(operand: Array, indices: Array, updates: Array, params: dict[str, Any]) -> Array:
    numbers = params["dimension_numbers"]
    inside = _inside(operand, indices, updates, numbers)
    if math.prod(indices.shape[:-1]) == 1 and _assigns(params["update_jaxpr"]) and not numbers.operand_batching_dims:
        return _assign_one(operand, indices, updates, inside, numbers)
    window = _window(operand, updates, numbers)
    dimension = numbers.scatter_dims_to_operand_dims[0]
    margin = [(0, window[d] if d == dimension else 0, 0) for d in range(operand.ndim)]
    padded = lax.pad(operand, np.zeros((), operand.dtype), margin)
    outside = np.zeros(indices.shape[-1], np.int64)
    outside[0] = operand.shape[dimension]
    wide = indices if indices.dtype.itemsize >= 4 else indices.astype(np.int32)
    away = jnp.broadcast_to(outside.astype(wide.dtype), indices.shape)
    wide = lax.select(lax.broadcast_in_dim(inside, indices.shape, range(inside.ndim)), wide, away)
    params = {**params, "mode": _CLIP, "indices_are_sorted": False}
    ranges = _ranges(operand, indices, updates, numbers)
    if ranges:
        wide, updates, numbers = _element_by_element(padded, wide, updates, numbers, ranges)
        params |= {"dimension_numbers": numbers, "unique_indices": False}
    if _assigns(params["update_jaxpr"]):
        result = lax.scatter(padded, wide, updates, numbers, mode=_CLIP, unique_indices=params["unique_indices"])
    else:
        result = lax.scatter_p.bind(padded, wide, updates, **params)
    return lax.slice(result, [0] * operand.ndim, operand.shape)


def _needs_rule(operand: Array, indices: Array, params: dict[str, Any]) -> bool:
    if not isinstance(operand.dtype, np.dtype) or 0 in indices.shape or params["mode"] == _CLIP:
        return False
    return bool(math.prod(operand.shape) > 0)


def _window(operand: Array, updates: Array, numbers: Any) -> list[int]:
    """The lengths of an update's window by dimension of the operand."""
    lengths = iter(updates.shape[d] for d in numbers.update_window_dims)
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    return [1 if d in single else next(lengths) for d in range(operand.ndim)]


def _inside(operand: Array, indices: Array, updates: Array, numbers: Any) -> Array:
    """Whether a whole window lies within the operand, by index vector."""
    window = _window(operand, updates, numbers)
    limit = np.iinfo(indices.dtype).max
    last = [operand.shape[d] - window[d] for d in numbers.scatter_dims_to_operand_dims]
    possible = np.array([n >= 0 for n in last])
    high = np.array([min(max(n, 0), limit) for n in last], indices.dtype)
    inside = lax.le(indices, jnp.broadcast_to(high, indices.shape))
    if indices.dtype.kind == "i":
        inside = lax.bitwise_and(inside, lax.ge(indices, lax.full_like(indices, 0)))
    if not possible.all():
        inside = lax.bitwise_and(inside, jnp.broadcast_to(possible, indices.shape))
    return lax.reduce_and(inside, axes=(indices.ndim - 1,))


def _per_update(inside: Array, updates: Array, numbers: Any) -> Array:
    """A condition by index vector, broadcast to the updates."""
    others = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    return lax.broadcast_in_dim(inside, updates.shape, others)


def _identity(name: str, dtype: np.dtype[Any]) -> Any:
    """The update that changes nothing."""
    if "mul" in name:
        return dtype.type(1)
    if "add" in name or "sub" in name:
        # -0 is what leaves a zero of either sign as it is when added, +0 when subtracted.
        negative = "add" in name and dtype.kind != "b" and not jnp.issubdtype(dtype, np.integer)
        return dtype.type(complex(-0.0, -0.0) if dtype.kind == "c" else -0.0) if negative else dtype.type(0)
    return (highest if "min" in name else lowest)(dtype)


def _assigns(update: Any) -> bool:
    """Whether the update takes the place of the old value, rather than being computed from it."""
    if update is None:
        return True
    assigned: bool = update.outvars[0] is update.invars[1]
    return assigned


def _starts(operand: Array, indices: Array, numbers: Any) -> list[Array]:
    """The place of one window, by dimension of the operand."""
    components = lax.reshape(indices, (indices.shape[-1],))
    starts: list[Any] = [np.zeros((), indices.dtype)] * operand.ndim
    for number, dimension in enumerate(numbers.scatter_dims_to_operand_dims):
        starts[dimension] = lax.index_in_dim(components, number, keepdims=False)
    return starts


def _assign_one(operand: Array, indices: Array, updates: Array, inside: Array, numbers: Any) -> Array:
    """One window: the old values take the place of the new ones where it is out of range."""
    window, starts = _window(operand, updates, numbers), _starts(operand, indices, numbers)
    new = lax.reshape(updates, window)
    old = lax.dynamic_slice(operand, starts, window)
    chosen = lax.select(lax.broadcast_in_dim(lax.reshape(inside, ()), window, ()), new, old)
    return lax.dynamic_update_slice(operand, chosen, starts)
