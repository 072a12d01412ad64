"""What follows from each end, with a scheduler that says what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings
from tula_hpc.control import jobs as jobs_module
from tula_hpc.control.jobs import Jobs, profile_job
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.local import LocalScheduler
from tula_hpc.control.next_steps import NextSteps
from tula_hpc.control.packing import Submission
from tula_hpc.control.scheduler import JobRequest, Seen
from tula_hpc.control.verdicts import QueueState, Verdict
from tula_hpc.errors import SubmissionLimited
from tula_hpc.ranks.timings import write_rank
from tula_hpc.runs import RunFolder, write_json

SMALL, MIDDLE, LARGE = Candidate(1, 32), Candidate(1, 64), Candidate(1, 128)


class Told(LocalScheduler):
    """Gives the states, limits and sizes that a test sets, and notes what it is asked to do."""

    poll_interval_s = 0.0
    one_host = False

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.file_lag_s = settings.cluster.file_lag_s
        self.seen = Seen(QueueState.running)
        self.cancelled: list[str] = []
        self.requests: list[JobRequest] = []
        self.room = 10**6
        self.queued = [1]
        self.node_gib: float | None = 64.0

    def submit(self, request: JobRequest) -> list[str]:
        if len(request.attempts) > self.room:
            raise SubmissionLimited("AssocMaxSubmitJobLimit")
        self.requests.append(request)
        number = len(self.requests)
        if request.one_after_another:
            return [str(number)] * len(request.attempts)
        return [f"{number}_{i}" for i in range(len(request.attempts))]

    def states(self, job_ids: Collection[str]) -> Mapping[str, Seen]:
        return dict.fromkeys(job_ids, self.seen)

    def cancel(self, job_ids: Collection[str]) -> None:
        self.cancelled += job_ids

    def jobs_in_queue(self) -> int:
        return self.queued.pop(0) if len(self.queued) > 1 else self.queued[0]

    def memory_gib_per_node(self, node_type: str) -> float | None:
        return self.node_gib


@dataclass
class Bench:
    """The jobs of a run and the rules for what comes next."""

    settings: Settings
    run: RunFolder
    told: Told = field(init=False)

    def __post_init__(self) -> None:
        self.told = Told(self.settings)
        self.restart()

    def restart(self) -> None:
        """A new controller takes over what is on disk."""
        self.journal = Journal(self.run.journal)
        self.jobs = Jobs(self.settings, self.run, self.journal, self.told, lambda: None)
        self.next_steps = NextSteps(self.settings, self.journal, self.jobs, lambda text: None)

    def submit(self, *candidates: Candidate, shared: bool = False) -> list[Attempt]:
        assert self.jobs.submit("profile", Submission(list(candidates), 15, shared)) is None
        return self.journal.state().open

    def begin(self, attempt: Attempt) -> None:
        self.run.attempt(attempt.job, attempt.number).claim.mkdir(parents=True)

    def end(self, attempt: Attempt, kind: str) -> None:
        """A rank of a shared job leaves an error and its end."""
        folder = self.run.attempt(attempt.job, attempt.number)
        write_json(folder.rank_error(0), {"kind": kind, "message": kind, "rank": 0, "time": 0.0})
        write_json(folder.rank_end(0), {"code": 1})

    def look(self, state: QueueState | None = None) -> None:
        if state is not None:
            self.told.seen = Seen(state)
        self.jobs.look()

    def last(self, candidate: Candidate) -> Attempt:
        attempt = self.journal.state().last(profile_job(candidate))
        assert attempt is not None
        return attempt

    def verdict(self, candidate: Candidate) -> Verdict | None:
        return self.last(candidate).verdict


@pytest.fixture
def bench(tiny_settings: Callable[..., Settings], run_folder: RunFolder) -> Callable[..., Bench]:
    return lambda *overrides: Bench(
        tiny_settings("cluster.file_lag_s=0", "grid.max_batch_per_rank=128", *overrides), run_folder
    )


@pytest.mark.parametrize("first", [None, "lost", "terminated"])
def test_a_cause_that_the_file_system_shows_late_is_waited_for(bench: Callable[..., Bench], first: str | None):
    """The job has failed, and what a rank said of it comes after another's words, or after none."""
    one = bench("cluster.file_lag_s=60")
    (attempt,) = one.submit(LARGE)
    one.begin(attempt)
    folder = one.run.attempt(attempt.job, attempt.number)
    if first is not None:
        write_json(folder.rank_error(1), {"kind": first, "message": first, "rank": 1, "time": 1.0})
    one.look(QueueState.failed)
    assert one.verdict(LARGE) is None
    write_json(folder.rank_error(0), {"kind": "cuda_oom", "message": "no room", "rank": 0, "time": 0.0})
    one.look()
    assert one.verdict(LARGE) is Verdict.cuda_oom


