"""From measured points to the models and the table that a configuration is chosen from, by a run's settings.

Each type of node has models of its own, of its own points: nothing that was measured on one says anything of another.
Their tables stand below each other, and one choice is made over all rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.linalg import block_diag

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings
from tula_hpc.models.adaptive import next_points
from tula_hpc.models.limits import Limits, NoFeasibleConfiguration
from tula_hpc.models.memory import MemoryFit, fit_memory
from tula_hpc.models.posterior import posterior
from tula_hpc.models.pricing import Price
from tula_hpc.models.queue_wait import Wait
from tula_hpc.models.search import Round
from tula_hpc.models.selection import UnusableFit, candidate_table
from tula_hpc.models.step_time import StepTimeFit, fit_step_time


def fitted(
    settings: Settings, usable: list[dict[str, Any]], out_of_memory: Collection[Candidate] = ()
) -> dict[str, Any]:
    """The models as fit.json holds them: of each type of node below `types`, or as they are where there are no types.

    A type of which nothing could be used has none.

    Args:
        settings: Of the run.
        usable: Measured points as `read_point` gives them, but for those that needed allocator retries.
        out_of_memory: What did not fit.
    """
    found = {}
    for node_type in settings.node_types:
        points = [point for point in usable if point.get("node_type", "") == node_type]
        if points:
            batches = [c.batch_per_rank for c in out_of_memory if c.node_type == node_type]
            found[node_type] = _fitted_of_type(settings.of_type(node_type), points, batches)
    return {"types": found} if settings.cluster.node_types else found[""]


def _fitted_of_type(settings: Settings, usable: list[dict[str, Any]], out_of_memory: list[int]) -> dict[str, Any]:
    """Both step-time forms and the memory model of one type of node."""
    table = pd.DataFrame(usable).drop(columns=["hosts"])
    memory = fit_memory(table, out_of_memory, on_gpus=settings.cluster.gpus_per_node > 0)
    fraction, limit = settings.memory_fraction, float(pd.to_numeric(table["limit_gib"]).min())
    return {
        "step_time": {
            form: fit_step_time(table, form, settings.search.collective.name).to_dict()
            for form in ("overlap", "additive")
        },
        "step_time_form": settings.search.step_time.name,
        "memory": memory.to_dict(),
        "memory_limit_gib": limit if math.isfinite(limit) else None,
        "memory_fraction": fraction,
        "max_batch_per_rank": memory.max_batch_per_rank(limit, fraction) if math.isfinite(limit) else None,
    }


def fit_of(fit: Mapping[str, Any], node_type: str) -> Mapping[str, Any]:
    """What fit.json holds of one type of node, as it would be in a run that has only that.

    Raises:
        UnusableFit: It holds no models of that type.
    """
    if not node_type:
        return fit
    if node_type not in fit["types"]:
        raise UnusableFit(f"nothing that could be used was measured on a node of type {node_type}")
    by_name = {
        part: {n: why for n, why in fit[part].items() if Candidate.from_name(n, 1).node_type == node_type}
        for part in ("infeasible", "failed")
    }
    points = [point for point in fit["points"] if point["node_type"] == node_type]
    return {**fit["types"][node_type], **by_name, "points": points}


def types_of(fit: Mapping[str, Any]) -> list[str]:
    """The types of node that fit.json has models of; a single empty name where the run has no types."""
    return list(fit["types"]) if "types" in fit else [""]


def rows_of(table: pd.DataFrame, node_type: str) -> pd.DataFrame:
    """The rows of one type of node; all of them for the empty name."""
    return table.loc[table["node_type"] == node_type] if node_type else table


def chosen_fit(fit: Mapping[str, Any]) -> StepTimeFit:
    """The step-time fit that the run chooses by, of what fit.json holds of one type of node."""
    return StepTimeFit.from_dict(fit["step_time"][fit["step_time_form"]])


def predicted(
    settings: Settings,
    fit: Mapping[str, Any],
    prices: Mapping[str, Price],
    waits: Mapping[str, Mapping[int, Wait]] | None = None,
) -> pd.DataFrame:
    """The candidate table of the run's whole grid by what fit.json says, type by type.

    Candidates of a type whose models predict nothing are infeasible, as long as there is another type.

    Args:
        settings: Of the run.
        fit: What fit.json holds.
        prices: Of each type, from `prices_of`.
        waits: Type -> number of nodes -> how long a training would wait in the queue.

    Raises:
        UnusableFit: The models of no type predict anything.
    """
    tables: dict[str, pd.DataFrame] = {}
    unusable: dict[str, UnusableFit] = {}
    for node_type in settings.node_types:
        try:
            own = (waits or {}).get(node_type)
            tables[node_type] = predicted_on(settings, node_type, fit, prices[node_type], own)
        except UnusableFit as error:
            unusable[node_type] = error
    if not tables:
        raise next(iter(unusable.values()))
    complete = next(iter(tables.values()))
    for node_type, why in unusable.items():
        grid = [c for c in settings.grid_candidates() if c.node_type == node_type]
        tables[node_type] = _unpredicted(grid, str(why), complete)
    return pd.concat([tables[node_type] for node_type in settings.node_types], ignore_index=True)


def _unpredicted(candidates: list[Candidate], why: str, like: pd.DataFrame) -> pd.DataFrame:
    """Rows with the columns of another table for candidates of which nothing is predicted."""
    rows = pd.DataFrame([{**c.record(), "global_batch": c.global_batch} for c in candidates])
    for name in like.columns.difference(rows.columns, sort=False):
        is_number = pd.api.types.is_numeric_dtype(like[name])
        rows[name] = False if like[name].dtype == bool else math.nan if is_number else ""
    return rows.assign(why_infeasible=why)[like.columns]


def predicted_on(
    settings: Settings,
    node_type: str,
    fit: Mapping[str, Any],
    price: Price,
    waits: Mapping[int, Wait] | None = None,
    *,
    drifted: StepTimeFit | None = None,
    epochs: float | None = None,
    ran_out: Collection[Candidate] = (),
) -> pd.DataFrame:
    """The candidate table of one type of node; candidates that failed when profiled are infeasible.

    Args:
        settings: Of the run.
        node_type: The type's name; empty in a run that has none.
        fit: What fit.json holds.
        price: As in `candidate_table`, of that type.
        waits: As in `candidate_table`.
        drifted: Predicts instead of the fit on record, once the training's steps have become other than that says.
        epochs: That are left; None: all.
        ran_out: Candidates that did not fit in memory after profiling.

    Raises:
        UnusableFit: The models of this type predict nothing, or there are none.
    """
    fit = fit_of(fit, node_type)
    grid, profiled = [c for c in settings.grid_candidates() if c.node_type == node_type], chosen_fit(fit)
    points = pd.DataFrame(fit["points"])
    ranks = settings.of_type(node_type).cluster.ranks_per_node
    table = candidate_table(
        grid,
        profiled if drifted is None else drifted,
        MemoryFit.from_dict(fit["memory"]),
        price,
        settings.train_samples,
        settings.training.epochs if epochs is None else epochs,
        fit["memory_limit_gib"],
        fit["memory_fraction"],
        {Candidate.from_name(name, ranks) for name in fit["infeasible"]} | set(ran_out),
        points,
        waits,
        profiled,
    )
    measured = {Candidate.from_record(point).name for point in fit["points"]}
    for row, candidate in enumerate(grid):
        if candidate.name in fit["infeasible"] and candidate.name in measured:  # it did fit, so why not is on record
            table.loc[row, "why_infeasible"] = fit["infeasible"][candidate.name]
        if candidate.name in fit["failed"]:
            table.loc[row, ["feasible", "why_infeasible"]] = [False, fit["failed"][candidate.name]]
    return table


def limited(settings: Settings, table: pd.DataFrame) -> pd.DataFrame:
    """The table under the objective's limits. Raises NoFeasibleConfiguration if nothing keeps them."""
    objective = settings.objective
    return Limits(objective.deadline_h, objective.budget, objective.max_nodes).keep(table, settings.pricing.currency)


