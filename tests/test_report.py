"""The report shows what the run folder holds, on one page that needs nothing else."""

from __future__ import annotations

import base64
import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import open_browser, show

from tula_hpc import methods
from tula_hpc.candidates import Candidate
from tula_hpc.config import Gate, MethodKind, OptimizerKind, SearchMode, Settings, to_plain
from tula_hpc.control.journal import Attempt, Journal, Successor
from tula_hpc.control.verdicts import Verdict
from tula_hpc.display import Display
from tula_hpc.errors import RecordError
from tula_hpc.markup import interval_text, money, quantity
from tula_hpc.models.memory import MemoryFit, fit_memory
from tula_hpc.models.pricing import NodeHourPrice
from tula_hpc.models.selection import candidate_table, select
from tula_hpc.models.step_time import StepTimeFit, fit_step_time
from tula_hpc.report import write_report
from tula_hpc.runs import RunFolder, read_json, write_json, write_text

PLOTS = ["epoch_time", "cost", "step_time", "memory", "step_parts", "training", "scaling"]


def settings_of(name: str = "demo", **changes: Any) -> Settings:
    """A small run: 1 and 2 nodes, batches 8 to 64 a rank, six epochs; `changes` are `section__field=value`."""
    settings = Settings(name=name)
    settings.workload.name = "cnn"
    settings.workload.model = {"_target_": "torchvision.models.resnet50", "num_classes": 1000}
    settings.workload.dataset = {"_target_": "tula_hpc.ranks.workloads.imagenet"}
    settings.workload.train_samples, settings.workload.test_samples = 50_000, 10_000
    settings.grid.min_nodes, settings.grid.max_nodes = 1, 2
    settings.grid.min_batch_per_rank, settings.grid.max_batch_per_rank = 8, 64
    settings.grid.min_global_batch = 8
    settings.search.mode = SearchMode.full
    settings.training.epochs, settings.training.milestones = 6, [4]
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(settings, section), name, value)
    return settings


def point(candidate: Candidate, limit_gib: float, rng: np.random.Generator, slope_gib: float = 0.085) -> dict[str, Any]:
    """One measured configuration, from known formulas and 3 % noise."""
    n, b = candidate.num_nodes, candidate.batch_per_rank
    compute = 0.012 + 0.0027 * b
    sync = 0.0 if candidate.world_size == 1 else 0.03 if n == 1 else 0.09 + 0.006 * (n - 2)
    step = (compute**3 + sync**3) ** (1 / 3) * rng.lognormal(0, 0.03)
    activations = slope_gib * b * 0.97
    memory = (1.4 + slope_gib * b) * rng.lognormal(0, 0.006)
    return {
        "num_nodes": n,
        "gpus_per_node": candidate.gpus_per_node,
        "batch_per_rank": b,
        "global_batch": candidate.global_batch,
        "step_time_s": step,
        "compute_time_s": compute,
        "sync_time_s": max(step - compute, 0.0),
        "data_s": 0.02 * step,
        "forward_s": 0.33 * (compute - 0.004),
        "backward_s": 0.65 * (compute - 0.004),
        "optimizer_s": 0.004,
        "memory_gib": memory,
        "param_gib": 0.1,
        "grad_gib": 0.1,
        "optimizer_gib": 0.1,
        "activation_gib": activations,
        "batch_gib": 0.0006 * b,
        "other_gib": max(memory - 0.3 - activations - 0.0006 * b, 0.0),
        "limit_gib": limit_gib,
        "allocator_retries": 0,
        "hosts": [f"gpu{i:03d}" for i in range(n)],
        "device": "Tesla V100-SXM2-32GB",
    }


def begin(run: RunFolder, settings: Settings) -> None:
    """What exists from the first second: config and plan."""
    run.create()
    write_text(run.config, json.dumps(to_plain(settings)))  # JSON is YAML
    write_json(
        run.plan,
        {
            "candidates": [c.name for c in settings.grid_candidates()],
            "search": settings.search.mode.name,
            "measurement_signature": "0123456789",
            "command": ["python", "-m", "tula_hpc", f"+experiment={settings.name}", "training.epochs=6"],
            "working_dir": "/home/me/my work",
            "runs_on": "Slurm cluster alps",
            "software": {"python": "3.11.7", "torch": "2.6.0"},
            "started": 1_750_000_000.0,
        },
    )


