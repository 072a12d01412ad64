"""Profiling attempts that share a job, on a real Slurm: what is measured, what runs out of memory, what is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tula_hpc.candidates import Candidate
from tula_hpc.composition import compose
from tula_hpc.config import Settings
from tula_hpc.control.jobs import Jobs
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.packing import submissions
from tula_hpc.control.slurm import SlurmScheduler
from tula_hpc.control.verdicts import Verdict
from tula_hpc.ranks.timings import read_point
from tula_hpc.runs import RunFolder, read_json, write_text
from tula_hpc.signatures import signature

from .cluster import ThrowawaySlurm
from .command import named_run, tula

ROOT = Path(__file__).parents[2]

TINY = [
    "+experiment=quickstart",
    "cluster=slurm",
    "cluster.memory_gib=1.5",
    "cluster.file_lag_s=5",
    "cluster.poll_interval_s=0.5",
    "data.train_samples=1024",
    "search.warmup_steps=1",
    "search.timed_steps=3",
    "search.compute_steps=3",
    "grid.max_nodes=4",
    "grid.max_batch_per_rank=64",
    "grid.min_global_batch=16",
]

# Memory that grows with the batch: 64 samples want more than the job has.
HUNGRY = """
import torch
from tula_hpc.ranks.workloads import small_cnn


class Hungry(torch.nn.Module):
    def __init__(self, **_):
        super().__init__()
        self.net = small_cnn(1, 8, 10, 8)

    def forward(self, images):
        if self.training and len(images) >= 64:
            self.hoard = torch.ones(len(images), 2**23)  # 32 MiB a sample
        return self.net(images)
"""


def profiled(run_root: Path, *overrides: str, candidates: list[Candidate]) -> tuple[RunFolder, list[Attempt]]:
    """Submit the candidates as `profiling=...` says, wait for their ends, and give the attempts."""
    settings: Settings = compose([*TINY, f"run_root={run_root}", *overrides])
    run = RunFolder.of(settings.run_root, settings.name, signature(settings))
    run.create()
    write_text(run.config, "{}\n")
    scheduler = SlurmScheduler(settings, run)
    jobs = Jobs(settings, run, Journal(run.journal), scheduler, lambda: None)
    for submission in submissions(settings, settings.profiling.kind, candidates, scheduler.longest_job_min):
        jobs.submit("profile", submission)
    jobs.wait(lambda looks: None, lambda seconds: None)
    return run, list(Journal(run.journal).state().attempts.values())


def job_ids(slurm: ThrowawaySlurm, run: RunFolder) -> list[str]:
    """Every job that Slurm knows of the run."""
    tags = {a.tag for a in Journal(run.journal).state().attempts.values()}
    return [row["JOBID"] for row in slurm.squeue("JOBID", "NAME") if row["NAME"] in tags]


def test_packed_measures_the_batches_of_each_number_of_nodes_in_one_job(slurm: ThrowawaySlurm, tmp_path: Path):
    """A whole run on 1 and 2 nodes: every point is measured, by exactly two jobs, and the training is a third."""
    arguments = [*TINY, "profiling=packed", "grid.max_nodes=2", "grid.max_batch_per_rank=32", "training.epochs=1"]
    run = named_run(tula(tmp_path, *arguments, "cluster.poll_interval_s=0.5"))
    points = [(p["num_nodes"], p["batch_per_rank"]) for p in read_json(run.fit)["points"]]
    assert sorted(points) == [(n, b) for n in (1, 2) for b in (16, 32)]
    assert len(job_ids(slurm, run)) == 3


def test_adaptive_rounds_share_jobs_and_keep_their_budget(slurm: ThrowawaySlurm, tmp_path: Path):
    """Adaptive search on 1 to 4 nodes: a round is a job for each number of nodes, and five points are the most."""
    budget = ["search.max_points=5", "search.verify_choice=false"]  # the choice may be a sixth, and is then measured
    arguments = [*TINY, "profiling=packed", "search=adaptive", *budget, "training.epochs=1"]
    run = named_run(tula(tmp_path, *arguments))
    points = {(p["num_nodes"], p["batch_per_rank"]) for p in read_json(run.fit)["points"]}
    assert {(2, 16), (4, 16), (4, 64)} <= points
    assert len(points) <= 5
    assert read_json(run.fit)["search"]["ended_by"] in ("tolerance", "max_points")
    first = [a for a in Journal(run.journal).state().attempts.values() if a.number == 1 and a.num_nodes == 4][:2]
    assert len({a.job_id for a in first}) == 1


def test_single_measures_every_number_of_nodes_in_one_allocation(slurm: ThrowawaySlurm, tmp_path: Path):
    """1, 2 and 4 nodes are measured by one job of 4 nodes, the smaller ones on the first of them."""
    candidates = [Candidate(1, 16), Candidate(2, 16), Candidate(4, 16)]
    run, attempts = profiled(tmp_path, "profiling=single", candidates=candidates)
    assert [a.verdict for a in attempts] == [Verdict.success] * 3, [a.reason for a in attempts]
    assert len(job_ids(slurm, run)) == 1
    folders = [run.attempt(attempt.job, attempt.number) for attempt in attempts]
    hosts = [sorted(read_point(f, c)["hosts"]) for f, c in zip(folders, candidates, strict=True)]
    assert hosts == [slurm.node_names[:1], slurm.node_names[:2], slurm.node_names]


def test_a_batch_that_is_killed_for_memory_leaves_the_rest_of_its_job_to_be_measured(
    slurm: ThrowawaySlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The middle batch is killed by the kernel, the larger one on as many nodes is skipped, and what comes after is
    measured."""
    (tmp_path / "hungry.py").write_text(HUNGRY)
    monkeypatch.chdir(tmp_path)
    candidates = [Candidate(1, 32), Candidate(1, 64), Candidate(1, 128), Candidate(2, 32)]
    overrides = ["profiling=single", "workload.model._target_=hungry.Hungry"]
    _, attempts = profiled(tmp_path, *overrides, candidates=candidates)
    expected = [Verdict.success, Verdict.host_oom, Verdict.skipped, Verdict.success]
    assert [a.verdict for a in attempts] == expected, [a.reason for a in attempts]
    assert len({a.job_id for a in attempts}) == 1
