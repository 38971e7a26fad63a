"""Models of any library as two functions: one makes parameters and state, one applies them.

A model has parameters, which are trained, and may have a state that its own calls change (running averages of batch
normalisation, counters). Dropout takes a key, which the training state carries.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fixstep.targets.errors import ProgramError

# A key for dropout is made of the one that the parameters come from. `jax.random.split` gives the keys that `fold_in`
# gives of small numbers, which a model's own `init` uses.
_DROPOUT = 0x64726F70

_EXPECTED = (
    "expected a pair (init, apply), a Flax linen or nnx module, an Equinox module, or a function of a key that makes a "
    "module"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model of any library.

    Attributes:
        init: `init(key) -> (params, model_state)`; the model state is a pytree, without leaves where there is none.
        apply: `apply(params, model_state, inputs, key, training) -> (prediction, model_state)`. The key is for dropout.
            Without training it is in inference mode, and the state that it returns is the one that it took.
        given: whether `init` returns what it was given, whatever the key.
    """

    init: Callable[[Any], tuple[Any, Any]]
    apply: Callable[[Any, Any, Any, Any, bool], tuple[Any, Any]]
    given: bool


def adapt(model: Any, inputs: Any) -> Model:
    """A model of any library as two functions.

    Args:
        model: as `trainer` takes it.
        inputs: an example of what it is applied to; only types and shapes are used.

    Raises:
        ProgramError: if it is none.
    """
    example = jax.tree.map(_zeros, inputs)
    if isinstance(model, tuple | list) and len(model) == 2:
        return _pair(model[0], model[1], example)
    adapted = _module(model, example)
    if adapted is not None:
        return adapted
    if inspect.isroutine(model) or isinstance(model, functools.partial):
        return _made(model)
    raise ProgramError(f"model: {_EXPECTED}, got {model!r:.80}")


def _pair(first: Any, second: Any, example: Any) -> Model:
    """`(init, apply)`, where `init` may be what it would return, `apply` a linen module; `(Equinox module, state)`."""
    if _is_linen(second):
        from fixstep.frontend.training._linen import linen_model

        return linen_model(second, example, first)
    if _kind(first) == "equinox":
        from fixstep.frontend.training._equinox import equinox_model

        return equinox_model(lambda key: (first, second), given=True)
    if not callable(second):
        raise ProgramError(f"model: {_EXPECTED}, got {(first, second)!r:.80}")
    given = not callable(first)
    names = _parameters(second)

    def init(key: Any) -> tuple[Any, Any]:
        return (first if given else first(key)), {}

    def apply(params: Any, state: Any, inputs: Any, key: Any, training: bool) -> tuple[Any, Any]:
        return second(params, inputs, **_wanted(names, key, training)), state

    return Model(init, apply, given)


def _module(model: Any, example: Any) -> Model | None:
    """The model of a module of one of the libraries, or None."""
    kind = _kind(model)
    if kind == "linen":
        from fixstep.frontend.training._linen import linen_model

        return linen_model(model, example, None)
    if kind in ("nnx", "equinox"):
        return _of_maker(kind, lambda key: model, given=True)
    return None


def _made(make: Callable[[Any], Any]) -> Model:
    """The model of a function that makes a module of a key: what it makes is found by making it abstractly."""
    kinds: list[str] = []

    def look(key: Any) -> int:
        made = make(key)
        kinds.append(_kind(made[0] if isinstance(made, tuple) and len(made) == 2 else made))
        return 0

    jax.eval_shape(look, jax.random.key(0))
    if kinds[-1] not in ("nnx", "equinox"):
        raise ProgramError(f"model: {_EXPECTED}; this function makes {kinds[-1]}")
    return _of_maker(kinds[-1], make, given=False)


def _of_maker(kind: str, make: Callable[[Any], Any], *, given: bool) -> Model:
    if kind == "nnx":
        from fixstep.frontend.training._nnx import nnx_model

        return nnx_model(make, given=given)
    from fixstep.frontend.training._equinox import equinox_model

    return equinox_model(make, given=given)


def _kind(value: Any) -> str:
    """`linen`, `nnx` or `equinox` for a module of these, else words for it. A library not imported made no module."""
    if _is_linen(value):
        return "linen"
    if "flax.nnx" in sys.modules:
        from flax import nnx

        if isinstance(value, nnx.Module):
            return "nnx"
    if "equinox" in sys.modules:
        from equinox import Module

        if isinstance(value, Module):
            return "equinox"
    return f"a {type(value).__name__}"


def _is_linen(value: Any) -> bool:
    if "flax.linen" not in sys.modules:
        return False
    from flax import linen

    return isinstance(value, linen.Module)


def _zeros(leaf: Any) -> Any:
    """An array like an example's leaf; a size that is not known yet is 1."""
    shape = [n if isinstance(n, int) else 1 for n in leaf.shape]
    return jnp.zeros(shape, leaf.dtype)


def dropout_key(key: Any) -> Any:
    """The first key for dropout, of the key that makes the parameters."""
    return jax.random.fold_in(key, _DROPOUT)


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the arguments of a function, empty where they cannot be known."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _wanted(names: frozenset[str], key: Any, training: bool) -> dict[str, Any]:
    """The arguments, by the names that are customary, with which a model is told of training and given a key."""
    options = {"key": key, **mode_of(names, training)}
    return {name: value for name, value in options.items() if name in names}


def mode_of(names: frozenset[str], training: bool) -> dict[str, bool]:
    """Those of the names `train`, `training`, `deterministic` and `use_running_average` that a model takes, set."""
    modes = {
        "train": training,
        "training": training,
        "deterministic": not training,
        "use_running_average": not training,
    }
    return {name: value for name, value in modes.items() if name in names}
