"""How long one training step takes, as a function of nodes, GPUs per node and batch per rank.

Two forms of the paper's Eq. (2), t_step = t_compute + t_sync (b batch per rank, N nodes, g GPUs per node, R = N g, a
batches accumulated before each synchronisation; times in seconds):

    additive   t = a (alpha + beta b) + t_sync
               t_sync = s (1 - 1/R)                        ring
                        s ceil(log2 R)                     tree
                        s (1 - 1/R) + l ceil(log2 R)       reduce-scatter and all-gather
                        s R (R > 1)                        parameter server
    overlap    t = a T_c + T_s - m
               m = (x^-6 + y^-6)^(-1/6)                about the smaller of
               x = (1 - before_sync) T_c               the computation that can hide synchronisation
               y = (1 - after_backward) T_s            the synchronisation that can be hidden
               T_c = (t_floor^3 + (alpha + beta b)^3)^(1/3)
               T_s = c_ring 2 (R - 1) / R + lambda max(N - 2, 0) + kappa (g - 1)    N > 1
               T_s = c_r 2 (g - 1) / g                                           N = 1

`additive` is the paper's reading with two of our own: the intercept alpha (launch and fixed kernel cost; a compute time
strictly proportional to b is unusable on real devices), and R in the place of N, since every rank takes part in the
collective. With M bytes of gradients over links of B bytes/s, a ring moves 2 (1 - 1/R) M / B, so s = 2 M / B
(Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009); a tree reduces and broadcasts all M in ceil(log2 R) rounds
each, so s = 2 M / B plus twice the latency; reduce-scatter and all-gather by halving and doubling move as much as a
ring in 2 ceil(log2 R) rounds of latency l / 2 (Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19,
2005); a server's link carries M from and to each rank, s = 2 M / B (Eq. 2c). A ring's latency is left out, as there.

`overlap` lets computation hide synchronisation as gradient buckets do: none before the first gradients are complete,
which takes the share before_sync of T_c, and never that of the last gradients, the share after_backward of T_s. If
either is 1 the times add up; if both are 0 only the larger is seen. Of accumulated batches only the last synchronises.
What is usual of the two is assumed until the runs tell; gradients of at most 26 MiB are averaged in two buckets, of
which the second can hide behind nothing.
t_floor is the floor of a device that a small batch does not fill. T_s is that of a ring, and grows beyond it in
proportion to N (latency of the hops, stragglers); it tells links between nodes from those inside one where both were
measured. A single rank does not synchronise in either form.

The form was chosen by leaving out, in turn, each source of step times: two models of the Sia artifact (SOSP'23),
ResNet50 on H100s, four models on H100s behind 10 Gbit/s links, and four made-up trainings; since then four models on
H200s and a small one on CPUs are among them (tests/benchmarks/predictions.py, numbers in tests/data/benchmarks/
predictions.txt). What lost there: the p-norm (T_c^gamma +
T_s^gamma)^(1/gamma) that stood here before and is AdaptDL's; no or a weak pull on the shares, squared errors, no floor,
growth with log N or none, fits that leave out the all-reduce measured by itself or are bound to it. A constant in the
place of the ring's 2 (R - 1) / R is as good between measured numbers of nodes, or better by a point, and far off beyond
them: 12.6 instead of 5.3 % at twice the nodes measured, 30 instead of 1 % for ResNet50 behind 10 Gbit/s, whose
all-reduce by itself takes 1.50 times as long on four nodes as on two. Inside the measured batches, measured compute
times in the place of the form lowered the median error by up to 0.2 points and raised the 90th percentile by 1 to 4.
A floor of power 2, which stood here before, is a tenth of a point better from corners and worse elsewhere, and the best
for no source left out. Twice the pull, powers of the minimum above 6, and usual values of after_backward from 0.05 to
0.12 cannot be told apart there.

`step_forms` finds the parameters; here are the checks, the interval and the record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from tula_hpc.errors import TulaError
from tula_hpc.models.step_forms import (
    ADDITIVE_NAMES,
    OVERLAP_NAMES,
    Array,
    Collective,
    Configurations,
    Estimate,
    Runs,
    additive_step,
    fit_additive,
    fit_overlap,
    overlap_step,
)

POOR_FIT_ERROR = 0.10
"""Median in-sample relative error above which a fit is called poor."""
MAX_FOLDS = 12
"""Refits spent on the interval; larger tables are left out in groups."""
PRIOR_RUNS = 4
"""How many left-out runs the prior error below counts for."""

_COLUMNS = ("num_nodes", "gpus_per_node", "batch_per_rank")
_UNITS = {
    "alpha": "s",
    "beta": "s/sample",
    "s": "s",
    "l": "s",
    "t_floor": "s",
    "c_ring": "s",
    "lambda": "s/node",
    "kappa": "s/GPU",
    "c_r": "s",
    "before_sync": "of computation",
    "after_backward": "of synchronisation",
}


class StepTimeModel(str, Enum):
    """The form of the step time."""

    OVERLAP = "overlap"
    ADDITIVE = "additive"


# Standard deviation of log(predicted / measured) before this application's own left-out runs say better. With it the
# 90 % interval holds 90-96 % of the runs that a fit has not seen over all sources, 86-90 % on the public traces alone,
# and 89-96 % for additive (tests/data/benchmarks/predictions.txt).
_PRIOR_LOG_ERROR = {StepTimeModel.OVERLAP: 0.08, StepTimeModel.ADDITIVE: 0.19}


class StepTimeOutcome(Enum):
    """What became of a fit; `advice` says what to do about it and `usable` whether its predictions mean anything."""

    OK = ("The fit is good enough to choose from.", True)
    TOO_FEW_POINTS = (
        "Too few different configurations were measured to tell computation from synchronisation. Profile at least "
        "three: smallest and largest cluster at the smallest batch, and the largest batch.",
        True,
    )
    ONE_BATCH_SIZE = (
        "All measurements have the same batch per rank, so half of the compute time was taken as independent of it. "
        "Do not compare batch sizes with this fit; profile a second batch size.",
        True,
    )
    ONE_CLUSTER_SIZE = (
        "All measurements have the same number of ranks, so the growth of synchronisation is unknown. The fit may "
        "compare batch sizes on that cluster; profile a second number of nodes before comparing clusters.",
        True,
    )
    POOR_FIT = (
        f"The typical error on the measured points themselves exceeds {POOR_FIT_ERROR:.0%}. Profile a middle number of "
        "nodes, more steps per point, or use the full search; look for other load on the nodes.",
        True,
    )
    NOT_CONVERGED = (
        "The optimiser stopped early from every start. Profile more configurations or use additive.",
        False,
    )
    NON_FINITE = ("The fitted parameters are not finite. Look for absurd values among the measured times.", False)

    def __init__(self, advice: str, usable: bool):
        self.advice = advice
        self.usable = usable


@dataclass(frozen=True)
class StepTimeFit:
    """A fitted step-time model: predictions, their interval, and how far to trust them."""

    model: StepTimeModel
    """The form that was fitted."""
    collective: Collective
    """The synchronisation of the additive form."""
    outcome: StepTimeOutcome
    """What became of the fit, with advice."""
    parameters: dict[str, tuple[float, str]]
    """Name in the module's formula -> (value, unit)."""
    median_error: float
    """Median of |predicted - measured| / measured over the rows of the fit."""
    left_out_errors: tuple[float, ...]
    """log(predicted / measured) of configurations inside the measured range, each predicted by a refit without it."""
    residual_log_error: float
    """Root mean square of log(predicted / measured) over the rows of the fit."""
    measured: tuple[tuple[int, int, int], ...]
    """Configurations of the fit: (num_nodes, gpus_per_node, batch_per_rank), sorted."""
    dropped_rows: tuple[str, ...]
    """Index labels of rows whose step time was not a positive finite number."""
    notes: tuple[str, ...]
    """Terms that the measurements could not tell and what was assumed instead, one sentence each."""
    unidentified: tuple[str, ...] = ()
    """Names of the parameters that the measurements could not tell."""

    @property
    def advice(self) -> str:
        """What the fit can say, what not, and what to do about it, in words."""
        nodes, gpus, batch = (_range(values) for values in zip(*self.measured, strict=True))
        sentences = [self.outcome.advice]
        if self.unidentified:
            sentences.append(
                f"The measurements do not tell {', '.join(self.unidentified)}; the notes say what was assumed."
            )
        sentences.append(
            f"Measured were {nodes} nodes, {gpus} GPUs per node and {batch} samples per rank; predictions beyond are "
            "extrapolated, with an interval twice as wide. Profile a point there before relying on one."
        )
        return " ".join(sentences)

    def predict(self, table: pd.DataFrame) -> Array:
        """Seconds per step of each row of `table` (num_nodes, gpus_per_node, batch_per_rank [accumulation])."""
        names = OVERLAP_NAMES if self.model is StepTimeModel.OVERLAP else ADDITIVE_NAMES
        values = np.array([self.parameters[name][0] for name in names if name in self.parameters])
        return _step(values, _configurations(table), self.model, self.collective)

    def interval(self, table: pd.DataFrame, level: float = 0.9) -> tuple[Array, Array]:
        """Lower and upper seconds per step that should hold the true value with probability `level`.

        The same relative width for every row: Student's t times an error that starts from what was seen on public
        traces and moves to this fit's own left-out errors as there are more of them, and is never below the residual.
        Twice that where the row extrapolates or too few points were measured. The error is largely common to all rows,
        so overlapping intervals do not mean that two candidates cannot be ranked.
        """
        doubtful = self.extrapolates(table) | (self.outcome is StepTimeOutcome.TOO_FEW_POINTS)
        width = np.where(doubtful, 2.0, 1.0) * self._log_half_width(level)
        seconds = self.predict(table)
        return seconds * np.exp(-width), seconds * np.exp(width)

    @property
    def log_error(self) -> float:
        """Typical log(predicted / true) of an unmeasured point, from the prior and the left-out runs."""
        squares = PRIOR_RUNS * _PRIOR_LOG_ERROR[self.model] ** 2 + sum(error**2 for error in self.left_out_errors)
        return max(math.sqrt(squares / (PRIOR_RUNS + len(self.left_out_errors))), self.residual_log_error)

    def _log_half_width(self, level: float) -> float:
        runs = PRIOR_RUNS + len(self.left_out_errors)
        return float(stats.t.ppf((1 + level) / 2, runs)) * self.log_error

    def extrapolates(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """Which rows lie outside the measured range of nodes or batch, or have GPUs per node never measured.

        One node does not count as the lower end of several: it says nothing about synchronisation between nodes.
        """
        nodes, gpus, batch, _ = _configurations(table)
        seen = np.array(self.measured, dtype=float)
        low, high = seen.min(axis=0), seen.max(axis=0)
        outside = (nodes < low[0]) | (nodes > high[0]) | (batch < low[2]) | (batch > high[2])
        fewest = seen[seen[:, 0] > 1, 0].min(initial=math.inf)
        outside |= (nodes > 1) & (nodes < fewest)
        return np.asarray(outside | ~np.isin(gpus, seen[:, 1]), dtype=bool)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "model": self.model.value,
            "collective": self.collective.value,
            "outcome": self.outcome.name,
            "advice": self.advice,
            "parameters": {name: [_json_number(value), unit] for name, (value, unit) in self.parameters.items()},
            "median_error": _json_number(self.median_error),
            "left_out_errors": [_json_number(error) for error in self.left_out_errors],
            "residual_log_error": _json_number(self.residual_log_error),
            "measured": [list(configuration) for configuration in self.measured],
            "dropped_rows": list(self.dropped_rows),
            "notes": list(self.notes),
            "unidentified": list(self.unidentified),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StepTimeFit:
        """The fit that `to_dict` described.

        Raises:
            TulaError: It was made with an earlier form of `overlap`, whose parameters mean something else.
        """
        model = StepTimeModel(values["model"])
        if model is StepTimeModel.OVERLAP and set(values["parameters"]) != set(OVERLAP_NAMES):
            raise TulaError(
                f"the fit in this run folder is of an earlier overlap form ({', '.join(values['parameters'])}); delete "
                "its fit.json and start the command again: it fits the points anew and measures none again"
            )
        return cls(
            model=model,
            collective=Collective(values["collective"]),
            outcome=StepTimeOutcome[values["outcome"]],
            parameters={name: (_number(value), str(unit)) for name, (value, unit) in values["parameters"].items()},
            median_error=_number(values["median_error"]),
            left_out_errors=tuple(_number(error) for error in values["left_out_errors"]),
            residual_log_error=_number(values["residual_log_error"]),
            measured=tuple((int(n), int(g), int(b)) for n, g, b in values["measured"]),
            dropped_rows=tuple(values["dropped_rows"]),
            notes=tuple(values["notes"]),
            unidentified=tuple(values.get("unidentified", ())),  # not in records before it was told by name
        )


def fit_step_time(
    table: pd.DataFrame,
    model: StepTimeModel | str = StepTimeModel.OVERLAP,
    collective: Collective | str = Collective.RING,
) -> StepTimeFit:
    """Fits t_step(N, g, b) to measured steps.

    Args:
        table: One row per run: num_nodes, gpus_per_node, batch_per_rank, step_time_s and, where known (else NaN or no
            column), compute_time_s (the step without synchronisation) or sync_time_s (the part of the step spent
            waiting for synchronisation; then compute is taken as the step less this part), allreduce_s (an all-reduce
            as large as the gradients over the same ranks with nothing else running), and gradient_mib (of all
            gradients, MiB). Only `overlap` uses them.
            `accumulation`, batches computed before each synchronisation, is 1 without the column; step and compute time
            are then of all of them, batch_per_rank of one.
        model: `overlap` or `additive`.
        collective: `ring`, `tree`, `reduce_scatter_all_gather` or `parameter_server`, for `additive`. The overlap form
            has one growth term for all.

    Returns:
        The fit; what the measurements cannot tell is reported in its `outcome` and `notes`, not raised.

    Raises:
        ValueError: A column is missing, a configuration is not a positive whole number, or no row has a positive
            finite step time; the message lists the rows.
    """
    model, collective = StepTimeModel(model), Collective(collective)
    runs, dropped = _clean(table)
    estimate = _fit(runs, model, collective)
    predicted = _step(estimate.values, _configurations_of(runs), model, collective)
    error = float(np.median(np.abs(predicted / runs.step_s - 1)))
    names = OVERLAP_NAMES if model is StepTimeModel.OVERLAP else ADDITIVE_NAMES
    return StepTimeFit(
        model=model,
        collective=collective,
        outcome=_outcome(runs, estimate, error),
        parameters={name: (float(v), _UNITS[name]) for name, v in zip(names, estimate.values, strict=False)},
        median_error=error,
        left_out_errors=tuple(_left_out_errors(runs, estimate.values, model, collective)),
        residual_log_error=float(np.sqrt(np.mean(np.log(predicted / runs.step_s) ** 2))),
        measured=tuple(sorted(_distinct(runs))),
        dropped_rows=dropped,
        notes=estimate.notes,
        unidentified=estimate.unidentified,
    )


def training_time_s(
    step_time_s: ArrayLike,
    train_samples: int,
    epochs: float,
    global_batch: ArrayLike,
    validation_s: float = 0.0,
    checkpoint_s: float = 0.0,
    startup_s: float = 0.0,
) -> Array:
    """Seconds to train, T = E (ceil(D / B) t_step + t_validation + t_checkpoint) + t_startup.

    Eq. (4a) with whole steps. The number of epochs E is taken as independent of the global batch B, as in the paper.

    Args:
        step_time_s: t_step, seconds; one value or an array.
        train_samples: D, samples in the training set.
        epochs: E; 1 gives the time of an epoch.
        global_batch: B, samples per optimiser step; one value or an array.
        validation_s: Seconds of validation in each epoch.
        checkpoint_s: Seconds of checkpointing in each epoch.
        startup_s: Seconds before the first step, once.
    """
    steps = np.ceil(train_samples / np.asarray(global_batch, dtype=float))
    return np.asarray(epochs * (steps * np.asarray(step_time_s, dtype=float) + validation_s + checkpoint_s) + startup_s)


def _json_number(value: float) -> float | None:
    """JSON has no NaN or infinity, which a NON_FINITE fit holds."""
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _clean(table: pd.DataFrame) -> tuple[Runs, tuple[str, ...]]:
    """Rows with a positive finite step time, and the labels of the others."""
    missing = [name for name in (*_COLUMNS, "step_time_s") if name not in table.columns]
    if missing:
        raise ValueError(f"the table of step times lacks the columns {missing}; it has {list(table.columns)}")
    configurations = _configurations(table)
    numbers = np.stack(configurations, axis=1)
    whole = np.isfinite(numbers) & (numbers >= 1) & (numbers == np.round(numbers))
    _refuse(table, ~whole.all(axis=1), f"{', '.join(_COLUMNS)} and accumulation must be whole numbers of at least 1")
    good = _positive(table["step_time_s"].to_numpy(dtype=float))
    if not good.any():
        _refuse(table, ~good, "step_time_s must be positive and finite, in seconds")
        raise ValueError("the table of step times is empty; nothing was measured")
    step_s = table["step_time_s"].to_numpy(dtype=float)
    others = _allreduce_time(table), _column(table, "gradient_mib")
    runs = Runs(*configurations[:3], step_s, _compute_time(table), configurations[3], *others)
    return runs.take(good), tuple(str(label) for label in table.index[~good])


def _refuse(table: pd.DataFrame, bad: Array, rule: str) -> None:
    if bad.any():
        raise ValueError(f"{rule}; rows {[str(label) for label in table.index[bad]]} are not:\n{table.loc[bad]}")


def _positive(values: Array) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(values) & (values > 0), dtype=bool)


