"""Random bits without a loop.

JAX on the CPU lowers the threefry hash to a loop of five turns, which IREE runs as five passes over memory. Rolled out
it gives the same bits four times faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax
from jax._src.random import prng
from jax._src.random.threefry2x32 import threefry2x32_p

from fixstep.frontend.rewrites._evaluate import Rewriter, structure
from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


@rule(threefry2x32_p)
def threefry(key_0: Array, key_1: Array, x_0: Array, x_1: Array, **_: Any) -> tuple[Array, Array]:
    """Twenty rounds of Threefry-2x32, after Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011)."""
    shape = np.broadcast_shapes(key_0.shape, key_1.shape, x_0.shape, x_1.shape)
    key_0, key_1, x_0, x_1 = (
        lax.broadcast_in_dim(v, shape, range(v.ndim)) if v.shape != shape else v for v in (key_0, key_1, x_0, x_1)
    )
    keys = [key_0, key_1, lax.bitwise_xor(lax.bitwise_xor(key_0, key_1), lax.full_like(key_0, _PARITY))]
    x_0, x_1 = lax.add(x_0, keys[0]), lax.add(x_1, keys[1])
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x_0 = lax.add(x_0, x_1)
            x_1 = lax.bitwise_xor(x_0, _rotated(x_1, rotation))
        x_0 = lax.add(x_0, keys[(group + 1) % 3])
        x_1 = lax.add(lax.add(x_1, keys[(group + 2) % 3]), lax.full_like(x_1, group + 1))
    return x_0, x_1


def _rotated(x: Array, count: int) -> Array:
    left = lax.shift_left(x, lax.full_like(x, count))
    return lax.bitwise_or(left, lax.shift_right_logical(x, lax.full_like(x, 32 - count)))


@structure(prng.random_bits_p)
def _bits(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    (keys,) = inputs

    def bits(data: Array) -> Array:
        return prng.random_bits_impl_base(
            keys.dtype._impl, data, keys.ndim, bit_width=params["bit_width"], shape=params["shape"]
        )

    return rewriter.expand(bits, prng.random_unwrap(keys), taken=taken)


@structure(prng.random_split_p)
def _split(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    (keys,) = inputs

    def split(data: Array) -> Array:
        return prng.random_split_impl_base(keys.dtype._impl, data, keys.ndim, shape=params["shape"])

    (data,) = rewriter.expand(split, prng.random_unwrap(keys), taken=taken)
    return [prng.random_wrap(data, impl=keys.dtype._impl)]


@structure(prng.random_fold_in_p)
def _fold_in(rewriter: Rewriter, inputs: list[Any], taken: Any | None, params: dict[str, Any]) -> list[Any]:
    keys, messages = inputs

    def fold_in(data: Array, messages: Array) -> Array:
        return prng.random_fold_in_impl_base(keys.dtype._impl, data, messages, keys.shape)

    (data,) = rewriter.expand(fold_in, prng.random_unwrap(keys), messages, taken=taken)
    return [prng.random_wrap(data, impl=keys.dtype._impl)]
