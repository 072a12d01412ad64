"""The plots of the report: each takes what a stage stored and returns a picture with the words that belong to it.

Only the report imports this module, and only when it is written: matplotlib takes a second to load. Curves between
measurements are the stored fits' own predictions. A number of nodes has one colour and one marker in every plot.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tula_hpc.config import MethodKind, Settings
from tula_hpc.display import duration
from tula_hpc.models.memory import MemoryFit
from tula_hpc.models.step_time import StepTimeFit

INK, MUTED, RULE, PAPER = "#1f2a37", "#667280", "#d8dee4", "#ffffff"
WARNING = "#c43c2f"
# Okabe and Ito's colours, which the common kinds of colour blindness keep apart; red is kept for limits.
NODE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d31", "#7f7f7f")
NODE_MARKERS = "osD^vPX"
STEP_PARTS = {
    "data_s": ("data", "#b9c2cb"),
    "forward_s": ("forward", "#8fb8de"),
    "backward_s": ("backward", "#3e6fa3"),
    "sync_s": ("exposed synchronisation", "#e08e5b"),
    "optimizer_s": ("optimiser", "#8a7fb5"),
}
MEMORY_PARTS = {
    "param_gib": ("parameters", "#3e6fa4"),
    "grad_gib": ("gradients", "#8fb8df"),
    "optimizer_gib": ("optimiser state", "#8a7fb6"),
    "other_gib": ("process, libraries and cache", "#b9c2cc"),
    "batch_gib": ("batch", "#e9c46a"),
    "activation_gib": ("activations", "#9ccfa4"),
}
# What each colour becomes on a dark page; colours that are not here serve both.
_DARK = {
    INK: "#e4e9ee",
    MUTED: "#9aa7b4",
    RULE: "#39434e",
    PAPER: "#1b2129",
    WARNING: "#ff8a7a",
    "#0072b2": "#4da8e0",
    "#8c6d31": "#c2a45f",
    "#7f7f7f": "#a8a8a8",
    "#b9c2cb": "#5d6873",
    "#b9c2cc": "#5d6873",
}
_STYLE = {
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
_WIDTH_IN = 5.6
_NEEDED = {
    "epoch_time": ("selection",),
    "cost": ("selection",),
    "step_time": ("fit",),
    "memory": ("fit",),
    "step_parts": ("fit",),
}


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


def draw(
    settings: Settings,
    fit: dict[str, Any] | None,
    selection: dict[str, Any] | None,
    metrics: list[dict[str, Any]],
) -> list[Plot]:
    """Every plot that the given records allow, in the order of the report."""
    nodes = sorted({c.num_nodes for c in settings.grid_candidates()})
    styles = {n: (NODE_COLOURS[i % 7], NODE_MARKERS[i % 7]) for i, n in enumerate(nodes)}
    plots = []
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        if selection is not None:
            plots += [_epoch_time(selection, settings, styles), _cost(selection, settings, styles)]
        if fit is not None:
            plots += [_step_time(fit, styles), _memory(fit, selection, styles), _step_parts(fit)]
        if metrics:
            plots.append(_training(metrics, settings))
        if metrics and settings.method.kind is MethodKind.ags:
            plots.append(_scaling(metrics, settings))
    return plots


# --- choosing ---------------------------------------------------------------------------------------------------------

_READ_CURVES = (
    "Lines are predictions, the band is their 90 % interval, filled marks are measurements. Broken lines and crosses: "
    "configurations that cannot run or are unknown."
)


def _epoch_time(selection: dict[str, Any], settings: Settings, styles: dict[int, tuple[str, str]]) -> Plot:
    figure, axes = _new()
    _against_global_batch(axes, selection, "epoch_time_s", styles)
    axes.set_ylabel("time of an epoch")
    _duration_ticks(axes.yaxis)
    return _finish(
        figure,
        "epoch_time",
        "Time of an epoch",
        _READ_CURVES,
        f"Epoch time against global batch, one line per number of nodes; {_marked(selection)}.",
    )


def _cost(selection: dict[str, Any], settings: Settings, styles: dict[int, tuple[str, str]]) -> Plot:
    figure, axes = _new()
    _against_global_batch(axes, selection, "cost", styles)
    axes.set_ylabel(f"cost of {settings.training.epochs} epochs ({selection['currency']})")
    _number_ticks(axes.yaxis)
    return _finish(
        figure,
        "cost",
        "Cost of the training",
        f"At {selection['currency']} {selection['price']}. Filled marks are the cost at the measured step time.",
        f"Cost of the training against global batch, one line per number of nodes; {_marked(selection)}.",
    )


def _marked(selection: dict[str, Any]) -> str:
    nodes = "1 node" if selection["num_nodes"] == 1 else f"{selection['num_nodes']} nodes"
    return (
        f"chosen are {nodes} with a global batch of {selection['global_batch']}, the knee is at "
        f"{selection['knee']['global_batch']}"
    )


def _against_global_batch(
    axes: Axes, selection: dict[str, Any], column: str, styles: dict[int, tuple[str, str]]
) -> None:
    table = pd.DataFrame(selection["candidates"])
    table[column] = table[column].astype(float)
    # Time and cost are both proportional to the step time, so its interval and its measurement carry over.
    per_step = table[column] / table["step_time_s"].astype(float)
    table["measured"] = per_step * table["measured_step_time_s"].astype(float)
    for end in ("low", "high"):
        table[end] = per_step * table[f"step_time_{end}_s"].astype(float)
    for num_nodes, rows in table.groupby("num_nodes"):
        colour, marker = styles[int(str(num_nodes))]
        rows = rows.sort_values("global_batch")
        batch, feasible = rows["global_batch"], rows["feasible"].astype(bool)
        solid = rows[column].where(feasible)
        axes.plot(batch, rows[column], color=colour, linestyle=(0, (2, 2)), linewidth=1.1)
        axes.plot(batch, solid, color=colour)
        axes.fill_between(batch, rows["low"], rows["high"], where=feasible, color=colour, alpha=0.10, linewidth=0)
        axes.plot(batch, rows["measured"], marker, color=colour, markeredgecolor=PAPER, markeredgewidth=0.7)
        axes.plot(batch[~feasible], rows[column][~feasible], "x", color=colour, markersize=6, markeredgewidth=1.6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("global batch (samples)")
    _batch_ticks(axes.xaxis, table["global_batch"])
    _mark_choice(axes, selection, table, column)
    _legend(axes, _node_handles(styles, table["num_nodes"]))


def _mark_choice(axes: Axes, selection: dict[str, Any], table: pd.DataFrame, column: str) -> None:
    is_chosen = (table["num_nodes"] == selection["num_nodes"]) & (table["batch_per_rank"] == selection["batch_per_rank"])
    x, y = float(selection["global_batch"]), float(table.loc[is_chosen, column].iloc[0])
    knee = selection["knee"]["global_batch"]
    axes.axvline(knee, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
    axes.annotate(
        "knee",
        (knee, 1),
        (4, -2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        va="top",
        color=MUTED,
        fontsize=9,
    )
    axes.plot(x, y, "o", markersize=14, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.8, zorder=5)
    low, high = axes.get_ylim()
    above = math.log(y / low) < 0.5 * math.log(high / low)
    axes.annotate(
        "chosen", (x, y), (0, 13 if above else -13), textcoords="offset points", ha="center",
        va="bottom" if above else "top", fontweight="bold",
    )  # fmt: skip


# --- models -----------------------------------------------------------------------------------------------------------


def _step_time(fit: dict[str, Any], styles: dict[int, tuple[str, str]]) -> Plot:
    figure, axes = _new()
    points = pd.DataFrame([p for p in fit["points"] if not p.get("allocator_retries")])
    measured = points["step_time_s"].to_numpy(dtype=float)
    handles, sentences, everything = [], [], list(measured)
    for form, values in fit["step_time"].items():
        model = StepTimeFit.from_dict(values)
        predicted = model.predict(points)
        used = form == fit["step_time_form"]
        look: dict[str, Any] = {"linestyle": "none", "marker": "o" if used else "s", "markersize": 6 if used else 5}
        for i in np.flatnonzero(np.isfinite(predicted)):
            colour = styles[int(points["num_nodes"].iloc[i])][0]
            fill = {"markerfacecolor": colour if used else "none", "markeredgecolor": PAPER if used else colour}
            axes.plot(measured[i], predicted[i], zorder=4 if used else 3, **look, **fill)
            everything.append(float(predicted[i]))
        error = f"{form}: median error {100 * model.median_error:.1f} %"
        fill = {"markerfacecolor": INK if used else "none", "markeredgecolor": PAPER if used else INK}
        handles.append(Line2D([], [], label=error, **look, **fill))
        sentences.append(error)
    ends = np.array([min(everything) / 1.3, max(everything) * 1.3])
    axes.plot(ends, ends, color=MUTED, linewidth=1)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color=MUTED, alpha=0.18, linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured step time", ylabel="predicted step time")
    for axis in (axes.xaxis, axes.yaxis):
        _duration_ticks(axis, at_most=6)
    axes.legend(handles=handles, loc="upper left", handletextpad=0.2)
    _legend(axes, _node_handles(styles, points["num_nodes"], line=False))
    return _finish(
        figure,
        "step_time",
        "Predicted against measured step time",
        f"Filled: {fit['step_time_form']}, the form that predictions use. On the line a prediction is exact; the band "
        "is 10 % either way.",
        f"Predicted against measured step time of {len(points)} configurations; {'; '.join(sentences)}.",
    )


def _memory(fit: dict[str, Any], selection: dict[str, Any] | None, styles: dict[int, tuple[str, str]]) -> Plot:
    figure, axes = _new()
    model, points = MemoryFit.from_dict(fit["memory"]), pd.DataFrame(fit["points"])
    limit, fraction, largest = fit["memory_limit_gib"], fit["memory_fraction"], fit["max_batch_per_rank"]
    out_of_memory = [int(name.split("-b")[1]) for name in fit["infeasible"]]
    ends = [*points["batch_per_rank"], *out_of_memory, *([largest] if largest else [])]
    batch = np.geomspace(min(ends) / 1.15, max(ends) * 1.15, 120)
    low, high = model.interval(batch)
    names = [name for name in MEMORY_PARTS if name in {**model.parts(1.0)}]
    stacks = np.array([[model.parts(b)[name] for b in batch] for name in names])
    for name, part in zip(names, axes.stackplot(batch, stacks, linewidth=0, alpha=0.55), strict=True):
        part.set_facecolor(MEMORY_PARTS[name][1])
        # a part that nobody could see in the picture needs no entry
        if stacks[names.index(name)].max() > 0.01 * high.max():
            part.set_label(MEMORY_PARTS[name][0])
    axes.plot(batch, model.predict(batch), color=INK, linewidth=1.4)
    axes.fill_between(batch, low, high, color=INK, alpha=0.13, linewidth=0)
    for num_nodes, rows in points.groupby("num_nodes"):
        colour, marker = styles[int(str(num_nodes))]
        look = {"color": colour, "markeredgecolor": PAPER, "markeredgewidth": 0.7}
        axes.plot(rows["batch_per_rank"], rows["memory_gib"], marker, **look)
    axes.set_xscale("log")
    axes.set_xlim(batch[0], batch[-1])
    _batch_ticks(axes.xaxis, ends)
    axes.set(xlabel="batch per rank (samples)", ylabel="memory of a rank (GiB)")
    _mark_limits(axes, float(max(points["memory_gib"].max(), float(model.predict(batch[-1])))), limit, fraction, largest)
    if limit is not None and out_of_memory:
        axes.plot(sorted(set(out_of_memory)), [limit] * len(set(out_of_memory)), "x", color=WARNING, markeredgewidth=1.8)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", title=None)
    _legend(axes, _node_handles(styles, points["num_nodes"], line=False))
    return _finish(
        figure,
        "memory",
        "Memory of a rank",
        "Line: the fit with its 90 % interval; marks: measured peaks; areas: what it is made of. Red crosses ran out of "
        "memory. The broken vertical line is the largest batch whose interval stays inside the share that may be used.",
        f"Memory per rank against batch per rank with the fitted line; limit {limit and round(limit, 2)} GiB, largest "
        f"batch {largest}.",
    )


def _mark_limits(axes: Axes, top_gib: float, limit: float | None, fraction: float, largest: int | None) -> None:
    """The device's memory, the share that may be used, and the batch that this allows."""
    if largest:
        axes.axvline(largest, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    if limit is None:
        axes.set_ylim(0, 1.15 * top_gib)
        return
    # a limit far above everything measured would flatten the picture, so it is only written down
    if limit > 4 * top_gib:
        axes.set_ylim(0, 1.5 * top_gib)
        place = {"xycoords": "axes fraction", "ha": "left", "va": "top", "color": WARNING, "fontsize": 9}
        axes.annotate(f"↑ limit {limit:.3g} GiB, far above this scale", (0.02, 0.98), **place)
    else:
        axes.set_ylim(0, max(1.12 * limit, 1.05 * min(top_gib, 1.4 * limit)))
        for share, style in ((1.0, "-"), (fraction, (0, (4, 3)))):
            axes.axhline(share * limit, color=WARNING, linestyle=style, linewidth=1.2)
        words = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "color": WARNING, "fontsize": 9}
        axes.annotate(f"limit {limit:.3g} GiB", (0.01, limit), (0, 2), va="bottom", **words)
        axes.annotate(f"{fraction:.0%} of it", (0.01, fraction * limit), (0, -3), va="top", **words)
    if largest:
        axes.annotate(
            f"at most {largest}", (largest, 0), (-4, 6), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="right", fontsize=9,
        )  # fmt: skip


