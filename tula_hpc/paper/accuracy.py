"""What needs trainings: accuracies, gradients on the way, static scaling, methods (Fig. 2, 5-8, Table I)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from tula_hpc.paper import published
from tula_hpc.paper.claims import ALIKE, CORRELATED, Answer, holds, or_as_printed
from tula_hpc.paper.drawing import Panel, Series
from tula_hpc.paper.findings import Findings, Folders, Result, gradients, metrics, result
from tula_hpc.paper.scales import Run, Scale

EARLY_SHARE = 0.1
"""Of a training's steps; what the paper calls early iterations."""
SEVERAL_STEPS = 200
"""Points that a curve over steps is thinned to."""
BANDWIDTH = 0.1
"""Of the kernels of a density of scales, in powers of 2."""


# --- Fig. 2 -----------------------------------------------------------------------------------------------------------


def _plain(scale: Scale) -> list[Run]:
    return [scale.training(m, batch, "lbt", seed)
            for m in published.MODELS for batch in scale.batches[m] for seed in range(scale.seeds)]  # fmt: skip


def _against_batch(scale: Scale, folders: Folders) -> Findings:
    rows: list[dict[str, Any]] = []
    for model, name in published.MODELS.items():
        for batch in scale.batches[model]:
            ends = _ends(folders, [scale.training(model, batch, "lbt", seed) for seed in range(scale.seeds)])
            if len(ends):
                paper = published.ACCURACY_AGAINST_BATCH.get(model, {}).get(batch)
                rows.append({"model": name, "global_batch": batch, **_means(ends), "paper_percent": paper})
    table = pd.DataFrame(rows)
    panels = [
        Panel(str(name), "global batch", "test accuracy, top-1 (%)", [
            Series("test", list(r["global_batch"]), list(r["test_top1"]), colour=0),
            Series("train", list(r["global_batch"]), list(r["train_top1"]), "broken", colour=1),
        ], "batch")
        for name, r in table.groupby("model", sort=False)
    ] if rows else []  # fmt: skip
    alexnet = [row for row in rows if row["model"] == "AlexNet"]
    claims = {}
    if len(alexnet) > 1:
        first, last = alexnet[0], alexnet[-1]
        claims["gap"] = Answer(
            f"{first['test_top1']:.1f} % to {last['test_top1']:.1f} % top-1 (batch {first['global_batch']} to "
            f"{last['global_batch']})",
            holds(last["test_top1"] < first["test_top1"] - ALIKE),
        )
    return Findings(
        table,
        panels,
        claims,
        [
            "The learning rate is the same for every batch, as in the paper. Where train accuracy falls with test "
            "accuracy, fewer steps of the same size are the cause, not worse generalisation.",
        ],
    )


def _ends(folders: Folders, runs: list[Run]) -> pd.DataFrame:
    """How those trainings ended that did."""
    ended = [result(folders[run]) for run in runs if run in folders]
    return pd.DataFrame(ended)


def _means(ends: pd.DataFrame) -> dict[str, float]:
    """Means over seeds, and the spread of top-1."""
    spread = float(ends["test_top1"].std(ddof=1)) if len(ends) > 1 else float("nan")
    means = {key: float(ends[key].mean()) for key in ("test_top1", "test_top5", "train_top1")}
    return {**means, "test_top1_sd": spread, "seeds": len(ends)}


# --- Fig. 5 and 6 -----------------------------------------------------------------------------------------------------


