"""Handlers that show where a run is: a progress bar, and lines."""

from __future__ import annotations

import math
import shutil
import sys
import time
from typing import Any, TextIO

from fixstep.runtime._events import LoopState

# A bar is redrawn this often at most: each time, the metrics are read, which waits for the device.
_REDRAW_S = 0.25


class Progress:
    """Shows where the run is: a bar with steps per second and the metrics, and a line for each epoch.

    Args:
        bar: whether there is a bar, on stderr or in the notebook; by default if stderr is a terminal, and in a
            notebook. Its metrics are those of the last step, read a few times a second.
        lines: whether each epoch leaves a line with its averages and validation; by default if there is a bar.
        stream: where the lines go; stdout by default.
    """

    def __init__(self, *, bar: bool | None = None, lines: bool | None = None, stream: TextIO | None = None) -> None:
        self._with_bar = (sys.stderr.isatty() or _in_notebook()) if bar is None else bar
        self._with_lines = self._with_bar if lines is None else lines
        self._stream = stream
        self._bar: Any = None
        self._drawn_s = -math.inf

    def on_started(self, state: LoopState) -> None:
        """Says what is left out."""
        for count, what in ((state.left_out, "training"), (state.validation_left_out, "validation")):
            if count:
                examples = "example does" if count == 1 else "examples do"
                self._line(f"{what}: {count} {examples} not fill a batch and are left out of each epoch")

    def on_iteration_completed(self, state: LoopState) -> None:
        """Moves the bar."""
        if not self._with_bar:
            return
        if self._bar is None:
            self._open_bar(state)
        now = time.monotonic()
        if now - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now
            self._draw(state)

    def on_epoch_completed(self, state: LoopState) -> None:
        """Closes the epoch's bar and leaves its line."""
        self._close_bar()
        self._line("  ".join([*_epoch_parts(state), f"({state.steps_per_second:.4g} steps/s)"]))

    def on_epoch_halted(self, state: LoopState) -> None:
        """The same for an epoch that a handler ended."""
        self._close_bar()
        self._line("  ".join([*_epoch_parts(state), f"halted after {state.batch} batches"]))

    def on_stopped(self, state: LoopState) -> None:
        """Leaves the bar as it is, and says how many batches were skipped."""
        self._close_bar()
        if state.skipped:
            self._line(f"batches skipped, because the watched metric was not finite: {state.skipped}")

    def _open_bar(self, state: LoopState) -> None:
        from tqdm.auto import tqdm  # here, because only a terminal or a notebook needs it

        size = shutil.get_terminal_size()  # 80 by 24 where a terminal does not know; tqdm would draw nothing there
        # A notebook's bar is a widget, which has no width in characters.
        options: dict[str, Any] = {} if _in_notebook() else {"ncols": size.columns, "nrows": size.lines}
        self._bar = tqdm(
            desc=f"epoch {state.epoch}/{state.epochs}",
            total=state.batches_per_epoch,
            initial=state.batch,
            unit="step",
            leave=False,
            file=sys.stderr,
            **options,
        )

    def _draw(self, state: LoopState) -> None:
        self._bar.set_postfix_str("  ".join(shown(step_values(state))), refresh=False)
        self._bar.n = state.batch  # update() would leave the drawing to a second clock
        self._bar.refresh()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, text: str) -> None:
        if self._with_lines:
            _print(text, self._stream or sys.stdout)


class LogLines:
    """Prints a line every N steps: epoch, step, the step's metrics, and what other handlers offer.

    Args:
        every: steps between lines (each reads the metrics, which waits for the device).
        stream: where they go; stdout by default.

    Raises:
        ValueError: if `every` is below 1.
    """

    def __init__(self, *, every: int = 100, stream: TextIO | None = None) -> None:
        if every < 1:
            raise ValueError(f"every: expected at least 1 step, got {every}")
        self._every = every
        self._stream = stream

    def on_iteration_completed(self, state: LoopState) -> None:
        """Prints the line."""
        if state.steps % self._every == 0:
            parts = [f"epoch {state.epoch}/{state.epochs}", f"step {state.steps}", *shown(step_values(state))]
            _print("  ".join(parts), self._stream or sys.stdout)


def step_values(state: LoopState) -> dict[str, float]:
    """The last step's metrics that are one number, and what handlers offer; waits for the device."""
    metrics = {name: metric.numpy() for name, metric in (state.metrics or {}).items()}
    scalars = {name: float(value) for name, value in metrics.items() if value.ndim == 0}
    return scalars | {name: read() for name, read in state.values.items()}


def shown(values: dict[str, float]) -> list[str]:
    """Metrics as lines show them: `loss 0.1234`."""
    return [f"{name} {value:.4g}" for name, value in values.items()]


def _epoch_parts(state: LoopState) -> list[str]:
    offered = {name: read() for name, read in state.values.items()}
    parts = [f"epoch {state.epoch}/{state.epochs}", f"step {state.steps}", *shown(state.averages | offered)]
    if state.validated_at == state.steps and state.validation:
        parts.append(f"validation: {'  '.join(shown(state.validation))}")
    return parts


def _print(text: str, stream: TextIO) -> None:
    """Print a line; above the bar, if one is shown."""
    bars = sys.modules.get("tqdm.auto")
    if bars is None:
        print(text, file=stream, flush=True)
    else:
        bars.tqdm.write(text, file=stream)
        stream.flush()


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules
