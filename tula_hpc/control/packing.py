"""How candidates share submissions (`profiling=...`): a wait in the queue for each, for a few, or for all together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tula_hpc.candidates import Candidate
from tula_hpc.config import ProfilingKind, Settings, expected_attempt_s


class Submission(NamedTuple):
    """Candidates of one type of node that are submitted together."""

    candidates: list[Candidate]
    time_limit_min: int | None
    """Of each job; None: no limit."""
    one_after_another: bool = False
    """In one job, instead of a job each."""
    memory_gib: float | None = None
    """Host memory of each node where it is not `cluster.memory_gib`."""

    @property
    def node_type(self) -> str:
        return self.candidates[0].node_type

    @property
    def num_nodes(self) -> int:
        """Nodes of each of its jobs."""
        return max(c.num_nodes for c in self.candidates)

    @property
    def num_jobs(self) -> int:
        return 1 if self.one_after_another else len(self.candidates)

    def expected_s(self, settings: Settings) -> float:
        """How long each of its jobs may be expected to hold its nodes, at most."""
        return expected_attempt_s(settings) * len(self.candidates) / self.num_jobs

    def node_hours(self, settings: Settings) -> float:
        """What its jobs may be expected to use together, at most."""
        return self.num_jobs * self.num_nodes * self.expected_s(settings) / 3600


def submissions(
    settings: Settings,
    kind: ProfilingKind,
    candidates: list[Candidate],
    longest_job_min: Callable[[str], int | None] = lambda node_type: None,
) -> list[Submission]:
    """The submissions that measure the candidates, type by type and fewest nodes first; batches rise within each number
    of nodes.

    Args:
        settings: Of the run.
        kind: How jobs are shared.
        candidates: What is to be measured, by nodes, then batch.
        longest_job_min: Of a type of node, the longest time limit a job may have; a job that would need more is split.
            None: any.
    """
    types = dict.fromkeys(c.node_type for c in candidates)
    by_type = {node_type: [c for c in candidates if c.node_type == node_type] for node_type in types}
    return [
        submission
        for node_type, own in by_type.items()
        for submission in _of_one_type(settings, kind, own, longest_job_min(node_type))
    ]


def node_hours(settings: Settings, candidates: list[Candidate]) -> float:
    """What measuring these candidates, by nodes, then batch, may be expected to take at most."""
    whole = submissions(settings, settings.profiling.kind, candidates)
    return sum(submission.node_hours(settings) for submission in whole)


def _of_one_type(
    settings: Settings, kind: ProfilingKind, candidates: list[Candidate], longest_job_min: int | None
) -> list[Submission]:
    by_nodes = [[c for c in candidates if c.num_nodes == n] for n in sorted({c.num_nodes for c in candidates})]
    at_least_min = settings.cluster.profile_time_limit_min
    if kind is ProfilingKind.array:
        return [Submission(group, at_least_min) for group in by_nodes]
    each_s = expected_attempt_s(settings)
    most = len(candidates) if longest_job_min is None else max(1, int(60 * longest_job_min / each_s))
    groups = by_nodes if kind is ProfilingKind.packed else [candidates] * bool(candidates)
    found = []
    for group in groups:
        for start in range(0, len(group), most):
            part = group[start : start + most]
            needed_min = min(math.ceil(len(part) * each_s / 60), longest_job_min or math.inf)
            found.append(Submission(part, max(at_least_min, int(needed_min)), one_after_another=True))
    return found