def profile(run: RunFolder, settings: Settings, limit_gib: float = 31.7, slope_gib: float = 0.085) -> None:
    """Journal and fit.json of a full search in which what needs more memory than there is has run out of it."""
    rng, journal, points, infeasible = np.random.default_rng(3), Journal(run.journal), [], {}
    for c in settings.grid_candidates():
        attempt = Attempt(f"profile/{c.name}", 1, f"tag-{c.name}", c.batch_per_rank, c.num_nodes)
        journal.intend(attempt)
        journal.submitted(attempt, "4242")
        if 1.4 + slope_gib * c.batch_per_rank > limit_gib:
            reason = f"CUDA out of memory. Tried to allocate 2.20 GiB of {limit_gib} GiB"
            journal.concluded(attempt, Verdict.cuda_oom, reason)
            infeasible[c.name] = reason
            continue
        journal.concluded(attempt, Verdict.success, "every expected file is there and whole")
        points.append(point(c, limit_gib, rng, slope_gib))
    table = pd.DataFrame(points)
    memory = fit_memory(table, [int(name.split("-b")[1]) for name in infeasible], on_gpus=True)
    forms = {form: fit_step_time(table, form).to_dict() for form in ("overlap", "additive")}
    values = {
        "points": points,
        "step_time": forms,
        "step_time_form": "overlap",
        "memory": memory.to_dict(),
        "memory_limit_gib": limit_gib,
        "memory_fraction": 0.9,
        "max_batch_per_rank": memory.max_batch_per_rank(limit_gib, 0.9),
        "infeasible": infeasible,
        "failed": {},
    }
    write_json(run.fit, values)


def choose(run: RunFolder, settings: Settings) -> dict[str, Any]:
    """selection.json, through the project's own table and choice."""
    fit = json.loads(run.fit.read_text())
    price, gpus = NodeHourPrice(settings.pricing.price_per_node_hour), settings.cluster.ranks_per_node
    table = candidate_table(
        settings.grid_candidates(),
        StepTimeFit.from_dict(fit["step_time"]["overlap"]),
        MemoryFit.from_dict(fit["memory"]),
        price,
        settings.train_samples,
        settings.training.epochs,
        fit["memory_limit_gib"],
        fit["memory_fraction"],
        {Candidate.from_name(name, gpus) for name in fit["infeasible"]},
        pd.DataFrame(fit["points"]),
    )
    values = {
        **select(table, settings.objective.kind.name).to_dict(),
        "price": price.describe(),
        "currency": settings.pricing.currency,
        "candidates": json.loads(table.to_json(orient="records", double_precision=15)),
    }
    write_json(run.selection, values)
    return values


