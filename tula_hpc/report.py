"""The report of a run: one HTML page that needs nothing else, and its plots as PNG.

Reads the run folder and computes nothing that a stage did not store. A run that is not finished has a report too: it
shows what there is and says what is missing. Every text of the user or of a node passes `escape` on its way into the
page, and the page forbids itself scripts and everything from outside.
"""

from __future__ import annotations

import base64
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_hpc import methods
from tula_hpc.candidates import Candidate, nodes_of
from tula_hpc.config import DataKind, Gate, MethodKind, ObjectiveKind, Settings, read_settings
from tula_hpc.control.choosing import fit_of, types_of
from tula_hpc.control.journal import Attempt, Journal, State
from tula_hpc.control.verdicts import Verdict
from tula_hpc.display import count, duration, loss_text, predicted_step_s
from tula_hpc.errors import RecordError
from tula_hpc.markup import (
    MEMORY_PARTS,
    STEP_TIME_FORMULAS,
    STEP_TIME_MEANINGS,
    deviation,
    escape,
    facts_list,
    gib_text,
    interval_text,
    memory_line,
    money,
    quantity,
    sentence,
    span,
    table,
    time_text,
)
from tula_hpc.methods import METHODS
from tula_hpc.models.memory import MemoryFit, usable_gib, usable_in_words
from tula_hpc.notices import drift_notice, method_notice, relaunch_notice
from tula_hpc.runs import RunFolder, read_json, replacing, write_text

if TYPE_CHECKING:
    from tula_hpc.plots import Plot

_DATE = "%Y-%m-%d %H:%M %Z"


@dataclass(frozen=True)
class Records:
    """What the stages have stored so far; None for what is missing."""

    run: RunFolder
    settings: Settings
    config_text: str
    plan: dict[str, Any] | None
    fit: dict[str, Any] | None
    selection: dict[str, Any] | None
    result: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    attempts: list[Attempt]
    drifts: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, run: RunFolder) -> Records:
        """Everything the run folder holds. Raises RecordError on files that are there and cannot be read."""
        config_text = run.config.read_text(encoding="utf-8")
        state = Journal(run.journal).state() if run.journal.exists() else State()
        files = {"plan": run.plan, "fit": run.fit, "selection": run.selection, "result": run.train_result}
        return cls(
            run=run,
            settings=read_settings(run),
            config_text=config_text,
            **{name: read_json(path) if path.exists() else None for name, path in files.items()},
            metrics=run.read_metrics(),
            attempts=list(state.attempts.values()),
            drifts=state.drifts,
        )

    def trained_with(self) -> dict[str, Any]:
        """The facts of the training that were recorded last: batch, rate, period; empty before its first epoch."""
        return self.result or (self.metrics[-1] if self.metrics else {})

    def missing(self) -> list[str]:
        """What the run has not come to yet, one sentence each."""
        sentences = []
        if self.fit is None:
            done = sum(a.verdict is not None for a in self.attempts)
            sentences.append(f"Profiling is not finished: {done} of {len(self.attempts)} submitted jobs have ended.")
        if self.selection is None:
            sentences.append("No configuration is chosen yet.")
        if self.result is None and not self.run.untrained.exists():
            epochs = f"{len(self.metrics)} of {self.settings.training.epochs} epochs are done"
            begun = f"is not finished: {epochs}" if self.metrics else "has not finished its first epoch"
            sentences.append(f"The training {begun}.")
        return sentences


def write_report(run: RunFolder) -> Path:
    """Write the page and the plots of a run, finished or not; returns the page's path.

    Raises:
        RecordError: If a file of the run is torn or of another version.
    """
    from tula_hpc import plots  # loads matplotlib

    records = Records.read(run)
    drawn = plots.draw(records.settings, records.fit, records.selection, records.metrics)
    for plot in drawn:
        with replacing(run.plots / f"{plot.name}.png") as file:
            file.write(plot.png)
    write_text(run.report, page(records, drawn))
    if records.result is None and run.train_result.exists():  # trained meanwhile: the page would pass for its last
        return write_report(run)
    return run.report


