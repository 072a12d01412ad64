"""Which configuration to train with: least time, least cost, the knee of time against global batch, or least time
counting the wait in the queue.

The paper's section III-A3. `candidate_table` puts all models side by side, one row per candidate; `select` reads
nothing but that table. Infeasible rows are neither chosen nor part of any curve.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tula_hpc.candidates import SIZES, Candidate, keys_of, nodes_of
from tula_hpc.errors import TulaError
from tula_hpc.models.knee import envelope, find_knee
from tula_hpc.models.limits import NoFeasibleConfiguration, interval_end, promised_hours, typed
from tula_hpc.models.memory import MAX_EXTRAPOLATION, MemoryFit, usable_gib, usable_in_words
from tula_hpc.models.posterior import correction
from tula_hpc.models.pricing import Price
from tula_hpc.models.queue_wait import Wait
from tula_hpc.models.search import close_infeasible
from tula_hpc.models.step_time import StepTimeFit, training_time_s
from tula_hpc.models.words import configuration, duration, three_digits

Array = NDArray[Any]

TOO_OFTEN = 100.0
"""Times as long as without interruptions, beyond which nobody would wait for a training."""
INTERRUPTED = f"interrupted so often that it would take more than {TOO_OFTEN:g} times as long"
MAX_TIE = 2.0
"""Intervals make a tie up to this multiple of the tolerance: that of an extrapolation would reach any candidate, and
the choice should not lose more than a few percent to a smaller batch."""

_PREDICTED = ["step_time_s", "epoch_time_s", "train_time_s", "cost", "memory_gib"]


class Objective(str, Enum):
    """What the choice is for."""

    TIME = "time"
    COST = "cost"
    KNEE = "knee"
    TIME_TO_RESULT = "time_to_result"


METRICS = {
    Objective.TIME: ("train_time_s", "training time"),
    Objective.COST: ("cost", "cost"),
    Objective.TIME_TO_RESULT: ("time_to_result_s", "time to the result"),
}
"""Objective that is minimised -> its column, its name in words."""


class Rule(str, Enum):
    """What decided."""

    MINIMUM = "minimum"
    SMALLEST_BATCH_IN_TIE = "smallest_batch_in_tie"
    KNEEDLE = "kneedle"
    GAIN_PER_DOUBLING = "gain_per_doubling"


class UnusableFit(TulaError):
    """The step-time fit predicts nothing; the message carries the advice of its outcome."""


@dataclass(frozen=True)
class Selection:
    """The chosen configuration and why."""

    num_nodes: int
    """Hosts."""
    gpus_per_node: int
    """Ranks on each host."""
    batch_per_rank: int
    """Samples each rank processes in a step."""
    global_batch: int
    """Samples in a step over all ranks."""
    objective: Objective
    """What was asked for."""
    rule: Rule
    """What decided."""
    predicted: dict[str, float | None]
    """step_time_s, epoch_time_s, train_time_s, cost, memory_gib of the choice; None where unknown."""
    interval: dict[str, list[float]]
    """train_time_s: [low, high]."""
    alternatives: list[dict[str, Any]]
    """What the other objectives would choose, and the next best; `why` says which."""
    reason: str
    """The choice in plain words with numbers."""
    knee: dict[str, Any]
    """How the knee was found, whatever the objective: knees on both axes, range of the curve, rule."""
    node_type: str = ""
    """Type of the hosts; empty where there are no types."""

    @property
    def candidate(self) -> Candidate:
        """The choice as a candidate."""
        return Candidate(self.num_nodes, self.batch_per_rank, self.gpus_per_node, self.node_type)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a type stands among them only where there is one."""
        values = {**asdict(self), "objective": self.objective.value, "rule": self.rule.value}
        return {name: value for name, value in values.items() if name != "node_type" or value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Selection:
        """The selection that `to_dict` described; other keys, such as a version, are ignored."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**{**known, "objective": Objective(values["objective"]), "rule": Rule(values["rule"])})


# --- the table --------------------------------------------------------------------------------------------------------


def candidate_table(
    grid: Collection[Candidate],
    step_time_fit: StepTimeFit,
    memory_fit: MemoryFit | None,
    price: Price,
    train_samples: int,
    epochs: float,
    limit_gib: float | None,
    memory_fraction: float,
    infeasible: Collection[Candidate],
    measured: pd.DataFrame,
    waits: Mapping[int, Wait] | None = None,
    profiled_fit: StepTimeFit | None = None,
) -> pd.DataFrame:
    """One row per candidate with all that is predicted and measured about it, sorted by nodes, then batch.

    Args:
        grid: All candidates of the run; where there are types of node, those of one.
        step_time_fit: Predicts seconds per step.
        memory_fit: Predicts GiB per rank; None where memory was not measured, and then it bounds nothing.
        price: Turns time, nodes and memory into cost; the memory is what was measured, else what is predicted.
        train_samples: Samples of the training set, D of Eq. (4a).
        epochs: E of Eq. (4a).
        limit_gib: Memory of a rank's device, GiB; None takes the one recorded in `memory_fit`, if any.
        memory_fraction: Share that may be used of the limit; on GPUs of what constant memory leaves of it.
        infeasible: Candidates that did not fit when profiled.
        measured: Rows num_nodes, gpus_per_node, batch_per_rank, step_time_s and, where known, memory_gib; several rows
            of a candidate count with their median time and largest memory. They correct the predictions of
            `step_time_fit` there and, less, nearby (see `posterior`): what was measured is not judged by a model.
        waits: Number of nodes -> how long a training would wait in the queue; what is missing is not known.
        profiled_fit: The fit that `measured` corrects, if `step_time_fit` stands for what has changed since.

    Returns:
        Columns num_nodes, gpus_per_node, batch_per_rank (after node_type, where the candidates have one), global_batch,
        step_time_s, step_time_low_s, step_time_high_s,
        epoch_time_s, train_time_s, train_time_low_s, train_time_high_s, interruptions_s, cost, memory_gib, feasible,
        why_infeasible, measured_step_time_s, measured_memory_gib, extrapolated, queue_wait_s, queue_wait_source,
        time_to_result_s. Training times hold what the price's interruptions are expected to take, interruptions_s.
        Unknown numbers are NaN, but an unknown wait counts as none in time_to_result_s.

    Raises:
        UnusableFit: The outcome of the step-time fit says that it predicts nothing.
    """
    if not step_time_fit.outcome.usable:
        raise UnusableFit(f"the step-time fit is {step_time_fit.outcome.name}: {step_time_fit.outcome.advice}")
    candidates = sorted(set(grid))
    columns = list(candidates[0].record()) if candidates else SIZES
    table = pd.DataFrame([c.record() for c in candidates], columns=columns)
    table["global_batch"] = [c.global_batch for c in candidates]
    low_s, high_s = step_time_fit.interval(table)
    corrected = correction(profiled_fit or step_time_fit, measured, table)
    for name, seconds in (("", step_time_fit.predict(table)), ("_low", low_s), ("_high", high_s)):
        table[f"step_time{name}_s"] = seconds * corrected
    batch, nodes = table["global_batch"].to_numpy(), table["num_nodes"].to_numpy()
    table["epoch_time_s"] = training_time_s(table["step_time_s"].to_numpy(), train_samples, 1, batch)
    for end in ("", "_low", "_high"):
        steps = table[f"step_time{end}_s"].to_numpy()
        uninterrupted = training_time_s(steps, train_samples, epochs, batch)
        expected = price.expected_time_s(uninterrupted, nodes)
        table[f"train_time{end}_s"] = np.where(expected > TOO_OFTEN * uninterrupted, math.inf, expected)
        if not end:
            table["interruptions_s"] = table["train_time_s"] - uninterrupted
    table["memory_gib"] = np.nan
    if memory_fit is not None:
        alone = [c.world_size == 1 for c in candidates]
        table["memory_gib"] = memory_fit.predict(table["batch_per_rank"].to_numpy(), alone)
    table = table.join(_measurements(measured), on=SIZES)
    priced_gib = table["measured_memory_gib"].fillna(table["memory_gib"])  # what was measured is not judged by a model
    table["cost"] = price.cost(table["train_time_s"], table["num_nodes"], table["gpus_per_node"], priced_gib)
    table["why_infeasible"] = [
        _why_not_run(c, infeasible, close_infeasible(candidates, infeasible), train_samples)
        or _why_not_fit(c, float(seen), memory_fit, limit_gib, memory_fraction)
        or ("" if math.isfinite(time_s) else INTERRUPTED)
        for c, seen, time_s in zip(candidates, table["measured_memory_gib"], table["train_time_s"], strict=True)
    ]
    table["feasible"] = table["why_infeasible"] == ""
    table["extrapolated"] = step_time_fit.extrapolates(table)
    wait_of = [(waits or {}).get(c.num_nodes, Wait(None, "")) for c in candidates]
    table["queue_wait_s"] = [math.nan if wait.seconds is None else wait.seconds for wait in wait_of]
    table["queue_wait_source"] = [wait.source for wait in wait_of]
    table["time_to_result_s"] = table["train_time_s"] + table["queue_wait_s"].fillna(0.0)
    return table


def _measurements(measured: pd.DataFrame) -> pd.DataFrame:
    """measured_step_time_s and measured_memory_gib, indexed by configuration."""
    if measured.empty:
        measured = pd.DataFrame(columns=[*SIZES, "step_time_s"], dtype=float)
    # Records from JSON hold None for unknown numbers, which leaves a column of objects.
    numbers = {name: measured.get(name, np.nan) for name in ("step_time_s", "memory_gib")}
    groups = measured.assign(**numbers).astype(dict.fromkeys(numbers, float)).groupby(SIZES)
    return pd.DataFrame(
        {"measured_step_time_s": groups["step_time_s"].median(), "measured_memory_gib": groups["memory_gib"].max()}
    )


def _why_not_run(
    candidate: Candidate, infeasible: Collection[Candidate], closed: Collection[Candidate], train_samples: int
) -> str:
    if candidate in infeasible:
        return "did not fit when profiled"
    if candidate in closed:
        return "a smaller batch did not fit on the same cluster"
    if candidate.global_batch > train_samples:
        return f"the global batch is larger than the {train_samples} training samples"
    return ""


def _why_not_fit(
    candidate: Candidate, measured_gib: float, memory_fit: MemoryFit | None, limit_gib: float | None, fraction: float
) -> str:
    """Why the batch does not fit in memory: by the measured peak where there is one, else by the fit's upper end."""
    limit_gib = limit_gib if limit_gib is not None or memory_fit is None else memory_fit.limit_gib
    needed_gib, kind, alone = measured_gib, "measured", candidate.world_size == 1
    if math.isnan(measured_gib):
        if memory_fit is None:
            return ""
        batch_per_rank = candidate.batch_per_rank
        if batch_per_rank > memory_fit.bound_batch_per_rank():
            largest = memory_fit.batches[-1]
            if batch_per_rank > MAX_EXTRAPOLATION * largest:
                return f"more than {MAX_EXTRAPOLATION} times the largest batch per rank measured ({largest})"
            return f"a batch per rank of {memory_fit.smallest_oom_batch} ran out of memory"
        needed_gib, kind = float(memory_fit.interval(batch_per_rank, alone=alone)[1]), "predicted (upper end)"
    constant_gib = 0.0 if memory_fit is None else memory_fit.constant_gib(alone)
    if limit_gib is None or needed_gib <= usable_gib(limit_gib, fraction, constant_gib):
        return ""
    return f"{kind} {needed_gib:.3g} GiB per rank exceed {usable_in_words(limit_gib, fraction, constant_gib)}"


# --- the choice -------------------------------------------------------------------------------------------------------


def select(
    table: pd.DataFrame,
    objective: Objective | str = Objective.TIME,
    tie_tolerance: float = 0.02,
    currency: str = "",
) -> Selection:
    """Chooses a row of a candidate table, or of those of several types of node below each other.

    time: the least train_time_s. cost: the least cost. Candidates within the tolerance of the least count as tied, and
    so do those whose interval reaches down to the least, up to `MAX_TIE` times the tolerance. The smallest global batch
    of the tied wins, since a larger one risks accuracy for nothing. The bound is close because most of a prediction's
    error is common to all candidates and does not change their order. knee: see `models.knee`. time_to_result: as time,
    counting the wait in the queue.

    Args:
        table: From `candidate_table`; the order of its rows does not matter.
        objective: `time`, `cost`, `knee` or `time_to_result`.
        tie_tolerance: Relative; 0 takes the exact minimum.
        currency: Stands before the cost in the reason.

    Raises:
        NoFeasibleConfiguration: No row is feasible, or the cost of none is known.
    """
    objective = Objective(objective)
    rows = table.sort_values(keys_of(table.columns), ignore_index=True)
    feasible = rows.loc[rows["feasible"].astype(bool)].reset_index(drop=True)
    if feasible.empty:
        raise NoFeasibleConfiguration(_nothing_feasible(rows))
    knee_index, knee = find_knee(feasible)
    choices = {
        Objective.TIME: _least(feasible, Objective.TIME, tie_tolerance),
        Objective.COST: _least(feasible, Objective.COST, tie_tolerance),
        Objective.KNEE: (knee_index, Rule(knee["rule"]), knee["why"]),
    }
    if objective is Objective.TIME_TO_RESULT:  # nobody has asked for the waits otherwise
        choices[objective] = _least(feasible, objective, tie_tolerance)
    choice = choices[objective]
    if choice is None:
        raise NoFeasibleConfiguration(
            "the cost of no feasible configuration is known: the memory-based price needs measured memory. "
            "Choose by time or knee, or use a price per node-hour."
        )
    index, rule, detail = choice
    row = feasible.iloc[index]
    others = [(f"objective {each.value}", found[0]) for each, found in choices.items() if found and each != objective]
    following = _next_best(feasible, objective, index)
    return Selection(
        **_configuration_of(row),
        objective=objective,
        rule=rule,
        predicted=_numbers(row),
        interval={"train_time_s": [float(row["train_time_low_s"]), float(row["train_time_high_s"])]},
        alternatives=[_alternative(feasible, why, other) for why, other in [*others, *following]],
        reason=_reason(row, detail, objective, currency)
        + (_smallest_cluster(feasible, index, tie_tolerance, currency) if objective is Objective.COST else "")
        + _waiting(feasible, row, objective),
        knee=knee,
    )


def _least(rows: pd.DataFrame, objective: Objective, tie_tolerance: float) -> tuple[int, Rule, str] | None:
    """Index of the row with the least time or cost after ties, the rule, and the rule in words; None if unknown."""
    metric, name = METRICS[objective]
    ordered = rows.loc[np.isfinite(rows[metric])].sort_values([metric, *keys_of(rows.columns)])
    if ordered.empty:
        return None
    least = ordered.iloc[0]
    bound = MAX_TIE * tie_tolerance
    near = ordered[metric] <= least[metric] + tie_tolerance * abs(least[metric])  # holds the least itself, always
    reaches_least = interval_end(ordered, metric, "low") <= least[metric]
    tied = ordered.loc[near | (reaches_least & (ordered[metric] <= least[metric] * (1 + bound)))]
    chosen = tied.sort_values(["global_batch", metric, *keys_of(rows.columns)]).iloc[0]
    index = int(chosen.name)
    if index == least.name:
        return index, Rule.MINIMUM, f"It has the least predicted {name}."
    return (
        index,
        Rule.SMALLEST_BATCH_IN_TIE,
        f"Its {name} is {chosen[metric] / least[metric] - 1:.1%} above the least ({configuration(least)}), and its "
        f"global batch of {chosen['global_batch']} is the smallest of the {len(tied)} that count as tied: those within "
        f"{tie_tolerance:.1%} of the least, and within {bound:.1%} if their interval reaches down to it.",
    )


def _next_best(rows: pd.DataFrame, objective: Objective, chosen: int) -> list[tuple[str, int]]:
    """The row to take if the chosen one is not: by its metric, or for the knee its neighbour on the curve."""
    if objective is Objective.KNEE:
        curve = [int(index) for index in envelope(rows).index.to_numpy()]
        place = curve.index(chosen)
        if place + 1 < len(curve):
            return [("next larger batch on the curve", curve[place + 1])]
        return [("next smaller batch on the curve", curve[place - 1])] if place else []
    metric, _ = METRICS[objective]
    rest = rows.drop(index=chosen).sort_values([metric, "global_batch"]).dropna(subset=[metric])
    return [(f"next best {objective.value}", int(rest.index.to_numpy()[0]))] if len(rest) else []


# --- words ------------------------------------------------------------------------------------------------------------


def _reason(row: pd.Series, detail: str, objective: Objective, currency: str) -> str:
    sentences = [f"{configuration(row)} would train in {duration(row['train_time_s'])}"]
    low, high = duration(row["train_time_low_s"]), duration(row["train_time_high_s"])
    sentences[0] += f" (between {low} and {high}; validation and start-up come on top)"
    sentences[0] += (
        f" at a cost of {currency}{three_digits(row['cost'])}."
        if math.isfinite(row["cost"])
        else "; its cost is not known."
    )
    if row.get("interruptions_s", 0.0) > 0:
        sentences.append(f"Expected interruptions take {duration(row['interruptions_s'])} of that.")
    sentences.append(detail)
    if objective in (Objective.TIME, Objective.TIME_TO_RESULT):
        sentences.append("Epochs are taken as independent of the batch, so the least time favours large batches.")
    if row["extrapolated"]:
        sentences.append("It lies outside the profiled range: verify it before a long run.")
    return " ".join(sentences)


def _smallest_cluster(rows: pd.DataFrame, chosen: int, tie_tolerance: float, currency: str) -> str:
    """That the least cost is the smallest cluster's, as in most cases, and the deadline that would change that."""
    cluster = [name for name in ("node_type", "num_nodes") if name in rows]
    here, num_nodes = list(rows.loc[chosen, cluster]), rows["num_nodes"][chosen]
    if num_nodes > rows["num_nodes"].min() or rows["num_nodes"].nunique() == 1:
        return ""
    words = " As mostly under a fixed price, the smallest cluster is the cheapest: more nodes cost more than they save."
    hours, left, index = promised_hours(rows), rows, chosen
    while list(rows.loc[index, cluster]) == here:  # a larger batch of the same cluster may be faster, and tied in cost
        deadline_h = hours[index]
        left = left.loc[hours[left.index] < deadline_h]
        found = _least(left, Objective.COST, tie_tolerance)
        if found is None:
            return f"{words} No larger cluster is faster, so no deadline would change that."
        index = found[0]
    other = rows.loc[index]
    return (
        f"{words} A deadline below {deadline_h:.4g} h would change the choice: objective.deadline_h="
        f"{typed(float(hours[left.index].max())):g}, and the wait in the queue if there is one, takes "
        f"{configuration(other)}, up to {three_digits(hours[index])} h at a cost of "
        f"{currency}{three_digits(other['cost'])}."
    )


def _waiting(rows: pd.DataFrame, row: pd.Series, objective: Objective) -> str:
    """How much of the time to the result is waiting, and where nobody knows how much."""
    if objective is not Objective.TIME_TO_RESULT:
        return ""
    words = ""
    if math.isfinite(row["queue_wait_s"]):
        wait, total = duration(row["queue_wait_s"]), duration(row["time_to_result_s"])
        words = (
            f" Its time to the result of {total} has {wait} of waiting in the queue in it ({row['queue_wait_source']})."
        )
    without = rows.loc[rows["queue_wait_s"].isna()]
    for node_type, of_type in without.groupby(without.get("node_type", pd.Series("", index=without.index))):
        unknown = sorted(set(of_type["num_nodes"]))
        nodes = f"{', '.join(map(str, unknown[:-1]))}, " if len(unknown) > 1 else ""
        nodes += nodes_of(unknown[-1], str(node_type))
        words += f" How long a job of {nodes} would wait is not known and counts as 0."
    return words


def _configuration_of(row: pd.Series) -> dict[str, Any]:
    return {**Candidate.from_record(row.to_dict()).record(), "global_batch": int(row["global_batch"])}


def _numbers(row: pd.Series) -> dict[str, float | None]:
    return {name: float(row[name]) if math.isfinite(row[name]) else None for name in _PREDICTED}


def _alternative(rows: pd.DataFrame, why: str, index: int) -> dict[str, Any]:
    row = rows.iloc[index]
    return {"why": why, **_configuration_of(row), **_numbers(row)}


def _way_out(reasons: set[str]) -> str:
    """What to change where nothing is feasible."""
    words = []
    if INTERRUPTED in reasons:
        words.append(
            "Against interruptions take fewer nodes, save more often (pricing.checkpoint_interval_min) or start faster "
            "(pricing.restart_min)."
        )
    if reasons - {INTERRUPTED}:
        words.append(
            "Add smaller batches per rank or other cluster sizes to the grid, use devices with more memory, or raise "
            "the share of memory that may be used."
        )
    return " ".join(words)


def _nothing_feasible(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "the grid has no candidate; widen the bounds of the global batch or add nodes and batches to it"
    counts = rows["why_infeasible"].value_counts()
    return "\n".join(
        [
            f"none of the {len(rows)} candidates is feasible:",
            *(f"  - {count} x {why}" for why, count in counts.items()),
            _way_out(set(counts.index)),
        ]
    )