def train(run: RunFolder, settings: Settings, epochs: int, relaunched_at: int | None = None) -> None:
    """metrics.jsonl of the first `epochs` epochs and, after all of them, result.json."""
    chosen, rng = json.loads(run.selection.read_text()), np.random.default_rng(4)
    candidate = Candidate(chosen["num_nodes"], chosen["batch_per_rank"], chosen["gpus_per_node"])
    predicted = {(row["num_nodes"], row["batch_per_rank"]): row["step_time_s"] for row in chosen["candidates"]}
    lines: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        if epoch == relaunched_at:
            candidate = Candidate(candidate.num_nodes, candidate.batch_per_rank // 2, candidate.gpus_per_node)
        steps_down = sum(epoch > m for m in settings.training.milestones)
        progress = 1 - np.exp(-epoch / (0.15 * settings.training.epochs))
        noise = rng.normal(0, 1) / (1 + 3 * steps_down)
        top1 = (58 + 6 * min(steps_down, 1) + 4 * min(steps_down, 2)) * progress + noise
        step_s = predicted[candidate.num_nodes, candidate.batch_per_rank] * 1.06 * rng.lognormal(0, 0.01)
        line = {
            "epoch": epoch,
            "samples": epoch * settings.train_samples,
            "lr": settings.training.lr * settings.training.lr_decay**steps_down,
            "train_loss": 6.9 - 4.6 * progress - 0.5 * min(steps_down, 2),
            "train_top1": float(top1 + 3 * steps_down - 1),
            "test_loss": 6.7 - 4.4 * progress - 0.4 * min(steps_down, 2) + 0.05 * noise,
            "test_top1": float(top1),
            "test_top5": float(min(99.0, top1 + 18)),
            "global_batch": candidate.global_batch,
            "method": settings.method.kind.name,
            "base_lr": methods.base_lr(settings, candidate.global_batch),
            "averaging_period_steps": 8 if settings.method.kind is MethodKind.polo else None,
            "num_nodes": candidate.num_nodes,
            "step_time_s": float(step_s),
            "train_s": float(step_s * candidate.steps_per_epoch(settings.train_samples)),
            "epoch_s": float(1.05 * step_s * candidate.steps_per_epoch(settings.train_samples)),
        }
        if settings.method.kind is MethodKind.ags:
            line |= {"mean_scale": 2.0 + noise, "raised_fraction": 0.5, "lowered_fraction": 0.25}
        elif settings.method.kind.measures_scales:
            line |= {
                "gradient_variability": float(0.9 * np.exp(-4 * progress) + 0.1 * rng.random()),
                "mean_scale": float(1.5 + 0.4 * progress + 0.05 * noise),
                "scaled_fraction": float(np.clip(progress + 0.02 * noise, 0, 1)),
                "norm": 1.0,
            }
        lines.append(line)
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    if epochs < settings.training.epochs:
        return
    best = max(lines, key=lambda line: line["test_top1"])
    result = {
        "epochs": epochs,
        "num_nodes": candidate.num_nodes,
        "batch_per_rank": candidate.batch_per_rank,
        "global_batch": candidate.global_batch,
        **{key: lines[-1][key] for key in ("method", "base_lr", "averaging_period_steps")},
        **{key: lines[-1][key] for key in ("test_top1", "test_top5", "train_top1")},
        "best_test_top1": best["test_top1"],
        "best_epoch": best["epoch"],
        "step_time_s": float(np.median([line["step_time_s"] for line in lines])),
        "train_s": sum(line["epoch_s"] for line in lines),
        "last_attempt_s": 1.0,
    }
    write_json(run.train_result, result)


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, *names: str) -> list[str]:
        return [value for _, name, value in self.attributes if name in names]