def _column(table: pd.DataFrame, name: str) -> Array:
    """Its numbers, NaN where there is none."""
    return table[name].to_numpy(dtype=float) if name in table else np.full(len(table), np.nan)


def _compute_time(table: pd.DataFrame) -> Array:
    """Seconds of computation of each row: measured, else step less exposed synchronisation, else NaN."""
    step, compute, exposed = (_column(table, name) for name in ("step_time_s", "compute_time_s", "sync_time_s"))
    compute = np.where(_positive(compute), compute, step - exposed)
    return np.where(_positive(compute), compute, np.nan)


def _allreduce_time(table: pd.DataFrame) -> Array:
    """Seconds of the all-reduce of each row, NaN where it was not measured and on a single rank, which has none."""
    seconds, (nodes, gpus, *_) = _column(table, "allreduce_s"), _configurations(table)
    return np.where(_positive(seconds) & (nodes * gpus > 1), seconds, np.nan)


def _configurations(table: pd.DataFrame) -> Configurations:
    nodes, gpus, batch = (table[name].to_numpy(dtype=float) for name in _COLUMNS)
    accumulation = table["accumulation"].to_numpy(dtype=float) if "accumulation" in table else np.ones(len(table))
    return nodes, gpus, batch, accumulation


def _configurations_of(runs: Runs) -> Configurations:
    return runs.nodes, runs.gpus, runs.batch, runs.accumulation


