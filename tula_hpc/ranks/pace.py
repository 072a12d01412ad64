"""How long the steps of a training take, in windows, by the clock of the host alone.

A device runs behind its host, so the time of one step means nothing here; that of many does, because the host can only
be a few steps ahead. Nothing waits for the device but once an epoch, at its last full batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

LEAST_STEPS = 10
"""Of a window: a queue of a few steps is then a small part of it."""
SHORTEST_S = 1.0
LONGEST_S = 600.0
"""A window of at least ten steps ends after this time, however long the training is."""
SHARE = 0.01
"""Of the training's steps that make a window: what is lasting depends on how much is left."""
FIRST_KEPT, KEPT = 10, 100
"""The windows that are kept: the first, which tell how the training began, and the newest, as many in all."""


class Pace:
    """The windows of one start of the training.

    Evaluation, checkpoints, the measurement of gradient scales and a last batch that is not full are not in them: the
    clock stops for them.
    """

    def __init__(self, total_steps: int, skipped_steps: int, on_window: Callable[[], None] = lambda: None):
        """
        Args:
            total_steps: Of the whole training at this batch.
            skipped_steps: First steps of the process, which say nothing about the others.
            on_window: Called when a window has ended.
        """
        self._window_steps = max(LEAST_STEPS, math.ceil(SHARE * total_steps))
        self._skip = skipped_steps
        self._on_window = on_window
        self._since: float | None = None
        self._steps = 0
        self._seconds = self._waited_s = 0.0
        self.windows: list[list[float]] = []
        """[when it ended, in seconds since 1970; steps; mean step time in s; mean wait for data in s], oldest first."""

    def begin(self) -> None:
        """Steps come from now on."""
        self._since = time.monotonic()

    def step(self, waited_s: float) -> None:
        """A step has ended, which waited `waited_s` for its batch."""
        if self._since is None:
            return
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        if self._skip > 0:
            self._skip -= 1
            return
        self._seconds += seconds
        self._waited_s += waited_s
        self._steps += 1
        long_enough = self._steps >= LEAST_STEPS and self._seconds >= SHORTEST_S
        if long_enough and (self._steps >= self._window_steps or self._seconds >= LONGEST_S):
            self._close()

    def leave_out(self) -> None:
        """What came since the last step is not part of any."""
        if self._since is not None:
            self._since = time.monotonic()

    def stop(self) -> None:
        """The device has done what it was given, and what comes now until `begin` is not part of any step."""
        if self._since is not None and self._skip == 0:
            self._seconds += time.monotonic() - self._since
        self._since = None

    def _close(self) -> None:
        means = [round(self._seconds / self._steps, 7), round(self._waited_s / self._steps, 7)]
        self.windows.append([round(time.time(), 2), self._steps, *means])
        if len(self.windows) > KEPT:
            del self.windows[FIRST_KEPT]
        self._steps = 0
        self._seconds = self._waited_s = 0.0
        self._on_window()
