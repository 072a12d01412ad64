"""Commands on a run folder: what a user asks of a run from wherever they are."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tula_hpc.composition import run_root_in
from tula_hpc.config import ClusterKind, read_plain_settings
from tula_hpc.display import Display, accuracy_or_loss, candidates_table, duration
from tula_hpc.errors import ConfigError, RecordError, RunIsHeld, SchedulerSilent, TulaError
from tula_hpc.overview import overview, runs_below
from tula_hpc.runs import AttemptFolder, RunFolder, find_run, read_json, write_text
from tula_hpc.signatures import refuse_changed_code
from tula_hpc.starting import RunCancelled, cancel_of, control, refuse_cancelled, shown

# How long a controller may take to leave a run that was cancelled; it looks at its jobs more often than that.
LEAVES_WITHIN_S = 60.0
# A controller job that Slurm starts at once finds the lease still with the command that submitted it.
HANDED_OVER_WITHIN_S = 60.0
WATCH_EVERY_S = 2.0
# How often the queue is asked for a controller that waits in it.
ASK_EVERY_S = 30.0


def status(arguments: list[str], display: Display) -> None:
    """Every job's end, the stages that are done, the choice, how far the training is."""
    from tula_hpc.control.jobs import TRAIN
    from tula_hpc.control.journal import Journal
    from tula_hpc.control.lease import describe, holder_of

    run = _only_a_run("status", arguments)
    state = Journal(run.journal).state()
    for attempt in state.attempts.values():
        end = attempt.verdict or attempt.ending
        word = end.value if end else "has no end on record" if attempt.job_id else "intended"
        detail = f": {attempt.reason}" if end and end.value != "success" else ""
        display.say(
            f"{attempt.job} attempt {attempt.number} [{attempt.job_id or '-'}]: {word.replace('_', ' ')}{detail}"
        )
    stages = {"models fitted": run.fit, "configuration chosen": run.selection, "trained": run.train_result}
    for words, path in {**stages, "report written": run.report}.items():
        display.say(f"{words}: {'yes' if path.exists() else 'not yet'}")
    if run.selection.exists():
        selection = read_json(run.selection)
        display.console.print(candidates_table(selection))
        display.say(selection["reason"])
    if run.progress.exists() and not run.train_result.exists():
        progress = run.read_progress()
        display.say(f"training: {100 * progress['samples'] / progress['of_samples']:.0f} % of the samples")
    for drift in state.drifts:
        display.say(f"{drift['headline']}. {drift['words']}")
    for line in run.read_metrics()[-1:]:
        display.say(f"epoch {line['epoch']}: {accuracy_or_loss(line)}, {duration(line['epoch_s'])}")
    holder = holder_of(run)
    if holder is not None:
        display.say(f"a controller works on it: {describe(holder)}")
    elif not run.is_finished and run.cancelled.exists():
        display.say(f"it was cancelled; to go on with it and its jobs: {shown('attach', str(run.path))}")
    elif not run.is_finished:
        waiting = _waiting_controller(run)
        display.say(waiting or f"no controller works on it; to go on with it: {shown('attach', str(run.path))}")
        cancelled = [job for job in state.cancelled_jobs() if job == TRAIN or not run.selection.exists()]
        if cancelled:
            again = shlex.join([*read_json(run.plan)["command"], "cluster.resubmit_cancelled=true"])
            display.say(f"{', '.join(cancelled)}: cancelled, so not run again unless you say: {again}")
    display.say(f"run folder: {run.path}")


def report(arguments: list[str], display: Display) -> None:
    """Write the report again."""
    from tula_hpc.report import write_report

    run = _only_a_run("report", arguments)
    write_report(run)
    display.say(f"report: {run.report}")
    display.say(f"run folder: {run.path}")


def show_settings(arguments: list[str], display: Display) -> None:
    """Every setting, its default and its meaning."""
    from tula_hpc.composition import describe_settings

    prefix = arguments[0] if arguments else ""
    lines = [line for line in describe_settings() if line.startswith(prefix)]
    if not lines:
        raise ConfigError([f"no setting begins with {prefix!r}; `python -m tula_hpc settings` lists them all"])
    for line in lines:
        display.say(line)