def _range(values: tuple[int, ...]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _distinct(runs: Runs) -> set[tuple[int, int, int]]:
    return {(int(n), int(g), int(b)) for n, g, b in zip(runs.nodes, runs.gpus, runs.batch, strict=True)}


def _fit(runs: Runs, model: StepTimeModel, collective: Collective, near: Array | None = None) -> Estimate:
    if model is StepTimeModel.OVERLAP:
        return fit_overlap(runs, near)
    return fit_additive(runs, collective)


def _step(values: Array, configurations: Configurations, model: StepTimeModel, collective: Collective) -> Array:
    if model is StepTimeModel.OVERLAP:
        return overlap_step(values, *configurations)
    return additive_step(values, configurations, collective)


def _outcome(runs: Runs, estimate: Estimate, error: float) -> StepTimeOutcome:
    batches, clusters = len(set(runs.batch)), len(set(runs.nodes * runs.gpus))
    configurations = len(_distinct(runs))
    if not (np.isfinite(estimate.values).all() and np.isfinite(error)):
        return StepTimeOutcome.NON_FINITE
    if not estimate.converged:
        return StepTimeOutcome.NOT_CONVERGED
    # The paper's two-point reading (smallest cluster and batch, largest cluster and batch) lands here: both differ.
    if configurations == 1 or (configurations == 2 and batches == clusters == 2):
        return StepTimeOutcome.TOO_FEW_POINTS
    if batches == 1:
        return StepTimeOutcome.ONE_BATCH_SIZE
    if clusters == 1:
        return StepTimeOutcome.ONE_CLUSTER_SIZE
    return StepTimeOutcome.POOR_FIT if error > POOR_FIT_ERROR else StepTimeOutcome.OK


def _left_out_errors(runs: Runs, values: Array, model: StepTimeModel, collective: Collective) -> Iterator[float]:
    """log(predicted / measured) of rows the rest brackets, each predicted by a fit that has not seen its configuration.

    Corners are passed over: without one, its refit extrapolates, and the error says nothing about the inside.
    """
    order = {configuration: index for index, configuration in enumerate(sorted(_distinct(runs)))}
    rows = zip(runs.nodes, runs.gpus, runs.batch, strict=True)
    fold = np.array([order[int(n), int(g), int(b)] for n, g, b in rows]) % MAX_FOLDS
    for left_out in range(fold.max() + 1):
        rest = runs.take(fold != left_out)
        tested = runs.take(fold == left_out)
        tested = tested.take(_bracketed(tested, rest))
        if len(tested.step_s) == 0:
            continue
        refit = _fit(rest, model, collective, near=values).values
        predicted = _step(refit, _configurations_of(tested), model, collective)
        yield from (float(error) for error in np.log(predicted / tested.step_s))


def _bracketed(tested: Runs, rest: Runs) -> NDArray[np.bool_]:
    """Which runs of `tested` have a run of `rest` in each quadrant of (nodes, batch) around them."""
    nodes, batch = tested.nodes[:, None], tested.batch[:, None]
    inside = np.ones(len(tested.nodes), dtype=bool)
    for near in (rest.nodes <= nodes, rest.nodes >= nodes):
        inside &= (near & (rest.batch <= batch)).any(axis=1) & (near & (rest.batch >= batch)).any(axis=1)
    return inside
