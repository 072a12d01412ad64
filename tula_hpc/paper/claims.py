"""The paper's claims one by one: what it says, what was measured, on what, and what follows."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from tula_hpc.paper.published import CLAIMS
from tula_hpc.runs import read_json

MEASURED = Path(__file__).with_name("measured.csv")
"""What was measured with this version; made of the records in tests/data by tests/benchmarks/claims.py."""
NOT_MEASURED = "not measured yet"


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


def own(folder: Path) -> dict[str, str]:
    """What the results in a folder say: key of a claim -> words."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        found |= read_json(path).get("claims", {})
    return found


def table(measured: dict[str, Measured]) -> pd.DataFrame:
    """A row a claim, in the paper's order."""
    rows = []
    for claim in CLAIMS:
        found = measured.get(claim.key)
        here = (found.here, found.hardware, found.setting, found.verdict) if found else (NOT_MEASURED, "", "", "")
        rows.append((f"{claim.where} (`{claim.result}`)", claim.statement, claim.published, *here))
    return pd.DataFrame(rows, columns=["where (job)", "claim", "paper", "here", "hardware", "setting", "verdict"])


def own_table(found: dict[str, str]) -> pd.DataFrame:
    """The same for a user's own results, which know no hardware or verdict."""
    rows = [(c.where, c.result, c.statement, c.published, found.get(c.key, NOT_MEASURED)) for c in CLAIMS]
    return pd.DataFrame(rows, columns=["where", "job", "claim", "paper", "here"])
