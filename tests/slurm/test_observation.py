"""What a real Slurm tells of jobs, hosts and limits, how seldom it is asked, and what its silence means."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tula_hpc.config import Settings
from tula_hpc.control.scheduler import JobRequest, Seen
from tula_hpc.control.slurm import SlurmScheduler
from tula_hpc.control.verdicts import QueueState
from tula_hpc.errors import SchedulerSilent, SubmissionLimited
from tula_hpc.runs import RunFolder

from .cluster import PATIENCE_S, SlurmSettings, ThrowawaySlurm, wait_until
from .faulty import Tula

SETTINGS = SlurmSettings(
    num_nodes=2,
    min_job_age_s=2,
    max_array_size=3,
    kill_wait_s=2,
    extra_lines=("AccountingStorageEnforce=limits",),
)


@pytest.fixture(scope="module")
def slurm_settings() -> SlurmSettings:
    """A cluster that forgets quickly and takes small arrays."""
    return SETTINGS


@pytest.fixture(autouse=True)
def emptied(slurm: ThrowawaySlurm) -> Iterator[None]:
    yield
    slurm.heal()
    slurm.cancel_all()


@pytest.fixture
def scheduler(
    slurm: ThrowawaySlurm, tiny_settings: Callable[..., Settings], run_folder: RunFolder
) -> Callable[[], SlurmScheduler]:
    """A scheduler as each controller has its own."""
    settings = tiny_settings("cluster=slurm", "cluster.poll_interval_s=1", "cluster.memory_gib=0.2")
    return lambda: SlurmScheduler(settings, run_folder)


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[], int]]:
    """Count the calls of one of Slurm's commands from now on."""
    folder = tmp_path / "logged"
    folder.mkdir()

    def log(name: str) -> Callable[[], int]:
        calls = folder / f"{name}.log"
        calls.touch()
        script = folder / name
        script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {shutil.which(name)} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return lambda: len(calls.read_text().splitlines())

    return log


def sbatch(slurm: ThrowawaySlurm, *options: str, work: str = "sleep 600") -> str:
    """Submit shell work that needs little; gives the id. What goes on for so long is cancelled after the test."""
    return slurm.run("sbatch", "--parsable", "--mem=100M", "--output=/dev/null", *options, f"--wrap={work}").strip()


def wait_for(scheduler: SlurmScheduler, wanted: dict[str, QueueState]) -> None:
    """Look until the jobs are in these states."""
    seen: dict[str, Seen] = {}

    def reached() -> bool:
        seen.update(scheduler.states(wanted.keys()) or {})
        return {job_id: one.state for job_id, one in seen.items()} == wanted

    wait_until(reached, PATIENCE_S, f"{wanted}", lambda: f"last seen: {seen}")


def forgotten(slurm: ThrowawaySlurm, job_id: str) -> None:
    """Wait until squeue no longer lists a job; the controller forgets in its own time."""
    array = job_id.partition("_")[0]
    wait_until(
        lambda: array not in slurm.run("squeue", "-h", "-t", "all", "-o", "%A %F"),
        PATIENCE_S,
        f"{job_id} to be forgotten",
    )


def request(run: RunFolder, tag: str, num_attempts: int) -> JobRequest:
    attempts = tuple(run.attempt(f"profile/n001-b{2**i:05d}", 1) for i in range(num_attempts))
    return JobRequest(tag, attempts, 1, 1, 1, num_attempts)


def test_reason_and_hosts_of_an_array(slurm: ThrowawaySlurm, scheduler: Callable[[], SlurmScheduler]):
    """One element runs and its host is known; the other one's reason to wait is Slurm's."""
    job = sbatch(slurm, "--array=0-1%1", "--nodes=2", "--job-name=a|b c")
    expected = {
        f"{job}_0": Seen(QueueState.running, "", tuple(slurm.node_names)),
        f"{job}_1": Seen(QueueState.pending, "JobArrayTaskLimit"),
    }
    controller = scheduler()
    # Slurm gives a reason only when it has looked at the job
    wait_until(lambda: controller.states(expected) == expected, PATIENCE_S, f"{expected}", slurm.logs_tail)


