"""What elementwise operations, reductions, products and changes of shape do on a padded batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fixstep.frontend._extremes import highest, lowest
from fixstep.frontend.sizes._mask import Masker, Unmaskable, is_symbolic, rule, symbolic_axes

_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul name ne neg
nextafter not optimization_barrier or polygamma population_count pow random_gamma_grad real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
""".split()  # noqa: SIM905 (a list would be ninety lines)
_MIXES_EXAMPLES = "it mixes the examples of the batch in a way that a mask cannot undo"


@rule(*_ELEMENTWISE)
def elementwise(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """Each element by itself."""
    return _result(eqn, masker.bind(eqn, operands))


def _result(eqn: Any, outputs: list[Any]) -> Any:
    return outputs if eqn.primitive.multiple_results else outputs[0]


@rule("dim_as_value")
def dim_as_value(masker: Masker, eqn: Any) -> Any:
    """The size as a number."""
    return masker.extent(eqn.params["dim"], eqn.outvars[0].aval.dtype)


@rule("broadcast_in_dim", "transpose", "squeeze", "expand_dims", "iota", "broadcasted_iota")
def moved_whole(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """Axes are moved, added and taken away whole, and counted from their start."""
    return masker.one(eqn, operands[:1])


@rule("reshape")
def reshape(masker: Masker, eqn: Any, operand: Any) -> Any:
    """Right where the real elements come first in each group of axes that is joined or split."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if not _keeps_order(before, after):
        raise Unmaskable(f"a reshape from {_shown(before)} to {_shown(after)} puts padding between the examples")
    return jax.lax.reshape(operand, masker.concrete(tuple(after)))


def _shown(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(str, shape))})"


def _keeps_order(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether both shapes fall into groups of equal size, each with at most one symbolic axis, which leads it."""
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = _group(before, after, i, j)
        if not (_leads(before[i:left]) and _leads(after[j:right])):
            return False
        i, j = left, right
    return True


def _group(before: Sequence[Any], after: Sequence[Any], i: int, j: int) -> tuple[int, int]:
    """The ends of the shortest runs of axes from i and j that have as many elements."""
    left, right = i, j
    while True:
        a, b = math.prod(before[i:left]), math.prod(after[j:right])
        if (left > i or right > j) and a == b:
            # Trailing ones belong to the group before them.
            while left < len(before) and before[left] == 1:
                left += 1
            while right < len(after) and after[right] == 1:
                right += 1
            return left, right
        if left < len(before) and (right >= len(after) or not _larger(a, b)):
            left += 1
        elif right < len(after):
            right += 1
        else:
            return len(before), len(after)


def _larger(a: Any, b: Any) -> bool:
    try:
        return bool(a > b)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def _leads(group: Sequence[Any]) -> bool:
    symbolic = [k for k, n in enumerate(group) if is_symbolic(n)]
    return not symbolic or (len(symbolic) == 1 and all(n == 1 for n in group[: symbolic[0]]))


_IDENTITY: dict[str, Any] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lowest,
    "min": highest,
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    "and": lambda dtype: True if jnp.issubdtype(dtype, jnp.bool_) else -1,
    "logsumexp": lambda dtype: -np.inf,
}


@rule("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "reduce_xor")
def reduction(masker: Masker, eqn: Any, operand: Any) -> Any:
    """Padding is the identity of the reduction."""
    aval = eqn.invars[0].aval
    fill = _IDENTITY[eqn.primitive.name.removeprefix("reduce_")](aval.dtype)
    return masker.one(eqn, [masker.mask(operand, aval, eqn.params["axes"], fill)])


@rule("argmax", "argmin")
def arg_reduction(masker: Masker, eqn: Any, operand: Any) -> Any:
    """Padding never wins, and the first of equals does."""
    aval = eqn.invars[0].aval
    fill = (lowest if eqn.primitive.name == "argmax" else highest)(aval.dtype)
    return masker.one(eqn, [masker.mask(operand, aval, eqn.params["axes"], fill)])


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(masker: Masker, eqn: Any, operand: Any) -> Any:
    """Forward, padding comes last; backward it comes first, as the identity."""
    if not eqn.params["reverse"]:
        return masker.one(eqn, [operand])
    aval = eqn.invars[0].aval
    fill = _IDENTITY[eqn.primitive.name.removeprefix("cum")](aval.dtype)
    return masker.one(eqn, [masker.mask(operand, aval, (eqn.params["axis"],), fill)])


@rule("dot_general")
def dot_general(masker: Masker, eqn: Any, left: Any, right: Any) -> Any:
    """Padding is zero where it is summed over; in both, because zero times NaN is NaN."""
    (left_axes, right_axes), _ = eqn.params["dimension_numbers"]
    return masker.one(
        eqn,
        [masker.mask(left, eqn.invars[0].aval, left_axes, 0), masker.mask(right, eqn.invars[1].aval, right_axes, 0)],
    )


@rule("conv_general_dilated")
def convolution(masker: Masker, eqn: Any, left: Any, right: Any) -> Any:
    """As a product: batch axes are kept, features are summed over, and the window does not go over examples."""
    numbers = eqn.params["dimension_numbers"]
    avals = [variable.aval for variable in eqn.invars]
    for aval, spec in zip(avals, (numbers.lhs_spec, numbers.rhs_spec), strict=True):
        if any(is_symbolic(aval.shape[axis]) for axis in spec[2:]):
            raise Unmaskable("its window goes over the examples of the batch")
    counts = (eqn.params["feature_group_count"], eqn.params["batch_group_count"])
    if any(is_symbolic(count) for count in counts):
        raise Unmaskable("each example has its own kernel: write it with jax.vmap over a product, or with lax.map")
    return masker.one(
        eqn,
        [
            masker.mask(left, avals[0], (numbers.lhs_spec[1],), 0),
            masker.mask(right, avals[1], (numbers.rhs_spec[1],), 0),
        ],
    )


_WINDOWS = ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")


@rule(*_WINDOWS, "select_and_scatter_add", "select_and_gather_add", "select_and_scatter")
def window(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """Windows within each example."""
    dimensions, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    padding = eqn.params["padding"]
    for variable in eqn.invars:
        for axis in symbolic_axes(variable.aval):
            if (dimensions[axis], strides[axis], tuple(padding[axis])) != (1, 1, (0, 0)):
                raise Unmaskable("its window goes over the examples of the batch")
    return _result(eqn, masker.bind(eqn, operands))


@rule("concatenate", "split")
def along_one_axis(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """Joined or split along an axis of numbers."""
    axis = eqn.params["dimension" if eqn.primitive.name == "concatenate" else "axis"]
    if any(is_symbolic(variable.aval.shape[axis]) for variable in (*eqn.invars, *eqn.outvars)):
        raise Unmaskable("the examples of the batch are joined with others, or split")
    return _result(eqn, masker.bind(eqn, operands))


@rule("stack")
def stack(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """An axis more."""
    return masker.one(eqn, operands)


@rule("tile")
def tile(masker: Masker, eqn: Any, operand: Any) -> Any:
    """Repeated along axes of numbers."""
    aval = eqn.invars[0].aval
    repeats = eqn.params["reps"]
    if any(is_symbolic(n) or n != 1 for axis, n in enumerate(repeats) if is_symbolic(aval.shape[axis])):
        raise Unmaskable("the whole batch is repeated")
    return masker.one(eqn, [operand])


@rule("pad")
def pad(masker: Masker, eqn: Any, operand: Any, value: Any) -> Any:
    """What stands behind the real part is the padding value already, where more of it is added."""
    aval = eqn.invars[0].aval
    valid = masker.valid(aval, range(len(aval.shape)))
    if valid is not None:
        operand = jnp.where(valid, operand, value)
    return masker.one(eqn, [operand, value])


@rule("sort")
def sort(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """Padding is sorted behind everything else, by a first key of its own."""
    axis, aval = eqn.params["dimension"], eqn.invars[0].aval
    valid = masker.valid(aval, (axis,))
    if valid is None:
        return masker.bind(eqn, operands)
    padding = jax.lax.convert_element_type(~valid, np.int32)
    keys = eqn.params["num_keys"] + 1
    return masker.bind(eqn, [padding, *operands], num_keys=keys)[1:]


_MATRICES = (
    "cholesky eigh geqrf householder_product lu qr svd triangular_solve tridiagonal_solve lu_pivots_to_permutation"
)


@rule(*_MATRICES.split())
def matrices(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """One matrix for each example."""
    for variable in eqn.invars:
        if any(axis >= len(variable.aval.shape) - 2 for axis in symbolic_axes(variable.aval)):
            raise Unmaskable(_MIXES_EXAMPLES)
    return _result(eqn, masker.bind(eqn, operands))


@rule("fft")
def fft(masker: Masker, eqn: Any, operand: Any) -> Any:
    """A transform within each example."""
    aval = eqn.invars[0].aval
    if any(axis >= len(aval.shape) - len(eqn.params["fft_lengths"]) for axis in symbolic_axes(aval)):
        raise Unmaskable(_MIXES_EXAMPLES)
    return masker.one(eqn, [operand])


@rule("top_k", "approx_top_k")
def top_k(masker: Masker, eqn: Any, operand: Any) -> Any:
    """The largest within each example."""
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(eqn.invars[0].aval.shape)
    if axis in symbolic_axes(eqn.invars[0].aval):
        raise Unmaskable(_MIXES_EXAMPLES)
    return masker.bind(eqn, [operand])


@rule("random_bits", "random_split")
def random(masker: Masker, eqn: Any, keys: Any) -> Any:
    """Numbers counted from the first, so that a smaller batch gets the first of a larger one's."""
    implementation = eqn.invars[0].aval.dtype._impl.name
    if implementation != "threefry2x32" or not jax.config.jax_threefry_partitionable:
        raise Unmaskable(
            f"with keys of {implementation} the numbers of a small batch are others than the first of a large one's; "
            "use jax.random.key(seed) with jax_threefry_partitionable"
        )
    shape = eqn.params["shape"]
    if not _leads(shape):
        raise Unmaskable(f"random numbers of shape {_shown(shape)}: make the batch their first axis")
    return masker.one(eqn, [keys])


@rule("random_wrap", "random_unwrap", "random_fold_in", "random_seed", "random_clone")
def key_by_key(masker: Masker, eqn: Any, *operands: Any) -> Any:
    """Each key by itself."""
    return masker.one(eqn, operands)


@rule("bitcast_convert_type")
def bitcast(masker: Masker, eqn: Any, operand: Any) -> Any:
    """Each element by itself; a change of width adds or takes a last axis of numbers."""
    return masker.one(eqn, [operand])
