"""The whole loop on a real Slurm with real images: arrays on 1, 2 and 4 nodes, a trained model, a report."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tula_hpc.control.journal import Journal
from tula_hpc.control.verdicts import Verdict
from tula_hpc.runs import read_json

from .cluster import ThrowawaySlurm
from .command import named_run, tula

IMAGES = Path("/usr/share/datasets/fashion-mnist")
SMALL = [
    "+experiment=fashion_mnist",
    "cluster=slurm",
    f"data.root={IMAGES}",
    "data.train_samples=2048",
    "data.test_samples=500",
    "grid.min_global_batch=64",
    "grid.min_batch_per_rank=32",
    "search.warmup_steps=2",
    "search.timed_steps=4",
    "search.compute_steps=3",
    "training.epochs=2",
    "cluster.poll_interval_s=1",
    "cluster.max_running_jobs=2",
]

# Memory that grows with the batch: some at once above a size, some only after the steps that profiling takes.
# Each step waits, whatever its batch, so that the largest batch is the fastest on a machine that is busy as well.
HUNGRY = """
import time

import torch
from tula_hpc.ranks.workloads import small_cnn


class Hungry(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small_cnn(1, 28, 10, 8)
        self.steps = 0
        self.hoard = None

    def forward(self, images):
        self.steps += self.training
        time.sleep(0.1 * self.training)
        if self.training and (len(images) > 128 or self.steps > 20):
            self.hoard = None  # the old one goes first: with 64 samples 0.75 GiB are held at most, with 128 1.5
            self.hoard = torch.ones(len(images), 3 * 2**20)  # 12 MiB a sample
        return self.net(images)
"""

HUNGRY_WORKLOAD = """
name: hungry
model: {_target_: hungry.Hungry}
dataset: {_target_: tula_hpc.ranks.workloads.fashion_mnist}
train_samples: 60000
test_samples: 10000
"""


@pytest.fixture(autouse=True)
def images() -> None:
    if IMAGES.is_dir():
        return
    reason = "Fashion-MNIST is not here; Debian's package dataset-fashion-mnist brings it"
    if os.environ.get("TULA_REQUIRE_SLURM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def test_from_arrays_to_a_report(slurm: ThrowawaySlurm, tmp_path: Path):
    """One command profiles on 1, 2 and 4 nodes, chooses, trains on the nodes it chose, and reports; twice is once.

    By the full search, after which there is nothing to measure of the choice, whichever it is; all of them take enough
    steps in two epochs to learn something.
    """
    arguments = [*SMALL, "search=full", "grid.max_batch_per_rank=64", "run_root='runs of \"mine\", é'"]
    run = named_run(tula(tmp_path, *arguments))

    points = read_json(run.fit)["points"]
    assert {p["num_nodes"] for p in points} == {1, 2, 4}
    assert {tuple(p["hosts"]) for p in points if p["num_nodes"] == 4} == {tuple(slurm.node_names)}
    selection, result = read_json(run.selection), read_json(run.train_result)
    assert result["global_batch"] == selection["global_batch"]
    assert result["test_top1"] > 40
    lines = run.read_metrics()
    assert [line["epoch"] for line in lines] == [1, 2]
    assert run.report.stat().st_size > 10_000
    submissions = {row["NAME"] for row in slurm.squeue("NAME") if row["NAME"].startswith(f"{run.tag}-")}
    assert len(submissions) == 4  # an array for each node count, and the training

    events = list(run.journal.iterdir())
    assert named_run(tula(tmp_path, *arguments)) == run
    assert list(run.journal.iterdir()) == events


@pytest.fixture
def hungry(tmp_path: Path) -> list[str]:
    """A workload that profiling finds to fit with batch 128 and that grows later, in jobs of 1.6 GiB."""
    (tmp_path / "hungry.py").write_text(HUNGRY)
    (tmp_path / "workload").mkdir()
    (tmp_path / "workload" / "hungry.yaml").write_text(HUNGRY_WORKLOAD)
    return [
        *SMALL,
        "--config-dir",
        str(tmp_path),
        "workload=hungry",
        "grid.min_nodes=1",
        "grid.max_nodes=1",
        "grid.max_batch_per_rank=256",
        "cluster.memory_gib=1.6",
        "objective=time",
        "objective.tie_tolerance=0",
        "search=full",
        "search.memory_fraction=1",
    ]


def test_a_batch_that_is_killed_for_memory_gives_way_to_a_smaller_one(
    slurm: ThrowawaySlurm, tmp_path: Path, hungry: list[str]
):
    """The cgroup kills the largest batch in profiling and the chosen one in training; half of it succeeds where there
    is no more memory to ask for."""
    answer = tula(tmp_path, *hungry, "cluster.max_memory_gib=1.6")
    run = named_run(answer)
    assert "relaunching with batch 64 a rank instead of 128" in answer.stdout
    state = Journal(run.journal).state()
    killed = state.last("profile/n001-b00256")
    assert killed is not None
    assert killed.verdict is Verdict.host_oom, killed.reason
    assert list(read_json(run.fit)["infeasible"]) == ["n001-b00256"]
    trainings = state.of("train")
    assert [a.verdict for a in trainings] == [Verdict.host_oom, Verdict.success]
    assert [a.batch_per_rank for a in trainings] == [128, 64]
    assert read_json(run.selection)["batch_per_rank"] == 128
    assert read_json(run.train_result)["batch_per_rank"] == 64


def test_host_memory_is_raised_before_the_batch_is_lowered(slurm: ThrowawaySlurm, tmp_path: Path, hungry: list[str]):
    """A training that is killed for lack of host memory gets twice as much, and keeps its batch."""
    run = named_run(tula(tmp_path, *hungry))
    trainings = Journal(run.journal).state().of("train")
    assert [a.verdict for a in trainings] == [Verdict.host_oom, Verdict.success]
    assert [(a.batch_per_rank, a.memory_gib) for a in trainings] == [(128, None), (128, 3.2)]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.partition=gpu", ["'gpu'", "main: 4 nodes"]),
        ("grid.max_nodes=8", ["grid.max_nodes is 8", "4 nodes"]),
        ("cluster.account=nobody", ["'nobody'"]),
    ],
)
def test_what_the_site_does_not_have_is_answered_with_what_it_has(
    slurm: ThrowawaySlurm, tmp_path: Path, override: str, words: list[str]
):
    """A wrong partition, node count or account ends before anything is submitted, and names the right ones."""
    answer = tula(tmp_path, *SMALL, override)
    assert answer.returncode == 2
    for word in words:
        assert word in answer.stderr
    assert "Traceback" not in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_slurm_would_refuse_is_told_before_anything_is_submitted(slurm: ThrowawaySlurm, tmp_path: Path):
    """More memory than a node has is refused with Slurm's own words, for every node count at once."""
    before = len(slurm.squeue("NAME"))
    answer = tula(tmp_path, *SMALL, "cluster.memory_gib=400")
    assert answer.returncode == 1
    for words in ("1 node:", "2 nodes:", "4 nodes:", "nothing was submitted"):
        assert words in answer.stderr
    assert "Memory specification" in answer.stderr or "node configuration" in answer.stderr
    assert len(slurm.squeue("NAME")) == before


def test_plan_shows_what_is_submitted_and_submits_nothing(slurm: ThrowawaySlurm, tmp_path: Path):
    """The plan names candidates, node-hours and cost, prints the batch text that Slurm accepts, and leaves no trace."""
    before = len(slurm.squeue("NAME"))
    answer = tula(tmp_path, "plan", *SMALL, "grid.max_batch_per_rank=128", "cluster.memory_gib=1.5")
    assert answer.returncode == 0, answer.stderr
    for words in (
        "node-hours",
        "$",
        "#SBATCH --array=0-1%2",
        "#SBATCH --mem=1536M",
        "accepted",
        "Slurm's estimate, a hint: would start",
        "packed: 3 jobs",
        "single: 1 job,",
        "nothing was submitted",
    ):
        assert words in answer.stdout
    assert answer.stdout.count("--- sbatch gets") == 3
    assert len(slurm.squeue("NAME")) == before
    assert list(tmp_path.iterdir()) == []


def test_auto_goes_to_slurm_when_it_answers(slurm: ThrowawaySlurm, tmp_path: Path):
    """cluster=auto says in one line that it goes to Slurm; where that is silent, it does not begin on this machine."""
    arguments = ["plan", *[a for a in SMALL if a != "cluster=slurm"], "grid.max_nodes=1"]
    assert "jobs go to Slurm" in tula(tmp_path, *arguments).stdout
    slurm.stop_controller()
    answer = tula(tmp_path, *arguments)
    assert answer.returncode == 1
    assert "Slurm's controller does not answer" in answer.stderr