def adaptive_round(
    settings: Settings, fit: Mapping[str, Any], table: pd.DataFrame, open_candidates: Collection[Candidate]
) -> Round:
    """What adaptive search measures next, by the run's objective; see `models.adaptive`.

    Where nothing keeps the limits by the upper ends of wide intervals, it goes on as if there were none.
    """
    objective = settings.objective
    # what was given up is no rival that a measurement could settle
    may_be = {*open_candidates, *map(Candidate.from_record, fit["points"])}
    there = np.array([Candidate.from_record(row) in may_be for row in table.to_dict("records")])
    table = table.assign(feasible=table["feasible"].astype(bool) & there)
    try:
        with contextlib.suppress(NoFeasibleConfiguration):
            table = limited(settings, table)
        covariance = _covariance(settings, fit, table)
        return next_points(
            table, covariance, open_candidates, objective.kind.name, settings.search.tolerance, objective.tie_tolerance
        )
    except (NoFeasibleConfiguration, UnusableFit) as error:
        return Round(ended_by="exhausted", why=str(error).splitlines()[0])


def _covariance(settings: Settings, fit: Mapping[str, Any], table: pd.DataFrame) -> NDArray[Any]:
    """(rows, rows) of log step time in the order of `predicted`; types of node do not depend on each other."""
    blocks = []
    for node_type in settings.node_types:
        rows = rows_of(table, node_type)
        try:
            own = fit_of(fit, node_type)
            blocks.append(posterior(chosen_fit(own), pd.DataFrame(own["points"]), rows).covariance)
        except UnusableFit:  # none of its rows is feasible
            blocks.append(np.zeros((len(rows), len(rows))))
    return np.asarray(block_diag(*blocks))
