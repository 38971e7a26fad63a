"""When a program is traced with 64-bit types, and the context in which it is.

With `jax_enable_x64` off JAX turns 64-bit values into 32-bit ones, in `eval_shape` without a word. A program that holds
64-bit leaves is therefore traced with the setting on; a program that holds none is traced with it off, because the
setting also changes the type of everything that is made without one (`jnp.arange(3)` becomes int64).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import TextIO

import jax

from fixstep.frontend._lines import line_of_stack
from fixstep.runtime._signature import LeafSpec

_TRUNCATION = "Explicitly requested dtype"  # how JAX begins its warning when it gives a 32-bit array instead

WIDE_DTYPES = frozenset({"int64", "uint64", "float64", "complex128"})


def x64_context(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """A context in which JAX traces with 64-bit types (`True`) or without (`False`), whatever the setting is."""
    context: contextlib.AbstractContextManager[None] = jax.enable_x64(enabled)
    return context


def user_setting() -> bool:
    """Whether the user's own `jax_enable_x64` is on."""
    return bool(jax.config.jax_enable_x64)


def wide_leaves(leaves: Iterable[LeafSpec]) -> tuple[LeafSpec, ...]:
    """The leaves that hold 64-bit numbers."""
    return tuple(spec for spec in leaves if spec.dtype in WIDE_DTYPES)


@contextlib.contextmanager
def truncations() -> Iterator[list[str]]:
    """Collects JAX's warnings that a 64-bit dtype was asked for and a 32-bit one given; all others pass as they were.

    Yields:
        The list of such requests, each the name of a dtype and the user's line.
    """
    found: list[str] = []
    others: list[tuple[Warning, type[Warning], str, int]] = []

    def note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = str(message)
        if text.startswith(_TRUNCATION):
            # The warning names a line of JAX's; while it is raised, the user's own is still on the stack.
            where = line_of_stack()
            found.append(f"{text[len(_TRUNCATION) :].split()[0]}" + (f" at {where}" if where else ""))
        elif isinstance(message, Warning):
            others.append((message, category, filename, lineno))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield found
    for warning in others:
        warnings.warn_explicit(*warning)
