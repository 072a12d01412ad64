"""Several attempts in one job, one after the other; each rank of the job starts its part of each in a fresh process.

Fresh, because what one attempt leaves behind in memory would count against the next (and a fatal error of a CUDA
context cannot be got rid of otherwise). An attempt of fewer ranks than the job has runs on the first ones, the others
pass over it. The first rank decides whether an attempt is run and writes that into its folder, since ranks that decided
for themselves could disagree about what they see on a network file system, and wait for each other.

A failed attempt ends nothing here: with `srun --kill-on-bad-exit` one rank that leaves ends all
that are left to measure. Started by Slurm through submitit, or by hand as `python -m tula_hpc.ranks.packed FOLDER ...`.
This process loads no torch: it would take memory from what is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tula_hpc.candidates import Candidate
from tula_hpc.errors import RecordError
from tula_hpc.ranks.launch import Rank, this_rank
from tula_hpc.ranks.timings import read_point
from tula_hpc.runs import AttemptFolder, read_json, write_json

POLL_S = 0.2
LOOK_FOR_ERRORS_EVERY_S = 1.0
GRACE_S = 4.0
"""How long the ranks that are left may take to report, once one has failed."""
END_PATIENCE_S = 60.0
"""How long the first rank waits for the others' ends; one whose host is gone never tells."""


def run_attempts(folders: list[str]) -> None:
    """Run the attempts in these folders in their order, as one rank of their job."""
    turns = _Turns(this_rank())
    signal.signal(signal.SIGUSR2, turns.on_warning)
    signal.signal(signal.SIGTERM, turns.on_end)
    turns.take([AttemptFolder(Path(folder)) for folder in folders])


