"""One table of many runs, from a few small files of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from tula_hpc.control.lease import holder_of
from tula_hpc.display import duration
from tula_hpc.errors import RecordError
from tula_hpc.models.words import three_digits
from tula_hpc.runs import RunFolder, read_json

# Ends of a job that the run goes on after; of a measurement also that the batch does not fit.
_HARMLESS = ("success", "skipped", "replanned")
_TOO_LARGE = ("cuda_oom", "host_oom")


@dataclass(frozen=True)
class Summary:
    """What the table says of one run."""

    name: str
    stage: str
    controller: str
    chosen: str = ""
    time: str = ""
    cost: str = ""
    method: str = ""
    accuracy: str = ""


def runs_below(root: Path) -> list[RunFolder]:
    """Every run of a folder, by name."""
    return [RunFolder(plan.parent.absolute()) for plan in sorted(root.glob("*/plan.json"))]


def overview(runs: list[RunFolder]) -> Table:
    """The table, a row a run."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for header in ("run", "stage", "controller", "nodes x batch a rank", "training takes", "cost", "method", "top-1"):
        table.add_column(header, overflow="fold")
    for run in runs:
        try:
            summary = summarise(run)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:  # one run is not to hide the others
            summary = Summary(run.path.name, f"not readable: {error!r}", "")
        table.add_row(*(escape(getattr(summary, field)) for field in Summary.__dataclass_fields__))
    return table


def summarise(run: RunFolder) -> Summary:
    """One row; what is torn or missing is left empty."""
    holder = holder_of(run)
    job = f"job {holder['slurm_job']} on " if holder and holder.get("slurm_job") else ""
    controller = "none" if holder is None else f"{job}{holder['host']}"
    if holder is None and not run.is_finished and (job_id := _read(run.controller_job).get("job_id")):
        controller = f"job {job_id}, not at work"
    selection = _read(run.selection)
    result = _read(run.train_result)
    trained = result or next(iter(run.read_metrics()[-1:]), {})
    accuracy = trained.get("test_top1")
    predicted = selection.get("predicted", {})
    return Summary(
        run.path.name,
        stage(run, holder is not None),
        controller,
        _configuration(selection) if selection else "",
        duration(predicted["train_time_s"]) if predicted else "",
        f"{selection['currency']}{three_digits(predicted['cost'])}" if predicted.get("cost") is not None else "",
        trained.get("method", ""),
        "" if accuracy is None else f"{accuracy:.2f} %",
    )


def _configuration(selection: dict[str, Any]) -> str:
    """`4 x 64`, or `4 h100 x 64` where there are types of node."""
    on_type = f" {selection['node_type']}" if "node_type" in selection else ""
    return f"{selection['num_nodes']}{on_type} x {selection['batch_per_rank']}"


def stage(run: RunFolder, controlled: bool) -> str:
    """Where a run is: `profiling 7/12`, `fitted`, `training 43 %`, `finished`, `cancelled`, `failed: ...`."""
    if run.is_finished:
        return "chosen, not to be trained" if run.untrained.exists() else "finished"
    where = _where(run)
    if run.cancelled.exists():
        return "cancelled"
    if controlled:
        return where
    job, verdict = _last_verdict(run)
    harmless = (None, *_HARMLESS) if job == "train" else (None, *_HARMLESS, *_TOO_LARGE)
    return where if verdict in harmless else f"failed: {where}"


def _where(run: RunFolder) -> str:
    if run.train_result.exists():
        return "trained"
    if run.selection.exists():
        progress = _read(run.progress)
        return f"training {100 * progress['samples'] / max(1, progress['of_samples']):.0f} %" if progress else "chosen"
    if run.fit.exists():
        return "fitted"
    if not run.plan.exists():  # refused, or not its turn yet
        return "not begun"
    intended, ended = (len(list(run.journal.glob(f"[0-9]*-{event}.json"))) for event in ("intent", "verdict"))
    return f"profiling {ended}/{intended}" if intended else "planned"


def _last_verdict(run: RunFolder) -> tuple[str, str | None]:
    """The newest job, and how it ended; None if none has, or a newer one was begun."""
    events = [p for p in run.journal.glob("[0-9]*.json") if p.stem.partition("-")[2] in ("intent", "verdict")]
    newest = max(events, default=None)
    event = {} if newest is None else _read(newest)
    return event.get("job", ""), event.get("verdict")


def is_in_good_hands(run: RunFolder) -> bool:
    """Whether a run is finished, or somebody works on it."""
    waiting = _read(run.controller_job).get("job_id") is not None
    return run.is_finished or (not run.cancelled.exists() and (waiting or holder_of(run) is not None))


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except RecordError:
        return {}
