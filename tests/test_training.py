"""The training loop on real digits, in this process: resumed, relaunched with another batch, evaluated."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from tula_hpc.candidates import Candidate
from tula_hpc.checks import check
from tula_hpc.config import Settings
from tula_hpc.errors import TulaError
from tula_hpc.optim.bounded import BoundedOptimizer
from tula_hpc.ranks import checkpoints, pace, training, workloads
from tula_hpc.ranks.launch import Rank
from tula_hpc.ranks.signs import EarlyWarning, Heartbeat, TimeIsUp
from tula_hpc.ranks.training import RemainingSampler, train
from tula_hpc.runs import RunFolder, read_json

ALONE = Rank(0, 1, 0, "test", "test")
ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class AfterSteps(EarlyWarning):
    """A warning that comes at the n-th look; training looks once a step and once a batch of the evaluation."""

    def __init__(self, steps: int):
        super().__init__()
        self._left = steps

    def is_set(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self.receive(signal.SIGUSR2)
        return super().is_set()


def seen_digits(root: Path, train: bool, log: list[int]) -> Dataset:
    """Digits that note which of them were asked for."""
    digits = workloads.digits(root, train)

    class Seen(Dataset):
        def __len__(self) -> int:
            return len(digits)  # type: ignore[arg-type]

        def __getitem__(self, index: int) -> object:
            if train:
                log.append(index)
            return digits[index]

    return Seen()


def watched(settings: Settings) -> list[int]:
    """Let the settings' data set note the samples it gives."""
    log: list[int] = []
    settings.workload.dataset = {"_target_": f"{__name__}.seen_digits", "log": log}
    return log


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    state = checkpoints.load_latest(run.checkpoints)
    assert state is not None
    return state["model"]


FRESH = (
    "method=ags_measured",
    "method.small_batch=16",
    "method.granularity=tensor",
    "method.gate=off",
    "method.scale_smoothing=0.9",
    "method.refresh_steps=4",
    "method.scale_floor=1",
)


@pytest.mark.parametrize(
    "method",
    [("method=ags", "method.small_batch=16"), ("method=ags_measured",), ("method=lbt",), FRESH],
    ids=["ags", "measured", "lbt", "fresh"],
)
def test_resuming_in_an_epoch_changes_nothing(
    tiny_settings: Callable[..., Settings], tmp_path: Path, method: tuple[str, ...]
):
    """A training that was stopped in the middle of an epoch ends with the same weights as one that was not."""
    settings = tiny_settings(*method, "training.epochs=3", "data.train_samples=null")
    candidate = Candidate(1, 64)
    whole, parted = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parted")
    log = watched(settings)
    train(settings, candidate, ALONE, whole, CPU, EarlyWarning(), Heartbeat(None))
    seen_at_once = log.copy()
    log.clear()
    with pytest.raises(TimeIsUp):
        train(settings, candidate, ALONE, parted, CPU, AfterSteps(30), Heartbeat(None))  # 23 steps an epoch
    train(settings, candidate, ALONE, parted, CPU, EarlyWarning(), Heartbeat(None))
    assert log == seen_at_once
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(parted)[name]), name
    assert [line["epoch"] for line in parted.read_metrics()] == [1, 2, 3]
    if method is FRESH:
        assert all(line["mean_scale"] > 1 for line in parted.read_metrics())