def _step_parts(fit: dict[str, Any]) -> Plot:
    """One row of bars per number of nodes: shares of the step, with its length written on top."""
    points = pd.DataFrame(fit["points"]).rename(columns={"sync_time_s": "sync_s"})
    batches, nodes = sorted(set(points["batch_per_rank"])), sorted(set(points["num_nodes"]))
    figure = Figure(figsize=(_WIDTH_IN, max(4.0, 1.1 + 0.95 * len(nodes))), layout="constrained")
    grid = figure.subplots(len(nodes), 1, sharex=True, squeeze=False)[:, 0]
    for axes, num_nodes in zip(grid, nodes, strict=True):
        rows = points[points["num_nodes"] == num_nodes].drop_duplicates("batch_per_rank", keep="last")
        place = [batches.index(b) for b in rows["batch_per_rank"]]
        bottom = np.zeros(len(rows))
        for column, (label, colour) in STEP_PARTS.items():
            share = 100 * rows[column].to_numpy(dtype=float) / rows["step_time_s"].to_numpy(dtype=float)
            axes.bar(place, share, 0.72, bottom, color=colour, label=label, edgecolor=PAPER, linewidth=0.5)
            bottom += share
        for x, step, top in zip(place, rows["step_time_s"], bottom, strict=True):
            axes.annotate(
                duration(float(step)), (x, max(top, 100)), (0, 2), textcoords="offset points", ha="center", fontsize=7.5
            )
        axes.set(xlim=(-0.6, len(batches) - 0.4), ylim=(0, max(128.0, 1.2 * float(bottom.max()))), yticks=(0, 50, 100))
        axes.set_title("1 node" if num_nodes == 1 else f"{num_nodes} nodes", loc="left", fontsize=9, color=MUTED, pad=1)
        axes.grid(visible=False, axis="x")
    grid[-1].set_xticks(range(len(batches)), [str(b) for b in batches])
    grid[-1].set_xlabel("batch per rank (samples)")
    figure.supylabel("share of the step (%)", fontsize=10)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, handlelength=0.9, handleheight=0.9)
    return _finish(
        figure,
        "step_parts",
        "Where a step goes",
        "Above each bar: the median step. Parts are medians of the slowest rank, synchronisation of the rank that "
        "waited least, so a bar need not end at 100 %: ranks do not all wait for the same one.",
        f"Shares of data, forward, backward, exposed synchronisation and optimiser in {len(points)} measured steps.",
    )


