"""The paper's results from run folders: figures of a real run, claims that stay with their records, commands."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.benchmarks import accuracy_table
from tests.benchmarks.claims import measured
from tula_hpc.composition import compose
from tula_hpc.display import Display
from tula_hpc.errors import ConfigError
from tula_hpc.paper import accuracy, claims, drawing, timing
from tula_hpc.paper.command import RESULTS, markdown, write
from tula_hpc.paper.findings import candidates
from tula_hpc.paper.published import CLAIMS
from tula_hpc.paper.running import Runs, name_of
from tula_hpc.paper.scales import PAPER, SCALES, SMALL, SMOKE, Scale, scale_of
from tula_hpc.runs import RunFolder, read_json, write_json

ROOT = Path(__file__).parents[1]
H100 = RunFolder(ROOT / "tests" / "data" / "h100x4-resnet50-synthetic")


def tula(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tula_hpc", *arguments], cwd=folder, capture_output=True, text=True, timeout=600
    )


def test_every_job_has_its_result_and_every_claim_its_job():
    """jobs/ holds a script for each result, which runs it; a claim names one of them."""
    scripts = {path.stem: path.read_text() for path in (ROOT / "jobs").glob("*.sbatch")}
    assert set(scripts) == set(RESULTS)
    for name, text in scripts.items():
        assert f"paper {name} --scale" in text
        subprocess.run(["bash", "-n", str(ROOT / "jobs" / f"{name}.sbatch")], check=True)
    assert {claim.result for claim in CLAIMS} == set(RESULTS)


def test_what_was_measured_is_what_the_records_say():
    """`paper claims` shows what tests/benchmarks/claims.py finds; errors of fits depend on the machine a bit."""
    shipped, again = claims.shipped(), {row.key: row for row in measured()}
    assert shipped.keys() == again.keys()
    for key, row in shipped.items():
        numbers, now = ([float(n) for n in re.findall(r"[0-9.]+", text)] for text in (row.here, again[key].here))
        assert numbers == pytest.approx(now, rel=0.3 if key.endswith("-error") else 0.0), key
        assert row._replace(here="") == again[key]._replace(here="")
    for row in claims.shipped().values():
        assert (ROOT / row.record).exists()


def test_the_readme_has_the_table_of_claims():
    """As the command prints it, so that neither goes stale."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert markdown(claims.table(claims.shipped())) in readme


def test_the_readme_has_the_table_of_accuracies():
    """As the records give it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert markdown(accuracy_table.readme_table(accuracy_table.read([accuracy_table.FINALS]))) in readme


@pytest.mark.parametrize("name", ["fig01", "fig04", "fig09", "fig10", "fig11", "headline"])
def test_results_of_a_real_run(name: str, tmp_path: Path):
    """A run of ResNet50 on four H100s stands for all models: each has its rows, curves and answers."""
    result = RESULTS[name]
    findings = result.find(SMALL, dict.fromkeys(result.runs(SMALL), H100))
    assert set(findings.table["model"]) == {"ResNet50", "VGG11", "AlexNet", "MobileNetV3"}
    assert findings.panels
    assert findings.claims.keys() <= {claim.key for claim in CLAIMS}
    assert len(findings.claims) >= 1


@pytest.mark.parametrize(
    ("batch", "largest", "verdict"),
    [
        (1024, 8192, "holds"),
        (4096, 8192, "holds"),
        (512, 8192, "elsewhere here"),
        (8192, 8192, "elsewhere here"),
        (4096, 4096, "the grid ends too soon"),
        (512, 512, "the grid ends too soon"),
    ],
)
def test_the_verdict_on_a_batch_knows_where_the_grid_ends(batch: int, largest: int, verdict: str):
    """The paper says 2048: alike within a factor of two; the largest one measured may stand for any larger one."""
    assert claims.elsewhere(batch, 2048, largest=largest) == verdict


@pytest.mark.parametrize(("scale", "verdict"), [(SMALL, "elsewhere here"), (SMOKE, "-")], ids=["small", "smoke"])
def test_claims_of_ones_own_results_have_a_verdict(scale: Scale, verdict: str, tmp_path: Path):
    """What `paper fig01` found is judged in `paper claims`, unless a tiny net stood for the models."""
    result, display = RESULTS["fig01"], Display()
    findings = result.find(scale, dict.fromkeys(result.runs(scale), H100))
    findings.claims = {"plateau-resnet50": claims.Answer("512", "elsewhere here")}
    write(result, scale, findings, tmp_path, display)
    write_json(tmp_path / "old.json", {"claims": {"gap": "from a version that gave none"}})
    table = claims.own_table(claims.own(tmp_path)).set_index("claim")
    assert list(table.loc["batch from which the epoch time hardly falls, ResNet50", ["here", "verdict"]]) == [
        "512", verdict,
    ]  # fmt: skip
    assert set(table.loc[table["here"].str.startswith("from a version"), "verdict"]) == {""}
    assert f"| 512 | {verdict} |" in (tmp_path / "fig01.md").read_text(encoding="utf-8")


def test_a_picture_can_be_drawn_again_from_its_record(tmp_path: Path):
    """The curves in a result's JSON file make the same picture; what is unknown stays so."""
    result = RESULTS["fig09"]
    panels = result.find(SMALL, dict.fromkeys(result.runs(SMALL), H100)).panels
    panels.append(drawing.Panel("gap", "x", "y", [drawing.Series("", [1, 2, 3], [1.0, math.nan, 2.0])]))
    write_json(tmp_path / "record.json", {"panels": drawing.to_record(panels)})
    again = drawing.from_record(read_json(tmp_path / "record.json")["panels"])
    for before, after in zip(panels, again, strict=True):
        assert (before.title, len(before.series)) == (after.title, len(after.series))
        assert list(before.marks) == [(place, words) for place, words in after.marks]
        for one, other in zip(before.series, after.series, strict=True):
            assert (one.label, one.kind, one.colour) == (other.label, other.kind, other.colour)
            assert list(other.y) == pytest.approx(list(one.y), rel=1e-3, nan_ok=True)
    drawing.save(again, tmp_path / "again")
    assert (tmp_path / "again.png").stat().st_size > 0


