"""The command line.

python -m tula_hpc                                  the quickstart
python -m tula_hpc +experiment=NAME key=value ...   a run; -m for a sweep over comma-separated values
python -m tula_hpc plan ...                         what that run would submit; submits nothing
python -m tula_hpc status RUN                       where a run is
python -m tula_hpc report RUN                       write its report again
python -m tula_hpc settings [PREFIX]                every setting, its meaning and default
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tula_hpc import __version__
from tula_hpc.checks import check, data_is_missing
from tula_hpc.composition import compose, compose_each, is_plain
from tula_hpc.config import ClusterKind, ProfilingKind, Settings, conf_dir, signature, to_plain
from tula_hpc.display import Display, candidates_table, duration
from tula_hpc.errors import ConfigError, TulaError
from tula_hpc.runs import RunFolder, find_run, read_json

HELP = """\
tula_hpc {version}: how many nodes, which batch size, what will it cost, and will the accuracy survive?

  python -m tula_hpc                                  quickstart: the whole loop on this machine in a few minutes
  python -m tula_hpc +experiment=NAME key=value ...   profile, fit, choose, train, report
  python -m tula_hpc plan +experiment=NAME ...        show what would be submitted; submits nothing
  python -m tula_hpc status RUN                       where a run is; RUN is its folder or the beginning of its name
  python -m tula_hpc report RUN                       write its report again
  python -m tula_hpc settings [PREFIX]                every setting with its meaning and default
  python -m tula_hpc -m +experiment=NAME grid.max_nodes=4,8    one run for each value

The same command finds the same run folder: what is done is not repeated, and a finished run prints its result.
Choices (GROUP=NAME; a folder of your own with such files is added by --config-dir FOLDER):

{groups}

Examples
  python -m tula_hpc +experiment=resnet50_imagenet cluster=mysite --config-dir ~/tula data.root=/datasets
  python -m tula_hpc plan +experiment=resnet50_imagenet data=synthetic grid.max_nodes=8 objective=cost
