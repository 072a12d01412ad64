"""Slurm's commands as they are run and read: in a clean environment, as text, and what a site says about itself."""

from __future__ import annotations

import getpass
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tula_hpc.config import ClusterSettings, PricingKind, Settings
from tula_hpc.errors import SchedulerSilent

if TYPE_CHECKING:  # it loads numpy
    from tula_hpc.models.pricing import Billed

COMMAND_TIMEOUT_S = 60.0
CONFIG_RETRY_S = 60.0
"""How long a site that would not tell its configuration is not asked for it again."""
_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
_SCRUBBED = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SQUEUE|SACCT|SINFO|SCONTROL|SUBMITIT|PMI|PMIX)[A-Z0-9]*_")
# Of a host, as sinfo prints it; a star anywhere means that it does not respond.
_BROKEN = re.compile(r"down|drain|fail|error|inval|unknown|.*\*", re.IGNORECASE)


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what another job or a user's habits would change in ours."""
    return {k: v for k, v in environment.items() if k in _KEPT_VARIABLES or not _SCRUBBED.match(k)}


@contextmanager
def clean_environment() -> Iterator[None]:
    """Inside the block this process has the scrubbed environment."""
    before = dict(os.environ)
    for name in before.keys() - scrubbed(before).keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def ask(*command: str, text: str = "", timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str] | None:
    """Run one of Slurm's commands, with `text` on its input; None if it cannot run or does not answer in time."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",  # other people's job names come in any encoding
            timeout=timeout_s,
            check=False,
            env=scrubbed(os.environ),
            input=text,
        )
    except (OSError, subprocess.TimeoutExpired):  # OSError also where a login node allows no further process
        return None


def answer_of(*command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str | None:
    """What a command printed; None if it failed, could not run or did not answer in time."""
    answer = ask(*command, timeout_s=timeout_s)
    return answer.stdout if answer is not None and answer.returncode == 0 else None


def rows(text: str, num_fields: int) -> list[list[str]]:
    """Lines of fields between bars; the last field may hold bars, and lines with fewer fields are headings."""
    split = (line.split("|", num_fields - 1) for line in text.splitlines())
    return [fields for fields in split if len(fields) == num_fields]


def answers() -> tuple[bool, str]:
    """Whether a Slurm controller can be reached from here, and the sentence that says so.

    Raises:
        SchedulerSilent: If there is one that does not answer: a run that began with it would go on without.
    """
    if shutil.which("sbatch") is None:
        return False, "no sbatch on this machine"
    ping = ask("scontrol", "ping")
    if ping is None or (" DOWN" in ping.stdout and " UP" not in ping.stdout):
        raise SchedulerSilent(
            "Slurm's controller does not answer (scontrol ping), so cluster=auto cannot tell where jobs go; try again, "
            "or say cluster=slurm or cluster=local"
        )
    if " UP" not in ping.stdout:
        return False, "sbatch is here, but no Slurm is configured"
    return True, f"{(answer_of('sbatch', '--version') or 'Slurm').strip()} answers"


_configs: dict[str, tuple[float, dict[str, str]]] = {}


def site_config() -> Mapping[str, str]:
    """Slurm's configuration, asked once a process; empty where it is not told."""
    source = os.environ.get("SLURM_CONF", "")
    good_until, config = _configs.get(source, (0.0, {}))
    if time.monotonic() >= good_until:
        lines = (answer_of("scontrol", "show", "config") or "").splitlines()
        pairs = (line.partition("=") for line in lines)
        config = {key.strip(): value.strip() for key, equals, value in pairs if equals}
        _configs[source] = (float("inf") if config else time.monotonic() + CONFIG_RETRY_S, config)
    return config


def _config_number(key: str) -> int | None:
    """The number that a value such as `300 sec` begins with."""
    found = re.match(r"\d+", site_config().get(key, ""))
    return int(found.group()) if found else None


