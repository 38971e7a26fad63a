"""Batches of any size: one symbolic dimension in a program's batch, compiled for a few sizes and a mask.

IREE compiles fixed shapes. A program whose batch has a dimension made by `jax.export.symbolic_shape` is compiled for a
few sizes; a batch is padded to the smallest that holds it, and what mixes examples is masked by the real size.
"""

from fixstep.frontend.sizes import _indexing, _rules, _structures  # noqa: F401  (each registers its rules on import)
from fixstep.frontend.sizes._mask import Masker, symbolic_axes
from fixstep.frontend.sizes._padded import Padded, padded_function, symbolic_structs
from fixstep.frontend.sizes._range import SizeRange, size_range, sized

__all__ = [
    "Masker",
    "Padded",
    "SizeRange",
    "padded_function",
    "size_range",
    "sized",
    "symbolic_axes",
    "symbolic_structs",
]
