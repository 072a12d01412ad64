"""How much memory a rank needs for a batch, and the largest batch that fits.

The paper's Eq. (3), M_total = M_param + M_grad + M_opt + M_act + M_batch, each term linear in the batch per rank b:

    M(b) = m0 + m1 b            GiB of a rank among several, m1 >= 0
    M(b) = m0 - a + m1 b        GiB of a rank that is alone, a >= 0

Where memory bends upwards, the line is too low at small batches, in the end below 0. A prediction is therefore at least
the least that was measured, and below the smallest measured batch its share of that.

Parameters, gradients and optimizer state do not depend on b (their share is all in m0); activations and the batch
itself do. How many ranks there are does not matter, but a rank among several has what a collective library keeps for
itself, which a rank alone has not: 0.9 GiB with NCCL on H100s, the same for two and for four of them. The total is
fitted to measured totals, not to the sum of the parts, because a sum of peaks that do not come at the same time, or of
parts that nobody measured, is not the peak.

A share of the limit is kept free for what a few steps do not show. On GPUs it is a share of what m0 leaves of the
limit, because m0 does not fluctuate: else a large model on a small device would keep free much of what is left for its
batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from tula_hpc.models.memory_parts import CONSTANT_PARTS, MEMORY_PARTS

Array = NDArray[Any]

MAX_EXTRAPOLATION = 2
"""A batch per rank beyond this multiple of the largest measured one is never called feasible."""
PRIOR_RELATIVE_ERROR = 0.01
"""What a measurement is expected to lie off the line before residuals tell, as a share of the mean measured memory."""
PRIOR_RUNS = 4
"""Measurements that the expectation counts for: a few residuals, which can agree by chance, do not outweigh it."""
MIN_RELATIVE_ERROR = 0.01
"""Half-width below which no residuals are believed: the allocator claims memory in pieces."""

_KINDS_OF_RANKS = ("num_nodes", "gpus_per_node")


class MemoryOutcome(Enum):
    """What became of a fit; `advice` says what to do about it."""

    OK = "The fit is good enough to bound the batch."
    ONE_BATCH_SIZE = (
        "All measurements have the same batch per rank. What grows with it was taken from the measured parts or as "
        "half of the total, and the interval spans from nothing to all of it. Profile a second batch size."
    )
    NOT_RISING = (
        "Memory did not rise with the batch, so its slope was set to 0: tiny batches drown in what the process needs "
        "anyway, as is common on CPUs, or a cache kept memory of an earlier batch. Larger batches are trusted up to "
        f"{MAX_EXTRAPOLATION} times the largest measured one; profile larger batches, each in a fresh process."
    )

    @property
    def advice(self) -> str:
        """What to do, in words."""
        return self.value


def usable_gib(limit_gib: float, fraction: float, constant_gib: float = 0.0) -> float:
    """GiB of a limit that a batch may need: what is constant, and `fraction` of the rest; never more than the limit."""
    constant_gib = min(constant_gib, limit_gib)
    return constant_gib + fraction * (limit_gib - constant_gib)


def usable_in_words(limit_gib: float, fraction: float, constant_gib: float = 0.0) -> str:
    """What `usable_gib` is, and why."""
    if constant_gib == 0:
        return f"{fraction:.0%} of {limit_gib:.3g} GiB"
    if constant_gib >= limit_gib:
        return f"{limit_gib:.3g} GiB, less than the {constant_gib:.3g} GiB that any batch needs, so none fits"
    usable = f"{usable_gib(limit_gib, fraction, constant_gib):.3g} of {limit_gib:.3g} GiB"
    return f"{usable} ({constant_gib:.3g} GiB that any batch needs, and {fraction:.0%} of the rest)"


@dataclass(frozen=True)
class Line:
    """m0 + m1 b."""

    intercept_gib: float
    """m0, GiB."""
    slope_gib: float
    """m1, GiB per sample in the batch of a rank."""

    def at(self, batch_per_rank: ArrayLike) -> Array:
        """GiB at a batch per rank."""
        return np.asarray(self.intercept_gib + self.slope_gib * np.asarray(batch_per_rank, dtype=float))


@dataclass(frozen=True)
class MemoryFit:
    """A fitted memory model of one rank: predictions, their interval, and the largest batch they allow."""

    outcome: MemoryOutcome
    """What became of the fit, with advice."""
    total: Line
    """M(b) of a rank among several; of any rank where only one kind was measured."""
    alone_less_gib: float
    """What a rank that is alone needs less, GiB; 0 unless both kinds were measured."""
    part_lines: dict[str, Line]
    """Terms of Eq. (3) that were measured: column name -> line."""
    residual_gib: float | None
    """Standard deviation of a measurement around the line; None where there are no degrees of freedom to tell."""
    degrees_of_freedom: int
    """Measurements less fitted parameters."""
    batches: tuple[int, ...]
    """Batch per rank of each measurement, sorted."""
    limit_gib: float | None
    """Smallest memory of a rank's device seen while profiling, if it was recorded."""
    smallest_oom_batch: int | None
    """Smallest batch per rank that ran out of memory, if any."""
    on_gpus: bool = False
    """Whether the ranks compute on GPUs."""
    least_gib: float = 0.0
    """Smallest measurement, of ranks alone with what these need less; 0 where it is not known."""

    def predict(self, batch_per_rank: ArrayLike, alone: ArrayLike = False) -> Array:
        """GiB per rank at a batch per rank, for a rank among several, or one that is alone."""
        less_gib = np.where(alone, self.alone_less_gib, 0.0)
        share = np.minimum(np.asarray(batch_per_rank, dtype=float) / self.batches[0], 1.0)
        return np.asarray(np.maximum(self.total.at(batch_per_rank) - less_gib, (self.least_gib - less_gib) * share))

    def interval(self, batch_per_rank: ArrayLike, level: float = 0.9, alone: ArrayLike = False) -> tuple[Array, Array]:
        """Lower and upper GiB that should hold the next measurement with probability `level`.

        The prediction interval of least squares, s t sqrt(1 + 1/n + (b - mean)^2 / Sxx), at least `MIN_RELATIVE_ERROR`.
        s is the residuals' deviation, or more: pooled with `PRIOR_RELATIVE_ERROR`, which counts for `PRIOR_RUNS` of
        them. After one batch size the ends are instead that nothing and that everything grows in proportion to it.
        """
        batch = np.asarray(batch_per_rank, dtype=float)
        centre = self.predict(batch, alone)
        half = np.maximum(self._half_width_gib(batch, level), MIN_RELATIVE_ERROR * centre)
        low, high = centre - half, centre + half
        if self.outcome is MemoryOutcome.ONE_BATCH_SIZE:
            measured = self.total.at(self.batches[0])
            proportional = measured * batch / self.batches[0]
            low = np.minimum(low, np.minimum(measured, proportional))
            high = np.maximum(high, np.maximum(measured, proportional))
        return np.maximum(low, 0.0), high

    def _half_width_gib(self, batch: Array, level: float) -> Array:
        seen = np.array(self.batches, dtype=float)
        expected_gib = PRIOR_RELATIVE_ERROR * float(np.mean(self.total.at(seen)))
        squares = PRIOR_RUNS * expected_gib**2 + self.degrees_of_freedom * (self.residual_gib or 0.0) ** 2
        runs = PRIOR_RUNS + self.degrees_of_freedom
        spread = float(np.sum((seen - seen.mean()) ** 2))
        leverage = (batch - seen.mean()) ** 2 / spread if spread > 0 else 0.0
        quantile = float(stats.t.ppf((1 + level) / 2, runs))
        deviation = max(math.sqrt(squares / runs), self.residual_gib or 0.0)
        return np.asarray(deviation * quantile * np.sqrt(1 + 1 / len(seen) + leverage))

    def parts(self, batch_per_rank: float) -> dict[str, float]:
        """GiB of each measured term of Eq. (3); `other_gib`, where nothing outside the model was measured, is what is
        left to the total."""
        parts = {name: float(line.at(batch_per_rank)) for name, line in self.part_lines.items()}
        if "outside_gib" in parts or "other_gib" in parts:
            return parts
        return {**parts, "other_gib": max(float(self.predict(batch_per_rank)) - sum(parts.values()), 0.0)}

    def bound_batch_per_rank(self) -> int:
        """The largest batch per rank the measurements can speak for, whatever the limit.

        `MAX_EXTRAPOLATION` times the largest measured one, and below the smallest that ran out of memory.
        """
        bound = MAX_EXTRAPOLATION * self.batches[-1]
        return bound if self.smallest_oom_batch is None else min(bound, self.smallest_oom_batch - 1)

    def constant_gib(self, alone: bool = False) -> float:
        """GiB that every batch needs and that no share is kept free for: m0 on GPUs, at least 0.

        0 on CPUs, whose resident memory is less predictable, and where the fit cannot tell m0 from what grows.
        """
        if not self.on_gpus or self.outcome is not MemoryOutcome.OK:
            return 0.0
        return max(float(self.predict(0, alone)), 0.0)

    def max_batch_per_rank(self, limit_gib: float | None = None, fraction: float = 0.9) -> int:
        """The largest batch per rank whose upper end stays within `usable_gib`; 0 when none does.

        Args:
            limit_gib: Memory of a rank's device, GiB; None takes the smallest seen while profiling.
            fraction: Share the training may use of the limit, on GPUs of what m0 leaves of it. The rest is for what the
                peak of a few steps misses: validation, checkpoints, fragmentation.

        Raises:
            ValueError: No limit is known, or one of the arguments is out of range.
        """
        limit_gib = self.limit_gib if limit_gib is None else limit_gib
        if limit_gib is None:
            raise ValueError("no memory limit was given and none was recorded while profiling; pass limit_gib")
        if not (math.isfinite(limit_gib) and limit_gib > 0 and 0 < fraction <= 1):
            raise ValueError(f"limit_gib must be positive and fraction in (0, 1], got {limit_gib} and {fraction}")
        batch = np.arange(1, self.bound_batch_per_rank() + 1)
        fits = batch[self.interval(batch)[1] <= usable_gib(limit_gib, fraction, self.constant_gib())]
        return int(fits[-1]) if len(fits) else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "outcome": self.outcome.name,
            "advice": self.outcome.advice,
            "total": _line_to_dict(self.total),
            "alone_less_gib": self.alone_less_gib,
            "part_lines": {name: _line_to_dict(line) for name, line in self.part_lines.items()},
            "residual_gib": self.residual_gib,
            "degrees_of_freedom": self.degrees_of_freedom,
            "batches": list(self.batches),
            "limit_gib": self.limit_gib,
            "smallest_oom_batch": self.smallest_oom_batch,
            "on_gpus": self.on_gpus,
            "least_gib": self.least_gib,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MemoryFit:
        """The fit that `to_dict` described."""
        return cls(
            outcome=MemoryOutcome[values["outcome"]],
            total=Line(**values["total"]),
            alone_less_gib=values.get("alone_less_gib", 0.0),  # not told apart in older records
            part_lines={name: Line(**line) for name, line in values["part_lines"].items()},
            residual_gib=values["residual_gib"],
            degrees_of_freedom=int(values["degrees_of_freedom"]),
            batches=tuple(int(batch) for batch in values["batches"]),
            limit_gib=values["limit_gib"],
            smallest_oom_batch=values["smallest_oom_batch"],
            on_gpus=values.get("on_gpus", False),  # older records kept a share of the whole limit free
            least_gib=values.get("least_gib", 0.0),
        )


