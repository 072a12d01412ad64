"""Runs whose user has left the login node: the controller is a Slurm job, is queued again, cancelled, taken up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tula_hpc.control.journal import Journal
from tula_hpc.control.lease import holder_of
from tula_hpc.control.verdicts import Verdict
from tula_hpc.errors import RecordError
from tula_hpc.runs import RunFolder, read_json

from .cluster import SlurmSettings, ThrowawaySlurm, wait_until
from .command import named_run, tula

SMALL = [
    "cluster=slurm",
    "cluster.poll_interval_s=0.5",
    "cluster.file_lag_s=3",
    "cluster.memory_gib=1.5",
    "grid.max_nodes=1",
    "grid.min_batch_per_rank=32",
    "grid.max_batch_per_rank=32",
]
AWAY = [*SMALL, "controller=slurm"]
# long enough to be met in the middle, and never waited for
LONG = ["training.epochs=100000"]


@pytest.fixture(scope="module")
def slurm_settings() -> SlurmSettings:
    """A requeued job starts again soon."""
    return SlurmSettings(requeue_wait_s=10)


@pytest.fixture(autouse=True)
def left_empty(slurm: ThrowawaySlurm):
    yield
    slurm.cancel_all()


def log(run: RunFolder) -> str:
    return "\n".join(path.read_text() for path in run.scheduler.glob("*_controller.out"))


def wait_finished(run: RunFolder) -> None:
    wait_until(lambda: run.is_finished, 600, "the run to finish", lambda: log(run))


def wait_training(run: RunFolder) -> None:
    wait_until(lambda: bool(run.read_metrics()), 600, "the training to begin", lambda: log(run))


def active(slurm: ThrowawaySlurm) -> list[str]:
    """Names of the jobs that wait or run."""
    return [row["NAME"] for row in slurm.squeue("NAME", "STATE") if row["STATE"] in ("PENDING", "RUNNING")]


def test_the_command_returns_at_once_and_the_run_ends_finished(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]
):
    """Also from inside another job, and from a folder with an odd name: the controller job finishes the run."""
    folder = tmp_path / "mine, 100 % 'é'"
    folder.mkdir()
    other_job = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": "9", "SLURM_ARRAY_TASK_ID": "3", "SBATCH_PARTITION": "no"}
    answer = tula(folder, *tiny_overrides, *AWAY, "grid.min_nodes=2", "grid.max_nodes=2", **other_job)
    run = named_run(answer)
    job_id = read_json(run.controller_job)["job_id"]
    for words in (f"Slurm job {job_id}", "attach", "status", "logs", "cancel"):
        assert words in answer.stdout
    assert not run.is_finished
    wait_finished(run)
    assert f"run folder: {run.path}" in tula(folder, "logs", run.path.name, "controller").stdout
    assert "\x1b" not in log(run)
    for rank in ("0", "1"):
        shown = tula(folder, "logs", run.path.name, "train", "--rank", rank)
        assert f"_{rank}_log.out" in shown.stderr
        assert shown.stdout


def test_a_second_command_does_not_submit_a_second_controller(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]
):
    """While the controller job waits or runs, the same command names it and submits nothing."""
    first = named_run(tula(tmp_path, *tiny_overrides, *AWAY, *LONG))
    wait_until(lambda: holder_of(first) is not None, 600, "the controller to begin", lambda: log(first))
    answer = tula(tmp_path, *tiny_overrides, *AWAY, *LONG)
    assert named_run(answer) == first
    other = tula(tmp_path, *tiny_overrides, *AWAY, *LONG, "training.max_relaunches=9")
    assert other.returncode == 1
    assert "training.max_relaunches=9 is not in effect" in other.stderr
    assert f"Slurm job {read_json(first.controller_job)['job_id']} (running) already" in answer.stdout
    assert [name for name in active(slurm) if name.endswith("-controller")] == [f"{first.tag}-controller"]


@pytest.mark.parametrize("how", [("scontrol", "requeue"), ("scancel", "--batch", "--signal=USR2")])
def test_a_controller_job_that_is_queued_again_goes_on_and_doubles_nothing(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str], how: tuple[str, ...]
):
    """After a requeue, by Slurm or by itself shortly before its time limit, the same training is watched to its end."""
    run = named_run(
        tula(tmp_path, *tiny_overrides, *AWAY, "training.epochs=700")
    )  # goes on longer than a requeue takes
    wait_training(run)
    job_id = read_json(run.controller_job)["job_id"]
    slurm.run(*how, job_id)

    def restarted() -> bool:
        try:
            lease = read_json(run.lease)
        except RecordError:
            return False
        return (lease["slurm_job"], lease["restart"]) == (job_id, 1)

    wait_until(restarted, 600, "the controller to begin again", lambda: log(run))
    wait_finished(run)
    attempts = Journal(run.journal).state().attempts.values()
    assert [(a.job, a.verdict) for a in attempts] == [
        ("profile/n001-b00032", Verdict.success),
        ("train", Verdict.success),
    ]
    assert [line["epoch"] for line in run.read_metrics()] == list(range(1, 701))


def test_experiments_side_by_side_share_their_points(slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]):
    """A sweep over the objective returns at once with a table, and each point is measured by one of its runs."""
    answer = tula(tmp_path, "-m", *tiny_overrides, *AWAY, "grid.max_batch_per_rank=64", "objective=cost,time")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    runs = [RunFolder(plan.parent) for plan in (tmp_path / "runs").glob("*/plan.json")]
    assert len(runs) == 2
    for run in runs:
        assert run.path.name in answer.stdout
        assert [a for a in read_json(run.plan)["command"] if a.startswith("objective=")] in (
            ["objective=cost"],
            ["objective=time"],
        )
        wait_finished(run)
    measured = Counter(
        a.job
        for run in runs
        for a in Journal(run.journal).state().attempts.values()
        if a.job != "train" and a.job_id is not None
    )
    assert measured == {"profile/n001-b00032": 1, "profile/n001-b00064": 1}


def test_a_sweep_through_the_launcher_plugin_runs_its_controllers_in_jobs(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]
):
    """hydra/launcher=submitit_slurm: each controller is in a job of the plugin's, submits from there, and finishes."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.mem_gb=1", "hydra.launcher.timeout_min=20"]
    answer = tula(tmp_path, "-m", *tiny_overrides, *SMALL, *launcher, "objective=cost,time")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    runs = [RunFolder(plan.parent) for plan in (tmp_path / "runs").glob("*/plan.json")]
    assert [run.is_finished for run in runs] == [True, True]
    assert answer.stdout.count("finished") == 2


