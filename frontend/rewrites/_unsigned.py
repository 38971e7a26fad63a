"""Reversals, windowed and cumulative reductions of unsigned integers, as those of signed ones.

Stands against IREE failing to compile them ("failed to legalize unresolved target materialization from ('ui32')").
Sums and products are the same bits either way; for the larger and the smaller of two the top bit is flipped, which
turns the order of unsigned numbers into that of signed ones.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import Primitive, rule


def _register(primitive: Primitive, *, ordered: bool) -> None:
    def unsigned(x: Array, **params: Any) -> Array | None:
        """The operation on the same bits as signed integers."""
        if not jnp.issubdtype(x.dtype, np.unsignedinteger):
            return None
        signed = np.dtype(x.dtype.name.removeprefix("u"))
        top = np.array(1 << (8 * x.dtype.itemsize - 1), x.dtype)
        flip = lax.full_like(x, top if ordered else 0)
        result = primitive.bind(lax.bitcast_convert_type(lax.bitwise_xor(x, flip), signed), **params)
        bits = lax.bitcast_convert_type(result, x.dtype)
        return lax.bitwise_xor(bits, lax.full_like(bits, top if ordered else 0))

    rule(primitive)(unsigned)


for _primitive in (lax.rev_p, lax.cumsum_p, lax.cumprod_p, lax.reduce_window_sum_p):
    _register(_primitive, ordered=False)
for _primitive in (lax.cummax_p, lax.cummin_p, lax.reduce_window_max_p, lax.reduce_window_min_p):
    _register(_primitive, ordered=True)
