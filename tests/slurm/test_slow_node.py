"""A node that becomes slow while a training runs, on the real Slurm: told by name, and left out."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tula_hpc.control.journal import Journal
from tula_hpc.control.verdicts import Verdict
from tula_hpc.errors import RecordError
from tula_hpc.models.drift import LASTING
from tula_hpc.runs import RunFolder, read_json

from .cluster import SlurmSettings, ThrowawaySlurm, wait_until
from .command import environment, tula

# A pass takes 80 ms, and 240 ms on the host that a file names.
MODEL = """
import socket
import time
from pathlib import Path

import torch
from tula_hpc.ranks.workloads import small_cnn


class Waits(torch.nn.Module):
    def __init__(self, slow):
        super().__init__()
        self.net = small_cnn(1, 8, 10, 8)
        self.slow = Path(slow)

    def forward(self, images):
        if self.training:
            is_slow = self.slow.exists() and self.slow.read_text() == socket.gethostname()
            time.sleep((3 if is_slow else 1) * 0.0025 * len(images))
        return self.net(images)
"""

WORKLOAD = """
name: waits
model: {{_target_: waiting_model.Waits, slow: "{slow}"}}
dataset: {{_target_: tula_hpc.ranks.workloads.digits}}
train_samples: 1437
test_samples: 360
"""

EPOCHS = 50


@pytest.fixture(scope="module")
def slurm_settings() -> SlurmSettings:
    """One more host than the training takes."""
    return SlurmSettings(num_nodes=5)


def told(run: RunFolder, rank: int) -> dict[str, Any]:
    with suppress(RecordError):
        return read_json(run.forward_times(rank))
    return {"windows": []}


def test_a_training_goes_on_without_a_node_that_has_become_slow(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]
):
    """On four nodes, of which one that is not the first rank's takes three times as long from some time on: it is
    named, nothing else is offered, and the next job keeps off it."""
    slow = tmp_path / "slow"
    (tmp_path / "workload").mkdir()
    (tmp_path / "waiting_model.py").write_text(MODEL)
    (tmp_path / "workload" / "waits.yaml").write_text(WORKLOAD.format(slow=slow))
    size = ["grid.min_batch_per_rank=32", "grid.max_batch_per_rank=32", "grid.min_nodes=4", "grid.max_nodes=4"]
    wanted = ["objective=time", "method=lbt", f"training.epochs={EPOCHS}", "training.replan=auto"]
    site = ["cluster=slurm", "cluster.poll_interval_s=0.5", "cluster.file_lag_s=3", "cluster.memory_gib=1.5"]
    overrides = [tiny_overrides[0], "workload=waits", *tiny_overrides[1:], *site, *size, *wanted]
    overrides += ["data.train_samples=null"]
    command = [sys.executable, "-m", "tula_hpc", "--config-dir", str(tmp_path), *overrides]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            wait_until(lambda: any(tmp_path.glob("runs/*/selection.json")), 600, "the choice", lambda: "not yet")
            (config,) = tmp_path.glob("runs/*/config.yaml")
            run = RunFolder(config.parent)
            enough = 2 * LASTING + 1
            wait_until(lambda: len(told(run, 2)["windows"]) >= enough, 600, "the usual times", lambda: "not yet")
            host = told(run, 2)["host"]
            unfinished = tmp_path / "unfinished"
            unfinished.write_text(host)
            unfinished.rename(slow)
            text, _ = process.communicate(timeout=1800)
        finally:
            if process.poll() is None:
                process.kill()
    assert process.returncode == 0, text
    state = Journal(run.journal).state()
    assert [a.verdict for a in state.of("train")] == [Verdict.replanned, Verdict.success], text
    drift = state.drifts[0]
    assert (drift["cause"], drift["node"]) == ("node", host), text
    assert f"node {host} computes " in text
    assert f"the training saves and goes on without {host}" in text
    assert host not in {told(run, rank)["host"] for rank in range(4)}
    assert state.of("train")[0].broken_hosts == (host,)
    assert not [a for a in state.attempts.values() if a.is_probe]
    assert [line["epoch"] for line in run.read_metrics()] == list(range(1, EPOCHS + 1))
    assert f"node {host} computes " in tula(tmp_path, "status", str(run.path)).stdout