def test_cancel_ends_the_jobs_of_one_run_and_no_others(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]
):
    """Controller and training end; a job whose name begins as theirs do goes on; a second cancel changes nothing."""
    run = named_run(tula(tmp_path, *tiny_overrides, *AWAY, *LONG))
    other = f"{run.tag}-again-0123456789-train-n1-1"
    slurm.run("sbatch", f"--job-name={other}", "--output=/dev/null", "--wrap=sleep 600")
    wait_training(run)
    assert len(active(slurm)) == 3
    answer = tula(tmp_path, "cancel", run.path.name)
    assert named_run(answer) == run
    assert "2 jobs ended" in answer.stdout
    assert active(slurm) == [other]
    # its controller may have seen the end of the job itself, and judged it
    assert [a.verdict or a.ending for a in Journal(run.journal).state().of("train")] == [Verdict.cancelled]
    assert "cancelled" in tula(tmp_path, "list").stdout
    assert "0 jobs ended" in tula(tmp_path, "cancel", run.path.name).stdout
    assert active(slurm) == [other]


def test_attach_takes_up_what_a_killed_controller_left(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]
):
    """From another folder, after kill -9 on the login node, the run ends with the training that went on meanwhile."""
    arguments = [*tiny_overrides, *SMALL, "training.epochs=100"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tula_hpc", *arguments]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: bool(list(tmp_path.glob("runs/*/train/metrics.jsonl"))), 600, "the training to begin")
        process.kill()
    (run,) = (tmp_path / "runs").glob("*-*")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    finished = named_run(tula(elsewhere, "attach", run.name[:15], f"run_root={tmp_path}/runs"))
    assert finished.path == run
    assert [a.verdict for a in Journal(finished.journal).state().of("train")] == [Verdict.success]