def fit_memory(table: pd.DataFrame, oom_batches: Sequence[int] = (), on_gpus: bool = False) -> MemoryFit:
    """Fits M(b) = m0 + m1 b, the peak memory of a rank, to measured peaks.

    Args:
        table: One row per run: batch_per_rank and memory_gib (largest peak over the ranks), and where known num_nodes
            and gpus_per_node, the parts of Eq. (3) by the names of `MEMORY_PARTS`, and limit_gib (what of
            the device's memory the run could have). Rows without a positive finite memory_gib are left out.
        oom_batches: Batches per rank that ran out of device memory, on any number of ranks, since the need of ranks
            among several is alike and that of one alone is less. Each is a censored point: M(b) > limit. They bound
            the batch, and where the line stays below the limit at the smallest of them they pull it up.
        on_gpus: Whether the ranks compute on GPUs, where what is constant may be used whole.

    Raises:
        ValueError: A column is missing, or no row has a positive finite memory_gib.
    """
    missing = [name for name in ("batch_per_rank", "memory_gib") if name not in table.columns]
    if missing:
        raise ValueError(f"the table of memory peaks lacks the columns {missing}; it has {list(table.columns)}")
    good = _measured(table, "memory_gib") & _measured(table, "batch_per_rank")
    if not good.any():
        raise ValueError(f"no row has a positive finite memory_gib, in GiB; {len(table)} rows were given")
    data = table.loc[good]
    batch, memory = (data[name].to_numpy(dtype=float) for name in ("batch_per_rank", "memory_gib"))
    limits = data.loc[_measured(data, "limit_gib"), "limit_gib"].to_list() if "limit_gib" in data else []
    limit = float(min(limits)) if limits else None
    oom = min(oom_batches, default=None)
    part_lines = _fit_parts(data)

    alone = _alone(data)
    total, less = _fit_both_kinds(batch, memory, alone)
    one_batch = len(set(batch)) == 1
    if one_batch:
        total = _split_one_batch(float(total.at(batch[0])), float(batch[0]), part_lines)
    elif oom is not None and limit is not None and total.at(oom) < limit:
        # One-sided least squares: a censored point counts only where the line contradicts it, with the limit as value.
        # It is of ranks among several, unless only ranks alone were measured: then nothing tells the kinds apart.
        total, less = _fit_both_kinds(np.append(batch, oom), np.append(memory, limit), np.append(alone, alone.all()))
    residuals = memory - total.at(batch) + np.where(alone, less, 0.0)
    freedom = max(len(memory) - (1 if one_batch else 2) - (1 if less > 0 else 0), 0)
    return MemoryFit(
        outcome=_outcome(one_batch, total),
        total=total,
        alone_less_gib=less,
        part_lines=part_lines,
        residual_gib=float(np.sqrt(np.sum(residuals**2) / freedom)) if freedom > 0 else None,
        degrees_of_freedom=freedom,
        batches=tuple(sorted(int(value) for value in batch)),
        limit_gib=limit,
        smallest_oom_batch=None if oom is None else int(oom),
        on_gpus=on_gpus,
        least_gib=float(np.min(memory + np.where(alone, less, 0.0))),
    )


