"""What is read from and written to Slurm, as text; no Slurm needed."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tula_hpc.candidates import Candidate
from tula_hpc.config import ProfilingKind, Settings
from tula_hpc.control import slurm, slurm_commands
from tula_hpc.control.packing import submissions
from tula_hpc.control.scheduler import JobRequest
from tula_hpc.control.slurm import Trial, batch_parameters, read_trial, refusal
from tula_hpc.control.slurm_commands import (
    answers,
    billed,
    broken_hosts,
    max_array_elements,
    memory_gib_per_node,
    minutes,
    poll_interval_s,
    read_billing,
    rows,
    scrubbed,
)
from tula_hpc.errors import SchedulerSilent, SubmissionLimited, SubmissionRejected, SubmissionUnknown
from tula_hpc.models.pricing import ServiceUnitPrice, read_billing_weights
from tula_hpc.planning import sharing_compared, trial_words
from tula_hpc.ranks.packed import run_attempts
from tula_hpc.runs import RunFolder


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
    """What one submission needs goes before what the cluster's settings say; hosts that a site leaves out stay so."""
    request = JobRequest("tula-x", (), 2, 4, 15, 4, memory_gib=3, excluded_hosts=("n1", "n7"))
    settings = tiny_settings("cluster.memory_gib=1.5", "+cluster.sbatch.exclude='n[3-4]'")
    parameters = batch_parameters(settings.cluster, request)
    assert (parameters["mem"], parameters["exclude"]) == ("3072M", "n1,n7,n[3-4]")
    assert parameters["additional_parameters"] == {"no_requeue": True}
    assert batch_parameters(settings.cluster, replace(request, excluded_hosts=()))["exclude"] == "n[3-4]"


@pytest.mark.parametrize(
    ("says", "there"),
    [
        ("Slurmctld(primary) at a is UP\n", True),
        ("Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP\n", True),
        ("", False),
    ],
)
def test_slurm_is_taken_where_it_answers(command: Callable[..., Path], says: str, there: bool):
    """And this machine where none is configured."""
    command("sbatch", "slurm 22.05.8\n")
    command("scontrol", says, code=0 if there else 1)
    assert answers()[0] is there


def test_a_slurm_that_does_not_answer_is_not_taken_for_none(command: Callable[..., Path]):
    """The same command would begin another run, on the login node."""
    command("sbatch")
    command("scontrol", "Slurmctld(primary) at a is DOWN\n")
    with pytest.raises(SchedulerSilent, match="cluster=slurm or cluster=local"):
        answers()


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose clock shows nine hours more than UTC."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


STARTS = "sbatch: Job 12 to start at 2026-11-28T12:00:00 using 4 processors on nodes n[1-4] in partition main\n"


@pytest.mark.parametrize(
    ("returncode", "stderr", "trial"),
    [
        (0, STARTS, Trial(True, start_s=datetime(2026, 11, 28, 3, tzinfo=timezone.utc).timestamp())),
        (0, "", Trial(True)),
        (0, "sbatch: Job 12 to start at N/A using 4 processors\n", Trial(True)),
        (1, "allocation failure: Requested node configuration is not available\n", None),
        (1, "sbatch: error: Batch job submission failed: Unable to contact slurm controller\n", Trial(False)),
    ],
)
def test_a_trial_is_read_as_slurm_prints_it(in_tokyo: None, returncode: int, stderr: str, trial: Trial | None):
    """The start is in local time; without one, with a refusal, and without an answer are three other things."""
    refused = Trial(True, refused="Requested node configuration is not available")
    assert read_trial(returncode, stderr) == (trial or refused)


def test_a_start_in_the_past_is_no_negative_wait():
    """A job that could start now waits for 0 s."""
    assert Trial(True, start_s=time.time() - 5).wait_s == 0.0


@pytest.mark.parametrize(
    ("answered", "refused", "wait_s", "words"),
    [
        (True, None, 3 * 3600.0, "accepted. Slurm's estimate, a hint: would start in about 3.0 h"),
        (True, None, 0.0, "accepted. Slurm's estimate, a hint: would start at once"),
        (True, None, None, "accepted, without an estimate of the start"),
        (True, "Invalid account", None, "Invalid account"),
        (False, None, None, "no answer"),
    ],
)
def test_plan_tells_what_slurm_says(answered: bool, refused: str | None, wait_s: float | None, words: str):
    """Accepted with a hint of the start, refused, and silent read differently."""
    assert trial_words(answered, refused, wait_s) == words


def test_plan_compares_the_ways_to_share_jobs(tiny_settings: Callable[..., Settings]):
    """Fewer jobs hold their nodes longer, and one for all leaves nodes idle; node-hours and lengths say so."""
    settings = tiny_settings("search.max_seconds=60")
    grid = [Candidate(n, b) for n in (1, 4) for b in (16, 32)]
    lines = sharing_compared(settings, {kind: submissions(settings, kind, grid) for kind in ProfilingKind})
    assert lines[1:] == [
        "  array (this plan): 4 jobs, up to about 0.33 node-hours, the longest holds 4 nodes for up to about 2.0 min",
        "  packed: 2 jobs, up to about 0.33 node-hours, the longest holds 4 nodes for up to about 4.0 min",
        "  single: 1 job, up to about 0.53 node-hours, the longest holds 4 nodes for up to about 8.0 min",
    ]


