"""What the controller makes of a training's step times: told once, kept over a restart, taken within bounds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_next_steps import Told
from test_report import begin, profile, settings_of

from tula_hpc.candidates import Candidate
from tula_hpc.config import PricingKind, ReplanKind, Settings
from tula_hpc.control.choosing import chosen_fit
from tula_hpc.control.jobs import TRAIN, Jobs
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.moving import MAX_REPLANS
from tula_hpc.control.next_steps import NextSteps
from tula_hpc.control.packing import Submission
from tula_hpc.control.replanning import Replanning
from tula_hpc.control.scheduler import Seen
from tula_hpc.control.verdicts import QueueState, Verdict
from tula_hpc.models.posterior import correction
from tula_hpc.models.replan import Part, scaled
from tula_hpc.runs import RunFolder, read_json, write_json

LARGE = Candidate(8, 64)
HOUR = 3600.0


class Training:
    """A run in its training, whose job tells what a test wants it to."""

    def __init__(self, folder: Path, **changes: Any):
        self.settings: Settings = settings_of(grid__max_nodes=8, training__epochs=90, **changes)
        self.settings.objective.kind = type(self.settings.objective.kind).time
        self.run = RunFolder(folder / "run")
        begin(self.run, self.settings)
        profile(self.run, self.settings)
        self.told = Told(self.settings)
        self.said: list[str] = []
        self.restart()
        self.submit(LARGE)

    def restart(self) -> None:
        """A new controller takes over what is on disk."""
        self.journal = Journal(self.run.journal)
        self.jobs = Jobs(self.settings, self.run, self.journal, self.told, lambda: None)
        self.next_steps = NextSteps(self.settings, self.journal, self.jobs, self.said.append)
        self.replanning = Replanning(
            self.settings, self.run, self.journal, self.jobs, self.said.append, lambda table: {}
        )

    def submit(self, candidate: Candidate) -> None:
        """A training that began at once, half a minute before its first step."""
        assert self.jobs.submit(TRAIN, Submission([candidate], None)) is None
        folder = self.run.attempt(TRAIN, self.attempt.number)
        self.launched = folder.request.stat().st_mtime
        write_json(folder.launch, {"launch": str(folder.number), "host": "n1", "time": self.launched})
        write_json(folder.heartbeat, {"beat": 1, "doing": "training", "time": self.launched + 10})
        self.windows: list[list[float]] = []

    @property
    def attempt(self) -> Attempt:
        attempt = self.journal.state().last(TRAIN)
        assert attempt is not None
        return attempt

    def predicted_s(self, candidate: Candidate, sync_factor: float = 1.0) -> float:
        """Of a step, on a network that is so many times slower than when profiled."""
        record = read_json(self.run.fit)
        fit, row = chosen_fit(record), pd.DataFrame([vars(candidate)])
        corrected = correction(fit, pd.DataFrame(record["points"]), row)
        return float((scaled(fit, Part.SYNC, sync_factor).predict(row) * corrected)[0])

    def steps(self, number: int, step_s: float, wait_s: float = 0.0, launch: str | None = None) -> None:
        """The job tells of so many windows more, and the controller looks."""
        ended = self.windows[-1][0] if self.windows else self.launched + 30
        self.windows += [[ended + (i + 1) * 100 * step_s, 100, step_s, wait_s] for i in range(number)]
        total = self.settings.training.epochs * self.settings.train_samples
        self.replanning.look(
            {
                "samples": total // 10,
                "of_samples": total,
                "started": self.launched + 30,
                "launch": launch or str(self.attempt.number),
                "windows": self.windows,
            },
            self.jobs.look() or [],
        )

    def look(self, state: QueueState) -> None:
        self.told.seen = Seen(state)
        self.jobs.look()


@pytest.fixture
def training(tmp_path: Path) -> Callable[..., Training]:
    return lambda **changes: Training(tmp_path, cluster__gpus_per_node=1, cluster__file_lag_s=0.0, **changes)


BUSY = 15.0


def test_a_training_as_predicted_is_left_alone(training: Callable[..., Training]):
    one = training()
    one.steps(50, 1.1 * one.predicted_s(LARGE))
    assert one.said == []


def test_a_drift_is_told_once(training: Callable[..., Training]):
    """With its size, what it is taken for and what would be better; not again by later looks or another controller."""
    one = training()
    usual_s, slow_s = one.predicted_s(LARGE), one.predicted_s(LARGE, BUSY)
    one.steps(12, usual_s)
    one.steps(5, slow_s)
    (words,) = one.said
    assert f"steps take {slow_s / usual_s:.2f} x what they took at first" in words
    assert "taken for synchronisation 15 times as long" in words
    assert "30 s of it for the queue and a new start" in words
    assert "python -m tula_hpc +experiment=demo training.epochs=6 training.replan=auto" in words
    one.steps(20, 1.05 * slow_s)
    one.restart()
    one.steps(20, 0.95 * slow_s)
    assert one.said == [words]
    assert one.attempt.ending is None
    (drift,) = one.journal.state().drifts
    assert drift["offer"]["num_nodes"] < 8


def test_a_network_that_recovers_is_told_as_well(training: Callable[..., Training]):
    """What was told last is what later steps are compared with."""
    one = training()
    usual_s = one.predicted_s(LARGE)
    for step_s in (usual_s, one.predicted_s(LARGE, BUSY), usual_s):
        one.steps(12, step_s)
    assert len(one.said) == 2
    assert "steps take what was predicted again" in one.said[-1]
    assert "No other configuration is worth a new start" in one.said[-1]


def test_waiting_for_data_is_no_reason_to_move(training: Callable[..., Training]):
    """The loader is named, nothing is offered, and the models stay as they are."""
    one = training(training__replan=ReplanKind.auto, search__verify_choice=False)
    usual_s = one.predicted_s(LARGE)
    one.steps(12, usual_s)
    one.steps(12, 3 * usual_s, 2 * usual_s)
    (words,) = one.said
    assert "data.loader_workers (now 0" in words
    (drift,) = one.journal.state().drifts
    assert drift["offer"] is None
    assert drift["step_time"] == chosen_fit(read_json(one.run.fit)).to_dict()


def test_auto_has_the_training_save_and_goes_on_elsewhere(training: Callable[..., Training]):
    """The job is asked, not cancelled; when it has left, the next one is the offered one."""
    one = training(training__replan=ReplanKind.auto, search__verify_choice=False)
    one.steps(12, one.predicted_s(LARGE, BUSY))
    assert one.run.attempt(TRAIN, 1).leave.exists()
    one.look(QueueState.running)
    assert one.told.cancelled == []
    one.look(QueueState.failed)
    assert one.attempt.verdict is Verdict.replanned
    assert one.next_steps.training_may_go_on(one.attempt, progressed=False)
    candidate, _ = one.next_steps.after(one.attempt)
    assert candidate.num_nodes < 8
    assert one.attempt.successor is not None
    assert one.attempt.successor.train_time_s > 0


def test_a_wish_that_a_crash_cut_short_is_heard(training: Callable[..., Training]):
    """The journal knows that the training is to leave; the next controller's look tells the training."""
    one = training(training__replan=ReplanKind.auto, search__verify_choice=False)
    one.steps(12, one.predicted_s(LARGE, BUSY))
    leave = one.run.attempt(TRAIN, 1).leave
    leave.unlink()
    one.restart()
    one.look(QueueState.running)
    assert leave.exists()