def page(records: Records, drawn: Sequence[Plot]) -> str:
    """The whole page."""
    body = [_header(records), _answer(records), _figures(drawn)]
    if records.selection is not None:
        body.append(_candidates(records.selection))
    if records.fit is not None:
        body.append(_models(records.fit))
    body.append(_environment(records))
    return _PAGE.format(
        title=escape(records.settings.name),
        style=Path(__file__).with_name("report.css").read_text(encoding="utf-8"),
        body="\n".join(body),
        footer=f"Written by tula_hpc on {escape(time.strftime(_DATE))}",
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title} – tula_hpc</title>
<style>
{style}</style>
</head>
<body><main>
{body}
<footer>{footer}</footer>
</main></body>
</html>
"""


# --- what was asked ---------------------------------------------------------------------------------------------------

_OBJECTIVES = {
    ObjectiveKind.time: "least training time",
    ObjectiveKind.cost: "least cost",
    ObjectiveKind.knee: "knee of the training time: the batch from which larger ones hardly pay",
    ObjectiveKind.time_to_result: "least time to the result: the wait in the queue and the training",
}


def _header(records: Records) -> str:
    s, plan, fit = records.settings, records.plan, records.fit
    samples = span(s.grid.min_batch_per_rank, s.grid.max_batch_per_rank)
    grid = f"{' or '.join(_clusters(s.of_type(each), each) for each in s.node_types)} × {samples} samples"
    grid += f"; {len(plan['candidates'])} candidates" if plan else ""
    grid += f", {len(fit['points'])} measured" if fit else ""
    data = f"{_call(s.workload.dataset)}, {s.train_samples:,} training and {s.test_samples:,} test samples"
    data += "; random tensors in its place" if s.data.kind is DataKind.synthetic else ""
    facts = {
        "Model": f"{s.workload.name}: {_call(s.workload.model)}",
        "Data set": data,
        "Objective": _OBJECTIVES[s.objective.kind] + _limits(s),
        "Grid": f"{grid} ({s.search.mode.name} search)",
        **_end_of_search(fit),
        "Method": _method(s) + _unbounded(records),
        "Training": f"{s.training.epochs} epochs, {methods.tuned_lr_in_words(s)}, {s.training.precision.name}",
        "Ran on": ", ".join([plan["runs_on"] if plan else s.cluster.kind.name, *_devices(fit)]),
        "Trained with": _trained_with(records),
        "Started": time.strftime(_DATE, time.localtime(plan["started"])) if plan else "not yet",
    }
    return f'<header><p class="kicker">tula_hpc report</p><h1>{escape(s.name)}</h1>{facts_list(facts)}</header>'


def _trained_with(records: Records) -> str:
    used = records.trained_with()
    if used:
        return f"global batch {used['global_batch']}, {methods.in_words(used)}"
    return "nothing: until=choice" if records.run.untrained.exists() else "not yet"


def _clusters(settings: Settings, node_type: str) -> str:
    """`2 to 8 h100 nodes × 4 ranks`."""
    nodes = f"{span(settings.grid.min_nodes, settings.grid.max_nodes)} {f'{node_type} nodes'.strip()}"
    return f"{nodes} × {count(settings.cluster.ranks_per_node, 'rank')}"


def _end_of_search(fit: dict[str, Any] | None) -> dict[str, str]:
    """Why an adaptive search measured no more; earlier records do not say."""
    why = (fit or {}).get("search", {}).get("why")
    return {"Search ended": sentence(why)} if why else {}


def _limits(settings: Settings) -> str:
    objective = settings.objective
    kept = [
        "" if objective.deadline_h is None else f", up to {objective.deadline_h:g} h",
        "" if objective.budget is None else f", up to {settings.pricing.currency}{objective.budget:g}",
        "" if objective.max_nodes is None else f", up to {count(objective.max_nodes, 'node')}",
    ]
    return "".join(kept)


def _call(node: dict[str, Any]) -> str:
    """An import path with its arguments; without the path of what is bundled."""
    arguments = ", ".join(f"{key}={value}" for key, value in node.items() if key != "_target_")
    name = str(node.get("_target_", "?"))
    name = name.rpartition(".")[2] if name.startswith("tula_hpc.") else name
    return f"{name}({arguments})" if arguments else name


def _method(settings: Settings) -> str:
    method = settings.method
    text = f"{method.kind.name}: {METHODS[method.kind].words}"
    if method.kind is MethodKind.static:
        text += f", times {method.static_scale:g}, threshold {method.delta_threshold:g}"
    elif method.kind is MethodKind.ags:
        text += f", to {method.step_floor:.2%} to {method.step_cap:.2%} of its weights"
    elif method.kind.scales_gradients:
        gate = "every step scaled" if method.gate is Gate.off else f"threshold {method.delta_threshold:g}"
        text += f", towards batch {method.small_batch}, {gate}"
    if method.kind is MethodKind.ags_measured:
        text += f", one scale for each {method.granularity.name}"
    return text


def _unbounded(records: Records) -> str:
    """That `ags` bounds nothing at the batch that was used, or chosen, where it does not."""
    used, method = records.trained_with() or records.selection, records.settings.method
    if method.kind is not MethodKind.ags or used is None or used["global_batch"] > method.small_batch:
        return ""
    batch = used["global_batch"]
    return f"; nothing to bound at a global batch of {batch}, not above method.small_batch={method.small_batch}"


def _devices(fit: dict[str, Any] | None) -> list[str]:
    return sorted({p["device"] for p in fit["points"]}) if fit else []


# --- the answer -------------------------------------------------------------------------------------------------------


def _answer(records: Records) -> str:
    missing, notice, selection = records.missing(), "", records.selection
    if missing:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in missing)
        notice = f'<div class="notice"><strong>This run is not finished.</strong><ul>{items}</ul></div>'
    if selection is None:
        return f'<section class="answer">{notice}</section>'
    ranks = f"{selection['gpus_per_node']} ranks × " if selection["gpus_per_node"] > 1 else ""
    nodes = nodes_of(selection["num_nodes"], selection.get("node_type", ""))
    answer = f"{nodes} × {ranks}{selection['batch_per_rank']} samples"
    rule = selection["rule"].replace("_", " ")
    return (
        f'<section class="answer"><p class="kicker">The answer</p>'
        f"<h2>{escape(answer)} = global batch {escape(selection['global_batch'])}</h2>{notice}"
        f"{method_notice(records)}{relaunch_notice(records)}{drift_notice(records)}"
        f'<div class="tiles">{"".join(_tiles(records, selection))}</div>'
        f'<p class="reason">{escape(selection["reason"])} <small>Rule: {escape(rule)}.</small></p>'
        f"{_alternatives(selection)}</section>"
    )


def _tiles(records: Records, selection: dict[str, Any]) -> Iterable[str]:
    predicted, result = selection["predicted"], records.result
    low, high = selection["interval"]["train_time_s"]
    notes = [f"predicted; 90 % interval {duration(low)} to {duration(high)}"]
    if result is not None:
        notes.append(f"took {duration(result['train_s'])}, validation included")
    yield _tile("Training time", duration(predicted["train_time_s"]), notes)
    price = f"{selection['currency']}{selection['price']}"
    yield _tile("Cost", money(predicted["cost"], selection["currency"]), [f"predicted, at {price}"])
    fit = None if records.fit is None else fit_of(records.fit, selection.get("node_type", ""))
    yield _memory_tile(predicted["memory_gib"], fit, Candidate.from_record(selection).world_size == 1)
    if result is None:
        yield _tile("Step", duration(predicted["step_time_s"]), ["predicted"])
        if records.metrics:
            last, epochs = records.metrics[-1], records.settings.training.epochs
            yield _test_tile(last, " so far", f"after {last['epoch']} of {epochs} epochs")
        return
    took_s, expected_s = result["step_time_s"], predicted_step_s(selection, result)
    notes = ["measured in the training"]
    if took_s and expected_s:
        notes.append(f"predicted {duration(expected_s)}: {deviation(took_s, expected_s)}")
    if took_s:  # unknown, or 0 in older records, where nothing was timed since the training last went on
        yield _tile("Step", duration(took_s), notes)
    elif expected_s:
        yield _tile("Step", duration(expected_s), ["predicted; not measured in the training"])
    when = f"after {result['epochs']} epochs"
    if result["best_test_top1"] is not None:
        when += f"; best {result['best_test_top1']:.2f} % in epoch {result['best_epoch']}"
    yield _test_tile(result, "", when)


def _test_tile(record: dict[str, Any], so_far: str, when: str) -> str:
    """Accuracy on the test set, or where targets are no classes the loss."""
    if record["test_top1"] is None:
        return _tile(f"Test loss{so_far}", loss_text(record["test_loss"]), [when])
    return _tile(
        f"Test accuracy{so_far}",
        f"{record['test_top1']:.2f} %",
        [f"top-1 {when}", f"top-5 {record['test_top5']:.2f} %"],
    )


def _tile(name: str, value: str, notes: Sequence[str], meter: str = "") -> str:
    words = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f'<div class="tile"><h3>{escape(name)}</h3><p class="value">{escape(value)}</p>{meter}{words}</div>'


def _memory_tile(memory_gib: float | None, fit: Mapping[str, Any] | None, alone: bool) -> str:
    limit = fit["memory_limit_gib"] if fit else None
    if memory_gib is None or fit is None or limit is None:
        return _tile("Memory of a rank", gib_text(memory_gib), ["predicted; the limit is not known"])
    constant_gib = MemoryFit.from_dict(fit["memory"]).constant_gib(alone)
    share, allowed = (
        100 * gib / limit for gib in (memory_gib, usable_gib(limit, fit["memory_fraction"], constant_gib))
    )
    meter = (
        f'<div class="meter" role="img" aria-label="{share:.0f} % of the limit">'
        f'<i style="width:{min(share, 100):.1f}%"></i><b style="left:{allowed:.1f}%"></b></div>'
    )
    note = f"predicted: {share:.0f} % of {gib_text(limit)}; {allowed:.0f} % may be used"
    return _tile("Memory of a rank", gib_text(memory_gib), [note], meter)


def _alternatives(selection: dict[str, Any]) -> str:
    chosen, types = Candidate.from_record(selection), _type_column(selection)
    merged: dict[Candidate, tuple[list[str], dict[str, Any]]] = {}
    for row in selection["alternatives"]:
        merged.setdefault(Candidate.from_record(row), ([], row))[0].append(row["why"])
    rows = [
        (
            sentence("; ".join(why)) + (" (the same choice)" if key == chosen else ""),
            *(row[name] for name in (*types, "num_nodes", "batch_per_rank", "global_batch")),
            time_text(row["step_time_s"]), time_text(row["train_time_s"]),
            money(row["cost"], selection["currency"]), gib_text(row["memory_gib"]),
        )
        for key, (why, row) in merged.items()
    ]  # fmt: skip
    head = (
        "alternatives",
        *types.values(),
        "nodes",
        "batch\na rank",
        "global\nbatch",
        "step",
        "training",
        "cost",
        "memory",
    )
    return table(head, rows, left=(0,)) if rows else ""


def _type_column(selection: dict[str, Any]) -> dict[str, str]:
    """Key and head of the column that names the type of node, where there are types."""
    return {"node_type": "type"} if "node_type" in selection else {}


# --- plots and tables -------------------------------------------------------------------------------------------------


def _figures(drawn: Sequence[Plot]) -> str:
    figures = []
    for plot in drawn:
        image = f'<img alt="{escape(plot.alt)}" src="{_data(plot.svg)}">'
        if plot.svg_narrow is not None:
            image = f'<picture><source media="(max-width: 760px)" srcset="{_data(plot.svg_narrow)}">{image}</picture>'
        wide = ' class="wide"' if plot.svg_narrow is not None else ""
        caption = f"<figcaption>{escape(plot.caption)}</figcaption>"
        figures.append(f"<figure{wide}><h3>{escape(plot.title)}</h3>{image}{caption}</figure>")
    return f'<section class="figures">{"".join(figures)}</section>' if drawn else ""


def _data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _candidates(selection: dict[str, Any]) -> str:
    types = _type_column(selection)
    head = (
        *types.values(), "nodes", "batch\na rank", "global\nbatch", "step\nmeasured", "step\npredicted",
        "90 %\ninterval", "epoch", "training", "cost", "memory\nmeasured", "memory\npredicted", "",
    )  # fmt: skip
    chosen, before, rows, classes = Candidate.from_record(selection), None, [], []
    for row in selection["candidates"]:
        candidate = Candidate.from_record(row)
        is_chosen = candidate == chosen
        note = "chosen" if is_chosen else row["why_infeasible"]
        if row["extrapolated"] and row["feasible"]:
            note = f"{note}; outside the measured range".removeprefix("; ")
        rows.append((
            *(row[name] for name in (*types, "num_nodes", "batch_per_rank", "global_batch")),
            time_text(row["measured_step_time_s"]), time_text(row["step_time_s"]),
            interval_text(row["step_time_low_s"], row["step_time_high_s"]),
            time_text(row["epoch_time_s"]), time_text(row["train_time_s"]), money(row["cost"], selection["currency"]),
            gib_text(row["measured_memory_gib"]), gib_text(row["memory_gib"]), note,
        ))  # fmt: skip
        look = "chosen" if is_chosen else "" if row["feasible"] else "out"
        cluster = candidate.node_type, candidate.num_nodes
        classes.append(f"{look} first" if cluster != before else look)
        before = cluster
    left = (*range(len(types)), len(head) - 1)
    return f"<section><h2>All candidates</h2>{table(head, rows, classes, left=left)}</section>"


# --- models -----------------------------------------------------------------------------------------------------------


def _models(fit: dict[str, Any]) -> str:
    return "".join(_models_of_type(fit_of(fit, node_type), node_type) for node_type in types_of(fit))


def _models_of_type(fit: Mapping[str, Any], node_type: str) -> str:
    cards = [_step_time_card(form, values, form == fit["step_time_form"]) for form, values in fit["step_time"].items()]
    title = f"Models of {escape(node_type)} nodes" if node_type else "Models"
    return f'<section><h2>{title}</h2><div class="cards">{"".join(cards)}{_memory_card(fit)}</div></section>'


def _step_time_card(form: str, values: dict[str, Any], used: bool) -> str:
    error = "unknown" if values["median_error"] is None else f"{100 * values['median_error']:.1f} %"
    words = f"Median error on the {len(values['measured'])} measured configurations: {error}."
    if values["left_out_errors"]:
        words += f" {len(values['left_out_errors'])} of them were also predicted by a fit without them."
    rows = [(name, quantity(*pair), STEP_TIME_MEANINGS.get(name, "")) for name, pair in values["parameters"].items()]
    notes = [*values["notes"], *(f"Left out, not a time: row {row}." for row in values["dropped_rows"])]
    title = f"{escape(f'Step time, {form}')} <small>{'used' if used else 'for comparison'}</small>"
    return _card(title, STEP_TIME_FORMULAS.get(form, ""), values, words, rows, notes)


def _memory_card(fit: Mapping[str, Any]) -> str:
    memory, limit, largest = fit["memory"], fit["memory_limit_gib"], fit["max_batch_per_rank"]
    total, residual, out_of_memory = memory["total"], memory["residual_gib"], memory["smallest_oom_batch"]
    rows = [
        ("m0", gib_text(total["intercept_gib"]), "whatever the batch"),
        ("m1", f"{1024 * total['slope_gib']:.3g} MiB/sample", "for each sample of a rank"),
        *([("a", gib_text(less), "less for a rank that is alone")] if (less := memory.get("alone_less_gib")) else []),
        *((MEMORY_PARTS[name], memory_line(**line), "part of it") for name, line in memory["part_lines"].items()),
    ]
    words = "The limit is not known."
    if limit is not None:
        constant_gib = MemoryFit.from_dict(memory).constant_gib()
        usable = usable_in_words(limit, fit["memory_fraction"], constant_gib)
        words = f"May be used: {usable}; at most {largest} samples a rank."
    words += (
        f" A measurement is {gib_text(residual)} from the line (standard deviation)." if residual is not None else ""
    )
    notes = [f"A batch of {out_of_memory} a rank ran out of memory."] if out_of_memory else []
    return _card("Memory of a rank", "memory = m0 + m1 × batch a rank", memory, words, rows, notes)


def _card(
    title: str, formula: str, fit: dict[str, Any], words: str, rows: list[tuple[str, str, str]], notes: Sequence[str]
) -> str:
    good = fit["outcome"] == "OK"
    outcome = "OK" if good else sentence(fit["outcome"].replace("_", " ").lower())
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<div class="card"><h3>{title}</h3><p class="formula">{escape(formula)}</p>'
        f'<p><strong class="{"good" if good else "bad"}">{escape(outcome)}.</strong> {escape(fit["advice"])}</p>'
        f"<p>{escape(words)}</p>{table(('parameter', 'value', 'meaning'), rows, left=(0, 2))}"
        f"{f'<ul>{items}</ul>' if items else ''}</div>"
    )


# --- environment ------------------------------------------------------------------------------------------------------


def _environment(records: Records) -> str:
    plan, fit = records.plan, records.fit
    command = ""
    if plan is not None:
        lines = f"cd {shlex.quote(plan['working_dir'])}\n{shlex.join(plan['command'])}"
        command = f"<h3>To run it again</h3><pre>{escape(lines)}</pre>"
    facts = {"Run folder": str(records.run.path)}
    if fit is not None:
        facts["Hosts"] = ", ".join(sorted({host for p in fit["points"] for host in p["hosts"]}))
        facts["Devices"] = ", ".join(_devices(fit))
    facts["Software"] = ", ".join(f"{name} {version}" for name, version in _versions(records).items())
    config = f"<details><summary>The whole configuration</summary><pre>{escape(records.config_text)}</pre></details>"
    rest = f"{facts_list(facts, wide=True)}{_jobs(records.attempts)}{config}"
    return f"<section><h2>Environment</h2>{command}{rest}</section>"


def _versions(records: Records) -> dict[str, str]:
    """Software of the command, and what only a rank knows, such as CUDA."""
    versions = dict(records.plan["software"]) if records.plan else {}
    for attempt in records.attempts:
        if attempt.verdict is Verdict.success:
            try:
                found = read_json(records.run.attempt(attempt.job, attempt.number).rank_json(0))
            except RecordError:
                continue
            return versions | {k: v for k, v in found.get("versions", {}).items() if v and k not in versions}
    return versions


def _jobs(attempts: Sequence[Attempt]) -> str:
    """How the jobs ended, and each that did not end well."""
    counts = Counter(_ended(a) for a in attempts)
    summary = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    rows = [
        (a.job, a.number, a.num_nodes, a.batch_per_rank, a.job_id or "–", _ended(a), a.reason)
        for a in attempts
        if a.verdict not in (Verdict.success, Verdict.skipped, None)
    ]
    head = ("job", "attempt", "nodes", "batch\na rank", "id", "ended as", "reason")
    return f"<h3>Jobs</h3><p>{escape(summary or 'none yet')}</p>{table(head, rows, left=(0, 5, 6)) if rows else ''}"


def _ended(attempt: Attempt) -> str:
    return attempt.verdict.value.replace("_", " ") if attempt.verdict else "not ended"
