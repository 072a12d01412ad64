"""What the user sees while a run works and at its end: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tula_hpc.candidates import Candidate, nodes_of
from tula_hpc.control.verdicts import STUCK
from tula_hpc.methods import in_words
from tula_hpc.models.words import three_digits
from tula_hpc.runs import RunFolder, read_json

if TYPE_CHECKING:
    from tula_hpc.control.jobs import Look
    from tula_hpc.control.journal import Attempt, Successor
    from tula_hpc.control.packing import Submission

PLAIN_PROGRESS_EVERY_S = 30.0
ROWS_SHOWN = 24
SILENCE_EVERY_S = 60.0
_COLOURS = {"pending": "yellow", "running": "cyan", "success": "green", "skipped": "dim"}


def duration(seconds: float) -> str:
    """Seconds in the unit a person would use."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    if seconds >= 0.9995 or seconds == 0:  # else rounding makes it 1000 ms
        return f"{seconds:.3g} s"
    return f"{seconds * 1000:.3g} ms"


def predicted_step_s(selection: dict[str, Any], result: dict[str, Any]) -> float | None:
    """The prediction for the configuration that was trained with, which may not be the chosen one."""
    sizes = {name: result[name] for name in ("num_nodes", "batch_per_rank")}
    used = Candidate.from_record({**selection, **sizes})
    rows = [row for row in selection["candidates"] if Candidate.from_record(row) == used]
    return float(rows[0]["step_time_s"]) if rows else None


@dataclass
class _Row:
    """A job in the live table."""

    name: str
    word: str
    since: float
    lasted_s: float | None = None


def _job_name(attempt: Attempt) -> str:
    what = "train" if attempt.job == "train" else "profile"
    again = f" (attempt {attempt.number})" if attempt.number > 1 else ""
    return f"{what} on {count_nodes(attempt)}, batch {attempt.batch_per_rank} a rank{again}"


