"""How well step times are predicted that the fit has not seen, and how good the decisions are that follow.

    python -m tests.benchmarks.predictions --traces FOLDER

Data sets are the CSV files of the Sia artifact (SOSP'23) in FOLDER, `<model>-{scalability,placements}-aws.csv`, split
by GPUs per node and by whether one node belongs to the grid; the records in tests/data: points of whole runs, and
tables of step times, a source for each model; and made-up trainings (`synthetic_steps`). Fits see

    corners     what search=partial measures
    adaptive    what search=adaptive measures for each objective; predictions of the overlap form corrected nearby
    corners+2   also the middle batch of the largest and of the middle cluster: six points, or eight from one node on
    all         every point, and the errors are of the same points
    half        at most half the largest number of nodes, up to 8; the errors are of the points on that
    left out    nine tenths of the configurations; the errors are of the others, ten times

Errors are |predicted - measured| / measured over the points not in the fit. Regret is the measured training time of the
configuration that the predictions choose over that of the one that the measurements choose, less 1; for cost, node-time
in the place of time; for the knee its size, since a knee too far up the curve is faster and as wrong. But for adaptive,
regrets are of the form alone: the command chooses by predictions that what was measured corrects. Over all, each source
counts alike: means over its data sets, then over sources. Variants of the overlap form are judged by leaving out each
source in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tests.benchmarks import synthetic_steps
from tests.benchmarks.adaptdl import fit_adaptdl
from tula_hpc.candidates import Candidate
from tula_hpc.models import step_forms, step_time
from tula_hpc.models.adaptive import next_points
from tula_hpc.models.posterior import posterior
from tula_hpc.models.pricing import NodeHourPrice
from tula_hpc.models.search import Round, next_round
from tula_hpc.models.selection import candidate_table, select
from tula_hpc.models.step_forms import Array, Collective
from tula_hpc.models.step_time import StepTimeOutcome, fit_step_time
from tula_hpc.runs import read_json

KEYS = ["num_nodes", "gpus_per_node", "batch_per_rank"]
TRAIN_SAMPLES = 1_281_167
TOLERANCE = 0.02
MODES = ("corners", "corners+2", "all", "half", "left out")
OBJECTIVES = ("time", "cost", "knee")
NUMBERS = ["median", "p90", "max", *OBJECTIVES]
RECORDS = Path(__file__).parents[1] / "data"

Predict = Callable[[pd.DataFrame], Array]
Fit = Callable[[pd.DataFrame], Predict]


@dataclass(frozen=True)
class DataSet:
    """Measured step times of one application on one kind of machine."""

    source: str
    """What was measured; data sets of one source are left out together."""
    name: str
    """Which part of it."""
    table: pd.DataFrame
    """One row per configuration: KEYS, step_time_s, sync_time_s and, where known, compute_time_s."""


def data_sets(traces: Path | None) -> Iterator[DataSet]:
    """The traces by model and GPUs per node, then the records."""
    models = sorted(path.name.split("-")[0] for path in traces.glob("*-scalability-aws.csv")) if traces else []
    for model in models:
        table = read_trace(traces, model)
        several = table.loc[table["num_nodes"] > 1]
        for gpus in (1, 2, 4):
            yield DataSet(model, f"g={gpus}, N>=1", table.loc[table["gpus_per_node"] == gpus])
            yield DataSet(model, f"g={gpus}, N>=2", several.loc[several["gpus_per_node"] == gpus])
        yield DataSet(model, "g=1..4, N>=1", table)
    for fit in sorted(RECORDS.glob("*/fit.json")):
        table = pd.DataFrame(read_json(fit)["points"])
        yield from _by_fewest(fit.parent.name, table)
    for record in sorted(RECORDS.glob("step-times/*.csv")):
        for model, rows in pd.read_csv(record).groupby("model"):
            source = f"{record.stem}-{model}"
            yield from _by_fewest(source, rows.reset_index(drop=True))
            if rows["gpus_per_node"].nunique() > 1:
                yield DataSet(source, "one GPU per node", rows.loc[rows["gpus_per_node"] == 1].reset_index(drop=True))
    for name, table in synthetic_steps.tables().items():
        yield from _by_fewest(f"synthetic-{name}", table)


def _by_fewest(source: str, table: pd.DataFrame) -> Iterator[DataSet]:
    """From one node on and from two, where that leaves two numbers of nodes."""
    for fewest in (1, 2):
        rows = table.loc[table["num_nodes"] >= fewest]
        if rows["num_nodes"].nunique() > 1:
            yield DataSet(source, f"N>={fewest}", rows)


def read_trace(folder: Path, model: str) -> pd.DataFrame:
    """The configurations of a model with as many GPUs on each node, repeated measurements averaged."""
    placements = pd.read_csv(folder / f"{model}-placements-aws.csv", dtype={"placement": str})
    placements = placements.loc[[len(set(digits)) == 1 for digits in placements["placement"]]]
    nodes, gpus = placements["placement"].str.len(), placements["placement"].str[0].astype(int)
    placements = placements.assign(num_nodes=nodes, gpus_per_node=gpus)
    scaling = pd.read_csv(folder / f"{model}-scalability-aws.csv")
    scaling = scaling.loc[scaling["num_replicas"] % scaling["num_nodes"] == 0]
    scaling = scaling.assign(gpus_per_node=scaling["num_replicas"] // scaling["num_nodes"])
    names = {"local_bsz": "batch_per_rank", "step_time": "step_time_s", "sync_time": "sync_time_s"}
    table = pd.concat([placements, scaling]).rename(columns=names)[[*KEYS, "step_time_s", "sync_time_s"]]
    return table.groupby(KEYS, as_index=False).mean()


def measured_by(mode: str, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `table` that a search measures."""
    if mode == "all":
        return table
    grid = {Candidate(int(n), int(b), int(g)) for n, g, b in table[KEYS].to_numpy()}
    chosen = set(next_round("partial", sorted(grid), set(), set()).candidates)
    if mode == "corners+2":
        clusters = sorted({(c.num_nodes, c.gpus_per_node) for c in grid})
        for cluster in (clusters[-1], clusters[len(clusters) // 2]):
            batches = [c for c in sorted(grid) if (c.num_nodes, c.gpus_per_node) == cluster]
            chosen.add(batches[len(batches) // 2])
    wanted = {(c.num_nodes, c.gpus_per_node, c.batch_per_rank) for c in chosen}
    return table.loc[[tuple(row) in wanted for row in table[KEYS].to_numpy()]]


@dataclass(frozen=True)
class Searched:
    """How a search for one objective ended on measured data."""

    seen: NDArray[np.bool_]
    """Which rows were measured."""
    table: pd.DataFrame
    """The candidate table at the end, in the order of the data's rows."""
    rounds: int


def search_adaptively(table: pd.DataFrame, objective: str) -> Searched:
    """Replays search=adaptive: what it asks for is looked up in `table`."""
    rows = table.reset_index(drop=True)
    places = {Candidate(int(n), int(b), int(g)): i for i, (n, g, b) in enumerate(rows[KEYS].to_numpy())}
    grid, seen = sorted(places), np.zeros(len(rows), dtype=bool)

    def predicted() -> tuple[pd.DataFrame, Array]:
        measured = rows.loc[seen]
        fit = fit_step_time(measured, "overlap")
        found = candidate_table(grid, fit, None, NodeHourPrice(1.0), TRAIN_SAMPLES, 1, None, 1.0, [], measured)
        return found, posterior(fit, measured, found).covariance

    def decide(unmeasured: set[Candidate]) -> Round:
        return next_points(*predicted(), unmeasured, objective, TOLERANCE)

    rounds = 0
    while now := next_round(
        "adaptive", grid, {c for c, i in places.items() if seen[i]}, set(), decide=decide
    ).candidates:
        seen[[places[candidate] for candidate in now]] = True
        rounds += 1
    found, _ = predicted()
    return Searched(seen, found.iloc[np.argsort([places[c] for c in grid])].reset_index(drop=True), rounds)


def adaptive_scores(sets: list[DataSet]) -> pd.DataFrame:
    """One row per data set and objective: errors of the unmeasured points, the regret of the choice, and the share of
    full search in points and in node-time (nodes x GPUs per node x seconds of a step); percent."""
    found = []
    for data in sets:
        step_s = data.table["step_time_s"].to_numpy()
        node_time = step_s * (data.table["num_nodes"] * data.table["gpus_per_node"]).to_numpy()
        for objective in OBJECTIVES:
            search = search_adaptively(data.table, objective)
            truth = search.table.assign(
                train_time_s=search.table["train_time_s"] / search.table["step_time_s"] * step_s
            )
            truth["cost"] = truth["train_time_s"] * truth["num_nodes"]
            ours, best = (select(rows, objective, 0.0).candidate for rows in (search.table, truth))
            metric = truth.set_index(KEYS)["cost" if objective == "cost" else "train_time_s"]
            key = [(c.num_nodes, c.gpus_per_node, c.batch_per_rank) for c in (ours, best)]
            errors = np.abs(search.table["step_time_s"].to_numpy() / step_s - 1)[~search.seen]
            shares = [search.seen.mean(), node_time[search.seen].sum() / node_time.sum()]
            ends = [np.median(errors), np.quantile(errors, 0.9)] if len(errors) else [0.0, 0.0]
            numbers = 100 * np.array([*ends, abs(metric[key[0]] / metric[key[1]] - 1), *shares])
            found.append((data.source, data.name, objective, *numbers, search.seen.sum(), search.rounds))
    names = ["median", "p90", "regret", "points_share", "cost_share", "points", "rounds"]
    return pd.DataFrame(found, columns=["source", "name", "objective", *names])


def regrets(predict: Predict, table: pd.DataFrame) -> tuple[float, ...]:
    """Regret of the choice by each of OBJECTIVES."""
    measured = table.set_index(KEYS)["step_time_s"]
    truth = _choices(lambda rows: measured.loc[list(rows[KEYS].itertuples(index=False, name=None))].to_numpy(), table)
    chosen = _choices(predict, table)

    def value(c: Candidate, objective: str) -> float:
        step_time_s = float(measured[(c.num_nodes, c.gpus_per_node, c.batch_per_rank)])
        return c.steps_per_epoch(TRAIN_SAMPLES) * step_time_s * (c.num_nodes if objective == "cost" else 1)

    pairs = zip(chosen, truth, OBJECTIVES, strict=True)
    return tuple(abs(value(ours, objective) / value(best, objective) - 1) for ours, best, objective in pairs)


def _choices(predict: Predict, table: pd.DataFrame) -> list[Candidate]:
    fit = SimpleNamespace(
        predict=predict,
        interval=lambda rows: (predict(rows), predict(rows)),
        extrapolates=lambda rows: np.zeros(len(rows), dtype=bool),
        outcome=StepTimeOutcome.OK,
    )
    grid = [Candidate(int(n), int(b), int(g)) for n, g, b in table[KEYS].to_numpy()]
    nothing = table[[*KEYS, "step_time_s"]].iloc[:0]
    rows = candidate_table(grid, fit, None, NodeHourPrice(1.0), TRAIN_SAMPLES, 1, None, 1.0, [], nothing)  # type: ignore[arg-type]
    return [select(rows, objective, 0.0).candidate for objective in OBJECTIVES]


def proportional(table: pd.DataFrame) -> Predict:
    """The paper's terms read strictly: beta b + s (1 - 1/R), nothing constant."""
    ranks = table["num_nodes"] * table["gpus_per_node"]
    terms = np.stack([table["batch_per_rank"], 1 - 1 / ranks], axis=1)
    beta, s = np.linalg.lstsq(terms, table["step_time_s"].to_numpy(), rcond=None)[0]
    return lambda rows: (
        beta * rows["batch_per_rank"].to_numpy() + s * (1 - 1 / (rows["num_nodes"] * rows["gpus_per_node"]).to_numpy())
    )


def adaptdl(table: pd.DataFrame) -> Predict:
    """AdaptDL's form and fit as published."""
    return fit_adaptdl(step_time._clean(table)[0])


def overlap(table: pd.DataFrame) -> Predict:
    """The default form."""
    return fit_step_time(table, "overlap").predict


def forms() -> dict[str, Fit]:
    """Name -> how it is fitted."""
    additive = {
        f"additive, {c.value}": partial(lambda c, table: fit_step_time(table, "additive", c).predict, c)
        for c in Collective
    }
    return {"proportional": proportional, **additive, "AdaptDL": adaptdl, "overlap": overlap}


def variants() -> dict[str, Fit]:
    """What could stand in the place of the default, as changes of `step_forms`."""
    told_apart = step_forms._told_apart

    def intercept(two_batches_only: bool, runs: step_forms.Runs) -> tuple[list[int], tuple[str, ...], tuple[str, ...]]:
        free, names, notes = told_apart(runs)
        if step_forms.T_FLOOR in free and (len(set(runs.batch)) == 2 or not two_batches_only):
            free = sorted({*free, step_forms.ALPHA} - {step_forms.T_FLOOR})
        return free, names, notes

    def usual(before_sync: float, after_backward: float, *spreads: float) -> dict[str, object]:
        shares = step_forms.BEFORE_SYNC, step_forms.AFTER_BACKWARD
        typical = dict(zip(shares, (before_sync, after_backward), strict=True))
        return {"TYPICAL_SHARES": typical, "SHARE_SPREADS": dict(zip(shares, spreads, strict=True))}

    def squared(errors: Array) -> tuple[float, Array]:
        return float(np.sum((errors / step_forms.STEP_NOISE) ** 2)), 2 * errors / step_forms.STEP_NOISE**2

    before, after = step_forms.TYPICAL_SHARES.values()
    spreads = tuple(step_forms.SHARE_SPREADS.values())
    changes = {
        "as it is": {"SHARPNESS": step_forms.SHARPNESS},
        "sharpness 4": {"SHARPNESS": 4.0},
        "sharpness 10": {"SHARPNESS": 10.0},
        "before_sync 0.25 is usual": usual(0.25, after, *spreads),
        "before_sync 0.45 is usual": usual(0.45, after, *spreads),
        "after_backward 0.05 is usual": usual(before, 0.05, *spreads),
        "after_backward 0.12 is usual": usual(before, 0.12, *spreads),
        "after_backward 0.2 is usual": usual(before, 0.2, *spreads),
        "hides all but the larger": usual(1e-2, 1e-6, 1e-9, 1e-9),
        "hides nothing": usual(1 - 1e-6, 0.5, 1e-9, 1e-9),
        "half the pull on the shares": usual(before, after, *(2 * each for each in spreads)),
        "twice the pull on the shares": usual(before, after, *(each / 2 for each in spreads)),
        "no pull on the shares": usual(before, after, 1e6, 1e6),
        "all-reduce not used": {"ALLREDUCE_WEIGHT": 0.0},
        "all-reduce a third as heavy": {"ALLREDUCE_WEIGHT": 1.0},
        "all-reduce never set aside": {"_bounded_misfit": step_forms._misfit},
        "after_backward of few gradients as usual": {"BUCKET_MIB": -step_forms.FIRST_BUCKET_MIB},
        "floor with power 1 (none)": {"_told_apart": partial(intercept, False)},
        "floor with power 2": {"FLOOR_POWER": 2.0},
        "floor with power 4": {"FLOOR_POWER": 4.0},
        "intercept from two batches": {"_told_apart": partial(intercept, True)},
        "squared errors": {"_misfit": squared},
        "noise 5 %": {"STEP_NOISE": 0.05},
        "no growth with N but the ring's": {"_growth": np.zeros_like},
        "no ring": {"_ring": lambda ranks: np.ones_like(ranks)},
        "growth with log N": {"_growth": lambda nodes: np.log2(np.maximum(nodes, 2) / 2)},
    }

    def fitted(change: dict[str, object], table: pd.DataFrame) -> Predict:
        def predict(rows: pd.DataFrame) -> Array:
            with mock.patch.multiple(step_forms, **change):  # type: ignore[arg-type]
                return fit.predict(rows)

        no_interval = mock.patch.object(step_time, "_left_out_errors", return_value=())  # most of the time of a fit
        with mock.patch.multiple(step_forms, **change), no_interval:  # type: ignore[arg-type]
            fit = fit_step_time(table, "overlap")
        return predict

    return {name: partial(fitted, change) for name, change in changes.items()}


def folds(mode: str, table: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
    """Pairs of the rows that a fit sees and the rows that it is judged by."""
    if mode == "left out":
        fold = np.arange(len(table)) * 7 % 10
        yield from ((table.loc[fold != each], table.loc[fold == each]) for each in range(10))
    elif mode == "half":
        largest = max(n for n in table["num_nodes"] if n <= 8)
        seen = table.loc[table["num_nodes"] <= largest // 2]
        if (seen["num_nodes"] > 1).any():
            yield seen, table.loc[table["num_nodes"] == largest]
    else:
        seen = measured_by(mode, table)
        yield seen, table if mode == "all" else table.drop(index=seen.index)


def scores(fit: Fit, sets: list[DataSet], modes: tuple[str, ...], with_regret: bool = True) -> pd.DataFrame:
    """One row per data set and mode: median, 90th percentile and largest error and the regrets, in percent."""
    rows = []
    for data in sets:
        for mode in modes:
            pairs = [(fit(seen), seen, judged) for seen, judged in folds(mode, data.table)]
            if not pairs:
                continue
            errors = np.concatenate(
                [np.abs(p(judged) / judged["step_time_s"].to_numpy() - 1) for p, _, judged in pairs]
            )
            by = regrets(pairs[0][0], data.table) if with_regret and mode not in ("half", "left out") else [np.nan] * 3
            numbers = 100 * np.array([np.median(errors), np.quantile(errors, 0.9), errors.max(), *by])
            rows.append((data.source, data.name, mode, *numbers))
    return pd.DataFrame(rows, columns=["source", "name", "mode", *NUMBERS])


def over_all(found: pd.DataFrame) -> pd.DataFrame:
    """Means over the data sets of a source, then over sources."""
    by_source = found.groupby(["mode", "source"], sort=False)[NUMBERS].mean()
    return by_source.groupby("mode", sort=False).mean()


def coverage(model: str, sets: list[DataSet]) -> pd.DataFrame:
    """Share of unseen runs inside the 90 % interval and its mean half-width, by mode; percent."""
    rows = []
    for data in sets:
        for mode in ("corners", "corners+2", "left out"):
            held, half_width = [], []
            for seen, judged in folds(mode, data.table):
                low, high = fit_step_time(seen, model).interval(judged)
                held += list((judged["step_time_s"] >= low) & (judged["step_time_s"] <= high))
                half_width += list(np.log(high / low) / 2)
            rows.append((data.source, mode, 100 * np.mean(held), 100 * np.mean(half_width)))
    table = pd.DataFrame(rows, columns=["source", "mode", "inside", "half_width"])
    by_set = table.groupby("mode", sort=False)["inside"].agg(["min", "max"])
    mean = (
        table.groupby(["mode", "source"], sort=False)[["inside", "half_width"]]
        .mean()
        .groupby("mode", sort=False)
        .mean()
    )
    return mean.join(by_set)


def knee_under_noise(sets: list[DataSet], noise: float = 0.05, draws: int = 40) -> pd.DataFrame:
    """Regret of the knee where every measured time is off by itself, percent: mean and largest of the draws."""
    random, rows = np.random.default_rng(0), []
    for data in sets:
        measured = data.table.set_index(KEYS)["step_time_s"]

        def noisy(table: pd.DataFrame, measured: pd.Series = measured) -> Array:
            times = measured.loc[list(table[KEYS].itertuples(index=False, name=None))].to_numpy()
            return times * np.exp(noise * random.standard_normal(len(table)))

        found = [100 * regrets(noisy, data.table)[OBJECTIVES.index("knee")] for _ in range(draws)]
        rows.append((data.source, data.name, np.mean(found), max(found)))
    return pd.DataFrame(rows, columns=["source", "name", "mean", "max"])


def against_targets(found: pd.DataFrame, covered: pd.DataFrame, adaptive: pd.DataFrame) -> pd.DataFrame:
    """What is reached of each target, from scores, coverage and adaptive search of one form; means over sources."""

    def on_gpus(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.loc[rows["source"].str.startswith(("h100", "h200"))]

    gpu = on_gpus(found)
    numbers = ["median", "cost_share", "regret"]
    searched = on_gpus(adaptive).groupby(["objective", "source"])[numbers].mean().groupby("objective").mean()
    one_gpu = found.loc[found["name"].isin(["g=1, N>=1", "g=1, N>=2"])]
    none_beyond = gpu.loc[gpu["mode"].isin(["corners", "all"]), ["mode", "max"]].groupby("mode")["max"].max()
    full, partial_search = (over_all(gpu).loc[mode, "median"] for mode in ("all", "corners"))
    traces = over_all(one_gpu).loc["corners"]
    rows = [
        ("H100 and H200, full search: median error", full, "<= 1"),
        ("H100 and H200, partial search: median error", partial_search, "<= 2.5"),
        ("H100 and H200, full search: largest error", none_beyond["all"], "<= 10"),
        ("H100 and H200, partial search: largest error", none_beyond["corners"], "<= 10"),
        ("traces, one GPU per node, from four corners: median", traces["median"], "<= 4.5"),
        ("traces, one GPU per node, from four corners: p90", traces["p90"], "<= 12"),
        ("H100, at twice the nodes measured: median error", over_all(gpu).loc["half", "median"], "<= 5"),
        *(
            (f"H100 and H200, adaptive for {objective}: {words}", searched.loc[objective, number], target)
            for objective in OBJECTIVES
            for number, words, target in (
                ("median", "median error", "<= 1.5"),
                ("cost_share", "share of full search's cost", "<= 40"),
                ("regret", "regret", "<= 2"),
            )
        ),
        ("90 % interval holds: from corners", covered.loc["corners", "inside"], "85-95"),
        ("90 % interval holds: from corners+2", covered.loc["corners+2", "inside"], "85-95"),
        ("90 % interval holds: left out", covered.loc["left out", "inside"], "85-95"),
        *(
            (f"regret of {objective}, {mode}", over_all(found).loc[mode, objective], "<= 2")
            for objective in OBJECTIVES
            for mode in ("corners", "all")
        ),
        ("fit to 200 points with its left-out errors, ms", 1e3 * fit_seconds(), "< 50"),
    ]
    return pd.DataFrame(rows, columns=["% unless said", "reached", "target"]).set_index("% unless said")


def fit_seconds(points: int = 200, times: int = 5) -> float:
    """Median seconds of a fit to a noisy grid of ten numbers of nodes."""
    table = pd.DataFrame([(n, 1, 8 * (b + 1)) for n in range(1, 11) for b in range(points // 10)], columns=KEYS)
    compute = 0.02 + 0.001 * table["batch_per_rank"]
    sync = np.where(table["num_nodes"] > 1, 0.05 + 0.01 * table["num_nodes"], 0.0)
    noise = np.exp(0.03 * np.random.default_rng(0).standard_normal((2, len(table))))
    step_s = (compute + sync - np.minimum(0.65 * compute, 0.9 * sync)) * noise[0]
    table = table.assign(step_time_s=step_s, compute_time_s=compute * noise[1])
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        fit_step_time(table)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def chosen_without(source: str, judged: dict[str, pd.DataFrame]) -> str:
    """The variant with the least sum of medians and a third of p90 over the modes, on all sources but one."""

    def loss(found: pd.DataFrame) -> float:
        means = over_all(found.loc[found["source"] != source])
        return float((means["median"] + means["p90"] / 3).sum())

    return min(judged, key=lambda name: loss(judged[name]))


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description="How well unseen step times are predicted")
    parser.add_argument("--traces", type=Path, help="folder of the CSV files of the Sia artifact")
    sets = list(data_sets(parser.parse_args().traces))
    pd.set_option(
        "display.width",
        120,
        "display.max_rows",
        200,
        "display.max_columns",
        20,
        "display.float_format",
        "{:.1f}".format,
    )
    scored = {name: scores(fit, sets, MODES) for name, fit in forms().items()}
    for name, found in scored.items():
        print(f"{name}: error %, regret % of time, cost and knee, over all", over_all(found), sep="\n", end="\n\n")
    wide = scored["overlap"].pivot(index=["source", "name"], columns="mode", values=NUMBERS)
    for number in NUMBERS:
        what = f"regret of {number}" if number in OBJECTIVES else f"{number} error"
        print(f"overlap, each data set: {what}, %", wide[number][list(MODES)], sep="\n", end="\n\n")
    print("regret of the knee with 5 % noise on each time, %", knee_under_noise(sets), sep="\n", end="\n\n")
    adaptive = adaptive_scores(sets)
    numbers = adaptive.columns[3:]
    by_source = adaptive.groupby(["objective", "source"], sort=False)[list(numbers)].mean()
    print("adaptive, overlap: error % of unmeasured points, regret %, share of full search %", by_source, sep="\n")
    print(
        by_source.groupby("objective", sort=False).mean(),
        adaptive.set_index(["source", "name"]),
        sep="\n\n",
        end="\n\n",
    )
    judged = {
        name: scores(fit, sets, ("corners", "corners+2", "all", "half"), with_regret=False)
        for name, fit in variants().items()
    }
    summary = pd.concat(
        {name: over_all(found)[["median", "p90"]].unstack() for name, found in judged.items()}, axis=1
    ).T
    print("variants of overlap: error % over all", summary, sep="\n", end="\n\n")
    for source in dict.fromkeys(data.source for data in sets):
        print(f"best without {source}: {chosen_without(source, judged)}")
    covered = {model: coverage(model, sets) for model in ("overlap", "additive")}
    for model, held in covered.items():
        print(f"\n{model}: unseen runs inside the 90 % interval, %", held, sep="\n")
    print("\ntargets", against_targets(scored["overlap"], covered["overlap"], adaptive), sep="\n")


if __name__ == "__main__":
    main()
