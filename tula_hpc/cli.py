"""The command line: entry, help, and who does what. What the commands do is in `starting` and `verbs`."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tula_hpc import __version__, verbs
from tula_hpc.checks import check
from tula_hpc.composition import compose, compose_each, is_plain, sweep
from tula_hpc.config import ClusterKind, Settings, conf_dir
from tula_hpc.display import Display
from tula_hpc.errors import ConfigError, RunIsHeld, TulaError
from tula_hpc.methods import METHODS
from tula_hpc.overview import is_in_good_hands, overview
from tula_hpc.planning import plan
from tula_hpc.runs import RunFolder
from tula_hpc.starting import folder_of, settled, start

HELP = """\
tula_hpc {version}: how many nodes, which batch size, what will it cost, and will the accuracy survive?

  python -m tula_hpc                                  quickstart: the whole loop on this machine in a few minutes
  python -m tula_hpc +experiment=NAME key=value ...   profile, fit, choose, train, report
  python -m tula_hpc plan +experiment=NAME ...        show what would be submitted; submits nothing
  python -m tula_hpc -m +experiment=NAME grid.max_nodes=4,8    one run for each value, and a table of them
  python -m tula_hpc paper [NAME|claims] ...          a table or figure of the paper, measured again
  python -m tula_hpc settings [PREFIX]                every setting with its meaning and default

  RUN is a run's folder or the beginning of its name; run_root=FOLDER says where to look, if not in runs
  python -m tula_hpc list [FOLDER]                    all runs: stage, controller, choice, prediction, accuracy
  python -m tula_hpc status RUN                       where a run is
  python -m tula_hpc attach RUN                       watch it; go on with it if nobody works on it
  python -m tula_hpc logs RUN [JOB] [--rank N]        what a job printed: of the rank that failed first, else of rank 0
  python -m tula_hpc cancel RUN                       end its controller and its jobs, and nobody else's
  python -m tula_hpc report RUN                       write its report again

The same command finds the same run folder: what is done is not repeated, and a finished run prints its result.
With controller=slurm it hands the run to a small Slurm job and returns at once.
Choices (GROUP=NAME; a folder of your own with such files is added by --config-dir FOLDER):

{groups}

Methods (method=NAME; `settings method` tells which method each setting is for)

{methods}

Examples
  python -m tula_hpc +experiment=resnet50_imagenet cluster=mysite --config-dir ~/tula data.root=/datasets
  python -m tula_hpc +experiment=resnet50_imagenet cluster=slurm controller=slurm data.root=/datasets
  python -m tula_hpc plan +experiment=resnet50_imagenet data=synthetic grid.max_nodes=8 objective=cost
