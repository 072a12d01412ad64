"""What is read from and written to Slurm, as text; no Slurm needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tula_hpc.config import Settings
from tula_hpc.control.scheduler import JobRequest
from tula_hpc.control.slurm import _minutes, _rows, _scrubbed, batch_parameters


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("1:00:00", 60), ("30:00", 30), ("2-00:00:00", 2880), ("1-12:30:00", 2190), ("infinite", None), ("0:59", 0)],
)
def test_time_limits_are_read_as_sinfo_prints_them(limit: str, minutes: int | None):
    """days-hours:minutes:seconds in all its shorter forms, or none."""
    assert _minutes(limit) == minutes


def test_other_peoples_job_names_do_not_matter():
    """A bar in a job's name and a cluster's heading are not ours to fall over."""
    assert _rows("12_0|a|b\nCLUSTER: x\n\n13|plain\n") == [("12_0", "a|b"), ("13", "plain")]


def test_the_environment_of_another_job_does_not_reach_sbatch():
    """Variables of an outer job and a user's habits are dropped; where Slurm is stays known."""
    outer = {"SLURM_CONF": "/c", "HOME": "/h", "SLURM_JOB_ID": "1"}
    kept = _scrubbed({**outer, "SBATCH_ACCOUNT": "a", "SQUEUE_FORMAT": "x", "PMI_RANK": "0"})
    assert kept == {"SLURM_CONF": "/c", "HOME": "/h"}


@pytest.mark.parametrize(
    ("overrides", "present", "absent"),
    [
        (["cluster.gpus_per_node=4"], {"gpus_per_node": "4"}, {"gres", "mem"}),
        (["cluster.gpus_per_node=4", "cluster.gpu_type=h100"], {"gpus_per_node": "h100:4"}, {"gres"}),
        (["cluster.gpus_per_node=4", "cluster.gpu_request=gres"], {"gres": "gpu:4"}, {"gpus_per_node"}),
        (["cluster.gpus_per_node=4", "cluster.gpu_request=none"], {}, {"gpus_per_node", "gres"}),
        (["cluster.memory_gib=1.5"], {"mem": "1536M", "exclusive": True}, {"gres"}),
        (["cluster.exclusive_profiling=false"], {}, {"exclusive"}),
        (["+cluster.sbatch.mail_type=END"], {"additional_parameters": {"no_requeue": True, "mail_type": "END"}}, set()),
    ],
)
def test_each_resource_is_asked_for_in_one_form(
    tiny_settings: Callable[..., Settings], overrides: list[str], present: dict[str, object], absent: set[str]
):
    """GPUs, memory and whole nodes are asked for as the site wants, and what is unset is left out."""
    request = JobRequest("tula-x", (), 2, 4, 15, 4, measures=True)
    parameters = batch_parameters(tiny_settings(*overrides).cluster, request)
    assert present.items() <= parameters.items()
    assert not absent & parameters.keys()
