"""Attempts that share a job, as processes on this machine that believe to be ranks of a Slurm job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_until

from tula_hpc.candidates import Candidate
from tula_hpc.config import ProfilingKind, Settings, to_plain
from tula_hpc.control.jobs import Jobs
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.local import LocalScheduler
from tula_hpc.control.packing import submissions
from tula_hpc.control.scheduler import Seen
from tula_hpc.control.verdicts import QueueState, Verdict
from tula_hpc.ranks.job import _is_mine
from tula_hpc.ranks.launch import Rank
from tula_hpc.ranks.packed import _Turns
from tula_hpc.ranks.timings import read_point
from tula_hpc.runs import AttemptFolder, RunFolder, read_json, write_json

ROOT = Path(__file__).parents[1]

# With 64 samples one rank is killed and the other never comes back by itself.
STUBBORN = """
import os
import signal
import time

import torch


class Stubborn(torch.nn.Module):
    def __init__(self, **_):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, images):
        if len(images) == 64:
            if os.environ["TULA_RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return self.layer(images.flatten(1))
"""

# Does nothing until it is told to.
PATIENT = """
import time
from pathlib import Path

import torch


class Patient(torch.nn.Module):
    def __init__(self, **_):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, images):
        while not Path(__file__).with_name("go").exists():
            time.sleep(0.02)
        return self.layer(images.flatten(1))
"""


@pytest.fixture
def attempts(
    run_folder: RunFolder, tiny_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[AttemptFolder]]:
    """Make the folders of attempts at profiling these candidates; takes overrides."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(candidates: list[Candidate], *overrides: str) -> list[AttemptFolder]:
        settings = tiny_settings(*overrides)
        folders = []
        for candidate in candidates:
            folder = run_folder.attempt(f"profile/{candidate.name}", 1)
            request = {
                "kind": "profile",
                "settings": to_plain(settings),
                "num_nodes": candidate.num_nodes,
                "gpus_per_node": 1,
                "batch_per_rank": candidate.batch_per_rank,
                "ranks_on_host": 2,
                "working_dir": str(run_folder.path),
            }
            write_json(folder.request, request)
            folders.append(folder)
        return folders

    return make