Hydra's own options, such as --cfg job (print the composed configuration), work as well. Exit codes: 0 done, 1 the run
failed, 2 the command is wrong and nothing was submitted, 3 another controller works on the run.
"""


def main(arguments: list[str] | None = None) -> None:
    """Entry of `python -m tula_hpc` and `tula-hpc`; leaves with 0, 1 (the run failed), 2 (the command is
    wrong) or 3 (another controller works on the run)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    verb = arguments[0] if arguments else ""
    display = Display()
    for ending in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal ends the command as Ctrl-C does
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup
            signal.signal(ending, _interrupt)
    with suppress(FileNotFoundError):  # the folder is gone; not every command needs it
        if os.getcwd() not in sys.path:  # `python -m` puts it there, the console command does not
            sys.path.insert(0, os.getcwd())
    try:
        if verb == "help" or {"-h", "--help"} & set(arguments):
            print(HELP.format(version=__version__, groups=_groups(), methods=_methods()))
        elif verb == "--version":
            print(__version__)
        elif verb in verbs.VERBS:
            verbs.VERBS[verb](arguments[1:], display)
        elif verb == "plan":
            _for_each_run(arguments[1:], display, plan)
        elif verb and verb[0].isalpha() and "=" not in verb:
            known = ", ".join(["plan", *verbs.VERBS])
            raise ConfigError([f"{verb!r} is not a command; there are {known}, and settings look like key=value"])
        else:
            _for_each_run(arguments, display, start)
    except KeyboardInterrupt:
        display.close()
        display.say("interrupted; the same command goes on from here")
        sys.exit(130)
    except TulaError as error:
        display.close()
        print(f"tula_hpc: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 3 if isinstance(error, RunIsHeld) else 1)
    except BrokenPipeError:  # `logs RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # the user's disk or folder, not a mistake of ours: no traceback
        place = error.filename
        if place is None and _is_nowhere():
            place = "the folder you are in"
        elif place is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            place = "the output"
        elif place is None:
            raise
        display.close()
        print(f"tula_hpc: {place}: {error.strerror}; see run_root and data.root", file=sys.stderr)
        sys.exit(1)
    finally:
        display.close()


def _is_nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _interrupt(*_: object) -> None:
    for ending in (signal.SIGTERM, signal.SIGHUP):  # shell and kernel both tell of a closed terminal
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt


def _groups() -> str:
    """The configuration groups and what they offer."""
    lines = []
    for folder in sorted(p for p in conf_dir().iterdir() if p.is_dir()):
        plus = "+" if folder.name == "experiment" else ""
        lines.append(f"  {plus + folder.name:12} {', '.join(sorted(p.stem for p in folder.glob('*.yaml')))}")
    return "\n".join(lines)


def _methods() -> str:
    """What each training method is."""
    return "\n".join(f"  {kind.name:12} {method.words}" for kind, method in METHODS.items())


Act = Callable[[Settings, list[str], Display], None]


def _for_each_run(arguments: list[str], display: Display, act: Act) -> None:
    """Compose the settings and act on them; in a sweep on each, going on when one fails."""
    if "--hydra-help" in arguments:  # Hydra composes nothing for it, and then looks for the groups of overrides
        arguments = ["--hydra-help"]
    elif not any(a.lstrip("+").partition("=")[0] == "experiment" for a in arguments):
        arguments = ["+experiment=quickstart", *arguments]
    if is_plain(arguments):
        act(compose(arguments), _command(arguments), display)
        return
    runs = _runs_of_sweep(arguments)  # refuses mistakes in any of them before the first begins
    one = _OneOfMany(act)
    compose_each(arguments, one)
    failed = one.failed
    if act is start and runs:
        display.console.print(overview(runs))
        failed = failed or not all(map(is_in_good_hands, runs))
    if failed:
        sys.exit(1)


@dataclass
class _OneOfMany:
    """Acts on one run of a sweep. A launcher plugin pickles it into a job, so it holds no display."""

    act: Act
    failed: bool = field(default=False)

    def __call__(self, settings: Settings, arguments: list[str]) -> None:
        display = Display()
        try:
            self.act(settings, _command(arguments), display)
        except TulaError as error:
            print(f"tula_hpc: {error}", file=sys.stderr)
            self.failed = True
        finally:
            display.close()


def _command(arguments: list[str]) -> list[str]:
    return ["python", "-m", "tula_hpc", *arguments]


def _runs_of_sweep(arguments: list[str]) -> list[RunFolder]:
    """The folders of a sweep's runs, in its order.

    Raises:
        ConfigError: If the settings of one of them cannot be composed, or cannot work; before the first begins.
    """
    composed = [compose(each) for each in sweep(arguments)]
    if any(settings.cluster.kind is ClusterKind.auto for settings in composed):
        kind = settled(next(s for s in composed if s.cluster.kind is ClusterKind.auto), Display()).cluster.kind
        for settings in composed:
            if settings.cluster.kind is ClusterKind.auto:
                settings.cluster.kind = kind
    runs = {folder_of(settings): settings for settings in composed}
    # finished ones are shown even where code or data are gone meanwhile
    to_go = [settings for run, settings in runs.items() if not run.is_finished]
    if problems := dict.fromkeys(problem for settings in to_go for problem in check(settings)):
        raise ConfigError(list(problems))
    return list(runs)
