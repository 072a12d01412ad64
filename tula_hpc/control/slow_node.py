"""Whether one node is the cause of a drift, by what the ranks have told of their own forward passes.

Their files are read when a drift has been found, and not before: a look at the training stays one file, however many
ranks it has.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tula_hpc.candidates import Candidate
from tula_hpc.errors import RecordError
from tula_hpc.models.drift import Drift
from tula_hpc.models.slow_host import RankTimes, SlowHost, slow_host
from tula_hpc.runs import RunFolder, read_json


def cause_of(
    drift: Drift, run: RunFolder, launch: str, running: Candidate, points: Sequence[Mapping[str, Any]]
) -> SlowHost | None:
    """The node that has made the steps longer; None if it is not one, or nothing is known.

    Args:
        drift: What was found.
        run: Of the training.
        launch: Of its job.
        running: What it runs at.
        points: What was profiled.
    """
    longer_s = drift.step_time_s - drift.expected.step_time_s
    if longer_s <= 0:
        return None
    ranks = _ranks(run, launch, running.world_size)
    own = [point["forward_s"] for point in points if Candidate.from_record(point) == running]
    found = slow_host(ranks, drift.since, own[0] if own else None) if len(ranks) == running.world_size else None
    shares = [p["compute_time_s"] / p["forward_s"] for p in points if p["forward_s"] > 0]
    explains = found is not None and found.explains(longer_s, max(1.0, statistics.median(shares or [1.0])))
    return found if explains else None


def _ranks(run: RunFolder, launch: str, world_size: int) -> list[RankTimes]:
    """What the ranks of a launch have told; those that have not, or whose file is torn, are missing."""
    found = []
    for rank in range(world_size):
        with suppress(RecordError):
            told = read_json(run.forward_times(rank))
            if told["launch"] == launch:
                found.append(RankTimes(told["host"], [(ended, seconds) for ended, seconds in told["windows"]]))
    return found
