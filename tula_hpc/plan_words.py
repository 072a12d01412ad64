"""What `plan` says of the queue."""

from __future__ import annotations

from collections.abc import Mapping

from tula_hpc.config import ProfilingKind, Settings
from tula_hpc.control.packing import Submission
from tula_hpc.display import count, duration


def trial_words(answered: bool, refused: str | None, wait_s: float | None) -> str:
    """What the scheduler says of a request, and when it would start. The start is a guess: Slurm counts with the time
    limits of the jobs before, and knows nothing of those that come later with a higher priority."""
    if refused is not None:
        return refused
    if not answered:
        return "no answer"
    if wait_s is None:
        return "accepted, without an estimate of the start"
    when = "at once" if wait_s < 60 else f"in about {duration(wait_s)}"
    return f"accepted. Slurm's estimate, a hint: would start {when}"


def sharing_compared(settings: Settings, kinds: Mapping[ProfilingKind, list[Submission]]) -> list[str]:
    """A line for each way to share jobs: how many there would be, what they would use, and the longest of them."""
    lines = ["jobs can share allocations, each of which waits in the queue once (group profiling):"]
    for kind, submissions in kinds.items():
        longest = max(submissions, key=lambda s: (s.expected_s(settings), s.num_nodes))
        mark = " (this plan)" if kind is settings.profiling.kind else ""
        lines.append(
            f"  {kind.name}{mark}: {count(sum(s.num_jobs for s in submissions), 'job')}, up to about "
            f"{sum(s.node_hours(settings) for s in submissions):.2f} node-hours, the longest holds "
            f"{count(longest.num_nodes, 'node')} for up to about {duration(longest.expected_s(settings))}"
        )
    return lines
