from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tula_hpc.ranks.signs import EarlyWarning, Heartbeat, warning_before_end_s


def warned(number: int, time_limit_min: float | None) -> EarlyWarning:
    warning = EarlyWarning(time_limit_min)
    warning.receive(number)
    return warning


@pytest.mark.parametrize(
    ("number", "time_limit_min", "kind"),
    [
        (signal.SIGUSR2, 5, "preempted"),  # at the very start of a job of five minutes
        (signal.SIGUSR2, 600, "preempted"),
        (signal.SIGUSR2, 1, "timeout"),
        (signal.SIGUSR2, None, "preempted"),
        (signal.SIGTERM, 600, "terminated"),
        (signal.SIGTERM, 1, "timeout"),
    ],
)
def test_the_clock_and_the_signal_tell_why_a_job_ends(number: int, time_limit_min: float | None, kind: str):
    """Near the end of the time limit it is the limit; before that it is preemption or somebody's SIGTERM."""
    assert warned(number, time_limit_min).kind() == kind


@pytest.mark.parametrize(("time_limit_min", "seconds"), [(None, 120), (600, 120), (5, 75), (2, 30)])
def test_short_jobs_are_warned_later(time_limit_min: float | None, seconds: int):
    """A quarter of a short time limit is left to save in, so that most of it is used."""
    assert warning_before_end_s(time_limit_min) == seconds


def test_a_warned_process_goes_on_and_knows_it():
    """Both signals are noted and end nothing; the first one counts."""
    program = """
import os, signal
from tula_hpc.ranks.signs import EarlyWarning
warning = EarlyWarning(600)
warning.listen()
before = warning.is_set()
os.kill(os.getpid(), signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGTERM)
print(before, warning.is_set(), warning.kind())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["False", "True", "preempted"]


def test_a_heart_beats_at_once_and_then_now_and_then(tmp_path: Path):
    """Every step may beat, and the file is written only now and then."""
    path = tmp_path / "heartbeat.json"
    heartbeat = Heartbeat(path)
    heartbeat.now("starting")
    for _ in range(100):
        heartbeat.beat("training")
    assert json.loads(path.read_text())["beat"] == 1
    heartbeat.now("timing")
    assert json.loads(path.read_text())["doing"] == "timing"
