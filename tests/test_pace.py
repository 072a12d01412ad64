"""Windows of steps, with a clock that a test sets."""

from __future__ import annotations

import pytest

from tula_hpc.ranks import pace as pace_module
from tula_hpc.ranks.pace import FIRST_KEPT, KEPT, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace_module, "time", clock)
    return clock


def steps(pace: Pace, clock: Clock, number: int, seconds: float, waited_s: float = 0.0) -> None:
    for _ in range(number):
        clock.now += seconds
        pace.step(waited_s)


def test_a_window_holds_a_hundredth_of_the_training(clock: Clock):
    pace = Pace(10_000, skipped_steps=0)
    pace.begin()
    steps(pace, clock, 250, 0.5, 0.125)
    assert [(n, mean_s, wait_s) for _, n, mean_s, wait_s in pace.windows] == [(100, 0.5, 0.125)] * 2


def test_quick_steps_make_windows_of_a_second_and_slow_ones_of_ten_minutes(clock: Clock):
    quick, slow = Pace(1000, 0), Pace(100_000, 0)
    quick.begin()
    steps(quick, clock, 2048, 0.0078125)
    assert {n for _, n, *_ in quick.windows} == {128}
    slow.begin()
    steps(slow, clock, 40, 32.0)
    assert {n for _, n, *_ in slow.windows} == {19}


def test_first_steps_and_what_is_between_epochs_are_left_out(clock: Clock):
    """The first steps of the process, an evaluation, a checkpoint; but not what the device still had to do."""
    pace = Pace(100, skipped_steps=3)
    pace.begin()
    steps(pace, clock, 3, 60.0)
    steps(pace, clock, 5, 0.25)
    clock.now += 0.5  # the queue of the device
    pace.stop()
    clock.now += 1000.0
    pace.step(0.0)
    pace.begin()
    steps(pace, clock, 2, 0.25)
    clock.now += 100.0
    pace.leave_out()
    steps(pace, clock, 3, 0.25)
    ((_, number, mean_s, _),) = pace.windows
    assert (number, mean_s) == (10, 0.3)


def test_the_series_is_bounded_and_keeps_its_beginning(clock: Clock):
    pace = Pace(1000, 0)
    pace.begin()
    steps(pace, clock, 10 * (KEPT + 50), 1.0)
    assert len(pace.windows) == KEPT
    ends = [ended for ended, *_ in pace.windows]
    assert ends[:FIRST_KEPT] == [1000.0 + 10 * (i + 1) for i in range(FIRST_KEPT)]
    assert ends[-1] == clock.now
