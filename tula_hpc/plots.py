"""The plots of the report: each takes what a stage stored and returns a picture with the words that belong to it.

Only the report imports this module, and only when it is written: matplotlib takes a second to load. Curves between
measurements are the stored fits' own predictions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from tula_hpc.candidates import Candidate, nodes_of
from tula_hpc.config import Gate, MethodKind, Settings
from tula_hpc.control.choosing import fit_of, types_of
from tula_hpc.display import duration
from tula_hpc.markup import MEMORY_PARTS
from tula_hpc.models.memory import MemoryFit, usable_gib
from tula_hpc.models.step_time import StepTimeFit
from tula_hpc.plot_style import (
    INK,
    MEMORY_COLOURS,
    MUTED,
    NODE_COLOURS,
    PAPER,
    STEP_PARTS,
    STYLE,
    WARNING,
    WIDTH_IN,
    NodeStyles,
    Plot,
    batch_ticks,
    duration_ticks,
    finish,
    legend,
    new_axes,
    node_handles,
    node_styles,
    number_ticks,
    stacked_axes,
    write_beside,
)


def draw(
    settings: Settings,
    fit: dict[str, Any] | None,
    selection: dict[str, Any] | None,
    metrics: list[dict[str, Any]],
) -> list[Plot]:
    """Every plot that the given records allow, in the order of the report."""
    styles = node_styles(c.num_nodes for c in settings.grid_candidates())
    plots = []
    with matplotlib.rc_context(STYLE):
        for node_type, own in _by_type(selection).items():
            plots.append(_of_type(_epoch_time(own, styles), node_type))
            # a price for memory gives no cost where memory is not known
            if any(row["cost"] is not None for row in own["candidates"]):
                plots.append(_of_type(_cost(own, settings, styles), node_type))
        for node_type in [] if fit is None else types_of(fit):
            models = fit_of(fit or {}, node_type)
            drawn = _step_time(models, styles), _memory(models, selection, styles), _step_parts(models)
            plots += [_of_type(plot, node_type) for plot in drawn]
        if metrics:
            plots.append(_training(metrics, settings))
        if metrics and settings.method.kind is MethodKind.ags:
            plots.append(_bounds(metrics, settings))
        elif metrics and settings.method.kind.scales_gradients:
            plots.append(_scaling(metrics, settings))
    return plots


def _by_type(selection: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Type of node -> the selection with the candidates of that type; without types of which nothing is predicted."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in [] if selection is None else selection["candidates"]:
        rows.setdefault(row.get("node_type", ""), []).append(row)
    known = {t: own for t, own in rows.items() if any(row["step_time_s"] is not None for row in own)}
    return {node_type: {**(selection or {}), "candidates": own} for node_type, own in known.items()}


def _of_type(plot: Plot, node_type: str) -> Plot:
    """The plot under a name and a title that say which nodes it shows."""
    if not node_type:
        return plot
    return replace(plot, name=f"{plot.name}_{node_type}", title=f"{plot.title}, {node_type}")


# --- choosing ---------------------------------------------------------------------------------------------------------

_READ_CURVES = (
    "Lines are predictions, the band is their 90 % interval, filled marks are measurements. Broken lines and crosses: "
    "configurations that do not fit or have failed."
)


def _epoch_time(selection: dict[str, Any], styles: NodeStyles) -> Plot:
    figure, axes = new_axes()
    _against_global_batch(axes, selection, "epoch_time_s", styles)
    axes.set_ylabel("time of an epoch")
    duration_ticks(axes.yaxis)
    return finish(
        figure,
        "epoch_time",
        "Time of an epoch",
        _READ_CURVES,
        f"Epoch time against global batch, one line per number of nodes; {_marked(selection)}.",
    )


def _cost(selection: dict[str, Any], settings: Settings, styles: NodeStyles) -> Plot:
    figure, axes = new_axes()
    _against_global_batch(axes, selection, "cost", styles)
    axes.set_ylabel(f"cost of {settings.training.epochs} epochs ({selection['currency']})")
    number_ticks(axes.yaxis)
    return finish(
        figure,
        "cost",
        "Cost of the training",
        f"At {selection['currency']}{selection['price']}. Filled marks are the cost at the measured step time.",
        f"Cost of the training against global batch, one line per number of nodes; {_marked(selection)}.",
    )


def _marked(selection: dict[str, Any]) -> str:
    nodes = nodes_of(selection["num_nodes"], selection.get("node_type", ""))
    return (
        f"chosen are {nodes} with a global batch of {selection['global_batch']}, the knee is at "
        f"{selection['knee']['global_batch']}"
    )


def _against_global_batch(axes: Axes, selection: dict[str, Any], column: str, styles: NodeStyles) -> None:
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
    batch_ticks(axes.xaxis, table["global_batch"])
    _mark_choice(axes, selection, table, column)
    legend(axes, node_handles(styles, table["num_nodes"]))


def _mark_choice(axes: Axes, selection: dict[str, Any], table: pd.DataFrame, column: str) -> None:
    knee = float(selection["knee"]["global_batch"])
    if table["global_batch"].min() <= knee <= table["global_batch"].max():
        axes.axvline(knee, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
        early = _place(axes.get_xlim(), knee) < 0.8
        write_beside(axes, "knee", (knee, 1), -2, to_the_right=early, color=MUTED, va="top")
    chosen = Candidate.from_record(selection)
    is_chosen = [Candidate.from_record(row) == chosen for row in table.to_dict("records")]
    x, y = float(selection["global_batch"]), float(table.loc[is_chosen, column].max())
    if not y > 0:  # the choice is of another type of node, or costs an unknown sum
        return
    axes.plot(x, y, "o", markersize=14, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.8, zorder=5)
    above, side = _place(axes.get_ylim(), y) < 0.5, _place(axes.get_xlim(), x)
    axes.annotate(
        "chosen",
        (x, y),
        (8 if side > 0.85 else -8 if side < 0.15 else 0, 11 if above else -11),
        textcoords="offset points",
        ha="right" if side > 0.85 else "left" if side < 0.15 else "center",
        va="bottom" if above else "top",
        fontweight="bold",
        path_effects=[withStroke(linewidth=3, foreground=PAPER)],
    )


def _place(limits: tuple[float, float], value: float) -> float:
    """Where a value stands on a logarithmic axis: 0 at its beginning, 1 at its end."""
    return math.log(value / limits[0]) / math.log(limits[1] / limits[0])


# --- models -----------------------------------------------------------------------------------------------------------


def _step_time(fit: Mapping[str, Any], styles: NodeStyles) -> Plot:
    figure, axes = new_axes()
    points = pd.DataFrame([p for p in fit["points"] if not p.get("allocator_retries")])
    measured = points["step_time_s"].to_numpy(dtype=float)
    handles, sentences, everything = [], [], list(measured)
    for form, values in fit["step_time"].items():
        model = StepTimeFit.from_dict(values)
        predicted = model.predict(points)
        used = form == fit["step_time_form"]
        look: dict[str, Any] = {"linestyle": "none", "marker": "o" if used else "s", "markersize": 6 if used else 5}
        # a fit without finite parameters predicts nothing, and one without compute time 0 s for a single rank
        for i in np.flatnonzero(np.isfinite(predicted) & (predicted > 0)):
            colour = styles[int(points["num_nodes"].iloc[i])][0]
            fill: dict[str, Any] = {
                "markerfacecolor": colour if used else "none",
                "markeredgecolor": PAPER if used else colour,
            }
            axes.plot(measured[i], predicted[i], zorder=4 if used else 3, **look, **fill)
            everything.append(float(predicted[i]))
        error = f"{form}: median error {100 * model.median_error:.1f} %"
        fill = {"markerfacecolor": INK if used else "none", "markeredgecolor": PAPER if used else INK}
        handles.append(Line2D([], [], label=error, **look, **fill))
        sentences.append(error)
    ends = np.array([min(everything) / 1.3, max(everything) * 1.3])
    axes.plot(ends, ends, color=MUTED, linewidth=1)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color=MUTED, alpha=0.18, linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured step time", ylabel="predicted step time")
    for axis in (axes.xaxis, axes.yaxis):
        duration_ticks(axis, at_most=6)
    axes.legend(handles=handles, loc="upper left", handletextpad=0.2)
    legend(axes, node_handles(styles, points["num_nodes"], line=False))
    return finish(
        figure,
        "step_time",
        "Predicted against measured step time",
        f"Filled: {fit['step_time_form']}, the form that predictions use. On the line a prediction is exact; the band "
        "is 10 % either way.",
        f"Predicted against measured step time of {len(points)} configurations; {'; '.join(sentences)}.",
    )


def _memory(fit: Mapping[str, Any], selection: dict[str, Any] | None, styles: NodeStyles) -> Plot:
    figure, axes = new_axes()
    model, points = MemoryFit.from_dict(fit["memory"]), pd.DataFrame(fit["points"])
    limit, largest = fit["memory_limit_gib"], fit["max_batch_per_rank"]
    usable = None if limit is None else usable_gib(limit, fit["memory_fraction"], model.constant_gib())
    out_of_memory = sorted({int(name.split("-b")[1]) for name in fit["infeasible"]})
    seen = [*points["batch_per_rank"], *out_of_memory]
    batch = np.geomspace(min(seen) / 1.15, max(*seen, largest or 1) * 1.15, 120)
    low, high = model.interval(batch)
    names = [name for name in MEMORY_COLOURS if name in model.parts(1.0)]
    stacks = np.array([[model.parts(b)[name] for b in batch] for name in names])
    for name, part in zip(names, axes.stackplot(batch, stacks, linewidth=0, alpha=0.55), strict=True):
        part.set_facecolor(MEMORY_COLOURS[name])
        # a part that nobody could see in the picture needs no entry
        if stacks[names.index(name)].max() > 0.01 * high.max():
            part.set_label(MEMORY_PARTS[name])
    axes.plot(batch, model.predict(batch), color=INK, linewidth=1.4)
    axes.fill_between(batch, low, high, color=INK, alpha=0.13, linewidth=0)
    counts = sorted(set(points["num_nodes"]))
    for place, num_nodes in enumerate(counts):
        # peaks hardly depend on the nodes: side by side all of them can be seen
        aside = 1.07 ** (place - (len(counts) - 1) / 2)
        rows, (colour, marker) = points[points["num_nodes"] == num_nodes], styles[num_nodes]
        look: dict[str, Any] = {"color": colour, "markeredgecolor": PAPER, "markeredgewidth": 0.7}
        axes.plot(rows["batch_per_rank"] * aside, rows["memory_gib"], marker, **look)
    axes.set_xscale("log")
    axes.set_xlim(batch[0], batch[-1])
    batch_ticks(axes.xaxis, seen)
    axes.set(xlabel="batch per rank (samples)", ylabel="memory of a rank (GiB)")
    top_gib = max(float(points["memory_gib"].max()), float(model.predict(batch[-1])))
    _mark_limits(axes, top_gib, limit, usable, largest)
    if limit is not None:
        axes.plot(out_of_memory, [limit] * len(out_of_memory), "x", color=WARNING, markeredgewidth=1.8)
    handles, labels = axes.get_legend_handles_labels()
    frame: dict[str, Any] = {"frameon": True, "facecolor": PAPER, "framealpha": 0.8, "edgecolor": "none"}
    axes.legend(handles[::-1], labels[::-1], loc="center left", **frame)
    legend(axes, node_handles(styles, points["num_nodes"], line=False))
    return finish(
        figure,
        "memory",
        "Memory of a rank",
        "Line: the fit with its 90 % interval; marks: measured peaks, side by side; areas: what the total is made of. "
        "Red crosses did not fit. The broken vertical line is the largest batch that is trusted to fit in what may "
        "be used.",
        f"Memory per rank against batch per rank with the fitted line; limit {limit and round(limit, 2)} GiB, largest "
        f"batch {largest}.",
    )


def _mark_limits(axes: Axes, top_gib: float, limit: float | None, usable: float | None, largest: int | None) -> None:
    """The device's memory, what of it may be used, and the batch that this allows."""
    if largest:
        axes.axvline(largest, color=INK, linestyle=(0, (4, 3)), linewidth=1)
        write_beside(axes, f"at most {largest}", (largest, 0), 6, to_the_right=False, color=INK, va="bottom")
    if limit is None or usable is None:
        axes.set_ylim(0, 1.15 * top_gib)
        return
    # a limit far above everything measured would flatten the picture, so it is only written down
    if limit > 4 * top_gib:
        axes.set_ylim(0, 1.5 * top_gib)
        words = f"↑ limit {limit:.3g} GiB, far above this scale"
        axes.annotate(words, (0.02, 0.98), xycoords="axes fraction", va="top", color=WARNING, fontsize=9)
        return
    axes.set_ylim(0, max(1.12 * limit, 1.05 * min(top_gib, 1.4 * limit)))
    for gib, style, words, up in (
        (limit, "-", f"limit {limit:.3g} GiB", True),
        (usable, (0, (4, 3)), f"{usable:.3g} GiB may be used", False),
    ):
        axes.axhline(gib, color=WARNING, linestyle=style, linewidth=1.2)
        axes.annotate(
            words, (0.01, gib), (0, 2 if up else -3), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="bottom" if up else "top", color=WARNING, fontsize=9,
        )  # fmt: skip


