"""Everything that is known of Slurm and of submitit, and nowhere else.

submitit writes the batch files and submits; its opinion of a job's state is not asked (it relies on accounting alone).
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tula_hpc.config import ClusterSettings, GpuRequest, Settings
from tula_hpc.control.scheduler import JobRequest, Seen, tail
from tula_hpc.control.verdicts import QueueState, slurm_state
from tula_hpc.errors import SchedulerSilent, SubmissionRejected, SubmissionUnknown
from tula_hpc.ranks.job import run_attempt
from tula_hpc.ranks.signs import warning_before_end_s
from tula_hpc.runs import AttemptFolder, RunFolder

COMMAND_TIMEOUT_S = 60.0
_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
_SCRUBBED = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SQUEUE|SACCT|SINFO|SCONTROL|SUBMITIT|PMI|PMIX)[A-Z0-9]*_")

# What sbatch says when it does not know itself whether the job was taken: a frozen or restarted controller, a lost
# link.
_NO_ANSWER = re.compile(
    r"timed out|unable to contact|connection (refused|reset)|communication|zero bytes|temporarily|try again|"
    r"could not make sense of sbatch output",
    re.IGNORECASE,
)


def _scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what another job or a user's habits would change in ours."""
    return {k: v for k, v in environment.items() if k in _KEPT_VARIABLES or not _SCRUBBED.match(k)}


@contextmanager
def _clean_environment() -> Iterator[None]:
    before = dict(os.environ)
    for name in before.keys() - _scrubbed(before).keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def _ask(*command: str, text: str = "") -> subprocess.CompletedProcess[str] | None:
    """Run one of Slurm's commands, with `text` on its input; None if it is missing or does not answer in time."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            env=_scrubbed(os.environ),
            input=text,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None


def _rows(text: str) -> list[tuple[str, str]]:
    """Lines of `key|rest`; the rest may hold bars (job names do), and lines without one are headings."""
    pairs = (line.strip().partition("|") for line in text.splitlines())
    return [(key, rest) for key, bar, rest in pairs if bar]


def answers() -> tuple[bool, str]:
    """Whether a Slurm controller can be reached from here, and the sentence that says so."""
    if shutil.which("sbatch") is None:
        return False, "no sbatch on this machine"
    ping = _ask("scontrol", "ping")
    if ping is None or ping.returncode != 0 or " UP" not in ping.stdout:
        return False, "sbatch is here, but no Slurm controller answers"
    version = _ask("sbatch", "--version")
    return True, f"{version.stdout.strip() if version else 'Slurm'} answers"


def check_site(settings: Settings) -> list[str]:
    """What Slurm would not accept of partition, account, qos and node count, with what there is instead."""
    cluster = settings.cluster
    partitions = _partitions()
    problems = []
    if not partitions:
        return ["cluster.kind is slurm and sinfo gives no partition; is Slurm's controller up? (`scontrol ping`)"]
    offered = "; ".join(f"{name}: {nodes} nodes, time limit {limit}" for name, (nodes, limit, _) in partitions.items())
    if cluster.partition is not None and cluster.partition not in partitions:
        problems.append(
            f"cluster.partition is {cluster.partition!r}, which this cluster does not have; it has {offered}"
        )
    elif (name := _partition_used(cluster, partitions)) is not None:
        largest = max(c.num_nodes for c in settings.grid_candidates())
        if largest > partitions[name][0]:
            problems.append(
                f"grid.max_nodes is {settings.grid.max_nodes} and partition {name} has {partitions[name][0]} nodes; "
                f"lower grid.max_nodes or choose another cluster.partition ({offered})"
            )
    else:
        problems.append(f"cluster.partition is not set and this cluster has no default; set it to one of {offered}")
    return problems + _check_association(cluster)


def _partitions() -> dict[str, tuple[int, str, bool]]:
    """Partition -> (nodes, time limit, is the default), as sinfo says."""
    answer = _ask("sinfo", "--noheader", "--summarize", "--format=%P|%D|%l")
    found = {}
    for name, rest in _rows(answer.stdout) if answer is not None and answer.returncode == 0 else []:
        nodes, limit = rest.split("|")
        found[name.rstrip("*")] = (int(nodes), limit, name.endswith("*"))
    return found


def _partition_used(cluster: ClusterSettings, partitions: dict[str, tuple[int, str, bool]]) -> str | None:
    """The partition that is asked for, or the cluster's default one; None if there is neither."""
    default = next((name for name, (_, _, is_default) in partitions.items() if is_default), None)
    return cluster.partition or default


