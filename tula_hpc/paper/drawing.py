"""Pictures of results: panels of curves, side by side, as PNG and PDF."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tula_hpc.plot_style import NODE_COLOURS, NODE_MARKERS, STYLE, batch_ticks, duration_ticks, number_ticks
from tula_hpc.runs import replacing

PANELS_A_ROW = 4
PANEL_IN = (3.4, 3.0)


@dataclass(frozen=True)
class Series:
    """One curve, or bars at places that the panel names."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    kind: Literal["line", "points", "broken", "bars"] = "line"
    colour: int = 0
    """Which of the colours; what is compared across panels has the same one."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    x_scale: Literal["linear", "batch", "log"] = "linear"
    """`batch`: logarithmic, base 2, with ticks at the batches."""
    y_scale: Literal["linear", "seconds", "log"] = "linear"
    x_names: Sequence[str] = ()
    """Of places 0, 1, 2 ... for bars."""
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines and their words."""


def to_record(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """The panels as plain values with four digits, for a JSON file; what is unknown becomes null."""

    def number(value: float) -> float | None:
        return float(f"{value:.4g}") if math.isfinite(value) else None

    return [
        asdict(panel)
        | {"series": [asdict(s) | {axis: [number(v) for v in getattr(s, axis)] for axis in "xy"} for s in panel.series]}
        for panel in panels
    ]


def from_record(record: Sequence[dict[str, Any]]) -> list[Panel]:
    """What `to_record` gave."""

    def values(numbers: Sequence[float | None]) -> list[float]:
        return [math.nan if number is None else number for number in numbers]

    return [
        Panel(**panel | {"series": [Series(**s | {axis: values(s[axis]) for axis in "xy"}) for s in panel["series"]]})
        for panel in record
    ]


def draw(panels: Sequence[Panel], figure: Figure) -> None:
    """Draw the panels side by side on an empty figure, which gets the size that they need."""
    rows = math.ceil(len(panels) / PANELS_A_ROW)
    columns = math.ceil(len(panels) / rows)
    with matplotlib.rc_context(STYLE):
        figure.set_size_inches(PANEL_IN[0] * columns, PANEL_IN[1] * rows)
        figure.set_layout_engine("constrained")
        grid = np.atleast_1d(figure.subplots(rows, columns)).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            _draw(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()


def save(panels: Sequence[Panel], picture: Path) -> None:
    """Write the panels as `picture`.png and .pdf; the same panels give the same bytes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        draw(panels, figure)
        for ending, options in (("png", {"dpi": 160}), ("pdf", {"metadata": {"CreationDate": None}})):
            content = io.BytesIO()
            figure.savefig(content, format=ending, **options)  # type: ignore[arg-type]
            with replacing(picture.with_name(f"{picture.name}.{ending}")) as file:
                file.write(content.getvalue())


def _draw(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    bars = [series for series in panel.series if series.kind == "bars"]
    for series in panel.series:
        colour = NODE_COLOURS[series.colour % len(NODE_COLOURS)]
        marker = NODE_MARKERS[series.colour % len(NODE_MARKERS)]
        if series.kind == "bars":
            width = 0.8 / len(bars)
            left = np.asarray(series.x, dtype=float) - 0.4 + width * (bars.index(series) + 0.5)
            axes.bar(left, series.y, width, color=colour, label=series.label)
        elif series.kind == "points":
            axes.plot(series.x, series.y, marker, color=colour, label=series.label)
        else:
            few = marker if len(series.x) <= 12 and series.kind == "line" else ""
            style = "-" if series.kind == "line" else (0, (3, 2))
            axes.plot(series.x, series.y, color=colour, marker=few, linestyle=style, label=series.label)
    if panel.x_scale == "batch":
        axes.set_xscale("log", base=2)
        batch_ticks(axes.xaxis, [x for series in panel.series for x in series.x], at_most=6)
    if panel.x_label == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.x_scale == "log":
        axes.set_xscale("log")
        number_ticks(axes.xaxis, at_most=6)
    if panel.y_scale != "linear":
        axes.set_yscale("log")
        (duration_ticks if panel.y_scale == "seconds" else number_ticks)(axes.yaxis, at_most=6)
    if panel.x_names:
        axes.set_xticks(range(len(panel.x_names)), panel.x_names, fontsize=8)
    for place, words in panel.marks:
        axes.axvline(place, color="#667280", linewidth=0.9, linestyle=(0, (1, 2)))
        axes.annotate(words, (place, 1.0), (2, -9), xycoords=("data", "axes fraction"), textcoords="offset points",
                      fontsize=7)  # fmt: skip
    if any(series.label for series in panel.series):
        axes.legend(fontsize=7, loc="best", frameon=True, framealpha=0.75, edgecolor="none")
