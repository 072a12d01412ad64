"""From settings to a controller at work: what a command that starts a run does, here or in a Slurm job."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tula_hpc.checks import check, data_is_missing
from tula_hpc.config import ClusterKind, ControllerKind, Settings, Until, read_plain_settings, read_settings, to_plain
from tula_hpc.display import Display
from tula_hpc.errors import ConfigError, RunIsHeld, TulaError
from tula_hpc.runs import RunFolder
from tula_hpc.signatures import signature

if TYPE_CHECKING:
    from tula_hpc.control.scheduler import Scheduler


class RunCancelled(TulaError):
    """A user cancelled the run."""


def start(settings: Settings, command: list[str], display: Display) -> None:
    """Bring the run of these settings to its end, or hand it to a Slurm job that does; a finished run is shown.

    Args:
        settings: As composed.
        command: The command line that reproduces the run.
        display: Where to speak.
    """
    settings = settled(settings, display)
    run = folder_of(settings)
    cancel = cancel_of(run)
    goes_on = run.untrained.exists() and settings.until is not Until.choice
    if run.is_finished and not goes_on:  # shown even where code or data are gone meanwhile
        display.choice(run)
        display.result(run)
        return
    refuse_what_cannot_work(settings)
    if settings.data.download and data_is_missing(settings):
        _download(settings, display)
    run.create()
    if settings.controller.kind is ControllerKind.slurm:
        _send_away(settings, run, command, display, cancel)
        return
    control(settings, run, command, display, cancel)


def control(
    settings: Settings | None, run: RunFolder, command: list[str], display: Display, taken_back: str | None
) -> None:
    """Be the run's controller until it is finished.

    Args:
        settings: Of the run; None: as its folder has them once nobody else works on it, who might have changed them.
        run: Its folder.
        command: The command line that reproduces the run.
        display: Where to speak.
        taken_back: The cancel that a user has seen, or could have, and wants to go on in spite of.

    Raises:
        RunIsHeld: If somebody else is.
        RunCancelled: If a user cancels the run, or has since they wanted it.
    """
    from tula_hpc.control.controller import Controller  # loads pandas, which a finished run can do without
    from tula_hpc.control.lease import controlling

    with controlling(run) as lease:
        settings = settings or read_settings(run)
        scheduler = scheduler_of(settings, run)
        _take_back(taken_back, run, command, display)

        def heartbeat() -> None:
            refuse_cancelled(run)
            lease.refresh()

        try:
            controller = Controller(settings, run, scheduler, display, command, heartbeat)
            try:
                controller.go()
            except RunCancelled:  # the queue may have been looked at before the last job was in it
                scheduler.cancel({a.job_id for a in controller.journal.state().open if a.job_id})
                raise
        except KeyboardInterrupt:
            display.close()
            if scheduler.one_host:
                display.say("the jobs of this machine end, a training saves before; another Ctrl-C ends it at once")
            scheduler.close()
            jobs = "the jobs of this machine have ended" if scheduler.one_host else "its jobs in Slurm go on"
            display.say(
                f"detached from the run; {jobs}. The same command goes on from here, and so does: "
                f"{shown('attach', str(run.path))}"
            )
            sys.exit(130)
        finally:
            scheduler.close()


def shown(*arguments: str) -> str:
    """A command line of ours as a user would type it."""
    return shlex.join(["python", "-m", "tula_hpc", *arguments])


def cancel_of(run: RunFolder) -> str | None:
    """Which cancel is in effect; None if none is. Asked when a command begins: what comes after that is not the
    command's to take back."""
    try:
        return run.cancelled.read_text()
    except FileNotFoundError:
        return None


def refuse_cancelled(run: RunFolder) -> None:
    """
    Raises:
        RunCancelled: If the run is.
    """
    if run.cancelled.exists():
        raise RunCancelled(f"the run was cancelled; to go on with it: {shown('attach', str(run.path))}")


def _take_back(cancel: str | None, run: RunFolder, command: list[str], display: Display) -> None:
    """A user who starts a cancelled run wants it after all, and with it the jobs that ended then. Only for who holds
    the lease; the wish is on record before the mark is gone, so a crash does not lose it.

    Raises:
        RunCancelled: If another cancel came since.
    """
    from tula_hpc.control.journal import Journal

    if cancel is not None and cancel == cancel_of(run):
        Journal(run.journal).started(socket.gethostname(), shlex.join(command), after_cancel=True)
        run.cancelled.unlink(missing_ok=True)
        display.say("this run was cancelled; it goes on now")
    refuse_cancelled(run)


