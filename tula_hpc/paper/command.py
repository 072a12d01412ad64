"""`paper`: one table or figure of the paper from its runs to its files; and the claims, side by side."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pandas as pd

from tula_hpc.checks import check
from tula_hpc.composition import compose, run_root_in
from tula_hpc.config import ControllerKind, Settings
from tula_hpc.display import Display, count
from tula_hpc.errors import ConfigError, TulaError
from tula_hpc.paper import accuracy, claims, timing
from tula_hpc.paper.findings import Findings, Result
from tula_hpc.paper.published import CLAIMS
from tula_hpc.paper.running import Runs, in_words
from tula_hpc.paper.scales import SCALES, Run, Scale, scale_of
from tula_hpc.runs import write_json, write_text
from tula_hpc.starting import refuse_what_cannot_work, settled, shown

RESULTS: dict[str, Result] = {result.name: result for result in (*timing.RESULTS, *accuracy.RESULTS)}
AT_ONCE = 8


def paper(arguments: list[str], display: Display) -> None:
    """Measure one result of the paper, or list them all."""
    options, rest = _options(arguments)
    if not rest:
        _list(display)
        return
    name, more = rest[0], rest[1:]
    if "=" in name or name.startswith("-"):
        raise ConfigError([f"{name!r} stands where the result's name belongs: {shown('paper')} NAME [key=value ...]"])
    if name == "claims":
        if unknown := run_root_in(more)[0]:
            raise ConfigError([f"{shown('paper', 'claims')} takes --scale and run_root=FOLDER, not {unknown[0]!r}"])
        _claims(options, more, display)
        return
    if name not in RESULTS:
        raise ConfigError([f"{name!r} is no result of the paper; there are {', '.join(sorted(RESULTS))} and claims"])
    scale = scale_of(options.get("scale", "small"))
    at_once = options.get("at-once", str(AT_ONCE))
    if not at_once.isdigit() or at_once == "0":
        raise ConfigError([f"--at-once is {at_once!r}; give how many commands may work at the same time, 1 or more"])
    result = RESULTS[name]
    of_any = compose([*result.runs(scale)[0], *more])
    scale = replace(scale, ranks_per_node=of_any.cluster.ranks_per_node)
    runs = list(dict.fromkeys(result.runs(scale)))
    _refuse_what_it_varies(name, scale, runs, more)
    alike = {tuple(a for a in run if not a.startswith(_DIFFER_IN)): run for run in runs}
    all_settings = [compose([*run, *more]) for run in alike.values()]
    _refuse_what_is_for_one_run(all_settings[0])
    display.say(f"{result.title}; --scale {scale.name}: {scale.words}")
    if "plan" in options:
        for run in runs:
            display.say(f"  {shown(*run, *more)}")
        display.say(f"{count(len(runs), 'command')}; nothing was submitted")
        return
    folder = _folder(scale, more)
    with _queued_again_in_time(display):
        _refuse_mistakes(all_settings, display)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folders, failures = Runs(folder / "logs" / name, int(at_once), display.say).finish(runs, more)
    if folders:  # else what an earlier command has written stays
        write(result, scale, result.find(scale, folders), folder, display)
    if failures:
        lines = "\n".join(f"  {in_words(run)}: {why}" for run, why in failures.items())
        raise TulaError(
            f"{count(len(failures), 'run')} of {len(runs)} did not end well, and {name} lacks them:\n{lines}\n"
            "The same command tries them again."
        )


_DIFFER_IN = ("grid.", "training.seed=", "method.static_scale=")
"""Runs that differ in nothing else have the same mistakes."""


def _refuse_what_it_varies(name: str, scale: Scale, runs: Sequence[Run], more: Sequence[str]) -> None:
    """A setting for all runs that some of them are told apart by, or that makes a row what it says: it would win."""
    bases = [*scale.profiled.values(), *scale.trained.values()]
    own = {"until"}
    for run in runs:
        base = max((base for base in bases if run[: len(base)] == base), key=len, default=())
        own |= {_key(argument) for argument in run[len(base) :]}
    if clash := sorted(own & {_key(argument) for argument in more}):
        what = ", ".join(clash)
        raise ConfigError([f"{what}: {name} sets this itself, so that its rows are what they say; leave it out"])


def _key(argument: str) -> str:
    return argument.lstrip("+~").partition("=")[0]


def _refuse_mistakes(all_settings: Sequence[Settings], display: Display) -> None:
    """What would end every run is told once, before the first begins."""
    first = settled(all_settings[0], display)
    refuse_what_cannot_work(first)
    problems: dict[str, None] = {}
    for settings in all_settings[1:]:
        cluster = replace(settings.cluster, kind=first.cluster.kind)
        problems |= dict.fromkeys(check(replace(settings, cluster=cluster)))
    if problems:
        raise ConfigError(list(problems))


def _refuse_what_is_for_one_run(settings: Settings) -> None:
    """Settings that are fine for a run by itself, and not for one of several that are watched to their end."""
    if settings.cluster.node_types:
        raise ConfigError(["cluster.node_types is set, but the paper's results are of one type of node; leave it out"])
    if settings.controller.kind is ControllerKind.slurm:
        raise ConfigError(
            ["controller is slurm, but this command waits for its runs itself; leave it out, or submit jobs/*.sbatch"]
        )


def write(result: Result, scale: Scale, findings: Findings, folder: Path, display: Display) -> None:
    """Leave NAME.md, .csv, .png, .pdf and .json (what the claims come to, and the picture's curves) in the folder, and
    say so."""
    from tula_hpc.paper import drawing

    place = folder / result.name
    write_text(place.with_suffix(".csv"), findings.table.to_csv(index=False))
    if findings.panels:
        drawing.save(findings.panels, place)
    answers = _answers(scale, findings)
    record = {
        "scale": scale.name,
        "claims": {key: answer.here for key, answer in answers.items()},
        "verdicts": {key: answer.verdict for key, answer in answers.items()},
        "panels": drawing.to_record(findings.panels),
    }
    write_json(place.with_suffix(".json"), record)
    text = _page(result, scale, findings)
    write_text(place.with_suffix(".md"), text)
    display.say(text)
    pictures = ", .png, .pdf" if findings.panels else ""
    display.say(f"written: {place}.md, .csv, .json{pictures}")


def _page(result: Result, scale: Scale, findings: Findings) -> str:
    lines = [f"# {result.title}", "", f"Scale `{scale.name}`: {scale.words}.", ""]
    if answers := _answers(scale, findings):
        rows = [(c.statement, c.published, *answers[c.key]) for c in CLAIMS if c.key in answers]
        lines += [markdown(pd.DataFrame(rows, columns=["claim", "paper", "here", "verdict"])), ""]
    lines += [markdown(findings.table), ""]
    return "\n".join([*lines, *(f"- {note}" for note in findings.notes)]) + "\n"


def _answers(scale: Scale, findings: Findings) -> dict[str, claims.Answer]:
    """To the claims; without verdicts where the scale says nothing about the paper."""
    if scale.says_something:
        return findings.claims
    return {key: answer._replace(verdict="-") for key, answer in findings.claims.items()}


def markdown(table: pd.DataFrame) -> str:
    """The table in Markdown: numbers with four digits, what is unknown as a dash, columns in backticks as they are."""
    header = [name if "`" in name else name.replace("_", " ") for name in map(str, table.columns)]
    rows = [[_cell(value) for value in row] for row in table.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def _cell(value: object) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _claims(options: dict[str, str], more: list[str], display: Display) -> None:
    """All claims: with --scale beside the user's own results, else beside what was measured with this version."""
    if "scale" in options:
        table = claims.own_table(claims.own(_folder(scale_of(options["scale"]), more)))
    else:
        table = claims.table(claims.shipped())
    display.say(markdown(table))


def _list(display: Display) -> None:
    for result in sorted(RESULTS.values(), key=lambda result: result.name):
        display.say(f"  {result.name:<9} {result.title}")
    display.say("  claims    every claim of the paper: published, and measured with this version or (--scale) by you")
    display.say("")
    for scale in SCALES.values():
        display.say(f"  --scale {scale.name:<6} {scale.words}")
    display.say("")
    display.say(f"  {shown('paper')} NAME [--scale small] [--at-once {AT_ONCE}] [--plan] [key=value ...]")
    display.say("  settings such as cluster=mysite and data.root=/datasets are for every run of it")


def _options(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """`--scale`, `--at-once` and `--plan`, and the other arguments."""
    options, rest = {}, []
    waiting = iter(arguments)
    for argument in waiting:
        key, equals, value = argument.removeprefix("--").partition("=")
        if argument == "--plan":
            options["plan"] = ""
        elif argument.startswith("--") and key in ("scale", "at-once"):
            options[key] = value if equals else next(waiting, "")
        else:
            rest.append(argument)
    return options, rest


def _folder(scale: Scale, more: list[str]) -> Path:
    """Where results of a scale are: below the runs they are made of."""
    return Path(run_root_in(more)[1]).expanduser().absolute() / f"paper-{scale.name}"


@contextmanager
def _queued_again_in_time(display: Display) -> Iterator[None]:
    """In a Slurm job that will end soon, leave the runs in order and put the job back into the queue."""
    from tula_hpc.control import away

    def time_is_up(*_: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGUSR2, time_is_up)
    try:
        yield
    except _TimeIsUp:
        display.say("the time of this job is nearly up; it queues again and goes on then")
        if "SLURM_JOB_ID" not in os.environ:
            raise TulaError("this is no Slurm job, so it cannot queue again; the same command goes on") from None
        raise TulaError(f"this job could not queue itself again: {away.queue_again()}") from None
    finally:
        signal.signal(signal.SIGUSR2, before)


class _TimeIsUp(BaseException):
    """Slurm will end this job soon."""
