"""How batches come to a rank: from processes of their own, which leave it to the rank to hear what ends the job.

Slurm may send SIGTERM to every process of a preempted or cancelled job; with cgroups only if SignalChildrenProcesses is
set. The rank takes note and saves between two steps, where the end of a loader process would reach it as an exception,
even in the midst of the saving.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import signal
import sys
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from tula_hpc.config import Settings

TOLD = (signal.SIGUSR2, signal.SIGTERM)


class Loader(DataLoader[Any]):
    """A DataLoader with as many processes as the settings say; `options` are further ones of its own."""

    def __init__(self, dataset: Any, batch_per_rank: int, settings: Settings, device: torch.device, **options: Any):
        workers = settings.data.loader_workers
        chosen = multiprocessing.get_start_method(allow_none=True)  # by the user's code
        super().__init__(
            dataset,
            batch_per_rank,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            # where Python's own choice is another, each process would import torch anew
            multiprocessing_context="fork" if workers and chosen is None and sys.platform == "linux" else None,
            worker_init_fn=_leave_signals_to_the_rank,
            **options,
        )

    def __iter__(self) -> Any:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, TOLD)  # the processes begin with it, and have no handlers yet
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _leave_signals_to_the_rank(worker: int) -> None:
    """In a loader process. A handler and nothing that programs started from here would inherit."""
    for number in TOLD:
        signal.signal(number, _pass_over)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TOLD)


def _pass_over(number: int, frame: FrameType | None) -> None:
    pass


@atexit.register  # later than multiprocessing's own, and so done before it, which sends SIGTERM and waits
def _end_left_processes() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
