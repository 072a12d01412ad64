"""What is written of each step's gradients, for every method, and over stops and relaunches."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tula_hpc.candidates import Candidate
from tula_hpc.config import MethodKind, Settings
from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.ranks.gradient_trace import GradientTrace, read
from tula_hpc.ranks.launch import Rank
from tula_hpc.ranks.signs import EarlyWarning, Heartbeat, TimeIsUp
from tula_hpc.ranks.training import train
from tula_hpc.runs import RunFolder

Make = Callable[..., Settings]
CPU = torch.device("cpu")


class WarnedAfter(Heartbeat):
    """A heart that warns the training after so many steps."""

    def __init__(self, steps: int, warning: EarlyWarning):
        super().__init__(None)
        self._left, self._warning = steps, warning

    def beat(self, doing: str) -> None:
        self._left -= doing.startswith("training")
        if self._left == 0:
            self._warning.receive(signal.SIGUSR2)


def trained(settings: Settings, run: RunFolder, batch: int = 32, warn_after_steps: int = -1) -> None:
    warning = EarlyWarning()
    me = Rank(0, 1, 0, "test", "test")
    train(settings, Candidate(1, batch), me, run, CPU, warning, WarnedAfter(warn_after_steps, warning))


def traced(gradients: list[float], path: Path, samples: int = 0, **options: Any) -> list[dict[str, Any]]:
    """The trace of steps on one weight with these gradients."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD([weight], lr=0.1)
    if options:
        optimizer = TulaOptimizer(optimizer, global_batch=4, **options)
    trace = GradientTrace(path, optimizer, 4, samples)
    for step, gradient in enumerate(gradients, start=1):
        weight.grad = torch.tensor([gradient])
        trace.step(1, samples + 4 * step)
    trace.write()
    return read(path)


def test_norm_variability_and_scale_by_hand(tmp_path: Path):
    """Squared norms 4, 4, 9, 9: the third step is sensitive, the first has nothing to be compared with."""
    rows = traced([2.0, -2.0, 3.0, 3.0], tmp_path / "t.csv", static_scale=8.0)
    assert [row["gradient_norm"] for row in rows] == [2, 2, 3, 3]
    assert [row["variability"] for row in rows[1:]] == [0, 1.25, 0]
    assert rows[0]["variability"] != rows[0]["variability"]
    assert [(row["scaled"], row["scale"]) for row in rows] == [(0, 1), (1, 8), (0, 1), (1, 8)]


def test_steps_are_compared_with_the_last_one_that_was_finite(tmp_path: Path):
    """A norm that overflowed is written as it was, and the next step is compared with the one before it."""
    rows = traced([2.0, float("inf"), 4.0], tmp_path / "t.csv")
    assert rows[1]["gradient_norm"] == rows[1]["variability"] == float("inf")
    assert rows[2]["variability"] == 3


def test_a_torn_row_and_rows_of_steps_to_be_made_again_are_dropped(tmp_path: Path):
    """After a crash the file goes on where the checkpoint does, and the first step is compared with the last kept."""
    path = tmp_path / "t.csv"
    traced([1.0, 2.0, 5.0, 7.0], path)
    path.write_text(path.read_text() + "5,1,2")
    rows = traced([4.0], path, samples=8)
    assert [(row["step"], row["samples"], row["gradient_norm"]) for row in rows] == [(1, 4, 1), (2, 8, 2), (3, 12, 4)]
    assert rows[-1]["variability"] == 3


@pytest.mark.parametrize("method", [kind.name for kind in MethodKind])
def test_every_method_has_a_row_a_step_whether_it_was_stopped_or_not(tiny_settings: Make, tmp_path: Path, method: str):
    """A training that was stopped in mid-epoch leaves the same file; the gate's decisions stand in it, and the weights
    do not depend on whether anybody watched."""
    common = ["training.warmup_epochs=1", "training.epochs=3"]
    settings = tiny_settings(f"method={method}", *common, "training.trace_gradients=true")
    whole, parted, unwatched = (RunFolder(tmp_path / name) for name in ("whole", "parted", "unwatched"))
    trained(settings, whole)
    with pytest.raises(TimeIsUp):
        trained(settings, parted, warn_after_steps=13)
    trained(settings, parted)
    trained(tiny_settings(f"method={method}", *common), unwatched)
    assert whole.gradients.read_text() == parted.gradients.read_text()
    assert not unwatched.gradients.exists()
    rows, lines = read(whole.gradients), whole.read_metrics()
    assert [line["train_loss"] for line in lines] == [line["train_loss"] for line in unwatched.read_metrics()]
    assert [row["step"] for row in rows] == list(range(1, 25))  # 8 an epoch
    assert [row["epoch"] for row in rows] == [1] * 8 + [2] * 8 + [3] * 8
    assert [row["samples"] for row in rows] == list(range(32, 24 * 32 + 1, 32))
    if method != "ags":
        assert sum(row["scaled"] for row in rows) / 24 == pytest.approx(lines[-1].get("scaled_fraction", 0))
    delta = settings.method.delta_threshold
    if method == "static":
        assert all(row["scaled"] == (row["variability"] < delta) for row in rows)
        assert {row["scale"] for row in rows} == {1, settings.method.static_scale}
    elif method == "ags":
        assert all(row["scaled"] for row in rows)
        assert len({row["scale"] for row in rows}) > 1
    elif method in ("ags_measured", "ags_paper"):
        assert all(row["scaled"] == (row["variability"] < delta) for row in rows[8:])
        assert not any(row["scaled"] for row in rows[:8])  # scales are measured at the end of the first epoch


def test_another_batch_begins_a_comparison_of_its_own(tiny_settings: Make, tmp_path: Path):
    """After a relaunch with half the batch the first step has no variability, and no sample stands there twice."""
    settings = tiny_settings("method=lbt", "training.warmup_epochs=1", "training.trace_gradients=true")
    run = RunFolder(tmp_path / "run")
    with pytest.raises(TimeIsUp):
        trained(settings, run, batch=64, warn_after_steps=2)
    trained(settings, run, batch=32)
    rows = read(run.gradients)
    assert [row["samples"] for row in rows] == [64, 128, 192, *range(224, 513, 32)]
    assert [row["step"] for row in rows if row["variability"] != row["variability"]] == [1, 4]


def trained_as_one_of_two(rank: int, settings: Settings, run: RunFolder) -> None:
    me = Rank(rank, 2, rank, "test", "test")
    train(settings, Candidate(2, 32), me, run, CPU, EarlyWarning(), Heartbeat(None))


@pytest.mark.parametrize("method", ["static", "polo"])
def test_two_ranks_write_each_step_once(
    tiny_settings: Make, two_ranks: Callable[..., Any], tmp_path: Path, method: str
):
    """The first rank writes for both, and the curvature that both compute stands in the metrics once an epoch."""
    watched = ["training.trace_gradients=true", "training.curvature_samples=32"]
    settings = tiny_settings(f"method={method}", "training.warmup_epochs=1", *watched)
    run = RunFolder(tmp_path / "run")
    two_ranks(trained_as_one_of_two, settings, run)
    rows = read(run.gradients)
    assert [(row["step"], row["samples"], row["global_batch"]) for row in rows] == [
        (step, 64 * step, 64) for step in range(1, 9)
    ]
    assert all(row["gradient_norm"] > 0 for row in rows)
    assert [line["epoch"] for line in run.read_metrics() if "hessian_eigenvalue" in line] == [1, 2]
