"""The range of a batch's size: what a program with a symbolic dimension says of it, and the sizes to compile for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from fixstep.targets.errors import ProgramError

# No more than this many sizes are compiled, each a quarter of the one above: a batch is then padded to less than four
# times its size, or to the smallest.
_MOST_SIZES = 3
_STEP = 4
# Bounds are found by asking whether the symbol is below a number; no batch is larger than this.
_LARGEST = 2**24
_LARGEST_MULTIPLE = 4096


@dataclasses.dataclass(frozen=True)
class SizeRange:
    """The sizes that a batch may have.

    Attributes:
        symbol: the name of the dimension, `b`.
        low: the smallest size.
        high: the largest.
        multiple: every size is a multiple of this.
    """

    symbol: str
    low: int
    high: int
    multiple: int = 1

    @property
    def compiled(self) -> tuple[int, ...]:
        """The sizes that are compiled, the largest first; a batch is padded to the smallest that holds it."""
        sizes = [self.high]
        while len(sizes) < _MOST_SIZES and sizes[-1] > self.low:
            quarter = -(-sizes[-1] // (_STEP * self.multiple)) * self.multiple
            sizes.append(min(max(quarter, self.low), sizes[-1]))
        return tuple(dict.fromkeys(sizes))


def symbols_of(dimension: Any) -> frozenset[str]:
    """The names in a dimension; none for a number."""
    return frozenset() if isinstance(dimension, int) else frozenset(dimension._get_vars())


def size_range(trees: Mapping[str, Any]) -> SizeRange | None:
    """The range of the symbolic dimension of a program's examples, or None where every shape is numbers.

    Args:
        trees: the examples by the word for them: `batch`, `inputs`.

    Raises:
        ProgramError: if there are several symbols, a dimension is more than the symbol, or the symbol has no upper
            bound.
    """
    symbolic: dict[str, Any] = {}
    wrong: list[str] = []
    for what, tree in trees.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = jax.tree_util.keystr(path, simple=True, separator="/") or f"<the {what} itself>"
            for dimension in getattr(leaf, "shape", ()):
                if not jax.export.is_symbolic_dim(dimension):
                    continue
                if symbols_of(dimension) != {str(dimension)}:
                    wrong.append(f"  {name}: expected numbers and one name in the shape, got {dimension}")
                symbolic.setdefault(str(dimension), dimension)
    if wrong:
        raise ProgramError("\n".join(["a batch of any size has one symbolic dimension:", *wrong]))
    if not symbolic:
        return None
    if len(symbolic) > 1:
        names = ", ".join(sorted(symbolic))
        raise ProgramError(
            f"a batch of any size has one symbolic dimension, got several: {names}; give the others numbers"
        )
    ((name, dimension),) = symbolic.items()
    high = _upper_bound(dimension)
    if high is None:
        raise ProgramError(
            f"the dimension {name} has no upper bound, and the device needs room for the largest batch: "
            f"make it with jax.export.symbolic_shape({name!r}, constraints=['{name} <= 64'])"
        )
    multiple = next((k for k in range(min(high, _LARGEST_MULTIPLE), 1, -1) if dimension % k == 0), 1)
    low = _lower_bound(dimension, high)
    return SizeRange(name, -(-low // multiple) * multiple, high // multiple * multiple, multiple)


def _upper_bound(dimension: Any) -> int | None:
    if not _known(dimension, _LARGEST):
        return None
    below, above = 0, _LARGEST
    while above - below > 1:
        middle = (below + above) // 2
        if _known(dimension, middle):
            above = middle
        else:
            below = middle
    return above


def _lower_bound(dimension: Any, high: int) -> int:
    low = 1
    while low < high and _known(low + 1, dimension):
        low += 1
    return low


def _known(left: Any, right: Any) -> bool:
    """Whether the constraints say that left ≤ right."""
    try:
        return bool(left <= right)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def concrete(value: Any, sizes: Mapping[str, int]) -> Any:
    """A dimension, shape, tree of them or parameter of an equation, with the symbols replaced by numbers."""
    if hasattr(value, "_evaluate") and hasattr(value, "_get_vars"):
        return int(value._evaluate(dict(sizes)))
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(concrete(item, sizes) for item in value)
    if isinstance(value, list):
        return [concrete(item, sizes) for item in value]
    return value


def sized(tree: Any, sizes: Mapping[str, int]) -> Any:
    """The tree of examples at one size."""

    def leaf(value: Any) -> Any:
        shape = getattr(value, "shape", ())
        if not any(map(jax.export.is_symbolic_dim, shape)):
            return value
        return jax.ShapeDtypeStruct(concrete(tuple(shape), sizes), value.dtype)

    return jax.tree.map(leaf, tree)
