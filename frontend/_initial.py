"""The first state of a program: given as a pytree, or made by its `init`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fixstep.frontend._flat import _call_user
from fixstep.frontend._lines import describe_error
from fixstep.frontend._program import Program
from fixstep.frontend._seed import (
    Flat,
    Layout,
    abstract_loss,
    cast_values,
    flatten,
    key_data,
    shown,
    to_leaf,
)
from fixstep.frontend._x64 import truncations, user_setting, x64_context
from fixstep.runtime._signature import Array, LeafSpec, shown_path
from fixstep.targets.errors import FixpointError, FixstepError, ProgramError

_KEY_WORDS = {"threefry2x32": 1, "rbg": 2, "unsafe_rbg": 2}  # how many copies of (high, low) are a key's data


@dataclasses.dataclass(frozen=True, eq=False)
class Initial:
    """The canonical seed of the fixpoint.

    Attributes:
        layout: its structure and types.
        values: the leaves as they were given; from an `init` function only those that it does not compute.
        init: the function, or None where the state was given.
        x64: whether `init` is traced with 64-bit types.
        key: the implementation of the key that `init` takes.
        requests: the 64-bit types that `init` asks for by name, each with its line, where the user's setting is off.
    """

    layout: Layout
    values: dict[int, Any]
    init: Callable[[Any], Any] | None
    x64: bool
    key: str
    requests: tuple[str, ...] = ()

    def cast(self, leaves: Sequence[LeafSpec]) -> tuple[Array, ...] | None:
        """The values in the types of the template, or None where an `init` function makes them.

        Raises:
            FixpointError: naming each leaf whose values do not survive the cast, or may not.
        """
        known = sorted(self.values)
        before = self.layout.leaves
        arrays = cast_values([self.values[i] for i in known], [before[i] for i in known], [leaves[i] for i in known])
        if self.init is None:
            return arrays
        lost = [
            f"  {shown_path(old.path, 'state')}: {old} → {new}"
            for i, (old, new) in enumerate(zip(before, leaves, strict=True))
            if i not in self.values and abstract_loss(old, new)
        ]
        if lost:
            raise FixpointError(
                "\n".join(
                    [
                        "the step changes the type of state leaves that init computes; values may not survive that:",
                        *lost,
                        "Return the leaf in its own type, for example with .astype(...), or start it in the new type.",
                    ]
                )
            )
        return None

    def flat_init(self, leaves: Sequence[LeafSpec]) -> Callable[[Any, Any], list[Any]] | None:
        """`init` as a function of the seed's two uint32 words that returns flat leaves in the template's types."""
        init = self.init
        if init is None:
            return None

        def flat(seed_high: Any, seed_low: Any) -> list[Any]:
            key = make_key(seed_high, seed_low, self.key)
            # As the user would have it: other leaves that are 64-bit do not make init's own numbers 64-bit.
            with x64_context(self.x64):
                made = flatten(_call_user(init, [key]), "state", static=True)
            return [to_leaf(value, spec) for value, spec in zip(made.values, leaves, strict=True)]

        return flat


def make_key(seed_high: Any, seed_low: Any, implementation: str) -> Any:
    """The typed key of a 64-bit seed given as two uint32 words; (0, seed) gives `jax.random.key(seed)`."""
    words = [seed_high, seed_low] * _KEY_WORDS[implementation]
    data = jnp.stack([jnp.asarray(word, dtype=jnp.uint32) for word in words])
    return jax.random.wrap_key_data(data, impl=implementation)


def initial_state(program: Program) -> Initial:
    """Take the program's first state apart, or trace the `init` that makes it.

    Raises:
        ProgramError: if a leaf cannot be one, or `init` raises.
    """
    implementation = str(jax.config.jax_default_prng_impl)
    if not program.init_is_function:
        flat = flatten(program.init, "state", static=True)
        _refuse_abstract(flat)
        return Initial(flat.layout, dict(enumerate(flat.values)), None, user_setting(), implementation)
    if implementation not in _KEY_WORDS:
        raise ProgramError(f"init: expected a jax_default_prng_impl of {', '.join(_KEY_WORDS)}, got {implementation!r}")
    x64 = user_setting()
    with truncations() as truncated:
        flat = _trace_init(program.init, implementation, x64=x64)
    if truncated and not x64:  # it asks for 64-bit types by name
        x64 = True
        flat = _trace_init(program.init, implementation, x64=True)
    _refuse_abstract(flat)
    constants = {i: value for i, value in enumerate(flat.values) if not isinstance(value, jax.core.Tracer)}
    return Initial(flat.layout, constants, program.init, x64, implementation, tuple(dict.fromkeys(truncated)))


def _refuse_abstract(flat: Flat) -> None:
    abstract = [
        f"  {shown_path(spec.path, 'state')}: {shown(spec)}"
        for spec, value in zip(flat.layout.leaves, flat.values, strict=True)
        if isinstance(value, jax.ShapeDtypeStruct)
    ]
    if abstract:
        lines = ["init: expected the first values of the state, got only the types of these leaves:", *abstract]
        raise ProgramError("\n".join([*lines, "Pass arrays, or a function init(key) that makes them."]))


def _trace_init(init: Callable[[Any], Any], implementation: str, *, x64: bool) -> Flat:
    made: list[Flat] = []

    def call(high: Any, low: Any) -> list[Any]:
        made.append(flatten(_call_user(init, [make_key(high, low, implementation)]), "state", static=True))
        return [key_data(value) for value in made[-1].values if isinstance(value, jax.core.Tracer)]

    word = jax.ShapeDtypeStruct((), jnp.uint32)
    with x64_context(x64):
        try:
            jax.eval_shape(call, word, word)
        except FixstepError:
            raise
        except Exception as exc:
            hint = (
                "\n  If it cannot be traced, pass the state that it makes instead: init=make_state(jax.random.key(0))"
            )
            raise ProgramError(f"init raised {describe_error(exc)}{hint}") from exc
    return made[-1]