def poll_interval_s(wished_s: float) -> float:
    """Seconds between two looks at the queue: as wished, but three before Slurm forgets a job that has ended."""
    forgets_s = forgets_after_s()
    return min(wished_s, max(1.0, forgets_s / 3)) if forgets_s is not None else wished_s


def forgets_after_s() -> float | None:
    """How long Slurm tells of a job that has ended; infinite if it never forgets, None if it does not say."""
    age_s = _config_number("MinJobAge")
    return math.inf if age_s == 0 else age_s


def has_accounting() -> bool:
    """Whether this site keeps records that sacct can read."""
    return "slurmdbd" in site_config().get("AccountingStorageType", "")


def max_array_elements() -> int | None:
    """How many elements an array may have that counts from 0; None if the site does not tell."""
    size = _config_number("MaxArraySize")
    tasks = re.search(r"max_array_tasks=(\d+)", site_config().get("SchedulerParameters", ""))
    limits = [limit for limit in (size, int(tasks.group(1)) if tasks else None) if limit is not None]
    return max(1, min(limits)) if limits else None


@dataclass(frozen=True)
class Partition:
    """One partition as sinfo describes it."""

    num_nodes: int
    time_limit: str
    is_default: bool


def partitions() -> dict[str, Partition]:
    """The partitions by name; empty if Slurm does not answer."""
    found = {}
    answer = answer_of("sinfo", "--noheader", "--all", "--summarize", "--format=%P|%D|%l")  # --all: hidden ones as well
    for name, nodes, limit in rows(answer or "", 3):
        found[name.rstrip("*")] = Partition(int(nodes), limit, name.endswith("*"))
    return found


def partition_used(cluster: ClusterSettings, offered: Mapping[str, Partition]) -> str | None:
    """The partition that is asked for (or several, with commas between), or the cluster's default one; None if there is
    neither."""
    return cluster.partition or next((name for name, partition in offered.items() if partition.is_default), None)


def longest_job_min(partition: str | None, offered: Mapping[str, Partition]) -> int | None:
    """Minutes that a job may take in the partition, or in each of several; None where nothing bounds it or is known."""
    limits = [minutes(offered[name].time_limit) for name in (partition or "").split(",") if name in offered]
    return min((limit for limit in limits if limit is not None), default=None)


def memory_gib_per_node(cluster: ClusterSettings) -> float | None:
    """Host memory of the smallest node of the partition in use, GiB; None if the site does not say."""
    name = partition_used(cluster, partitions())
    if name is None:
        return None
    sizes = (answer_of("sinfo", "--noheader", "--exact", f"--partition={name}", "--format=%m") or "").split()
    smallest_mib = min((int(size) for size in sizes if size.isdigit()), default=1)
    return smallest_mib / 1024 if smallest_mib > 1 else None  # 1 is what Slurm takes where a site says nothing


def billing_weights(cluster: ClusterSettings) -> str | None:
    """TRESBillingWeights of the partition in use; None if Slurm does not answer."""
    name = partition_used(cluster, partitions())
    answer = None if name is None else answer_of("scontrol", "show", "partition", name)
    return None if answer is None else read_billing(answer)


def read_billing(text: str) -> str:
    """The weights in the answer of `scontrol show partition`; a partition without any bills its cores."""
    found = re.search(r"\bTRESBillingWeights=(\S+)", text)
    return "CPU=1" if found is None or found.group(1) == "(null)" else found.group(1)


def billed() -> Billed:
    """What of a job's weighted resources is billed."""
    flags = site_config().get("PriorityFlags", "").upper().split(",")
    if "MAX_TRES_GRES" in flags:
        return "largest and gres"
    return "largest" if "MAX_TRES" in flags else "sum"


def broken_hosts(hosts: Collection[str]) -> list[str]:
    """Those of the hosts that are down, drained, failing or silent; none if Slurm does not answer."""
    if not hosts:
        return []
    asked = ("sinfo", "--all", "--Node", "--noheader", f"--nodes={','.join(hosts)}", "--format=%N|%T")
    broken = {name for name, state in rows(answer_of(*asked) or "", 2) if _BROKEN.match(state)}
    return [host for host in hosts if host in broken]