def _outcome(one_batch: bool, total: Line) -> MemoryOutcome:
    if one_batch:
        return MemoryOutcome.ONE_BATCH_SIZE
    return MemoryOutcome.OK if total.slope_gib > 0 else MemoryOutcome.NOT_RISING


def _measured(table: pd.DataFrame, column: str) -> NDArray[np.bool_]:
    values = table[column].to_numpy(dtype=float)
    return np.asarray(np.isfinite(values) & (values > 0), dtype=bool)


def _alone(data: pd.DataFrame) -> NDArray[np.bool_]:
    """Which rows are of a rank that is alone; none where the table does not say how many there are."""
    if not set(_KINDS_OF_RANKS) <= set(data.columns):
        return np.zeros(len(data), dtype=bool)
    return np.asarray(data["num_nodes"].to_numpy() * data["gpus_per_node"].to_numpy() == 1, dtype=bool)


def _fit_both_kinds(batch: Array, gib: Array, alone: NDArray[np.bool_]) -> tuple[Line, float]:
    """Least squares of one slope for all, and of what ranks alone need less; nothing where that would be negative.

    The slope is that of the deviations from each kind's own mean, as always with a constant for each group. Kinds that
    have one batch each, and not the same, tell no slope of their own: one line then goes through both.
    """
    one_each = all(len(set(batch[kind])) <= 1 for kind in (alone, ~alone)) and len(set(batch)) > 1
    if alone.all() or not alone.any() or one_each:
        return _fit_line(batch, gib), 0.0
    centred = [(batch[kind] - batch[kind].mean(), gib[kind] - gib[kind].mean()) for kind in (alone, ~alone)]
    slope = _fit_line(*(np.concatenate(values) for values in zip(*centred, strict=True))).slope_gib
    intercepts = [float(gib[kind].mean()) - slope * float(batch[kind].mean()) for kind in (alone, ~alone)]
    less = intercepts[1] - intercepts[0]
    return (Line(intercepts[1], slope), less) if less > 0 else (_fit_line(batch, gib), 0.0)