def start(folders: list[AttemptFolder], num_ranks: int) -> list[subprocess.Popen[str]]:
    """The ranks of a job that runs the attempts."""
    command = [sys.executable, "-m", "tula_hpc.ranks.packed", *(str(folder.path) for folder in folders)]
    ranks = []
    for rank in range(num_ranks):
        job = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(num_ranks), "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
        environment = {**os.environ, **job, "TULA_ONE_HOST": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    return ranks


def run(folders: list[AttemptFolder], num_ranks: int) -> list[str]:
    """Let the job run to its end; what each rank printed."""
    ranks = start(folders, num_ranks)
    printed = [rank.communicate(timeout=900)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, printed
    return printed


def test_attempts_of_any_size_run_one_after_the_other(attempts: Callable[..., list[AttemptFolder]]):
    """One of one rank and one of two are both measured by a job of two, and each rank keeps its own log."""
    candidates = [Candidate(1, 32), Candidate(2, 32)]
    folders = attempts(candidates)
    printed = run(folders, 2)
    points = [read_point(folder, candidate) for folder, candidate in zip(folders, candidates, strict=True)]
    assert [point["num_nodes"] for point in points] == [1, 2]
    assert f"rank 1 has no part in {folders[0].path}" in printed[1]
    assert [log.name for log in sorted(folders[1].path.glob("*.log"))] == ["rank-0000.log", "rank-0001.log"]


def test_a_job_that_was_started_again_does_not_take_an_earlier_launchs_errors_for_its_own(
    attempts: Callable[..., list[AttemptFolder]], monkeypatch: pytest.MonkeyPatch
):
    """Before its own launch is on record and after: the attempt is measured, and no error is left of it."""
    candidate = Candidate(2, 32)
    (folder,) = attempts([candidate])
    write_json(folder.claim / "owner.json", {"job": "7"})
    write_json(folder.launch, {"launch": "7-0", "host": "n1", "time": 0.0})
    for rank in range(2):
        error = {"kind": "host_oom", "message": "ran out", "rank": rank, "launch": "7-0", "time": 0.0}
        write_json(folder.rank_error(rank), error)
    assert len(folder.errors()) == 2
    assert not _Turns(Rank(0, 2, 0, "7-1", "7"))._another_failed(folder)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run([folder], 2)
    assert read_point(folder, candidate)["num_nodes"] == 2
    assert not list(folder.path.glob("error-*"))


@pytest.mark.parametrize("owner", [None, "7", "8"])
def test_one_job_works_on_an_attempt(attempts: Callable[..., list[AttemptFolder]], owner: str | None):
    """The first that claims it, also where one was killed while it did; another job leaves it alone."""
    (folder,) = attempts([Candidate(1, 32)])
    folder.claim.mkdir()
    if owner is not None:
        write_json(folder.claim / "owner.json", {"job": owner})
    assert _is_mine(folder, Rank(0, 1, 0, "7-0", "7"), patience_s=1.0) == (owner != "8")
    assert read_json(folder.claim / "owner.json")["job"] == (owner or "7")
    assert folder.launch.exists() == (owner != "8")
    assert not list(folder.path.glob(".claim-*"))


def test_a_killed_rank_ends_its_attempt_and_nothing_else(
    attempts: Callable[..., list[AttemptFolder]], run_folder: RunFolder
):
    """The killed rank is told as out of host memory, the rank that hangs is ended soon, the larger batch is passed
    over, and the attempt after it is measured."""
    (run_folder.path / "stubborn.py").write_text(STUBBORN)
    candidates = [Candidate(2, 64), Candidate(2, 128), Candidate(1, 32)]
    folders = attempts(candidates, "workload.model._target_=stubborn.Stubborn")
    printed = run(folders, 2)
    assert [(error["rank"], error["kind"]) for error in folders[0].errors()] == [(1, "host_oom")]
    assert read_json(folders[0].rank_end(0))["ended_by_us"]
    assert not folders[1].claim.exists()
    assert "batch 64 a rank already ran out of memory" in printed[0]
    assert read_point(folders[2], candidates[2])["num_nodes"] == 1


def test_no_attempt_is_begun_when_the_time_is_nearly_up(
    attempts: Callable[..., list[AttemptFolder]], run_folder: RunFolder
):
    """After the scheduler's warning the attempt that runs is finished, and the next is left to another job."""
    (run_folder.path / "patient.py").write_text(PATIENT)
    candidates = [Candidate(1, 32), Candidate(1, 64)]
    folders = attempts(candidates, "workload.model._target_=patient.Patient")
    (rank,) = start(folders, 1)
    wait_until(folders[0].rank_log(0).exists)
    rank.send_signal(signal.SIGUSR2)
    (run_folder.path / "go").touch()
    printed = rank.communicate(timeout=300)[0]
    assert rank.returncode == 0
    assert read_point(folders[0], candidates[0])["num_nodes"] == 1
    assert not folders[1].claim.exists()
    assert "the job's time is nearly up" in printed


@pytest.mark.parametrize(("number", "said"), [(signal.SIGTERM, ["terminated"]), (signal.SIGKILL, [])])
def test_the_process_of_an_attempt_ends_with_the_one_that_started_it(
    attempts: Callable[..., list[AttemptFolder]], run_folder: RunFolder, number: signal.Signals, said: list[str]
):
    """Whether a job is ended or a rank is killed, no process of it stays behind, and no error is invented."""
    (run_folder.path / "stubborn.py").write_text(STUBBORN)
    folders = attempts([Candidate(1, 64)], "workload.model._target_=stubborn.Stubborn")
    (rank,) = start(folders, 1)
    wait_until(folders[0].claim.exists)
    rank.send_signal(number)
    rank.communicate(timeout=300)
    assert rank.returncode != 0
    wait_until(lambda: not _processes(folders[0]))
    assert [error["kind"] for error in folders[0].errors()] == said


def _processes(folder: AttemptFolder) -> list[str]:
    """Command lines of processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder.path) in words and "tula_hpc" in words:
            found.append(words)
    return found


# --- how candidates share jobs, and what is concluded of them ---------------------------------------------------------

GRID = [Candidate(n, b) for n in (1, 2, 4) for b in (16, 32, 64)]


@pytest.mark.parametrize(
    ("kind", "longest_min", "nodes", "limits"),
    [
        (ProfilingKind.array, None, [1, 2, 4], [15, 15, 15]),
        (ProfilingKind.packed, None, [1, 2, 4], [15, 15, 15]),
        (ProfilingKind.single, None, [4], [18]),
        (ProfilingKind.single, 16, [4, 4], [16, 15]),
    ],
)
def test_candidates_share_jobs_as_asked(
    tiny_settings: Callable[..., Settings],
    kind: ProfilingKind,
    longest_min: int | None,
    nodes: list[int],
    limits: list[int],
):
    """A submission a number of nodes or one for all, with time for all its attempts, split where the partition's limit
    is shorter."""
    found = submissions(tiny_settings(), kind, GRID, lambda _: longest_min)
    assert [s.num_nodes for s in found] == nodes
    assert [s.time_limit_min for s in found] == limits
    assert [c for s in found for c in s.candidates] == GRID
    assert all(s.one_after_another == (kind is not ProfilingKind.array) for s in found)


class _EndedJob(LocalScheduler):
    """Says that every job has ended in one way."""

    state = QueueState.out_of_memory

    def states(self, job_ids):  # type: ignore[no-untyped-def]
        return {job_id: Seen(self.state) for job_id in job_ids}


def test_the_end_of_a_shared_job_is_not_the_end_of_every_attempt(
    run_folder: RunFolder, tiny_settings: Callable[..., Settings]
):
    """In a job that ended for memory: one attempt failed by itself before, one ran out, a larger one was passed over,
    and one whose turn did not come may be submitted again."""
    journal = Journal(run_folder.journal)
    settings = tiny_settings()
    jobs = Jobs(settings, run_folder, journal, _EndedJob(settings), lambda: None)
    for batch, nodes in ((16, 1), (32, 1), (64, 1), (16, 2)):
        attempt = Attempt(f"profile/{Candidate(nodes, batch).name}", 1, "tula-x", batch, nodes, one_after_another=True)
        journal.intend(attempt)
        journal.submitted(attempt, "7")
    failed, ran_out = (run_folder.attempt(f"profile/n001-b000{batch}", 1) for batch in (16, 32))
    for folder, kind in ((failed, "error"), (ran_out, "host_oom")):
        folder.claim.mkdir(parents=True)
        write_json(folder.rank_error(0), {"kind": kind, "message": kind, "rank": 0, "time": 0.0})
        write_json(folder.rank_end(0), {"code": 1})
    jobs.look()
    verdicts = [a.verdict for a in journal.state().attempts.values()]
    assert verdicts == [Verdict.failed, Verdict.host_oom, Verdict.skipped, Verdict.never_started]


def test_a_job_that_others_share_is_not_cancelled(run_folder: RunFolder, tiny_settings: Callable[..., Settings]):
    """Giving up one attempt of a shared job leaves the job to the others; giving up all of them ends it."""
    cancelled: list[str] = []

    class Scheduler(LocalScheduler):
        def cancel(self, job_ids):  # type: ignore[no-untyped-def]
            cancelled.extend(job_ids)

    journal = Journal(run_folder.journal)
    settings = tiny_settings()
    jobs = Jobs(settings, run_folder, journal, Scheduler(settings), lambda: None)
    for batch in (16, 32):
        attempt = Attempt(f"profile/{Candidate(1, batch).name}", 1, "tula-x", batch, 1, one_after_another=True)
        journal.intend(attempt)
        journal.submitted(attempt, "7")
    first, second = journal.state().attempts.values()
    jobs.end([first], Verdict.skipped, "not wanted")
    assert cancelled == []
    jobs.end([second], Verdict.skipped, "not wanted")
    assert cancelled == ["7"]
