"""Every result of the paper by its own batch script, at the smallest scale, on the real Slurm."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from tula_hpc.paper.command import RESULTS
from tula_hpc.runs import read_json

from .cluster import SlurmSettings, ThrowawaySlurm, wait_until
from .command import environment

JOBS = Path(__file__).parents[2] / "jobs"
SITE = [
    "cluster=slurm",
    "cluster.poll_interval_s=0.5",
    "cluster.file_lag_s=3",
    "cluster.memory_gib=1",
    "cluster.exclusive_profiling=false",
    "--at-once=2",
]


@pytest.fixture(scope="module")
def slurm_settings() -> SlurmSettings:
    """A requeued job starts again soon."""
    return SlurmSettings(requeue_wait_s=10)


def submit(folder: Path, name: str) -> str:
    """The id of a result's job; the small controllers share one host, and leave the others to what they submit."""
    answer = subprocess.run(
        ["sbatch", "--parsable", "--nodelist=tula-n4", "--mem=1500M", "--time=50", str(JOBS / f"{name}.sbatch"), *SITE],
        cwd=folder,
        env=environment(SCALE="smoke", TULA_PYTHON=sys.executable),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_all_results_come_from_their_jobs(slurm: ThrowawaySlurm, tmp_path: Path):
    """Each leaves its table, picture and page; what two of them need is measured once; one that is told that its time
    is nearly up queues again and goes on."""
    jobs = {name: submit(tmp_path, name) for name in ("table1", *sorted(set(RESULTS) - {"table1"}))}
    results = tmp_path / "runs" / "paper-smoke"

    def printed() -> str:
        return "".join(f"--- {log.name}\n{log.read_text()}"[-2000:] for log in sorted(tmp_path.glob("*.out")))

    own = "*-lars-*.log"  # of a run that no other result needs
    wait_until(lambda: any((results / "logs" / "table1").glob(own)), 900, "a run of Table I", printed)
    slurm.run("scancel", "--batch", "--signal=USR2", jobs["table1"])
    wait_until(lambda: slurm_restarts(slurm, jobs["table1"]) == 1, 600, "the job to queue again", printed)
    wait_until(
        lambda: all((results / f"{name}.json").exists() for name in RESULTS) or ended_badly(slurm, jobs),
        1500,
        "all results",
        printed,
    )
    wait_until(lambda: states(slurm, jobs) == {"COMPLETED"} or ended_badly(slurm, jobs), 300, "the jobs' ends", printed)
    assert states(slurm, jobs) == {"COMPLETED"}, printed()
    for name in RESULTS:
        assert not pd.read_csv(results / f"{name}.csv").empty
        assert (results / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (results / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert RESULTS[name].title in (results / f"{name}.md").read_text()
        assert read_json(results / f"{name}.json")["panels"]
    assert read_json(results / "table1.json")["claims"]["gain"]
    names = [row["NAME"] for row in slurm.squeue("NAME") if "-train-" in row["NAME"]]
    trained = Counter(name.partition("-train-")[0] for name in names)
    assert len(trained) >= 8
    assert {run: times for run, times in trained.items() if times > 1} == {}


def states(slurm: ThrowawaySlurm, jobs: dict[str, str]) -> set[str]:
    found = {row["JOBID"]: row["STATE"] for row in slurm.squeue("JOBID", "STATE")}
    return {found.get(job, "PENDING") for job in jobs.values()}


def ended_badly(slurm: ThrowawaySlurm, jobs: dict[str, str]) -> bool:
    return bool(states(slurm, jobs) & {"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"})


def slurm_restarts(slurm: ThrowawaySlurm, job: str) -> int:
    shown = slurm.run("scontrol", "show", "job", job)
    return int(shown.partition("Restarts=")[2].split()[0])