def _norm_batches(scale: Scale) -> tuple[int, ...]:
    """Smallest and largest batch, and one between."""
    batches = scale.batches["resnet50"]
    return tuple(sorted({batches[0], batches[len(batches) // 2], batches[-1]}))


def _with_curvature(scale: Scale) -> Run:
    batch = scale.table1["vgg11"][0]
    return scale.training("vgg11", batch, "lbt", 0, f"training.curvature_samples={scale.curvature_samples}")


def _norm_runs(scale: Scale) -> list[Run]:
    return [*(scale.training("resnet50", batch) for batch in _norm_batches(scale)), _with_curvature(scale)]


def _norms(scale: Scale, folders: Folders) -> Findings:
    rows, claims, series = [], {}, []
    early: dict[int, float] = {}
    for colour, batch in enumerate(_norm_batches(scale)):
        run = folders.get(scale.training("resnet50", batch))
        if run is None:
            continue
        steps = gradients(run)
        seen = steps["samples"] / steps["samples"].max()
        early[batch] = float(steps.loc[seen <= EARLY_SHARE, "gradient_norm"].mean())
        rows.append({"model": "ResNet50", "global_batch": batch, "early_norm": early[batch],
                     "late_norm": float(steps.loc[seen > 1 - EARLY_SHARE, "gradient_norm"].mean())})  # fmt: skip
        thin = _thinned(steps)
        series.append(Series(f"batch {batch}", list(thin["samples"]), list(thin["gradient_norm"]), colour=colour))
    panels = [Panel("ResNet50", "samples", "gradient norm", series, y_scale="log")] if series else []
    if len(early) > 1 and np.isfinite([early[min(early)], early[max(early)]]).all():
        small, large = min(early), max(early)
        claims["small-batch-norms"] = Answer(
            f"{early[small] / early[large]:.2g}x as large (batch {small} against {large}, first {EARLY_SHARE:.0%})",
            holds(early[small] > early[large]),
        )
    run = folders.get(_with_curvature(scale))
    if run is not None:
        lines = metrics(run)
        norms = gradients(run).groupby("epoch")["gradient_norm"].mean()
        lines = lines[lines["epoch"].isin(norms.index)]
        x, norm = list(lines["epoch"]), [float(norms[epoch]) for epoch in lines["epoch"]]
        eigenvalue = list(lines["hessian_eigenvalue"])
        panels.append(Panel("VGG11", "epoch", "of its largest", [
            Series("Hessian's largest eigenvalue", x, _of_largest(eigenvalue), colour=0),
            Series("gradient norm", x, _of_largest(norm), colour=1),
        ]))  # fmt: skip
        together = _rank_correlation(eigenvalue, norm)
        if math.isfinite(together):
            words = f"rank correlation {together:.2f} over {len(x)} epochs"
            claims["hessian"] = Answer(words, holds(together >= CORRELATED))
        rows += [
            {"model": "VGG11", "epoch": e, "mean_norm": n, "hessian_eigenvalue": h}
            for e, n, h in zip(x, norm, eigenvalue, strict=True)
        ]
    return Findings(
        pd.DataFrame(rows),
        panels,
        claims,
        [f"The eigenvalue is that of the loss on {scale.curvature_samples} training samples, after each epoch."],
    )


def _variability_runs(scale: Scale) -> list[Run]:
    return [scale.training(model, scale.table1[model][0]) for model in ("resnet50", "vgg11")]


def _variability(scale: Scale, folders: Folders) -> Findings:
    rows, panels, correlations = [], [], {}
    for model in ("resnet50", "vgg11"):
        run, name = folders.get(scale.training(model, scale.table1[model][0])), published.MODELS[model]
        if run is None:
            continue
        lines, steps = metrics(run), gradients(run)
        delta = steps.groupby("epoch")["variability"].median().reindex(lines["epoch"])
        gain = lines["test_top1"].diff().abs()
        together = _rank_correlation(list(delta.iloc[1:]), list(gain.iloc[1:]))
        if math.isfinite(together):
            correlations[name] = together
        for epoch, accuracy, median in zip(lines["epoch"], lines["test_top1"], delta, strict=True):
            rows.append({"model": name, "epoch": epoch, "test_top1": accuracy, "median_variability": median})
        panels.append(Panel(name, "epoch", "test accuracy (%), 100 x variability", [
            Series("test accuracy", list(lines["epoch"]), list(lines["test_top1"]), colour=0),
            Series("variability, median of the epoch", list(lines["epoch"]), list(100 * delta), "broken", colour=1),
        ]))  # fmt: skip
    claims = {}
    if correlations:
        words = ", ".join(f"{together:.2f} ({name})" for name, together in correlations.items())
        claims["variability"] = Answer(
            f"rank correlation with the accuracy's change {words}", holds(min(correlations.values()) >= CORRELATED)
        )
    return Findings(pd.DataFrame(rows), panels, claims, ["Variability is Eq. (5), each step."])


def _thinned(steps: pd.DataFrame) -> pd.DataFrame:
    """Means of neighbouring steps, so that a curve can be read."""
    group = np.arange(len(steps)) * min(SEVERAL_STEPS, len(steps)) // len(steps)
    return steps.groupby(group)[["samples", "gradient_norm"]].mean()


def _of_largest(values: list[float]) -> list[float]:
    numbers = np.asarray(values, dtype=float)
    if not np.isfinite(numbers).any():  # of a training that diverged
        return [math.nan] * len(values)
    return list(numbers / np.nanmax(np.abs(numbers[np.isfinite(numbers)])))


def _rank_correlation(one: list[float], other: list[float]) -> float:
    """Spearman's, of the pairs that are known; nan for fewer than three."""
    pairs = pd.DataFrame({"one": one, "other": other}, dtype=float).dropna().rank()
    return float(pairs["one"].corr(pairs["other"])) if len(pairs) > 2 else float("nan")


# --- Fig. 7 and 8 -----------------------------------------------------------------------------------------------------


def _static(scale: Scale, model: str, factor: int, delta: float) -> Run:
    """Static scaling by a factor; a factor of 1 is plain training."""
    if factor == 1:
        return scale.training(model, scale.static_batches[model])
    more = (f"method.static_scale={factor}", f"method.delta_threshold={delta}")
    return scale.training(model, scale.static_batches[model], "static", 0, *more)


_FIG7 = (("resnet50", 0.5), ("alexnet", 0.5))
_FIG8 = (("resnet50", 0.8), ("vgg11", 0.2))
_ADAPTIVE = ("ags_paper", "ags")


def _static_runs(scale: Scale, shown: tuple[tuple[str, float], ...]) -> list[Run]:
    return [_static(scale, model, s, delta) for model, delta in shown for s in (1, *scale.static_scales)]


def _static_table(
    scale: Scale, folders: Folders, shown: tuple[tuple[str, float], ...]
) -> tuple[pd.DataFrame, list[Panel]]:
    """Accuracies and shares of scaled steps, and a panel of accuracy curves for each model."""
    rows, panels = [], []
    for model, delta in shown:
        name, series = published.MODELS[model], []
        for colour, s in enumerate((1, *scale.static_scales)):
            run = folders.get(_static(scale, model, s, delta))
            if run is None:
                continue
            lines, steps = metrics(run), gradients(run)
            scaled = float((steps["scaled"] > 0).mean())
            rows.append({"model": name, "delta": delta, "s": s, **_means(pd.DataFrame([result(run)])),
                         "scaled_steps_percent": 100 * scaled})  # fmt: skip
            series.append(Series(f"s = {s}", list(lines["epoch"]), list(lines["test_top1"]), colour=colour))
        title = f"{name} at {scale.static_batches[model]}, threshold {delta:g}"
        panels.append(Panel(title, "epoch", "test accuracy (%)", series))
    return pd.DataFrame(rows), panels


def _scaling_runs(scale: Scale) -> list[Run]:
    adaptive = [_adaptive(scale, model, method) for model, _ in _FIG7 for method in _ADAPTIVE]
    return [*_static_runs(scale, _FIG7), *adaptive]


def _adaptive(scale: Scale, model: str, method: str) -> Run:
    """A method that measures its scales, at the batch of the static ones."""
    return scale.training(model, scale.static_batches[model], method)


def _static_scaling(scale: Scale, folders: Folders) -> Findings:
    table, curves = _static_table(scale, folders, _FIG7)
    claims, panels = {}, []
    for (model, _), of_model in zip(_FIG7, curves, strict=True):
        rows = _of(table, model)
        plain, scaled = rows[rows["s"] == 1], rows[rows["s"] > 1]
        if len(plain) and len(scaled):
            better = scaled["s"][scaled["test_top1"] > plain["test_top1"].iloc[0]]
            which = f": s = {', '.join(map(str, better))}" if len(better) else ""
            as_said = list(better) == ([2] if model == "alexnet" else list(scaled["s"]))
            claims[f"static-{model}"] = Answer(f"{len(better)} of {len(scaled)}{which}", holds(as_said))
        panels += [of_model, _shares_scaled(published.MODELS[model], scaled), _densities(scale, folders, model)]
    return Findings(
        table,
        panels,
        claims,
        [
            "The paper draws kernel densities of the factor over iterations; a factor is 1 or s, so the share of the "
            "steps that were scaled says the same. Densities are drawn of the adaptive methods' scales, each the mean "
            "over a step's gradient elements.",
        ],
    )


def _shares_scaled(name: str, scaled: pd.DataFrame) -> Panel:
    """Which share of the steps was scaled, for each factor."""
    bars = Series("", list(range(len(scaled))), list(scaled["scaled_steps_percent"]), "bars")
    return Panel(name, "", "steps scaled (%)", [bars], x_names=[f"s = {s}" for s in scaled["s"]])


def _densities(scale: Scale, folders: Folders, model: str) -> Panel:
    """How often which scale was applied, of the methods that measure it."""
    series = []
    for colour, method in enumerate(_ADAPTIVE):
        run = folders.get(_adaptive(scale, model, method))
        if run is not None:
            scales = gradients(run)["scale"]
            places, density = _density(np.log2(scales[np.isfinite(scales) & (scales > 0)]))
            series.append(Series(method, list(2**places), list(density), colour=colour))
    return Panel(published.MODELS[model], "scale of a step", "density (per power of 2)", series, "log")


def _density(values: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Places and the kernel density of the values there, (SEVERAL_STEPS,) each; values may all be the same."""
    if values.empty:
        return np.empty(0), np.empty(0)
    places = np.linspace(values.min() - 0.5, values.max() + 0.5, SEVERAL_STEPS)
    kernels = np.exp(-0.5 * ((places[:, None] - values.to_numpy(dtype=float)) / BANDWIDTH) ** 2)
    return places, kernels.mean(axis=1) / (BANDWIDTH * np.sqrt(2 * np.pi))


def _of(table: pd.DataFrame, model: str) -> pd.DataFrame:
    columns = ["model", "s", "test_top1", "scaled_steps_percent"]
    return table[table["model"] == published.MODELS[model]] if len(table) else pd.DataFrame(columns=columns)


def _thresholds(scale: Scale, folders: Folders) -> Findings:
    table, panels = _static_table(scale, folders, _FIG8)
    claims, at_half = {}, _static_table(scale, folders, (("resnet50", 0.5),))[0]
    both = _of(table, "resnet50").merge(_of(at_half, "resnet50"), on="s", suffixes=("", "_half"))
    both = both[both["s"] > 1]
    if len(both):
        worse = float((both["test_top1_half"] - both["test_top1"]).mean())
        words = f"{abs(worse):.1f} points {'worse' if worse > 0 else 'better'}, mean over s"
        claims["delta-resnet50"] = Answer(words, holds(worse > 0))
    vgg = _of(table, "vgg11")
    vgg = vgg[vgg["s"] > 1].sort_values("s")
    if len(vgg) > 1:
        largest, others = vgg.iloc[-1], vgg.iloc[:-1]
        ends, factors = others["test_top1"], ", ".join(map(str, others["s"]))
        apart, below = ends.max() - ends.min(), ends.mean() - largest["test_top1"]
        claims["delta-vgg11"] = Answer(
            f"s = {factors} end {apart:.1f} points apart, s = {largest['s']} {abs(below):.1f} points "
            f"{'below' if below > 0 else 'above'} their mean",
            holds(apart < ALIKE and below > 0),
        )
    return Findings(table, panels, claims)


# --- Table I ----------------------------------------------------------------------------------------------------------

METHODS = ("lbt", "lars", "polo", "lrs_linear", "ags_paper", "ags")
"""Those of the paper, in its order, and our default."""


def _rows(scale: Scale) -> list[tuple[str, str, int]]:
    return [(model, name, batch) for model, name in published.MODELS.items() for batch in scale.table1[model]]


def _table_runs(scale: Scale) -> list[Run]:
    return [scale.training(model, batch, method, seed)
            for model, _, batch in _rows(scale) for method in METHODS for seed in range(scale.seeds)]  # fmt: skip


def _table(scale: Scale, folders: Folders) -> Findings:
    rows = []
    for model, name, batch in _rows(scale):
        for method in METHODS:
            ends = _ends(folders, [scale.training(model, batch, method, seed) for seed in range(scale.seeds)])
            if len(ends):
                paper = published.TABLE1[model].get(batch, {}).get(method)
                rows.append({"model": name, "global_batch": batch, "method": method, **_means(ends),
                             "paper_percent": paper})  # fmt: skip
    table = pd.DataFrame(rows)
    panels, claims = [], {}
    for name, of_model in table.groupby("model", sort=False) if rows else ():
        wide = of_model.pivot_table(index="global_batch", columns="method", values="test_top1")
        series = [
            Series(method, list(range(len(wide))), list(wide[method]), "bars", colour)
            for colour, method in enumerate(METHODS)
            if method in wide
        ]
        panels.append(Panel(str(name), "global batch", "test accuracy, top-1 (%)", series,
                            x_names=[str(batch) for batch in wide.index]))  # fmt: skip
    if rows:
        wide = table.pivot_table(index=["model", "global_batch"], columns="method", values="test_top1")
        known = {m: (wide[m] - wide["lbt"]).dropna() for m in ("ags", "ags_paper") if {"lbt", m} <= set(wide.columns)}
        gains = {method: of_method for method, of_method in known.items() if len(of_method)}
        if gains:
            claims["gain"] = Answer(
                "; ".join(f"{g.mean():.1f} points ({m}, {len(g)} rows)" for m, g in gains.items()),
                or_as_printed({m: g.mean() >= published.MEAN_GAIN for m, g in gains.items()}),
            )
            claims["never-worse"] = Answer(
                "; ".join(f"{int((g >= 0).sum())} of {len(g)} ({m})" for m, g in gains.items()),
                or_as_printed({m: bool((g >= 0).all()) for m, g in gains.items()}),
            )
    return Findings(
        table,
        panels,
        claims,
        [
            "The paper calls its accuracies top-1, but ResNet50's is top-5 (section IV-B), and VGG11's diverged runs "
            "stop at 5.00 %, which is top-5 chance for 100 classes; both are given here.",
            "The paper does not say which small batch AGS scales towards; here 128, the batch that its LRS and LARS "
            "refer to. N is not given either; it decides how often post-local SGD averages.",
        ],
    )


RESULTS = [
    Result("fig02", "Fig. 2: test accuracy of plain training against global batch", _plain, _against_batch),
    Result("fig05", "Fig. 5: gradient norms of small and large batches; Hessian and gradient", _norm_runs, _norms),
    Result("fig06", "Fig. 6: gradient variability and test accuracy", _variability_runs, _variability),
    Result("fig07", "Fig. 7: static gradient scaling at threshold 0.5", _scaling_runs, _static_scaling),
    Result("fig08", "Fig. 8: static gradient scaling at other thresholds",
           lambda scale: _static_runs(scale, (*_FIG8, ("resnet50", 0.5))), _thresholds),
    Result("table1", "Table I: test accuracy by method", _table_runs, _table),
]  # fmt: skip
