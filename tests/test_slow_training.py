"""A training whose steps become slow, with real processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from waiting import wait_until

from tula_hpc.control.journal import Journal, State
from tula_hpc.control.verdicts import Verdict
from tula_hpc.runs import RunFolder, read_json

ROOT = Path(__file__).parents[1]
EPOCHS = 12

# Computes for four milliseconds a sample, so that two ranks are twice as fast; while the file is there, several ranks
# wait for each other. Its gradients are large enough for synchronisation to take a part of the step, and what is left
# of the training then takes more than twice as long as on one rank: a new start pays even where it takes a minute.
MODEL = """
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tula_hpc.ranks.workloads import small_cnn


class Shared(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.net = small_cnn(1, 8, 10, 8)
        self.ballast = torch.nn.Parameter(torch.zeros(12_000_000))
        self.busy = Path(folder) / "busy"

    def forward(self, images):
        if self.training:
            time.sleep(0.004 * len(images))
            if dist.is_initialized() and self.busy.exists():
                time.sleep(0.6)
        return self.net(images) + 0 * self.ballast.sum()
"""

WORKLOAD = """
name: shared
model: {{_target_: shared_model.Shared, folder: "{folder}"}}
dataset: {{_target_: tula_hpc.ranks.workloads.digits}}
train_samples: 1437
test_samples: 360
"""


class Command:
    """A user's command line in a folder of their own."""

    def __init__(self, folder: Path, overrides: list[str]):
        self.folder = folder
        (folder / "workload").mkdir()
        (folder / "shared_model.py").write_text(MODEL)
        (folder / "workload" / "shared.yaml").write_text(WORKLOAD.format(folder=folder))
        size = ["grid.min_batch_per_rank=32", "grid.max_batch_per_rank=32", "grid.max_nodes=2", "objective=time"]
        whole = ["data.train_samples=null", "search.timed_steps=12", f"training.epochs={EPOCHS}", "method=lbt"]
        first, *rest = overrides
        self.arguments = ["--config-dir", str(folder), first, "workload=shared", *rest, *size, *whole]

    def start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tula_hpc", *self.arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def verb(self, *arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tula_hpc", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=True
        ).stdout

    @property
    def run(self) -> RunFolder:
        (config,) = self.folder.glob("runs/*/config.yaml")
        return RunFolder(config.parent)

    def state(self) -> State:
        return Journal(self.run.journal).state()


def test_a_training_that_becomes_slow_goes_on_elsewhere(tmp_path: Path, tiny_overrides: list[str]):
    """With `training.replan=auto` the training saves when its nodes have come to wait for each other, and one node goes
    on with it: told in the output, by `status` and in the report, and every epoch once."""
    command = Command(tmp_path, [*tiny_overrides, "training.replan=auto"])
    with command.start() as process:
        wait_until(lambda: list(tmp_path.glob("runs/*/selection.json")))
        assert read_json(command.run.selection)["num_nodes"] == 2, read_json(command.run.selection)["reason"]
        (tmp_path / "busy").touch()
        output = process.communicate(timeout=1800)[0]
    assert process.returncode == 0, output
    state = command.state()
    drift = state.drifts[0]
    assert drift["offer"] is not None, drift
    assert (drift["cause"], drift["part"], drift["offer"]["num_nodes"]) == ("steps", "sync", 1)
    assert output.count(drift["headline"] + ". It is taken for synchronisation") == 1
    assert "the training saves and goes on with 1 node with batch 32 a rank" in output
    assert [(a.num_nodes, a.verdict) for a in state.of("train")] == [(2, Verdict.replanned), (1, Verdict.success)]
    assert [line["epoch"] for line in command.run.read_metrics()] == list(range(1, EPOCHS + 1))
    assert read_json(command.run.train_result)["num_nodes"] == 1
    assert "(chosen was 2 nodes x 32 a rank" in output
    assert drift["headline"] in command.verb("status", str(command.run.path))
    page = command.run.report.read_text()
    assert "The steps did not stay as predicted" in page
    assert "went on with 1 node" in page
