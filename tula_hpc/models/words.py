"""How a candidate and a time stand in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tula_hpc.candidates import nodes_of

if TYPE_CHECKING:
    import pandas as pd


def configuration(row: pd.Series) -> str:
    """`4 nodes x 1 rank with 64 samples each`; `4 h100 nodes ...` where there are types of node."""
    nodes = nodes_of(row["num_nodes"], row.get("node_type", ""))
    ranks = "1 rank" if row["gpus_per_node"] == 1 else f"{row['gpus_per_node']} ranks"
    return f"{nodes} x {ranks} with {row['batch_per_rank']} samples each"


def duration(seconds: float) -> str:
    """Seconds with three digits, in hours, minutes or seconds."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds)} s"


def three_digits(value: float) -> str:
    """Three digits, and all before the point: `0.0885`, `1.71`, `28,800`."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