def _fit_line(batch: Array, gib: Array) -> Line:
    """Least squares with a slope >= 0; a constant where the batch does not vary or the values do not rise."""
    offset = batch - batch.mean()
    spread = float(np.sum(offset**2))
    slope = float(np.sum(offset * gib)) / spread if spread > 0 else 0.0
    # Rounding alone can leave a slope of 1e-18; what the whole range adds must be visible next to the total.
    if slope * float(np.ptp(batch)) <= 1e-9 * float(np.max(np.abs(gib))):
        slope = 0.0
    return Line(float(gib.mean()) - slope * float(batch.mean()), slope)


def _fit_parts(data: pd.DataFrame) -> dict[str, Line]:
    """The line of each measured term of Eq. (3); parameters, gradients and optimizer state are constant."""
    lines = {}
    for name in MEMORY_PARTS:
        if name not in data:
            continue
        known = data.loc[np.isfinite(data[name].to_numpy(dtype=float))]
        if known.empty:
            continue
        batch, gib = (known[column].to_numpy(dtype=float) for column in ("batch_per_rank", name))
        lines[name] = Line(float(np.median(gib)), 0.0) if name in CONSTANT_PARTS else _fit_line(batch, gib)
    return lines


def _split_one_batch(memory_gib: float, batch: float, parts: dict[str, Line]) -> Line:
    """A line through the one measured batch: activations and batch grow if known, else half of the total."""
    growing = sum(float(parts[name].at(batch)) for name in ("activation_gib", "batch_gib") if name in parts)
    growing = growing if 0 < growing < memory_gib else memory_gib / 2
    return Line(memory_gib - growing, growing / batch)


def _line_to_dict(line: Line) -> dict[str, float]:
    return {"intercept_gib": line.intercept_gib, "slope_gib": line.slope_gib}
