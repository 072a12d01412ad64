"""Any module with a batch dimension: several inputs, a class for each place, padding, targets that are no classes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings
from tula_hpc.display import accuracy_or_loss
from tula_hpc.errors import TulaError
from tula_hpc.ranks import batches, workloads
from tula_hpc.ranks.launch import Rank
from tula_hpc.ranks.profiling import profile
from tula_hpc.ranks.signs import EarlyWarning, Heartbeat
from tula_hpc.ranks.synthetic import SyntheticImages
from tula_hpc.ranks.timings import read_point
from tula_hpc.ranks.training import train
from tula_hpc.runs import RunFolder, read_json, write_json

Make = Callable[..., Settings]
ALONE, CPU = Rank(0, 1, 0, "test", "test"), torch.device("cpu")


class Named(NamedTuple):
    image: Tensor
    mask: Tensor


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_every_place_counts_once_and_padding_does_not():
    """Two sequences of three places, one of them padding: the loss weighs five places, and hits are those of five."""
    targets = torch.tensor([[0, 1, 2], [3, 3, -100]])
    outputs = nn.functional.one_hot(torch.tensor([[0, 1, 2], [3, 0, 0]]), 4).float().transpose(1, 2)
    loss = nn.functional.cross_entropy(outputs, targets)
    assert batches.tally(outputs, targets, loss, top=(1, 4)).tolist() == pytest.approx([5 * float(loss), 5, 4, 5])
    assert batches.tally(outputs, targets, loss, top=(1,))[2] == 4


@pytest.mark.parametrize("shape", [(8, 5, 10), (8, 10, 6), (8,)])
def test_outputs_of_another_shape_are_refused(shape: tuple[int, ...]):
    """Classes that come last, or places that are missing, are named with both shapes and the way out."""
    targets = torch.zeros(8, 5, dtype=torch.int64)
    with pytest.raises(TulaError, match=r"targets of the shape \(8, 5\); the classes must be dimension 1") as caught:
        batches.forward(lambda inputs: torch.zeros(shape), nn.CrossEntropyLoss(), None, targets)
    assert str(shape) in str(caught.value)
    assert "transpose(1, 2)" in str(caught.value)


def test_a_model_of_two_arguments_is_told_how_it_is_called():
    class OfTwo(torch.nn.Module):
        def forward(self, image: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return image * mask

    inputs = (torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(TulaError, match=r"forward\(image: .*was called with one argument.*image, mask = inputs"):
        batches.forward(OfTwo(), torch.nn.functional.mse_loss, inputs, torch.ones(2, 3))


def test_outputs_that_are_no_tensor_are_refused_where_classes_are_counted():
    with pytest.raises(TulaError, match=r"returned a dict .* a tensor of shape \(batch, classes"):
        batches.forward(lambda inputs: {"logits": 1}, nn.CrossEntropyLoss(), None, torch.zeros(8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (torch.nn.functional.cross_entropy, None),
        (torch.nn.CrossEntropyLoss(reduction="none"), r"a tensor of shape \(8,\)"),
        (lambda *_: 1.0, "a float"),
    ],
)
def test_a_loss_that_is_not_one_number_is_refused(loss: Any, words: str | None):
    targets = torch.zeros(8, dtype=torch.int64)
    if words is None:
        assert batches.forward(lambda inputs: torch.zeros(8, 2), loss, None, targets)[1].dim() == 0
        return
    with pytest.raises(TulaError, match=f"workload.loss gave {words}; let it give one number"):
        batches.forward(lambda inputs: torch.zeros(8, 2), loss, None, targets)


@pytest.mark.parametrize(
    ("part", "target", "words"),
    [
        ("model", "builtins.dict", "workload.model, builtins.dict, gives a dict; let it give a torch.nn.Module"),
        ("model", "torch.nn.ReLU", "without a parameter that requires gradients"),
        ("dataset", "types.SimpleNamespace", "gives a SimpleNamespace; let it give a data set with __len__"),
        ("dataset", "builtins.dict", "the data set holds 2; set workload.train_samples=2"),
    ],
)
def test_what_a_factory_gives_is_told_by_its_setting(tiny_settings: Make, part: str, target: str, words: str):
    settings = tiny_settings()
    setattr(settings.workload, part, {"_target_": target})
    with pytest.raises(TulaError, match=re.escape(words)):
        workloads.build_model(settings) if part == "model" else workloads.build_dataset(settings, train=True)


class Pairs(Dataset[Any]):
    """Two numbers by name, whose sum is wanted: as a tensor, or as a class (positive or not)."""

    def __init__(self, train: bool, classes: bool):
        self._numbers = torch.randn(256 if train else 97, 2, generator=torch.Generator().manual_seed(int(train)))
        self._classes = classes

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        one, other = self._numbers[index].unbind()
        total = one + other
        return {"one": one.view(1), "other": (other.view(1),)}, (total > 0).long() if self._classes else total.view(1)


class Sum(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.linear = nn.Linear(2, outputs)

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        return self.linear(torch.cat([inputs["one"], *inputs["other"]], dim=1))


def pairs(root: Path, train: bool, classes: bool) -> Pairs:
    return Pairs(train, classes)


AGS = ("method=ags_measured", "method.refresh_steps=2")


def settings_of(make: Make, classes: bool, *overrides: str) -> Settings:
    settings = make(*AGS, "training.epochs=4", "training.warmup_epochs=0", *overrides)
    settings.workload.model = {"_target_": f"{__name__}.Sum", "outputs": 2 if classes else 1}
    settings.workload.dataset = {"_target_": f"{__name__}.pairs", "classes": classes}
    settings.workload.train_samples, settings.workload.test_samples = 256, 97
    if not classes:
        settings.workload.loss = {"_target_": "torch.nn.MSELoss"}
    return settings


def test_a_model_of_several_inputs_is_trained_by_ags(tiny_settings: Make, tmp_path: Path):
    """A dictionary of tensors goes to the model as it came from the data set, also in the sub-batches of AGS."""
    run = RunFolder(tmp_path / "run")
    train(settings_of(tiny_settings, True), Candidate(1, 64), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    last = run.read_metrics()[-1]
    assert last["test_top1"] > 75
    assert last["mean_scale"] != 1


def test_targets_that_are_no_classes_are_trained_on_without_accuracies(tiny_settings: Make, tmp_path: Path):
    """A regression learns; its loss is told where an accuracy would be."""
    run = RunFolder(tmp_path / "run")
    train(settings_of(tiny_settings, False), Candidate(1, 64), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    first, *_, last = run.read_metrics()
    assert last["test_loss"] < 0.7 * first["test_loss"]
    assert last["train_loss"] > 0
    result = read_json(run.train_result)
    assert (result["test_top1"], result["test_top5"], result["best_test_top1"]) == (None, None, None)
    assert accuracy_or_loss(result) == f"test loss {last['test_loss']:.4g}"


@pytest.mark.parametrize("classes", [True, False])
def test_they_are_profiled_as_well(tiny_settings: Make, tmp_path: Path, classes: bool):
    """A timing file is written, and the batch's bytes are those of all its tensors."""
    candidate, attempt = Candidate(1, 32), RunFolder(tmp_path / "run").attempt("profile/n001-b00032", 1)
    write_json(attempt.launch, {"launch": ALONE.launch})
    profile(settings_of(tiny_settings, classes), candidate, ALONE, attempt, CPU, 1, Heartbeat(None))
    point = read_point(attempt, candidate)
    assert point["batch_gib"] * 2**30 == pytest.approx(32 * (2 * 4 + (8 if classes else 4)))
    assert point["step_time_s"] > 0


