"""The handlers that most runs want: a progress bar, checkpoints, and (from its own file) a log of metrics."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from fixstep.runtime._checkpoint import CheckpointDirectory, Latest
from fixstep.runtime._events import LoopState
from fixstep.runtime._metrics_log import MetricsLog

__all__ = ["Checkpoints", "MetricsLog", "Progress", "shown"]
from fixstep.targets.errors import CheckpointError

# A bar is redrawn this often at most: each time, the metrics are read, which waits for the device.
_REDRAW_S = 0.25


class Progress:
    """Shows where the run is: a bar with steps per second and the metrics, and a line for each epoch.

    Args:
        bar: whether there is a bar, on stderr; by default if stderr is a terminal. Its metrics are those of the last
            step, read a few times a second.
        lines: whether each epoch leaves a line with its averages and validation; by default if there is a bar.
        stream: where the lines go; stdout by default.
    """

    def __init__(self, *, bar: bool | None = None, lines: bool | None = None, stream: TextIO | None = None) -> None:
        self._with_bar = sys.stderr.isatty() if bar is None else bar
        self._with_lines = self._with_bar if lines is None else lines
        self._stream = stream
        self._bar: Any = None
        self._drawn_s = -math.inf

    def on_start(self, state: LoopState) -> None:
        """Says what is left out."""
        for count, what in ((state.left_out, "training"), (state.validation_left_out, "validation")):
            if count:
                examples = "example does" if count == 1 else "examples do"
                self._line(f"{what}: {count} {examples} not fill a batch and are left out of each epoch")

    def on_step(self, state: LoopState) -> None:
        """Moves the bar."""
        if not self._with_bar:
            return
        if self._bar is None:
            self._open_bar(state)
        now = time.monotonic()
        if now - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now
            self._draw(state)

    def on_epoch(self, state: LoopState) -> None:
        """Closes the epoch's bar and leaves its line."""
        self._close_bar()
        parts = [f"epoch {state.epoch}/{state.epochs}", f"step {state.steps}", *shown(state.averages)]
        if state.validation:
            parts.append(f"validation: {'  '.join(shown(state.validation))}")
        self._line("  ".join([*parts, f"({state.steps_per_second:.4g} steps/s)"]))

    def on_stop(self, state: LoopState) -> None:
        """Leaves the bar as it is, and says how many batches were skipped."""
        self._close_bar()
        if state.skipped:
            self._line(f"batches skipped, because the watched metric was not finite: {state.skipped}")

    def _open_bar(self, state: LoopState) -> None:
        import tqdm  # here, because only a terminal needs it

        size = shutil.get_terminal_size()  # 80 by 24 where a terminal does not know; tqdm would draw nothing there
        self._bar = tqdm.tqdm(
            desc=f"epoch {state.epoch}/{state.epochs}",
            total=state.batches_per_epoch,
            initial=state.batch,
            unit="step",
            leave=False,
            ncols=size.columns,
            nrows=size.lines,
            file=sys.stderr,
        )

    def _draw(self, state: LoopState) -> None:
        metrics = {name: metric.numpy() for name, metric in (state.metrics or {}).items()}
        scalars = {name: float(value) for name, value in metrics.items() if value.ndim == 0}
        self._bar.set_postfix_str("  ".join(shown(scalars)), refresh=False)
        self._bar.n = state.batch  # update() would leave the drawing to a second clock
        self._bar.refresh()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, text: str) -> None:
        if self._with_lines:
            print(text, file=self._stream or sys.stdout, flush=True)


def shown(values: dict[str, float]) -> list[str]:
    """Metrics as lines show them: `loss 0.1234`."""
    return [f"{name} {value:.4g}" for name, value in values.items()]


class Checkpoints:
    """Saves the session and the loop's position: after every N steps, at each epoch's end, and when the run stops.

    A new checkpoint is on the disk before an old one is removed. The loop calls this handler last.

    Args:
        directory: the folder, which is made if need be.
        every: steps between checkpoints inside an epoch; none by default.
        keep: how many of the newest stay.
    """

    def __init__(self, directory: str | os.PathLike[str], *, every: int | None = None, keep: int = 3) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every: expected at least 1 step, got {every}")
        if keep < 1:
            raise ValueError(f"keep: expected at least 1 checkpoint, got {keep}")
        self.directory = Path(directory)
        self._files = CheckpointDirectory(directory)
        self._every = every
        self._keep = keep
        self._saved: tuple[int, dict[str, Any]] | None = None

    def latest(self) -> Latest:
        """The newest whole checkpoint in the folder, and what was passed over because it is damaged."""
        return self._files.latest()

    def on_start(self, state: LoopState) -> None:
        """Makes the folder; refuses one that holds another run's checkpoints.

        Raises:
            CheckpointError: if there are checkpoints and the run does not resume, or the folder cannot be made.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise CheckpointError(f"{self.directory}: cannot be made a folder of checkpoints: {exc.strerror}") from exc
        files = [] if state.resume else self._files.files()
        if files:
            raise CheckpointError(
                f"{self.directory} already holds checkpoints, the newest {files[0].name}: "
                "continue that run with resume=True (--resume), or choose another folder"
            )
        self._saved = (state.steps, state.position)

    def on_step(self, state: LoopState) -> None:
        """Saves after every N steps."""
        if self._every is not None and state.steps % self._every == 0:
            self._save(state)

    def on_epoch(self, state: LoopState) -> None:
        """Saves at an epoch's end."""
        self._save(state)

    def on_stop(self, state: LoopState) -> None:
        """Saves what is not saved yet."""
        self._save(state)

    def _save(self, state: LoopState) -> None:
        now = (state.steps, state.position)
        if now == self._saved:
            return
        state.checkpoint = self._files.save(state.steps, lambda path: state.session.save(path, position=state.position))
        self._saved = now
        self._files.prune(self._keep)
