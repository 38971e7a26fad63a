"""Matrix products and convolutions of float16 and bfloat16 accumulate in float32.

Stands against IREE adding up their products in the narrow type: over 4,096 terms float16 is 9.5e-3 off where JAX is
2.1e-4 off, and partial sums overflow. The result is asked for in float32 and converted afterwards, which is what XLA
computes; gradients are products and convolutions of their own by the time rules see them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from fixstep.frontend.rewrites._real import HALVES, Array
from fixstep.frontend.rewrites._rules import rule


@rule(lax.dot_general_p, lax.conv_general_dilated_p)
def product(lhs: Array, rhs: Array, **params: Any) -> Array | None:
    """A product or a convolution of halves whose result is a half."""
    wanted = params["preferred_element_type"]
    result = np.dtype(lhs.dtype if wanted is None else wanted)
    if result.name not in HALVES:
        return None
    primitive = lax.conv_general_dilated_p if "window_strides" in params else lax.dot_general_p
    wide = primitive.bind(lhs, rhs, **{**params, "preferred_element_type": np.dtype(np.float32)})
    return lax.convert_element_type(wide, result)
