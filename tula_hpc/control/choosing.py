"""From measured points to the models and the table that a configuration is chosen from, by a run's settings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd

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


def fitted(settings: Settings, usable: list[dict[str, Any]], out_of_memory: list[int]) -> dict[str, Any]:
    """Both step-time forms and the memory model, as fit.json holds them.

    Args:
        settings: Of the run.
        usable: Measured points as `read_point` gives them, but for those that needed allocator retries.
        out_of_memory: Batches per rank that did not fit.
    """
    table = pd.DataFrame(usable).drop(columns=["hosts"])
    memory = fit_memory(table, out_of_memory)
    fraction, limit = settings.search.memory_fraction, float(table["limit_gib"].min())
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


def chosen_fit(fit: Mapping[str, Any]) -> StepTimeFit:
    """The step-time fit that the run chooses by, of what fit.json holds."""
    return StepTimeFit.from_dict(fit["step_time"][fit["step_time_form"]])


def predicted(
    settings: Settings,
    fit: Mapping[str, Any],
    price: Price,
    waits: Mapping[int, Wait] | None = None,
    *,
    drifted: StepTimeFit | None = None,
    epochs: float | None = None,
    ran_out: Collection[Candidate] = (),
) -> pd.DataFrame:
    """The candidate table of the run's grid by what fit.json says; candidates that failed when profiled are infeasible.

    Args:
        settings: Of the run.
        fit: What fit.json holds.
        price: As in `candidate_table`; of the settings, whose weights Slurm may have to be asked for.
        waits: As in `candidate_table`.
        drifted: Predicts instead of the fit on record, once the training's steps have become other than that says.
        epochs: That are left; None: all.
        ran_out: Candidates that did not fit in memory after profiling.
    """
    grid, profiled = settings.grid_candidates(), chosen_fit(fit)
    points = pd.DataFrame(fit["points"])
    table = candidate_table(
        grid,
        profiled if drifted is None else drifted,
        MemoryFit.from_dict(fit["memory"]),
        price,
        settings.train_samples,
        settings.training.epochs if epochs is None else epochs,
        fit["memory_limit_gib"],
        fit["memory_fraction"],
        {Candidate.from_name(name, settings.cluster.ranks_per_node) for name in fit["infeasible"]} | set(ran_out),
        points,
        waits,
        profiled,
    )
    for row, candidate in enumerate(grid):
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
    form, objective = chosen_fit(fit), settings.objective
    # what was given up is no rival that a measurement could settle
    points = pd.DataFrame(fit["points"])
    measured = set(zip(points["num_nodes"], points["batch_per_rank"], strict=True))
    may_be = {(c.num_nodes, c.batch_per_rank) for c in open_candidates} | measured
    there = np.array([pair in may_be for pair in zip(table["num_nodes"], table["batch_per_rank"], strict=True)])
    table = table.assign(feasible=table["feasible"].astype(bool) & there)
    try:
        with contextlib.suppress(NoFeasibleConfiguration):
            table = limited(settings, table)
        covariance = posterior(form, points, table).covariance
        return next_points(
            table, covariance, open_candidates, objective.kind.name, settings.search.tolerance, objective.tie_tolerance
        )
    except (NoFeasibleConfiguration, UnusableFit) as error:
        return Round(ended_by="exhausted", why=str(error).splitlines()[0])
