"""What only a GPU can show. Skipped where there is none; run by hand on one: python -m pytest tests/test_gpu.py."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tula_hpc.config import Settings
from tula_hpc.control.controller import Controller
from tula_hpc.control.jobs import TRAIN
from tula_hpc.control.local import LocalScheduler
from tula_hpc.control.verdicts import Verdict
from tula_hpc.display import Display
from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.optim.bounded import BoundedOptimizer
from tula_hpc.ranks.clock import ForwardTimes
from tula_hpc.ranks.launch import Rank
from tula_hpc.runs import RunFolder, read_json

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
FRACTION = "TULA_TEST_MEMORY_FRACTION"


class SlowToBegin(torch.nn.Module):
    """Waits in each step, so that the largest batch is the fastest on any GPU."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return images


def model_on_part_of_the_gpu() -> torch.nn.Module:
    """A ResNet18 in a process that may use only the share of the GPU that the environment names."""
    from torchvision.models import resnet18

    torch.cuda.set_per_process_memory_fraction(float(os.environ.get(FRACTION, "1")))
    return torch.nn.Sequential(SlowToBegin(), resnet18(num_classes=10))


def test_cuda_oom_in_training_goes_on_with_the_next_smaller_batch(
    tiny_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A training that runs out of GPU memory is classified, relaunched with half the batch, and ends."""
    # ranks import this file by its name
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    settings = tiny_settings(
        "cluster.gpus_per_node=1",
        "data=synthetic",
        "workload.input_shape=[3,224,224]",
        "grid.max_nodes=1",
        "grid.min_batch_per_rank=32",
        "grid.max_batch_per_rank=128",
        "objective=time",
        "objective.tie_tolerance=0",
    )
    settings.workload.model = {"_target_": f"{__name__}.model_on_part_of_the_gpu"}
    run = RunFolder(tmp_path / "run")
    controller = Controller(settings, run, LocalScheduler(settings), Display(Console(file=io.StringIO())), [])
    controller.write_down_the_run()
    controller._fit(controller._profile())
    controller._choose()
    chosen = read_json(run.selection)["batch_per_rank"]
    half = read_json(run.attempt(f"profile/n001-b{chosen // 2:05d}", 1).rank_json(0))["memory"]
    total_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    monkeypatch.setenv(FRACTION, str(1.15 * half["reserved_gib"] / total_gib))
    controller._train()
    attempts = controller.journal.state().of(TRAIN)
    assert [a.verdict for a in attempts] == [Verdict.cuda_oom, Verdict.success]
    assert "out of memory" in attempts[0].reason
    assert read_json(run.train_result)["batch_per_rank"] == chosen // 2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_forward_times_do_not_wait_for_the_gpu(tmp_path: Path):
    """Passes are timed by events that are read when they have come: the host goes on, and in the end all are there."""
    device = torch.device("cuda")
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(20))).to(device)
    path = tmp_path / "rank-0000.json"
    own = ForwardTimes(model, device, path, Rank(0, 2, 0, "launch", "job"), skipped_passes=2)
    inputs = torch.randn(4096, 2048, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(12):
            model(inputs).sum().backward()
            if number == 5:
                own.close_window()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    own.close_window()
    assert not own._under_way
    assert all(seconds > 0 for _, seconds in read_json(path)["windows"])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", [{}, {"gate": "lagged", "delta_smoothing": 0.9}, {"gate": "off"}])
@pytest.mark.parametrize("granularity", ["element", "channel", "tensor", "global"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_does_not_wait_for_the_gpu(granularity: str, options: dict[str, Any], fused: bool):
    """step() never makes the host wait for the device, scaled or not."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10)
    )
    model = model.cuda()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=fused)
    optimizer = TulaOptimizer(
        sgd, global_batch=64, small_batch=8, scale_smoothing=0.9, granularity=granularity, **options
    )
    inputs, targets = torch.randn(64, 3, 8, 8, device="cuda"), torch.randint(10, (64,), device="cuda")
    loss_fn = torch.nn.CrossEntropyLoss()
    for _ in range(3):  # state, scales and kernels are there after these
        loss_fn(model(inputs), targets).backward()
        optimizer.refresh(model, loss_fn, inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
    loss_fn(model(inputs), targets).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_bounded_step_does_not_wait_for_the_gpu(fused: bool):
    """Nor does the default method's, whose scales depend on the weights."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.BatchNorm1d(16)).cuda()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=fused)
    optimizer = BoundedOptimizer(sgd, global_batch=64, small_batch=8)
    inputs, targets = torch.randn(64, 3, 8, 8, device="cuda"), torch.randint(10, (64,), device="cuda")
    for mode in ("default", "default", "error"):
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            optimizer.step()
            mean = optimizer.mean_scale
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
    assert torch.isfinite(torch.as_tensor(mean))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_refresh_does_not_wait_for_the_gpu():
    """Nor does the measurement on a sub-batch, which a training with fresh scales makes every few steps."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.BatchNorm1d(16)).cuda()
    sgd = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    optimizer = TulaOptimizer(sgd, global_batch=64, small_batch=8, granularity="tensor", scale_smoothing=0.9)
    inputs, targets = torch.randn(64, 3, 8, 8, device="cuda"), torch.randint(10, (64,), device="cuda")
    loss_fn = torch.nn.CrossEntropyLoss()
    for mode in ("default", "default", "error"):
        loss_fn(model(inputs), targets).backward()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            optimizer.refresh(model, loss_fn, inputs, targets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()


@pytest.mark.parametrize("granularity", ["element", "channel", "tensor", "global"])
@pytest.mark.parametrize("fused", [False, True])
def test_scales_on_the_gpu_are_those_of_the_cpu(granularity: str, fused: bool):
    """Kernels for many tensors, written-out scales and the fused step give the weights that the CPU gives."""
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 300)
        model = torch.nn.Sequential(*layers, torch.nn.Linear(300, 10)).to(device, torch.float64)
        model = model.to(memory_format=torch.channels_last)
        sgd = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
        optimizer = TulaOptimizer(sgd, global_batch=64, small_batch=8, granularity=granularity, scale_smoothing=0.9)
        inputs, targets = torch.randn(64, 3, 8, 8, dtype=torch.float64), torch.randint(10, (64,))
        inputs, targets = inputs.to(device), targets.to(device)
        for _ in range(4):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.refresh(model, torch.nn.functional.cross_entropy, inputs, targets)
            optimizer.step()
        found.append(torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
