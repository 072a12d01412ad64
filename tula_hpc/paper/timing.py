"""What is measured without a training: epoch times, memory, predictions, the knee, prices (Fig. 1, 4, 9, 10, 11)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from tula_hpc.candidates import Candidate
from tula_hpc.config import read_settings
from tula_hpc.control.choosing import chosen_fit, fitted, predicted
from tula_hpc.display import count
from tula_hpc.models.knee import find_knee
from tula_hpc.models.search import SearchMode, next_round
from tula_hpc.models.step_time import StepTimeFit
from tula_hpc.paper import published
from tula_hpc.paper.claims import LINEAR_PERCENT, Answer, against, elsewhere, holds, speedup
from tula_hpc.paper.drawing import Panel, Series
from tula_hpc.paper.findings import Findings, Folders, Result, candidates, largest_clusters, points
from tula_hpc.paper.scales import Run, Scale
from tula_hpc.prices import prices_of
from tula_hpc.runs import RunFolder, read_json


def _full(scale: Scale) -> list[Run]:
    return [scale.profile(model) for model, _ in published.MODELS.items()]


def _measured(run: RunFolder) -> pd.DataFrame:
    """The measured candidates of a full search, with `epoch_s` and `train_s` at their measured step time."""
    table = candidates(run)
    table = table[table["measured_step_time_s"].notna() & table["feasible"]]
    share = table["measured_step_time_s"] / table["step_time_s"]
    return table.assign(epoch_s=table["epoch_time_s"] * share, train_s=table["train_time_s"] * share)


def _each(scale: Scale, folders: Folders, *more: str) -> list[tuple[str, str, RunFolder]]:
    """The models whose run ended well: key, name and folder."""
    found = [(model, name, folders.get(scale.profile(model, *more))) for model, name in published.MODELS.items()]
    return [(model, name, folder) for model, name, folder in found if folder is not None]


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """One table, models first."""
    if not tables:
        return pd.DataFrame()
    joined = pd.concat(tables, ignore_index=True)
    return joined[["model", *(column for column in joined if column != "model")]]


# --- Fig. 1 -----------------------------------------------------------------------------------------------------------


def _epoch_times(scale: Scale, folders: Folders) -> Findings:
    tables, panels, claims = [], [], {}
    for model, name, folder in _each(scale, folders):
        table = _measured(folder)
        sizes = largest_clusters(table, 2)
        table = table[table["num_nodes"].isin(sizes)]
        series = []
        for colour, nodes in enumerate(sizes):
            rows = table[table["num_nodes"] == nodes].sort_values("global_batch")
            cluster = count(nodes, "node")
            series.append(Series(cluster, list(rows["global_batch"]), list(rows["epoch_s"]), colour=colour))
        panels.append(Panel(name, "global batch", "epoch time", series, "batch", "seconds"))
        columns = ["num_nodes", "batch_per_rank", "global_batch", "epoch_s", "measured_step_time_s"]
        tables.append(table[columns].assign(model=name))
        claims[f"plateau-{model}"] = plateau(model, table[table["num_nodes"] == sizes[-1]])
        if len(sizes) == 2:
            claims |= against_nodes(model, table, *sizes)
    return Findings(
        _joined(tables),
        panels,
        claims,
        [
            "Epoch time is the measured step time times the steps of an epoch.",
            "The batch from which the epoch time hardly falls: twice the batch saves less than a tenth.",
        ],
    )


def plateau(model: str, rows: pd.DataFrame) -> Answer:
    """The first batch whose double saves less than a tenth of the epoch; rows of one cluster."""
    rows = rows.sort_values("global_batch")
    batch, seconds = rows["global_batch"].to_numpy(), rows["epoch_s"].to_numpy()
    flat = np.flatnonzero(seconds[1:] > 0.9 * seconds[:-1])
    at = batch[flat[0]] if len(flat) else batch[-1]
    verdict = elsewhere(at, published.PLATEAU[model], largest=batch[-1])
    return Answer(f"{at:g}" if len(flat) else f"beyond {at:g}", verdict)


def against_nodes(model: str, table: pd.DataFrame, few: int, many: int) -> dict[str, Answer]:
    """Twice the nodes at the same global batch, and at the same batch a node."""
    claims = {}
    by_batch = table.pivot_table(index="global_batch", columns="num_nodes", values="epoch_s").dropna()
    if model == "mobilenetv3" and len(by_batch):
        at = 1024 if 1024 in by_batch.index else by_batch.index[0]
        times = by_batch.loc[at, many] / by_batch.loc[at, few]
        verdict = "holds" if times > 2 else "hardly here" if times > 1 else "not here"
        claims["fewer-nodes-faster"] = Answer(f"{times:.2f}x the time (batch {at:g})", verdict)
    by_rank = table.pivot_table(index="batch_per_rank", columns="num_nodes", values="epoch_s").dropna()
    if model == "resnet50" and len(by_rank):
        at = 32 if 32 in by_rank.index else by_rank.index[0]
        saved = 1 - by_rank.loc[at, many] / by_rank.loc[at, few]
        words = f"{abs(100 * saved):.0f} % {'less' if saved >= 0 else 'more'} time"
        claims["weak-scaling"] = Answer(f"{words} ({few} to {many} nodes, {at:g} a rank)", holds(saved > 0))
    return claims


# --- Fig. 4 -----------------------------------------------------------------------------------------------------------


def _memory_parts(scale: Scale, folders: Folders) -> Findings:
    tables, claims = [], {}
    panels = [
        Panel("activations", "batch a rank", "GiB", x_scale="batch", y_scale="log"),
        Panel("a batch", "batch a rank", "GiB", x_scale="batch", y_scale="log"),
    ]
    for colour, (_, name, folder) in enumerate(_each(scale, folders)):
        table = points(folder)
        table = table[table["num_nodes"] == table["num_nodes"].min()].sort_values("batch_per_rank")
        for panel, column in zip(panels, ("activation_gib", "batch_gib"), strict=True):
            batch, gib = table["batch_per_rank"].to_numpy(dtype=float), table[column].to_numpy(dtype=float)
            known = np.isfinite(gib) & (gib > 0)
            batch, gib = batch[known], gib[known]
            if len(batch) < 2:
                continue
            line = np.polyfit(batch, gib, 1)
            panel.series.append(Series(name, list(batch), list(gib), "points", colour))
            panel.series.append(Series("", list(batch), list(np.polyval(line, batch)), "broken", colour))
            off = 100 * np.abs(np.polyval(line, batch) / gib - 1).max()
            tables.append(
                pd.DataFrame(
                    {"model": name, "part": column.removesuffix("_gib"), "batch_per_rank": batch, "gib": gib,
                     "linear_gib": np.polyval(line, batch), "mib_a_sample": 1024 * line[0],
                     "largest_error_percent": off}
                )
            )  # fmt: skip
    joined = _joined(tables)
    for key, part in (("activation-linear", "activation"), ("batch-linear", "batch")):
        if len(joined) and (joined["part"] == part).any():
            rows = joined[joined["part"] == part]
            off = rows["largest_error_percent"].max()
            claims[key] = Answer(f"a line is off by {off:.2g} % at most", holds(off < LINEAR_PERCENT))
    return Findings(joined, panels, claims, ["Lines are least squares through the measured parts of one rank's peak."])


# --- Fig. 9 -----------------------------------------------------------------------------------------------------------


def _predictions(scale: Scale, folders: Folders) -> Findings:
    tables, panels, claims = [], [], {}
    for model, name, folder in _each(scale, folders):
        measured = _measured(folder)
        largest = largest_clusters(measured, 1)[0]
        measured = measured[measured["num_nodes"] == largest].sort_values("global_batch")
        batch, steps = list(measured["global_batch"]), measured["train_s"] / measured["measured_step_time_s"]
        fits = {"full": read_json(folder.fit), "partial": partial_fit(folder)}
        predictions = {f"{search}_s": chosen_fit(fit).predict(measured) * steps for search, fit in fits.items()}
        columns = {"measured_s": measured["train_s"], **predictions}
        table = measured[["num_nodes", "batch_per_rank", "global_batch"]].assign(model=name, **columns)
        series = [Series("measured", batch, list(table["measured_s"]), colour=0)]
        for colour, search in ((1, "full"), (2, "partial")):
            series.append(Series(f"{search} search", batch, list(table[f"{search}_s"]), "broken", colour))
        knee = find_knee(measured.assign(train_time_s=measured["train_s"]).reset_index(drop=True))[1]["global_batch"]
        chosen = read_json(folder.selection)["global_batch"]
        marks = [(float(knee), "knee")] if knee in batch else []
        cluster = count(largest, "node")
        panels.append(Panel(f"{name}, {cluster}", "global batch", "training time", series, "batch", "seconds",
                            marks=marks))  # fmt: skip
        tables.append(table.assign(knee=knee, chosen=chosen, paper_knee=published.KNEE[model]))
        verdict = elsewhere(knee, published.KNEE[model], largest=max(batch))
        claims[f"knee-{model}"] = Answer(f"{knee:g} ({cluster})", verdict)
    return Findings(
        _joined(tables),
        panels,
        claims,
        [
            "Measured is the step time measured by full search times the steps of the training; predictions are the "
            "fitted form's own, without what is measured nearby.",
            "The knee is that of the measured times above: the batch from which a doubling saves less than a tenth, or "
            "Kneedle's where both agree. What is chosen is the knee over all clusters (rule in selection.json).",
        ],
    )


def partial_fit(run: RunFolder) -> dict[str, Any]:
    """What fit.json would hold if partial search had measured, of the points of a run with full search."""
    settings, fit = read_settings(run), read_json(run.fit)
    infeasible, failed = (
        {Candidate.from_name(name, settings.cluster.ranks_per_node) for name in fit[key]}
        for key in ("infeasible", "failed")
    )
    corners = next_round(SearchMode.partial, settings.grid_candidates(), (), infeasible, failed).candidates
    wanted = [point for point in fit["points"] if Candidate.from_record(point) in corners]
    return {**fit, "points": wanted, **fitted(settings, wanted, infeasible)}


# --- Fig. 10 ----------------------------------------------------------------------------------------------------------

_BY_MEMORY = ("objective=cost", "pricing=memory")


def _by_memory(scale: Scale) -> list[Run]:
    return [scale.profile(model, *_BY_MEMORY) for model, _ in published.MODELS.items()]


def _memory_prices(scale: Scale, folders: Folders) -> Findings:
    tables, panels, claims = [], [], {}
    for model, name, folder in _each(scale, folders, *_BY_MEMORY):
        table = candidates(folder)
        table = table[table["feasible"] & table["cost"].notna()]
        series = []
        for colour, nodes in enumerate(sorted(table["num_nodes"].unique())):
            rows = table[table["num_nodes"] == nodes].sort_values("global_batch")
            cluster = count(nodes, "node")
            series.append(Series(cluster, list(rows["global_batch"]), list(rows["cost"]), colour=colour))
        panels.append(Panel(name, "global batch", "cost ($)", series, "batch", "log"))
        chosen = read_json(folder.selection)["global_batch"]
        columns = ["num_nodes", "batch_per_rank", "global_batch", "cost", "memory_gib"]
        tables.append(table[columns].assign(model=name, chosen=chosen))
        largest = table[table["num_nodes"] == table["num_nodes"].max()]
        best = largest.sort_values("cost").iloc[0]
        at = best["global_batch"]
        verdict = elsewhere(at, published.CHEAPEST_BY_MEMORY[model], largest=largest["global_batch"].max())
        claims[f"memory-price-{model}"] = Answer(f"{at:g} ({best['num_nodes']:g} nodes)", verdict)
    notes = ["$0.15 for an hour and GiB of the memory in use, measured or else predicted, over all ranks."]
    return Findings(_joined(tables), panels, claims, notes)


# --- Fig. 11 ----------------------------------------------------------------------------------------------------------


def _errors(scale: Scale, folders: Folders) -> Findings:
    rows, claims = [], {}
    keys = ["num_nodes", "batch_per_rank"]
    for _, name, folder in _each(scale, folders):
        full, partial, measured = read_json(folder.fit), partial_fit(folder), _measured(folder)
        seen = pd.MultiIndex.from_frame(pd.DataFrame(partial["points"])[keys])
        unseen = measured[~pd.MultiIndex.from_frame(measured[keys].astype(int)).isin(seen)]
        for search, fit, judged in (("full", full, measured), ("partial", partial, unseen)):
            for form, words in ((fit["step_time_form"], ""), ("additive", ", additive form")):
                step_s = StepTimeFit.from_dict(fit["step_time"][form]).predict(judged)
                rows.append(_row(name, f"time, {search} search{words}", step_s, judged["measured_step_time_s"]))
        settings = read_settings(folder)
        memory = predicted(settings, partial, prices_of(settings)).merge(
            points(folder), on=keys, suffixes=("", "_seen")
        )
        rows.append(_row(name, "memory, partial search", memory["memory_gib"], memory["memory_gib_seen"]))
    table = pd.DataFrame(rows, columns=["model", "what", "points", "median_percent", "p90_percent", "largest_percent"])
    named = {
        "full-error": ("time, full search", published.FULL_ERROR_PERCENT),
        "partial-error": ("time, partial search", published.PARTIAL_ERROR_PERCENT),
        "memory-error": ("memory, partial search", published.MEMORY_ERROR_PERCENT),
    }
    panels = []
    for key, (what, said) in named.items():
        medians = table[(table["what"] == what) & table["median_percent"].notna()]
        if len(medians):
            low, high = medians["median_percent"].min(), medians["median_percent"].max()
            ends = dict.fromkeys(f"{end:.2g}" for end in (low, high))
            claims[key] = Answer(f"{' to '.join(ends)} %", against(high, said))
            bars = [
                Series(words, list(range(len(medians))), list(medians[f"{words}_percent"]), "bars", colour)
                for colour, words in enumerate(("median", "p90"))
            ]
            panels.append(Panel(what, "", "error (%)", bars, x_names=list(medians["model"])))
    return Findings(
        table,
        panels,
        claims,
        [
            "Full search is judged on the points that it was fitted to, as in the paper; partial search on those that "
            "it would not measure. Memory: predicted by partial search, on all points.",
            "The default form of the step time lets communication hide behind computation; the additive one is the "
            "paper's Eq. (2).",
        ],
    )


def _row(name: str, what: str, told: object, measured: object) -> tuple[str, str, int, float, float, float]:
    off = 100 * np.abs(np.asarray(told, dtype=float) / np.asarray(measured, dtype=float) - 1)
    if not len(off):
        return name, what, 0, math.nan, math.nan, math.nan
    return name, what, len(off), float(np.median(off)), float(np.quantile(off, 0.9)), float(off.max())


# --- the headline -----------------------------------------------------------------------------------------------------


def _speedups(scale: Scale, folders: Folders) -> Findings:
    rows, claims = [], {}
    for model, name, folder in _each(scale, folders):
        table, chosen = _measured(folder), read_json(folder.selection)
        largest = table[table["num_nodes"] == table["num_nodes"].max()].sort_values("global_batch")
        naive, slowest_s, fastest_s = largest.iloc[0], table["train_s"].max(), table["train_s"].min()
        at = (table["num_nodes"] == chosen["num_nodes"]) & (table["batch_per_rank"] == chosen["batch_per_rank"])
        knee_s = float(table.loc[at, "train_s"].iloc[0]) if at.any() else float(chosen["predicted"]["train_time_s"])
        rows.append(
            {
                "model": name,
                "chosen": f"{chosen['num_nodes']} x {chosen['batch_per_rank']}",
                "naive": f"{naive['num_nodes']:g} x {naive['batch_per_rank']:g}",
                "speedup_of_knee": naive["train_s"] / knee_s,
                "speedup_of_fastest": naive["train_s"] / fastest_s,
                "knee_against_slowest": slowest_s / knee_s,
                "paper": published.SPEEDUP[model],
            }
        )
        times = float(f"{naive['train_s'] / fastest_s:.2g}")  # two digits
        claims[f"speedup-{model}"] = Answer(f"{times:g}x", speedup(times, model))
    bars = [
        Series(words, list(range(len(rows))), [float(str(row[column])) for row in rows], "bars", colour)
        for colour, (words, column) in enumerate(
            (("knee", "speedup_of_knee"), ("fastest", "speedup_of_fastest"), ("paper, at most", "paper"))
        )
    ]
    panel = Panel("against the smallest batch", "", "times faster", bars, x_names=[str(row["model"]) for row in rows])
    return Findings(
        pd.DataFrame(rows),
        [panel],
        claims,
        [
            "The paper does not say which configuration is the naive one; here it is the smallest batch on the largest "
            "cluster, the left end of Fig. 9. The claim is set beside the fastest.",
        ],
    )


RESULTS = [
    Result("fig01", "Fig. 1: epoch time against global batch, on the two largest clusters", _full, _epoch_times),
    Result("fig04", "Fig. 4: memory of activations and of a batch against the batch", _full, _memory_parts),
    Result("fig09", "Fig. 9: training time against global batch, measured and predicted", _full,
            _predictions),
    Result("fig10", "Fig. 10: cost of the training where GPU memory is paid for", _by_memory, _memory_prices),
    Result("fig11", "Fig. 11: errors of predicted memory and time", _full, _errors),
    Result("headline", "Section VII: how much faster the chosen configuration is than a naive one", _full, _speedups),
]  # fmt: skip
