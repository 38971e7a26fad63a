"""The command plot: the curves of runs, drawn with matplotlib."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fixstep.runtime._cli import DONE, Run
from fixstep.runtime._files import explain_os_error, write_atomically
from fixstep.runtime._runs import Curve, metrics_file, read_curves
from fixstep.targets.errors import DataError

# Told apart by most kinds of colour vision, and in print (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
_FORMATS = (".png", ".svg")
_LINES: dict[str, dict[str, Any]] = {
    "step": {"linewidth": 0.8, "alpha": 0.35},
    "epoch": {"linewidth": 1.6, "marker": "o", "markersize": 3.5},
    "validation": {"linewidth": 1.6, "linestyle": (0, (4, 2)), "marker": "s", "markersize": 3.5},
}
_TOLD = {"step": "each step", "epoch": "epoch average", "validation": "validation"}


def plot_command(parser: argparse.ArgumentParser) -> Run:
    """Draw the loss and metric curves of runs, one panel a metric, several runs in one panel.

    A run is the folder that `fixstep run --checkpoint-dir` made, or a metrics file (.csv, .jsonl).
    """
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or its metrics file")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="a .png or .svg file")
    parser.add_argument("--metric", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--log-scale", action="append", default=[], metavar="NAME", help="a metric on a log scale")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    return _plot


def _plot(arguments: argparse.Namespace) -> int:
    if arguments.output.suffix not in _FORMATS:
        raise DataError(f"{arguments.output}: expected a file that ends in {' or '.join(_FORMATS)}")
    runs = {name: read_curves(metrics_file(run)) for name, run in _names(arguments.runs).items()}
    metrics = list(dict.fromkeys(curve.metric for curves in runs.values() for curve in curves))
    metrics.sort(key=lambda name: name != "loss")  # the loss first, the others as they come
    wanted = arguments.metric or metrics
    absent = [name for name in [*wanted, *arguments.log_scale] if name not in metrics]
    if absent:
        raise DataError(f"no metric {', '.join(map(repr, absent))} in these runs; there are {', '.join(metrics)}")
    draw(runs, wanted, arguments.output, log_scale=arguments.log_scale)
    if not arguments.quiet:
        print(f"wrote {arguments.output}: {', '.join(wanted)} of {', '.join(runs)}")
    return DONE


def _names(runs: Sequence[Path]) -> dict[str, Path]:
    """The runs by the shortest ends of their paths that tell them apart."""
    resolved = list(dict.fromkeys(run.resolve() for run in runs))
    for parts in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-parts:]) for path in resolved]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, resolved, strict=True))


def draw(
    runs: Mapping[str, Sequence[Curve]], metrics: Sequence[str], path: Path, *, log_scale: Sequence[str] = ()
) -> None:
    """Draw curves, a panel for each metric, a colour for each run, a kind of line for each kind of curve.

    Args:
        runs: the curves of each run, by its name.
        metrics: the metrics to draw, in this order.
        path: a `.png` or `.svg` file, written whole or not at all.
        log_scale: the metrics whose axis is logarithmic.

    Raises:
        DataError: if matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as exc:
        raise DataError(f"drawing needs matplotlib ({exc}): install it with pip install 'fixstep[plot]'") from exc
    columns = 2 if len(metrics) == 4 else min(len(metrics), 3)
    rows = math.ceil(len(metrics) / columns)
    # Ids of an SVG come from this salt and no date is written, so that the same runs give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "fixstep", "font.size": 9.5, "axes.titlesize": 11}):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)  # in inches
        figure = Figure(figsize=(max(4.6 * columns, 6.4), 3.3 * rows + 1.0), layout=layout)
        axes = figure.subplots(rows, columns, squeeze=False)
        for index, axis in enumerate(axes.flat):
            if index < len(metrics):
                _panel(axis, metrics[index], runs, metrics[index] in log_scale)
            else:
                axis.set_axis_off()
        _legends(figure, runs, metrics)
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        try:
            write_atomically(
                path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=160, metadata=metadata)
            )
        except OSError as exc:
            raise DataError(explain_os_error("write", path, exc)) from exc


def _panel(axis: Any, metric: str, runs: Mapping[str, Sequence[Curve]], log_scale: bool) -> None:
    for colour, curves in zip(_colours(len(runs)), runs.values(), strict=True):
        for curve in curves:
            if curve.metric == metric:
                style = dict(_LINES[curve.kind])
                if len(curve.steps) > 25:
                    style.pop("marker", None)
                axis.plot(curve.steps, curve.values, color=colour, zorder=1 if curve.kind == "step" else 2, **style)
    axis.set_title(metric, loc="left", fontweight="bold")
    axis.set_xlabel("step")
    if log_scale:
        axis.set_yscale("log")
    axis.margins(x=0.02)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#888888")


def _legends(figure: Any, runs: Mapping[str, Sequence[Curve]], metrics: Sequence[str]) -> None:
    """For all panels together: the runs by colour above them, the kinds of lines that are drawn below."""
    from matplotlib.lines import Line2D

    kinds = {curve.kind for curves in runs.values() for curve in curves if curve.metric in metrics}
    coloured = [
        Line2D([], [], color=colour, linewidth=3, label=name)
        for colour, name in zip(_colours(len(runs)), runs, strict=True)
    ]
    styled = [
        Line2D([], [], color="#555555", label=_TOLD[kind], **_LINES[kind])
        for kind in ("step", "epoch", "validation")
        if kind in kinds
    ]
    for entries, place in ((coloured, "outside upper center"), (styled, "outside lower center")):
        widest = 0.75 + 0.08 * max(len(str(entry.get_label())) for entry in entries)  # in inches: the line, the text
        fitting = max(int(figure.get_figwidth() / widest), 1)
        figure.legend(handles=entries, loc=place, ncols=min(len(entries), fitting), frameon=False)


def _colours(count: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]
