"""What happened to a job, concluded from evidence. One table per outside vocabulary: Slurm's states, error texts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How an attempt ended."""

    success = "success"
    cuda_oom = "cuda_oom"
    host_oom = "host_oom"
    timeout = "timeout"
    preempted = "preempted"
    node_failure = "node_failure"
    cancelled = "cancelled"
    failed = "failed"
    incomplete = "incomplete"
    never_started = "never_started"
    skipped = "skipped"

    @property
    def out_of_memory(self) -> bool:
        return self in (Verdict.cuda_oom, Verdict.host_oom)


class QueueState(Enum):
    """What the scheduler says of a job, reduced to what decides the next step."""

    pending = "pending"
    running = "running"
    completed = "completed"
    failed = "failed"
    out_of_memory = "out_of_memory"
    timeout = "timeout"
    preempted = "preempted"
    node_failure = "node_failure"
    cancelled = "cancelled"
    absent = "absent"
    """The query worked and the job was not in the answer."""

    @property
    def active(self) -> bool:
        return self in (QueueState.pending, QueueState.running)


# Every base state of Slurm's job_state list (squeue's man page); what is not here counts as active, because a state
# that is taken for an end by mistake gets a job run twice.
SLURM_STATES = {
    "PENDING": QueueState.pending,
    "CONFIGURING": QueueState.pending,
    "REQUEUED": QueueState.pending,
    "REQUEUE_FED": QueueState.pending,
    "REQUEUE_HOLD": QueueState.pending,
    "RESV_DEL_HOLD": QueueState.pending,
    "SPECIAL_EXIT": QueueState.pending,
    "RUNNING": QueueState.running,
    "COMPLETING": QueueState.running,
    "RESIZING": QueueState.running,
    "SIGNALING": QueueState.running,
    "STAGE_OUT": QueueState.running,
    "STOPPED": QueueState.running,
    "SUSPENDED": QueueState.running,
    "COMPLETED": QueueState.completed,
    "FAILED": QueueState.failed,
    "REVOKED": QueueState.cancelled,
    "CANCELLED": QueueState.cancelled,
    "TIMEOUT": QueueState.timeout,
    "DEADLINE": QueueState.timeout,
    "PREEMPTED": QueueState.preempted,
    "NODE_FAIL": QueueState.node_failure,
    "BOOT_FAIL": QueueState.node_failure,
    "OUT_OF_MEMORY": QueueState.out_of_memory,
}


def slurm_state(text: str) -> QueueState:
    """A Slurm state as printed, such as `CANCELLED by 1000`; unknown ones count as running."""
    return SLURM_STATES.get(text.split(" ")[0].rstrip("+").upper(), QueueState.running)


_ENDED = {
    QueueState.out_of_memory: Verdict.host_oom,
    QueueState.timeout: Verdict.timeout,
    QueueState.preempted: Verdict.preempted,
    QueueState.node_failure: Verdict.node_failure,
    QueueState.cancelled: Verdict.cancelled,
    QueueState.failed: Verdict.failed,
}

# What the kernel's and Slurm's memory killers leave in a log.
KILLED_FOR_MEMORY = re.compile(r"oom[_-]kill|oom killed|out of memory: killed process", re.IGNORECASE)


# What submitit says when nobody gave the job its work within a minute: the controller ended right after sbatch took it.
NOTHING_TO_DO = re.compile("could not find submitted jobs in path")


@dataclass(frozen=True)
class Evidence:
    """What is known of an attempt that no longer runs."""

    complete: bool
    """Everything the job should have written is there and whole."""
    started: bool
    """A rank claimed the attempt."""
    queue: QueueState
    rank_errors: tuple[tuple[str, str], ...] = ()
    """(kind, message) that failing ranks wrote: kind is cuda_oom, host_oom, timeout or error."""
    log_tail: str = ""
    """The end of the job's logs."""
    incomplete_because: str = ""


def conclude(evidence: Evidence) -> tuple[Verdict, str]:
    """The verdict and the sentence that explains it. The files decide; the queue only where they are silent."""
    if evidence.complete:
        return Verdict.success, "every expected file is there and whole"
    for kind in ("cuda_oom", "host_oom", "timeout"):
        messages = [message for found, message in evidence.rank_errors if found == kind]
        if messages:
            return Verdict(kind), messages[0]
    if KILLED_FOR_MEMORY.search(evidence.log_tail) or evidence.queue is QueueState.out_of_memory:
        return Verdict.host_oom, "killed for using more host memory than the job was given"
    # a rank that lost its peers also reports an error, so the queue's own word on why the job ended comes first
    if evidence.queue in (QueueState.timeout, QueueState.preempted, QueueState.node_failure, QueueState.cancelled):
        return _ENDED[evidence.queue], f"the scheduler says {evidence.queue.value.replace('_', ' ')}"
    if evidence.rank_errors:
        return Verdict.failed, evidence.rank_errors[0][1]
    if not evidence.started and NOTHING_TO_DO.search(evidence.log_tail):
        return Verdict.never_started, "it started before its work was handed over, and did nothing"
    if evidence.queue is QueueState.failed:
        last_lines = "\n".join(evidence.log_tail.strip().splitlines()[-5:])
        return Verdict.failed, f"the job failed; its log ends:\n{last_lines}" if last_lines else "the job failed"
    if not evidence.started:
        return Verdict.never_started, "it left the queue without having started"
    return Verdict.incomplete, evidence.incomplete_because or "it ended without its result"
