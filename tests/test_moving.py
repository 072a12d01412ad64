"""A training is moved only to what was measured beside it, with a scheduler that says of each job what a test wants."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from killing import Killed, Kills
from test_next_steps import Told
from test_replanning import BUSY, LARGE, Training

from tula_hpc.candidates import Candidate
from tula_hpc.config import ReplanKind
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.moving import PATIENCE_S
from tula_hpc.control.scheduler import JobRequest, Seen
from tula_hpc.control.verdicts import QueueState, Verdict
from tula_hpc.ranks.timings import write_rank
from tula_hpc.runs import AttemptFolder, write_json


class Beside(Told):
    """Trainings run, and what is measured beside them is in the state that a test sets."""

    probe = Seen(QueueState.pending, "Resources")
    training = Seen(QueueState.running)

    def states(self, job_ids: Collection[str]) -> Mapping[str, Seen]:
        return {job_id: self.probe if self._is_probe(job_id) else self.training for job_id in job_ids}

    def find(self, tag: str, index: int, attempts: Sequence[AttemptFolder], one_after_another: bool) -> str | None:
        numbers = [n for n, request in enumerate(self.requests, 1) if request.tag == tag]
        return f"{numbers[0]}_{index}" if numbers else None

    def _is_probe(self, job_id: str) -> bool:
        return self.requests[int(job_id.split("_")[0]) - 1].tag.split("-")[-4] == "probe"

    @property
    def probes(self) -> list[JobRequest]:
        return [request for request in self.requests if request.tag.split("-")[-4] == "probe"]


class Moved(Training):
    """A training that moves by itself, on a network that has become busy."""

    told: Beside
    rank_meta: Callable[..., dict[str, Any]]

    def drift(self, busy: float) -> None:
        self.told.__class__ = Beside
        self.steps(12, self.predicted_s(LARGE, busy))

    @property
    def probes(self) -> list[Attempt]:
        return [a for a in self.journal.state().attempts.values() if a.is_probe]

    @property
    def there(self) -> Candidate:
        """What is measured."""
        return self.jobs.candidate(self.probes[-1])

    def measure(self, over_predicted: float, **memory: float) -> None:
        """The newest probe ends with a step time that is so many times the predicted one."""
        folder = self.run.attempt(self.probes[-1].job, self.probes[-1].number)
        folder.claim.mkdir(parents=True)
        step_s = over_predicted * self.journal.state().moves[-1].step_time_s
        for rank in range(self.there.world_size):
            sizes = {"world_size": self.there.world_size, "batch_per_rank": self.there.batch_per_rank}
            meta = self.rank_meta(**sizes, compute_step_s=step_s / 2)
            meta["memory"] |= memory
            write_rank(folder, rank, [[float(i), 0.0, 0.0, step_s, 0.0, 0.0, step_s] for i in range(4)], meta)
        self.told.probe = Seen(QueueState.completed)

    def fail(self, kind: str, state: QueueState = QueueState.failed) -> None:
        """A rank of the newest probe leaves an error."""
        folder = self.run.attempt(self.probes[-1].job, self.probes[-1].number)
        folder.claim.mkdir(parents=True)
        write_json(folder.rank_error(0), {"kind": kind, "message": kind, "rank": 0, "time": 0.0})
        self.told.probe = Seen(state)

    def goes_on(self, looks: int = 4) -> None:
        """The controller looks again, and the steps are as they were last."""
        for _ in range(looks):
            self.steps(1, self.windows[-1][2])

    def lose_patience(self) -> None:
        request = self.run.attempt(self.probes[-1].job, self.probes[-1].number).request
        began = request.stat().st_mtime - PATIENCE_S - 1
        os.utime(request, (began, began))
        self.goes_on(1)
        assert len(self.told.cancelled) == 1
        self.told.probe = Seen(QueueState.cancelled)


@pytest.fixture
def moved(tmp_path: Path, rank_meta: Callable[..., dict[str, Any]]) -> Callable[..., Moved]:
    def make(busy: float = BUSY, room: int = 9, **changes: Any) -> Moved:
        wanted = {"training__replan": ReplanKind.auto, "cluster__file_lag_s": 0.0, "cluster__gpus_per_node": 1}
        one = Moved(tmp_path, **{**wanted, **changes})
        one.rank_meta = rank_meta
        one.told.room = room
        one.drift(busy)
        return one

    return make


def test_what_is_offered_is_measured_while_the_training_runs(moved: Callable[..., Moved]):
    """As profiling does, once, and then it moves there."""
    one = moved()
    one.goes_on()
    (request,) = one.told.probes
    assert request.measures
    assert request.num_nodes == one.there.num_nodes < 8
    assert one.attempt.ending is None
    assert "beside the training before it moves (search.verify_choice)" in one.said[-1]
    one.measure(1.1)
    one.goes_on()
    assert "+10% against the prediction, and 0.60 GiB of a rank's memory" in one.said[-3]
    assert one.attempt.ending is Verdict.replanned
    assert one.attempt.successor is not None
    assert (one.attempt.successor.num_nodes, one.attempt.successor.batch_per_rank) == (
        one.there.num_nodes,
        one.there.batch_per_rank,
    )
    assert len(one.probes) == 1


def test_what_was_measured_is_what_is_expected_after_the_move(moved: Callable[..., Moved]):
    """Steps near the measurement, and too far from the prediction, are no drift."""
    one = moved(busy=1.3 * BUSY)
    there, expected_s = one.there, one.journal.state().moves[-1].step_time_s
    one.measure(1.15)
    one.goes_on()
    one.told.training = Seen(QueueState.failed)
    one.look(QueueState.failed)
    assert one.attempt.verdict is Verdict.replanned
    one.told.training = Seen(QueueState.running)
    one.submit(there)
    said = len(one.said)
    one.steps(12, 1.15 * 1.15 * expected_s)
    assert len(one.said) == said


def test_a_measurement_that_is_too_slow_keeps_the_training_where_it_is(moved: Callable[..., Moved]):
    """It is told, and the same offer does not come again: not by later steps, nor by another controller."""
    one = moved()
    there = one.there
    one.measure(50.0)
    one.goes_on()
    assert one.attempt.ending is None
    assert "+4900% against the prediction" in "\n".join(one.said)
    one.restart()
    one.goes_on(8)
    assert sum(one.jobs.candidate(a) == there for a in one.probes) == 1


@pytest.mark.parametrize("way", ["error", "too much"])
def test_what_does_not_fit_is_not_moved_to(moved: Callable[..., Moved], way: str):
    """Nor is a larger batch on the same nodes tried after it."""
    one = moved()
    there = one.there
    if way == "error":
        one.fail("cuda_oom")
    else:
        one.measure(1.0, memory_gib=7.9)
    one.goes_on()
    assert one.attempt.ending is None
    later = [one.jobs.candidate(a) for a in one.probes[1:]]
    assert not [c for c in later if c.num_nodes == there.num_nodes and c.batch_per_rank >= there.batch_per_rank]


def test_without_room_beside_it_a_training_moves_to_fewer_nodes_as_predicted(moved: Callable[..., Moved]):
    """It gives back what it needs, so it is not kept for ever; that nothing was measured is said."""
    one = moved()
    one.goes_on()
    assert one.told.cancelled == []
    one.lose_patience()
    one.goes_on()
    assert one.attempt.ending is Verdict.replanned
    assert one.probes[-1].verdict is Verdict.never_started
    assert "as predicted: it was not measured, nothing was free for that beside the training" in one.said[-1]


def test_without_room_for_more_nodes_a_training_stays(tmp_path: Path):
    """It would wait for them itself; and no other batch on so many is tried."""
    one = Moved(tmp_path, training__replan=ReplanKind.auto, cluster__file_lag_s=0.0, cluster__gpus_per_node=1)
    one.journal.concluded(one.attempt, Verdict.timeout, "its time was over")
    one.told.__class__ = Beside
    one.told.probe = Seen(QueueState.pending)
    few = Candidate(2, 64)
    one.submit(few)
    one.steps(12, 1.5 * one.predicted_s(few))
    assert one.there.num_nodes > 2
    refused = one.there.num_nodes
    one.lose_patience()
    one.goes_on()
    assert one.attempt.ending is None
    assert "a training on so many would wait as long" in "\n".join(one.said)
    assert all(a.num_nodes < refused for a in one.probes[1:])


def test_where_one_job_runs_at_a_time_the_prediction_must_do(
    moved: Callable[..., Moved], monkeypatch: pytest.MonkeyPatch
):
    """On one machine a measurement would wait for the end of the training."""
    monkeypatch.setattr(Beside, "one_host", True)
    one = moved()
    assert one.probes == []
    assert one.attempt.ending is Verdict.replanned
    assert "as predicted: it was not measured, this machine runs one job at a time" in one.said[-1]


def test_a_full_queue_is_no_room(moved: Callable[..., Moved]):
    """Where a user may have one job, the training is it."""
    one = moved(room=0)
    one.goes_on()
    assert one.told.probes == []
    assert one.attempt.ending is Verdict.replanned
    assert "nothing was free for that beside the training" in one.said[-1]


def test_a_measurement_that_a_user_cancels_is_not_made_again(moved: Callable[..., Moved]):
    """And nothing moves there."""
    one = moved()
    there = one.there
    one.told.probe = Seen(QueueState.cancelled)
    one.goes_on()
    assert one.probes[0].verdict is Verdict.cancelled
    assert one.attempt.ending is None
    assert [one.jobs.candidate(a) for a in one.probes].count(there) == 1


def test_a_node_that_fails_says_nothing_of_the_configuration(moved: Callable[..., Moved]):
    one = moved()
    one.fail("lost", QueueState.node_failure)
    one.goes_on(1)
    one.told.probe = Seen(QueueState.pending)
    one.goes_on(2)
    assert [a.verdict for a in one.probes] == [Verdict.node_failure, None]
    one.measure(1.0)
    one.goes_on()
    assert one.attempt.ending is Verdict.replanned


def test_a_network_that_recovers_meanwhile_ends_the_measurement(moved: Callable[..., Moved]):
    """The steps are told to be as before, and the training stays."""
    one = moved()
    one.steps(12, one.predicted_s(LARGE))
    one.goes_on(1)
    assert set(one.told.cancelled) == {"2_0"}
    one.told.probe = Seen(QueueState.cancelled)
    one.goes_on()
    assert [a.verdict for a in one.probes] == [Verdict.skipped]
    assert one.attempt.ending is None


def test_a_training_that_ends_meanwhile_does_not_wait(moved: Callable[..., Moved]):
    """Its run would not be over before its last job is."""
    one = moved()
    one.told.training = Seen(QueueState.timeout)
    one.goes_on(2)
    assert set(one.told.cancelled) == {"2_0"}
    one.told.probe = Seen(QueueState.cancelled)
    one.goes_on(1)
    assert one.journal.state().open == []


def test_a_controller_killed_at_every_step_of_a_move_goes_on(
    moved: Callable[..., Moved], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Before and after each event: one job measures, and the training moves to what it has measured."""
    kills = Kills(tmp_path / "survived.txt")
    append, submit = Journal._append, Beside.submit

    one = moved(training__replan=ReplanKind.offer)
    one.settings.training.replan = ReplanKind.auto
    one.restart()
    name_of: Callable[..., str] = lambda self, event, **values: f"{event} {values.get('job', '').split('/')[0]}"  # noqa: E731
    monkeypatch.setattr(Journal, "_append", kills.around(append, name_of))
    monkeypatch.setattr(Beside, "submit", kills.around(submit, lambda self, request: "sbatch"))
    for _ in range(60):
        try:
            one.goes_on(3)
            began = one.probes and one.probes[-1].job_id is not None
            if began and not one.run.attempt(one.probes[-1].job, one.probes[-1].number).claim.exists():
                one.measure(1.0)
        except Killed:
            one.restart()
            with monkeypatch.context() as patch:
                patch.setattr(Journal, "_append", append)
                one.journal.started("login", "the same command")
        if one.attempt.ending is Verdict.replanned:
            break
    for event in ("move train", "intent probe", "sbatch", "submitted probe", "verdict probe", "ending train"):
        assert f"after {event}" in kills.points()
    assert one.attempt.ending is Verdict.replanned
    assert len(one.told.probes) == 1
    assert [a.verdict for a in one.probes].count(Verdict.success) == 1