def list_runs(arguments: list[str], display: Display) -> None:
    """One table of all runs."""
    texts, root = run_root_in(arguments)
    if len(texts) > 1:
        raise ConfigError([f"`list` takes one folder of runs: {shown('list')} [FOLDER]"])
    folder = Path(texts[0] if texts else root).expanduser()
    runs = runs_below(folder)
    if not runs:
        raise TulaError(f"there are no runs in {folder.absolute()}; `list FOLDER` looks elsewhere")
    display.console.print(overview(runs))


# --- attach -----------------------------------------------------------------------------------------------------------


def attach(arguments: list[str], display: Display) -> None:
    """Watch a run that somebody works on, and else be its controller."""
    from tula_hpc.control import away
    from tula_hpc.control.lease import holder_of

    run = _only_a_run("attach", arguments)
    cancel = cancel_of(run)
    if run.is_finished:
        display.choice(run)
        display.result(run)
        return
    if away.is_controller_job(run):
        _control_as_a_job(run, display)
        return
    if holder_of(run) is None and _waiting_controller(run) is None:
        command = _where_it_was_begun(run)
        try:
            control(None, run, command, display, cancel)
            return
        except RunIsHeld:  # by somebody who began at the same moment
            pass
    _watch(run, display)


def _where_it_was_begun(run: RunFolder) -> list[str]:
    """Go to the folder that the paths of the run are relative to, with the code it was begun with; gives its command.

    Raises:
        TulaError: If the folder is gone, or the user's files are not what they were.
    """
    plan = read_json(run.plan)
    folder = plan["working_dir"]
    try:
        os.chdir(folder)
    except OSError as error:
        raise TulaError(
            f"{run.path} was begun in {folder}, and its paths are relative to that: {error.strerror}"
        ) from None
    sys.path.insert(0, folder)
    refuse_changed_code(plan.get("own_code", {}), run.path)
    command: list[str] = plan["command"]
    return command


class _TimeIsUp(BaseException):
    """Slurm will end this job soon."""


def _control_as_a_job(run: RunFolder, display: Display) -> None:
    """Be the controller inside the job that was submitted for it; queue again when the time is nearly up."""
    from tula_hpc.control import away

    def time_is_up(*_: object) -> None:
        raise _TimeIsUp

    signal.signal(signal.SIGUSR2, time_is_up)
    deadline = time.monotonic() + HANDED_OVER_WITHIN_S
    try:
        while True:
            if run.cancelled.exists():  # only a user takes that back
                display.say("the run was cancelled; nothing to do")
                return
            try:
                control(None, run, _where_it_was_begun(run), display, taken_back=None)
                return
            except RunIsHeld as error:
                if time.monotonic() > deadline:
                    display.say(f"{error}\nnothing to do here")
                    return
                time.sleep(1)
    except RunCancelled as error:
        display.say(str(error))
    except _TimeIsUp:
        display.close()
        display.say("the time of this job is nearly up; it queues again and goes on then")
        refused = away.queue_again()
        raise TulaError(
            f"this job could not queue itself again: {refused}; go on with: {shown('attach', str(run.path))}"
        ) from None


def _waiting_controller(run: RunFolder) -> str | None:
    """In words, the controller job that waits in the queue or has just begun; None if there is none."""
    from tula_hpc.control import away

    if away.submitted_controller(run) is None:
        return None
    try:
        job = away.queued_controller(run)
    except SchedulerSilent:
        return "Slurm does not answer, so nobody knows whether its controller job is still there"
    return None if job is None else f"its controller is Slurm job {job.job_id}, {job.state.value}"


