"""What a rank does from start to end: who am I, is this attempt mine, do the work, say how it failed.

Started by Slurm through submitit, which calls `run_attempt`, or here as `python -m tula_hpc.ranks.job FOLDER`.
Importing this module does not load torch, because the controller names it when it submits.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tula_hpc.candidates import Candidate
from tula_hpc.config import from_plain
from tula_hpc.errors import RecordError, TulaError
from tula_hpc.ranks.signs import EarlyWarning, Heartbeat, TimeIsUp
from tula_hpc.runs import AttemptFolder, read_json, write_json
from tula_hpc.signatures import refuse_changed_code

if TYPE_CHECKING:
    from tula_hpc.ranks.launch import Rank

# How a lack of memory is reported by what does not raise torch's own error.
_DEVICE_MEMORY = re.compile(
    r"CUDA out of memory|STATUS_ALLOC_FAILED|CUDA error: out of memory|Cuda failure \d* ?'out of memory'|"
    r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|HIP out of memory"
)
# The last is what a data loader says of a worker that the kernel has killed.
_HOST_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|not enough memory|killed by signal: Killed")
LONGEST_MESSAGE = 2000
"""Characters of a rank's last words; some libraries print whole tensors."""
# The beginning of DDP's words on a second step after one that left a parameter out.
_UNUSED = "Expected to have finished reduction in the prior iteration"
# How a rank finds out that another one does not come to a collective, or is gone (gloo, NCCL, torch's store).
_WAITED = re.compile(
    r"timed out waiting|collective operation timeout|wait timeout|timed out after|socket timeout|application timeout",
    re.I,
)
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|peer has gone|socket closed|"
    r"failed to recv|no error message|NCCL (communicator was aborted|error)|DistNetworkError",
    re.I,
)


def run_attempt(folder: str) -> None:
    """Do what the attempt's request asks for, as one rank. Leaves the process on failure, so that no thread of a
    collective library can keep it."""
    warning = EarlyWarning()
    warning.listen()
    attempt = AttemptFolder(Path(folder))
    me: Rank | None = None

    def leave(error: BaseException) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # there are words to write
        try:
            write_json(attempt.rank_error(0 if me is None else me.rank), _last_words(error, me, warning))
        finally:  # also where the disk is full
            try:
                traceback.print_exception(error)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(1)

    try:
        request = read_json(attempt.request)
        sys.path.insert(0, request["working_dir"])
        from tula_hpc.ranks.launch import this_rank

        me = this_rank()
        if request["kind"] == "profile":
            warning.end_at_once(lambda: leave(TimeIsUp(str(warning))))
        if _is_mine(attempt, me):
            _work(attempt, request, me, warning)
    except BaseException as error:
        leave(error)


def _last_words(error: BaseException, me: Rank | None, warning: EarlyWarning) -> dict[str, Any]:
    """What a rank leaves behind for the controller to judge by."""
    rank, host = 0 if me is None else me.rank, socket.gethostname()
    kind = warning.kind() if isinstance(error, TimeIsUp) else classify(error)
    trace = "".join(traceback.format_exception(error))
    if _UNUSED in str(error):
        error = TulaError(
            f"the model has parameters that a step did not use ({_names_of_unused(str(error))}); freeze them, or set "
            "workload.find_unused_parameters=true"
        )
    in_words = isinstance(error, TulaError | TimeIsUp)
    message = str(error).strip() if in_words else f"{type(error).__name__}: {error}".strip()
    if kind != "error":  # what ran out and how much was wanted; the rest of torch's text is in the traceback
        message = ". ".join(message.split(". ")[:2]).splitlines()[0]
    elif not in_words:
        message += f" ({_place(error)})"
    message = message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} ..."
    return {
        "kind": kind,
        "message": message if isinstance(error, TimeIsUp) else f"rank {rank} on {host}: {message}",
        "rank": rank,
        "launch": None if me is None else me.launch,
        "host": host,
        "time": time.time(),
        "traceback": trace,
    }


def _names_of_unused(text: str) -> str:
    """Where torch tells them, or else how to have it do so."""
    told = re.search(r"Parameters which did not receive grad for rank \d+: ([^\n]*)", text)
    return told[1].strip() if told else "which: TORCH_DISTRIBUTED_DEBUG=DETAIL tells"


