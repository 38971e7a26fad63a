"""Which parameters are trained: a tree of parameters in two, and in one again."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fixstep.frontend._seed import SEPARATOR
from fixstep.targets.errors import ProgramError

Trainable = Callable[[str], bool] | str | Sequence[str]
_SHOWN = 12


def parse_trainable(trainable: Trainable | None, params: Any) -> Callable[[str], bool]:
    """Which leaf paths (`params/dense/kernel`) are trained.

    Args:
        trainable: a function of the path, or one or more patterns in which `*` stands for any text; None for all.
        params: the parameters, for their paths.

    Raises:
        ProgramError: if a pattern fits no parameter, or no floating parameter is trained.
    """
    paths = [path for path, leaf in _leaves(params) if _differentiable(leaf)]
    if trainable is None:
        chosen: Callable[[str], bool] = lambda path: True  # noqa: E731
    elif callable(trainable):
        chosen = trainable
    else:
        patterns = [trainable] if isinstance(trainable, str) else list(trainable)
        unused = [p for p in patterns if not any(fnmatch.fnmatchcase(path, p) for path in paths)]
        if unused:
            raise ProgramError(f"trainable: no parameter fits {', '.join(map(repr, unused))}; {_there_are(paths)}")
        chosen = lambda path: any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)  # noqa: E731
    if not any(map(chosen, paths)):
        raise ProgramError(f"trainable: it leaves no parameter to train; {_there_are(paths)}")
    return chosen


def _there_are(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return f"the floating ones are: {', '.join(paths[:_SHOWN]) or 'none'}{more}"


def split(params: Any, chosen: Callable[[str], bool]) -> tuple[Any, Any]:
    """The parameters that are trained and those that are not: two trees with None in place of the others."""
    treedef = jax.tree.structure(params)
    pairs = [(leaf, _differentiable(leaf) and bool(chosen(path))) for path, leaf in _leaves(params)]
    trained = treedef.unflatten([leaf if mine else None for leaf, mine in pairs])
    return trained, treedef.unflatten([None if mine else leaf for leaf, mine in pairs])


def merge(trained: Any, frozen: Any) -> Any:
    """The tree that was split."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda leaf: leaf is None)


def _leaves(params: Any) -> list[tuple[str, Any]]:
    pairs, _ = jax.tree_util.tree_flatten_with_path({"params": params})
    return [(jax.tree_util.keystr(path, simple=True, separator=SEPARATOR), leaf) for path, leaf in pairs]


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, float) or (hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact)))