def test_an_offer_is_taken_by_the_next_command(training: Callable[..., Training]):
    """Who is started with `auto` takes what was offered before, if the steps still are as they were then."""
    one = training(search__verify_choice=False)
    slow_s = one.predicted_s(LARGE, BUSY)
    one.steps(12, slow_s)
    assert one.attempt.ending is None
    one.settings.training.replan = ReplanKind.auto
    one.restart()
    one.steps(1, slow_s)
    assert one.attempt.ending is Verdict.replanned
    assert len(one.journal.state().drifts) == 1


def test_an_offer_of_a_busy_network_is_not_taken_when_it_has_recovered(training: Callable[..., Training]):
    """Between the offer and the next command things changed: nothing is done before that is lasting, and then told."""
    one = training()
    one.steps(12, one.predicted_s(LARGE, BUSY))
    one.settings.training.replan = ReplanKind.auto
    one.restart()
    for _ in range(12):
        one.steps(1, one.predicted_s(LARGE))
    assert one.attempt.ending is None
    assert "steps take what was predicted again" in one.said[-1]


def test_a_job_that_a_user_cancels_meanwhile_stays_cancelled(training: Callable[..., Training]):
    one = training(training__replan=ReplanKind.auto, search__verify_choice=False)
    one.steps(12, one.predicted_s(LARGE, BUSY))
    one.look(QueueState.cancelled)
    assert one.attempt.verdict is Verdict.cancelled


