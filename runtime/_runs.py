"""The curves in the metrics files of runs."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fixstep.runtime._monitor import VALIDATION
from fixstep.targets.errors import DataError

_FIXED = ("event", "epoch", "step")
_KINDS = {"epoch": "epoch", "step": "step", "validation": "epoch"}


@dataclasses.dataclass(frozen=True)
class Curve:
    """One metric of one run.

    Attributes:
        metric: its name, without `validation/`.
        kind: `epoch`, averages over epochs; `step`, single steps; or `validation`.
        steps: where its points are, in steps.
        values: what they are; NaN where it was not finite.
    """

    metric: str
    kind: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def metrics_file(run: Path) -> Path:
    """The metrics file of a run: the file itself, or the one in its folder.

    Raises:
        DataError: if there is none, or several and none is called `metrics`.
    """
    if not run.exists():
        raise DataError(f"{run}: no such file or folder")
    if not run.is_dir():
        return run
    found = sorted(path for path in run.iterdir() if path.suffix in (".csv", ".jsonl"))
    chosen = [path for path in found if path.stem == "metrics"] or found
    if len(chosen) != 1:
        names = ", ".join(path.name for path in chosen) or "none"
        raise DataError(f"{run}: expected one metrics file (.csv or .jsonl), as `fixstep run` writes it, got {names}")
    return chosen[0]


def read_curves(path: Path) -> list[Curve]:
    """The curves of a metrics file, in the order of its columns.

    Raises:
        DataError: if it is none, or has no row.
    """
    points: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    for number, row in _rows(path):
        try:
            event, step = row["event"], int(row["step"])
            for name, value in row.items():
                if name in _FIXED or value == "":
                    continue
                kind = "validation" if name.startswith(VALIDATION) else _KINDS[event]
                steps, values = points.setdefault((name.removeprefix(VALIDATION), kind), ([], []))
                steps.append(step)
                number_ = math.nan if value is None else float(value)
                values.append(number_ if math.isfinite(number_) else math.nan)
        except (KeyError, TypeError, ValueError) as exc:
            raise DataError(f"{path}, line {number}: not a row of a metrics file") from exc
    if not points:
        raise DataError(f"{path}: no row yet")
    return [Curve(metric, kind, tuple(s), tuple(v)) for (metric, kind), (s, v) in points.items()]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows with their line numbers; what a killed run left of a last row is no row."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"{path}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    lines = text.split("\n")[:-1]
    if path.suffix == ".jsonl":
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as exc:
                raise DataError(f"{path}, line {number}: not a row of a metrics file") from exc
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: not a row of a metrics file")
            yield number, row
        return
    if lines and next(csv.reader(lines))[:3] != list(_FIXED):
        raise DataError(f"{path}: not a metrics file: expected the columns {', '.join(_FIXED)} first")
    yield from enumerate(csv.DictReader(lines), start=2)