def test_a_run_that_failed_is_left_out():
    """What there is makes a result; what there is not has no row."""
    only = {SMALL.profile("vgg11"): H100}
    assert set(RESULTS["fig09"].find(SMALL, only).table["model"]) == {"VGG11"}
    assert RESULTS["fig09"].find(SMALL, {}).table.empty
    assert RESULTS["table1"].find(SMALL, {}).table.empty


def test_partial_search_knows_the_corners_only():
    """Of a run with full search, the fit of the smallest and largest clusters' smallest and largest batches."""
    fit = timing.partial_fit(H100)
    known = {(p["num_nodes"], p["batch_per_rank"]) for p in fit["points"]}
    measured_here = candidates(H100)
    assert known < set(zip(measured_here["num_nodes"], measured_here["batch_per_rank"], strict=True))
    assert {nodes for nodes, _ in known} == {1, 2, 4}
    assert fit["step_time"] != read_json(H100.fit)["step_time"]


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_every_command_of_a_scale_is_one_that_composes(scale):
    """Their settings are known and pass, on a machine that has the data."""
    from tula_hpc.checks import check

    runs = {run for result in RESULTS.values() for run in result.runs(scale)}
    kinds = {
        tuple(a for a in run if not a.startswith(("grid.", "training.seed", "method.static"))): run for run in runs
    }
    for run in kinds.values():
        problems = check(compose([*run, "data=synthetic", "cluster=slurm", "cluster.gpus_per_node=1"]))
        assert problems == [], run


def test_mistakes_are_told_before_anything_runs(tmp_path: Path):
    """An unknown result, scale or setting ends the command with what there is."""
    for arguments, words in (
        (["fig03"], "'fig03' is no result of the paper; there are fig01"),
        (["fig01", "--scale", "huge"], "--scale is 'huge'; there are smoke, small, paper"),
        (["fig01", "--at-once=0"], "--at-once is '0'"),
        (["fig01", "controller=slurm"], "controller is slurm"),
        (["fig01", "--scale=smoke", "grid.max_node=2"], "no setting 'grid.max_node'"),
        (["fig01", "--scale=smoke", "--plan", "grid.max_node=2"], "no setting 'grid.max_node'"),
        (["fig02", "--scale=smoke", "training.lr=-1"], "training.lr is -1"),
        (["fig02", "--scale=smoke", "method=ags"], "method: fig02 sets this itself"),
        (["fig02", "--scale=smoke", "grid.max_batch_per_rank=8"], "grid.max_batch_per_rank: fig02 sets this itself"),
        (["fig10", "--scale=smoke", "pricing=spot"], "pricing: fig10 sets this itself"),
        (["cluster=local", "fig09"], "'cluster=local' stands where the result's name belongs"),
        (["claims", "fig09"], "takes --scale and run_root=FOLDER, not 'fig09'"),
    ):
        answer = tula(tmp_path, "paper", *arguments)
        assert answer.returncode == 2, answer.stdout
        assert words in answer.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("scale", [SMALL, PAPER], ids=["small", "paper"])