def count(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def count_nodes(one: Attempt | Candidate | Submission) -> str:
    """`1 node`, `2 h100 nodes`."""
    return nodes_of(one.num_nodes, one.node_type)


def accuracy_or_loss(record: dict[str, Any]) -> str:
    """What a line of metrics, or the result, says of the test set: accuracies, or where targets are no classes the
    loss."""
    if record["test_top1"] is not None:
        return f"test accuracy {record['test_top1']:.2f} % top-1, {record['test_top5']:.2f} % top-5"
    return f"test loss {loss_text(record['test_loss'])}"


def loss_text(loss: float | None) -> str:
    """A loss; records have null for one that was not finite."""
    return "not finite" if loss is None else f"{loss:.4g}"


def nodes_and_batch(one: Candidate | Successor) -> str:
    """`4 nodes with batch 64 a rank`."""
    return f"{count(one.num_nodes, 'node')} with batch {one.batch_per_rank} a rank"


class Display:
    """Speaks to the terminal; every line it prints without a terminal is whole and final."""

    def __init__(self, console: Console | None = None):
        console = console or Console(highlight=False)
        # a log file has no width: let tables take what they need
        self.console = console if console.is_terminal else Console(highlight=False, width=160)
        self._live: Live | None = None
        self._rows: dict[tuple[str, int], _Row] = {}
        self._last_progress = 0.0
        self._last_silence = 0.0
        self._waiting_for = ("", "")
        self._stuck: set[tuple[str, int]] = set()

    def say(self, text: str) -> None:
        """One line that stays; a terminal breaks it wherever it likes, so that paths can be copied."""
        self.console.print(text, markup=False, soft_wrap=True)

    def explain(self, text: str) -> None:
        """Sentences, broken between words on a terminal."""
        self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)

    def jobs(self, title: str, looks: list[Look], done: int, total: int, seconds_left: float | None) -> None:
        """The jobs in the queue and how far the stage is."""
        left = "" if seconds_left is None or done == total else f", about {duration(seconds_left)} left"
        self._show(looks, f"{title}: {done} of {total} done{left}", done, total)

    def training(
        self, looks: list[Look], progress: dict[str, Any], last_line: list[dict[str, Any]], drift: str = ""
    ) -> None:
        """The training job, how far it is, the newest accuracy, and a drift of its steps where there is one."""
        done, total = progress["samples"], progress["of_samples"]
        text = f"training: {100 * done / max(1, total):.0f} %"
        here = done - progress.get("samples_at_start", 0)  # an earlier attempt's samples took another time
        if here > 0 and done < total:
            text += f", about {duration((progress['time'] - progress['started']) * (total - done) / here)} left"
        if last_line:
            line = last_line[0]
            text += f", epoch {line['epoch']}: {accuracy_or_loss(line)}"
        text += f"; {drift}" if drift else ""
        self._show(looks, text, done, total)

    def silence(self, seconds: float) -> None:
        """The scheduler does not answer; said now and then, with the clock."""
        if seconds >= SILENCE_EVERY_S and time.monotonic() - self._last_silence > SILENCE_EVERY_S:
            self._last_silence = time.monotonic()
            self.say(f"Slurm has not answered for {duration(seconds)}; nothing is concluded from that, jobs may go on")

    def waiting(self, what: str, reason: str) -> None:
        """Something cannot be submitted now; said once for each reason."""
        if self._waiting_for != (what, reason):
            self._waiting_for = what, reason
            self.say(f"{what} must wait: {reason}")

    def _show(self, looks: list[Look], headline: str, done: int, total: int) -> None:
        now = time.monotonic()
        for look in looks:
            word = (look.verdict.value if look.verdict else look.seen.state.value).replace("_", " ")
            if look.verdict is None and look.seen.why:
                word += f" ({look.seen.why})"
                self._warn_if_stuck(look)
            row = self._rows.setdefault(look.attempt.key, _Row(_job_name(look.attempt), "", now))
            if row.word == word:
                continue
            # an ended job shows how long it ran
            row.lasted_s = now - row.since if look.verdict and row.word == "running" else None
            row.word, row.since = word, now
            if not self.console.is_terminal:
                self.say(f"{row.name}: {word}")
        if not self.console.is_terminal:
            if now - self._last_progress > PLAIN_PROGRESS_EVERY_S:
                self._last_progress = now
                self.say(headline)
            return
        if self._live is None:
            # drawn when there is something new: a clock of its own would cost a login node more than all our looks
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        table = Table(box=None, pad_edge=False)
        for column in ("job", "state", "for"):
            table.add_column(column)
        for row in list(self._rows.values())[-ROWS_SHOWN:]:
            lasted = now - row.since if row.lasted_s is None else row.lasted_s
            table.add_row(
                row.name,
                Text(row.word, style=_COLOURS.get(row.word.partition(" (")[0], "red")),
                duration(round(lasted)),
            )
        bar = ProgressBar(total=max(1, total), completed=done, width=48)
        self._live.update(Group(table, Text(headline), bar), refresh=True)

    def _warn_if_stuck(self, look: Look) -> None:
        """Say once that a job waits for something that does not come by itself."""
        key = look.attempt.key
        if STUCK.search(look.seen.why) and key not in self._stuck:
            self._stuck.add(key)
            self.say(
                f"{_job_name(look.attempt)}: job {look.attempt.job_id} waits with the reason {look.seen.why}, which "
                f"does not go away by itself; `scontrol show job {look.attempt.job_id}` tells more"
            )

    def close(self) -> None:
        """Take the live table away; what was said stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._rows.clear()

    def choice(self, run: RunFolder) -> None:
        """The candidates, the choice and the reason."""
        self.close()
        selection = read_json(run.selection)
        self.console.print(candidates_table(selection))
        self.explain(f"chosen by {selection['objective']}: {selection['reason']}")

    def result(self, run: RunFolder) -> None:
        """How the training ended and where the report is."""
        if run.untrained.exists():
            self.untrained(run)
            return
        self.close()
        selection, result = read_json(run.selection), read_json(run.train_result)
        node_type = selection.get("node_type", "")
        used = f"{nodes_of(result['num_nodes'], node_type)} x {result['batch_per_rank']} a rank"
        used += f" = global batch {result['global_batch']}"
        chosen = selection["num_nodes"], selection["batch_per_rank"]
        if (result["num_nodes"], result["batch_per_rank"]) != chosen:
            used += f" (chosen was {nodes_of(chosen[0], node_type)} x {chosen[1]} a rank; `status` says why it changed)"
        predicted_s, took_s, step = predicted_step_s(selection, result), result["step_time_s"], ""
        if took_s:  # unknown, or 0 in older records, where nothing was timed since the training last went on
            step = f"; a step took {duration(took_s)}"
            step += f" (predicted {duration(predicted_s)})" if predicted_s is not None else ""
        self.explain(
            f"trained {result['epochs']} epochs with {used} in {duration(result['train_s'])}, {in_words(result)}: "
            f"{accuracy_or_loss(result)}{step}"
        )
        if any(line["test_loss"] is None for line in run.read_metrics()):
            rate = "method.lars_lr" if result["method"] == "lars" else "training.lr"
            self.explain(f"the loss was not finite in some epochs: the training diverged; lower {rate}")
        if result.get("diverged"):
            self.explain(
                f"after epoch {result['epochs']} some weights were no finite numbers, so it ended there, with the "
                "accuracy that it had; where the loss is none from the first step on, look at the model and the data"
            )
        self._where(run)

    def untrained(self, run: RunFolder) -> None:
        """That a run ends with its choice, and where the report is."""
        self.close()
        self.explain("not trained, as until=choice asks; the same command with until=result goes on and trains")
        self._where(run)

    def _where(self, run: RunFolder) -> None:
        self.say(f"report: {run.report}")
        self.say(f"run folder: {run.path}")


def candidates_table(selection: dict[str, Any]) -> Table:
    """Every candidate with what was measured and predicted; the chosen one is marked."""
    table = Table(title="candidates", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    types = any("node_type" in row for row in selection["candidates"])
    if types:
        table.add_column("\ntype", no_wrap=True)
    for header in (
        "\nnodes", "batch\na rank", "global\nbatch", "step\nmeasured", "step\npredicted", "\nepoch", "\ntraining",
        "\nmemory", "\ncost",
    ):  # fmt: skip
        table.add_column(header, justify="right", no_wrap=True)
    waits_known = any(row.get("queue_wait_s") is not None for row in selection["candidates"])
    if waits_known:
        table.add_column("queue\nwait", justify="right", no_wrap=True)
    table.add_column("")
    chosen = Candidate.from_record(selection)
    for row in selection["candidates"]:
        is_chosen = Candidate.from_record(row) == chosen
        memory = row["measured_memory_gib"] if row["measured_memory_gib"] is not None else row["memory_gib"]
        note = "<- chosen" if is_chosen else Text(row["why_infeasible"][:72])
        table.add_row(
            *([row["node_type"]] if types else []),
            str(row["num_nodes"]),
            str(row["batch_per_rank"]),
            str(row["global_batch"]),
            _or_dash(row["measured_step_time_s"], duration),
            _or_dash(row["step_time_s"], duration),
            _or_dash(row["epoch_time_s"], duration),
            _or_dash(row["train_time_s"], duration),
            _or_dash(memory, lambda gib: f"{gib:.2f} GiB"),
            _or_dash(row["cost"], lambda cost: f"{selection['currency']}{three_digits(cost)}"),
            *([_or_dash(row["queue_wait_s"], duration)] if waits_known else []),
            note,
            style="bold green" if is_chosen else "" if row["feasible"] else "dim",
        )
    return table


def _or_dash(value: float | None, shown: Any) -> str:
    return "-" if value is None else shown(value)
