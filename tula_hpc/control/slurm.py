"""Jobs on Slurm: submitted through submitit, which nothing else knows, and observed through Slurm's own commands.

submitit writes the batch files and submits; its opinion of a job's state is not asked (it relies on accounting alone).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tula_hpc.config import ClusterSettings, GpuRequest, Settings
from tula_hpc.control import slurm_commands
from tula_hpc.control.scheduler import JobRequest, Seen, tail
from tula_hpc.control.slurm_commands import ask
from tula_hpc.control.slurm_queue import SlurmQueue
from tula_hpc.errors import SchedulerSilent, SubmissionLimited, SubmissionRejected, SubmissionUnknown
from tula_hpc.ranks.job import run_attempt
from tula_hpc.ranks.packed import run_attempts
from tula_hpc.ranks.signs import warning_before_end_s
from tula_hpc.runs import AttemptFolder, RunFolder

# What sbatch says when it does not know itself whether the job was taken: a frozen or restarted controller, a lost
# link.
_NO_ANSWER = re.compile(
    r"timed out|unable to contact|connection (refused|reset)|communication|zero bytes|temporarily|try again|"
    r"could not make sense of sbatch output",
    re.IGNORECASE,
)
# A Slurm that holds as many jobs as it can says so, and sbatch asks again for two minutes before it gives up.
_FULL = re.compile(r"[^;\n]*(unable to accept job|queue full|creation temporarily disabled)[^;\n]*", re.IGNORECASE)
_FULL_AT_LAST = "Resource temporarily unavailable"
_TOO_MANY = re.compile(r"invalid job array specification|submit\w*limit|job violates accounting/qos", re.IGNORECASE)
_OF_ALL_USERS = re.compile(r"Grp|unable to accept job|queue full|temporarily", re.IGNORECASE)
# Accounting's refusals end in one sentence for all limits; most versions name the one that was meant before it.
_NAMED_LIMIT = re.compile(r"\b(?:Assoc|QOS)\w+Limit\b")


def refusal(message: str) -> type[SubmissionRejected] | type[SubmissionUnknown]:
    """What it means that sbatch failed with this message."""
    is_full = _FULL.search(message) is not None
    rest = _FULL.sub("", message).replace(_FULL_AT_LAST, "") if is_full else message
    if _NO_ANSWER.search(rest):
        return SubmissionUnknown
    named = _NAMED_LIMIT.findall(rest)
    too_many = _TOO_MANY.search(rest) is not None and (not named or any("Submit" in limit for limit in named))
    return SubmissionLimited if is_full or too_many else SubmissionRejected


@dataclass(frozen=True)
class Trial:
    """What `sbatch --test-only` says of a request."""

    answered: bool
    refused: str | None = None
    """Slurm's words if it would not take the job."""
    start_s: float | None = None
    """When Slurm guesses that the job would start, seconds since the epoch."""

    @property
    def wait_s(self) -> float | None:
        """Seconds from now to the guessed start; None without a guess."""
        return None if self.start_s is None else max(0.0, self.start_s - time.time())


# Local time, as `sbatch --test-only` prints it when nothing in the environment asks for another form.
_START = re.compile(r"Job \d+ to start at (\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2})")


def read_trial(returncode: int, stderr: str) -> Trial:
    """The answer of `sbatch --test-only`, which speaks on stderr whatever it says."""
    if returncode != 0:
        message = sentence(stderr)
        meaning = refusal(message)
        # a limit on the number of jobs is waited for
        return Trial(meaning is not SubmissionUnknown, refused=message if meaning is SubmissionRejected else None)
    start = _START.search(stderr)
    return Trial(True, start_s=None if start is None else datetime.fromisoformat(start[1]).timestamp())