def test_a_training_moves_a_bounded_number_of_times(training: Callable[..., Training]):
    """On a network that is busy now and then it is only told after that."""
    one = training(training__replan=ReplanKind.auto, search__verify_choice=False)
    usual_s, slow_s = one.predicted_s(LARGE), one.predicted_s(LARGE, BUSY)
    for _ in range(MAX_REPLANS):
        one.steps(12, usual_s)
        one.steps(12, slow_s)
        one.look(QueueState.failed)
        assert one.attempt.verdict is Verdict.replanned
        one.submit(LARGE)
        one.told.seen = Seen(QueueState.running)
    one.steps(12, usual_s)
    one.steps(12, slow_s)
    assert one.attempt.ending is None
    assert f"training.replan=auto has moved it {MAX_REPLANS} times" in one.said[-1]


def test_what_an_earlier_launch_told_does_not_count(training: Callable[..., Training]):
    """The progress of a job that was started again is that of the one before until the new one writes."""
    one = training()
    one.steps(12, one.predicted_s(LARGE, BUSY), launch="another")
    assert one.said == []


def test_off_does_not_look(training: Callable[..., Training]):
    one = training(training__replan=ReplanKind.off)
    one.steps(12, one.predicted_s(LARGE, BUSY))
    assert one.said == []
    assert one.journal.state().drifts == ()


def test_a_batch_that_ran_out_of_memory_in_training_is_not_offered(training: Callable[..., Training]):
    """What profiling said of its memory was wrong."""
    one = training()
    one.steps(12, one.predicted_s(LARGE, BUSY))
    offered = one.journal.state().drifts[-1]["offer"]
    there = Candidate(offered["num_nodes"], offered["batch_per_rank"])
    other = training_after_running_out(one, there)
    other.steps(12, other.predicted_s(LARGE, BUSY))
    offered = other.journal.state().drifts[-1]["offer"]
    assert offered is None or (offered["num_nodes"], offered["batch_per_rank"]) != (
        there.num_nodes,
        there.batch_per_rank,
    )


def training_after_running_out(one: Training, candidate: Candidate) -> Training:
    """The same run as if the candidate had been tried before and had run out of memory."""
    for path in one.run.journal.glob("*-drift.json"):
        path.unlink()
    one.journal.concluded(one.attempt, Verdict.timeout, "its time was over")
    one.submit(candidate)
    one.journal.concluded(one.attempt, Verdict.cuda_oom, "CUDA out of memory")
    one.restart()
    one.submit(LARGE)
    return one


def test_the_budget_that_is_spent_is_gone(training: Callable[..., Training]):
    """An hour of eight nodes at 2.48 leaves nothing of 19.85."""
    one = training(objective__budget=19.85)
    heartbeat = one.run.attempt(TRAIN, 1).heartbeat
    write_json(heartbeat, {"beat": 2, "doing": "training", "time": one.launched + HOUR})
    one.steps(12, one.predicted_s(LARGE, BUSY))
    assert "No configuration keeps what is left of the limits, this one neither: objective.budget 0.01." in one.said[-1]


def test_the_training_goes_on_when_slurm_tells_no_prices(training: Callable[..., Training]):
    """A drift is told all the same, and that nothing is known of what would be better."""
    one = training(pricing__kind=PricingKind.service_units)
    one.steps(12, one.predicted_s(LARGE, BUSY))
    assert "Whether another configuration would be better is not known: Slurm does not tell" in one.said[-1]


def test_the_deadline_counts_from_the_first_submission(training: Callable[..., Training]):
    """What the training has used of it is gone: of six hours a few seconds are left, which nothing keeps."""
    one = training(objective__deadline_h=6.0)
    request = one.run.attempt(TRAIN, 1).request
    began = time.time() - 5.99 * HOUR
    os.utime(request, (began, began))
    one.steps(12, one.predicted_s(LARGE, BUSY))
    assert "No configuration keeps what is left of the limits, this one neither: objective.deadline_h" in one.said[-1]
