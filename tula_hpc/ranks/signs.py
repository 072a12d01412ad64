"""Signs between a job and those who watch over it: the early warning that its end is near, and its heartbeat."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tula_hpc.runs import write_json

BEAT_EVERY_S = 10.0


def warning_before_end_s(time_limit_min: float | None) -> int:
    """How long before the end of its time a job is warned, so that a training can save: two minutes, or a quarter of a
    short limit. Slurm may warn up to a minute earlier than that."""
    return 120 if time_limit_min is None else round(min(120.0, 60 * time_limit_min / 4))


class TimeIsUp(Exception):
    """The job will be ended soon; a training has written a checkpoint."""


class EarlyWarning:
    """Whether the job was told that it will be ended: by SIGUSR2, which we ask Slurm for, or by SIGTERM; or that it is
    to end, by a file that the controller writes.

    The handler only takes note. Saving happens between two steps, where nothing is half done.
    """

    def __init__(self, time_limit_min: float | None = None):
        self.time_limit_min = time_limit_min
        self.leave: Path | None = None
        """The file of the controller."""
        self._asked = False
        self._began = time.monotonic()
        self._received: tuple[int, float] | None = None

    def listen(self) -> None:
        """From now on take note of signals instead of ending."""
        signal.signal(signal.SIGUSR2, self._take_note)
        signal.signal(signal.SIGTERM, self._take_note)

    def end_at_once(self, leave: Callable[[], NoReturn]) -> None:
        """There is nothing to save: SIGTERM ends the process where it is, the early warning is passed over.

        Args:
            leave: Leaves a word and ends the process. No exception instead: it may come where Python drops it.
        """

        def on_end(number: int, frame: FrameType | None) -> None:
            self.receive(number)
            leave()

        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, on_end)
        if self._received is not None and self._received[0] == signal.SIGTERM:
            leave()

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        self.receive(number)

    def receive(self, number: int) -> None:
        if self._received is None:
            self._received = number, time.monotonic() - self._began

    def look(self) -> None:
        """Take note of the controller's file; asks a shared file system, so not for every step."""
        self._asked = self._asked or (self.leave is not None and self.leave.exists())

    def is_set(self) -> bool:
        return self._asked or self._received is not None

    def kind(self) -> str:
        """Why the job is ended, as far as its clock and the signal tell: `timeout` near the end of its time limit, else
        `preempted`, or `terminated` by SIGTERM, which is also how a user's cancellation begins; `replanned` where only
        the controller has asked for it."""
        if self._received is None:
            return "replanned"
        number, after_s = self._received
        if self.time_limit_min is not None:
            left_s = 60 * self.time_limit_min - after_s
            if left_s < warning_before_end_s(self.time_limit_min) + 75:  # a minute early, and our own start-up
                return "timeout"
        return "terminated" if number == signal.SIGTERM else "preempted"

    def __str__(self) -> str:
        if self._received is None:
            return "the controller asked for it"
        number, after_s = self._received
        limit = "" if self.time_limit_min is None else f" of {60 * self.time_limit_min:.0f} s"
        return f"{signal.Signals(number).name} came {after_s:.0f} s after the start{limit}"


class Heartbeat:
    """A small file that changes as long as the work goes on. Beaten by the work itself and not by a thread beside it,
    which would go on while the work hangs."""

    def __init__(self, path: Path | None):
        """`path` None: somebody else's heart beats."""
        self._path = path
        self._beats = 0
        self._last = -BEAT_EVERY_S

    def now(self, doing: str) -> None:
        """Beat, and say what is going on."""
        self._last = time.monotonic()
        self._beats += 1
        if self._path is not None:
            write_json(self._path, {"beat": self._beats, "doing": doing, "time": time.time()})

    def beat(self, doing: str) -> None:
        """Beat, unless it was done within the last seconds; cheap enough for every step."""
        if time.monotonic() - self._last > BEAT_EVERY_S:
            self.now(doing)
