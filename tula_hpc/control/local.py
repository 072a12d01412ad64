"""Run jobs as processes on this machine, one job at a time so that they do not disturb each other's measurements."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from tula_hpc.config import Settings
from tula_hpc.control.scheduler import JobRequest, Seen, tail
from tula_hpc.control.verdicts import QueueState
from tula_hpc.ranks.signs import warning_before_end_s
from tula_hpc.runs import AttemptFolder

# How long the ranks that are left may take to report, once one has failed.
LAST_WORDS_S = 3.0
SAVED_WITHIN_S = 20.0
"""How long a training that is told to end may take to come to the end of its step and save."""


@dataclass
class _Job:
    attempt: AttemptFolder
    num_ranks: int
    time_limit_min: int | None
    saves: bool
    """Whether it saves when it is told that it will be ended."""
    told: bool = False
    state: QueueState = QueueState.pending
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[IO[bytes]] = field(default_factory=list)
    started: float = 0.0
    failing_since: float | None = None


class LocalScheduler:
    """A queue of one on this machine. Ranks end when the controller does: nobody would look after them."""

    name = "this machine"
    one_host = True
    file_lag_s = 0.0
    poll_interval_s = 0.2

    def __init__(self, settings: Settings):
        self._settings = settings
        self._jobs: dict[str, _Job] = {}

    def submit(self, request: JobRequest) -> list[str]:
        ids = []
        for attempt in request.attempts:
            job_id = f"local-{uuid.uuid4().hex[:12]}"
            ranks = request.num_nodes * request.ranks_per_node
            self._jobs[job_id] = _Job(attempt, ranks, request.time_limit_min, saves=not request.measures)
            ids.append(job_id)
        return ids

    def why_rejected(self, request: JobRequest) -> str | None:
        return None

    def expected_wait_s(self, request: JobRequest) -> float | None:
        return 0.0

    def longest_job_min(self, node_type: str) -> int | None:
        return None

    def max_attempts(self) -> int | None:
        return None

    def jobs_in_queue(self) -> int:
        return sum(job.state.active for job in self._jobs.values())

    def find(self, tag: str, index: int, attempts: Sequence[AttemptFolder], one_after_another: bool) -> str | None:
        return None  # what an earlier controller started here has ended with it

    def states(self, job_ids: Collection[str]) -> Mapping[str, Seen]:
        for job in self._jobs.values():
            if job.state is QueueState.running:
                self._look_at(job)
        if not any(job.state is QueueState.running for job in self._jobs.values()):
            waiting = next(((i, job) for i, job in self._jobs.items() if job.state is QueueState.pending), None)
            if waiting is not None:
                self._start(*waiting)
        return {i: Seen(self._jobs[i].state if i in self._jobs else QueueState.absent) for i in job_ids}

    def broken_hosts(self, hosts: Collection[str]) -> list[str]:
        return []

    def memory_gib_per_node(self, node_type: str) -> float | None:
        return None

    def cancel(self, job_ids: Collection[str]) -> None:
        for job_id in job_ids:
            if job_id in self._jobs and self._jobs[job_id].state.active:
                self._end(self._jobs[job_id], QueueState.cancelled)

    def log_tail(self, attempt: AttemptFolder, job_id: str) -> str:
        logs = sorted(attempt.path.glob("rank-*.log"))
        return "\n".join(tail(log.read_text(errors="replace")) for log in logs)

    def close(self) -> None:
        """End all jobs; a training saves before, unless it is interrupted in that."""
        try:
            for job in self._jobs.values():
                if job.state is QueueState.running and job.saves:
                    self._tell(job)
                    deadline = time.monotonic() + SAVED_WITHIN_S
                    # the first rank that ends is the one that saves; the others wait for it
                    while all(p.poll() is None for p in job.processes) and time.monotonic() < deadline:
                        time.sleep(0.05)
        finally:
            self.cancel(list(self._jobs))

    def _start(self, job_id: str, job: _Job) -> None:
        threads = str(self._settings.cluster.cpus_per_rank)
        for rank in range(job.num_ranks):
            environment = {
                **os.environ,
                "TULA_RANK": str(rank),
                "TULA_WORLD_SIZE": str(job.num_ranks),
                "TULA_LOCAL_RANK": str(rank),
                "TULA_LAUNCH": job_id,
                "TULA_ONE_HOST": "1",
                "TULA_CONTROLLER": str(os.getpid()),
                "OMP_NUM_THREADS": threads,
                "PYTHONUNBUFFERED": "1",
            }
            if sys.platform == "linux":  # the host's name may not resolve on a laptop
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            log = job.attempt.rank_log(rank).open("wb")
            job.logs.append(log)
            command = [sys.executable, "-m", "tula_hpc.ranks.job", str(job.attempt.path)]
            job.processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C goes to the controller, which ends them in order
                )
            )
        job.started = time.monotonic()
        job.state = QueueState.running

    def _look_at(self, job: _Job) -> None:
        codes = [process.poll() for process in job.processes]
        if all(code == 0 for code in codes):
            self._end(job, QueueState.completed)
        elif any(code not in (None, 0) for code in codes):
            job.failing_since = job.failing_since or time.monotonic()
            if None not in codes or time.monotonic() - job.failing_since > LAST_WORDS_S:
                self._say_how_ranks_ended(job, codes)
                # nobody but the kernel's memory killer sends SIGKILL to a rank that is not being ended by us
                killed = -signal.SIGKILL in codes
                self._end(job, QueueState.out_of_memory if killed else QueueState.failed)
        elif job.time_limit_min is not None:
            left_s = 60 * job.time_limit_min - (time.monotonic() - job.started)
            if left_s < 0:
                self._end(job, QueueState.timeout)
            elif job.saves and not job.told and left_s < warning_before_end_s(job.time_limit_min):
                self._tell(job)

    @staticmethod
    def _say_how_ranks_ended(job: _Job, codes: list[int | None]) -> None:
        """In their logs, where they could not say it themselves; one that could has ended with 1."""
        for code, log in zip(codes, job.logs, strict=True):
            if code is not None and code < 0:
                name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else "unknown"
                log.write(f"\nthis process was ended by signal {-code} ({name})\n".encode())
            elif code not in (None, 0, 1):
                log.write(f"\nthis process ended by itself, with exit code {code}\n".encode())
            log.flush()

    @staticmethod
    def _tell(job: _Job) -> None:
        """That it will be ended, as Slurm does."""
        job.told = True
        for process in job.processes:
            process.send_signal(signal.SIGUSR2)

    def _end(self, job: _Job, state: QueueState) -> None:
        for process in job.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # loader workers of an ended rank are still in its group
            process.wait()
        for log in job.logs:
            log.close()
        job.state = state
