"""Predicting over a whole data set with a function that takes batches of one size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fixstep.runtime._files import explain_os_error, write_atomically
from fixstep.runtime._npz import as_template_dtypes
from fixstep.runtime._session import Session
from fixstep.runtime._signature import Array, LeafSpec, check, describe, shown_path
from fixstep.targets.errors import DataError, TemplateError


def batch_size(specs: tuple[LeafSpec, ...]) -> int:
    """The number of examples of a batch, the first axis that all its leaves share.

    Raises:
        DataError: if they share none, so that arrays of examples cannot be cut to fit.
    """
    sizes = {spec.shape[0] if spec.shape else None for spec in specs}
    size = next(iter(sizes)) if len(sizes) == 1 else None
    if not size:
        leaves = ", ".join(f"{shown_path(spec.path, 'batch')} {spec}" for spec in specs) or "no leaves"
        raise DataError(
            f"the template's leaves share no first axis of examples ({leaves}), so arrays cannot be cut into batches: "
            "pass batches from a function, module:function"
        )
    return size


def choose_inputs(
    arrays: Mapping[str, Array], specs: tuple[LeafSpec, ...], where: str | os.PathLike[str]
) -> tuple[dict[str, Array], list[str]]:
    """The arrays that `predict` takes, and the names of those that it does not.

    Args:
        arrays: what the file holds, each of shape (examples, ...).
        specs: the leaves of the inputs, of one batch.
        where: the file, for messages.

    Raises:
        TemplateError: if one is missing or does not fit.
        DataError: if they differ in their number of examples.
    """
    if len(specs) == len(arrays) == 1 and specs[0].path == "":
        chosen = {"": next(iter(arrays.values()))}
    else:
        chosen = {spec.path: arrays[spec.path] for spec in specs if spec.path in arrays}
    chosen = as_template_dtypes(chosen, specs)
    ignored = [name for name in arrays if name not in chosen and "" not in chosen]
    size = batch_size(specs)
    lengths = {path: len(array) for path, array in chosen.items() if array.ndim}
    # Compared as a batch, so that the message is the session's; only the number of examples is the file's own.
    first = {
        path: _padded(array[:size], size) if array.ndim and len(array) else array for path, array in chosen.items()
    }
    try:
        check(first, specs, "inputs")
    except TemplateError as exc:
        raise TemplateError(f"{os.fspath(where)}: {exc}") from exc
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{path} {length}" for path, length in lengths.items())
        raise DataError(f"{os.fspath(where)}: the arrays differ in their number of examples: {told}")
    return chosen, ignored


def predict_all(session: Session, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The predictions for all examples, in order.

    The last batch is filled up with its last example, and what came of that is cut off again.

    Args:
        session: a session whose program has `predict`.
        arrays: the inputs by leaf path, each of shape (examples, ...), at least one example.

    Returns:
        Each output by leaf path, of shape (examples, ...).

    Raises:
        DataError: if an output has no axis of examples.
    """
    size = batch_size(session.signature("predict"))
    examples = len(next(iter(arrays.values())))
    predictions: dict[str, Array] = {}
    for start in range(0, examples, size):
        count = min(size, examples - start)
        batch = {path: _padded(array[start : start + size], size) for path, array in arrays.items()}
        for name, output in session.predict(batch).items():
            if output.shape[:1] != (size,):
                raise DataError(
                    f"the output {name!r} is {describe(output.dtype.name, output.shape)}, expected a first axis of "
                    f"{size} examples: call session.predict batch by batch instead"
                )
            if name not in predictions:
                predictions[name] = np.empty((examples, *output.shape[1:]), output.dtype)
            predictions[name][start : start + count] = output[:count]
    return predictions


def write_predictions(path: str | os.PathLike[str], predictions: Mapping[str, Array]) -> None:
    """Writes a .npz file, whole or not at all. Dtypes that .npz does not know (bfloat16) become float32, without loss.

    Raises:
        DataError: if the file cannot be written.
    """
    arrays: dict[str, Any] = {
        name: array if array.dtype.isbuiltin == 1 else array.astype(np.float32) for name, array in predictions.items()
    }
    try:
        write_atomically(Path(path), lambda file: np.savez(file, **arrays))
    except OSError as exc:
        raise DataError(explain_os_error("write", path, exc)) from exc


def _padded(array: Array, size: int) -> Array:
    if len(array) == size:
        return array
    return np.concatenate([array, np.repeat(array[-1:], size - len(array), axis=0)])
