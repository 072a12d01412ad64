"""What a run has in Slurm's queue, and the controller itself as a small job there.

The job runs `attach RUN`. Its name is the same for every submission of the run, so one that is in the queue is found
whatever became of the answer to sbatch, and Slurm may start it again: it goes on from the run folder.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tula_hpc.config import ClusterSettings, ControllerSettings, Settings
from tula_hpc.control import slurm_commands
from tula_hpc.control.slurm import refusal, sentence
from tula_hpc.control.slurm_commands import answer_of, ask, rows
from tula_hpc.control.verdicts import QueueState, slurm_state
from tula_hpc.errors import RecordError, SchedulerSilent, SubmissionRejected, SubmissionUnknown
from tula_hpc.runs import RunFolder, read_json, write_json

# How long before its end the job is warned: time to leave the run in order and to queue again.
WARNED_S = 120
# Jobs ended by one scancel, so that a large run does not flood Slurm's controller.
CANCELLED_AT_ONCE = 50
# How long after an answer that lacks a job Slurm is asked for it again, and how long what is found then counts.
ASKED_AGAIN_AFTER_S = 5.0
REMEMBERED_S = 60.0
# How long it is waited for a controller job that leaves its node to be gone, or back in the queue.
TIDIED_WITHIN_S = 60.0
# What scancel says of a job that was faster.
_OVER_BEFORE = re.compile(r"^.*(already complet|invalid job id).*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Queued:
    """A job of a run that is in Slurm's queue."""

    job_id: str
    """With the task of an array: `42_1`."""
    name: str
    state: QueueState
    leaves: bool
    """Whether its processes have ended and its node is tidied up; then it ends, or waits again if it was requeued."""

    @property
    def is_controller(self) -> bool:
        return self.name.endswith("-controller")


def jobs_of(run: RunFolder) -> list[Queued]:
    """The jobs of one run that have not ended, and of no other run, however similar its name.

    Raises:
        SchedulerSilent: If Slurm does not answer.
    """
    return [job for job in _known_of(run) if not job.leaves]


def _known_of(run: RunFolder) -> list[Queued]:
    """As `jobs_of`, with those that leave."""
    answer = answer_of("squeue", "--me", "-r", "-h", "-t", "all", "--format=%i|%T|%j")
    if answer is None:
        raise SchedulerSilent("Slurm does not answer (squeue), so nobody knows which jobs of the run it has; try again")
    ours = re.compile(rf"{re.escape(run.tag)}-((profile|probe|train)-n\d+-[0-9a-f-]+|controller)")
    return [
        Queued(job_id, name, slurm_state(state), leaves=state == "COMPLETING")
        for job_id, state, name in rows(answer, 3)
        if ours.fullmatch(name) and slurm_state(state).active
    ]


_has_ended: dict[str, tuple[float, bool]] = {}
"""What was found out of a job, and until when that is not asked again: many ask, again and again."""


def has_ended(job_id: str) -> bool:
    """Whether Slurm has the job among those that ended, or does not have it twice in a row: a Slurm that was just
    started may lack jobs in one answer. May be a minute old."""
    good_until, ended = _has_ended.get(job_id, (0.0, False))
    if time.monotonic() >= good_until:
        state = _state(job_id)
        if state is QueueState.absent:
            time.sleep(ASKED_AGAIN_AFTER_S)
            state = _state(job_id)
        ended = state is not None and not state.active
        _has_ended[job_id] = time.monotonic() + REMEMBERED_S, ended
    return ended


def _state(job_id: str) -> QueueState | None:
    """Where a job of this user's is; None if Slurm does not answer."""
    answer = answer_of("squeue", "--me", "-h", "-t", "all", "--format=%A|%T")
    if answer is None:
        return None
    states = [slurm_state(state) for i, state in rows(answer, 2) if i == job_id]
    return next((state for state in states if state.active), states[0] if states else QueueState.absent)


def cancel(jobs: list[Queued]) -> None:
    """End jobs, arrays as a whole; the controller first, so that it does not answer by submitting.

    Raises:
        SchedulerSilent: If Slurm did not take it.
    """
    ordered = sorted(jobs, key=lambda job: not job.is_controller)
    ids = list(dict.fromkeys(job.job_id.partition("_")[0] for job in ordered))
    for start in range(0, len(ids), CANCELLED_AT_ONCE):
        answer = ask("scancel", *ids[start : start + CANCELLED_AT_ONCE])
        if answer is None:
            raise SchedulerSilent("scancel does not answer")
        words = sentence(_OVER_BEFORE.sub("", answer.stderr or f"code {answer.returncode}"))
        if answer.returncode != 0 and words:
            raise SchedulerSilent(f"scancel failed: {words}")


# --- the controller as a job ------------------------------------------------------------------------------------------


