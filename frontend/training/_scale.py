"""Loss scales: gradients in float16 are computed of a larger loss, so that the small ones do not become 0.

A gradient that is infinite or NaN is an overflow. The update of that step is skipped as a whole, the optimizer's count
too. A dynamic scale then halves, down to a floor, and doubles after a period of finite steps.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from fixstep.frontend.training._precision import is_float
from fixstep.targets.errors import ProgramError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """A loss scale that halves on an overflow and doubles after a period without one.

    Attributes:
        initial: the first scale.
        period: after so many finite steps in a row it doubles.
        minimum: it does not halve below this.
        maximum: it does not double above this; without a bound it would in the end be infinite, and stay so.

    Raises:
        ProgramError: if they do not go together.
    """

    initial: float = 2.0**15
    period: int = 2000
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.initial <= self.maximum < math.inf or self.period < 1:
            raise ProgramError(f"loss_scale: expected 0 < minimum <= initial <= maximum and a period >= 1, got {self}")

    def first(self) -> dict[str, Any]:
        """What the state keeps of it: the scale, and how many finite steps there were in a row."""
        return {"scale": jnp.float32(self.initial), "finite_steps": jnp.int32(0)}

    def following(self, state: Any, finite: Any) -> dict[str, Any]:
        """What the state keeps after a step whose gradients were all finite, or not."""
        scale, steps = state["scale"], state["finite_steps"] + 1
        grows = finite & (steps >= self.period)
        lower = jnp.maximum(scale * 0.5, jnp.float32(self.minimum))
        higher = jnp.where(grows, jnp.minimum(scale * 2, jnp.float32(self.maximum)), scale)
        return {
            "scale": jnp.where(finite, higher, lower),
            "finite_steps": jnp.where(finite & ~grows, steps, 0),
        }


def parse_scale(scale: DynamicScale | float | str | None) -> DynamicScale | float | None:
    """A loss scale as it was given.

    Raises:
        ProgramError: if it is none.
    """
    if scale is None or isinstance(scale, DynamicScale):
        return scale
    if scale == "dynamic":
        return DynamicScale()
    if isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < math.inf:
        return float(scale)
    raise ProgramError(f"loss_scale: expected None, a number above 0, 'dynamic' or a DynamicScale, got {scale!r}")


def all_finite(tree: Any) -> Any:
    """Whether no floating number of a tree is infinite or NaN.

    The exponent is looked at, because a GPU's driver may take it that there are no NaNs.
    """
    finite = jnp.bool_(True)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            finite &= jnp.all(_finite(leaf.real)) & jnp.all(_finite(leaf.imag))
        elif is_float(leaf):
            finite &= jnp.all(_finite(leaf))
    return finite


def _finite(leaf: Any) -> Any:
    if leaf.dtype != jnp.float32:  # the narrower dtypes were widened before
        return jnp.isfinite(leaf)
    exponent = jnp.uint32(0x7F800000)
    return jax.lax.bitcast_convert_type(leaf, jnp.uint32) & exponent != exponent
