"""The device of a rank, and the ranks of a job as a process group."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tula_hpc.config import Settings
from tula_hpc.errors import TulaError
from tula_hpc.ranks.launch import Rank, on_one_host
from tula_hpc.runs import AttemptFolder, read_json, write_json


def pick_device(use_gpu: bool, local_rank: int) -> torch.device:
    """The rank's GPU, or the CPU. Where the launcher shows each rank one GPU only, that one has index 0."""
    if not use_gpu:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise TulaError(
            f"cluster.gpus_per_node asks for GPUs and torch sees none on {socket.gethostname()}; check "
            "cluster.gpu_request, the driver, and that this torch is built for CUDA"
        )
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(
    me: Rank, attempt: AttemptFolder, device: torch.device, timeout_s: float, interface: str | None
) -> Iterator[None]:
    """The ranks of this launch joined over NCCL (GPU) or gloo (CPU); nothing to join for a single rank.

    Rank 0 listens on a free port of its choice and writes where into the attempt folder, so no port is agreed on
    beforehand and two jobs on one host cannot meet.

    Raises:
        TulaError: If the other ranks do not come within `timeout_s`.
    """
    if me.world_size == 1:
        yield
        return
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=timeout_s)
    store = _rendezvous(me, attempt, timeout)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=me.rank,
        world_size=me.world_size,
        timeout=timeout,
        **options,
    )
    yield
    # not after a failure: leaving a group waits for ranks that may be stuck in a collective
    dist.destroy_process_group()


def _rendezvous(me: Rank, attempt: AttemptFolder, timeout: timedelta) -> dist.TCPStore:
    path = attempt.rendezvous(me.launch)
    if me.is_first:
        store = dist.TCPStore("0.0.0.0", 0, me.world_size, True, timeout, wait_for_workers=False)  # noqa: S104
        host = "127.0.0.1" if on_one_host() else socket.gethostname()
        write_json(path, {"host": host, "port": store.port})
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while not path.exists():
        if time.monotonic() > deadline:
            raise TulaError(
                f"rank {me.rank} on {socket.gethostname()} waited {timeout.total_seconds():.0f} s for rank 0"
            )
        time.sleep(0.1)
        os.listdir(path.parent)  # makes a network file system look again
    address = read_json(path)
    return dist.TCPStore(address["host"], address["port"], me.world_size, False, timeout, wait_for_workers=False)


def replicate(model: torch.nn.Module, settings: Settings, device: torch.device) -> torch.nn.Module:
    """The model on its device and in its memory format, in DDP if there are other ranks."""
    model = model.to(device)
    if settings.training.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if not dist.is_initialized():
        return model
    ids = [device.index] if device.type == "cuda" else None
    find_unused = settings.workload.find_unused_parameters
    return DistributedDataParallel(
        model, device_ids=ids, gradient_as_bucket_view=True, find_unused_parameters=find_unused
    )


def inner_module(model: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DDP, or the module itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Element-wise sum over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def first_rank_says(yes: bool, device: torch.device) -> bool:
    """The first rank's answer, on every rank."""
    if not dist.is_initialized():
        return yes
    answer = torch.tensor([int(yes)], device=device)
    dist.broadcast(answer, src=0)
    return bool(answer)


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()
