"""Adaptive search: measure where the decision is least certain, and stop when no candidate could still change it.

Draws of what all times may be, from the joint posterior of the step times, say how much each candidate could lose
against the best of its draw. The search is done when the choice is measured and loses more than the tolerance against
an unmeasured candidate in at most one of ten draws. Until then it measures the candidates whose times tell most about
which choice is right: knowing such a time, the mean loss of the best choice falls by the expected value of sample
information (Raiffa and Schlaifer, Applied Statistical Decision Theory, 1961), estimated by sorting the draws by that
time into quarters. That holds for the knee as well, whose position may depend on points that are no rivals of it.

The draws are the same at every call, so the same measurements always ask for the same points.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd

from tula_hpc.candidates import Candidate
from tula_hpc.models.knee import find_knee
from tula_hpc.models.posterior import Array
from tula_hpc.models.search import POINTS_A_ROUND, Round
from tula_hpc.models.selection import METRICS, Objective, select
from tula_hpc.models.words import configuration

CONFIDENCE = 0.9
"""Share of the draws in which the choice must be within the tolerance of the best."""
DRAWS = 128
"""With 64, quarters of 16 draws were too few to tell where a knee lies: a third more rounds on the public traces."""
QUANTILES = 4
WORTH_A_PLACE = 0.3
"""Share of the most informative point's value that another must have to be measured in the same round."""


def next_points(
    table: pd.DataFrame,
    covariance: Array,
    open_candidates: Collection[Candidate],
    objective: Objective | str,
    tolerance: float,
    tie_tolerance: float = 0.0,
) -> Round:
    """The points to measure next, or why no others.

    Args:
        table: From `candidate_table`, with limits and failed candidates made infeasible.
        covariance: Of log step time, rows of `table` by rows of `table`; see `posterior`.
        open_candidates: Candidates that may be measured.
        objective: As for `select`.
        tolerance: Share by which an unmeasured candidate must possibly beat the choice.
        tie_tolerance: As for `select`; the smaller batch that it takes is measured as well.

    Raises:
        NoFeasibleConfiguration: No row is feasible.
    """
    objective = Objective(objective)
    chosen = select(table, objective, tie_tolerance).candidate
    feasible = table["feasible"].to_numpy(dtype=bool)
    if objective is not Objective.KNEE:
        feasible = feasible & np.isfinite(table[METRICS[objective][0]].to_numpy(dtype=float))
    rows = table.loc[feasible].reset_index(drop=True)
    candidates = [Candidate.from_record(row) for row in rows.to_dict("records")]
    is_open = np.array([candidate in open_candidates for candidate in candidates])
    if not is_open.any():
        return Round(
            ended_by="exhausted", why="every candidate that is expected to fit and to keep the limits is measured"
        )
    logs = _draws(covariance[np.ix_(feasible, feasible)])
    losses = _losses(rows, logs, objective)
    best = candidates.index(select(table, objective, 0.0).candidate)
    share = float(np.mean(losses[:, best] > tolerance))
    unsure = share > 1 - CONFIDENCE
    wanted = [i for i in dict.fromkeys((best, candidates.index(chosen))) if is_open[i]]
    if not wanted and not unsure:
        return Round(
            ended_by="tolerance",
            why=f"with {CONFIDENCE:.0%} confidence no candidate beats {configuration(rows.iloc[best])} by more than "
            f"{tolerance:.1%} in {_quantity(objective)}",
        )
    if unsure:
        wanted = _most_informative(logs, losses, is_open, [(c.node_type, c.num_nodes) for c in candidates], wanted)
    if not wanted:
        return Round(ended_by="exhausted", why="measuring more would not tell the best candidates apart")
    why = f"in {share:.0%} of what the times may be, another choice is better by more than {tolerance:.1%}"
    if not unsure:
        why = "the choice itself is not measured yet"
    return Round(sorted(candidates[i] for i in wanted), why=why)


def _quantity(objective: Objective) -> str:
    return "the position of the knee" if objective is Objective.KNEE else METRICS[objective][1]


def _draws(covariance: Array) -> Array:
    """(draws, candidates) deviations of log step time with this covariance."""
    values, vectors = np.linalg.eigh(covariance)
    normal = np.random.default_rng(0).standard_normal((DRAWS, len(covariance)))
    return np.asarray(normal @ (vectors * np.sqrt(np.maximum(values, 0.0))).T)


def _losses(rows: pd.DataFrame, logs: Array, objective: Objective) -> Array:
    """(draws, candidates) by how much, as a share, each candidate is worse than the best of the draw. A knee too far up
    the curve is faster and as wrong, so there both directions count."""
    times = rows["train_time_s"].to_numpy(dtype=float) * np.exp(logs)
    if objective is Objective.KNEE:
        knees = [find_knee(rows.assign(train_time_s=drawn))[0] for drawn in times]
        return np.asarray(np.expm1(np.abs(np.log(times / times[np.arange(len(times)), knees][:, None]))))
    if objective is Objective.TIME_TO_RESULT:
        metric = times + rows["queue_wait_s"].fillna(0.0).to_numpy(dtype=float)
    else:
        metric = rows[METRICS[objective][0]].to_numpy(dtype=float) * np.exp(logs)  # every price is proportional to time
    return np.asarray(metric / metric.min(axis=1, keepdims=True) - 1)


def _most_informative(
    logs: Array, losses: Array, is_open: Array, clusters: list[tuple[str, int]], wanted: list[int]
) -> list[int]:
    """`wanted`, filled up with open candidates of other types or numbers of nodes in the order of the value of knowing
    them."""
    order = np.argsort(logs, axis=0)
    now = losses.mean(axis=0).min()
    value = np.full(len(clusters), -np.inf)
    for i in np.flatnonzero(is_open):
        parts = np.array_split(order[:, i], QUANTILES)
        value[i] = now - sum(len(part) / DRAWS * losses[part].mean(axis=0).min() for part in parts)
    found = wanted[:POINTS_A_ROUND]
    for i in np.argsort(-value, kind="stable"):
        if len(found) == POINTS_A_ROUND or not is_open[i] or (found and value[i] < WORTH_A_PLACE * value.max()):
            break
        if clusters[i] not in {clusters[j] for j in found}:
            found.append(int(i))
    return found
