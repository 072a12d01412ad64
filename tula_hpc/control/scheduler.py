"""What the controller asks of whatever runs its jobs: Slurm, or this machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tula_hpc.control.verdicts import QueueState
from tula_hpc.runs import AttemptFolder


@dataclass(frozen=True)
class JobRequest:
    """One submission: attempts that fit the same allocation, submitted together (on Slurm as one array, or one job)."""

    tag: str
    """Unique name of letters, digits and dashes, under which the submission is found again."""
    attempts: tuple[AttemptFolder, ...]
    num_nodes: int
    ranks_per_node: int
    time_limit_min: int | None
    max_running: int
    """How many of the attempts may run at once."""
    measures: bool = False
    """Times are taken: other jobs on the same nodes would disturb them."""
    memory_gib: float | None = None
    """Host memory to ask for on each node, GiB; None: `cluster.memory_gib`."""
    excluded_hosts: tuple[str, ...] = ()
    """Hosts that the job must not run on."""
    one_after_another: bool = False
    """The attempts share one job and one id; those of fewer nodes run on the first of them."""
    node_type: str = ""
    """Of all its nodes; empty in a run that has no types."""


@dataclass(frozen=True)
class Seen:
    """What the scheduler says of one job."""

    state: QueueState
    why: str = ""
    """The scheduler's reason for letting it wait, such as `Resources`; empty if it gives none."""
    hosts: tuple[str, ...] = ()
    """The hosts it was given."""
    was_waiting: bool = False
    """It is gone, and waited so short a time before that it cannot have run meanwhile: somebody took it out."""


class Scheduler(Protocol):
    """Runs requests and says where they are. Nothing here decides what a job's end means."""

    name: str
    """How a user calls it."""
    one_host: bool
    """All ranks of a job share this machine."""
    file_lag_s: float
    """How much later than a job's end in the queue its last file may become visible here."""

    @property
    def poll_interval_s(self) -> float:
        """Seconds between two looks at the queue."""
        ...

    def submit(self, request: JobRequest) -> list[str]:
        """Submit and return an id for each attempt.

        Raises:
            SubmissionLimited: If nothing was queued because a limit on the number of jobs is reached.
            SubmissionRejected: If nothing was queued for any other reason.
            SubmissionUnknown: If the answer got lost; `find` tells later.
        """
        ...

    def why_rejected(self, request: JobRequest) -> str | None:
        """The scheduler's own words if it would refuse the request, without submitting it; None if it would not."""
        ...

    def expected_wait_s(self, request: JobRequest) -> float | None:
        """Seconds that the request would wait for its start, by the scheduler's estimate; None: nobody knows."""
        ...

    def longest_job_min(self, node_type: str) -> int | None:
        """The longest time limit a job on these nodes may ask for, minutes; None if there is none or nobody knows."""
        ...

    def max_attempts(self) -> int | None:
        """How many attempts one request may hold; None if there is no limit or nobody knows it."""
        ...

    def jobs_in_queue(self) -> int | None:
        """How many jobs of this user wait or run, ours or not, an array element for one; None if nobody answers."""
        ...

    def find(self, tag: str, index: int, attempts: Sequence[AttemptFolder], one_after_another: bool) -> str | None:
        """The id of the attempt at `index` of a submission whose answer got lost; None if it is not in the queue.

        Args:
            tag: Of the submission.
            index: Of the attempt among all of the submission.
            attempts: All of the submission.
            one_after_another: As in its request.

        Raises:
            SchedulerSilent: If the queue could not be asked.
        """
        ...

    def states(self, job_ids: Collection[str]) -> Mapping[str, Seen] | None:
        """Where the jobs are; None if the question could not be asked, which concludes nothing."""
        ...

    def broken_hosts(self, hosts: Collection[str]) -> list[str]:
        """Those of the hosts that are down, drained, or do not answer."""
        ...

    def memory_gib_per_node(self, node_type: str) -> float | None:
        """Host memory of the smallest node of a type that a job may get, GiB; None if nobody knows."""
        ...

    def cancel(self, job_ids: Collection[str]) -> None: ...

    def log_tail(self, attempt: AttemptFolder, job_id: str) -> str:
        """The end of what the job's ranks printed."""
        ...

    def close(self) -> None:
        """The controller leaves."""
        ...


def tail(text: str, length: int = 4000) -> str:
    return text[-length:]