def _step_parts(fit: Mapping[str, Any]) -> Plot:
    """Shares of the step as bars, one panel per number of nodes, with the length of the step on top."""
    points = pd.DataFrame(fit["points"]).rename(columns={"sync_time_s": "sync_s"})
    several = points["num_nodes"].nunique() > 1
    return finish(
        _draw_step_parts(points, columns=2 if several else 1, width_in=2 * WIDTH_IN if several else WIDTH_IN),
        "step_parts",
        "Where a step goes",
        "Above each bar: the median step. Each part is the median of its slowest rank, synchronisation that of the "
        "rank which waited least, so a bar need not end at 100 %: ranks do not all wait for the same one.",
        f"Shares of data, forward, backward, exposed synchronisation and optimiser in {len(points)} measured steps.",
        _draw_step_parts(points, columns=1, width_in=WIDTH_IN) if several else None,
    )


def _draw_step_parts(points: pd.DataFrame, columns: int, width_in: float) -> Figure:
    batches, nodes = sorted(set(points["batch_per_rank"])), sorted(set(points["num_nodes"]))
    lines = math.ceil(len(nodes) / columns)
    figure = Figure(figsize=(width_in, max(2.6 if columns > 1 else 4.0, 1.1 + 0.95 * lines)), layout="constrained")
    grid = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, num_nodes in zip(grid, nodes, strict=False):
        rows = points[points["num_nodes"] == num_nodes].drop_duplicates("batch_per_rank", keep="last")
        place = [batches.index(b) for b in rows["batch_per_rank"]]
        bottom = np.zeros(len(rows))
        for column, (label, colour) in STEP_PARTS.items():
            share = 100 * rows[column].to_numpy(dtype=float) / rows["step_time_s"].to_numpy(dtype=float)
            axes.bar(place, share, 0.72, bottom, color=colour, label=label, edgecolor=PAPER, linewidth=0.5)
            bottom += share
        for x, step, top in zip(place, rows["step_time_s"], bottom, strict=True):
            length, spot = duration(float(step)), (x, max(top, 100.0))
            axes.annotate(length, spot, (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
        axes.set_title("1 node" if num_nodes == 1 else f"{num_nodes} nodes", loc="left", fontsize=9, color=MUTED, pad=1)
        axes.grid(visible=False, axis="x")
        axes.tick_params(labelbottom=num_nodes in nodes[-columns:])
    for axes in grid[len(nodes) :]:
        axes.remove()
    most = float(max(sum(points[part] for part in STEP_PARTS) / points["step_time_s"]))
    grid[0].set(xlim=(-0.6, len(batches) - 0.4), ylim=(0, max(128.0, 120 * most)), yticks=(0, 50, 100))
    grid[0].set_xticks(range(len(batches)), [str(b) for b in batches])
    figure.supxlabel("batch per rank (samples)", fontsize=10)
    figure.supylabel("share of the step (%)", fontsize=10)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=5 if columns > 1 else 3, handlelength=0.9)
    return figure


# --- training ---------------------------------------------------------------------------------------------------------


def _training(metrics: list[dict[str, Any]], settings: Settings) -> Plot:
    table = pd.DataFrame(metrics)
    last = metrics[-1]
    shown = [("loss", "loss")]
    words = f"Loss over {last['epoch']} epochs."
    if last["test_top1"] is not None:  # else targets are no classes
        shown.append(("top1", "top-1 accuracy (%)"))
        words = f"Loss and top-1 accuracy over {last['epoch']} epochs; at the end the test accuracy is "
        words += f"{last['test_top1']:.2f} %."
    figure, panels = stacked_axes(len(shown))
    for axes, (column, label) in zip(panels, shown, strict=True):
        for part, name, colour in (("train", "training", NODE_COLOURS[4]), ("test", "test", NODE_COLOURS[0])):
            axes.plot(table["epoch"], table[f"{part}_{column}"], color=colour, label=name, **_points(table))
        axes.set_ylabel(label)
    _mark_epochs(panels, metrics, settings)
    legend(panels[0], panels[0].get_legend_handles_labels()[0])
    if len(panels) > 1:
        panels[1].annotate(
            f"{last['test_top1']:.1f} %", (last["epoch"], last["test_top1"]), (0, -7), textcoords="offset points",
            ha="right", va="top", color=NODE_COLOURS[0], fontweight="bold",
        )  # fmt: skip
    return finish(
        figure,
        "training",
        "Training",
        "Dotted lines: the learning rate steps down. Red lines: the training went on with another batch or cluster.",
        words,
    )


_GATES = {
    Gate.current: "A step whose variability reaches the threshold is left unscaled.",
    Gate.lagged: "A step after one whose variability reaches the threshold is left unscaled.",
    Gate.off: "Every step is scaled, whatever its variability (method.gate=off).",
}


def _scaling(metrics: list[dict[str, Any]], settings: Settings) -> Plot:
    table, gate = pd.DataFrame(metrics), settings.method.gate
    shown = [("mean_scale", "mean scale", 1), ("scaled_fraction", "scaled\nsteps (%)", 100)]
    if gate is not Gate.off:  # else nobody computes it
        shown.insert(0, ("gradient_variability", "gradient\nvariability", 1))
    figure, panels = stacked_axes(len(shown))
    for axes, (column, label, factor) in zip(panels, shown, strict=True):
        if column in table:
            values = factor * table[column].astype(float)
            axes.plot(table["epoch"], values, color=NODE_COLOURS[2], **_points(table))
        axes.set_ylabel(label)
    if gate is not Gate.off:
        _mark_threshold(panels[0], table.get("gradient_variability"), settings.method.delta_threshold)
    panels[-1].set_ylim(-4, 104)
    _mark_epochs(panels, metrics, settings)
    variability = "" if gate is Gate.off else "the variability of its last step, "
    return finish(
        figure,
        "scaling",
        "Gradient scaling",
        f"At the end of each epoch: {variability}the mean of the scales in force, and the share of all steps so far "
        f"that were scaled. {_GATES[gate]}",
        f"{'Mean' if gate is Gate.off else 'Gradient variability, mean'} scale and share of scaled steps at the end of "
        "each epoch.",
    )


def _mark_threshold(axes: Axes, variability: pd.Series | None, threshold: float) -> None:
    if variability is not None and variability.min() > 0 and variability.max() > 50 * variability.min():
        axes.set_yscale("log")
    axes.axhline(threshold, color=WARNING, linestyle=(0, (4, 3)), linewidth=1.2)
    axes.annotate(
        f"threshold {threshold:g}", (1, threshold), (-2, 2), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", va="bottom", color=WARNING, fontsize=9,
    )  # fmt: skip


def _bounds(metrics: list[dict[str, Any]], settings: Settings) -> Plot:
    table = pd.DataFrame(metrics)
    figure, panels = stacked_axes(2)
    for column, colour, label in (("raised_fraction", 2, "lengthened"), ("lowered_fraction", 0, "shortened")):
        if column in table:
            values = 100 * table[column].astype(float)
            panels[1].plot(table["epoch"], values, color=NODE_COLOURS[colour], label=label, **_points(table))
    if "mean_scale" in table:
        panels[0].plot(table["epoch"], table["mean_scale"], color=NODE_COLOURS[4], **_points(table))
    panels[0].set_ylabel("mean scale")
    panels[1].set_ylabel("tensors (%)")
    panels[1].set_ylim(-4, 104)
    legend(panels[1], panels[1].get_legend_handles_labels()[0])
    _mark_epochs(panels, metrics, settings)
    method = settings.method
    return finish(
        figure,
        "scaling",
        "Bounded steps",
        "At the end of each epoch: what its last step's gradients were multiplied by on average, and the share of "
        f"tensors whose steps were lengthened towards {method.step_floor:.2%} or shortened to {method.step_cap:.2%} of "
        "their weights.",
        "Mean scale and the shares of tensors whose steps were lengthened and shortened, at the end of each epoch.",
    )


def _points(table: pd.DataFrame) -> dict[str, Any]:
    """One epoch is no line."""
    return {"marker": "o"} if len(table) == 1 else {}


def _mark_epochs(panels: Sequence[Axes], metrics: list[dict[str, Any]], settings: Settings) -> None:
    """Steps of the learning rate, and changes of the configuration in mid-training."""
    last_epoch = metrics[-1]["epoch"]
    for axes in panels:
        for milestone in settings.training.milestones:
            if milestone < last_epoch:
                axes.axvline(milestone, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
        for before, after in itertools.pairwise(metrics):
            if (before["global_batch"], before["num_nodes"]) != (after["global_batch"], after["num_nodes"]):
                axes.axvline(before["epoch"], color=WARNING, linewidth=1.2, zorder=1)
                if axes is panels[0]:
                    words = f"batch {before['global_batch']} → {after['global_batch']}"
                    early = before["epoch"] < 0.6 * last_epoch
                    write_beside(axes, words, (before["epoch"], 1), -1, to_the_right=early, color=WARNING, va="top")
    panels[-1].set_xlabel("epoch")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
