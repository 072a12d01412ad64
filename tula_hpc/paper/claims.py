"""The paper's claims one by one: what it says, what was measured, on what, and what follows."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from tula_hpc.paper import published
from tula_hpc.paper.published import CLAIMS
from tula_hpc.runs import read_json

MEASURED = Path(__file__).with_name("measured.csv")
"""What was measured with this version; made of the records in tests/data by tests/benchmarks/claims.py."""
NOT_MEASURED = "not measured yet"
CORRELATED = 0.5
"""Rank correlation from which two things are said to go together."""
ALIKE = 3.0
"""Points of accuracy within which trainings end alike."""
LINEAR_PERCENT = 5.0
"""A line that is off by less describes the points."""


class Answer(NamedTuple):
    """What a result says of one claim."""

    here: str
    """What was measured, in words."""
    verdict: str
    """What follows for the claim."""


def holds(it_does: bool) -> str:
    """The verdict where there is nothing between yes and no."""
    return "holds" if it_does else "not here"


def elsewhere(batch: float, said: float, *, largest: float) -> str:
    """The verdict on a batch that depends on the hardware: alike within a factor of two; where it is the largest that
    was measured, a larger grid might have another."""
    if batch == largest <= 2 * said:
        return "the grid ends too soon"
    return "holds" if said / 2 <= batch <= 2 * said else "elsewhere here"


def against(percent: float, said: tuple[float, float]) -> str:
    """The verdict on the largest of several median errors, beside the paper's smallest and largest."""
    return "closer here" if percent <= said[0] else "holds" if percent <= said[1] else "farther off here"


def speedup(times: float, model: str) -> str:
    """The verdict on how much faster the chosen configuration is."""
    return "holds" if times >= published.SPEEDUP[model] else "less here"


def or_as_printed(these: Mapping[str, bool]) -> str:
    """The verdict on what the default method (`ags`) and the printed one (`ags_paper`) each do, or do not."""
    if these and all(these.values()):
        return "holds"
    return "holds, not as printed" if these.get("ags") else "not here"


class Measured(NamedTuple):
    """What was found of one claim."""

    key: str
    here: str
    hardware: str
    setting: str
    verdict: str
    record: str
    """File of the repository that it was computed from."""


def shipped() -> dict[str, Measured]:
    """What was measured with this version."""
    with MEASURED.open(newline="", encoding="utf-8") as file:
        return {row["key"]: Measured(**row) for row in csv.DictReader(file)}


def own(folder: Path) -> dict[str, Answer]:
    """What the results in a folder say, by the claim's key; a file of an older version has no verdicts."""
    found: dict[str, Answer] = {}
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        verdicts = record.get("verdicts", {})
        found |= {key: Answer(here, verdicts.get(key, "")) for key, here in record.get("claims", {}).items()}
    return found


def table(measured: dict[str, Measured]) -> pd.DataFrame:
    """A row a claim, in the paper's order."""
    rows = []
    for claim in CLAIMS:
        found = measured.get(claim.key)
        here = (found.here, found.hardware, found.setting, found.verdict) if found else (NOT_MEASURED, "", "", "")
        rows.append((f"{claim.where} (`{claim.result}`)", claim.statement, claim.published, *here))
    return pd.DataFrame(rows, columns=["where (job)", "claim", "paper", "here", "hardware", "setting", "verdict"])


def own_table(found: dict[str, Answer]) -> pd.DataFrame:
    """The same for a user's own results, whose hardware and setting they know."""
    nothing = Answer(NOT_MEASURED, "")
    rows = [(c.where, c.result, c.statement, c.published, *found.get(c.key, nothing)) for c in CLAIMS]
    return pd.DataFrame(rows, columns=["where", "job", "claim", "paper", "here", "verdict"])
