"""A Slurm that keeps no records and forgets soon still gets right answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tula_hpc.config import Settings
from tula_hpc.control.slurm import SlurmScheduler
from tula_hpc.control.verdicts import QueueState
from tula_hpc.runs import RunFolder

from .cluster import SlurmSettings, ThrowawaySlurm
from .faulty import Tula
from .test_observation import forgotten, sbatch, wait_for


@pytest.fixture(scope="module")
def slurm_settings() -> SlurmSettings:
    return SlurmSettings(num_nodes=2, accounting=False, min_job_age_s=6)


def test_a_job_is_followed_from_waiting_to_forgotten(
    slurm: ThrowawaySlurm, tiny_settings: Callable[..., Settings], run_folder: RunFolder, tmp_path: Path
):
    """It runs, it ends, and when it is forgotten it keeps its end; to a controller that comes later it is absent."""
    settings = tiny_settings("cluster=slurm")
    controller = SlurmScheduler(settings, run_folder)
    assert controller.poll_interval_s == 2  # a third of MinJobAge
    go = tmp_path / "go"
    job = sbatch(slurm, work=f"until [ -e {go} ]; do sleep 0.1; done")
    wait_for(controller, {job: QueueState.running})
    go.touch()
    wait_for(controller, {job: QueueState.completed})
    forgotten(slurm, job)
    wait_for(controller, {job: QueueState.completed})
    late = SlurmScheduler(settings, run_folder)
    wait_for(late, {job: QueueState.absent})
    assert late.find("nothing", 0, [run_folder.attempt("train", 1)], False) is None


def test_a_whole_run_needs_no_accounting(slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]):
    """From the first job to the report, on a Slurm that forgets a job soon after its end."""
    tula = Tula(tmp_path, [*tiny_overrides, "grid.max_nodes=1"])
    tula.start()
    tula.finish()
    assert {tula.verdicts(job)[0] for job in ("profile/n001-b00032", "profile/n001-b00064", "train")} == {"success"}
    assert tula.run.report.exists()
