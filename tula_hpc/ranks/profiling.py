"""Time a few training steps of one candidate and see how much memory they take: one timing file a rank."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, Subset

from tula_hpc.candidates import Candidate
from tula_hpc.config import DataKind, Settings
from tula_hpc.errors import TulaError
from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.optim.post_local_sgd import PostLocalSGD
from tula_hpc.optim.reference import batch_size
from tula_hpc.ranks import checkpoints
from tula_hpc.ranks.batches import forward, num_bytes, to_device
from tula_hpc.ranks.clock import Clock
from tula_hpc.ranks.device_memory import MemoryMeter, allocated_bytes
from tula_hpc.ranks.distributed import inner_module, replicate, sum_over_ranks, wait_for_all
from tula_hpc.ranks.launch import Rank
from tula_hpc.ranks.loading import Loader
from tula_hpc.ranks.optimizers import build_averaging, build_optimizer
from tula_hpc.ranks.signs import Heartbeat
from tula_hpc.ranks.timings import write_rank
from tula_hpc.ranks.training import autocast, evaluate
from tula_hpc.ranks.workloads import build_dataset, build_loss, build_model
from tula_hpc.runs import AttemptFolder, software_versions

FEWEST_STEPS = 3


@dataclass
class LastBucket:
    """With a DDP hook that averages gradients as DDP does by itself and notes when the last bucket was ready.

    From then to the end of backward nothing is computed: that is the exposed part of the synchronisation.
    """

    clock: Clock
    ready: Any = None

    # DDP compares annotations with its own classes and refuses ours, which are strings here
    def average(self, group, bucket):  # type: ignore[no-untyped-def]
        self.ready = self.clock.now()
        return allreduce_hook(group, bucket)


@dataclass
class Bench:
    """One candidate, built as training would build it, and how to take a step."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[[Any, Any], torch.Tensor]
    batches: Iterator[Any]
    batch_per_rank: int
    device: torch.device
    clock: Clock
    precision: Any
    last_bucket: LastBucket
    averaging: PostLocalSGD | None

    def next_batch(self) -> tuple[Any, Any]:
        batch = next(self.batches)
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            what = f"a {type(batch).__name__}"
            what += f" of {len(batch)}" if isinstance(batch, (list, tuple)) else ""
            what += f" with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
            raise TulaError(
                f"workload.dataset gave {what} for a sample, or its collate_fn for a batch; give a pair (input, "
                "target), of which each may be a tensor, or tensors in a tuple or dict"
            )
        inputs, targets = batch
        if batch_size(inputs) != self.batch_per_rank:
            raise TulaError(
                f"the loader gave a batch of {batch_size(inputs)}, not {self.batch_per_rank}; check workload.dataset"
            )
        return to_device(inputs, self.device), to_device(targets, self.device)

    def step(self) -> tuple[Any, ...]:
        """One training step; returns the six points in time that part it."""
        start = self.clock.now()
        inputs, targets = self.next_batch()
        loaded = self.clock.now()
        with autocast(self.precision, self.device):
            loss = forward(self.model, self.loss_fn, inputs, targets)[1]
        lost = self.clock.now()
        self.last_bucket.ready = None
        loss.backward()
        synced = self.clock.now()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return start, loaded, lost, self.last_bucket.ready or synced, synced, self.clock.now()

    def compute_step(self) -> tuple[Any, Any]:
        """A step without gradient synchronisation; replicas drift apart, so these come last."""
        unsynced = self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else contextlib.nullcontext()
        with unsynced:
            points = self.step()
        return points[0], points[-1]


def profile(
    settings: Settings,
    candidate: Candidate,
    me: Rank,
    attempt: AttemptFolder,
    device: torch.device,
    ranks_on_host: int,
    heartbeat: Heartbeat,
) -> None:
    """Measure `candidate` on this rank and write its timing file.

    Raises:
        torch.OutOfMemoryError: If it does not fit.
        TulaError: If the data set does not give the batches it should.
    """
    clock = Clock(device)
    heartbeat.now("loading data and building the model")
    dataset, test_set = build_dataset(settings, train=True), build_dataset(settings, train=False)
    last_step_s = 0.0  # of the warm-up: tells how many steps can be afforded
    meter = MemoryMeter(device, ranks_on_host)
    bench = _build(settings, candidate, me, dataset, device, clock)
    search = settings.search

    for _ in range(search.warmup_steps):
        began = time.perf_counter()
        bench.step()
        clock.finish()
        last_step_s = time.perf_counter() - began
        heartbeat.beat("warming up")
    timed_steps, compute_steps = _affordable_steps(settings, last_step_s, device)
    activation_bytes = _step_at_the_end_of_an_epoch(settings, bench, me, test_set)

    heartbeat.now("timing steps")  # not in between: a file written to a shared file system would be in the times
    points = [bench.step() for _ in range(timed_steps)]
    heartbeat.now("timing steps without synchronisation")
    compute_points = [bench.compute_step() for _ in range(compute_steps + 1)][1:]
    clock.finish()
    gradient_bytes = sum(p.numel() * p.element_size() for p in bench.model.parameters() if p.requires_grad)
    allreduce_s = _allreduce_seconds(gradient_bytes, device, clock)

    rows = [
        [float(i), *(clock.seconds(a, b) for a, b in itertools.pairwise(p)), clock.seconds(p[0], p[-1])]
        for i, p in enumerate(points)
    ]
    batch_bytes = num_bytes(bench.next_batch())
    meta = {
        "candidate": candidate.name,
        "num_nodes": candidate.num_nodes,
        "gpus_per_node": candidate.gpus_per_node,
        "batch_per_rank": candidate.batch_per_rank,
        "world_size": me.world_size,
        "launch": me.launch,
        "host": socket.gethostname(),
        "device": device_name(device),
        "versions": {**software_versions(), "cuda": torch.version.cuda, "nccl": _nccl_version(device)},
        "warmup_steps_dropped": search.warmup_steps,
        "compute_step_s": statistics.median(clock.seconds(a, b) for a, b in compute_points),
        "compute_steps": len(compute_points),
        "allreduce_s": allreduce_s,
        "gradient_bytes": gradient_bytes,
        "memory": meter.record(bench.model, bench.optimizer, batch_bytes, activation_bytes),
    }
    wait_for_all()
    write_rank(attempt, me.rank, rows, meta)


