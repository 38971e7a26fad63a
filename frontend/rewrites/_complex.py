"""Padding and windowed sums of complex numbers, by real and imaginary parts.

Stands against IREE's compiler crashing on both.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from fixstep.frontend.rewrites._real import Array
from fixstep.frontend.rewrites._rules import rule


@rule(lax.pad_p)
def pad(x: Array, value: Array, *, padding_config: Any) -> Array | None:
    """Padding of complex numbers."""
    if x.dtype.kind != "c":
        return None
    parts = [lax.pad(part(x), part(value), padding_config) for part in (lax.real, lax.imag)]
    return lax.complex(*parts)


@rule(lax.reduce_window_sum_p)
def windowed_sum(x: Array, **params: Any) -> Array | None:
    """The sum over windows of complex numbers."""
    if x.dtype.kind != "c":
        return None
    parts = [lax.reduce_window_sum_p.bind(part(x), **params) for part in (lax.real, lax.imag)]
    return lax.complex(*parts)
