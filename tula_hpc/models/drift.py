"""Whether the steps of a training have lastingly come to take another time than expected, and how well that is known.

The training gives the mean time of its steps in windows of at least ten (`ranks/pace.py`). What is expected is the
prediction with its interval until the first ten windows agree with it and with each other, and from then on what those
took, which is known far better than any prediction.

A drift is lasting when the newest `LASTING` windows all lie beyond half of the tolerance on the same side, and their
median beyond the whole of it. The median of five is not moved by two outliers, and the half keeps a hiccup of three or
four windows from counting; noise that stays within the tolerance never counts. This is the runs rule of control charts
(Western Electric, Statistical Quality Control Handbook, 1956: several of the newest points beyond a warning limit) with
the median in the place of the mean, since step times have a long upper tail and no known variance. Its
numbers were set on series with a uniform noise of 10 % (tests/test_drift.py): none of 300 x 100 windows around a level
within 10 % of the prediction raises an alarm, and a lasting 1.3 x is found in 5 windows, 99 % of it in 10.

Waiting for data is no property of the nodes: where a step without its additional wait is inside the tolerance, the wait
is the cause.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

LASTING = 5
"""Windows in a row that make a drift."""
TOLERANCE = 0.20
"""Share by which the step time may differ from what is expected, where no interval is wider."""


@dataclass(frozen=True)
class Window:
    """Successive steps of a training."""

    ended: float
    """When, in seconds since 1970."""
    steps: int
    """How many steps it holds."""
    step_time_s: float
    """Their mean time, with the wait for data."""
    data_wait_s: float
    """Mean time a step waited for its batch."""

    @property
    def began(self) -> float:
        return self.ended - self.steps * self.step_time_s


@dataclass(frozen=True)
class Expected:
    """The step time that is expected, and how far from it is still as expected."""

    step_time_s: float
    low_s: float
    high_s: float
    data_wait_s: float = 0.0
    """The part of it that a step waits for its batch."""
    source: str = "was predicted"
    """Where it comes from, as `steps take 1.4 x what <source>`."""

    @classmethod
    def predicted(cls, step_time_s: float, low_s: float, high_s: float, data_wait_s: float = 0.0) -> Expected:
        """By a model with its interval, which is widened to the tolerance where it is narrower."""
        low_s, high_s = min(low_s, step_time_s / (1 + TOLERANCE)), max(high_s, step_time_s * (1 + TOLERANCE))
        return cls(step_time_s, low_s, high_s, data_wait_s)

    @classmethod
    def seen(cls, step_time_s: float, data_wait_s: float, source: str) -> Expected:
        """By what the training has shown itself."""
        return cls(step_time_s, step_time_s / (1 + TOLERANCE), step_time_s * (1 + TOLERANCE), data_wait_s, source)

    def holds(self, step_time_s: float) -> bool:
        return self.low_s <= step_time_s <= self.high_s

    def agrees(self, window: Window) -> bool:
        return self.holds(window.step_time_s)

    def settled(self, windows: Sequence[Window]) -> Expected:
        """What the first windows took in place of the prediction, once there are twice `LASTING` that agree with it,
        and both halves of them within half the tolerance: a drift that begins among them is not taken for usual.

        Steps that become faster than they were at first count from the prediction's lower end on: caches fill, and
        nothing follows from it.
        """
        first = windows[: 2 * LASTING]
        if len(first) < 2 * LASTING:
            return self
        first_s, halves_s = _median_step_s(first), (_median_step_s(first[:LASTING]), _median_step_s(first[LASTING:]))
        if not self.holds(first_s) or max(halves_s) > (1 + TOLERANCE / 2) * min(halves_s):
            return self
        wait_s = statistics.median(w.data_wait_s for w in first)
        own = Expected.seen(first_s, wait_s, "they took at first")
        return Expected(first_s, min(self.low_s, own.low_s), own.high_s, wait_s, own.source)


class Cause(str, Enum):
    """What the time went into."""

    DATA = "data"
    STEPS = "steps"
    NODE = "node"
    """One that computes longer than the others; see `slow_host`."""


@dataclass(frozen=True)
class Drift:
    """A lasting difference."""

    step_time_s: float
    """Median of the newest windows."""
    data_wait_s: float
    """Median of what a step of them waits for its batch."""
    expected: Expected
    since: float
    """Beginning of its first window, seconds since 1970."""
    from_the_start: bool
    """Whether no window was as expected."""
    cause: Cause

    @property
    def ratio(self) -> float:
        """Measured over expected."""
        return self.step_time_s / self.expected.step_time_s


def lasting_drift(windows: Sequence[Window], expected: Expected) -> Drift | None:
    """The drift that the newest windows show, if it is lasting; see the module's rule.

    Args:
        windows: Of one start of the training, oldest first, without the first steps of its processes.
        expected: What the windows are compared with.
    """
    if len(windows) < LASTING:
        return None
    newest = windows[-LASTING:]
    step_s = _median_step_s(newest)
    if expected.holds(step_s):
        return None
    slower = step_s > expected.step_time_s
    middle_s = (expected.step_time_s + (expected.high_s if slower else expected.low_s)) / 2

    def beyond(window: Window) -> bool:
        return window.step_time_s > middle_s if slower else window.step_time_s < middle_s

    first = len(windows)
    while first > 0 and beyond(windows[first - 1]):
        first -= 1
    if len(windows) - first < LASTING:
        return None
    wait_s = statistics.median(w.data_wait_s for w in newest)
    without_wait_s = step_s - max(0.0, wait_s - expected.data_wait_s)
    return Drift(
        step_time_s=step_s,
        data_wait_s=wait_s,
        expected=expected,
        since=windows[first].began,
        from_the_start=first == 0,
        cause=Cause.DATA if slower and without_wait_s <= expected.high_s else Cause.STEPS,
    )


def _median_step_s(windows: Sequence[Window]) -> float:
    return statistics.median(w.step_time_s for w in windows)