def read(run: RunFolder) -> Page:
    return Page(run.report.read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A whole run with its report, in a folder whose name needs quoting."""
    run, settings = RunFolder(tmp_path_factory.mktemp("my runs") / "demo's #1"), settings_of()
    begin(run, settings)
    profile(run, settings, limit_gib=5.0)
    choose(run, settings)
    train(run, settings, epochs=6)
    assert write_report(run) == run.report
    return run


# --- the page ---------------------------------------------------------------------------------------------------------


def test_page_needs_nothing_else(finished: RunFolder) -> None:
    """Whatever the page or a picture in it refers to is inside the page itself."""
    page = read(finished)
    sources = page.values("src", "srcset", "href")
    assert len(sources) == len(PLOTS) + 1  # one of them also for small screens
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    for source in sources:
        kind, _, content = source.partition(";base64,")
        assert kind == "data:image/svg+xml"
        svg = base64.b64decode(content).decode()
        assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', svg))
        assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", svg))
        assert "<script" not in svg
        assert "@import" not in svg
    assert "url(" not in finished.report.read_text()


def test_plots_lie_beside_the_page(finished: RunFolder) -> None:
    """Each plot is also a PNG, and nothing temporary is left."""
    assert sorted(path.name for path in finished.plots.iterdir()) == sorted(f"{name}.png" for name in PLOTS)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in finished.plots.iterdir())
    assert not list(finished.path.glob(".*"))


def test_every_picture_has_words(finished: RunFolder) -> None:
    """Each picture has a text for those who do not see it."""
    page = read(finished)
    assert page.tags.count("img") == len(PLOTS)
    assert all(len(alt) > 40 for alt in page.values("alt"))


def test_answer_is_the_stored_one(finished: RunFolder) -> None:
    """Choice, reason, accuracy and the deviation of the step time are those of the stages' files."""
    text, selection, result = read(finished).text, read_json(finished.selection), read_json(finished.train_result)
    nodes = "1 node" if selection["num_nodes"] == 1 else f"{selection['num_nodes']} nodes"
    assert f"{nodes} × {selection['batch_per_rank']} samples = global batch {selection['global_batch']}" in text
    assert selection["reason"] in text
    assert f"{result['test_top1']:.2f} %" in text
    assert f"top-5 {result['test_top5']:.2f} %" in text
    deviation = 100 * (result["step_time_s"] / selection["predicted"]["step_time_s"] - 1)
    assert f"{deviation:.1f} % slower" in text
    assert "not finished" not in text


def test_table_holds_every_candidate(finished: RunFolder) -> None:
    """All candidates are listed, one is marked as chosen, and those that do not fit say why."""
    page, candidates = read(finished), read_json(finished.selection)["candidates"]
    rows = [value.split() for value in page.values("class") if value.split()[:1] in (["out"], ["chosen"])]
    assert sum(row[0] == "chosen" for row in rows) == 1
    assert sum(row[0] == "out" for row in rows) == sum(not row["feasible"] for row in candidates) == 2
    assert page.text.count("did not fit when profiled") == 2


def test_failed_jobs_and_command_are_told(finished: RunFolder) -> None:
    """What ran out of memory is listed with its reason, and the command can be pasted into a shell."""
    text = read(finished).text
    assert "6 success, 2 cuda oom" in text
    assert text.count("CUDA out of memory. Tried to allocate") == 2
    assert "cd '/home/me/my work'\npython -m tula_hpc +experiment=demo training.epochs=6" in text


def test_what_may_be_used_is_what_bounds_the_batch(finished: RunFolder) -> None:
    """The memory model's card tells the constant that no share is kept free for, and the batch that this allows."""
    fit = read_json(finished.fit)
    found = re.search(
        r"May be used: ([\d.]+) of 5 GiB \(([\d.]+) GiB that any batch needs, and 90% of the rest\); at most (\d+)",
        read(finished).text,
    )
    assert found is not None
    constant_gib = fit["memory"]["total"]["intercept_gib"]
    expected = (constant_gib + 0.9 * (5 - constant_gib), constant_gib)
    assert tuple(map(float, found.groups()[:2])) == pytest.approx(expected, rel=0.005)
    assert int(found[3]) == fit["max_batch_per_rank"]


def test_smaller_batch_after_oom_is_told(tmp_path: Path) -> None:
    """A training that went on with a smaller batch says so, and is compared with the prediction for that batch."""
    run, settings = RunFolder(tmp_path), settings_of()
    begin(run, settings)
    profile(run, settings)
    chosen = choose(run, settings)["global_batch"]
    journal, slow = Journal(run.journal), Attempt("train", 1, "tag", 64, 2)
    journal.intend(slow)  # moved to other nodes, which says nothing of the batch
    journal.ending(slow, Verdict.replanned, "", Successor(2, 64, 1.0, "n7"))
    journal.concluded(slow, Verdict.replanned, "")
    for number, batch, end, why in (
        (2, 64, Verdict.cuda_oom, "no room for 2 GiB"),
        (3, 32, Verdict.host_oom, "killed by the host"),  # more of the host's memory, and the same batch
        (4, 32, Verdict.success, ""),
    ):
        attempt = Attempt("train", number, "tag", batch, 2)
        journal.intend(attempt)
        journal.concluded(attempt, end, why)
    train(run, settings, epochs=6, relaunched_at=1)
    write_report(run)
    text = read(run).text
    assert f"Chosen was a global batch of {chosen}; in the end the training used {chosen // 2}." in text
    assert "went on with a smaller batch: no room for 2 GiB" in text
    deviation = re.search(r"predicted [\d.]+ ms: ([\d.]+) % slower", text)
    assert deviation is not None
    assert float(deviation[1]) == pytest.approx(6, abs=3)


# --- unfinished and odd runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "plots", "missing"),
    [
        (0, 0, ["Profiling is not finished: 0 of 0", "No configuration is chosen", "not finished its first epoch"]),
        (1, 3, ["No configuration is chosen", "not finished its first epoch"]),
        (2, 5, ["The training has not finished its first epoch"]),
        (3, 7, ["The training is not finished: 1 of 6 epochs are done"]),
    ],
    ids=["planned", "fitted", "chosen", "in training"],
)
def test_unfinished_run_has_a_report(tmp_path: Path, stages: int, plots: int, missing: list[str]) -> None:
    """The report shows the stages that are done and names the ones that are not."""
    run, settings = RunFolder(tmp_path), settings_of()
    begin(run, settings)
    done = [lambda: profile(run, settings), lambda: choose(run, settings), lambda: train(run, settings, epochs=1)]
    for stage in done[:stages]:
        stage()
    write_report(run)
    page = read(run)
    assert page.tags.count("img") == plots
    assert "This run is not finished." in page.text
    for sentence in missing:
        assert sentence in page.text