# --- training ---------------------------------------------------------------------------------------------------------


def _training(metrics: list[dict[str, Any]], settings: Settings) -> Plot:
    table = pd.DataFrame(metrics)
    figure, (loss, top1) = _stacked(2)
    for axes, column, label in ((loss, "loss", "loss"), (top1, "top1", "top-1 accuracy (%)")):
        axes.plot(table["epoch"], table[f"train_{column}"], color=NODE_COLOURS[4], linewidth=1.4, label="training")
        axes.plot(table["epoch"], table[f"test_{column}"], color=NODE_COLOURS[0], label="test")
        axes.set_ylabel(label)
    last = table.iloc[-1]
    _mark_epochs((loss, top1), metrics, settings)
    _legend(loss, loss.get_legend_handles_labels()[0])
    top1.annotate(
        f"{last['test_top1']:.1f} %", (last["epoch"], last["test_top1"]), (0, -7), textcoords="offset points",
        ha="right", va="top", color=NODE_COLOURS[0], fontweight="bold",
    )  # fmt: skip
    return _finish(
        figure,
        "training",
        "Training",
        "Dotted lines: the learning rate steps down. Red lines: the training went on with another batch or other nodes.",
        f"Loss and top-1 accuracy over {int(last['epoch'])} epochs; at the end the test accuracy is "
        f"{last['test_top1']:.2f} %.",
    )