def test_two_controllers_share_one_squeue_an_interval(
    slurm: ThrowawaySlurm,
    tiny_settings: Callable[..., Settings],
    tmp_path: Path,
    run_folder: RunFolder,
    logged: Callable[[str], Callable[[], int]],
    monkeypatch: pytest.MonkeyPatch,
):
    """Four processes that look ten times each, within one interval or two, cost one squeue or two."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # the test before has just asked
    job = sbatch(slurm)
    count = logged("squeue")
    # MinJobAge is 2, so that the interval is one second; each process says when it began and ended
    program = """
import sys, time
from tula_hpc.control.slurm_queue import SlurmQueue
queue = SlurmQueue(30)
began = time.time()
for _ in range(10):
    seen = queue.states([sys.argv[1]])  # None while another one asks for the first time
    assert seen is None or seen[sys.argv[1]].state.active
    time.sleep(0.02)
print(began, time.time())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program, job]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    times = [[float(word) for word in process.communicate(timeout=PATIENCE_S)[0].split()] for process in running]
    took_s = max(end for _, end in times) - min(began for began, _ in times)
    assert 1 <= count() <= took_s + 1


def test_a_frozen_slurm_is_silent_and_recovers(slurm: ThrowawaySlurm, scheduler: Callable[[], SlurmScheduler]):
    """While the controller hangs nothing is concluded; afterwards the job is where it was."""
    job, controller = sbatch(slurm), scheduler()
    wait_for(controller, {job: QueueState.running})
    slurm.freeze_controller()
    wait_until(lambda: controller.states([job]) is None, PATIENCE_S, "the silence to be noticed")
    with pytest.raises(SchedulerSilent):
        controller.find("tula-nothing", 0, [controller._run.attempt("train", 1)], False)
    assert controller.jobs_in_queue() is None
    slurm.thaw_controller()
    wait_for(controller, {job: QueueState.running})


def test_accounting_tells_how_forgotten_jobs_ended(
    slurm: ThrowawaySlurm,
    scheduler: Callable[[], SlurmScheduler],
    run_folder: RunFolder,
    logged: Callable[[str], Callable[[], int]],
):
    """What squeue has forgotten is told by sacct, once; nothing is concluded while slurmdbd is away.

    Asking in vain costs one call an interval. A lost submission is found by its name as well.
    """
    late = sbatch(slurm)
    good = sbatch(slurm, "--job-name=tula-lost", work="true")
    bad = sbatch(slurm, work="exit 3")
    never = sbatch(slurm, "--array=0-1", "--begin=now+1hour")
    hungry = sbatch(slurm, work="srun --mem=100M python3 -c 'bytes(1) * 400_000_000 + bytes([1])'")
    cancelled = sbatch(slurm)
    wait_for(scheduler(), {late: QueueState.running, cancelled: QueueState.running})
    slurm.run("scontrol", "update", f"jobid={late}", "EndTime=now")  # a time limit is a minute at least
    slurm.run("scancel", cancelled, never)
    for job in (good, bad, never, hungry, late, cancelled):
        forgotten(slurm, job)
    wait_until(lambda: len(slurm.sacct(hungry, "State")) > 1, PATIENCE_S, "accounting to know the last job")
    ends = {
        good: QueueState.completed,
        bad: QueueState.failed,
        f"{never}_1": QueueState.cancelled,
        hungry: QueueState.out_of_memory,
        late: QueueState.timeout,
        cancelled: QueueState.cancelled,
    }
    slurm.stop_accounting()
    calls, away = logged("sacct"), scheduler()
    wait_for(away, dict.fromkeys(ends, QueueState.absent))
    asked, began = calls(), time.monotonic()
    for _ in range(10):
        seen = away.states(ends)
        assert seen is None or {one.state for one in seen.values()} == {QueueState.absent}
    assert calls() <= asked + 1 + (time.monotonic() - began)  # the interval is a second
    assert away.find("tula-lost", 0, [run_folder.attempt("train", 1)], False) is None

    slurm.start_accounting()
    wait_for(away, ends)
    asked = calls()
    wait_for(away, ends)
    assert calls() == asked
    run_folder.scheduler.mkdir()
    late_comer = scheduler()
    wait_until(
        lambda: late_comer.find("tula-lost", 0, [run_folder.attempt("train", 1)], False) == good,
        PATIENCE_S,
        "the lost submission to be found",
    )


