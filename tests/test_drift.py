"""What counts as a lasting drift of the step time, on series with a known truth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tula_hpc.models.drift import LASTING, Cause, Expected, Window, lasting_drift

PREDICTED = Expected.predicted(0.100, 0.081, 0.124)
"""With the interval of a fit that has seen few of its own errors: 24 % up."""


def windows(step_times_s: Sequence[float], waits_s: Sequence[float] | float = 0.0) -> list[Window]:
    waits = [waits_s] * len(step_times_s) if isinstance(waits_s, float) else waits_s
    ends = np.cumsum(np.array(step_times_s) * 10) + 1000
    return [Window(float(e), 10, t, w) for e, t, w in zip(ends, step_times_s, waits, strict=True)]


def noisy(seed: int, *levels: tuple[int, float]) -> list[float]:
    """So many windows of each mean, each 10 % up or down at most."""
    random = np.random.default_rng(seed)
    return [float(mean * random.uniform(0.9, 1.1)) for number, mean in levels for _ in range(number)]


def first_alarm(series: list[Window], expected: Expected = PREDICTED) -> int | None:
    """After how many windows the first look that finds a drift comes."""
    for seen in range(1, len(series) + 1):
        if lasting_drift(series[:seen], expected.settled(series[:seen])) is not None:
            return seen
    return None


@pytest.mark.parametrize("level", [0.9, 1.0, 1.1])
def test_noise_raises_no_alarm(level: float):
    """A hundred trainings of a hundred windows each, 10 % up or down around any level inside the interval."""
    assert [first_alarm(windows(noisy(seed, (100, 0.1 * level)))) for seed in range(100)] == [None] * 100


@pytest.mark.parametrize("before", [0, 5, 60])
@pytest.mark.parametrize("ratio", [1.3, 2.0])
def test_a_lasting_slowdown_is_found_within_ten_windows(before: int, ratio: float):
    """From the first step on or after a good beginning, with noise, nearly always; not before most of five show it."""
    found = []
    for seed in range(100):
        series = windows(noisy(seed, (before, 0.1), (10, 0.1 * ratio)))
        found.append(first_alarm(series))
    within = [seen for seen in found if seen is not None]
    assert len(within) >= 97
    assert min(within) >= before + LASTING // 2 + 1


def test_what_is_told_of_a_drift():
    """Its size against what is expected, its beginning, and that it did not begin with the training."""
    series = windows([0.1] * 20 + [0.142] * 6)
    drift = lasting_drift(series, PREDICTED)
    assert drift is not None
    assert drift.ratio == pytest.approx(1.42)
    assert drift.since == pytest.approx(series[19].ended)
    assert not drift.from_the_start
    assert drift.cause is Cause.STEPS


def test_steps_that_are_lastingly_faster_are_a_drift_as_well():
    drift = lasting_drift(windows([0.06] * LASTING), PREDICTED)
    assert drift is not None
    assert drift.from_the_start
    assert drift.ratio == pytest.approx(0.6)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_hiccup_is_ignored(length: int):
    """Up to four windows of three times the usual, whatever came before and comes after."""
    assert first_alarm(windows([0.1] * 10 + [0.3] * length + [0.1] * 10)) is None


def test_every_third_window_slow_is_no_drift():
    """A backup that comes and goes does not last."""
    assert first_alarm(windows([0.1, 0.1, 0.25] * 20)) is None


def test_waiting_for_data_is_told_apart():
    """Where the step less its wait is as expected the data are the cause; where it is not, they are not."""
    starved = lasting_drift(windows([0.18] * 6, 0.085), PREDICTED)
    slow = lasting_drift(windows([0.18] * 6, 0.005), PREDICTED)
    assert starved is not None
    assert slow is not None
    assert (starved.cause, slow.cause) == (Cause.DATA, Cause.STEPS)


def test_a_wait_that_was_predicted_explains_nothing():
    """A loader that was as slow when profiled is part of what is expected."""
    expected = Expected.predicted(0.1, 0.08, 0.124, data_wait_s=0.08)
    drift = lasting_drift(windows([0.18] * 6, 0.08), expected)
    assert drift is not None
    assert drift.cause is Cause.STEPS


def test_a_narrow_interval_does_not_make_it_nervous():
    """A fit that is sure to a percent does not turn a difference of a tenth into an alarm."""
    assert lasting_drift(windows([0.11] * 20), Expected.predicted(0.1, 0.099, 0.101)) is None


def test_a_training_that_agreed_at_first_is_compared_with_itself():
    """Inside a wide interval, a change against the first windows is found that the prediction would allow."""
    wide = Expected.predicted(0.1, 0.06, 0.17)
    series = windows([0.1] * 10 + [0.135] * LASTING)
    assert lasting_drift(series, wide) is None
    drift = lasting_drift(series, wide.settled(series))
    assert drift is not None
    assert drift.expected.source == "they took at first"


def test_a_training_that_never_agreed_is_compared_with_the_prediction():
    """Five slow windows at the beginning do not become what is expected."""
    series = windows([0.2] * 10)
    assert PREDICTED.settled(series) == PREDICTED