def _place(error: BaseException) -> str:
    """Where an error was raised: the innermost line of code that is not an installed package's, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f"{own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}" if own else "no line"


def _end_with_parent(parent: int) -> None:
    """Watch the process that started this rank (the controller, or `ranks.packed`), and end when it does, however it
    ended: nobody would look after the rank, and the next controller starts the attempt again."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)  # a session of its own: takes the loader workers along

    threading.Thread(target=watch, daemon=True).start()


def classify(error: BaseException) -> str:
    """`cuda_oom`, `host_oom`, `waited` or `lost` (for another rank), or `error`, by type and then by text."""
    text = str(error)
    if error.__cause__ is not None and "DataLoader worker" in text:  # which signal ended the worker stands there
        text += f"; {error.__cause__}"
    if type(error).__name__ == "OutOfMemoryError" or _DEVICE_MEMORY.search(text):
        return "cuda_oom"
    if isinstance(error, MemoryError) or _HOST_MEMORY.search(text):
        return "host_oom"
    if isinstance(error, TulaError):
        return "error"
    from_torch = type(error).__name__ in ("DistBackendError", "DistStoreError", "DistNetworkError", "RuntimeError")
    if from_torch and _WAITED.search(text):
        return "waited"
    if from_torch and _LOST.search(text):
        return "lost"
    return "error"


def _is_mine(attempt: AttemptFolder, me: Rank, patience_s: float = 120.0) -> bool:
    """Whether this job is the first to work on the attempt, and no later attempt was made; otherwise it leaves.

    A submission whose answer got lost may start long after the controller gave it up and submitted again. The same job
    may start again, if somebody requeued it: its newest launch is put down, so that what the earlier one left behind is
    not taken for this one's.
    """
    if attempt.has_successor():
        print(f"a later attempt than {attempt.path} was made; nothing to do here", flush=True)
        return False
    owner = attempt.claim / "owner.json"
    if me.is_first:
        _claim(attempt, me)
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
        return False
    if me.is_first:
        write_json(attempt.launch, {"launch": me.launch, "host": socket.gethostname(), "time": time.time()})
    return True


def _claim(attempt: AttemptFolder, me: Rank) -> None:
    """Make this job the attempt's owner if none is. The folder comes with what it holds: a job that is killed here
    leaves no claim, or its own."""
    mine = attempt.path / f".claim-{uuid.uuid4().hex}"
    mine.mkdir()
    write_json(mine / "owner.json", {"job": me.owner, "host": socket.gethostname(), "time": time.time()})
    try:
        mine.rename(attempt.claim)  # one that holds something is not replaced
    except OSError:
        shutil.rmtree(mine, ignore_errors=True)
        if not attempt.claim.exists():
            raise


def _work(attempt: AttemptFolder, request: dict[str, Any], me: Rank, warning: EarlyWarning) -> None:
    heartbeat = Heartbeat(attempt.heartbeat if me.is_first else None)
    heartbeat.now("starting")
    import torch

    from tula_hpc.ranks.distributed import pick_device, process_group
    from tula_hpc.ranks.profiling import profile
    from tula_hpc.ranks.training import set_precision, train

    refuse_changed_code(request.get("own_code", {}), attempt.path)
    settings = from_plain(request["settings"])
    candidate = Candidate.from_record(request)
    if me.world_size != candidate.world_size:
        raise TulaError(
            f"the job was started with {me.world_size} ranks and needs {candidate.world_size}; check that the site "
            f"gives {candidate.num_nodes} nodes with {candidate.gpus_per_node} tasks each (cluster.sbatch, "
            "cluster.srun_args)"
        )
    device = pick_device(settings.cluster.gpus_per_node > 0, me.local_rank)
    torch.set_num_threads(settings.cluster.cpus_per_rank)  # else all of the host's, unless the site binds tasks
    set_precision(settings.training.precision)
    hyper = settings.training
    with process_group(me, attempt, device, hyper.collective_timeout_s, settings.cluster.network_interface):
        if request["kind"] == "profile":
            profile(settings, candidate, me, attempt, device, request["ranks_on_host"], heartbeat)
        else:
            warning.time_limit_min = request["time_limit_min"]
            warning.leave = attempt.leave
            train(settings, candidate, me, attempt.run, device, warning, heartbeat)


if __name__ == "__main__":
    if "TULA_CONTROLLER" in os.environ:
        _end_with_parent(int(os.environ["TULA_CONTROLLER"]))
    run_attempt(sys.argv[1])
