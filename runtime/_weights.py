"""Weights of a model in a safetensors file, under the names that the model has for them: in to tune, out to use."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from fixstep.runtime._checkpoint import is_checkpoint, read_whole
from fixstep.runtime._files import explain_os_error, write_atomically
from fixstep.runtime._partial import Loaded
from fixstep.runtime._signature import Array, LeafSpec, describe, shown_path
from fixstep.runtime._tensors import decode_tensors, encode_leaves, stored
from fixstep.targets.errors import CheckpointError

if TYPE_CHECKING:
    from fixstep.runtime._session import Session

Rename = Callable[[str], str]
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def load_weights(
    session: Session,
    path: str | os.PathLike[str],
    *,
    under: str = "params",
    rename: Rename | None = None,
    strict: bool = True,
    cast: bool = False,
) -> Loaded:
    """Set the leaves of the state below a path from a safetensors file; all of them or, on an error, none.

    Args:
        session: whose state is set. Its count of steps, its averages and its other leaves stay.
        path: a safetensors file from any source; a tensor named `dense/w` is for the leaf `params/dense/w`.
        under: the leaf path below which the names begin; "" for the whole state.
        rename: the tensor's name for the rest of a leaf path, `lambda rest: rest.replace("/", ".")`; None for it.
        strict: whether there must be one tensor for each leaf, and no other. If not, those that fit are taken.
        cast: whether floats of 16, 32 and 64 bits are rounded to the leaf's type; if not, another type does not fit.

    Returns:
        Which leaves were kept and which are missing, by leaf path, and which tensors are unexpected, by name.

    Raises:
        CheckpointError: if the file cannot be read or is damaged; if it does not fit, with each leaf and tensor that
            does not; or if nothing fits.
    """
    leaves = _named(session.artifact.signature("step", "state"), under, rename)
    try:
        metadata, data = read_whole(path)
        tensors = decode_tensors(data)
        if is_checkpoint(metadata):
            raise ValueError("a checkpoint: take it with load_leaves (--start-from), or export its weights first")
    except OSError as exc:
        raise CheckpointError(explain_os_error("read", path, exc)) from exc
    except ValueError as exc:
        raise CheckpointError(f"{os.fspath(path)}: {exc}") from exc
    taken = {name: _fitted(tensors[name], spec, cast=cast) for name, spec in leaves.items() if name in tensors}
    kept = {leaves[name].path: array for name, array in taken.items() if array is not None}
    missing = tuple(spec.path for spec in leaves.values() if spec.path not in kept)
    unexpected = tuple(name for name in tensors if taken.get(name) is None)
    if not kept or (strict and (missing or unexpected)):
        raise CheckpointError(f"{os.fspath(path)}: {_explain(leaves, tensors, missing, unexpected, cast=cast)}")
    session.load_state(session.state() | kept)
    return Loaded(tuple(kept), missing, unexpected)


def save_weights(
    session: Session, path: str | os.PathLike[str], *, under: str = "params", rename: Rename | None = None
) -> tuple[str, ...]:
    """Write the leaves of the state below a path to a safetensors file, whole or not at all.

    Args:
        session: whose state is written.
        path: the file; an old one is replaced only when the new one is on the disk. Types that the format does not have
            are held as `docs/checkpoint.md` says.
        under: the leaf path below which the names begin; "" for the whole state.
        rename: the tensor's name for the rest of a leaf path, `lambda rest: rest.replace("/", ".")`; None for it.

    Returns:
        The names of the tensors.

    Raises:
        CheckpointError: if there is no leaf below that path, two leaves get one name, or the file cannot be written.
    """
    return write_weights(path, session.state(), session.artifact.signature("step", "state"), under=under, rename=rename)


def write_weights(
    path: str | os.PathLike[str],
    state: Mapping[str, Array],
    specs: Sequence[LeafSpec],
    *,
    under: str,
    rename: Rename | None = None,
) -> tuple[str, ...]:
    """As `save_weights`, of a state by leaf path, such as that of a checkpoint."""
    leaves = _named(specs, under, rename)

    def write(file: BinaryIO) -> None:
        file.write(data)

    renamed = [dataclasses.replace(spec, path=name) for name, spec in leaves.items()]
    try:
        data = encode_leaves({name: state[spec.path] for name, spec in leaves.items()}, renamed)
        write_atomically(path, write)
    except ValueError as exc:
        raise CheckpointError(f"{os.fspath(path)}: cannot be written: {exc}\nNothing was written.") from exc
    except OSError as exc:
        raise CheckpointError(explain_os_error("write", path, exc)) from exc
    return tuple(leaves)


def _named(specs: Sequence[LeafSpec], under: str, rename: Rename | None) -> dict[str, LeafSpec]:
    """The leaves below a path, by the names of their tensors."""
    below = {_rest(spec.path, under): spec for spec in specs if spec.path == under or _is_below(spec.path, under)}
    if not below:
        names = dict.fromkeys(shown_path(spec.path.partition("/")[0], "state") for spec in specs)
        raise CheckpointError(f"no leaf of the state is below {under!r}; there are leaves below {', '.join(names)}")
    if rename is None:
        return below
    named = {rename(rest): spec for rest, spec in below.items()}
    if len(named) < len(below):
        lost = next(spec for rest, spec in below.items() if named[rename(rest)] is not spec)
        twice = named[rename(_rest(lost.path, under))]
        raise CheckpointError(f"rename gives the leaves {lost.path!r} and {twice.path!r} one name")
    return named


def _is_below(path: str, under: str) -> bool:
    return under == "" or path.startswith(f"{under}/")


def _rest(path: str, under: str) -> str:
    """What follows in a leaf path; a leaf that is itself the whole has its last name."""
    if path == under:
        return path.rpartition("/")[2]
    return path if under == "" else path.removeprefix(f"{under}/")


def _fitted(tensor: Array, spec: LeafSpec, *, cast: bool) -> Array | None:
    """A tensor as the leaf that it is for; None if its type or shape is another."""
    _, dtype, shape = stored(spec)
    if tensor.shape != shape:
        return None
    if tensor.dtype.name != dtype:
        if not (cast and {tensor.dtype.name, dtype} <= set(_FLOATS)):
            return None
        with np.errstate(over="ignore"):  # what is beyond the type is infinite, as in every conversion
            tensor = tensor.astype(spec.numpy_dtype)
    return tensor.reshape(-1).view(spec.numpy_dtype).reshape(spec.shape)


def _explain(
    leaves: dict[str, LeafSpec],
    tensors: dict[str, Array],
    missing: tuple[str, ...],
    unexpected: tuple[str, ...],
    *,
    cast: bool,
) -> str:
    """Each leaf without a tensor that fits, each tensor without a leaf, and what to do."""
    lines = ["the tensors are not the weights:"]
    castable = False
    for name, spec in leaves.items():
        if spec.path in missing:
            tensor = tensors.get(name)
            got = "missing" if tensor is None else f"got {describe(tensor.dtype.name, tensor.shape)}"
            lines.append(f"  {shown_path(spec.path, 'state')}, from {name!r}: expected {spec}, {got}")
            castable |= tensor is not None and not cast and _fitted(tensor, spec, cast=True) is not None
    others = [name for name in unexpected if name not in leaves]
    lines += [f"  {name!r}: unexpected, {describe(tensors[name].dtype.name, tensors[name].shape)}" for name in others]
    if others and len(missing) == len(leaves):
        lines.append("Say with under= (--under) where the names begin, and with rename= how they are spelt.")
    elif castable:
        lines.append("Round to the types of the leaves with cast=True (--cast).")
    elif len(missing) < len(leaves):
        lines.append("Take what fits with strict=False (--in-part).")
    return "\n".join(lines)