def _build(
    settings: Settings, candidate: Candidate, me: Rank, dataset: Any, device: torch.device, clock: Clock
) -> Bench:
    model = replicate(build_model(settings), settings, device)
    last_bucket = LastBucket(clock)
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, last_bucket.average)
    sampler: Any = DistributedSampler(dataset, me.world_size, me.rank, seed=settings.training.seed)
    loader = Loader(dataset, candidate.batch_per_rank, settings, device, sampler=sampler, drop_last=True)
    optimizer = build_optimizer(settings, model, candidate.global_batch)
    averaging = build_averaging(settings, model, optimizer, len(loader))
    batches: Iterator[Any] = itertools.chain.from_iterable(itertools.repeat(loader))
    if settings.data.kind is DataKind.synthetic:  # what loading random numbers takes says nothing of the real data
        batches = itertools.repeat(tuple(to_device(part, device) for part in next(batches)))
    loss_fn = build_loss(settings, device)
    precision = settings.training.precision
    return Bench(
        model.train(),
        optimizer,
        loss_fn,
        batches,
        candidate.batch_per_rank,
        device,
        clock,
        precision,
        last_bucket,
        averaging,
    )


def _affordable_steps(settings: Settings, step_s: float, device: torch.device) -> tuple[int, int]:
    """Timed and compute-only steps; the same on all ranks, since each step waits for every rank."""
    slowest = torch.tensor([step_s], device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    search = settings.search
    affordable = search.max_seconds / max(float(slowest), 1e-9)
    wanted = search.timed_steps + search.compute_steps
    share = min(1.0, affordable / wanted)
    timed = min(search.timed_steps, max(FEWEST_STEPS, int(search.timed_steps * share)))
    return timed, min(search.compute_steps, max(FEWEST_STEPS, int(search.compute_steps * share)))


def _step_at_the_end_of_an_epoch(settings: Settings, bench: Bench, me: Rank, test_set: Any) -> int:
    """A step with all that training does at the end of an epoch: AGS measures its scales, replicas are averaged, a
    batch is evaluated, and a checkpoint is written, here to nowhere. Their memory is then part of the peak, and the
    timed steps scale their gradients as most of training does.

    Returns:
        Bytes that forward leaves on a GPU for backward.
    """
    inputs, targets = bench.next_batch()
    before = allocated_bytes(bench.device)
    with autocast(bench.precision, bench.device):
        loss = forward(bench.model, bench.loss_fn, inputs, targets)[1]
    activation_bytes = allocated_bytes(bench.device) - before
    loss.backward()
    if isinstance(bench.optimizer, TulaOptimizer):
        with autocast(bench.precision, bench.device):
            bench.optimizer.refresh(bench.model, bench.loss_fn, inputs, targets)
    bench.optimizer.step()
    bench.optimizer.zero_grad(set_to_none=True)
    if bench.averaging is not None:
        bench.averaging.average()
    eval_batch = settings.training.eval_batch_per_rank or bench.batch_per_rank
    one_batch_each: Any = Subset(test_set, range(min(len(test_set), eval_batch * me.world_size)))
    evaluate(settings, bench.model, bench.loss_fn, one_batch_each, eval_batch, me, bench.device)
    bench.model.train()
    if me.is_first:
        state = [inner_module(bench.model).state_dict(), bench.optimizer.state_dict()]
        checkpoints.refuse_unreadable(state)
        with open(os.devnull, "wb") as nowhere:
            torch.save(state, nowhere)
    return activation_bytes


def _allreduce_seconds(gradient_bytes: int, device: torch.device, clock: Clock) -> float:
    """Median time of summing a tensor as large as the gradients over all ranks, with nothing else going on."""
    if not dist.is_initialized():
        return 0.0
    values = torch.zeros(max(1, gradient_bytes // 4), device=device)
    points = []
    for _ in range(4):
        wait_for_all()
        start = clock.now()
        sum_over_ranks(values)
        points.append((start, clock.now()))
    clock.finish()
    return statistics.median(clock.seconds(a, b) for a, b in points[1:])


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            named = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except FileNotFoundError:
        named = []
    return named[0] if named else platform.processor() or "CPU"


def _nccl_version(device: torch.device) -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