@pytest.mark.parametrize("gpus", [1, 4])
def test_a_row_has_its_global_batch_whatever_a_node_holds(scale: Scale, gpus: int):
    """Nodes of four GPUs train with a quarter of the batch on each."""
    at_hand = dataclasses.replace(scale, ranks_per_node=gpus)
    for method in ("ags", "polo"):
        run = at_hand.training("vgg11", 1024, method)
        settings = compose([*run, "data=synthetic", "cluster=slurm", f"cluster.gpus_per_node={gpus}"])
        assert {candidate.global_batch for candidate in settings.grid_candidates()} == {1024}


def test_what_was_found_stays_when_all_runs_fail(tmp_path: Path):
    """A repeat that finds nothing takes nothing away, and says why."""
    kept = tmp_path / "runs" / "paper-smoke" / "fig04.csv"
    kept.parent.mkdir(parents=True)
    kept.write_text("found before\n")
    answer = tula(tmp_path, "paper", "fig04", "--scale=smoke", "cluster=local", "objective.budget=1e-12")
    assert answer.returncode == 1
    assert "no feasible configuration" in answer.stderr
    assert kept.read_text() == "found before\n"


def test_eigenvalues_of_a_training_that_diverged_are_unknown():
    """There is no largest of them to measure the others by."""
    assert all(math.isnan(value) for value in accuracy._of_largest([None, math.nan]))
    assert accuracy._of_largest([1.0, None, -2.0])[::2] == [0.5, -1.0]


def test_the_plan_is_commands_that_a_user_could_give(tmp_path: Path):
    """`--plan` prints them and submits nothing."""
    answer = tula(tmp_path, "paper", "table1", "--scale", "smoke", "--plan", "cluster=local")
    commands = re.findall(r"^  python -m tula_hpc (.+)$", answer.stdout, flags=re.MULTILINE)
    assert len(commands) == 6
    assert all(command.endswith("cluster=local") for command in commands)
    assert not (tmp_path / "runs").exists()


def test_a_command_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Of two commands one has a mistake: it is told with its own words, and the other is done."""
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    one = (*tiny_overrides, "grid.max_nodes=1", "grid.min_batch_per_rank=32", "grid.max_batch_per_rank=32")
    good, bad = (*one, "until=choice"), (*one, "search.timed_steps=-1")
    folders, failures = Runs(tmp_path / "logs", 2, said.append).finish([good, bad], ["cluster=local"])
    assert set(folders) == {good}
    assert folders[good].selection.exists()
    assert "search.timed_steps is -1" in failures[bad]
    assert [line.partition(":")[0] for line in sorted(said)] == ["done", "failed"]


def test_another_that_writes_the_same_log_takes_nothing_from_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a command said is known though its log was emptied before it ended, as by the same result asked twice."""
    run = ("+experiment=quickstart",)
    log = tmp_path / f"{name_of(run)}.log"
    command = tmp_path / "command"
    command.write_text(f"#!/bin/sh\necho 'run folder: /there'\n: > '{log}'\n")
    command.chmod(0o700)
    monkeypatch.setattr("tula_hpc.paper.running.sys.executable", str(command))
    folders, failures = Runs(tmp_path, 1, lambda line: None).finish([run], [])
    assert (folders[run].path, failures) == (Path("/there"), {})


def test_numbers_are_short_and_unknown_ones_dashes():
    assert markdown(pd.DataFrame({"a_b": [1.23456, None], "c": ["x|y", "z"]})).splitlines() == [
        "| a b | c |",
        "| --- | --- |",
        "| 1.235 | x\\|y |",
        "| - | z |",
    ]


def test_an_unknown_scale_is_refused():
    with pytest.raises(ConfigError, match="there are smoke, small, paper"):
        scale_of("tiny")
