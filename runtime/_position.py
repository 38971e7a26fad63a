"""Where the loop is, as a checkpoint keeps it: JSON, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fixstep.runtime._events import LoopState
from fixstep.targets.errors import CheckpointError, DataError

_COUNTS = (
    *("epoch", "batch", "iteration", "skipped", "skipped_in_epoch", "skipped_in_a_row"),
    *("validations", "validated_at"),
)


def position_of(state: LoopState, handlers: Mapping[str, Any]) -> dict[str, Any]:
    """The position of a loop and the states of its handlers; that of the next epoch, if this one is closed."""
    is_open = not state.closed
    return {
        "epoch": state.epoch if is_open else state.epoch + 1,
        "batch": state.batch if is_open else 0,
        "iteration": state.iteration,
        "skipped": state.skipped,
        "skipped_in_epoch": state.skipped_in_epoch if is_open else 0,
        "skipped_in_a_row": state.skipped_in_a_row,
        "begun": state.begun and is_open,
        "halting": state.halting and is_open,
        "averages": _texts(state.averages),
        "validation": _texts(state.validation),
        "validations": state.validations,
        "validated_at": state.validated_at,
        "data": dict(state.data),
        "handlers": dict(handlers),
    }


def take_position(state: LoopState, position: Mapping[str, Any]) -> dict[str, Any]:
    """Take up what `position_of` gave, from the checkpoint `state.checkpoint`.

    Returns:
        The states of the handlers.

    Raises:
        CheckpointError: if it is no position of a loop.
        DataError: if the data is not that of the checkpoint.
    """
    try:
        for name in _COUNTS:
            setattr(state, name, int(position[name]))
        state.begun, state.halting = bool(position["begun"]), bool(position["halting"])
        state.averages, state.validation = _floats(position["averages"]), _floats(position["validation"])
        data, handlers = dict(position["data"]), dict(position["handlers"])
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise CheckpointError(
            f"{state.checkpoint}: holds no position of a loop (saved with session.save?): "
            "restore it with session.restore, and run without resume"
        ) from exc
    differing = [
        f"  {key}: expected {data.get(key)}, got {state.data.get(key)}"
        for key in sorted(data.keys() | state.data.keys())
        if data.get(key) != state.data.get(key)
    ]
    if differing:
        lines = ["the data is not that of the checkpoint, so the run would not be the same:", *differing]
        raise DataError("\n".join([*lines, f"Resume {state.checkpoint} with the data that the run began with."]))
    return handlers


def _texts(values: Mapping[str, float]) -> dict[str, str]:
    # Numbers as text, since JSON holds neither NaN nor infinity.
    return {name: float(value).hex() for name, value in values.items()}


def _floats(texts: Mapping[str, str]) -> dict[str, float]:
    return {name: float.fromhex(text) for name, text in texts.items()}
