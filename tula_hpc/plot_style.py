"""How every plot of the report looks: colours, sizes, ticks that people read, and the file formats.

A number of nodes has one colour and one marker in every plot.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

INK, MUTED, RULE, PAPER = "#1f2a37", "#667280", "#d8dee4", "#ffffff"
WARNING = "#c43c2f"
# Okabe and Ito's colours, which the common kinds of colour blindness keep apart; red is kept for limits. There is one
# marker more than colours: the eighth number of nodes has the first colour again, but another marker.
NODE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d31", "#7f7f7f")
NODE_MARKERS = "osD^vPXp"
STEP_PARTS = {
    "data_s": ("data", "#b9c2cb"),
    "forward_s": ("forward", "#8fb8de"),
    "backward_s": ("backward", "#3e6fa3"),
    "sync_s": ("exposed synchronisation", "#e08e5b"),
    "optimizer_s": ("optimiser", "#8a7fb5"),
}
MEMORY_COLOURS = {
    "param_gib": "#3e6fa3",
    "grad_gib": "#8fb8de",
    "bucket_gib": "#c3d7ec",
    "optimizer_gib": "#8a7fb5",
    "ags_gib": "#c2a5cf",
    "other_gib": "#b9c2cb",
    "outside_gib": "#b9c2cb",
    "loader_gib": "#e3cf9b",
    "reserve_gib": "#dde3e8",
    "batch_gib": "#e9c46a",
    "workspace_gib": "#d9a98c",
    "activation_gib": "#9ccfa4",
}
# What each colour becomes on a dark page; colours that are not here serve both.
_DARK = {
    INK: "#e4e9ee",
    MUTED: "#9aa7b4",
    RULE: "#39434e",
    PAPER: "#1b2129",
    WARNING: "#ff8a7a",
    "#0072b2": "#4f86e8",
    "#56b4e9": "#93d6fb",
    "#8c6d31": "#c2a45f",
    "#7f7f7f": "#a8a8a8",
    "#b9c2cb": "#5d6873",
    "#dde3e8": "#3f4954",
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the page looks the same from every cluster
    "font.size": 10.0,
    "axes.labelsize": 10.0,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "legend.fontsize": 9.0,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4,
    "text.color": INK,
    "text.parse_math": False,  # a price in dollars is not a formula
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": PAPER,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "tula_hpc",  # the same run gives the same bytes
}
WIDTH_IN = 5.6
"""Of a plot that a phone can show too: its letters must stay readable at two thirds of this."""

NodeStyles = dict[int, tuple[str, str]]
"""Number of nodes -> colour, marker."""


@dataclass(frozen=True)
class Plot:
    """One picture and its words."""

    name: str
    """File name without ending."""
    title: str
    caption: str
    """How to read it."""
    alt: str
    """What it shows, for those who do not see it."""
    svg: str
    """With colours that follow the reader's light or dark setting."""
    png: bytes
    svg_narrow: str | None = None
    """The same for a small screen, if `svg` is too wide for one."""


def node_styles(nodes: Iterable[int]) -> NodeStyles:
    """A colour and a marker for each number of nodes of the grid, measured or not, so that all plots agree."""
    colours, markers = itertools.cycle(NODE_COLOURS), itertools.cycle(NODE_MARKERS)
    return dict(zip(sorted(set(nodes)), zip(colours, markers, strict=False), strict=False))


def new_axes() -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    figure = Figure(figsize=(WIDTH_IN, 4.1), layout="constrained")
    return figure, figure.subplots()


def stacked_axes(panels: int) -> tuple[Figure, Sequence[Axes]]:
    """A figure with axes one below the other that share x."""
    figure = Figure(figsize=(WIDTH_IN, 4.6), layout="constrained")
    axes = list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
    figure.align_ylabels(axes)
    return figure, axes


def finish(figure: Figure, name: str, title: str, caption: str, alt: str, narrow: Figure | None = None) -> Plot:
    """The figure as SVG and PNG, with its words."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=160)
    return Plot(name, title, caption, alt, _svg(figure), png.getvalue(), _svg(narrow) if narrow else None)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _themed(text.getvalue())


def _themed(svg: str) -> str:
    """Colours as CSS variables that follow the reader's setting; an SVG shown as an image takes it from the page."""
    light = "".join(f"--c{colour[1:]}:{colour};" for colour in _DARK)
    dark = "".join(f"--c{colour[1:]}:{shade};" for colour, shade in _DARK.items())
    for colour in _DARK:
        svg = svg.replace(colour, f"var(--c{colour[1:]})")
    style = f"<style>:root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    return re.sub(r"(<svg\b[^>]*>)", lambda found: found[1] + style, svg, count=1)


