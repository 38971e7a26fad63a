"""Matrix products and convolutions of narrow types accumulate in 32 bits.

Of integers: stands against IREE losing the sign of widened integers of 8 and 16 bits, or reading past a row, where it
widens them inside of a product on Vulkan: silently wrong in most shapes. A barrier keeps the widening outside; what is
narrower than the sum wraps the same afterwards.

Of float16 and bfloat16: stands against IREE adding up their products in the narrow type: over 4,096 terms float16 is
9.5e-3 off where JAX is 2.1e-4 off, and partial sums overflow. The result is asked for in float32 and converted
afterwards, which is what XLA computes; gradients are products and convolutions of their own by the time rules see them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from fixstep.frontend.rewrites._real import HALVES, Array
from fixstep.frontend.rewrites._rules import rule


@rule(lax.dot_general_p, lax.conv_general_dilated_p)
def product(lhs: Array, rhs: Array, **params: Any) -> Array | None:
    """A product or a convolution of halves whose result is a half, or of integers."""
    wanted = params["preferred_element_type"]
    result = np.dtype(lhs.dtype if wanted is None else wanted)
    if result.name in HALVES:
        sum_type = np.dtype(np.float32)
    elif result.kind in "iu" and lhs.dtype.kind in "iu" and rhs.dtype.kind in "iu":
        sum_type = result if result.itemsize >= 4 else np.dtype(np.int32)
        lhs, rhs = lax.optimization_barrier([lax.convert_element_type(x, sum_type) for x in (lhs, rhs)])
    else:
        return None
    primitive = lax.conv_general_dilated_p if "window_strides" in params else lax.dot_general_p
    wide = primitive.bind(lhs, rhs, **{**params, "preferred_element_type": sum_type})
    return lax.convert_element_type(wide, result)
