"""A program's functions on a padded batch: traced once at the symbolic size, evaluated at each compiled one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fixstep.frontend._lines import describe_error
from fixstep.frontend._seed import Layout, is_key
from fixstep.frontend.sizes._mask import Masker, Unmaskable, symbolic_axes
from fixstep.frontend.sizes._range import SizeRange, concrete
from fixstep.runtime._signature import LeafSpec
from fixstep.targets.errors import CompileError, FixstepError, ProgramError

Flat = Callable[[Sequence[Any], Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Padded:
    """One function over flat lists of leaves, whose second list has the batch's size in its shapes.

    Attributes:
        range: the sizes.
        structs: the shapes and dtypes of the second list, with the symbol in them.
        closed: the jaxpr of the function at the symbolic size.
        output: the structure of what it returns, a tree of `ShapeDtypeStruct` with the symbol.
    """

    range: SizeRange
    structs: tuple[jax.ShapeDtypeStruct, ...]
    closed: Any
    output: Any

    def spec(self, leaf: LeafSpec, index: int, padded: int) -> LeafSpec:
        """The type of a leaf of the second list, given that of the largest size, where it is padded to `padded`."""
        shape = concrete(tuple(self.structs[index].shape), {self.range.symbol: padded})
        return dataclasses.replace(leaf, shape=shape)

    def at(self, padded: int, first: Sequence[Any], second: Sequence[Any], size: Any) -> Any:
        """What the function returns for a padded second list; call it in a trace.

        Args:
            padded: the size that the arrays of `second` have.
            first: the state.
            second: the batch or inputs.
            size: how much of it is real, a traced int32 scalar.

        Raises:
            CompileError: naming the first operation that has no meaning on a padded batch, and the user's line.
        """
        masker = Masker(self.range, padded, size)
        try:
            outputs = masker.evaluate(self.closed.jaxpr, self.closed.consts, [*first, *second])
        except Unmaskable as exc:
            raise CompileError(exc.message()) from None
        return jax.tree.unflatten(jax.tree.structure(self.output), outputs)


def symbolic_structs(tree: Any, layout: Layout) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The leaves of an example with the symbol in their shapes; typed keys as their data."""
    structs = []
    for leaf, spec in zip(jax.tree.leaves(tree), layout.leaves, strict=True):
        shape = tuple(leaf.shape)
        data = spec.shape[len(shape) :] if is_key(leaf) else ()
        structs.append(jax.ShapeDtypeStruct((*shape, *data), spec.numpy_dtype))
    return tuple(structs)


def padded_function(
    name: str, function: Flat, sizes: SizeRange, state: Layout, structs: tuple[jax.ShapeDtypeStruct, ...]
) -> Padded:
    """Trace a flat function at the symbolic size.

    Args:
        name: the word for it in messages.
        function: of two flat lists, `(state, batch) -> ...`.
        sizes: the range.
        state: the state's layout.
        structs: of the second list.

    Raises:
        ProgramError: if the function needs the size as a number, or the size gets into a state leaf, or an output has
            a dimension that is neither a number nor the size itself.
    """
    try:
        closed, output = jax.make_jaxpr(
            lambda *leaves: function(*_split(leaves, len(state.leaves))), return_shape=True
        )(*state.structs, *structs)
    except FixstepError:
        raise
    except Exception as exc:
        raise ProgramError(
            f"{name} raised, traced for a batch of {sizes.symbol} examples: {describe_error(exc)}\n"
            f"Write it so that the size of the batch is not needed as a number, or give the batch a size in numbers."
        ) from exc
    found = Padded(sizes, structs, closed, output)
    _check_outputs(name, found)
    return found


def _split(leaves: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    return list(leaves[:count]), list(leaves[count:])


def _check_outputs(name: str, found: Padded) -> None:
    symbol = found.range.symbol
    for struct in jax.tree.leaves(found.output):
        for axis in symbolic_axes(struct):
            if str(struct.shape[axis]) != symbol:
                raise ProgramError(
                    f"{name} returns an array of shape ({', '.join(map(str, struct.shape))}), expected numbers and "
                    f"{symbol} alone in it"
                )
