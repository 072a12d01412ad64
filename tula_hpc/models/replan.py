"""What a training's own step times say of the other configurations, and whether one of them is worth a new start.

A single configuration is measured, so what it implies for the others must be assumed, and the assumption is named:

    sync      t_sync times a factor, computation as profiled: links between nodes that others use as well
    compute   t_compute times a factor: other load on the nodes, or lower clocks
    all       the whole step times a factor

The factor is the one with which the prediction of the measured configuration is what was measured. On several nodes it
is synchronisation that is scaled, as far as that explains the time with a factor between `MIN_FACTOR` and `MAX_FACTOR`;
a configuration on one node, or without synchronisation to speak of, has its computation scaled. A slow node would look
like a slow network from here; the ranks' own forward times tell it before (`slow_host`), and then nothing is refitted.
On real links that fell from 1 Gbit/s to 200 and 100 Mbit/s the predictions of the other configurations were off by 45
and 65 % (median) with the fit from before, and by 6 and 9 % (overlap; 4 and 2 %, additive) once one of them had told
its step time (tests/data/busy_network.csv).

The steps left are then priced as at the first choice, with what a new start costs on the side of every configuration
but the running one: the wait in the queue, the time until the first step, and the cost of the nodes meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize

from tula_hpc.candidates import SIZES, Candidate
from tula_hpc.models.limits import Limits
from tula_hpc.models.posterior import correction
from tula_hpc.models.selection import Objective, select
from tula_hpc.models.step_time import StepTimeFit, StepTimeModel, fit_step_time

MAX_FACTOR = 20.0
"""A part of the step slowed down by more than this is less likely than another cause."""
MIN_FACTOR = 0.2
"""And one that became faster than this."""
CLEAR_GAIN = 0.10
"""Share of what is left that a new start must save: how the drift reaches other configurations is an assumption, and
two starts cost the user's trust more than a few percent are worth."""

_IN_STEPS = ["step_time_s", "step_time_low_s", "step_time_high_s", "epoch_time_s", "train_time_s", "train_time_low_s"]
_IN_STEPS += ["train_time_high_s", "interruptions_s", "cost", "time_to_result_s"]
"""Columns of a candidate table that are proportional to the step time."""

_COMPUTE = {StepTimeModel.OVERLAP: ("alpha", "beta", "t_floor"), StepTimeModel.ADDITIVE: ("alpha", "beta")}
_SYNC = {StepTimeModel.OVERLAP: ("c_ring", "lambda", "kappa"), StepTimeModel.ADDITIVE: ("s", "l")}


class Part(str, Enum):
    """What of a step is taken to have become slower or faster."""

    SYNC = "sync"
    COMPUTE = "compute"
    ALL = "all"


@dataclass(frozen=True)
class Refit:
    """A fit that agrees with the training's own step time."""

    fit: StepTimeFit
    part: Part
    factor: float
    """Of that part, against the fit before."""


def with_row(points: pd.DataFrame, fit: StepTimeFit, candidate: Candidate, step_time_s: float) -> StepTimeFit:
    """The fit of the same form to the profiled points and the training's own configuration as one more.

    For a configuration that was not profiled and that took another time from the first step on: nothing has changed,
    the prediction was off.
    """
    row = {**_row(candidate).iloc[0].to_dict(), "step_time_s": step_time_s}
    return fit_step_time(pd.concat([points, pd.DataFrame([row])], ignore_index=True), fit.model, fit.collective)


def refit(fit: StepTimeFit, candidate: Candidate, step_time_s: float) -> Refit:
    """The fit with one of its parts scaled so that `candidate` takes `step_time_s`; see the module for which.

    Args:
        fit: What the training was predicted with.
        candidate: What it runs at.
        step_time_s: What a step of it takes, seconds.
    """
    alone = candidate.num_nodes == 1
    # several nodes that compute faster than profiled, all of them: then their links are likely to be faster as well
    parts = {Part.COMPUTE: MIN_FACTOR} if alone else {Part.SYNC: MIN_FACTOR, Part.COMPUTE: 1.0}
    for part, least in parts.items():
        factor = _factor(fit, part, candidate, step_time_s, least)
        if factor is not None:
            return Refit(scaled(fit, part, factor), part, factor)
    factor = step_time_s / _predict(fit, candidate)
    return Refit(scaled(fit, Part.ALL, factor), Part.ALL, factor)


def scaled(fit: StepTimeFit, part: Part, factor: float) -> StepTimeFit:
    """The fit with the times of one part multiplied."""
    names = {
        Part.SYNC: _SYNC[fit.model],
        Part.COMPUTE: _COMPUTE[fit.model],
        Part.ALL: (*_COMPUTE[fit.model], *_SYNC[fit.model], "c_r"),
    }[part]
    parameters = {
        name: (value * factor if name in names else value, unit) for name, (value, unit) in fit.parameters.items()
    }
    return replace(fit, parameters=parameters)


def _factor(fit: StepTimeFit, part: Part, candidate: Candidate, step_time_s: float, least: float) -> float | None:
    """The factor of a part that makes the prediction what was measured; None if none within the bounds does."""

    def misses(log_factor: float) -> float:
        return _predict(scaled(fit, part, math.exp(log_factor)), candidate) / step_time_s - 1

    ends = math.log(least), math.log(MAX_FACTOR)
    if misses(ends[0]) > 0 or misses(ends[1]) < 0:
        return None
    return math.exp(float(optimize.brentq(misses, *ends, xtol=1e-9)))


def _predict(fit: StepTimeFit, candidate: Candidate) -> float:
    return float(fit.predict(_row(candidate))[0])