def legend(axes: Axes, handles: Sequence[Any]) -> None:
    """A row of entries above the axes, where no curve can pass."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 5), handletextpad=0.5)


def node_handles(styles: NodeStyles, present: Iterable[int], line: bool = True) -> list[Line2D]:
    """Legend entries of the numbers of nodes that are present."""
    return [
        Line2D([], [], color=styles[n][0], marker=styles[n][1], linestyle="-" if line else "none",
               markeredgecolor=PAPER, markeredgewidth=0.7, label="1 node" if n == 1 else f"{n} nodes")
        for n in sorted(set(present))
    ]  # fmt: skip


def write_beside(
    axes: Axes, words: str, place: tuple[float, float], up_pt: float, to_the_right: bool, **look: Any
) -> None:
    """Words beside a vertical line at `place`: x in data, y from 0 to 1 over the axes."""
    look |= {"fontsize": 9, "ha": "left" if to_the_right else "right"}
    offset = (4 if to_the_right else -4, up_pt)
    axes.annotate(words, place, offset, xycoords=("data", "axes fraction"), textcoords="offset points", **look)


def batch_ticks(axis: Axis, batches: Iterable[float], at_most: int = 8) -> None:
    """Ticks at batches that exist, thinned to what fits."""
    values = sorted({int(batch) for batch in batches})
    stride = max(1, math.ceil(len(values) / at_most))
    _set_ticks(axis, values[::stride], [str(value) for value in values[::stride]])


_ROUND_SECONDS = [
    unit * step
    for unit, steps in (
        (1e-6, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
        (1e-3, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
        (1, (1, 2, 5, 10, 20, 30)),
        (60, (1, 2, 5, 10, 20, 30)),
        (3600, (1, 2, 4, 12)),
        (86400, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
    )
    for step in steps
]
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))


def duration_ticks(axis: Axis, at_most: int = 8) -> None:
    """Ticks of a logarithmic time axis at numbers people use: 30 s, 1 min, 2 min."""
    low, high = sorted(axis.get_view_interval())
    size, unit = _unit(high)
    evenly = [(f"{value:.3g} {unit}", size * value) for value in MaxNLocator(5).tick_values(low / size, high / size)]
    _set_some_ticks(axis, [(_round_duration(seconds), seconds) for seconds in _ROUND_SECONDS], evenly, at_most)


def number_ticks(axis: Axis, at_most: int = 8) -> None:
    """Ticks of a logarithmic axis at 1, 2, 5, 10."""
    low, high = sorted(axis.get_view_interval())
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    round_values = [m * 10.0**k for k in decades for m in (1, 2, 5)]
    ticks, evenly = (
        [(f"{value:,.6g}", float(value)) for value in values]
        for values in (round_values, MaxNLocator(5).tick_values(low, high))
    )
    _set_some_ticks(axis, ticks, evenly, at_most)


def _unit(seconds: float) -> tuple[float, str]:
    return next(((size, unit) for size, unit in _UNITS if seconds >= size * (1 - 1e-9)), _UNITS[-1])


def _round_duration(seconds: float) -> str:
    size, unit = _unit(seconds)
    return f"{seconds / size:.3g} {unit}"


def _set_some_ticks(axis: Axis, ticks: list[tuple[str, float]], evenly: list[tuple[str, float]], at_most: int) -> None:
    """Those ticks that lie on the axis, or the even ones where it spans too little for three; thinned to what fits."""
    low, high = axis.get_view_interval()
    shown = [(label, value) for label, value in ticks if low <= value <= high]
    if len(shown) < 3:
        shown = [(label, value) for label, value in evenly if low <= value <= high]
    shown = shown[:: math.ceil(len(shown) / at_most) or 1]
    _set_ticks(axis, [value for _, value in shown], [label for label, _ in shown])


def _set_ticks(axis: Axis, values: Sequence[float], labels: Sequence[str]) -> None:
    axis.set_ticks(values, labels=labels)
    axis.set_minor_locator(NullLocator())
