"""Two processes for tests of what ranks do together."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import queue
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Run = Callable[..., list[Any]]


@contextmanager
def two_processes(folder: Path) -> Iterator[Run]:
    """Gives a function that calls `task(rank, *arguments)` in both processes, joined over gloo anew each time, and
    returns what the two calls return. A rank that raises, or a hang, fails the test."""
    context = multiprocessing.get_context("spawn")
    inboxes, answers = [context.Queue(), context.Queue()], context.Queue()
    processes = [context.Process(target=_serve, args=(r, inboxes[r], answers), daemon=True) for r in range(2)]
    for process in processes:
        process.start()
    calls = 0

    def run(task: Callable[..., Any], *arguments: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        for inbox in inboxes:
            inbox.put((task, arguments, str(folder / f"rendezvous-{calls}")))
        found: dict[int, Any] = {}
        while len(found) < 2:
            try:
                rank, result, error = answers.get(timeout=900)
            except queue.Empty:
                raise AssertionError(f"no answer from ranks {sorted({0, 1} - set(found))}") from None
            assert error is None, f"rank {rank}: {error}"
            found[rank] = result
        return [found[0], found[1]]

    try:
        yield run
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _serve(rank: int, inbox: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    while True:
        task, arguments, rendezvous = inbox.get()
        result = error = None
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=300),
        )
        try:
            result = task(rank, *arguments)
        except Exception:
            error = traceback.format_exc()
        gc.collect()  # what still holds the group keeps its connections open, and the other rank waiting
        dist.destroy_process_group()
        answers.put((rank, result, error))