@dataclass
class _Turns:
    """One rank's way through the attempts."""

    me: Rank
    child: subprocess.Popen[bytes] | None = None
    warned: bool = False
    """The scheduler has said that the job's time is nearly up."""
    ending: bool = False
    """The scheduler ends the job."""
    ran_out: dict[int, int] = field(default_factory=dict)
    """Nodes -> smallest batch a rank that ran out of memory; known to the first rank."""

    def on_warning(self, number: int, _: FrameType | None) -> None:
        self.warned = True
        self._pass_on(number)

    def on_end(self, number: int, _: FrameType | None) -> None:
        self.ending = True
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)

    def take(self, attempts: list[AttemptFolder]) -> None:
        """Go through the attempts; leaves the process when the scheduler ends the job."""
        any_ran = False
        for attempt in attempts:
            request = read_json(attempt.request)
            candidate = Candidate.from_record(request)
            if self.me.rank >= candidate.world_size:
                print(f"rank {self.me.rank} has no part in {attempt.path}", flush=True)
                continue
            if self.me.is_first:
                why_not = self._why_not(attempt, candidate, any_ran)
                write_json(attempt.turn(self.me.launch), {"why_not": why_not})
            else:
                why_not = self._first_ranks_word(attempt)
            if why_not:
                print(f"{attempt.path} is skipped: {why_not}", flush=True)
                continue
            any_ran = True
            print(f"{attempt.path} begins", flush=True)
            self._run(attempt, candidate.world_size)
            if self.me.is_first:
                self._learn(attempt, candidate, request["settings"]["cluster"]["gpus_per_node"] > 0)

    def _why_not(self, attempt: AttemptFolder, candidate: Candidate, any_ran: bool) -> str:
        """Why the attempt is not run; empty if it is. The first one always is: a job must get something done."""
        if self.warned and any_ran:
            return "the job's time is nearly up"
        with contextlib.suppress(RecordError):  # in an earlier launch of the job
            read_point(attempt, candidate)
            return "it is measured already"
        smallest = self.ran_out.get(candidate.num_nodes)
        if smallest is not None and candidate.batch_per_rank > smallest:
            return f"batch {smallest} a rank already ran out of memory"
        return ""

    def _first_ranks_word(self, attempt: AttemptFolder) -> str:
        """What the first rank decided. It decides when the attempt before has ended; if it is gone, the job ends."""
        path = attempt.turn(self.me.launch)
        while not path.exists():
            if self.ending:
                sys.exit(128 + signal.SIGTERM)
            time.sleep(POLL_S)
            os.listdir(path.parent)  # makes a network file system look again
        return str(read_json(path)["why_not"])

    def _run(self, attempt: AttemptFolder, world_size: int) -> None:
        """Start this rank's process of the attempt and see it to its end."""
        for of_an_earlier_launch in (attempt.rank_end(self.me.rank), attempt.rank_error(self.me.rank)):
            of_an_earlier_launch.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "TULA_RANK": str(self.me.rank),
            "TULA_WORLD_SIZE": str(world_size),
            "TULA_LOCAL_RANK": str(self.me.local_rank),
            "TULA_LAUNCH": self.me.owner,
            "TULA_RESTART": self.me.launch.removeprefix(f"{self.me.owner}-"),
            "TULA_CONTROLLER": str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, "-m", "tula_hpc.ranks.job", str(attempt.path)]
        with attempt.rank_log(self.me.rank).open("wb") as log:
            self.child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its loader workers can be ended with it
                preexec_fn=_pass_over_warnings,
            )
            ended_by_us = self._watch(attempt, self.child)
        code = self.child.returncode
        if code == -signal.SIGKILL and not ended_by_us:
            time.sleep(2 * POLL_S)  # if it is the job's end, this process does not get further
        if code == -signal.SIGTERM or self.ending:  # only the scheduler sends it
            sys.exit(128 + signal.SIGTERM)
        if code != 0 and not ended_by_us and not attempt.rank_error(self.me.rank).exists():
            self._report_for_child(attempt, code)
        write_json(attempt.rank_end(self.me.rank), {"code": code, "ended_by_us": ended_by_us, "time": time.time()})

    def _watch(self, attempt: AttemptFolder, child: subprocess.Popen[bytes]) -> bool:
        """Wait for the process; end it when another rank has failed and it stays. Returns whether it was ended here."""
        failing_since: float | None = None
        looked = time.monotonic()
        ended_by_us = False
        while child.poll() is None:
            time.sleep(POLL_S)
            now = time.monotonic()
            if failing_since is None and now - looked > LOOK_FOR_ERRORS_EVERY_S:
                looked = now
                failing_since = now if self._another_failed(attempt) else None
            if failing_since is not None and now - failing_since > GRACE_S and child.poll() is None:
                ended_by_us = True
                print(f"another rank of {attempt.path} has failed; this one is ended", flush=True)
                _kill_group(child)
        _kill_group(child)
        return ended_by_us

    def _another_failed(self, attempt: AttemptFolder) -> bool:
        """Whether a rank of this launch has; the launch that is on record may still be an earlier one."""
        return any(error.get("launch") in (None, self.me.launch) for error in attempt.errors())

    def _report_for_child(self, attempt: AttemptFolder, code: int) -> None:
        """Say how a process ended that could not say it itself."""
        kind, message = "error", f"its process ended with exit code {code}; see {attempt.rank_log(self.me.rank)}"
        if code == -signal.SIGKILL:  # nobody but the kernel's memory killer sends it to a rank alone
            kind, message = "host_oom", "killed by the kernel for using more host memory than the job was given"
        elif code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            message = f"its process was ended by {name}; see {attempt.rank_log(self.me.rank)}"
        write_json(
            attempt.rank_error(self.me.rank),
            {
                "kind": kind,
                "message": message,
                "rank": self.me.rank,
                "launch": self.me.launch,
                "host": socket.gethostname(),
                "time": time.time(),
                "traceback": "",
            },
        )

    def _learn(self, attempt: AttemptFolder, candidate: Candidate, on_gpu: bool) -> None:
        """Wait for the ends of all ranks, and remember the batch if it ran out of memory."""
        deadline = time.monotonic() + END_PATIENCE_S
        while not attempt.is_over(candidate.world_size) and time.monotonic() < deadline:
            if self.ending:
                sys.exit(128 + signal.SIGTERM)
            time.sleep(POLL_S)
            os.listdir(attempt.path)
        # the batch of a GPU is not to blame for the host's memory
        too_large = ("cuda_oom",) if on_gpu else ("cuda_oom", "host_oom")
        if any(error["kind"] in too_large for error in attempt.errors()):
            known = self.ran_out.get(candidate.num_nodes, candidate.batch_per_rank)
            self.ran_out[candidate.num_nodes] = min(known, candidate.batch_per_rank)


def _pass_over_warnings() -> None:
    """Slurm warns every process of a job; one that has not yet set up what to do then would end."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    run_attempts(sys.argv[1:])