def controller_name(run: RunFolder) -> str:
    return f"{run.tag}-controller"


def is_controller_job(run: RunFolder) -> bool:
    """Whether this process is the controller that was submitted for the run."""
    if "SLURM_JOB_ID" not in os.environ:
        return False
    try:
        name = read_json(run.controller_job)["name"]  # as on the login node: a path may resolve otherwise here
    except RecordError:
        return False
    return os.environ.get("SLURM_JOB_NAME") == name


def controller_log(run: RunFolder, job_id: str) -> Path:
    return run.scheduler / f"{job_id}_controller.out"


def queued_controller(run: RunFolder) -> Queued | None:
    """The run's controller job if it waits or runs; where it is leaving its node, as one that queues again is first,
    this waits to see which.

    Raises:
        SchedulerSilent: If Slurm does not answer.
    """
    deadline = time.monotonic() + TIDIED_WITHIN_S
    while True:
        found = [job for job in _known_of(run) if job.is_controller]
        there = next((job for job in found if not job.leaves), None)
        if there is not None or not found or time.monotonic() > deadline:
            return there
        time.sleep(1)


def submit_controller(settings: Settings, run: RunFolder) -> str:
    """Submit the run's controller and return the job's id. The caller has seen that none is queued, and keeps others
    from doing the same.

    Raises:
        SubmissionRejected: If Slurm does not take it.
        SubmissionUnknown: If nobody knows; the same command looks again.
    """
    run.scheduler.mkdir(parents=True, exist_ok=True)
    intent = {"name": controller_name(run), "intended": time.time(), "job_id": None}
    write_json(run.controller_job, intent)
    answer = ask("sbatch", *_options(settings, run), text=_script(settings, run))
    words = "" if answer is None else sentence(answer.stderr)
    if answer is not None and answer.returncode == 0:
        job_id = answer.stdout.strip().partition(";")[0]
    elif answer is None or refusal(words) is SubmissionUnknown:
        job = queued_controller(run)
        if job is None:
            raise SubmissionUnknown(
                f"sbatch got no answer for the controller job ({words or 'it took too long'}), and it is not in the "
                "queue now; the same command looks for it again before it submits another"
            )
        job_id = job.job_id
    else:
        raise SubmissionRejected(f"Slurm does not accept the controller job (settings controller.*): {words}")
    write_json(run.controller_job, {**intent, "job_id": job_id})
    return job_id


def submitted_controller(run: RunFolder) -> str | None:
    """The id of the controller job that was submitted last; None if there was none."""
    try:
        return read_json(run.controller_job)["job_id"]
    except RecordError:
        return None


def queue_again() -> str:
    """Put the job that this process is in back into the queue. Slurm then ends the process; if not, say why."""
    answer = ask("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
    if answer is None or answer.returncode != 0:
        return "scontrol does not answer" if answer is None else sentence(answer.stderr)
    time.sleep(WARNED_S)  # Slurm's signal comes in the middle of this
    return "scontrol requeue was taken, and nothing came of it"


def _options(settings: Settings, run: RunFolder) -> list[str]:
    cluster, controller = _cluster_of_controller(settings), settings.controller
    name = controller_name(run)
    wanted = {
        "job-name": name,
        "comment": name,
        "partition": controller.partition or cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": 1,
        "mem": f"{round(controller.memory_gib * 1024)}M",
        "time": _time_limit_min(settings, controller),
        # to the batch shell, which has become the controller by then
        "signal": f"B:USR2@{WARNED_S}",
        "open-mode": "append",
        "chdir": os.getcwd(),
        "export": "ALL",
        "output": str(controller_log(run, "{id}")).replace("%", "%%").replace("{id}", "%j"),
    }
    return ["--parsable", "--requeue", *(f"--{key}={value}" for key, value in wanted.items() if value is not None)]


def _cluster_of_controller(settings: Settings) -> ClusterSettings:
    """Partition, account and qos where the controller has none of its own: a site whose nodes are of several types may
    name them for each type only."""
    shared = settings.cluster.partition is not None
    return settings.cluster if shared else settings.of_type(settings.node_types[0]).cluster


def _time_limit_min(settings: Settings, controller: ControllerSettings) -> int:
    partitions = slurm_commands.partitions()
    name = controller.partition or slurm_commands.partition_used(_cluster_of_controller(settings), partitions)
    longest = slurm_commands.longest_job_min(name, partitions)
    return min(controller.time_limit_min, longest or controller.time_limit_min)


def _script(settings: Settings, run: RunFolder) -> str:
    python = settings.controller.python or shlex.quote(sys.executable)
    # exec, so that signals to the batch shell reach the controller
    command = f"exec {python} -u -m tula_hpc attach {shlex.quote(str(run.path))}"
    return "\n".join(["#!/bin/bash", *settings.cluster.setup, command]) + "\n"