def test_unknown_numbers_leave_a_report(tmp_path: Path) -> None:
    """No memory limit, no cost, no finite parameters, predictions of 0 s, no scaling: the rest is still shown."""
    run, settings = RunFolder(tmp_path), settings_of(method__kind=MethodKind.lbt)
    begin(run, settings)
    profile(run, settings)
    fit = read_json(run.fit)
    overlap, additive = fit["step_time"]["overlap"], fit["step_time"]["additive"]
    overlap |= {"outcome": "NON_FINITE", "median_error": None}
    overlap["parameters"] = {name: [None, unit] for name, (_, unit) in overlap["parameters"].items()}
    additive["parameters"] |= {"alpha": [0.0, "s"], "beta": [0.0, "s/sample"]}  # 0 s for a single rank
    fit |= {"memory_limit_gib": None, "max_batch_per_rank": None}
    fit["memory"]["limit_gib"] = None
    selection = choose(run, settings)
    write_json(run.fit, fit)
    for row in (*selection["candidates"], selection["predicted"], *selection["alternatives"]):
        row.update(cost=None, memory_gib=None)
    selection["candidates"][0] |= {"step_time_s": 0.0, "epoch_time_s": 0.0, "step_time_low_s": None}
    write_json(run.selection, selection)
    train(run, settings, epochs=6)
    write_report(run)
    page = read(run)
    assert page.tags.count("img") == len(PLOTS) - 2  # no cost, no scaling
    assert "the limit is not known" in page.text
    assert "Non finite" in page.text
    assert "plain large-batch training" in page.text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (MethodKind.lrs_linear, ["lrs_linear: learning rate in", "0.05 for batch 32", "learning rate {base_lr:g}"]),
        (MethodKind.polo, ["polo: post-local SGD", "method polo, learning rate 0.05, models averaged every 8 steps"]),
        (MethodKind.ags, ["each tensor's step bounded, to 0.70% to 1.00% of its weights", "learning rate {base_lr:g}"]),
        (MethodKind.ags_paper, ["as printed (Algorithm 1), towards batch 32", "method ags_paper, learning rate 0.05"]),
    ],
)
def test_the_method_is_told_with_its_rate_and_period(tmp_path: Path, kind: MethodKind, words: list[str]) -> None:
    """The header names the method, what was asked for, and what the training recorded."""
    run = RunFolder(tmp_path)
    settings = settings_of(method__kind=kind, method__small_batch=32, training__lr=0.05)
    begin(run, settings)
    profile(run, settings)
    choose(run, settings)
    write_report(run)
    assert "Trained with" in read(run).text
    train(run, settings, epochs=settings.training.epochs)
    write_report(run)
    result, page = read_json(run.train_result), read(run)
    for expected in (*words, "global batch {global_batch}, method"):
        assert expected.format(**result) in page.text


