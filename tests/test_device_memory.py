"""The parts of a rank's memory are what its tensors take, and the rest is told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.ranks.device_memory import GIB, MemoryMeter, others_bytes

CPU = torch.device("cpu")
WEIGHTS = 1000 * 2000
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
HOLD = """
import sys, torch
held = torch.zeros({bytes}, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def record(device: torch.device, model: torch.nn.Module, granularity: str = "element", batch: int = 64) -> dict:
    """What a meter says after two steps and a refresh."""
    meter = MemoryMeter(device, 1)
    model = model.to(device)
    sgd = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    optimizer = TulaOptimizer(sgd, global_batch=batch, small_batch=8, granularity=granularity)
    inputs, targets = torch.randn(batch, 1000, device=device), torch.randint(2000, (batch,), device=device)
    loss_fn = torch.nn.CrossEntropyLoss()
    for _ in range(2):
        loss_fn(model(inputs), targets).backward()
        optimizer.refresh(model, loss_fn, inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
    return meter.record(model, optimizer, inputs.numel() * 4, 0)


def test_what_is_counted_is_counted_exactly():
    """Parameters, gradients, momentum and element-wise scales are each a copy of the model; the parts add up."""
    found = record(CPU, torch.nn.Linear(1000, 2000, bias=False))
    parts = found["parts"]
    for name in ("param_gib", "grad_gib", "optimizer_gib", "ags_gib"):
        assert parts[name] == pytest.approx(4 * WEIGHTS / GIB, rel=1e-4)
    assert parts["batch_gib"] == pytest.approx(4 * 64 * 1000 / GIB)
    assert sum(parts.values()) == pytest.approx(found["memory_gib"])
    assert found["memory_gib"] < found["limit_gib"]


@pytest.mark.parametrize("view", [True, False])
def test_buckets_are_a_second_copy_of_the_gradients_unless_they_are_views(tmp_path: Path, view: bool):
    """DDP keeps its own buckets beside the gradients where these are not views of them."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(1000, 2000, bias=False), gradient_as_bucket_view=view)
        parts = record(CPU, model, "tensor")["parts"]
    finally:
        dist.destroy_process_group()
    assert parts["bucket_gib"] == (0 if view else parts["grad_gib"])


@needs_a_gpu
def test_the_parts_of_a_gpu_add_up():
    """What the allocator has and has not in tensors, and what lies outside it, are all of the peak."""
    found = record(torch.device("cuda", 0), torch.nn.Linear(1000, 2000, bias=False))
    parts = found["parts"]
    assert sum(parts.values()) == pytest.approx(found["memory_gib"], abs=0.01)
    assert parts["reserve_gib"] == pytest.approx(found["reserved_gib"] - found["allocated_gib"])
    assert parts["outside_gib"] > 0.1


@needs_a_gpu
def test_what_other_processes_hold_is_not_ours():
    """Memory that another process holds lowers the limit, and is not taken for this rank's."""
    device = torch.device("cuda", 0)
    alone = record(device, torch.nn.Linear(1000, 2000, bias=False))
    code = HOLD.format(bytes=4 * GIB)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert b"held" in other.stdout.readline()
        held, beside = others_bytes(device), record(device, torch.nn.Linear(1000, 2000, bias=False))
        other.stdin.close()
    if held == 0:
        pytest.skip(f"NVML does not know this process as {os.getpid()}")
    assert held > 4 * GIB
    assert beside["limit_gib"] < alone["limit_gib"] - 4
    assert beside["memory_gib"] == pytest.approx(alone["memory_gib"], abs=0.2)
