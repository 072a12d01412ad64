"""What a choice must keep besides its objective: a deadline, a budget, a number of nodes.

Time and cost are compared with the upper end of the prediction's interval, so that what is promised holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from tula_hpc.errors import TulaError
from tula_hpc.models.words import configuration, duration, three_digits

SECONDS_PER_HOUR = 3600.0
EXACTLY = 1e-9
"""What numbers that were printed and read again may differ by, as a share."""


class NoFeasibleConfiguration(TulaError):
    """No candidate can be chosen; the message counts the reasons and says what to change."""


@dataclass(frozen=True)
class Limits:
    """The limits of a choice, by their names in `objective`; None: no limit."""

    deadline_h: float | None = None
    """Hours of training, with the wait in the queue where it is known."""
    budget: float | None = None
    """Cost in the price's currency."""
    max_nodes: int | None = None
    """Nodes."""

    def keep(self, table: pd.DataFrame, currency: str = "") -> pd.DataFrame:
        """The candidate table with the feasible rows that break a limit made infeasible, and the reasons in words.

        Raises:
            NoFeasibleConfiguration: Nothing that was feasible keeps the limits. Says which limit excludes most, what
                comes closest, by how much it misses, and the limits that would let it through.
        """
        over = self._over(table)
        broken = table["feasible"].astype(bool) & (over > EXACTLY).any(axis=1)
        if not broken.any():
            return table
        if (broken == table["feasible"]).all():
            raise NoFeasibleConfiguration(self._nothing_left(table.loc[broken], over.loc[broken], currency))
        limited = table.copy()
        limited.loc[broken, "feasible"] = False
        limited.loc[broken, "why_infeasible"] = [
            "; ".join(self._words(table.iloc[place], name, currency) for name in _exceeded(over.iloc[place]))
            for place in np.flatnonzero(broken)
        ]
        return limited

    def _over(self, table: pd.DataFrame) -> pd.DataFrame:
        """By how much of each limit that is set each row exceeds it; infinite where that is not known."""
        used = {
            "deadline_h": promised_hours(table),
            "budget": _upper_end(table, "cost"),
            "max_nodes": table["num_nodes"],
        }
        over = {f.name: used[f.name] / getattr(self, f.name) - 1 for f in fields(self) if getattr(self, f.name)}
        return pd.DataFrame(over, index=table.index).astype(float).fillna(math.inf)

    def _words(self, row: pd.Series, name: str, currency: str) -> str:
        """Such as `3.2 h (upper end) exceed objective.deadline_h=2`."""
        one_row = row.to_frame().T
        limit = f"objective.{name}={getattr(self, name):g}"
        if name == "max_nodes":
            return f"{row['num_nodes']} nodes exceed {limit}"
        end = "upper end" if _has_interval(one_row).all() else "predicted, without an interval"
        if name == "budget":
            if math.isnan(row["cost"]):
                return f"its cost is not known, so {limit} cannot be promised"
            return f"{currency}{three_digits(_upper_end(one_row, 'cost').iloc[0])} ({end}) exceed {limit}"
        wait_s = known_wait_s(one_row).iloc[0]
        waiting = f", {duration(wait_s)} of it in the queue" if wait_s > 0 else ""
        return f"{duration(promised_hours(one_row).iloc[0] * SECONDS_PER_HOUR)} ({end}{waiting}) exceed {limit}"

    def _nothing_left(self, rows: pd.DataFrame, over: pd.DataFrame, currency: str) -> str:
        excluded = (over > EXACTLY).sum().sort_values(ascending=False, kind="stable")
        counts = ", ".join(f"objective.{name} excludes {number}" for name, number in excluded.items() if number > 0)
        head = f"no feasible configuration: of {len(rows)} that would run, {counts}"
        worst = over.max(axis=1).to_numpy()
        if not np.isfinite(worst).any():
            return (
                f"{head}; the cost of none is known, since a price for memory needs measured memory. Drop "
                "objective.budget, or use a price per node-hour (pricing=node_hour)."
            )
        closest = int(np.argmin(worst))
        row, missed = rows.iloc[closest], _exceeded(over.iloc[closest])
        misses = " and ".join(f"{self._words(row, name, currency)}, {_share(by)}" for name, by in missed.items())
        enough = " ".join(f"objective.{name}={typed(getattr(self, name) * (1 + by)):g}" for name, by in missed.items())
        return (
            f"{head}. The closest is {configuration(row)}: {misses}. It would do with {enough}; a wider grid may hold "
            "others. What was measured is kept and used again."
        )


def _exceeded(over: pd.Series) -> dict[str, float]:
    """The limits that a row exceeds, and by how much of each."""
    return {str(name): float(excess) for name, excess in over.items() if excess > EXACTLY}


def interval_end(rows: pd.DataFrame, metric: str, end: str) -> pd.Series:
    """The `low` or `high` end of train_time_s, time_to_result_s or cost; without an interval, what is predicted.

    The interval is that of the training time. Every price is proportional to it, and the wait is no part of it.
    """
    time_s = rows["train_time_s"].astype(float)
    bound_s = rows[f"train_time_{end}_s"].astype(float) if f"train_time_{end}_s" in rows else time_s
    bound_s = bound_s.where(bound_s.notna(), time_s)
    if metric == "time_to_result_s":
        return rows[metric].astype(float) + bound_s - time_s
    return rows[metric].astype(float) * bound_s / time_s


def promised_hours(rows: pd.DataFrame) -> pd.Series:
    """Hours that a deadline is compared with: the upper end of the training time, and the wait where it is known."""
    return (_upper_end(rows, "train_time_s") + known_wait_s(rows)) / SECONDS_PER_HOUR


def known_wait_s(rows: pd.DataFrame) -> pd.Series:
    """The wait in the queue; 0 where nobody knows it."""
    if "queue_wait_s" not in rows:
        return pd.Series(0.0, index=rows.index)
    return rows["queue_wait_s"].astype(float).fillna(0.0)


def _upper_end(rows: pd.DataFrame, metric: str) -> pd.Series:
    return interval_end(rows, metric, "high")


def _has_interval(rows: pd.DataFrame) -> pd.Series:
    return rows["train_time_high_s"].notna() if "train_time_high_s" in rows else pd.Series(False, index=rows.index)


def _share(excess: float) -> str:
    return f"{excess:.1%} too much" if excess < 1 else f"{1 + excess:.3g} times as much"


def typed(value: float) -> float:
    """A number of four digits, easily typed, that is not below `value`."""
    step = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.ceil(value / step - EXACTLY) * step