def _minutes(limit: str) -> int | None:
    """Slurm's `days-hours:minutes:seconds` (or minutes:seconds) in whole minutes; None for `infinite`."""
    days, _, clock = limit.rpartition("-")
    fields = clock.split(":")
    if not all(field.isdigit() for field in fields):
        return None
    seconds = 0
    for field in fields:
        seconds = 60 * seconds + int(field)
    return (int(days or 0) * 86400 + seconds) // 60


def _check_association(cluster: ClusterSettings) -> list[str]:
    """Account and qos against what accounting allows this user; nothing to say where there is no accounting."""
    if cluster.account is None and cluster.qos is None:
        return []
    user = getpass.getuser()
    answer = _ask("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account,qos,defaultqos")
    if answer is None or answer.returncode != 0 or not answer.stdout.strip():
        return []
    rows = [line.split("|") for line in answer.stdout.split()]
    accounts = sorted({row[0] for row in rows})
    services = sorted({name for row in rows for name in row[1].split(",") if name})
    problems = []
    if cluster.account is not None and cluster.account not in accounts:
        problems.append(
            f"cluster.account is {cluster.account!r}; {user} may use {', '.join(accounts)} (sacctmgr show assoc)"
        )
    if cluster.qos is not None and services and cluster.qos not in services:
        problems.append(f"cluster.qos is {cluster.qos!r}; {user} may use {', '.join(services)} (sacctmgr show assoc)")
    return problems


