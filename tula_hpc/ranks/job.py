"""What a rank does from start to end: who am I, is this attempt mine, do the work, say how it failed.

Started by Slurm through submitit, which calls `run_attempt`, or here as `python -m tula_hpc.ranks.job FOLDER`.
Importing this module does not load torch, because the controller names it when it submits.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from tula_hpc.candidates import Candidate
from tula_hpc.config import from_plain
from tula_hpc.errors import RecordError, TulaError
from tula_hpc.runs import AttemptFolder, read_json, write_json

if TYPE_CHECKING:
    from tula_hpc.ranks.distributed import Rank

# How a lack of memory is reported by what does not raise torch's own error.
_DEVICE_MEMORY = (
    "CUDA out of memory",
    "STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Cuda failure 2 'out of memory'",
)
_HOST_MEMORY = ("can't allocate memory", "Cannot allocate memory", "not enough memory")


def run_attempt(folder: str) -> None:
    """Do what the attempt's request asks for, as one rank. Leaves the process on failure, so that no thread of a
    collective library can keep it."""
    attempt = AttemptFolder(Path(folder))
    rank = 0
    try:
        request = read_json(attempt.request)
        sys.path.insert(0, request["working_dir"])
        from tula_hpc.ranks.distributed import this_rank

        me = this_rank()
        rank = me.rank
        if _is_mine(attempt, me):
            _work(attempt, request, me)
    except BaseException as error:
        traceback.print_exc()
        kind = classify(error)
        message = f"{type(error).__name__}: {error}" if not isinstance(error, TulaError) else str(error)
        write_json(
            attempt.rank_error(rank),
            {
                "kind": kind,
                # what ran out and how much was wanted; the rest of torch's text is in the traceback
                "message": ". ".join(message.strip().split(". ")[:2]) if kind != "error" else message.strip(),
                "rank": rank,
                "host": socket.gethostname(),
                "time": time.time(),
                "traceback": traceback.format_exc(),
            },
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end_with_parent(parent: int) -> None:
    """Watch the controller that started this local rank, and end when it does, however it ended: nobody would look
    after the rank, and the next controller starts the attempt again."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)  # a session of its own: takes the loader workers along

    threading.Thread(target=watch, daemon=True).start()


def classify(error: BaseException) -> str:
    """`cuda_oom`, `host_oom`, `timeout` or `error`, by type and then by text."""
    text = str(error)
    if type(error).__name__ == "TimeIsUp":
        return "timeout"
    if type(error).__name__ == "OutOfMemoryError" or any(sign in text for sign in _DEVICE_MEMORY):
        return "cuda_oom"
    if isinstance(error, MemoryError) or any(sign in text for sign in _HOST_MEMORY):
        return "host_oom"
    return "error"


def _is_mine(attempt: AttemptFolder, me: Rank, patience_s: float = 120.0) -> bool:
    """Whether this job is the first to work on the attempt, and no later attempt was made; otherwise it leaves.

    A submission whose answer got lost may start long after the controller gave it up and submitted again.
    """
    if attempt.has_successor():
        print(f"a later attempt than {attempt.path} was made; nothing to do here", flush=True)
        return False
    owner = attempt.claim / "owner.json"
    if me.is_first:
        try:
            attempt.claim.mkdir()
            write_json(owner, {"job": me.owner, "host": socket.gethostname(), "time": time.time()})
        except FileExistsError:
            pass
    deadline = time.monotonic() + patience_s
    while True:
        try:
            claimed_by = read_json(owner)["job"]
            break
        except RecordError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    if claimed_by != me.owner:
        print(f"job {claimed_by} already works on {attempt.path}; nothing to do here", flush=True)
    return claimed_by == me.owner


def _work(attempt: AttemptFolder, request: dict, me: Rank) -> None:
    import torch

    from tula_hpc.ranks.distributed import pick_device, process_group
    from tula_hpc.ranks.profiling import profile
    from tula_hpc.ranks.training import set_precision, train

    # The scheduler's early warning: training saves and ends, profiling is too short to have anything to save. SIGTERM
    # ends the process at once, also where a launcher has set it to be passed over.
    time_is_up = threading.Event()
    signal.signal(signal.SIGUSR2, lambda *_: time_is_up.set())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    settings = from_plain(request["settings"])
    candidate = Candidate(request["num_nodes"], request["batch_per_rank"], request["gpus_per_node"])
    if me.world_size != candidate.world_size:
        raise TulaError(
            f"the job was started with {me.world_size} ranks and needs {candidate.world_size}; check that the site "
            f"gives {candidate.num_nodes} nodes with {candidate.gpus_per_node} tasks each (cluster.sbatch, "
            "cluster.srun_args)"
        )
    device = pick_device(settings.cluster.gpus_per_node > 0, me.local_rank)
    if device.type == "cpu":
        torch.set_num_threads(settings.cluster.cpus_per_rank)
    set_precision(settings.training.precision)
    hyper = settings.training
    with process_group(me, attempt, device, hyper.collective_timeout_s, settings.cluster.network_interface):
        if request["kind"] == "profile":
            profile(settings, candidate, me, attempt, device, request["ranks_on_host"])
        else:
            train(settings, candidate, me, attempt.run, device, time_is_up)


if __name__ == "__main__":
    if "TULA_CONTROLLER" in os.environ:
        _end_with_parent(int(os.environ["TULA_CONTROLLER"]))
    run_attempt(sys.argv[1])