def _scaling(metrics: list[dict[str, Any]], settings: Settings) -> Plot:
    table = pd.DataFrame(metrics)
    figure, panels = _stacked(3)
    columns = ("gradient_variability", "mean_scale", "scaled_fraction")
    labels = ("gradient\nvariability", "mean scale", "scaled\nsteps (%)")
    for axes, column, label, factor in zip(panels, columns, labels, (1, 1, 100), strict=True):
        if column in table:
            axes.plot(table["epoch"], factor * table[column].astype(float), color=NODE_COLOURS[2])
        axes.set_ylabel(label)
    threshold = settings.method.delta_threshold
    panels[0].axhline(threshold, color=WARNING, linestyle=(0, (4, 3)), linewidth=1.2)
    panels[0].annotate(
        f"threshold {threshold:g}", (1, threshold), (-2, 2), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", va="bottom", color=WARNING, fontsize=9,
    )  # fmt: skip
    panels[2].set_ylim(-4, 104)
    _mark_epochs(panels, metrics, settings)
    return _finish(
        figure,
        "scaling",
        "Adaptive gradient scaling",
        "Mean over the steps of each epoch. A step whose gradient variability reaches the threshold is left unscaled.",
        "Gradient variability, mean scale and share of scaled steps in each epoch.",
    )