def test_synthetic_data_is_loaded_once_for_all_profiled_steps(
    tiny_settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No step waits for random numbers: a batch to train on and one to evaluate are all that is ever read."""
    read: list[int] = []
    sample = SyntheticImages.__getitem__

    def counted(self: SyntheticImages, index: int) -> Any:
        read.append(index)
        return sample(self, index)

    monkeypatch.setattr(SyntheticImages, "__getitem__", counted)
    settings = tiny_settings("data=synthetic", "search.timed_steps=5")
    candidate, attempt = Candidate(1, 32), RunFolder(tmp_path / "run").attempt("profile/n001-b00032", 1)
    write_json(attempt.launch, {"launch": ALONE.launch})
    profile(settings, candidate, ALONE, attempt, CPU, 1, Heartbeat(None))
    assert len(read) == 2 * 32


def test_a_batch_without_counted_targets_leaves_the_mean_as_it_is():
    """Its loss is a mean over nothing."""
    outputs, targets = torch.zeros(1, 3, 4), torch.full((1, 4), -100)
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    assert batches.tally(outputs, targets, loss, (1,)).tolist() == [0.0, 0.0, 0.0]


def test_named_tuples_stay_what_they_are():
    """A model may read the parts of its inputs by name."""
    moved = batches.to_device(Named(torch.ones(2), torch.zeros(2)), torch.device("cpu"))
    assert isinstance(moved, Named)
    assert moved.mask.tolist() == [0.0, 0.0]