def folder_of(settings: Settings) -> RunFolder:
    return RunFolder.of(settings.run_root, settings.name, signature(settings))


def settled(settings: Settings, display: Display) -> Settings:
    """The settings with `cluster.kind=auto` decided, which is said in one line."""
    from tula_hpc.control import slurm_commands

    if settings.cluster.kind is not ClusterKind.auto:
        return settings
    there, words = slurm_commands.answers()
    display.say(f"cluster: {words}, so jobs {'go to Slurm' if there else 'run on this machine'}")
    kind = ClusterKind.slurm if there else ClusterKind.local
    return replace(settings, cluster=replace(settings.cluster, kind=kind))


def scheduler_of(settings: Settings, run: RunFolder) -> Scheduler:
    from tula_hpc.control.local import LocalScheduler
    from tula_hpc.control.slurm import SlurmScheduler

    on_slurm = settings.cluster.kind is ClusterKind.slurm
    return SlurmScheduler(settings, run) if on_slurm else LocalScheduler(settings)


def _send_away(
    settings: Settings, run: RunFolder, command: list[str], display: Display, taken_back: str | None
) -> None:
    """Submit the controller as a job, unless there is one, and say how to follow it."""
    from tula_hpc.control import away
    from tula_hpc.control.controller import Controller
    from tula_hpc.control.lease import controlling

    try:
        with controlling(run):  # one submission at a time
            job = away.queued_controller(run)
            _take_back(taken_back, run, command, display)
            Controller(settings, run, scheduler_of(settings, run), display, command).write_down_the_run()
            if job is None:
                job_id = away.submit_controller(settings, run)
                display.say(f"the controller is Slurm job {job_id}; this command is not needed any more")
            else:  # it reads the settings when it begins
                display.say(f"the controller is Slurm job {job.job_id} ({job.state.value}) already; none was submitted")
    except RunIsHeld:
        job = away.queued_controller(run)
        if job is None:
            raise
        display.say(f"the controller is Slurm job {job.job_id} ({job.state.value}) already; none was submitted")
        _refuse_other_settings(settings, run)
    for verb, meaning in (
        ("status", "where it is"),
        ("attach", "watch it"),
        ("logs", "what its jobs print"),
        ("cancel", "end it and its jobs"),
    ):
        display.say(f"  {shown(verb, str(run.path))}   # {meaning}")
    display.say(f"run folder: {run.path}")


def _refuse_other_settings(settings: Settings, run: RunFolder) -> None:
    """A controller at work goes on with what it began with.

    Raises:
        TulaError: If other settings are wanted now.
    """
    now = _by_key(read_plain_settings(run))
    other = [f"{key}={value}" for key, value in _by_key(to_plain(settings)).items() if value != now.get(key)]
    if other:
        raise TulaError(
            f"it is at work with other settings, and {', '.join(other)} is not in effect; to have that, "
            f"{shown('cancel', str(run.path))}, and give this command again: nothing that is measured is lost"
        )


def _by_key(plain: dict[str, Any]) -> dict[str, Any]:
    """Plain settings by the names that a command line gives them."""
    groups = {name: value if isinstance(value, dict) else {"": value} for name, value in plain.items()}
    return {f"{name}.{key}".rstrip("."): value for name, group in groups.items() for key, value in group.items()}


def refuse_what_cannot_work(settings: Settings) -> None:
    """Check the settings, and on Slurm the site.

    Raises:
        ConfigError: With every problem that was found.
    """
    from tula_hpc.control import slurm_commands

    problems = check(settings)
    if settings.cluster.kind is ClusterKind.slurm and not problems:
        problems += slurm_commands.check_site(settings)
    if problems:
        raise ConfigError(problems)


def _download(settings: Settings, display: Display) -> None:
    """Fetch the data set in a process of its own: this one stays free of torch."""
    display.say(f"fetching the data set of {settings.workload.name} to {settings.data.root}")
    fetched = subprocess.run(
        [sys.executable, "-m", "tula_hpc.ranks.workloads"],
        input=json.dumps(to_plain(settings)),
        text=True,
        stderr=subprocess.PIPE,
        check=False,
    )
    if fetched.returncode != 0 or data_is_missing(settings):
        raise TulaError(
            f"the data set could not be fetched to {settings.data.root}: "
            f"{(fetched.stderr.strip().splitlines() or ['it is still not there'])[-1]}"
        )
