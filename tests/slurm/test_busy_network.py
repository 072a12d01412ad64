"""A network that others begin to use while a training runs: real links whose rate falls, on the real Slurm."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tula_hpc.control.journal import Journal
from tula_hpc.control.verdicts import Verdict
from tula_hpc.runs import RunFolder, read_json

from .cluster import SlurmSettings, ThrowawaySlurm, wait_until
from .command import environment, named_run, tula

USUAL, BUSY = "1gbit", "100mbit"

# Computes for 96 ms a step and has 4 MB of gradients, which take 32 ms between two hosts at the usual rate and 320 ms
# at a tenth of it. So two nodes are half as fast again as one at first, and half as fast as one later, whatever else
# the machine does for some tens of milliseconds.
MODEL = """
import time

import torch
from tula_hpc.ranks.workloads import small_cnn


class Steady(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small_cnn(1, 8, 10, 8)
        self.ballast = torch.nn.Parameter(torch.zeros(1_000_000))

    def forward(self, images):
        if self.training:
            time.sleep(0.003 * len(images))
        return self.net(images) + 0 * self.ballast.sum()
"""

WORKLOAD = """
name: steady
model: {_target_: steady_model.Steady}
dataset: {_target_: tula_hpc.ranks.workloads.digits}
train_samples: 1437
test_samples: 360
"""

EPOCHS = 18


@pytest.fixture(scope="module")
def slurm_settings() -> SlurmSettings:
    return SlurmSettings(link_rate=USUAL)


def command_line(folder: Path, tiny_overrides: list[str], epochs: int) -> list[str]:
    """Arguments of a user who works in `folder`, where the workload lies."""
    (folder / "workload").mkdir()
    (folder / "steady_model.py").write_text(MODEL)
    (folder / "workload" / "steady.yaml").write_text(WORKLOAD)
    size = ["grid.min_batch_per_rank=32", "grid.max_batch_per_rank=32", "grid.max_nodes=2", "data.train_samples=null"]
    wanted = ["objective=time", "method=lbt", f"training.epochs={epochs}", "training.replan=auto"]
    site = ["cluster=slurm", "cluster.poll_interval_s=0.5", "cluster.file_lag_s=3", "cluster.memory_gib=1.5"]
    overrides = [tiny_overrides[0], "workload=steady", *tiny_overrides[1:], *site, *size, *wanted]
    return ["--config-dir", str(folder), *overrides]


def test_a_training_leaves_a_network_that_has_become_busy(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]
):
    """On two nodes while their link is fast; when its rate falls to a tenth one node is measured while the training
    runs, and then it saves and goes on there. Every epoch is trained once, and the user is told why."""
    command = [sys.executable, "-m", "tula_hpc", *command_line(tmp_path, tiny_overrides, EPOCHS)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            wait_until(lambda: any(tmp_path.glob("runs/*/selection.json")), 600, "the choice", lambda: "not yet")
            slurm.limit_links(BUSY)
            text, _ = process.communicate(timeout=1800)
        finally:
            slurm.limit_links(USUAL)
            if process.poll() is None:
                process.kill()
    assert process.returncode == 0, text
    (config,) = tmp_path.glob("runs/*/config.yaml")
    run = RunFolder(config.parent)
    state = Journal(run.journal).state()
    assert [(a.num_nodes, a.verdict) for a in state.of("train")] == [(2, Verdict.replanned), (1, Verdict.success)], text
    (probe,) = state.of("probe/n001-b00032")
    assert probe.verdict is Verdict.success, text
    measured = (run.attempt(*probe.key).launch, run.attempt(*probe.key).rank_json(0))
    left = run.attempt("train", 1).rank_error(0)
    assert run.attempt("train", 1).launch.stat().st_mtime < measured[0].stat().st_mtime, text
    assert measured[1].stat().st_mtime < left.stat().st_mtime, text
    assert text.index("1 node with batch 32 a rank: a step takes") < text.index("the training saves and goes on"), text
    drift = state.drifts[0]
    assert (drift["cause"], drift["part"]) == ("steps", "sync")
    assert drift["headline"] in text
    assert "the training saves and goes on with 1 node with batch 32 a rank" in text
    assert [line["epoch"] for line in run.read_metrics()] == list(range(1, EPOCHS + 1))
    assert read_json(run.train_result)["num_nodes"] == 1
    assert drift["headline"] in tula(tmp_path, "status", str(run.path)).stdout


# Runs the command line and kills itself, once for each, before and after everything that is made durable of a move.
DRIVER = """
import os, signal, sys
from pathlib import Path

from tests.killing import Kills
from tula_hpc.cli import main
from tula_hpc.control.journal import Journal
from tula_hpc.control.slurm import SlurmScheduler

kills = Kills(
    Path(sys.argv.pop(1)),
    lambda: os.kill(os.getpid(), signal.SIGKILL),
    lambda name: "probe" in name or name in ("move train", "ending train"),
)
Journal._append = kills.around(Journal._append, lambda self, event, **values: f"{event} {values.get('job', '')}")
SlurmScheduler.submit = kills.around(SlurmScheduler.submit, lambda self, job: "sbatch " + job.tag.split("-")[-4])
main(sys.argv[1:])
"""


def test_a_controller_killed_at_every_step_of_a_move_measures_once_and_moves_once(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]
):
    """Whatever was killed, one job has measured, the training moved after it, and every epoch is trained once."""
    epochs = 24
    arguments = command_line(tmp_path, tiny_overrides, epochs)
    run = named_run(tula(tmp_path, *arguments, "until=choice"))
    (tmp_path / "driver.py").write_text(DRIVER)
    survived = tmp_path / "survived.txt"
    slurm.limit_links(BUSY)
    try:
        for _ in range(40):
            answer = tula(tmp_path, *arguments, program=("driver.py", str(survived)))
            if answer.returncode != -signal.SIGKILL:
                break
    finally:
        slurm.limit_links(USUAL)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    points, job = survived.read_text().splitlines(), "probe/n001-b00032"
    for point in ("move train", f"intent {job}", "sbatch probe", f"submitted {job}", f"verdict {job}", "ending train"):
        assert {f"before {point}", f"after {point}"} <= set(points)
    state = Journal(run.journal).state()
    attempts = state.of(job)
    assert [a.verdict for a in attempts].count(Verdict.success) == 1
    assert sum(run.attempt(job, a.number).claim.exists() for a in attempts) == 1
    assert [(a.num_nodes, a.verdict) for a in state.of("train")] == [(2, Verdict.replanned), (1, Verdict.success)]
    assert [line["epoch"] for line in run.read_metrics()] == list(range(1, epochs + 1))