def minutes(limit: str) -> int | None:
    """Slurm's `days-hours:minutes:seconds` (or minutes:seconds) in whole minutes; None for `infinite`."""
    days, _, clock = limit.rpartition("-")
    fields = clock.split(":")
    if not all(field.isdigit() for field in fields):
        return None
    seconds = 0
    for field in fields:
        seconds = 60 * seconds + int(field)
    return (int(days or 0) * 86400 + seconds) // 60


def check_site(settings: Settings) -> list[str]:
    """What Slurm would not accept of partition, account, qos and node count, with what there is instead."""
    there = partitions()
    if not there:
        return ["cluster.kind is slurm and sinfo gives no partition; is Slurm's controller up? (`scontrol ping`)"]
    found = []
    for node_type in settings.node_types:
        about = f"node type {node_type}: " if node_type else ""
        found += [about + problem for problem in _check_nodes(settings.of_type(node_type), there)]
    return found


def _check_nodes(settings: Settings, there: Mapping[str, Partition]) -> list[str]:
    """The same for one type of node."""
    cluster, problems = settings.cluster, []
    offered = "; ".join(f"{name}: {p.num_nodes} nodes, time limit {p.time_limit}" for name, p in there.items())
    name = partition_used(cluster, there)
    names = [] if name is None else name.split(",")
    if unknown := [each for each in names if each not in there]:
        which = "" if len(names) == 1 else f" ({', '.join(unknown)})"
        problems.append(
            f"cluster.partition is {cluster.partition!r}, which this cluster does not have{which}; it has {offered}"
        )
    elif names:
        largest, available = (
            max(c.num_nodes for c in settings.grid_candidates()),
            max(there[n].num_nodes for n in names),
        )
        if largest > available:
            problems.append(
                f"grid.max_nodes is {settings.grid.max_nodes} and partition {name} has {available} nodes; "
                f"lower grid.max_nodes or choose another cluster.partition ({offered})"
            )
    else:
        problems.append(f"cluster.partition is not set and this cluster has no default; set it to one of {offered}")
    return problems + _check_association(cluster) + ([] if problems else _check_billing(settings))


def _check_billing(settings: Settings) -> list[str]:
    """Whether a price in service units can be made of what the partition charges."""
    pricing = settings.pricing
    if pricing.kind is not PricingKind.service_units or pricing.billing_weights is not None:
        return []
    from tula_hpc.prices import service_units

    if "," in (settings.cluster.partition or ""):
        several = f"cluster.partition names several ({settings.cluster.partition}), which may charge differently"
        return [f"pricing.billing_weights is null and {several}; give weights, or one partition"]
    weights = billing_weights(settings.cluster)
    if weights is None:
        return ["pricing.billing_weights is null and `scontrol show partition` does not answer; give weights, or wait"]
    try:
        service_units(settings.cluster, weights)
    except ValueError as error:
        return [f"pricing.billing_weights is null and the partition has TRESBillingWeights={weights}: {error}"]
    return []


def _check_association(cluster: ClusterSettings) -> list[str]:
    """Account and qos against what accounting allows this user; nothing to say where there is no accounting."""
    if cluster.account is None and cluster.qos is None:
        return []
    user = getpass.getuser()
    answer = answer_of("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account,qos,defaultqos")
    if not (answer or "").strip():
        return []
    allowed = [line.split("|") for line in (answer or "").split()]
    accounts = sorted({row[0] for row in allowed})
    services = sorted({name for row in allowed for name in row[1].split(",") if name})
    problems = []
    if cluster.account is not None and cluster.account not in accounts:
        problems.append(
            f"cluster.account is {cluster.account!r}; {user} may use {', '.join(accounts)} (sacctmgr show assoc)"
        )
    if cluster.qos is not None and services and cluster.qos not in services:
        problems.append(f"cluster.qos is {cluster.qos!r}; {user} may use {', '.join(services)} (sacctmgr show assoc)")
    return problems
