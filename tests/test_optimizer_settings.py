"""AdamW as the training's optimizer, and parameters that gradient scaling leaves alone."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tula_hpc import methods
from tula_hpc.candidates import Candidate
from tula_hpc.checks import check
from tula_hpc.composition import compose
from tula_hpc.config import Settings
from tula_hpc.errors import TulaError
from tula_hpc.ranks import checkpoints
from tula_hpc.ranks.device_memory import GIB, MemoryMeter
from tula_hpc.ranks.distributed import replicate
from tula_hpc.ranks.launch import Rank
from tula_hpc.ranks.optimizers import build_optimizer
from tula_hpc.ranks.signs import EarlyWarning, Heartbeat, TimeIsUp
from tula_hpc.ranks.training import train
from tula_hpc.ranks.workloads import build_model
from tula_hpc.runs import RunFolder
from tula_hpc.signatures import measurement_signature

Make = Callable[..., Settings]
ALONE, CPU = Rank(0, 1, 0, "test", "test"), torch.device("cpu")
ADAMW = ["training.optimizer=adamw", "method=lrs_sqrt", "training.lr=0.002"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_adamw_has_the_settings_of_the_training(tiny_settings: Make):
    settings = tiny_settings(*ADAMW, "training.betas=[0.8,0.95]", "training.eps=1e-6", "training.weight_decay=0.1")
    optimizer = build_optimizer(settings, build_model(settings), 64)
    assert type(optimizer) is torch.optim.AdamW
    wanted = {"lr": 0.002, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    assert {key: optimizer.param_groups[0][key] for key in wanted} == wanted


def test_adamws_state_is_two_copies_of_the_model(tiny_settings: Make):
    """What the memory model takes for the optimizer's state, where SGD has one copy."""
    found = {}
    for kind in ("sgd", "adamw"):
        settings = tiny_settings(*ADAMW[1:], f"training.optimizer={kind}")
        meter, model = MemoryMeter(CPU, 1), build_model(settings)
        optimizer = build_optimizer(settings, model, 64)
        model(torch.randn(4, 1, 8, 8)).sum().backward()
        optimizer.step()
        found[kind] = meter.record(model, optimizer, 0, 0)["parts"]
    assert found["sgd"]["optimizer_gib"] == pytest.approx(found["sgd"]["grad_gib"])
    assert found["adamw"]["optimizer_gib"] == pytest.approx(2 * found["adamw"]["grad_gib"], abs=1e3 / GIB)


class SecondEpoch(Heartbeat):
    """Warns the training in the middle of its second epoch."""

    def __init__(self, warning: EarlyWarning):
        super().__init__(None)
        self._warning, self._left = warning, 3

    def beat(self, doing: str) -> None:
        self._left -= doing == "training, epoch 2"
        if self._left == 0:
            self._warning.receive(signal.SIGUSR2)


def test_a_language_model_by_adamw_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path):
    """Stopped in the middle of an epoch and started again, it ends with the same weights, to the bit."""
    small = ["workload.train_samples=256", "workload.test_samples=32", "training.epochs=3", "training.milestones=[]"]
    settings = compose(["+experiment=lm_small", *small])
    whole, parted = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parted")
    train(settings, Candidate(1, 32), ALONE, whole, CPU, EarlyWarning(), Heartbeat(None))
    warning = EarlyWarning()
    with pytest.raises(TimeIsUp):
        train(settings, Candidate(1, 32), ALONE, parted, CPU, warning, SecondEpoch(warning))
    train(settings, Candidate(1, 32), ALONE, parted, CPU, EarlyWarning(), Heartbeat(None))
    one, other = (checkpoints.load_latest(run.checkpoints) for run in (whole, parted))
    assert one is not None
    assert other is not None
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name


@pytest.mark.parametrize("method", ["ags_measured", "ags_paper"])
def test_gradient_scaling_around_adamw_is_warned_about(tiny_settings: Make, method: str):
    """In the job's log by the optimizer; to the user when the batch is chosen, and in the report."""
    settings = tiny_settings("training.optimizer=adamw", f"method={method}", "training.warmup_epochs=1")
    assert check(settings) == []
    (note,) = methods.notes(settings, 1024, 4)
    assert "AdamW divides gradients by their own size" in note
    assert "method=lrs_sqrt" in note
    with pytest.warns(UserWarning, match="AdamW is not known as an SGD"):
        build_optimizer(settings, build_model(settings), 1024)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method=ags", "training.optimizer=adamw"], ["optimizer is adamw", "bounds are those of SGD's", "lrs_sqrt"]),
        (["method=lars", "training.optimizer=adamw"], ["optimizer is adamw", "LARS is an optimizer itself", "sgd"]),
        (
            ["method=polo", "training.optimizer=adamw", "training.warmup_epochs=1"],
            ["averages SGD's momentum", "method=lrs_sqrt"],
        ),
        (
            ["training.optimizer=adamw", "method=lbt", "training.momentum=0.8"],
            ["training.momentum is 0.8", "optimizer=adamw"],
        ),
        (["training.betas=[0.9,0.95]"], ["training.betas is [0.9, 0.95]", "optimizer=sgd does not read"]),
        ([*ADAMW, "training.betas=[0.9,1]"], ["training.betas is [0.9, 1.0]", "[0, 1)"]),
        ([*ADAMW, "training.betas=[0.9]"], ["training.betas is [0.9]", "two weights"]),
        ([*ADAMW, "training.eps=0"], ["training.eps is 0", "greater than 0"]),
        (["workload.sequence_length=0"], ["workload.sequence_length is 0", "greater than 0"]),
    ],
)
def test_what_does_not_fit_together_is_refused(tiny_settings: Make, overrides: list[str], words: list[str]):
    """Each names key, value and the way out."""
    (problem,) = check(tiny_settings(*overrides))
    for word in words:
        assert word in problem


def test_adamw_is_timed_by_itself(tiny_settings: Make):
    sgd, adamw = (tiny_settings("method=lbt", f"training.optimizer={kind}") for kind in ("sgd", "adamw"))
    assert measurement_signature(sgd) != measurement_signature(adamw)


@pytest.mark.parametrize(
    ("method", "sizes"),
    [("ags", {True: 7, False: 6}), ("ags_measured", {True: 7, False: 6}), ("ags_paper", {True: 13})],
)
def test_named_parameters_are_left_unscaled(tiny_settings: Make, tmp_path: Path, method: str, sizes: dict):
    """`ags` and `ags_measured` keep the five biases and the first weight in a group of their own, by the names they
    have without DDP; the printed algorithm scales all."""
    settings = tiny_settings(f"method={method}", "workload.unscaled=['*.bias','0.weight']")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        optimizer = build_optimizer(settings, replicate(build_model(settings), settings, CPU), 256)
    finally:
        dist.destroy_process_group()
    assert {group.get("ags", True): len(group["params"]) for group in optimizer.param_groups} == sizes


def test_a_pattern_that_fits_nothing_is_named_with_some_parameters(tiny_settings: Make):
    """The job ends with the user's own error, before it has done anything."""
    settings = tiny_settings("workload.unscaled=['*nrom*']")
    with pytest.raises(TulaError, match=r"workload.unscaled has '\*nrom\*', which fits no parameter .* 0.weight, 1.we"):
        build_optimizer(settings, build_model(settings), 256)
