from __future__ import annotations

import io

import pytest
from rich.console import Console

from tula_hpc.control.jobs import Look
from tula_hpc.control.journal import Attempt
from tula_hpc.control.scheduler import Seen
from tula_hpc.control.verdicts import QueueState, Verdict
from tula_hpc.display import Display, duration
from tula_hpc.models.words import three_digits

ATTEMPT = Attempt("profile/n002-b00064", 1, "tag", 64, 2, job_id="42_0")


def look(state: QueueState, verdict: Verdict | None = None, why: str = "") -> Look:
    return Look(ATTEMPT, Seen(state, why), verdict)


def test_without_a_terminal_each_change_is_one_line(capsys: pytest.CaptureFixture[str]):
    """A log file gets a line when a job's state changes, and none while it stays."""
    display = Display()
    for state in (QueueState.pending, QueueState.running, QueueState.running):
        display.jobs("profiling", [look(state)], 0, 1, None)
    display.jobs("profiling", [look(QueueState.completed, Verdict.success)], 1, 1, None)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("profile on")]
    assert lines == [f"profile on 2 nodes, batch 64 a rank: {word}" for word in ("pending", "running", "success")]


def test_on_a_terminal_the_jobs_and_the_time_left_are_shown():
    """A terminal shows a table of jobs with their states, and how long the stage will take."""
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=100, color_system=None))
    display.jobs("profiling", [look(QueueState.running)], 1, 4, 90.0)
    display.close()
    for words in ("profile on 2 nodes, batch 64 a rank", "running", "profiling: 1 of 4 done, about 90 s left"):
        assert words in screen.getvalue()


def test_a_drift_of_the_training_stands_beside_its_progress():
    """The line that says how far the training is says what became of its steps."""
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=120, color_system=None))
    progress = {"samples": 50, "of_samples": 100, "time": 60.0, "started": 0.0}
    display.training([look(QueueState.running)], progress, [], "since 10:32:05 steps take 1.42 x as long")
    display.close()
    assert "training: 50 %, about 60 s left; since 10:32:05 steps take 1.42 x as long" in screen.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00421, "4.21 ms"), (1.5, "1.5 s"), (119, "119 s"), (7100, "118.3 min"), (9000, "2.5 h")]
)
def test_durations_come_in_the_unit_a_person_would_use(seconds: float, text: str):
    """Milliseconds to days, three digits or so."""
    assert duration(seconds) == text


def test_a_job_that_waits_for_ever_is_pointed_out_once(capsys: pytest.CaptureFixture[str]):
    """The reason for waiting is shown, and one that does not go away by itself is explained once."""
    display = Display()
    for why in ("Resources", "JobHeldUser", "JobHeldUser"):
        display.jobs("profiling", [look(QueueState.pending, why=why)], 0, 1, None)
    lines = capsys.readouterr().out.splitlines()
    assert "profile on 2 nodes, batch 64 a rank: pending (Resources)" in lines
    assert len([line for line in lines if "does not go away by itself" in line and "42_0" in line]) == 1


def test_numbers_beyond_a_thousand_are_written_out():
    """A cost of twelve thousand is no 1.2e+04."""
    assert [three_digits(value) for value in (0.0885, 999.4, 11_940.2)] == ["0.0885", "999", "11,940"]
