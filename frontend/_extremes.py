"""The ends of a dtype's range: what changes nothing in a maximum or a minimum."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def lowest(dtype: Any) -> Any:
    """The identity of a maximum, as a Python number."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    return -np.inf if jnp.issubdtype(dtype, jnp.inexact) else int(jnp.iinfo(dtype).min)


def highest(dtype: Any) -> Any:
    """The identity of a minimum, as a Python number."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return np.inf if jnp.issubdtype(dtype, jnp.inexact) else int(jnp.iinfo(dtype).max)