def _watch(run: RunFolder, display: Display) -> None:
    """Show jobs and progress as the run folder tells them, until the run ends or nobody works on it."""
    from tula_hpc.control.jobs import TRAIN, Look
    from tula_hpc.control.journal import Journal
    from tula_hpc.control.lease import describe, holder_of
    from tula_hpc.control.scheduler import Seen
    from tula_hpc.control.verdicts import QueueState

    events, asked, waiting = -1, time.monotonic(), None
    looks: list[Look] = []
    try:
        holder = holder_of(run)
        who = describe(holder) if holder else "a Slurm job"
        display.say(f"{who} works on {run.path}; Ctrl-C only ends the watching")
        while not run.is_finished:
            if holder_of(run) is not None:
                waiting = None
            elif waiting is None or time.monotonic() - asked > ASK_EVERY_S:
                asked, waiting = time.monotonic(), _waiting_controller(run)
                if waiting is None:
                    break
                display.say(waiting)
            if events != (events := len(list(run.journal.glob("[0-9]*.json")))):
                state = Journal(run.journal).state()
            looks = []
            for attempt in state.attempts.values():
                started = run.attempt(attempt.job, attempt.number).claim.exists()
                seen = Seen(QueueState.running if started else QueueState.pending)
                looks.append(Look(attempt, seen, attempt.verdict))
            if run.selection.exists():
                training = [look for look in looks if look.attempt.job == TRAIN]
                drift = state.drift_of(training[-1].attempt) if training else None
                headline = drift["headline"] if drift else ""
                display.training(training, run.read_progress(), run.read_metrics()[-1:], headline)
            else:
                done = sum(look.verdict is not None for look in looks)
                display.jobs("profiling", looks, done, len(looks), None)
            time.sleep(WATCH_EVERY_S)
    except KeyboardInterrupt:
        display.close()
        display.say("left; the run goes on without you")
        return
    display.close()
    if run.is_finished:
        display.choice(run)
        display.result(run)
    else:
        refuse_cancelled(run)
        raise TulaError(f"nobody works on {run.path} any more; to go on with it: {shown('attach', str(run.path))}")


# --- logs -------------------------------------------------------------------------------------------------------------


def logs(arguments: list[str], display: Display) -> None:
    """Print what one rank of one attempt has said."""
    texts, root = run_root_in(arguments)
    rank: int | None = None
    for place, text in enumerate(texts):
        name, _, value = text.partition("=")
        if name == "--rank":
            value = value or next(iter(texts[place + 1 : place + 2]), "")
            if not value.isdigit():
                raise ConfigError([f"--rank is {value!r}; give the number of a rank, from 0 on"])
            rank = int(value)
            del texts[place : place + (1 if "=" in text else 2)]
            break
    if len(texts) not in (1, 2):
        raise ConfigError([f"`logs` takes one run: {shown('logs')} RUN [JOB] [--rank N]"])
    run = find_run(texts[0], root)
    log = _log_of(run, texts[1] if len(texts) == 2 else None, rank)
    print(f"--- {log}", file=sys.stderr, flush=True)
    with log.open(errors="replace") as file:
        shutil.copyfileobj(file, sys.stdout)


def _log_of(run: RunFolder, wanted: str | None, rank: int | None) -> Path:
    """The log that a user means by the end of a job's name, an attempt (`@2`) and a rank."""
    from tula_hpc.control import away
    from tula_hpc.control.journal import Journal

    if wanted == "controller":
        job_id = away.submitted_controller(run)
        log = None if job_id is None else away.controller_log(run, job_id)
        if log is None or not log.exists():
            raise TulaError(
                f"{run.path} has no log of a controller job: {'it has not begun' if log else 'it has none'}"
            )
        return log
    name, _, number = (wanted or "").partition("@")
    attempts = list(Journal(run.journal).state().attempts.values())
    matching = [
        a
        for a in attempts
        if (not name or a.job == name or a.job.endswith(f"/{name}")) and (not number or str(a.number) == number)
    ]
    if not matching:
        jobs = ", ".join(f"{a.job.rpartition('/')[2]}@{a.number}" for a in attempts) or "none yet"
        raise TulaError(f"{run.path} has no job {wanted or ''}; its jobs are: {jobs}")
    attempt = matching[-1]
    folder = run.attempt(attempt.job, attempt.number)
    if rank is None:
        rank = next((int(error["rank"]) for error in folder.errors()), 0)
    log = _rank_log(run, folder, attempt.job_id or "", rank)
    if log is None:
        there = sorted(folder.path.glob("rank-*.log")) + sorted(run.scheduler.glob(f"{attempt.job_id}_*_log.out"))
        others = f"; there are: {', '.join(p.name for p in there)}" if there else "; it may not have begun"
        raise TulaError(f"{attempt.job} attempt {attempt.number} has no log of rank {rank}{others}")
    return log


