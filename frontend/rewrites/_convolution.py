"""Convolutions as slices and one matrix product.

IREE 3.13 compiles a convolution and its gradients to loops that are several times slower than its matrix product (see
benchmarks/start.py), and on some targets computes grouped ones wrongly. Cut into patches, a convolution is a matrix
product, and so is each gradient, which is a convolution of its own by the time rules see it.

Where the patches would take too much memory, or too many slices, the convolution stays.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from fixstep.frontend.rewrites._real import HALVES, Array
from fixstep.frontend.rewrites._rules import rule

MOST_SLICES = 64
MOST_PATCH_BYTES = 1 << 27


@dataclasses.dataclass(frozen=True)
class _Window:
    """The window in canonical order.

    Attributes:
        kernel: its lengths.
        output: how many places it takes along each axis.
        strides: from place to place.
        dilation: between its own elements.
    """

    kernel: tuple[int, ...]
    output: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]


@rule(lax.conv_general_dilated_p)
def convolution(lhs: Array, rhs: Array, **params: Any) -> Array | None:
    """A convolution of any rank, stride, padding, dilation and grouping."""
    numbers = params["dimension_numbers"]
    # x: (N, *space, C); w: (*kernel, C of a group, O)
    x = lax.transpose(lhs, (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]))
    w = lax.transpose(rhs, (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0]))
    if not x.size or not w.size:
        return None
    edges = [(low, high, step - 1) for (low, high), step in zip(params["padding"], params["lhs_dilation"], strict=True)]
    x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    window = _window(x.shape[1:-1], w.shape[:-2], params["window_strides"], params["rhs_dilation"])
    if not math.prod(window.output) or not _affordable(x, window):
        return None
    wanted = np.dtype(lhs.dtype if params["preferred_element_type"] is None else params["preferred_element_type"])
    y = _grouped_product(
        _patches(x, window), w, params["feature_group_count"], params["batch_group_count"], params["precision"], wanted
    )
    order = [numbers.out_spec.index(axis) for axis in range(y.ndim)]
    canonical = [0, y.ndim - 1, *range(1, y.ndim - 1)]
    return lax.transpose(y, [canonical[place] for place in order])


def _window(space: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> _Window:
    output = [
        max((length - (k - 1) * step - 1) // stride + 1, 0) if length else 0
        for length, k, stride, step in zip(space, kernel, strides, dilation, strict=True)
    ]
    return _Window(tuple(kernel), tuple(output), tuple(strides), tuple(dilation))


def _affordable(x: Array, window: _Window) -> bool:
    places, elements = math.prod(window.output), math.prod(window.kernel)
    byte_length = x.shape[0] * places * elements * x.shape[-1] * x.dtype.itemsize
    return min(places, elements) <= MOST_SLICES and byte_length <= MOST_PATCH_BYTES


def _patches(x: Array, window: _Window) -> Array:
    """The elements under the window at each place: (N, *output, elements of the kernel, C)."""
    batch, channels, rank = x.shape[0], x.shape[-1], len(window.kernel)

    def cut(start: Sequence[int], counts: Sequence[int], steps: Sequence[int]) -> Array:
        ends = [s + (count - 1) * step + 1 for s, count, step in zip(start, counts, steps, strict=True)]
        return lax.slice(x, (0, *start, 0), (batch, *ends, channels), (1, *steps, 1))

    if math.prod(window.kernel) <= math.prod(window.output):
        # One slice for each element of the kernel, over all places.
        starts = itertools.product(*(range(0, k * d, d) for k, d in zip(window.kernel, window.dilation, strict=True)))
        slices = [lax.expand_dims(cut(s, window.output, window.strides), (rank + 1,)) for s in starts]
        return lax.concatenate(slices, rank + 1)
    # One slice for each place, over all elements: the gradient of the kernel has few places.
    starts = itertools.product(*(range(0, o * s, s) for o, s in zip(window.output, window.strides, strict=True)))
    elements = math.prod(window.kernel)
    slices = [lax.reshape(cut(s, window.kernel, window.dilation), (batch, 1, elements, channels)) for s in starts]
    return lax.reshape(lax.concatenate(slices, 1), (batch, *window.output, elements, channels))


def _grouped_product(
    patches: Array, w: Array, feature_groups: int, batch_groups: int, precision: Any, wanted: np.dtype[Any]
) -> Array:
    """Patches times kernel, group by group: (N, *output, O)."""
    batch, *output, elements, _ = patches.shape
    group_channels, features = w.shape[-2:]
    groups = feature_groups * batch_groups
    places = math.prod(output)
    # One of the two counts is 1, so the groups stand either in the batch or in the channels.
    rows = batch // batch_groups
    left = lax.reshape(patches, (batch_groups, rows * places, elements, feature_groups, group_channels))
    left = lax.reshape(lax.transpose(left, (0, 3, 1, 2, 4)), (groups, rows * places, elements * group_channels))
    right = lax.reshape(w, (elements * group_channels, groups, features // groups))
    # Halves are added up in float32, as XLA does.
    summed = np.dtype(np.float32) if wanted.name in HALVES else wanted
    if groups == 1:
        y = lax.dot_general(
            lax.squeeze(left, (0,)), lax.squeeze(right, (1,)), (((1,), (0,)), ((), ())), precision, summed
        )
    else:
        y = lax.dot_general(left, right, (((2,), (0,)), ((0,), (1,))), precision, summed)
        y = lax.transpose(y, (1, 0, 2))
    return lax.convert_element_type(lax.reshape(y, (rows, *output, features)), wanted)