def test_the_bounds_of_ags_rise_with_the_warmup_and_fall_with_what_remains(
    tiny_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    factors, step = [], BoundedOptimizer.step

    def noted_step(self: BoundedOptimizer) -> None:
        factors.append(self.bound_factor)
        step(self)

    monkeypatch.setattr(BoundedOptimizer, "step", noted_step)
    settings = tiny_settings("method=ags", "training.epochs=2", "training.warmup_epochs=1")  # of 256 samples
    train(settings, Candidate(1, 64), ALONE, RunFolder(tmp_path / "run"), CPU, EarlyWarning(), Heartbeat(None))
    rise = [0.1, 0.325, 0.55, 0.775, 1, 1, 1, 1]
    assert factors == pytest.approx([rise[step] * (1 - step / 8) ** 0.75 for step in range(8)])


@pytest.mark.parametrize(("method", "momentum"), [("ags", 1 - 0.99**2), ("lbt", 0.01)])
def test_ags_lets_running_averages_follow_as_many_samples(
    tiny_settings: Callable[..., Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    momentum: float,
):
    norm = torch.nn.BatchNorm2d(1, momentum=0.01)
    model = torch.nn.Sequential(norm, torch.nn.Flatten(), torch.nn.Linear(64, 10))
    monkeypatch.setattr(training, "build_model", lambda _: model)
    settings = tiny_settings(f"method={method}", "method.small_batch=32", "training.epochs=1")
    train(settings, Candidate(1, 64), ALONE, RunFolder(tmp_path / "run"), CPU, EarlyWarning(), Heartbeat(None))
    assert norm.momentum == pytest.approx(momentum)


@pytest.mark.parametrize("looks", [8, 8 + 4, 8 + 4 + 2], ids=["last step", "evaluation", "curvature"])
def test_stopping_after_an_epochs_last_step_leaves_no_false_numbers(
    tiny_settings: Callable[..., Settings], tmp_path: Path, looks: int
):
    """A resume that finds its epoch finished evaluates it, and says that it does not know the training loss."""
    overrides = ("training.warmup_epochs=0", "data.test_samples=128", "training.curvature_samples=64")
    settings = tiny_settings("method=ags", *overrides)
    run = RunFolder(tmp_path / "run")
    with pytest.raises(TimeIsUp):  # 256 samples are eight steps
        train(settings, Candidate(1, 32), ALONE, run, CPU, AfterSteps(looks), Heartbeat(None))
    assert not run.metrics.exists()
    before = checkpoints.load_latest(run.checkpoints)
    assert before is not None
    train(settings, Candidate(1, 32), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    first, second = run.read_metrics()
    assert (first["epoch"], first["train_loss"], first["step_time_s"]) == (1, None, None)
    assert first["train_s"] > before["epoch_s"]  # what the epoch took before it was stopped counts
    assert "mean_scale" not in first
    assert first["test_top1"] > 0
    assert first["hessian_eigenvalue"] > 0
    assert first["lr"] == 2 * settings.training.lr  # which is for a batch of 16
    assert second["train_loss"] > 0


def test_the_host_waits_for_the_device_only_a_few_times_an_epoch(
    tiny_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Once its first steps are over, at its last full batch, and at its end."""
    waits: list[None] = []
    monkeypatch.setattr(training, "_now", lambda device: waits.append(None) or time.monotonic())  # type: ignore[func-returns-value]
    settings = tiny_settings("data.train_samples=null", "training.epochs=2")  # 44 steps an epoch
    train(settings, Candidate(1, 32), ALONE, RunFolder(tmp_path / "run"), CPU, EarlyWarning(), Heartbeat(None))
    assert len(waits) == 3 + 2


def test_any_seed_that_is_accepted_trains(tiny_settings: Callable[..., Settings], tmp_path: Path):
    """Such as one made of date and time."""
    settings = tiny_settings(f"training.seed={2**63 - 1}", "training.epochs=1")
    assert check(settings) == []
    run = RunFolder(tmp_path / "run")
    train(settings, Candidate(1, 32), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    assert run.train_result.exists()


@pytest.mark.parametrize("seen", [0, 96, 1437])
def test_ranks_share_what_is_left_of_an_epoch(seen: int):
    """Two ranks with an odd number of samples see the rest once (and the padding), and nothing of a whole epoch."""
    shares = []
    for rank in range(2):
        sampler = RemainingSampler(range(1437), 32, 2, rank, seed=3)  # type: ignore[arg-type]
        whole = list(sampler)
        sampler.seen = seen
        shares.append(list(sampler))
        assert shares[-1] == whole[math.ceil(seen / 2) :]
    assert len(shares[0]) == len(shares[1]) == 719 - math.ceil(seen / 2)


@pytest.mark.parametrize(("before", "after", "batch"), [(8, 4, 16), (4, 8, 1), (1, 8, 33), (8, 1, 7), (3, 2, 5)])
def test_another_number_of_ranks_goes_on_with_the_rest(before: int, after: int, batch: int):
    """After some steps on one number of ranks another one sees the rest: each sample once, the fill from the start."""

    def steps(num_ranks: int, seen: int) -> list[list[int]]:
        """Samples of each step, over all ranks."""
        shares = []
        for rank in range(num_ranks):
            sampler = RemainingSampler(range(1437), 10_000, num_ranks, rank, seed=3)  # type: ignore[arg-type]
            sampler.seen = seen
            shares.append(list(sampler))
        assert len({len(share) for share in shares}) == 1  # or some would wait for the others
        longest = range(0, len(shares[0]), batch)
        return [[index for share in shares for index in share[i : i + batch]] for i in longest]

    taken = [index for step in steps(before, 0)[:3] for index in step]
    assert len(set(taken)) == len(taken) == 3 * before * batch
    rest = [index for step in steps(after, len(taken)) for index in step]
    assert set(taken) | set(rest) == set(range(1437))
    assert len(taken) + len(rest) - 1437 < after


def test_no_rank_gets_a_last_batch_of_one():
    """BatchNorm refuses it, whatever the epoch was left at, and if nothing else is left of it."""
    for seen, left in ((0, 1437), (36, 1400), (37, 1400), (1405, 32), (1436, 0)):
        sampler = RemainingSampler(range(1437), 100, 1, 0, seed=3)  # type: ignore[arg-type]
        sampler.seen = seen
        assert len(list(sampler)) == left


def test_the_steps_are_told_in_windows(
    tiny_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The progress holds windows of at least ten steps, each with its time and the part of it that was waiting."""
    monkeypatch.setattr(pace, "SHORTEST_S", 0.0)  # however fast the machine is
    settings = tiny_settings("data.train_samples=null", "training.epochs=2", "method=lbt")
    run = RunFolder(tmp_path / "run")
    train(settings, Candidate(1, 32), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    windows = read_json(run.progress)["windows"]
    assert windows
    assert all(steps >= 10 and 0 <= wait_s < step_s for _, steps, step_s, wait_s in windows)
    assert [ended for ended, *_ in windows] == sorted(ended for ended, *_ in windows)


def test_a_training_that_is_asked_to_leaves_between_two_steps(tiny_settings: Callable[..., Settings], tmp_path: Path):
    """A file of the controller is found when progress is told; nothing of the epoch is lost or trained twice."""
    settings = tiny_settings("data.train_samples=null", "training.epochs=400")
    run, warning = RunFolder(tmp_path / "run"), EarlyWarning()
    warning.leave = tmp_path / "leave.json"
    warning.leave.touch()
    with pytest.raises(TimeIsUp, match="the controller asked for it; a checkpoint was written"):
        train(settings, Candidate(1, 32), ALONE, run, CPU, warning, Heartbeat(None))
    assert warning.kind() == "replanned"
    state = checkpoints.load_latest(run.checkpoints)
    assert state is not None
    assert state["epoch"] == len(run.read_metrics()) < 400


def test_a_smaller_batch_goes_on_with_the_rest_of_the_epoch(tiny_settings: Callable[..., Settings], tmp_path: Path):
    """After a relaunch with half the batch every sample of the epoch has been seen once, and AGS starts afresh."""
    settings = tiny_settings("training.epochs=2", "data.train_samples=null")
    run = RunFolder(tmp_path / "run")
    log = watched(settings)
    with pytest.raises(TimeIsUp):
        train(settings, Candidate(1, 128), ALONE, run, CPU, AfterSteps(5), Heartbeat(None))
    assert len(log) == 5 * 128
    train(settings, Candidate(1, 64), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    assert sorted(log[:1437]) == list(range(1437))
    assert [line["global_batch"] for line in run.read_metrics()] == [64, 64]
    assert read_json(run.train_result)["global_batch"] == 64


def test_accuracies_count_every_test_sample_once(tiny_settings: Callable[..., Settings], tmp_path: Path):
    """Percentages are whole multiples of one test sample, although 97 is not a multiple of the batch."""
    settings = tiny_settings("training.eval_batch_per_rank=10")
    run = RunFolder(tmp_path / "run")
    train(settings, Candidate(1, 32), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    for line in run.read_metrics():
        for key in ("test_top1", "test_top5"):
            assert line[key] * 97 / 100 == pytest.approx(round(line[key] * 97 / 100), abs=1e-6)
        assert line["test_top5"] >= line["test_top1"]


@pytest.mark.parametrize(("lr", "epochs"), [(0.05, 3), (1e30, 1)])
def test_a_training_without_finite_weights_ends(
    tiny_settings: Callable[..., Settings], tmp_path: Path, lr: float, epochs: int
):
    """After the first epoch that leaves them so, with a result that says it; one that learns goes through all."""
    settings = tiny_settings("method=lbt", f"training.lr={lr}", "training.warmup_epochs=0", "training.epochs=3")
    run = RunFolder(tmp_path / "run")
    train(settings, Candidate(1, 32), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    result = read_json(run.train_result)
    assert (result["epochs"], result["diverged"], len(run.read_metrics())) == (epochs, epochs < 3, epochs)


def test_the_metrics_have_the_promised_keys(tiny_settings: Callable[..., Settings], tmp_path: Path):
    """Each line of metrics.jsonl holds what other tools read from it."""
    run = RunFolder(tmp_path / "run")
    train(tiny_settings(), Candidate(1, 32), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    promised = ["epoch", "samples", "lr", "train_loss", "train_top1", "test_loss", "test_top1", "test_top5"]
    promised += ["global_batch", "method"]
    assert all(key in line for line in run.read_metrics() for key in promised)
    assert [line["samples"] for line in run.read_metrics()] == [256, 512]
    assert list(run.tensorboard.glob("events.*"))


def test_the_learning_rate_follows_the_schedule(tiny_settings: Callable[..., Settings], tmp_path: Path):
    """Warm-up starts at a tenth and milestones count in epochs, whatever the batch."""
    settings = tiny_settings(
        "method=lbt",
        "training.epochs=4",
        "training.warmup_epochs=2",
        "training.milestones=[3]",
        "training.lr=0.1",
    )
    run = RunFolder(tmp_path / "run")
    train(settings, Candidate(1, 64), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    rates = [line["lr"] for line in run.read_metrics()]  # of the last of four steps of each epoch
    assert rates == pytest.approx([0.1 * (0.1 + 0.9 * 0.375), 0.1 * (0.1 + 0.9 * 0.875), 0.1, 0.01])


@pytest.mark.parametrize(
    "override", ["training.channels_last=true", "training.precision=bf16", "data.loader_workers=1"]
)
def test_options_of_speed_train_as_well(tiny_settings: Callable[..., Settings], tmp_path: Path, override: str):
    """Memory format, bfloat16 and loader processes change the speed and not whether it learns."""
    settings = tiny_settings(override, "training.epochs=8", "training.warmup_epochs=0", "data.train_samples=512")
    run = RunFolder(tmp_path / "run")
    train(settings, Candidate(1, 32), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    assert run.read_metrics()[-1]["test_top1"] > 80


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The newest checkpoint that can be read is taken, and the torn one is named."""
    checkpoints.save(tmp_path, 10, {"epoch": 1})
    torn = checkpoints.save(tmp_path, 20, {"epoch": 2})
    torn.write_bytes(torn.read_bytes()[:100])
    assert checkpoints.load_latest(tmp_path) == {"epoch": 1}
    assert torn.name in capsys.readouterr().out


def test_checkpoints_do_not_run_code(tmp_path: Path):
    """A checkpoint that would execute something when read is not read."""

    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (open, (str(tmp_path / "harm"), "w"))  # type: ignore[return-value]

    torch.save({"model": Harmful()}, tmp_path / "samples-00000000000001.pt")
    with pytest.raises(TulaError, match="none of the 1 checkpoints"):  # and the training does not begin anew
        checkpoints.load_latest(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path):
    """A model whose extra state is no plain value would lose its training; profiling meets it as well."""
    with pytest.raises(TulaError, match=r"\(datetime\.timedelta\)"):
        checkpoints.save(tmp_path, 10, {"model": {"weight": torch.ones(2), "_extra_state": timedelta(1)}})
    assert not checkpoints.all_of(tmp_path)


def test_a_checkpoint_is_kept_beside_later_ones_that_could_not_be_read(tmp_path: Path):
    """They are put aside, and do not push out what the training goes on to write."""
    later = [checkpoints.save(tmp_path, samples, {"epoch": samples}) for samples in (20, 30)]
    for each in later:
        each.write_bytes(b"torn")
    checkpoints.save(tmp_path, 10, {"epoch": 10})
    assert checkpoints.load_latest(tmp_path) == {"epoch": 10}


def test_a_lack_of_memory_says_nothing_about_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is raised, to be taken for what it is."""
    checkpoints.save(tmp_path, 10, {"epoch": 1})

    def lacks_memory(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "load", lacks_memory)
    with pytest.raises(RuntimeError, match="allocate memory"):
        checkpoints.load_latest(tmp_path)


def test_a_full_disk_is_told_in_its_own_words(tmp_path: Path):
    """And not in those of the writer that covers them; the limit on a file's size stands for the disk."""
    code = (
        "import resource, signal, sys, torch; from pathlib import Path; from tula_hpc.ranks import checkpoints;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000));"
        "checkpoints.save(Path(sys.argv[1]), 1, {'weights': torch.ones(100_000)})"
    )
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert told.stderr.splitlines()[-1].startswith("OSError: [Errno 27] File too large")


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path):
    """Checkpoints do not fill the disk."""
    for samples in (10, 20, 30, 40):
        checkpoints.save(tmp_path, samples, {"epoch": samples})
    assert [p.name for p in checkpoints.all_of(tmp_path)] == ["samples-00000000000030.pt", "samples-00000000000040.pt"]


def test_a_data_set_smaller_than_said_is_refused(tiny_settings: Callable[..., Settings]):
    """The number of samples that predictions rest on must be there."""
    settings = tiny_settings("workload.train_samples=5000", "data.train_samples=null")
    with pytest.raises(Exception, match=r"workload.train_samples is 5000 and the data set holds 1437"):
        workloads.build_dataset(settings, train=True)


def test_synthetic_data_has_the_true_shape_and_length(tiny_settings: Callable[..., Settings]):
    """Random tensors stand for the data set in shape, classes and number, the same at every start."""
    settings = tiny_settings("data=synthetic", "workload.input_shape=[3,32,32]", "workload.num_classes=7")
    first, second = (workloads.build_dataset(settings, train=True) for _ in range(2))
    assert len(first) == 256  # type: ignore[arg-type]
    assert first[0][0].shape == (3, 32, 32)
    assert {int(first[i][1]) for i in range(256)} == set(range(7))
    assert torch.equal(first[200][0], second[200][0])


def test_what_a_killed_saving_left_is_removed(tiny_settings: Callable[..., Settings], tmp_path: Path):
    """Half-written checkpoints do not pile up over relaunches."""
    run = RunFolder(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    left = run.checkpoints / ".samples-00000000000256.pt.abc"
    left.write_bytes(b"half")
    train(tiny_settings("training.epochs=1"), Candidate(1, 64), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    assert not left.exists()
