"""One leaf of a session's state, read and set by its path: a learning rate, a loss scale."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import numpy as np

from fixstep.targets.errors import TemplateError

if TYPE_CHECKING:
    from fixstep.runtime._session import Session
    from fixstep.runtime._signature import LeafSpec


def number_leaf(session: Session, path: str) -> tuple[int, LeafSpec]:
    """Where in the state the leaf with this path is, and what it is: one real number.

    Raises:
        TemplateError: if there is no such leaf, with those that are near, or it is not one floating-point number.
    """
    specs = session.artifact.signature("step", "state")
    for index, spec in enumerate(specs):
        if spec.path == path:
            if spec.shape or not spec.dtype.startswith(("float", "bfloat")):
                raise TemplateError(f"the state's leaf {path!r}: expected one floating-point number, got {spec}")
            return index, spec
    paths = [spec.path for spec in specs]
    near = [p for p in paths if p.rpartition("/")[2] == path.rpartition("/")[2]]
    near = near or difflib.get_close_matches(path, paths, n=3)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise TemplateError(
        f"the state has no leaf {path!r}{hint}; `fixstep inspect` lists its leaves. A learning rate is a leaf of the "
        "state where the optimizer keeps it there, as optax.inject_hyperparams does"
    )


def read_number(session: Session, path: str) -> float:
    """The value of a leaf that is one number; waits for the device.

    Raises:
        TemplateError: as `number_leaf`.
    """
    index, spec = number_leaf(session, path)
    return float(session._device.download(session._current[index], spec))


def write_number(session: Session, path: str, value: float) -> float:
    """Set a leaf that is one number, between two steps. The last step can then no longer be taken back.

    Returns:
        The value as the leaf's dtype holds it.

    Raises:
        TemplateError: as `number_leaf`.
    """
    _, spec = number_leaf(session, path)
    array = np.asarray(value, spec.numpy_dtype)
    session.load_state({**session.state(), path: array})
    return float(array)