def test_a_cause_that_never_comes_is_not_waited_for_longer(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
):
    """After `cluster.file_lag_s` what is there decides; where nothing began, nothing is waited for."""
    one = bench("cluster.file_lag_s=60")
    attempt, _ = one.submit(SMALL, LARGE)
    one.begin(attempt)
    one.look(QueueState.failed)
    assert (one.verdict(SMALL), one.verdict(LARGE)) == (None, Verdict.failed)
    now = jobs_module.time.monotonic()
    monkeypatch.setattr(jobs_module.time, "monotonic", lambda: now + 61)
    one.look()
    assert one.verdict(SMALL) is Verdict.failed


def hang(one: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hang time pass between two looks."""
    one.look()
    now = jobs_module.time.monotonic()
    monkeypatch.setattr(jobs_module.time, "monotonic", lambda: now + 3600)


def test_a_hung_job_that_others_share_is_ended_and_they_come_again(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
):
    """One that was over keeps its own end, the one that hangs is hung, the one behind it has not had its turn."""
    one = bench()
    first, second, _ = one.submit(SMALL, MIDDLE, LARGE, shared=True)
    one.begin(first)
    one.end(first, "error")
    one.begin(second)
    hang(one, monkeypatch)
    assert one.verdict(SMALL) is Verdict.failed
    one.look()
    assert one.told.cancelled == ["1"]
    one.look(QueueState.cancelled)
    assert (one.verdict(MIDDLE), one.verdict(LARGE)) == (Verdict.hung, Verdict.never_started)
    assert one.next_steps.given_up() == {SMALL}


def test_a_controller_that_dies_while_it_ends_a_hung_job_ends_it_later(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
):
    """Whatever it had put down, the job is ended by the next one."""
    one = bench()
    first, second = one.submit(SMALL, MIDDLE, shared=True)
    one.begin(first)
    one.journal.ending(second, Verdict.never_started, "its job hung")
    one.restart()
    hang(one, monkeypatch)
    one.look()
    assert "1" in one.told.cancelled


def test_a_suspended_job_does_not_hang(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch):
    """Without a processor there is no sign of progress; the clock starts anew when it goes on."""
    one = bench()
    one.submit(SMALL)
    hang(one, monkeypatch)
    one.look(QueueState.suspended)
    one.look(QueueState.running)
    one.look()
    assert one.told.cancelled == []


def test_who_did_not_have_a_turn_is_not_given_up(bench: Callable[..., Bench]):
    """A shared job that is preempted again and again counts against the attempt that ran, not those behind it."""
    one = bench()
    for _ in range(4):
        one.begin(one.submit(SMALL, MIDDLE, shared=True)[0])
        one.look(QueueState.preempted)
    assert one.verdict(MIDDLE) is Verdict.never_started
    assert one.next_steps.given_up() == set()


def test_jobs_that_never_start_are_given_up_at_last(bench: Callable[..., Bench]):
    """A submission that leaves the queue again and again without a rank of it is tried three times."""
    one = bench()
    for _ in range(3):
        assert one.next_steps.given_up() == set()
        one.submit(SMALL)
        one.look(QueueState.absent)
    assert one.next_steps.given_up() == {SMALL}


def test_a_new_start_of_the_command_counts_anew(bench: Callable[..., Bench]):
    """What went wrong may have been mended, so everything but a cancellation is tried again."""
    one = bench()
    one.submit(SMALL, MIDDLE)
    one.look(QueueState.timeout)
    assert one.next_steps.given_up() == {SMALL, MIDDLE}
    one.journal.started("host", "command")
    assert one.next_steps.given_up() == set()


def test_what_was_cancelled_stays_cancelled(bench: Callable[..., Bench], tiny_settings: Callable[..., Settings]):
    """A new start does not bring it back, unless it says so."""
    one = bench()
    one.submit(SMALL)
    one.look(QueueState.cancelled)
    one.journal.started("host", "command")
    assert one.next_steps.given_up() == {SMALL}
    again = bench("cluster.resubmit_cancelled=true")
    assert again.next_steps.given_up() == set()


@pytest.mark.parametrize(
    ("overrides", "asked_for"),
    [
        (["cluster.memory_gib=16"], [32.0]),
        (["cluster.memory_gib=16", "cluster.max_memory_gib=20"], [20.0]),
        (["cluster.memory_gib=60"], [64.0]),
        ([], [64.0]),
    ],
)
def test_a_gpu_job_killed_for_host_memory_gets_more(
    bench: Callable[..., Bench], overrides: list[str], asked_for: list[float]
):
    """Twice as much, within the node and the user's limit; all where nobody knows what it had."""
    one = bench("cluster.gpus_per_node=1", *overrides)
    one.submit(SMALL)
    one.look(QueueState.out_of_memory)
    assert one.next_steps.given_up() == set()
    assert [s.memory_gib for s in one.next_steps.by_memory(Submission([SMALL], 15))] == asked_for


def test_a_limit_that_was_set_since_holds_for_memory_that_was_asked_for_before(
    bench: Callable[..., Bench], tiny_settings: Callable[..., Settings]
):
    """A raised request that the site refused is lowered by `cluster.max_memory_gib`."""
    one = bench("cluster.gpus_per_node=1", "cluster.memory_gib=16")
    one.jobs.submit("profile", Submission([SMALL], 15, memory_gib=32.0))
    one.look(QueueState.absent)
    lower = bench("cluster.gpus_per_node=1", "cluster.memory_gib=16", "cluster.max_memory_gib=17")
    assert [s.memory_gib for s in lower.next_steps.by_memory(Submission([SMALL], 15))] == [17.0]


def test_an_array_is_split_where_a_limit_asks_for_it(bench: Callable[..., Bench]):
    """With room for one job at a time two are submitted one by one, and nothing twice."""
    one = bench()
    one.told.room = 1
    assert one.jobs.submit("profile", Submission([SMALL, MIDDLE], 15)) is None
    assert [len(request.attempts) for request in one.told.requests] == [1, 1]
    assert len(one.journal.state().open) == 2


def test_a_full_queue_is_tried_again_when_a_job_has_ended(bench: Callable[..., Bench]):
    """Waiting looks at the queue and not at the clock alone, so that sbatch is not asked at every look."""
    one = bench()
    one.told.queued = [5, 5, 5, 4]
    assert one.jobs.wait_for_room(SubmissionLimited("AssocMaxSubmitJobLimit"))
    assert one.told.queued == [4]


@pytest.mark.parametrize(("counts_others", "waits"), [(False, False), (True, True)])
def test_waiting_helps_only_if_somebodys_job_may_end(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, counts_others: bool, waits: bool
):
    """With no job of one's own a personal limit is final, and a group's limit is not."""
    monkeypatch.setattr(jobs_module, "ROOM_PATIENCE_S", 0.0)
    one = bench()
    one.told.queued = [0]
    assert one.jobs.wait_for_room(SubmissionLimited("limit", counts_others)) is waits


def test_a_record_that_was_damaged_later_is_measured_again(
    bench: Callable[..., Bench], rank_meta: Callable[..., dict[str, Any]]
):
    """A success whose file is torn when the models are to be fitted is taken back, and named."""
    one = bench()
    (attempt,) = one.submit(SMALL)
    folder = one.run.attempt(attempt.job, 1)
    rows = [[float(i), 0.1, 0.1, 0.1, 0.0, 0.1, 0.4] for i in range(4)]
    write_rank(folder, 0, rows, rank_meta(world_size=1, batch_per_rank=32))
    one.look(QueueState.completed)
    assert one.verdict(SMALL) is Verdict.success
    path: Path = folder.rank_json(0)
    path.write_text(path.read_text()[:-30])
    one.restart()
    assert [str(path) in why for why in one.jobs.distrust_damaged()] == [True]
    assert one.verdict(SMALL) is Verdict.incomplete
    assert one.next_steps.given_up() == set()