def test_a_lost_job_of_several_attempts_is_found_and_gets_all_its_work(
    run_folder: RunFolder, tiny_settings: Callable[..., Settings], command: Callable[..., Path]
):
    """Whichever of its attempts is looked for, the one job is found by its tag and handed the whole list once."""
    command("squeue", "56_0|PENDING|None||tula-y\n57|PENDING|None||tula-x\n")
    command("scontrol")
    run_folder.scheduler.mkdir()
    folders = [run_folder.attempt(f"profile/n001-b000{batch}", 1) for batch in (16, 32, 64)]
    scheduler = slurm.SlurmScheduler(tiny_settings(), run_folder)
    assert [scheduler.find("tula-x", index, folders, True) for index in range(3)] == ["57"] * 3
    work = pickle.loads((run_folder.scheduler / "57_submitted.pkl").read_bytes())
    assert work.function is run_attempts
    assert work.args == ([str(folder.path) for folder in folders],)


# Slurm 22.05 under PriorityFlags=MAX_TRES, four nodes of 64 CPUs and 500 GiB.
PARTITION = """PartitionName=gpu
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=YES QoS=N/A
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=g[1-4]
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=OFF
   State=UP TotalCPUs=256 TotalNodes=4 SelectTypeParameters=NONE
   JobDefaults=(null)
   DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
   TRES=cpu=256,mem=2000G,node=4,billing=500
   TRESBillingWeights=CPU=1.0,Mem=0.25G
"""


def test_a_partitions_billing_weights_are_read():
    """They are the rest of their line, and a partition without any bills its cores, as Slurm does."""
    assert read_billing(PARTITION) == "CPU=1.0,Mem=0.25G"
    assert read_billing(PARTITION.replace("   TRESBillingWeights=CPU=1.0,Mem=0.25G\n", "")) == "CPU=1"


def test_units_are_those_that_slurm_bills():
    """The whole partition has the 500 units that Slurm itself prints for it."""
    price = ServiceUnitPrice(read_billing_weights(read_billing(PARTITION)), {"cpu": 64, "mem": 500}, billed="largest")
    assert price.units_per_node_hour * 4 == 500


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("MAX_TRES", "largest"),
        ("CALCULATE_RUNNING,MAX_TRES", "largest"),
        ("MAX_TRES_GRES", "largest and gres"),
        ("", "sum"),
        ("(null)", "sum"),
    ],
)
def test_the_sites_flag_says_what_is_billed(monkeypatch: pytest.MonkeyPatch, flags: str, what: str):
    """MAX_TRES or MAX_TRES_GRES among the priority flags, in any place."""
    monkeypatch.setattr(slurm_commands, "site_config", lambda: {"PriorityFlags": flags})
    assert billed() == what


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.partition='gpu,large'"], None),
        (["cluster.partition='gpu,none'"], "'gpu,none', which this cluster does not have (none); it has gpu: 4 nodes"),
        (["cluster.partition=gpu"], "partition gpu has 4 nodes"),
        (["cluster.partition='gpu,large'", "pricing=service_units"], "cluster.partition names several"),
    ],
)
def test_several_partitions_may_be_asked_for(
    command: Callable[..., Path], tiny_settings: Callable[..., Settings], overrides: list[str], words: str | None
):
    """With commas between, as sbatch takes them; the largest bounds the nodes."""
    command("sinfo", "gpu*|4|1:00:00\nlarge|8|1:00:00\n")
    problems = slurm_commands.check_site(tiny_settings("cluster=slurm", "grid.max_nodes=8", *overrides))
    assert len(problems) == (words is not None)
    assert all(words in problem for problem in problems if words)


@pytest.mark.parametrize(
    ("partition", "expected"), [("gpu", 60), ("large", None), ("gpu,large", 60), ("gpu,short", 30), (None, None)]
)
def test_a_job_may_take_what_all_of_its_partitions_allow(partition: str | None, expected: int | None):
    """The shortest limit counts, as Slurm may start it in any of them."""
    limits = {"gpu": "1:00:00", "large": "infinite", "short": "30:00"}
    offered = {name: slurm_commands.Partition(4, limit, False) for name, limit in limits.items()}
    assert slurm_commands.longest_job_min(partition, offered) == expected


def test_weights_that_the_settings_leave_open_are_refused_before_anything_is_submitted(
    monkeypatch: pytest.MonkeyPatch, tiny_settings: Callable[..., Settings]
):
    """A partition that charges memory wants cluster.memory_gib, and silence is not taken for a price."""
    settings = tiny_settings("cluster=slurm", "pricing=service_units")
    offered = {"gpu": slurm_commands.Partition(4, "1-00:00:00", True)}
    monkeypatch.setattr(slurm_commands, "partitions", lambda: offered)
    monkeypatch.setattr(slurm_commands, "answer_of", lambda *_: PARTITION)
    (problem,) = slurm_commands.check_site(settings)
    assert "TRESBillingWeights=CPU=1.0,Mem=0.25G" in problem
    assert "set cluster.memory_gib" in problem
    settings.cluster.memory_gib = 8.0
    assert slurm_commands.check_site(settings) == []
    monkeypatch.setattr(slurm_commands, "answer_of", lambda *_: None)
    (problem,) = slurm_commands.check_site(settings)
    assert "does not answer" in problem
