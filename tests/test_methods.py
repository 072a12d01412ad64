"""Each method trains on two ranks, is resumed and relaunched, and reads the settings that are its own."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tula_hpc import methods
from tula_hpc.candidates import Candidate
from tula_hpc.checks import check
from tula_hpc.composition import describe_settings
from tula_hpc.config import MethodKind, MethodSettings, Settings
from tula_hpc.ranks import checkpoints, workloads
from tula_hpc.ranks.launch import Rank
from tula_hpc.ranks.signs import EarlyWarning, Heartbeat, TimeIsUp
from tula_hpc.ranks.training import train
from tula_hpc.runs import RunFolder, read_json
from tula_hpc.signatures import measurement_signature

Run = Callable[..., list[Any]]
Make = Callable[..., Settings]
METHODS = [kind.name for kind in MethodKind]
models: list[torch.nn.Module] = []


def kept_cnn(**arguments: int) -> torch.nn.Module:
    """The bundled net; the last one built can be looked at."""
    models[:] = [workloads.small_cnn(**arguments)]
    return models[0]


class AfterSteps(Heartbeat):
    """A heart that does something after so many steps of training."""

    def __init__(self, steps: int, act: Callable[[], None]):
        super().__init__(None)
        self._left, self._act = steps, act

    def beat(self, doing: str) -> None:
        self._left -= doing.startswith("training")
        if self._left == 0:
            self._left = -1
            self._act()


def trained(
    rank: int, settings: Settings, batch_per_rank: int, run: RunFolder, warn_after_steps: int = 0, ranks: int = 2
) -> dict[str, torch.Tensor] | None:
    """Train as one rank; the weights that it ends with, or None if the training was warned and left."""
    warning = EarlyWarning()
    me = Rank(rank, ranks, rank, "test", "test")
    try:
        train(
            settings, Candidate(ranks, batch_per_rank), me, run, torch.device("cpu"), warning,
            AfterSteps(warn_after_steps or -1, lambda: warning.receive(signal.SIGUSR2)),
        )  # fmt: skip
    except TimeIsUp:
        return None
    except RuntimeError:  # rank 0 is gone
        if warn_after_steps and rank > 0:
            return None
        raise
    return {name: tensor.clone() for name, tensor in models[0].state_dict().items()}


@pytest.fixture
def make(tiny_settings: Make) -> Make:
    """Settings of a small training by a method; a warm-up of one epoch, so that post-local SGD is local after it."""

    def settings(method: str, *overrides: str) -> Settings:
        rate = ["method.lars_lr=2"] if method == "lars" else []
        common = ["training.epochs=4", "training.warmup_epochs=1", "training.lr=0.02", "data.train_samples=512"]
        made = tiny_settings(f"method={method}", *common, *rate, *overrides)
        made.workload.model["_target_"] = f"{__name__}.kept_cnn"
        return made

    return settings


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_learn_together_and_stay_alike(make: Make, two_ranks: Run, tmp_path: Path, method: str):
    """Every method learns the digits on two ranks, which end with the same parameters to the bit; what it did is
    recorded: its name, the rate at its batch, and how often it averaged models."""
    run = RunFolder(tmp_path / "run")
    settings = make(method, "training.epochs=10")
    first, second = two_ranks(trained, settings, 32, run)
    parameters = dict(models_parameters(first))
    assert_same(parameters, dict(models_parameters(second)))
    result = read_json(run.train_result)
    assert result["test_top1"] > 80
    linear = 0.02 * 64 / 16
    scaled = {"ags": linear, "lrs_linear": linear, "lrs_sqrt": 0.02 * 2, "lars": 2 * 64 / 16}
    assert result["method"] == method
    assert result["base_lr"] == pytest.approx(scaled.get(method, 0.02))
    assert result["averaging_period_steps"] == (2 if method == "polo" else None)  # 8 steps an epoch, 4 averagings
    for line in run.read_metrics():
        assert {key: line[key] for key in ("method", "base_lr")} == {key: result[key] for key in ("method", "base_lr")}
    assert run.read_metrics()[-1]["lr"] == pytest.approx(result["base_lr"])


def models_parameters(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Without BatchNorm's statistics, which are each rank's own under DDP until they are broadcast."""
    return [(name, tensor) for name, tensor in state.items() if "running" not in name]