class SlurmScheduler:
    """Submits through submitit and asks squeue; works without accounting."""

    name = "Slurm"
    one_host = False

    def __init__(self, settings: Settings, run: RunFolder):
        self.file_lag_s = settings.cluster.file_lag_s
        self._settings = settings
        self._run = run
        self._queue = SlurmQueue(settings.cluster.poll_interval_s)

    @property
    def poll_interval_s(self) -> float:
        return slurm_commands.poll_interval_s(self._settings.cluster.poll_interval_s)

    def submit(self, request: JobRequest) -> list[str]:
        import submitit

        self._run.scheduler.mkdir(parents=True, exist_ok=True)
        executor = self._executor(request)
        try:
            with slurm_commands.clean_environment():
                paths = [str(attempt.path) for attempt in request.attempts]
                if request.one_after_another:
                    jobs = [executor.submit(run_attempts, paths)] * len(paths)
                else:
                    jobs = executor.map_array(run_attempt, paths)
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            message = sentence(str(error))
            meaning = refusal(message)
            words = "sbatch got no answer" if meaning is SubmissionUnknown else "Slurm does not accept the job"
            if meaning is SubmissionLimited:
                raise SubmissionLimited(f"{words}: {message}", _OF_ALL_USERS.search(message) is not None) from None
            raise meaning(f"{words}: {message}") from None
        job_ids = [job.job_id for job in jobs]
        self._queue.expect(job_ids)
        return job_ids

    def batch_text(self, request: JobRequest) -> str:
        """The batch file that `submit` would hand to sbatch."""
        executor = self._executor(request)
        if len(request.attempts) > 1 and not request.one_after_another:
            executor.parameters["map_count"] = len(request.attempts)
        return executor._make_submission_file_text(executor._submitit_command_str, "plan")

    def try_out(self, request: JobRequest) -> Trial:
        """Ask Slurm what it would do with the request, without submitting it."""
        answer = ask("sbatch", "--test-only", text=self.batch_text(request))
        return Trial(False) if answer is None else read_trial(answer.returncode, answer.stderr)

    def why_rejected(self, request: JobRequest) -> str | None:
        return self.try_out(request).refused

    def expected_wait_s(self, request: JobRequest) -> float | None:
        return self.try_out(request).wait_s

    def longest_job_min(self, node_type: str) -> int | None:
        partitions = slurm_commands.partitions()
        name = slurm_commands.partition_used(self._settings.of_type(node_type).cluster, partitions)
        return slurm_commands.longest_job_min(name, partitions)

    def max_attempts(self) -> int | None:
        return slurm_commands.max_array_elements()

    def jobs_in_queue(self) -> int | None:
        return self._queue.num_active()

    def _executor(self, request: JobRequest) -> Any:
        import submitit

        cluster = self._settings.of_type(request.node_type).cluster
        executor = submitit.SlurmExecutor(self._run.scheduler, python=cluster.python)
        executor.update_parameters(**batch_parameters(cluster, request))
        return executor

    def find(self, tag: str, index: int, attempts: Sequence[AttemptFolder], one_after_another: bool) -> str | None:
        ids = self._queue.named(tag)
        if ids is None:
            raise SchedulerSilent("squeue does not answer")
        if not ids:
            return None
        # one element of an array is enough to know the others, which may be over and forgotten
        array, underscore, _ = ids[0].partition("_")
        is_array = not one_after_another and (underscore or index > 0)
        job_id = f"{array}_{index}" if is_array else array
        paths = [str(attempt.path) for attempt in attempts]
        work = (run_attempts, paths) if one_after_another else (run_attempt, paths[index])
        self._hand_over(job_id, *work)
        return job_id

    def _hand_over(self, job_id: str, function: Callable[..., None], argument: Any) -> None:
        """Give a job its work. submitit does so after sbatch has answered; a job whose answer got lost still waits."""
        from submitit.core.utils import DelayedSubmission, JobPaths

        paths = JobPaths(self._run.scheduler, job_id=job_id)
        if paths.submitted_pickle.exists():
            return
        work = DelayedSubmission(function, argument)
        work.set_timeout(0, 0)  # ours to watch
        unfinished = self._run.scheduler / f".{job_id}.pkl"
        work.dump(unfinished)
        unfinished.replace(paths.submitted_pickle)

    def states(self, job_ids: Collection[str]) -> Mapping[str, Seen] | None:
        return self._queue.states(job_ids)

    def broken_hosts(self, hosts: Collection[str]) -> list[str]:
        return slurm_commands.broken_hosts(hosts)

    def memory_gib_per_node(self, node_type: str) -> float | None:
        return slurm_commands.memory_gib_per_node(self._settings.of_type(node_type).cluster)

    def cancel(self, job_ids: Collection[str]) -> None:
        if job_ids:
            ask("scancel", *sorted(job_ids))

    def log_tail(self, attempt: AttemptFolder, job_id: str) -> str:
        # attempts that share a job have logs of their own, unless the job ended before
        own = sorted(attempt.path.glob("rank-*.log"))
        logs = own or sorted(self._run.scheduler.glob(f"{job_id}_*_log.*"))
        return "\n".join(tail(log.read_text(errors="replace")) for log in logs)

    def close(self) -> None:
        """Jobs go on without us."""


def batch_parameters(cluster: ClusterSettings, request: JobRequest) -> dict[str, Any]:
    """The parameters of a request in submitit's words. Exactly one form of each resource, unset ones left out."""
    memory_gib = request.memory_gib or cluster.memory_gib
    further = dict(cluster.sbatch)
    excluded = [*request.excluded_hosts, str(further.pop("exclude", None) or "")]
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
        "mem": None if memory_gib is None else f"{round(memory_gib * 1024)}M",
        "exclude": ",".join(filter(None, excluded)) or None,
        "array_parallelism": request.max_running,
        "signal_delay_s": warning_before_end_s(request.time_limit_min),
        "stderr_to_stdout": True,
        "setup": cluster.setup or None,
        # one failing rank ends the job; some Slurm versions do not pass the number of cores on to srun
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={cluster.cpus_per_rank}", *cluster.srun_args],
        # the controller relaunches; two owners of that decision would run the job twice
        "additional_parameters": {"no_requeue": True, **further},
        "exclusive": True if request.measures and cluster.exclusive_profiling else None,
    }
    if cluster.gpus_per_node > 0 and cluster.gpu_request is not GpuRequest.none:
        amount = f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else str(cluster.gpus_per_node)
        if cluster.gpu_request is GpuRequest.gres:
            parameters["gres"] = f"gpu:{amount}"
        else:
            parameters["gpus_per_node"] = amount
    return {key: value for key, value in parameters.items() if value is not None}


def sentence(message: str) -> str:
    """Slurm's message without the name of the program and empty lines."""
    lines = [re.sub(r"^(sbatch|allocation failure)(: error)?: ", "", line.strip()) for line in message.splitlines()]
    return "; ".join(line for line in lines if line)
