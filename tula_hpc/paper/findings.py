"""What a result comes to: a table, a picture, answers to the paper's claims, and the reading of run folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from tula_hpc.paper.claims import Answer
from tula_hpc.paper.scales import Run, Scale
from tula_hpc.runs import RunFolder, read_json

Folders = Mapping[Run, RunFolder]
"""The runs of a result that ended well, and where they are."""

if TYPE_CHECKING:
    from tula_hpc.paper.drawing import Panel


@dataclass
class Findings:
    """A result, measured."""

    table: pd.DataFrame
    panels: list[Panel]
    claims: dict[str, Answer] = field(default_factory=dict)
    """By the claim's key."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know to compare it with the paper's, one sentence each."""


@dataclass(frozen=True)
class Result:
    """A table or figure of the paper."""

    name: str
    title: str
    runs: Callable[[Scale], list[Run]]
    """The command lines it is made of; the same one may stand there twice."""
    find: Callable[[Scale, Folders], Findings]
    """Makes it of the folders of those that ended well."""


def candidates(run: RunFolder) -> pd.DataFrame:
    """The run's candidates with predictions and, where measured, measurements; by nodes, then batch. Columns as in
    selection.json; `feasible` is bool, the rest float or text."""
    table = pd.DataFrame(read_json(run.selection)["candidates"])
    numbers = [c for c in table.columns if c not in ("feasible", "extrapolated", "why_infeasible", "node_type")]
    return table.assign(**{column: pd.to_numeric(table[column]) for column in numbers})


def points(run: RunFolder) -> pd.DataFrame:
    """What was measured: fit.json's points."""
    return pd.DataFrame(read_json(run.fit)["points"])


def metrics(run: RunFolder) -> pd.DataFrame:
    """An epoch a row."""
    return pd.DataFrame(run.read_metrics())


def gradients(run: RunFolder) -> pd.DataFrame:
    """A step a row: see `ranks.gradient_trace`."""
    return pd.read_csv(run.gradients)


def result(run: RunFolder) -> dict[str, Any]:
    """How the training ended."""
    return read_json(run.train_result)


def largest_clusters(table: pd.DataFrame, number: int) -> list[int]:
    """The largest numbers of nodes, rising."""
    return sorted(int(nodes) for nodes in table["num_nodes"].unique())[-number:]
