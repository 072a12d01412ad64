"""A training that traces its gradients leaves each step once, interrupted or not, whatever its method."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings
from tula_hpc.ranks.launch import Rank
from tula_hpc.ranks.signs import EarlyWarning, Heartbeat, TimeIsUp
from tula_hpc.ranks.training import train
from tula_hpc.runs import RunFolder

Make = Callable[..., Settings]
STEPS_AN_EPOCH = 8


class AfterSteps(EarlyWarning):
    """A warning at the n-th look; training looks once a step."""

    def __init__(self, steps: int):
        super().__init__()
        self._left = steps

    def is_set(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self.receive(signal.SIGUSR2)
        return super().is_set()


def traced(settings: Settings, folder: Path, *warnings: EarlyWarning) -> pd.DataFrame:
    """The trace of a training of two epochs, begun again after each warning."""
    torch.set_num_threads(1)
    run = RunFolder(folder)
    run.train.mkdir(parents=True)
    for warning in (*warnings, EarlyWarning()):
        try:
            train(
                settings, Candidate(1, 64), Rank(0, 1, 0, "t", "t"), run, torch.device("cpu"), warning, Heartbeat(None)
            )
        except TimeIsUp:
            continue
    return pd.read_csv(run.gradients)


@pytest.fixture
def make(tiny_settings: Make) -> Make:
    common = (
        "training.epochs=2",
        "data.train_samples=512",
        "training.trace_gradients=true",
        "training.warmup_epochs=1",
    )
    return lambda *overrides: tiny_settings(*common, *overrides)


def test_each_step_has_a_row(make: Make, tmp_path: Path):
    """Steps, epochs and samples count on; variability is Eq. (5) of the norms; plain SGD scales nothing."""
    rows = traced(make("method=lbt"), tmp_path)
    assert list(rows["step"]) == list(range(1, 2 * STEPS_AN_EPOCH + 1))
    assert list(rows["epoch"]) == [1] * STEPS_AN_EPOCH + [2] * STEPS_AN_EPOCH
    assert list(rows["samples"]) == [64 * step for step in rows["step"]]
    square = rows["gradient_norm"] ** 2
    expected = ((square - square.shift()) / square.shift()).abs()
    pd.testing.assert_series_equal(rows["variability"], expected, check_names=False, rtol=1e-3)
    assert not rows["scaled"].any()


def test_scaled_steps_are_the_calm_ones(make: Make, tmp_path: Path):
    """With static scaling exactly the steps below the threshold are scaled."""
    rows = traced(make("method=static", "method.static_scale=2", "method.delta_threshold=0.3"), tmp_path)
    assert list(rows["scaled"] == 1) == list(rows["variability"] < 0.3)
    assert 0 < rows["scaled"].sum() < len(rows)


@pytest.mark.parametrize("interrupted_after", [3, STEPS_AN_EPOCH + 5])
def test_a_resumed_training_has_each_step_once(make: Make, tmp_path: Path, interrupted_after: int):
    """The trace of a training that was interrupted is that of one that was not."""
    whole = traced(make("method=lbt"), tmp_path / "whole")
    resumed = traced(make("method=lbt"), tmp_path / "resumed", AfterSteps(interrupted_after))
    pd.testing.assert_frame_equal(resumed, whole, rtol=1e-4)