def _row(candidate: Candidate) -> pd.DataFrame:
    return pd.DataFrame([[candidate.num_nodes, candidate.gpus_per_node, candidate.batch_per_rank]], columns=SIZES)


# --- the offer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """Another configuration for the steps that are left."""

    candidate: Candidate
    left_s: float
    """Seconds it would take, with the wait and the new start."""
    train_time_s: float
    """Seconds of them in steps."""
    step_time_s: float
    left_here_s: float
    """Seconds that the running one would take; infinite where it would never get from a checkpoint to the next."""
    cost: float | None
    """Of the steps left and the new start; None: not known."""
    cost_here: float | None
    why: str
    """What it is better in, for a sentence."""


def with_probes(
    table: pd.DataFrame,
    fit: StepTimeFit,
    running: Candidate,
    probes: list[dict[str, Any]],
    why_not: Mapping[Candidate, str],
) -> pd.DataFrame:
    """A candidate table that knows what was measured since the fit: that takes as long as it took, and what is near it
    differs from its prediction the less, the further away (see `posterior`).

    Args:
        table: From `candidate_table` without waits, by `fit` and what had been measured before.
        fit: As in the table.
        running: What the training runs at, which the table agrees with.
        probes: num_nodes, gpus_per_node, batch_per_rank, step_time_s of each measurement.
        why_not: What is infeasible since then, and why.
    """
    table = table.copy()
    table["feasible"] = table["feasible"].astype(bool)
    for candidate, why in why_not.items():
        rows = _is(table, candidate)
        table["feasible"] &= ~rows
        table.loc[rows, "why_infeasible"] = why
    if not probes:
        return table
    here = table.loc[_is(table, running)].to_dict("records")
    measured = pd.DataFrame([*probes, *here])[[*SIZES, "step_time_s"]]
    before = measured[SIZES].merge(table, on=SIZES, how="left")["step_time_s"].to_numpy()
    measured["step_time_s"] *= fit.predict(measured) / before
    table[_IN_STEPS] = table[_IN_STEPS].mul(correction(fit, measured, table), axis=0)
    return table


def relaunched(table: pd.DataFrame, running: Candidate, start_s: float, wait_s: dict[int, float]) -> pd.DataFrame:
    """A candidate table of the steps that are left, with the price of a new start in every row but the running one's.

    Args:
        table: From `candidate_table` for the epochs left, by a fit that agrees with the running configuration.
        running: What the training runs at; its step time is measured, so it gets no interval.
        start_s: Seconds from a job's start to its first step.
        wait_s: Number of nodes -> seconds a new job would wait in the queue; it costs time and no money.
    """
    table = table.copy()
    is_running = _is(table, running)
    table["feasible"] = table["feasible"].astype(bool) | is_running  # it runs, whatever was predicted of its memory
    table.loc[is_running, "why_infeasible"] = ""
    per_second = table["cost"] / table["train_time_s"]  # every price is proportional to the time
    added_s = np.where(is_running, 0.0, start_s)
    for end in ("low", "high"):
        table[f"train_time_{end}_s"] = table[f"train_time_{end}_s"].where(~is_running, table["train_time_s"]) + added_s
    table["train_time_s"] += added_s
    table["cost"] += per_second * added_s
    table["queue_wait_s"] = [0.0 if here else wait_s[n] for here, n in zip(is_running, table["num_nodes"], strict=True)]
    table["time_to_result_s"] = table["train_time_s"] + table["queue_wait_s"]
    return table


def better(
    table: pd.DataFrame, running: Candidate, objective: Objective, limits: Limits, tie_tolerance: float, start_s: float
) -> Offer | None:
    """The configuration that the objective would choose for the steps left, if a new start there clearly pays.

    It pays if it saves more than `CLEAR_GAIN` and the tie tolerance of what is left here, in cost where that is the
    objective and else in time; or if what runs now would break a limit and it would not.

    Args:
        table: From `relaunched`.
        running: What the training runs at.
        objective: As at the first choice; the wait in the queue counts with each.
        limits: What is left of them.
        tie_tolerance: As at the first choice.
        start_s: As in `relaunched`.

    Raises:
        NoFeasibleConfiguration: Nothing keeps the limits any more, the running configuration neither.
    """
    kept = limits.keep(table)
    choice = select(kept, Objective.TIME_TO_RESULT if objective is Objective.TIME else objective, tie_tolerance)
    if choice.candidate == running:
        return None
    metric = "cost" if objective is Objective.COST else "time_to_result_s"
    here, there = kept.loc[_is(kept, running)].iloc[0], kept.loc[_is(kept, choice.candidate)].iloc[0]
    gain = 1 - float(there[metric]) / float(here[metric])
    over = not here["feasible"] and table.loc[_is(table, running), "feasible"].all()
    if not over and gain <= max(CLEAR_GAIN, tie_tolerance):
        return None
    return Offer(
        candidate=choice.candidate,
        left_s=float(there["time_to_result_s"]),
        train_time_s=float(there["train_time_s"]) - start_s,
        step_time_s=float(there["step_time_s"]),
        left_here_s=float(here["time_to_result_s"]),
        cost=_known(there["cost"]),
        cost_here=_known(here["cost"]),
        why=f"where it runs now, {here['why_infeasible']}" if over else f"{gain:.0%} less",
    )


def _is(table: pd.DataFrame, candidate: Candidate) -> pd.Series:
    return (table["num_nodes"] == candidate.num_nodes) & (table["batch_per_rank"] == candidate.batch_per_rank)


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