def _mark_epochs(panels: Sequence[Axes], metrics: list[dict[str, Any]], settings: Settings) -> None:
    """Steps of the learning rate, and changes of the configuration in mid-training."""
    last_epoch = metrics[-1]["epoch"]
    for axes in panels:
        for milestone in settings.training.milestones:
            if milestone < last_epoch:
                axes.axvline(milestone, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
        for before, after in zip(metrics, metrics[1:], strict=False):
            if (before["global_batch"], before["num_nodes"]) != (after["global_batch"], after["num_nodes"]):
                axes.axvline(before["epoch"], color=WARNING, linewidth=1.2, zorder=1)
                if axes is panels[0]:
                    axes.annotate(
                        f"batch {before['global_batch']} → {after['global_batch']}", (before["epoch"], 1), (4, -1),
                        xycoords=("data", "axes fraction"), textcoords="offset points", va="top", color=WARNING,
                        fontsize=9,
                    )  # fmt: skip
    panels[-1].set_xlabel("epoch")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))


# --- shared -----------------------------------------------------------------------------------------------------------


def _new() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH_IN, 4.1), layout="constrained")
    return figure, figure.subplots()


def _stacked(panels: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(_WIDTH_IN, 4.6), layout="constrained")
    axes = figure.subplots(panels, 1, sharex=True)
    figure.align_ylabels(axes)
    return figure, axes