def _rank_log(run: RunFolder, folder: AttemptFolder, job_id: str, rank: int) -> Path | None:
    """Of a local rank in its attempt's folder; of Slurm's by job and task below scheduler/."""
    candidates = (folder.rank_log(rank), run.scheduler / f"{job_id}_{rank}_log.out")
    return next((path for path in candidates if path.exists()), None)


# --- cancel -----------------------------------------------------------------------------------------------------------


def cancel(arguments: list[str], display: Display) -> None:
    """End a run's controller and jobs. The mark in the folder comes before that: whoever works on the run submits no
    more."""
    run = _only_a_run("cancel", arguments)
    if run.is_finished:
        display.say(f"{run.path} is finished; there is nothing to cancel")
        return
    on_slurm = read_plain_settings(run).get("cluster", {}).get("kind") == ClusterKind.slurm.name  # of any version
    ended = _queued_now(run) if on_slurm else set()  # its controller may be faster than we, once it finds the mark
    write_text(run.cancelled, uuid.uuid4().hex)
    if on_slurm:
        ended |= _end_queued(run)
    left = _wait_until_it_left(run)
    if on_slurm:  # what it submitted while it was told
        ended |= _end_queued(run)
    if left:
        _note_the_end(run)
    else:
        display.say("its controller has not left yet; it will as soon as it looks at its jobs again")
    display.say(f"cancelled; {len(ended)} jobs ended in Slurm" if on_slurm else "cancelled")
    display.say(f"to go on with it: {shown('attach', str(run.path))}")
    display.say(f"run folder: {run.path}")


def _queued_now(run: RunFolder) -> set[str]:
    """The jobs that Slurm has of the run; none if it does not say."""
    from tula_hpc.control import away

    try:
        return {job.job_id for job in away.jobs_of(run)}
    except SchedulerSilent:
        return set()


def _end_queued(run: RunFolder) -> set[str]:
    """End what Slurm has of the run, and say which jobs those were."""
    from tula_hpc.control import away

    try:
        jobs = away.jobs_of(run)
        away.cancel(jobs)
    except SchedulerSilent as error:
        raise TulaError(
            f"{error}\nJobs of {run.path} may go on; its controller submits no more. Cancel again when Slurm answers "
            "(`scontrol ping`)"
        ) from None
    return {job.job_id for job in jobs}


def _wait_until_it_left(run: RunFolder) -> bool:
    from tula_hpc.control.lease import holder_of

    deadline = time.monotonic() + LEAVES_WITHIN_S
    while holder_of(run) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _note_the_end(run: RunFolder) -> None:
    """Put down why the jobs ended that nobody looks at any more. What they measured before is found at the next start,
    by their files."""
    from tula_hpc.control.journal import Journal
    from tula_hpc.control.lease import controlling
    from tula_hpc.control.verdicts import Verdict

    with controlling(run):
        journal = Journal(run.journal)
        for attempt in journal.state().attempts.values():
            if attempt.verdict is None and attempt.ending is None:
                journal.ending(attempt, Verdict.cancelled, "the run was cancelled")


# --- arguments --------------------------------------------------------------------------------------------------------


def _only_a_run(verb: str, arguments: list[str]) -> RunFolder:
    texts, root = run_root_in(arguments)
    if len(texts) != 1:
        raise ConfigError([f"`{verb}` takes one run: {shown(verb)} RUN [run_root=FOLDER]"])
    return find_run(texts[0], root)


def paper(arguments: list[str], display: Display) -> None:
    """One table or figure of the paper, or a list of them."""
    from tula_hpc.paper.command import paper as measure  # loads matplotlib

    measure(arguments, display)


Verb = Callable[[list[str], Display], None]


def _reading_records(verb: Verb) -> Verb:
    """Records that were edited, or are of another version, may lack what is read of them: that is told in one line."""

    def act(arguments: list[str], display: Display) -> None:
        try:
            verb(arguments, display)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise RecordError(
                f"{' '.join(arguments)}: a record of this run is not as this version writes it ({error!r}); was it "
                "edited, or made by another version?"
            ) from error

    return act


VERBS: dict[str, Verb] = {
    "list": list_runs,
    "status": _reading_records(status),
    "attach": attach,
    "logs": logs,
    "cancel": cancel,
    "report": _reading_records(report),
    "settings": show_settings,
    "paper": paper,
}
