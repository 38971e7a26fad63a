"""Rewrites of a step that stand between its user and what IREE computes wrongly or not at all.

`rewrite_function` works on the traced function, where an operation still has its JAX meaning; `rewrite_module` works on
the lowered module, where what IREE may write in place can be seen. Each file has one subject and says at its top which
fault it stands against.
"""

from fixstep.frontend.rewrites import (  # noqa: F401  (each registers its rules on import)
    _accumulate,
    _arctangent,
    _cholesky,
    _complex,
    _complex_functions,
    _control,
    _conversion,
    _convolution,
    _cumulative,
    _eigh,
    _float64,
    _fourier,
    _lu,
    _pooling,
    _qr,
    _random,
    _reductions,
    _roots_and_powers,
    _scatter,
    _sort,
    _svd,
    _triangular,
    _tridiagonal,
    _trigonometry,
    _unsigned,
)
from fixstep.frontend.rewrites._evaluate import rewrite_function
from fixstep.frontend.rewrites._module import rewrite_module
from fixstep.frontend.rewrites._unlowerable import unlowerable_operations

__all__ = ["rewrite_function", "rewrite_module", "unlowerable_operations"]