def _finish(figure: Figure, name: str, title: str, caption: str, alt: str) -> Plot:
    svg, png = io.StringIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=160)
    return Plot(name, title, caption, alt, _themed(svg.getvalue()), png.getvalue())


def _themed(svg: str) -> str:
    """Colours as CSS variables that follow the reader's setting; an SVG shown as an image takes it from the page."""
    light = "".join(f"--c{colour[1:]}:{colour};" for colour in _DARK)
    dark = "".join(f"--c{colour[1:]}:{shade};" for colour, shade in _DARK.items())
    for colour in _DARK:
        svg = svg.replace(colour, f"var(--c{colour[1:]})")
    style = f"<style>:root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    return re.sub(r"(<svg\b[^>]*>)", lambda found: found[1] + style, svg, count=1)


def _legend(axes: Axes, handles: Sequence[Any]) -> None:
    """A row of entries above the axes, where no curve can pass."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 5), handletextpad=0.5)


def _node_handles(styles: dict[int, tuple[str, str]], present: Iterable[int], line: bool = True) -> list[Line2D]:
    return [
        Line2D([], [], color=styles[n][0], marker=styles[n][1], linestyle="-" if line else "none",
               markeredgecolor=PAPER, markeredgewidth=0.7, label="1 node" if n == 1 else f"{n} nodes")
        for n in sorted(set(present))
    ]  # fmt: skip


def _batch_ticks(axis: Axis, batches: Iterable[float], at_most: int = 8) -> None:
    """Ticks at batches that exist, thinned to what fits."""
    values = sorted({int(batch) for batch in batches})
    stride = math.ceil(len(values) / at_most)
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


def _duration_ticks(axis: Axis, at_most: int = 8) -> None:
    """Ticks of a logarithmic time axis at numbers people use: 30 s, 1 min, 2 min."""
    low, high = sorted(axis.get_view_interval())
    inside = [seconds for seconds in _ROUND_SECONDS if low <= seconds <= high]
    if len(inside) < 3:
        inside = [value for value in MaxNLocator(5).tick_values(low, high) if low <= value <= high]
    inside = inside[:: math.ceil(len(inside) / at_most)]
    _set_ticks(axis, inside, [_round_duration(seconds) for seconds in inside])


def _round_duration(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= size * (1 - 1e-9):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:g} s"


def _number_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis at 1, 2, 5, 10, or evenly where it spans too little for three of them."""
    low, high = sorted(axis.get_view_interval())
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [m * 10.0**k for k in decades for m in (1, 2, 5) if low <= m * 10.0**k <= high]
    if len(inside) < 3:
        inside = [value for value in MaxNLocator(5).tick_values(low, high) if low <= value <= high]
    inside = inside[:: math.ceil(len(inside) / 8)]
    _set_ticks(axis, inside, [f"{value:,.6g}" for value in inside])


def _set_ticks(axis: Axis, values: Sequence[float], labels: Sequence[str]) -> None:
    axis.set_major_locator(FixedLocator(values))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda _, place: labels[place] if place is not None else ""))
