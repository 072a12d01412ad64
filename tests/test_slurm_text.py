"""What is read from and written to Slurm, as text; no Slurm needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tula_hpc.config import Settings
from tula_hpc.control.scheduler import JobRequest
from tula_hpc.control.slurm import batch_parameters, refusal
from tula_hpc.control.slurm_commands import (
    broken_hosts,
    max_array_elements,
    memory_gib_per_node,
    minutes,
    poll_interval_s,
    rows,
    scrubbed,
)
from tula_hpc.errors import SubmissionLimited, SubmissionRejected, SubmissionUnknown


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("1:00:00", 60), ("30:00", 30), ("2-00:00:00", 2880), ("1-12:30:00", 2190), ("infinite", None), ("0:59", 0)],
)
def test_time_limits_are_read_as_sinfo_prints_them(limit: str, expected: int | None):
    """days-hours:minutes:seconds in all its shorter forms, or none."""
    assert minutes(limit) == expected


def test_other_peoples_job_names_do_not_matter():
    """A bar in a job's name and a cluster's heading are not ours to fall over."""
    assert rows("12_0|a|b\nCLUSTER: x\n\n13|plain\n", 2) == [["12_0", "a|b"], ["13", "plain"]]


def test_the_environment_of_another_job_does_not_reach_sbatch():
    """Variables of an outer job and a user's habits are dropped; where Slurm is stays known."""
    outer = {"SLURM_CONF": "/c", "HOME": "/h", "SLURM_JOB_ID": "1"}
    kept = scrubbed({**outer, "SBATCH_ACCOUNT": "a", "SQUEUE_FORMAT": "x", "PMI_RANK": "0"})
    assert kept == {"SLURM_CONF": "/c", "HOME": "/h"}


POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)
FULL = "Slurm temporarily unable to accept job, sleeping and retrying"


@pytest.mark.parametrize(
    ("message", "meaning"),
    [
        ("Batch job submission failed: Invalid job array specification", SubmissionLimited),
        (f"AssocMaxSubmitJobLimit; {POLICY}", SubmissionLimited),
        (f"QOSMaxSubmitJobPerUserLimit; {POLICY}", SubmissionLimited),
        (POLICY, SubmissionLimited),
        (f"QOSMaxWallDurationPerJobLimit; {POLICY}", SubmissionRejected),
        (f"{FULL}; Batch job submission failed: Resource temporarily unavailable", SubmissionLimited),
        (f"{FULL}; Batch job submission failed: Socket timed out on send/recv operation", SubmissionUnknown),
        ("Batch job submission failed: Resource temporarily unavailable", SubmissionUnknown),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", SubmissionUnknown),
        ("Batch job submission failed: Requested node configuration is not available", SubmissionRejected),
    ],
)
def test_a_limit_a_refusal_and_a_lost_answer_are_told_apart(message: str, meaning: type[Exception]):
    """A limit on the number of jobs can be waited for, a limit on one job cannot, and silence is neither."""
    assert refusal(message) is meaning


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        ("MaxArraySize = 1001\n", 1001),
        ("MaxArraySize = 1001\nSchedulerParameters = bf_interval=1,max_array_tasks=50\n", 50),
        ("MaxArraySize = 0\n", 1),
        ("", None),
    ],
)
def test_the_size_of_an_array_is_the_sites(command: Callable[..., Path], config: str, elements: int | None):
    """The smaller of two limits counts; where there are no arrays a submission is one job; silence is no limit."""
    command("scontrol", config)
    assert max_array_elements() == elements


@pytest.mark.parametrize(
    ("min_job_age", "wished_s", "interval_s"),
    [("300 sec", 30, 30), ("60 sec", 30, 20), ("2 sec", 30, 1), ("2 sec", 0.5, 0.5), ("0 sec", 30, 30)],
)
def test_the_queue_is_looked_at_before_slurm_forgets(
    command: Callable[..., Path], min_job_age: str, wished_s: float, interval_s: float
):
    """Three times within MinJobAge but not more than once a second, unless more is wished; 0 forgets nothing."""
    command("scontrol", f"MinJobAge = {min_job_age}\n")
    assert poll_interval_s(wished_s) == interval_s


def test_the_configuration_is_asked_once(command: Callable[..., Path]):
    """However often it is wanted, an answer is kept."""
    log = command("scontrol", "MaxArraySize = 7\nMinJobAge = 300 sec\n")
    assert (max_array_elements(), poll_interval_s(5), max_array_elements()) == (7, 5, 7)
    assert len(log.read_text().splitlines()) == 1


def test_broken_hosts_are_those_that_cannot_take_a_job(command: Callable[..., Path]):
    """Down, drained, failing or silent in any partition; sleeping, planned and busy ones are not broken."""
    states = ["a|down", "b|drained", "c|draining", "d|idle*", "e|failing", "f|idle~", "g|mixed-", "h|allocated"]
    command("sinfo", "\n".join(states))
    assert broken_hosts(["h", "e", "f", "b", "a", "d", "g", "c", "x"]) == ["e", "b", "a", "d", "c"]


@pytest.mark.parametrize(("sizes", "gib"), [("4096\n2048\n", 2.0), ("1\n", None), ("", None)])
def test_the_smallest_nodes_memory_counts(
    command: Callable[..., Path], tiny_settings: Callable[..., Settings], sizes: str, gib: float | None
):
    """A site that describes no memory says 1 MiB of every node, which is nothing."""
    command("sinfo", sizes)
    assert memory_gib_per_node(tiny_settings("cluster.partition=main").cluster) == gib


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


def test_a_request_may_ask_for_more_memory_and_leave_hosts_out(tiny_settings: Callable[..., Settings]):
    """What one submission needs goes before what the cluster's settings say."""
    request = JobRequest("tula-x", (), 2, 4, 15, 4, memory_gib=3, excluded_hosts=("n1", "n7"))
    parameters = batch_parameters(tiny_settings("cluster.memory_gib=1.5").cluster, request)
    assert (parameters["mem"], parameters["exclude"]) == ("3072M", "n1,n7")
