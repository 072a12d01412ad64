"""Clocks that never make the host wait for its device, and a rank's own time in forward passes.

With synchronous data parallelism all ranks' steps last as long as the slowest one's. A forward pass waits for no other
rank, so its time tells whose computation is slow. It is taken inside DDP, which may broadcast buffers before it.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from tula_hpc.ranks.launch import Rank, this_host
from tula_hpc.ranks.pace import FIRST_KEPT, KEPT
from tula_hpc.runs import write_json


class Clock:
    """Points in time on the device's own timeline: events on a GPU, read after the work; the host's clock on a CPU.

    Events do not stop the GPU, so a step is timed as it runs in training, with the host ahead of the device.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"

    def now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_come(self, point: Any) -> bool:
        """Whether the device has got to a point; asked without waiting."""
        return bool(point.query()) if self._on_gpu else True

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one point to another; on a GPU only of points that have come."""
        return max(0.0, start.elapsed_time(end) / 1000 if self._on_gpu else end - start)

    def finish(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


class ForwardTimes:
    """The mean time of this rank's forward passes in training, in windows, each left in a small file when it closes.

    A pass is read when the device has done it, by a later pass or at the end of a window; one that is still under way
    then is part of the next window.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, path: Path, me: Rank, skipped_passes: int):
        """
        Args:
            module: Watched from now on; inside DDP where there is one.
            device: Of the module.
            path: Where the windows go.
            me: Whose they are.
            skipped_passes: First passes of the process, which say nothing about the others.
        """
        self._clock = Clock(device)
        self._path = path
        self._about = {"rank": me.rank, "launch": me.launch, "host": this_host()}
        self._skip = skipped_passes
        self._began: Any = None
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._seconds, self._passes = 0.0, 0
        self.windows: list[list[float]] = []
        """[when it ended, in seconds since 1970; mean time of a pass in s], oldest first."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, module: torch.nn.Module, arguments: Any) -> None:
        self._began = self._clock.now() if module.training else None

    def _end(self, module: torch.nn.Module, arguments: Any, outputs: Any) -> None:
        if self._began is None:
            return
        if self._skip > 0:
            self._skip -= 1
        else:
            self._under_way.append((self._began, self._clock.now()))
        self._began = None
        self._read()

    def _read(self) -> None:
        """Take in what the device has done."""
        while self._under_way and self._clock.has_come(self._under_way[0][1]):
            self._seconds += self._clock.seconds(*self._under_way.popleft())
            self._passes += 1

    def close_window(self) -> None:
        """A window of the training's steps has ended."""
        self._read()
        if self._passes == 0:
            return
        self.windows.append([round(time.time(), 2), round(self._seconds / self._passes, 7)])
        if len(self.windows) > KEPT:
            del self.windows[FIRST_KEPT]
        self._seconds, self._passes = 0.0, 0
        write_json(self._path, {**self._about, "windows": self.windows})
