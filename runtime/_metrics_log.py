"""A file of metrics, a row an epoch, that survives being killed and being resumed."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fixstep.runtime._events import LoopState
from fixstep.runtime._monitor import VALIDATION, metric_names
from fixstep.runtime._progress import step_values
from fixstep.targets.errors import DataError

_FIXED = ("event", "epoch", "step")


class MetricsLog:
    """Writes metrics to a CSV file (`.csv`) or a file with one JSON object a line (`.jsonl`).

    A row has `event` (`epoch`, with averages and validation, `step`, with the metrics of one step, or `validation`, for
    one inside an epoch), `epoch`, `step` (steps since the state was made), each metric by its name, validation as
    `validation/<name>`, and what other handlers offer (see `Handler`). What is not finite is `nan` or `inf` in CSV and
    null in JSON, which has no such numbers.

    Each row is one write of a whole line. A resumed run drops the rows that lie after its checkpoint and goes on, so
    that the file ends as if the run had not stopped.

    Args:
        path: the file.
        every: steps between rows inside an epoch (each reads the metrics, which waits for the device); none by default.

    Raises:
        DataError: if the suffix is neither .csv nor .jsonl.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int | None = None) -> None:
        self.path = Path(path)
        if self.path.suffix not in (".csv", ".jsonl"):
            raise DataError(f"{self.path}: expected a metrics file that ends in .csv or .jsonl")
        if every is not None and every < 1:
            raise ValueError(f"every: expected at least 1 step, got {every}")
        self._every = every
        self._columns: list[str] = []

    def on_started(self, state: LoopState) -> None:
        """Refuses a file that cannot be written or is another run's; drops the rows that a resumed run writes again.

        Raises:
            DataError: if the file exists and the run does not resume, or it is not a file of these metrics.
        """
        self._columns = [*_FIXED, *metric_names(state), *state.values]
        if not self.path.parent.is_dir() or not os.access(self.path.parent, os.W_OK):
            raise DataError(f"{self.path}: no folder to write to: make {self.path.parent}, or choose another")
        if not self.path.exists():
            return
        if not state.resume:
            raise DataError(
                f"{self.path} already exists: continue that run with resume=True (--resume), or choose another file"
            )
        self._drop_rows_after(state)

    def on_iteration_completed(self, state: LoopState) -> None:
        """Writes a row every N steps."""
        if self._every is not None and state.steps % self._every == 0 and state.metrics is not None:
            self._write("step", state, step_values(state))

    def on_validated(self, state: LoopState) -> None:
        """Writes the row of a validation inside an epoch."""
        if not state.trained:
            self._write("validation", state, _validation(state))

    def on_epoch_completed(self, state: LoopState) -> None:
        """Writes the epoch's row."""
        self._write_epoch(state)

    def on_epoch_halted(self, state: LoopState) -> None:
        """Writes the row of an epoch that a handler ended."""
        self._write_epoch(state)

    def _write_epoch(self, state: LoopState) -> None:
        validation = _validation(state) if state.validated_at == state.steps else {}
        offered = {name: read() for name, read in state.values.items()}
        self._write("epoch", state, {**state.averages, **validation, **offered})

    def _write(self, event: str, state: LoopState, values: Mapping[str, float]) -> None:
        row = {"event": event, "epoch": state.epoch, "step": state.steps, **values}
        text = self._csv([row.get(name, "") for name in self._columns]) if self._is_csv else _json(row)
        with self.path.open("ab", buffering=0) as file:
            if self._is_csv and file.tell() == 0:
                text = self._csv(self._columns) + text
            file.write(text.encode())

    @property
    def _is_csv(self) -> bool:
        return self.path.suffix == ".csv"

    def _csv(self, fields: list[Any]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(fields)
        return text.getvalue()

    def _drop_rows_after(self, state: LoopState) -> None:
        lines = self.path.read_bytes().split(b"\n")
        lines.pop()  # what follows the last newline: nothing, or the start of a row that was never finished
        kept: list[bytes] = []
        for number, line in enumerate(lines, start=1):
            if number == 1 and self._is_csv:
                if line.decode(errors="replace") != self._csv(self._columns).rstrip("\n"):
                    raise DataError(
                        f"{self.path}: expected the columns {','.join(self._columns)}, "
                        f"got {line.decode(errors='replace')}: choose another file"
                    )
                kept.append(line)
            elif self._is_before(line, number, state):
                kept.append(line)
        temporary = self.path.with_name(f".{self.path.name}.partial")
        temporary.write_bytes(b"".join(line + b"\n" for line in kept))
        os.replace(temporary, self.path)

    def _is_before(self, line: bytes, number: int, state: LoopState) -> bool:
        try:
            if self._is_csv:
                event, epoch, step = next(csv.reader([line.decode()]))[:3]
            else:
                row = json.loads(line)
                event, epoch, step = row["event"], row["epoch"], row["step"]
            return int(epoch) < state.epoch if event == "epoch" else int(step) <= state.steps
        except (ValueError, KeyError, TypeError, StopIteration) as exc:
            raise DataError(f"{self.path}, line {number}: not a row of a metrics file: choose another file") from exc


def _validation(state: LoopState) -> dict[str, float]:
    return {f"{VALIDATION}{name}": value for name, value in state.validation.items()}


def _json(row: Mapping[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    return json.dumps(finite) + "\n"