Hydra's own options, such as --cfg job (print the composed configuration), work as well.
"""


def main(arguments: list[str] | None = None) -> None:
    """Entry of `python -m tula_hpc` and `tula-hpc`; leaves with 0, 1 (the run failed) or 2 (the command is wrong)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    verb = arguments[0] if arguments else ""
    display = Display()
    for ending in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal ends the command as Ctrl-C does
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup
            signal.signal(ending, _interrupt)
    if os.getcwd() not in sys.path:  # `python -m` puts it there, the console command does not
        sys.path.insert(0, os.getcwd())
    try:
        if verb in ("-h", "--help", "help"):
            print(HELP.format(version=__version__, groups=_groups()))
        elif verb == "--version":
            print(__version__)
        elif verb in _FOLDER_VERBS:
            _FOLDER_VERBS[verb](arguments[1:], display)
        elif verb == "plan":
            _for_each_run(arguments[1:], display, lambda settings: _plan(settings, display))
        elif verb and verb[0].isalpha() and "=" not in verb:
            known = ", ".join(["plan", *_FOLDER_VERBS])
            raise ConfigError([f"{verb!r} is not a command; there are {known}, and settings look like key=value"])
        else:
            _for_each_run(arguments, display, lambda settings: _run(settings, arguments, display))
    except KeyboardInterrupt:
        display.close()
        display.say("interrupted; the same command goes on from here (jobs in Slurm stay, local ones ended)")
        sys.exit(130)
    except TulaError as error:
        display.close()
        print(f"tula_hpc: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except OSError as error:  # the user's disk or folder, not a mistake of ours: no traceback
        if error.filename is None:
            raise
        display.close()
        print(f"tula_hpc: {error.filename}: {error.strerror}; see run_root and data.root", file=sys.stderr)
        sys.exit(1)
    finally:
        display.close()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _groups() -> str:
    """The configuration groups and what they offer."""
    lines = []
    for folder in sorted(p for p in conf_dir().iterdir() if p.is_dir()):
        plus = "+" if folder.name == "experiment" else ""
        lines.append(f"  {plus + folder.name:12} {', '.join(sorted(p.stem for p in folder.glob('*.yaml')))}")
    return "\n".join(lines)


def _for_each_run(arguments: list[str], display: Display, act: Callable[[Settings], None]) -> None:
    """Compose the settings and act on them; in a sweep on each, going on when one fails."""
    if not any(a.lstrip("+").partition("=")[0] == "experiment" for a in arguments):
        arguments = [*arguments, "+experiment=quickstart"]
    if is_plain(arguments):
        act(compose(arguments))
        return
    failures: list[TulaError] = []

    def act_and_go_on(settings: Settings) -> None:
        try:
            act(settings)
        except TulaError as error:
            print(f"tula_hpc: {error}", file=sys.stderr)
            failures.append(error)
        finally:
            display.close()

    compose_each(arguments, act_and_go_on)
    if failures:
        sys.exit(1)


def _run(settings: Settings, arguments: list[str], display: Display) -> None:
    settings = _settled(settings, display)
    run = _folder(settings)
    if run.is_finished:  # shown even where code or data are gone meanwhile
        display.choice(run)
        display.result(run)
        return
    _refuse_what_cannot_work(settings)
    if settings.data.download and data_is_missing(settings):
        _download(settings, display)
    from tula_hpc.control.controller import Controller  # loads pandas, which a finished run can do without
    from tula_hpc.control.lease import controlling
    from tula_hpc.control.local import LocalScheduler
    from tula_hpc.control.slurm import SlurmScheduler

    run.create()
    on_slurm = settings.cluster.kind is ClusterKind.slurm
    scheduler = SlurmScheduler(settings, run) if on_slurm else LocalScheduler(settings)
    command = ["python", "-m", "tula_hpc", *arguments]
    with controlling(run) as lease:
        try:
            Controller(settings, run, scheduler, display, command, lease.refresh).go()
        finally:
            scheduler.close()


def _folder(settings: Settings) -> RunFolder:
    return RunFolder.of(settings.run_root, settings.name, signature(settings))


def _settled(settings: Settings, display: Display) -> Settings:
    """The settings with `cluster.kind=auto` decided, which is said in one line."""
    from tula_hpc.control import slurm_commands

    if settings.cluster.kind is not ClusterKind.auto:
        return settings
    there, words = slurm_commands.answers()
    display.say(f"cluster: {words}, so jobs {'go to Slurm' if there else 'run on this machine'}")
    kind = ClusterKind.slurm if there else ClusterKind.local
    return replace(settings, cluster=replace(settings.cluster, kind=kind))


def _refuse_what_cannot_work(settings: Settings) -> None:
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


def _plan(settings: Settings, display: Display) -> None:
    """Candidates, jobs, node-hours and cost of the first round of profiling, and the text sbatch would get."""
    from tula_hpc.control.controller import Controller, price_of, profiling_requests
    from tula_hpc.control.local import LocalScheduler
    from tula_hpc.control.slurm import SlurmScheduler
    from tula_hpc.plan_words import sharing_compared, trial_words

    settings = _settled(settings, display)
    _refuse_what_cannot_work(settings)
    run = _folder(settings)
    on_slurm = settings.cluster.kind is ClusterKind.slurm
    scheduler = SlurmScheduler(settings, run) if on_slurm else LocalScheduler(settings)
    with _scratch_journal(run) as scratch:
        controller = Controller(settings, scratch, scheduler, display, [])
        requests = profiling_requests(controller)
    grid = settings.grid_candidates()
    wanted = [candidate for _, submission in requests for candidate in submission.candidates]
    display.say(f"{len(grid)} candidates: {', '.join(c.name for c in grid)}")
    display.say(f"search={settings.search.mode.name} profiles {len(wanted)} of them in {len(requests)} submissions:")
    about = atmost = 0.0
    for request, submission in requests:
        names = ", ".join(c.name for c in submission.candidates)
        at_once = 1 if scheduler.one_host else request.max_running
        how = "one after the other in one job" if submission.one_after_another else f"up to {at_once} at once"
        display.say(f"  {request.num_nodes} nodes x {request.ranks_per_node} ranks: {names} ({how})")
        about += submission.node_hours(settings)
        atmost += submission.num_jobs * request.num_nodes * (submission.time_limit_min or 0) / 60
    price = settings.pricing.price_per_node_hour
    cost = f", {settings.pricing.currency}{about * price:.2f} at {price} a node-hour"
    known = cost if settings.pricing.kind.name == "node_hour" else "; its price depends on the memory it will show"
    display.say(
        f"profiling takes up to about {about:.2f} node-hours{known}; the time limits allow {atmost:.1f} at most"
    )
    if not scheduler.one_host:
        for line in sharing_compared(settings, {kind: controller.submissions(kind, wanted) for kind in ProfilingKind}):
            display.say(line)
    display.say(f"objective={settings.objective.kind.name}, price: {price_of(settings).describe()}")
    display.say(f"the run folder would be {run.path}")
    if isinstance(scheduler, SlurmScheduler):
        for request, _ in requests:
            display.say(f"\n--- sbatch gets, for {request.num_nodes} nodes:\n{scheduler.batch_text(request)}")
            trial = scheduler.try_out(request)
            display.say(f"--- sbatch --test-only: {trial_words(trial.answered, trial.refused, trial.wait_s)}")
    display.say("nothing was submitted")


@contextmanager
def _scratch_journal(run: RunFolder) -> Iterator[RunFolder]:
    """A run folder of the same name that goes away again: planning leaves nothing behind."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="tula-plan-") as folder:
        yield RunFolder(Path(folder) / run.path.name)


def _status(arguments: list[str], display: Display) -> None:
    from tula_hpc.control.journal import Journal

    run = _run_argument("status", arguments)
    attempts = Journal(run.journal).state().attempts.values()
    for attempt in attempts:
        word = attempt.verdict.value if attempt.verdict else "has no end on record" if attempt.job_id else "intended"
        detail = f": {attempt.reason}" if attempt.verdict and attempt.verdict.value != "success" else ""
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
        progress = read_json(run.progress)
        display.say(f"training: {100 * progress['samples'] / progress['of_samples']:.0f} % of the samples")
    for line in run.read_metrics()[-1:]:
        display.say(f"epoch {line['epoch']}: test accuracy {line['test_top1']:.2f} %, {duration(line['epoch_s'])}")
    display.say(f"a controller works on it: {'yes' if run.lease.exists() else 'no; the command that began it goes on'}")
    display.say(f"run folder: {run.path}")


def _report(arguments: list[str], display: Display) -> None:
    from tula_hpc.report import write_report

    run = _run_argument("report", arguments)
    write_report(run)
    display.say(f"report: {run.report}")
    display.say(f"run folder: {run.path}")


def _run_argument(verb: str, arguments: list[str]) -> RunFolder:
    if len(arguments) != 1:
        raise ConfigError([f"`{verb}` takes one run: {shlex.join(['python', '-m', 'tula_hpc', verb])} RUN"])
    return find_run(arguments[0])


def _settings(arguments: list[str], display: Display) -> None:
    from tula_hpc.composition import describe_settings

    prefix = arguments[0] if arguments else ""
    lines = [line for line in describe_settings() if line.startswith(prefix)]
    if not lines:
        raise ConfigError([f"no setting begins with {prefix!r}; `python -m tula_hpc settings` lists them all"])
    for line in lines:
        display.say(line)


_FOLDER_VERBS: dict[str, Callable[[list[str], Display], Any]] = {
    "status": _status,
    "report": _report,
    "settings": _settings,
}
