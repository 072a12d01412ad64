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
    hung = "hung"
    replanned = "replanned"
    """The controller had it save and end, to go on with another configuration."""
    skipped = "skipped"

    @property
    def out_of_memory(self) -> bool:
        return self in (Verdict.cuda_oom, Verdict.host_oom)


class QueueState(Enum):
    """What the scheduler says of a job, reduced to what decides the next step."""

    pending = "pending"
    running = "running"
    suspended = "suspended"
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
        return self in (QueueState.pending, QueueState.running, QueueState.suspended)


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
    "STOPPED": QueueState.suspended,
    "SUSPENDED": QueueState.suspended,
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
    QueueState.timeout: Verdict.timeout,
    QueueState.preempted: Verdict.preempted,
    QueueState.node_failure: Verdict.node_failure,
    QueueState.cancelled: Verdict.cancelled,
}

# Slurm's reasons (squeue's %r) for which a pending job does not start unless somebody does something.
STUCK = re.compile(
    r"Held|Hold|DependencyNeverSatisfied|BadConstraints|PartitionTimeLimit|PartitionNodeLimit|PartitionDown|"
    r"PartitionInactive|Invalid|launch failed|MaxNodePerAccount|MaxCpuPerAccount|MaxWallDurationPerJob|"
    r"(QOS|Assoc)Max(Cpu|Node|Memory|GRES|Wall|Jobs)?\w*PerJob",
    re.IGNORECASE,
)

# What the kernel's and Slurm's memory killers leave in a log.
KILLED_FOR_MEMORY = re.compile(r"oom[_-]kill|oom killed|out of memory: killed process", re.IGNORECASE)
# NCCL's watchdog ends a process that waits for a peer too long, before Python can say a word.
WATCHDOG = re.compile(r"watchdog caught collective operation timeout", re.IGNORECASE)
# srun's words for a rank that the early warning met before it could listen.
WARNED_TOO_EARLY = re.compile(r"user defined signal 2", re.IGNORECASE)
WAS_TAKEN_OUT = "it was taken out of the queue while it waited"
# What submitit says when nobody gave the job its work within a minute: the controller ended right after sbatch took it.
NOTHING_TO_DO = re.compile("could not find submitted jobs in path")


@dataclass(frozen=True)
class RankError:
    """What a rank wrote before it ended with an error."""

    kind: str
    """`cuda_oom`, `host_oom`; `timeout`, `preempted` or `terminated` after a signal; `replanned` when the controller
    asked for it; `waited` in vain for another rank, `lost` one; or `error`."""
    message: str
    """One line that says what happened, where."""


@dataclass(frozen=True)
class Evidence:
    """What is known of an attempt that no longer runs."""

    complete: bool
    """Everything the job should have written is there and whole."""
    started: bool
    """A rank claimed the attempt."""
    queue: QueueState
    rank_errors: tuple[RankError, ...] = ()
    """Of the attempt's newest launch, earliest first."""
    log_tail: str = ""
    """The end of the job's logs."""
    incomplete_because: str = ""
    was_waiting: bool = False
    """It was pending when last seen in the queue, a moment before it was gone."""
    near_its_limit: bool = False
    """The last sign of life came shortly before the job's time was over."""
    shares_job: bool = False
    """Attempts run one after the other in its job; `queue` is `completed` if this one was over before the job."""
    was_suspended: bool = False
    """Its job was seen suspended."""

    @property
    def cause_may_come(self) -> bool:
        """Whether a file that is not visible yet may tell why it ended: neither queue nor log nor a rank has told."""
        silent = self.queue in (QueueState.completed, QueueState.absent)
        silent |= self.queue is QueueState.failed and self.started and not KILLED_FOR_MEMORY.search(self.log_tail)
        return silent and all(error.kind in _OF_ANOTHERS_END for error in self.rank_errors)


_OF_ANOTHERS_END = ("waited", "lost", "terminated")


def conclude(evidence: Evidence) -> tuple[Verdict, str]:
    """The verdict and the sentence that explains it. The files decide; the queue only where they are silent."""
    if evidence.complete:
        return Verdict.success, "every expected file is there and whole"
    if evidence.shares_job and not evidence.started and not evidence.rank_errors:
        if evidence.queue is QueueState.cancelled:
            return Verdict.cancelled, "the scheduler says cancelled"
        if evidence.was_waiting:
            return Verdict.cancelled, WAS_TAKEN_OUT
        words = _log_end(evidence) if evidence.queue is QueueState.failed else ""
        return Verdict.never_started, "its turn did not come before the job ended" + words
    said = {error.kind: error.message for error in reversed(evidence.rank_errors)}  # the earliest of each kind
    for kind in ("cuda_oom", "host_oom"):
        if kind in said:
            return Verdict(kind), said[kind]
    if KILLED_FOR_MEMORY.search(evidence.log_tail) or evidence.queue is QueueState.out_of_memory:
        return Verdict.host_oom, "killed for using more host memory than the job was given"
    # ranks that were ended or lost their peers report errors too, so the queue's word on why the job ended comes first
    if evidence.queue in _ENDED:
        return _ENDED[evidence.queue], f"the scheduler says {evidence.queue.value.replace('_', ' ')}"
    for kind in ("timeout", "preempted"):
        if kind in said:
            return Verdict(kind), said[kind]
    # only as the first word: where a rank fails, Slurm ends the others with SIGTERM
    if evidence.rank_errors and evidence.rank_errors[0].kind == "terminated":
        if evidence.queue is QueueState.absent:  # a cancelled job must not come back
            return (
                Verdict.cancelled,
                f"{said['terminated']}, and the queue no longer knows why; taken for a cancellation",
            )
        return Verdict.preempted, said["terminated"]
    if "error" in said:
        return Verdict.failed, said["error"]
    if "waited" in said or WATCHDOG.search(evidence.log_tail):
        if evidence.was_suspended:
            return Verdict.preempted, "its job was suspended for longer than training.collective_timeout_s"
        return Verdict.hung, said.get("waited", "a rank waited too long for the others")
    if "lost" in said:
        return Verdict.incomplete, f"{said['lost']}; the lost rank left no word"
    if not evidence.started:
        return _never_started(evidence)
    if evidence.queue is QueueState.failed:
        return Verdict.failed, "the job failed" + _log_end(evidence)
    if evidence.near_its_limit:
        return Verdict.timeout, "it was last heard of shortly before its time was over"
    return Verdict.incomplete, evidence.incomplete_because or "it ended without its result"


def _never_started(evidence: Evidence) -> tuple[Verdict, str]:
    """The verdict on an attempt that no rank has claimed."""
    if NOTHING_TO_DO.search(evidence.log_tail):
        return Verdict.never_started, "it started before its work was handed over, and did nothing"
    if WARNED_TOO_EARLY.search(evidence.log_tail):
        return Verdict.preempted, "it was told to end before it had begun"
    if evidence.queue is QueueState.failed:
        return Verdict.failed, "the job failed before its work began" + _log_end(evidence)
    if evidence.was_waiting:  # Slurm keeps no trace of an array element that is cancelled before it starts
        return Verdict.cancelled, WAS_TAKEN_OUT
    return Verdict.never_started, "it left the queue without having started"


def _log_end(evidence: Evidence) -> str:
    last_lines = "\n".join(evidence.log_tail.strip().splitlines()[-5:])
    return f"; its log ends:\n{last_lines}" if last_lines else ""