def test_a_batch_at_which_nothing_is_bounded_is_told(tmp_path: Path) -> None:
    """The default method bounds steps of batches above method.small_batch only, which the header says at others."""
    run = RunFolder(tmp_path)
    begin(run, settings_of())
    profile(run, settings_of())
    batch = choose(run, settings_of())["global_batch"]
    for small_batch in (batch, batch - 1):
        write_text(run.config, json.dumps(to_plain(settings_of(method__small_batch=small_batch))))
        write_report(run)
        words = f"; nothing to bound at a global batch of {batch}, not above method.small_batch={small_batch}"
        assert (words in read(run).text) == (small_batch == batch)


def test_without_a_gate_no_threshold_is_told_of(tmp_path: Path) -> None:
    """With method.gate=off nobody compares a variability, so neither the header nor the plot has a threshold."""
    run, settings = RunFolder(tmp_path), settings_of(method__kind=MethodKind.ags_measured, method__gate=Gate.off)
    begin(run, settings)
    profile(run, settings)
    choose(run, settings)
    train(run, settings, epochs=6)
    write_report(run)
    text = read(run).text
    assert "towards batch 128, every step scaled" in text
    assert "Every step is scaled, whatever its variability (method.gate=off)." in text
    assert "threshold" not in text.partition("The whole configuration")[0]


def test_gradient_scaling_around_adamw_is_warned_about(tmp_path: Path) -> None:
    """The header names AdamW, and a strip says what it does to the scales, from the choice on."""
    run, settings = RunFolder(tmp_path), settings_of(training__optimizer=OptimizerKind.adamw)
    begin(run, settings)
    profile(run, settings)
    write_report(run)
    assert "AdamW divides" not in read(run).text
    choose(run, settings)
    write_report(run)
    page = read(run)
    assert "AdamW, learning rate 0.01" in page.text
    assert "AdamW divides gradients by their own size" in page.text


def test_a_training_without_accuracies_shows_its_loss(tmp_path: Path) -> None:
    """Where targets are no classes: the loss in the tile and alone in the plot, while it trains and at the end."""
    run, settings = RunFolder(tmp_path), settings_of()
    begin(run, settings)
    profile(run, settings)
    choose(run, settings)
    none = {"train_top1": None, "test_top1": None, "test_top5": None}
    for epochs, words in ((3, "Test loss so far"), (6, "Test loss")):
        train(run, settings, epochs)
        write_text(run.metrics, "".join(json.dumps(line | none) + "\n" for line in run.read_metrics()))
        if run.train_result.exists():
            write_json(
                run.train_result, read_json(run.train_result) | none | {"best_test_top1": None, "test_loss": 1.5}
            )
        write_report(run)
        page = read(run)
        assert words in page.text
        assert "Test accuracy" not in page.text
        assert f"Loss over {epochs} epochs." in page.values("alt")
    assert "1.5after 6 epochs" in page.text


@pytest.mark.parametrize("unknown", [None, 0.0])
def test_a_training_that_timed_no_step_tells_of_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unknown: float | None
) -> None:
    """Nothing may have been timed since it last went on: neither page nor command calls that 0 s and 100 % faster."""
    run, settings = RunFolder(tmp_path), settings_of()
    begin(run, settings)
    profile(run, settings)
    choose(run, settings)
    train(run, settings, epochs=6)
    write_json(run.train_result, read_json(run.train_result) | {"step_time_s": unknown, "train_top1": None})
    write_report(run)
    Display().result(run)
    text, said = read(run).text, capsys.readouterr().out
    assert "predicted; not measured in the training" in text
    assert "faster" not in text
    assert "trained 6 epochs" in said
    assert "a step took" not in said


def test_torn_record_is_refused_by_name(tmp_path: Path) -> None:
    """A file that is not whole stops the report, and the message names it."""
    run = RunFolder(tmp_path)
    begin(run, settings_of())
    write_text(run.fit, '{"version": 1, "points": [')
    with pytest.raises(RecordError, match=r"fit\.json is not whole"):
        write_report(run)


