"""The candidate table of a run: what the records of a fit say of every candidate of its grid."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings
from tula_hpc.models.memory import MemoryFit
from tula_hpc.models.pricing import Price
from tula_hpc.models.queue_wait import Wait
from tula_hpc.models.selection import candidate_table
from tula_hpc.models.step_time import StepTimeFit


def chosen_fit(fit: dict[str, Any]) -> StepTimeFit:
    """The step-time fit that the run chooses by, of what `fit.json` holds."""
    return StepTimeFit.from_dict(fit["step_time"][fit["step_time_form"]])


def predicted_table(
    settings: Settings,
    fit: dict[str, Any],
    step_time: StepTimeFit,
    price: Price,
    epochs: float,
    waits: Mapping[int, Wait] | None = None,
    ran_out: Collection[Candidate] = (),
) -> pd.DataFrame:
    """`candidate_table` of a run's grid.

    Args:
        settings: Of the run.
        fit: What `fit.json` holds.
        step_time: The fit that predicts; the record's own, or one that agrees with the training's steps.
        price: As in `candidate_table`.
        epochs: Epochs to train.
        waits: As in `candidate_table`.
        ran_out: Candidates that did not fit in memory after profiling.
    """
    grid = settings.grid_candidates()
    table = candidate_table(
        grid,
        step_time,
        MemoryFit.from_dict(fit["memory"]),
        price,
        settings.train_samples,
        epochs,
        fit["memory_limit_gib"],
        fit["memory_fraction"],
        {Candidate.from_name(name, settings.cluster.ranks_per_node) for name in fit["infeasible"]} | set(ran_out),
        pd.DataFrame(fit["points"]),
        waits,
    )
    for row, candidate in enumerate(grid):
        if candidate.name in fit["failed"]:
            table.loc[row, ["feasible", "why_infeasible"]] = [False, fit["failed"][candidate.name]]
    return table
