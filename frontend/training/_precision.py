"""Precision: in which dtypes a model keeps its parameters, computes, and gives its outputs.

Only floating leaves are ever cast. Integers, booleans, complex numbers and PRNG keys stay as they are. What adds up
over many steps or examples (normalisation statistics, gradients, the optimizer's moments) is at least float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fixstep.runtime._signature import dtype_from_name
from fixstep.targets.errors import ProgramError


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a model, by name: `float16`, `bfloat16`, `float32` or `float64`.

    Attributes:
        params: of the parameters, as the state holds them; first parameters that are given are cast to it.
        compute: of parameters and inputs inside of the model.
        output: of what the model returns, to the loss and from `predict`.

    Raises:
        ProgramError: if one of them is no such name.
    """

    params: str
    compute: str
    output: str

    def __post_init__(self) -> None:
        wrong = [f"{key} {value!r}" for key, value in dataclasses.asdict(self).items() if value not in _DTYPES]
        if wrong:
            raise ProgramError(f"precision: expected dtypes of {', '.join(_DTYPES)}, got {', '.join(wrong)}")

    @property
    def wide(self) -> bool:
        """Whether it asks for 64-bit types."""
        return "float64" in (self.params, self.compute, self.output)


_DTYPES = ("float16", "bfloat16", "float32", "float64")
_NAMED = {
    "f16": Precision("float16", "float16", "float32"),
    "bf16": Precision("bfloat16", "bfloat16", "float32"),
    "f32": Precision("float32", "float32", "float32"),
    "f64": Precision("float64", "float64", "float64"),
    "mixed_f16": Precision("float32", "float16", "float32"),
    "mixed_bf16": Precision("float32", "bfloat16", "float32"),
}


def parse_precision(precision: Precision | str | None) -> Precision | None:
    """The policy of a name.

    Raises:
        ProgramError: if there is none of this name.
    """
    if precision is None or isinstance(precision, Precision):
        return precision
    if isinstance(precision, str) and precision in _NAMED:
        return _NAMED[precision]
    raise ProgramError(f"precision: expected one of {', '.join(_NAMED)}, or a Precision, got {precision!r}")


def is_float(leaf: Any) -> bool:
    """Whether a leaf is a floating number: what a policy casts."""
    if isinstance(leaf, float):
        return True
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def cast(tree: Any, dtype: str | None) -> Any:
    """A tree with its floating leaves in a dtype; as it is where that is None."""
    if dtype is None:
        return tree
    target = dtype_from_name(dtype)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, target) if is_float(leaf) else leaf, tree)


def widen(tree: Any) -> Any:
    """A tree with its floating leaves at least in float32."""

    def wider(leaf: Any) -> Any:
        narrow = is_float(leaf) and jnp.dtype(leaf.dtype).itemsize < 4
        return jnp.asarray(leaf, jnp.float32) if narrow else leaf

    return jax.tree.map(wider, tree)


def cast_like(tree: Any, like: Any) -> Any:
    """A tree whose floating leaves have the dtypes of another's."""
    return jax.tree.map(lambda leaf, old: leaf.astype(old.dtype) if is_float(leaf) else leaf, tree, like)