HOSTILE = """"'><script>alert('&amp;')</script><img src=x onerror=alert(1)>"""


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    """Names, paths, hosts, reasons and versions that look like HTML are shown and never obeyed."""
    run, settings = RunFolder(tmp_path / "<b>&"), settings_of(HOSTILE)
    settings.workload.name = settings.workload.dataset["_target_"] = settings.workload.model[HOSTILE] = HOSTILE
    settings.pricing.currency = HOSTILE
    begin(run, settings)
    profile(run, settings)
    fit = read_json(run.fit)
    for p in fit["points"]:
        p |= {"hosts": [HOSTILE], "device": HOSTILE}
    fit["memory"]["advice"] = fit["step_time"]["overlap"]["advice"] = HOSTILE
    fit["step_time"]["additive"]["notes"] = [HOSTILE]
    write_json(run.fit, fit)
    selection = choose(run, settings)
    selection |= {"reason": HOSTILE, "price": HOSTILE}
    selection["candidates"][0]["why_infeasible"] = selection["alternatives"][0]["why"] = HOSTILE
    write_json(run.selection, selection)
    plan = read_json(run.plan)
    plan |= {"command": [HOSTILE], "working_dir": HOSTILE, "runs_on": HOSTILE, "software": {HOSTILE: HOSTILE}}
    write_json(run.plan, plan)
    journal, attempt = Journal(run.journal), Attempt("train", 1, HOSTILE, 8, 1)
    journal.intend(attempt)
    journal.submitted(attempt, HOSTILE)
    journal.concluded(attempt, Verdict.cuda_oom, HOSTILE)
    train(run, settings, epochs=6, relaunched_at=1)
    write_report(run)
    page, text = read(run), run.report.read_text()
    assert page.tags.count("img") == len(PLOTS)
    assert not {"script", "b"} & {tag for tag, name, _ in page.attributes if name != "style"}
    assert "script" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert f"<h1>{html.escape(HOSTILE)}</h1>" in text
    assert page.text.count(HOSTILE) > 15


# --- words, imports, browser ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (quantity(0.0908, "s"), "90.8 ms"),
        (quantity(3.2e-6, "s/sample"), "3.2 µs/sample"),
        (quantity(0.0, "s/GPU"), "0 ms/GPU"),
        (quantity(0.353, "of computation"), "0.353 of computation"),
        (quantity(None, "s"), "not finite"),
        (money(1814.0149, "$"), "$1,814.01"),
        (money(0.0089, "€"), "€0.0089"),
        (money(None, "$"), "–"),
        (interval_text(0.0393, 0.0459), "39.3 – 45.9 ms"),
        (interval_text(0.9, 1.63), "900 ms – 1.63 s"),
    ],
)
def test_numbers_are_for_people(shown: str, expected: str) -> None:
    """Numbers come in the unit and with the digits a person would write."""
    assert shown == expected


def test_import_is_light() -> None:
    """Importing the report loads neither torch nor matplotlib: a login node starts at once."""
    code = "import sys, tula_hpc.report; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_browser_shows_the_page(finished: RunFolder) -> None:
    """On a desktop and on a phone, light and dark: no error, every picture drawn, nothing wider than the screen."""
    script = """
        const root = document.documentElement;
        return {widths: [...document.images].map(i => i.naturalWidth), page: root.scrollWidth, screen: root.clientWidth,
                background: getComputedStyle(document.body).backgroundColor};
    """
    backgrounds = set()
    with open_browser() as driver:
        for width_px, colours in ((1280, "light"), (390, "dark")):
            assert show(driver, finished.report, width_px, colours=colours) == []
            seen = driver.execute_script(script)
            assert len(seen["widths"]) == len(PLOTS)
            assert min(seen["widths"]) > 0
            assert seen["page"] <= seen["screen"] == width_px
            backgrounds.add(seen["background"])
    assert len(backgrounds) == 2


def test_limits_stand_beside_the_objective(tmp_path: Path) -> None:
    """A deadline, a budget with its currency and a number of nodes are part of what was asked."""
    run, settings = RunFolder(tmp_path / "run"), settings_of("limited")
    settings.objective.deadline_h, settings.objective.budget, settings.objective.max_nodes = 2.5, 40.0, 1
    begin(run, settings)
    write_report(run)
    assert ", up to 2.5 h, up to $40, up to 1 node" in read(run).text