def test_averaging_every_step_is_synchronous_training(make: Make, two_ranks: Run, tmp_path: Path):
    """Post-local SGD that averages models and momenta after every step takes the steps of plain SGD."""
    often = make("polo", "method.sync_per_epoch=1000", "method.local_momentum=average", "method.local_from_epoch=0")
    local = two_ranks(trained, often, 32, RunFolder(tmp_path / "polo"))[0]
    synchronous = two_ranks(trained, make("lbt"), 32, RunFolder(tmp_path / "lbt"))[0]
    for name, tensor in models_parameters(synchronous):
        torch.testing.assert_close(local[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    assert read_json(RunFolder(tmp_path / "polo").train_result)["averaging_period_steps"] == 1


def test_local_steps_make_a_difference(make: Make, two_ranks: Run, tmp_path: Path):
    """With four averagings an epoch the same settings end elsewhere: the local phase is local."""
    rarely = make("polo", "method.sync_per_epoch=4", "method.local_momentum=average")
    local = two_ranks(trained, rarely, 32, RunFolder(tmp_path / "polo"))[0]
    synchronous = two_ranks(trained, make("lbt"), 32, RunFolder(tmp_path / "lbt"))[0]
    assert not torch.allclose(local["0.weight"], synchronous["0.weight"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("steps", [5, 21])  # in the warm-up; before a step where post-local SGD averages anyway
def test_a_training_that_was_stopped_ends_as_one_that_was_not(
    make: Make, two_ranks: Run, tmp_path: Path, method: str, steps: int
):
    """Two ranks that are warned in the middle of an epoch and started again end with the weights of those that were
    not, to the bit."""
    settings = make(method, *(["method.local_momentum=average"] if method == "polo" else []))
    whole, parted = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parted")
    expected = two_ranks(trained, settings, 32, whole)
    assert two_ranks(trained, settings, 32, parted, steps) == [None, None]
    assert not parted.train_result.exists()
    for mine, other in zip(two_ranks(trained, settings, 32, parted), expected, strict=True):
        assert_same(dict(models_parameters(mine)), dict(models_parameters(other)))


def crash() -> None:
    raise RuntimeError("crashed")


def crashed(rank: int, settings: Settings, batch_per_rank: int, run: RunFolder, steps: int) -> None:
    """Train as one of two ranks that end without warning after so many steps."""
    me, device = Rank(rank, 2, rank, "test", "test"), torch.device("cpu")
    with pytest.raises(RuntimeError, match="crashed"):
        train(settings, Candidate(2, batch_per_rank), me, run, device, EarlyWarning(), AfterSteps(steps, crash))


@pytest.mark.parametrize("momentum", ["reset", "average"])
def test_a_crash_between_two_averagings_changes_nothing(make: Make, two_ranks: Run, tmp_path: Path, momentum: str):
    """In the local phase a checkpoint that is due waits for the next averaging, so what goes on from it ends as if
    there had been no crash, to the bit."""
    settings = make("polo", "training.checkpoint_every_min=1e-9", f"method.local_momentum={momentum}")
    whole, parted = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parted")
    expected = two_ranks(trained, settings, 32, whole)
    two_ranks(crashed, settings, 32, parted, 23)  # of 8 an epoch, averaged every second
    assert samples_saved(parted)[-1] == 22 * 64
    for mine, other in zip(two_ranks(trained, settings, 32, parted), expected, strict=True):
        assert_same(mine, other)


def samples_saved(run: RunFolder) -> list[int]:
    return [int(path.stem.removeprefix("samples-")) for path in checkpoints.all_of(run.checkpoints)]


def test_a_warned_training_does_not_wait_for_its_next_averaging(make: Make, two_ranks: Run, tmp_path: Path):
    """Where the next averaging is far, the ranks make one because of the warning: the checkpoint holds what it would
    hold if an averaging had been due there."""
    soon, late = RunFolder(tmp_path / "soon"), RunFolder(tmp_path / "late")
    for run, averagings in ((soon, 2), (late, 1)):  # in 64 steps
        settings = make("polo", "data.train_samples=1024", f"method.sync_per_epoch={averagings}")
        two_ranks(trained, settings, 8, run, 64 + 20)
        assert samples_saved(run)[-1] == (64 + 32) * 16
    states = [checkpoints.load_latest(run.checkpoints) for run in (soon, late)]
    assert_same(states[0]["model"], states[1]["model"])
    first, second = two_ranks(trained, settings, 8, late)
    assert_same(dict(models_parameters(first)), dict(models_parameters(second)))


@pytest.mark.parametrize("method", METHODS)
def test_a_relaunch_with_a_smaller_batch_has_its_rate(make: Make, two_ranks: Run, tmp_path: Path, method: str):
    """A training that goes on with half the batch, in the warm-up, follows the schedule of that batch from there on
    and ends after the same samples; the rate after the warm-up and the averaging period are the smaller batch's."""
    run = RunFolder(tmp_path / "run")
    settings = make(method, "training.warmup_epochs=1.5", "training.milestones=[3]")
    assert two_ranks(trained, settings, 64, run, 2) == [None, None]
    two_ranks(trained, settings, 32, run)
    lines, result = run.read_metrics(), read_json(run.train_result)
    last_steps = [epoch - 64 / 512 for epoch in (1, 2, 3, 4)]  # the rate of a step is that at its beginning
    rates = [methods.learning_rate(settings, 64, epoch) for epoch in last_steps]
    assert [line["lr"] for line in lines] == pytest.approx(rates)
    assert [(line["epoch"], line["global_batch"]) for line in lines] == [(epoch, 64) for epoch in (1, 2, 3, 4)]
    assert result["base_lr"] == pytest.approx(methods.base_lr(settings, 64))
    assert rates[1:3] == pytest.approx([result["base_lr"]] * 2)
    assert rates[3] == pytest.approx(0.1 * result["base_lr"])
    assert result["averaging_period_steps"] == (2 if method == "polo" else None)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["method=lbt", "method.gate=off"],
            ["method.gate is off", "for method=ags_measured", "the method is lbt", "leave"],
        ),
        (["method=ags", "method.gate=off"], ["method.gate is off", "for method=ags_measured", "the method is ags"]),
        (["method=ags_measured", "method.step_cap=0.02"], ["method.step_cap is 0.02", "for method=ags,"]),
        (["method=ags", "method.step_floor=0.02"], ["step_floor is 0.02", "between 0 and method.step_cap=0.01"]),
        (["method=ags", "method.step_cap=0", "method.step_floor=0"], ["method.step_cap is 0", "greater than 0"]),
        (["method=ags", "method.lars_lr=1"], ["method.lars_lr is 1.0", "method=lars"]),
        (
            ["method=ags_paper", "method.granularity=tensor"],
            ["method.granularity is tensor", "for method=ags_measured,"],
        ),
        (["method=lars", "method.sync_per_epoch=2"], ["method.sync_per_epoch is 2", "method=polo"]),
        (["method=lars", "method.lars_lr=0"], ["method.lars_lr is 0", "greater than 0"]),
        (["method=polo", "method.local_from_epoch=-1"], ["method.local_from_epoch is -1", "0 or greater"]),
        (
            ["method=polo", "training.warmup_epochs=1.5"],
            ["training.warmup_epochs", "training.epochs is 2", "at most 1"],
        ),
        (["method=polo", "training.warmup_epochs=inf"], ["training.warmup_epochs is inf", "finite"]),
        (["method=polo", "method.local_from_epoch=2"], ["method.local_from_epoch", "after epoch 2", "at most 1"]),
    ],
)
def test_a_setting_that_the_method_cannot_use_is_refused(tiny_settings: Make, overrides: list[str], words: list[str]):
    """Each names key, value, whose it is and the way out."""
    warmup = [] if any("warmup" in override for override in overrides) else ["training.warmup_epochs=1"]
    (problem,) = check(tiny_settings(*overrides, *warmup))
    for word in words:
        assert word in problem


@pytest.mark.parametrize("method", METHODS)
def test_each_method_can_be_chosen_by_its_group(tiny_settings: Make, method: str):
    """conf/method/ has a file for every method, which sets nothing that is not its own."""
    settings = tiny_settings(f"method={method}", "training.epochs=5")
    assert settings.method.kind.name == method
    assert check(settings) == []


def test_lars_without_its_package_is_refused_before_anything_is_submitted(
    tiny_settings: Make, monkeypatch: pytest.MonkeyPatch
):
    """The message names the package and the command that installs it; another Python on the nodes is not judged."""
    settings = tiny_settings("method=lars")
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    (problem,) = check(settings)
    assert "pytorch_optimizer" in problem
    assert "pip install 'tula-hpc[lars]'" in problem
    settings.cluster.python = "/opt/python"
    assert check(settings) == []


def test_help_says_which_methods_a_setting_is_for():
    """What the check refuses for a method is told in the help of the setting."""
    help_texts = {line.split(" = ")[0]: line for line in describe_settings()}
    for field in dataclasses.fields(MethodSettings):
        readers = methods.readers(field.name)
        if readers not in (tuple(MethodKind), (MethodKind.ags_measured,)):
            first_sentence = help_texts[f"method.{field.name}"].split("   ")[1].split(":")[0]
            *others, last = (f"`{kind.name}`" for kind in readers)
            assert first_sentence == f"For {', '.join(others)}{' and ' if others else ''}{last}"


def test_methods_that_differ_in_their_rate_share_measurements(tiny_settings: Make):
    """Plain and scaled rates take the same steps; the optimizers of the others are timed by themselves."""
    signatures = {m: measurement_signature(tiny_settings(f"method={m}")) for m in METHODS}
    assert len({signatures[m] for m in ("lbt", "lrs_linear", "lrs_sqrt")}) == 1
    assert len(set(signatures.values())) == len(METHODS) - 2


@pytest.mark.parametrize(
    ("method", "batch", "ranks", "words"),
    [
        ("ags", 1024, 4, "learning rate 0.4 at a global batch of 1024: 0.05 was tuned for 128"),
        ("lrs_linear", 1024, 4, "learning rate 0.4 at a global batch of 1024: 0.05 was tuned for 128"),
        ("lars", 512, 4, "learning rate 0.2 at a global batch of 512"),
        ("ags_paper", 128, 4, "adaptive gradient scaling has nothing to do at a global batch of 128"),
        ("polo", 1024, 1, "post-local SGD on a single rank is plain SGD"),
        ("lbt training.epochs=3 training.warmup_epochs=5", 1024, 4, "before its warm-up does"),
    ],
)
def test_what_a_user_would_not_expect_is_noted(tiny_settings: Make, method: str, batch: int, ranks: int, words: str):
    """Once the batch is chosen the scaled rate is told, and what cannot work at that batch or on one rank."""
    overrides = ["training.warmup_epochs=1", *f"method={method}".split(), "method.small_batch=128"]
    (note,) = methods.notes(tiny_settings(*overrides), batch, ranks)
    assert words in note


def test_where_the_bounds_have_nothing_to_do_is_noted(tiny_settings: Make):
    """At the tuned batch the default method is plain SGD."""
    settings = tiny_settings("training.warmup_epochs=1", "method=ags", "method.small_batch=128")
    assert "this is plain SGD" in methods.notes(settings, 128, 4)[-1]


@pytest.mark.parametrize("method", ["ags_measured", "lbt", "polo"])
def test_nothing_is_noted_where_all_is_as_expected(tiny_settings: Make, method: str):
    """A method that works with the rate as it is goes without a note."""
    assert methods.notes(tiny_settings(f"method={method}", "training.warmup_epochs=1"), 1024, 4) == []