class SlurmScheduler:
    """Submits through submitit and asks squeue; works without accounting."""

    name = "Slurm"
    one_host = False

    def __init__(self, settings: Settings, run: RunFolder):
        self.file_lag_s = settings.cluster.file_lag_s
        self._settings = settings
        self._run = run

    def submit(self, request: JobRequest) -> list[str]:
        import submitit

        self._run.scheduler.mkdir(parents=True, exist_ok=True)
        executor = self._executor(request)
        try:
            with _clean_environment():
                jobs = executor.map_array(run_attempt, [str(attempt.path) for attempt in request.attempts])
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            message = _sentence(str(error))
            if _NO_ANSWER.search(message):
                raise SubmissionUnknown(f"sbatch got no answer: {message}") from None
            raise SubmissionRejected(f"Slurm does not accept the job: {message}") from None
        return [job.job_id for job in jobs]

    def batch_text(self, request: JobRequest) -> str:
        """The batch file that `submit` would hand to sbatch."""
        executor = self._executor(request)
        if len(request.attempts) > 1:
            executor.parameters["map_count"] = len(request.attempts)
        return executor._make_submission_file_text(executor._submitit_command_str, "plan")

    def why_rejected(self, request: JobRequest) -> str | None:
        answer = _ask("sbatch", "--test-only", text=self.batch_text(request))
        if answer is None or answer.returncode == 0 or _NO_ANSWER.search(answer.stderr):
            return None
        return _sentence(answer.stderr)

    def longest_job_min(self) -> int | None:
        partitions = _partitions()
        name = _partition_used(self._settings.cluster, partitions)
        return None if name not in partitions else _minutes(partitions[name][1])

    def _executor(self, request: JobRequest) -> Any:
        import submitit

        executor = submitit.SlurmExecutor(self._run.scheduler, python=self._settings.cluster.python)
        executor.update_parameters(**batch_parameters(self._settings.cluster, request))
        return executor

    def find(self, tag: str, index: int, attempt: AttemptFolder) -> str | None:
        answer = _ask("squeue", "--me", "-r", "-h", "-t", "all", "--format=%i|%j")
        if answer is None or answer.returncode != 0:
            raise SchedulerSilent("squeue does not answer")
        ids = [job_id for job_id, name in _rows(answer.stdout) if name == tag]
        job_id = next((i for i in ids if i.endswith(f"_{index}") or ("_" not in i and index == 0)), None)
        if job_id is not None:
            self._hand_over(job_id, attempt)
        return job_id

    def _hand_over(self, job_id: str, attempt: AttemptFolder) -> None:
        """Give a job its work. submitit does so after sbatch has answered; a job whose answer got lost still waits."""
        from submitit.core.utils import DelayedSubmission, JobPaths

        paths = JobPaths(self._run.scheduler, job_id=job_id)
        if paths.submitted_pickle.exists():
            return
        work = DelayedSubmission(run_attempt, str(attempt.path))
        work.set_timeout(0, 0)  # ours to watch
        unfinished = self._run.scheduler / f".{job_id}.pkl"
        work.dump(unfinished)
        unfinished.replace(paths.submitted_pickle)

    def states(self, job_ids: Collection[str]) -> Mapping[str, Seen] | None:
        answer = _ask("squeue", "--me", "-r", "-h", "-t", "all", "--format=%i|%T")
        if answer is None or answer.returncode != 0:
            return None
        states = {job_id: slurm_state(state) for job_id, state in _rows(answer.stdout)}
        return {job_id: Seen(states.get(job_id, QueueState.absent)) for job_id in job_ids}

    def max_attempts(self) -> int | None:
        return None

    def jobs_in_queue(self) -> int | None:
        return None

    def broken_hosts(self, hosts: Collection[str]) -> list[str]:
        return []

    def memory_gib_per_node(self) -> float | None:
        return None

    def cancel(self, job_ids: Collection[str]) -> None:
        if job_ids:
            _ask("scancel", *sorted(job_ids))

    def log_tail(self, attempt: AttemptFolder, job_id: str) -> str:
        logs = sorted(self._run.scheduler.glob(f"{job_id}_*_log.*"))
        return "\n".join(tail(log.read_text(errors="replace")) for log in logs)

    def close(self) -> None:
        """Jobs go on without us."""


def batch_parameters(cluster: ClusterSettings, request: JobRequest) -> dict[str, Any]:
    """The parameters of a request in submitit's words. Exactly one form of each resource, unset ones left out."""
    parameters: dict[str, Any] = {
        "job_name": request.tag,
        "comment": request.tag,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "time": request.time_limit_min,
        "nodes": request.num_nodes,
        "ntasks_per_node": request.ranks_per_node,
        "cpus_per_task": cluster.cpus_per_rank,
        "mem": None if cluster.memory_gib is None else f"{round(cluster.memory_gib * 1024)}M",
        "array_parallelism": request.max_running,
        "signal_delay_s": warning_before_end_s(request.time_limit_min),
        "stderr_to_stdout": True,
        "setup": cluster.setup or None,
        # one failing rank ends the job; some Slurm versions do not pass the number of cores on to srun
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={cluster.cpus_per_rank}", *cluster.srun_args],
        # the controller relaunches; two owners of that decision would run the job twice
        "additional_parameters": {"no_requeue": True, **cluster.sbatch},
        "exclusive": True if request.measures and cluster.exclusive_profiling else None,
    }
    if cluster.gpus_per_node > 0 and cluster.gpu_request is not GpuRequest.none:
        amount = f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else str(cluster.gpus_per_node)
        if cluster.gpu_request is GpuRequest.gres:
            parameters["gres"] = f"gpu:{amount}"
        else:
            parameters["gpus_per_node"] = amount
    return {key: value for key, value in parameters.items() if value is not None}


def _sentence(message: str) -> str:
    """Slurm's message without the name of the program and empty lines."""
    lines = [re.sub(r"^(sbatch|allocation failure)(: error)?: ", "", line.strip()) for line in message.splitlines()]
    return "; ".join(line for line in lines if line)