def test_more_elements_than_an_array_may_have_are_a_limit(
    slurm: ThrowawaySlurm, scheduler: Callable[[], SlurmScheduler], run_folder: RunFolder
):
    """The site's limit is known, and what exceeds it raises SubmissionLimited and is no refusal for good."""
    controller = scheduler()
    assert controller.max_attempts() == SETTINGS.max_array_size
    too_many = request(run_folder, "tula-many", SETTINGS.max_array_size + 1)
    with pytest.raises(SubmissionLimited, match="array"):
        controller.submit(too_many)
    assert controller.why_rejected(too_many) is None
    assert len(controller.submit(request(run_folder, "tula-few", SETTINGS.max_array_size))) == SETTINGS.max_array_size


def test_more_jobs_than_the_user_may_have_are_a_limit(
    slurm: ThrowawaySlurm, scheduler: Callable[[], SlurmScheduler], run_folder: RunFolder
):
    """MaxSubmitJobs of the user's association counts other jobs as well, and so does jobs_in_queue."""
    controller = scheduler()
    slurm.run("sacctmgr", "-i", "modify", "user", "root", "set", "MaxSubmitJobs=3")
    try:
        other = sbatch(slurm, "--array=0-1", "--exclusive")  # leaves no room, so that what is submitted next waits
        wait_for(controller, {f"{other}_0": QueueState.running, f"{other}_1": QueueState.running})
        assert controller.jobs_in_queue() == 2
        two = request(run_folder, "tula-two", 2)
        with pytest.raises(SubmissionLimited, match="AssocMaxSubmitJobLimit"):
            controller.submit(two)
        assert controller.why_rejected(two) is None
        assert len(controller.submit(request(run_folder, "tula-one", 1))) == 1
        assert controller.jobs_in_queue() == 3
    finally:
        slurm.run("sacctmgr", "-i", "modify", "user", "root", "set", "MaxSubmitJobs=-1")


def test_a_run_lives_within_the_users_limit(slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]):
    """With room for two jobs three candidates are measured in two submissions, and the reason for waiting is shown."""
    slurm.run("sacctmgr", "-i", "modify", "user", "root", "set", "MaxSubmitJobs=2")
    try:
        tula = Tula(tmp_path, [*tiny_overrides, "grid.max_nodes=1", "grid.max_batch_per_rank=128", "search=full"])
        tula.start()
        text = tula.finish()
    finally:
        slurm.run("sacctmgr", "-i", "modify", "user", "root", "set", "MaxSubmitJobs=-1")
    assert "profiling jobs must wait: " in text
    assert "AssocMaxSubmitJobLimit" in text
    for job in ("profile/n001-b00032", "profile/n001-b00064", "profile/n001-b00128", "train"):
        assert tula.verdicts(job)[-1] == "success"
        assert tula.ran(job) == 1


def test_broken_hosts_and_memory(slurm: ThrowawaySlurm, scheduler: Callable[[], SlurmScheduler]):
    """A drained host is named, a good one is not; the smallest node's memory is what Slurm counts."""
    first, second = slurm.node_names
    controller = scheduler()
    assert controller.broken_hosts(slurm.node_names) == []
    slurm.run("scontrol", "update", f"nodename={second}", "state=drain", "reason=test")
    assert controller.broken_hosts([first, second, "elsewhere"]) == [second]
    assert controller.memory_gib_per_node("") == SETTINGS.memory_mib_per_node / 1024
    slurm.run("scontrol", "update", f"nodename={second}", "state=resume")


def test_a_job_keeps_off_excluded_hosts(
    slurm: ThrowawaySlurm, scheduler: Callable[[], SlurmScheduler], run_folder: RunFolder
):
    """Slurm gets the hosts that a request leaves out, and the memory it asks for."""
    first = slurm.node_names[0]
    attempts = (run_folder.attempt("train", 1),)
    controller = scheduler()
    (job,) = controller.submit(JobRequest("tula-x", attempts, 1, 1, 1, 1, memory_gib=0.3, excluded_hosts=(first,)))
    words = slurm.run("scontrol", "show", "job", job).split()
    assert f"ExcNodeList={first}" in words
    assert "MinMemoryNode=307M" in words
