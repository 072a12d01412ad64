from __future__ import annotations

import pytest

from tula_hpc.control.verdicts import (
    SLURM_STATES,
    STUCK,
    Evidence,
    QueueState,
    RankError,
    Verdict,
    conclude,
    slurm_state,
)
from tula_hpc.ranks.job import classify

# job_state of squeue's man page (22.05 to 25.11), base states and flags
DOCUMENTED = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "CONFIGURING",
    "COMPLETING",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PENDING",
    "PREEMPTED",
    "RUNNING",
    "RESV_DEL_HOLD",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "REQUEUED",
    "RESIZING",
    "REVOKED",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
    "TIMEOUT",
]


def test_every_documented_slurm_state_is_in_the_table():
    """No state that Slurm documents is left to the fallback."""
    assert set(DOCUMENTED) == set(SLURM_STATES)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", QueueState.cancelled),
        ("CANCELLED+", QueueState.cancelled),
        ("OUT_OF_MEMORY", QueueState.out_of_memory),
        ("EXPEDITED_SOMETHING", QueueState.running),
    ],
)
def test_states_are_read_as_printed(text: str, state: QueueState):
    """Suffixes are dropped, and a state nobody knows counts as not ended."""
    assert slurm_state(text) is state


def evidence(**changes: object) -> Evidence:
    values = {"complete": False, "started": True, "queue": QueueState.failed, **changes}
    return Evidence(**values)  # type: ignore[arg-type]


lost = RankError("lost", "rank 0 on n1: Connection closed by peer")
waited = RankError("waited", "rank 0 on n1: timed out waiting for rank 1")
terminated = RankError("terminated", "SIGTERM came 40 s after the start")


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (evidence(complete=True, queue=QueueState.failed), Verdict.success),
        (evidence(queue=QueueState.completed), Verdict.incomplete),
        (evidence(queue=QueueState.absent), Verdict.incomplete),
        (evidence(queue=QueueState.absent, started=False), Verdict.never_started),
        (evidence(queue=QueueState.absent, started=False, was_waiting=True), Verdict.cancelled),
        (evidence(rank_errors=(lost, RankError("cuda_oom", "CUDA out of memory"))), Verdict.cuda_oom),
        (evidence(rank_errors=(RankError("error", "bug"),)), Verdict.failed),
        (evidence(rank_errors=(lost,), queue=QueueState.node_failure), Verdict.node_failure),
        (evidence(rank_errors=(lost,), log_tail="Detected 1 oom_kill event"), Verdict.host_oom),
        (evidence(queue=QueueState.out_of_memory), Verdict.host_oom),
        (evidence(queue=QueueState.timeout), Verdict.timeout),
        (evidence(started=False, log_tail="could not find submitted jobs in path:"), Verdict.never_started),
        (evidence(queue=QueueState.preempted), Verdict.preempted),
        (evidence(queue=QueueState.cancelled), Verdict.cancelled),
        (evidence(rank_errors=(lost, RankError("error", "bug"))), Verdict.failed),
        (evidence(rank_errors=(waited, lost)), Verdict.hung),
        (evidence(rank_errors=(waited, lost), was_suspended=True), Verdict.preempted),
        (evidence(log_tail="Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"), Verdict.hung),
        (evidence(rank_errors=(lost,)), Verdict.incomplete),
        (evidence(rank_errors=(RankError("timeout", "warned"), lost)), Verdict.timeout),
        (evidence(rank_errors=(RankError("preempted", "warned"), lost)), Verdict.preempted),
        (evidence(rank_errors=(RankError("preempted", "warned"),), queue=QueueState.cancelled), Verdict.cancelled),
        (evidence(rank_errors=(terminated,)), Verdict.preempted),
        (evidence(rank_errors=(terminated,), queue=QueueState.cancelled), Verdict.cancelled),
        (evidence(rank_errors=(terminated, RankError("error", "a broken pipe"))), Verdict.preempted),
        (evidence(rank_errors=(terminated, lost)), Verdict.preempted),
        (evidence(rank_errors=(RankError("error", "bug"), terminated)), Verdict.failed),
        (evidence(rank_errors=(waited, terminated)), Verdict.hung),
        (evidence(rank_errors=(lost, terminated)), Verdict.incomplete),
        (evidence(rank_errors=(terminated,), queue=QueueState.absent), Verdict.cancelled),
        (evidence(queue=QueueState.absent, near_its_limit=True), Verdict.timeout),
        (evidence(started=False, log_tail="task 0: User defined signal 2"), Verdict.preempted),
        (evidence(), Verdict.failed),
        (evidence(shares_job=True, started=False), Verdict.never_started),
        (evidence(shares_job=True, started=False, queue=QueueState.timeout), Verdict.never_started),
        (evidence(shares_job=True, started=False, queue=QueueState.absent, was_waiting=True), Verdict.cancelled),
        (evidence(shares_job=True, started=False, queue=QueueState.out_of_memory), Verdict.never_started),
        (evidence(shares_job=True, started=False, queue=QueueState.cancelled), Verdict.cancelled),
        (evidence(shares_job=True, queue=QueueState.timeout), Verdict.timeout),
        (evidence(shares_job=True, complete=True, queue=QueueState.timeout), Verdict.success),
    ],
)
def test_the_verdict_follows_from_the_evidence(seen: Evidence, verdict: Verdict):
    """Files come first, then what ranks wrote, then logs, then the queue; an exit without files is no success."""
    assert conclude(seen)[0] is verdict


def test_a_failure_without_words_shows_the_end_of_its_log():
    """A job that failed before a rank could write anything is explained by its log."""
    reason = conclude(evidence(log_tail="line one\nmodule: command not found\n"))[1]
    assert "module: command not found" in reason


def killed_worker() -> RuntimeError:
    """As torch tells it to a rank that waits for data."""
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "cuda_oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "cuda_oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "cuda_oom"),
        (RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"), "cuda_oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), "host_oom"),
        (OSError(12, "Cannot allocate memory"), "host_oom"),
        (MemoryError(), "host_oom"),
        (RuntimeError("CUDA error: out of memory; NCCL error in ncclCommInitRank"), "cuda_oom"),
        (RuntimeError("[../gloo/transport/tcp/buffer.cc:72] Timed out waiting 300000ms for recv operation"), "waited"),
        (RuntimeError("Application timeout caused pair closure"), "waited"),  # gloo, after another one has waited
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:2"), "lost"),
        (ValueError("connection reset"), "error"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "host_oom"),
        (killed_worker(), "host_oom"),
        (ValueError("shapes do not match"), "error"),
    ],
)
def test_errors_of_ranks_are_told_apart(error: BaseException, kind: str):
    """Device memory, host memory and everything else are three kinds."""
    assert classify(error) == kind


@pytest.mark.parametrize(
    ("reason", "stuck"),
    [
        ("JobHeldUser", True),
        ("launch failed requeued held", True),
        ("DependencyNeverSatisfied", True),
        ("PartitionTimeLimit", True),
        ("QOSMaxNodePerJobLimit", True),
        ("Priority", False),
        ("Resources", False),
        ("BeginTime", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("AssocGrpCpuLimit", False),
    ],
)
def test_reasons_that_do_not_go_away_are_known(reason: str, stuck: bool):
    """Waiting for resources, priority or the end of other jobs is normal; a hold or an impossible limit is not."""
    assert (STUCK.search(reason) is not None) is stuck
