"""Metrics for TensorBoard, through tensorboardX, which is an extra of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fixstep.runtime._events import LoopState
from fixstep.runtime._progress import step_values
from fixstep.targets.errors import DataError


class TensorBoardLog:
    """Writes metrics where TensorBoard finds them: `train/<name>`, `validation/<name>`, and what handlers offer.

    A resumed run writes a new file in the same folder, which hides what the old one says of later steps.

    Args:
        folder: the run's folder, which is made.
        every: steps between points inside an epoch (each reads the metrics, which waits for the device); none by
            default, then there is a point an epoch.

    Raises:
        ValueError: if `every` is below 1.
        DataError: if tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every: expected at least 1 step, got {every}")
        try:
            import tensorboardX
        except ImportError as exc:
            raise DataError(
                f"a log for TensorBoard needs tensorboardX ({exc}): install it with pip install 'fixstep[tensorboard]'"
            ) from exc
        self._make = tensorboardX.SummaryWriter
        self._folder = Path(folder)
        self._every = every
        self._writer: Any = None

    def on_started(self, state: LoopState) -> None:
        """Opens the file."""
        try:
            self._writer = self._make(str(self._folder), purge_step=state.steps + 1 if state.resume else None)
        except OSError as exc:
            raise DataError(f"{self._folder}: no log for TensorBoard can be written: {exc.strerror}") from exc

    def on_iteration_completed(self, state: LoopState) -> None:
        """Writes a step's metrics every N steps."""
        if self._every is not None and state.steps % self._every == 0:
            self._write("train", step_values(state), state)

    def on_validated(self, state: LoopState) -> None:
        """Writes a validation."""
        self._write("validation", state.validation, state)

    def on_epoch_completed(self, state: LoopState) -> None:
        """Writes an epoch's averages."""
        offered = {name: read() for name, read in state.values.items()}
        self._write("epoch", {**state.averages, **offered}, state)
        self._writer.flush()

    def on_stopped(self, state: LoopState) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, group: str, values: dict[str, float], state: LoopState) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, state.steps)
