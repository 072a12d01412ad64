"""Commands on a run folder, with real processes on this machine and no Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tula_hpc.config import ControllerKind, ControllerSettings, Settings, signature
from tula_hpc.control import away
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.lease import controlling
from tula_hpc.control.slurm_commands import Partition
from tula_hpc.control.verdicts import Verdict
from tula_hpc.overview import stage
from tula_hpc.runs import RunFolder, read_json, write_json, write_text
from tula_hpc.starting import shown

ROOT = Path(__file__).parents[1]
# in the training until it is ended
ENDLESS = "training.epochs=100000"


@pytest.fixture
def smallest(tiny_overrides: list[str]) -> list[str]:
    """Overrides of a local run with a single candidate."""
    one = ["grid.max_nodes=1", "grid.max_batch_per_rank=32", "grid.min_batch_per_rank=32", "training.epochs=1"]
    return [*tiny_overrides, "cluster=local", *one]


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tula_hpc", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def tula(folder: Path, *arguments: str) -> tuple[int, str]:
    with begin(folder, *arguments) as process:
        output = process.communicate(timeout=300)[0]
    return process.returncode, output


def wait_until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def running_ranks(folder: Path) -> list[str]:
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if str(folder) in line and "tula_hpc.ranks.job" in line]


def only_run(folder: Path) -> RunFolder:
    (plan,) = (folder / "runs").glob("*/plan.json")
    return RunFolder(plan.parent)


def planned(run: RunFolder) -> RunFolder:
    """A run folder as far as the commands that read it need."""
    write_json(run.plan, {"working_dir": str(run.path), "command": []})
    return run


def test_a_detached_run_is_cancelled_and_taken_up(tmp_path: Path, smallest: list[str]):
    """Ctrl-C names the ways to go on; attach goes on from elsewhere; cancel ends that, and attach takes it back."""
    with begin(tmp_path, *smallest, ENDLESS) as process:
        wait_until(lambda: list(tmp_path.glob("runs/*/train/metrics.jsonl")))
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    run = only_run(tmp_path)
    assert process.returncode == 130
    assert "The same command goes on from here, and so does" in output
    assert shown("attach", str(run.path)) in output
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    name = [run.path.name[:14], f"run_root={tmp_path}/runs"]
    for _ in range(2):  # the second time it was cancelled before
        epochs = len(run.read_metrics())
        with begin(elsewhere, "attach", *name) as attached:
            wait_until(lambda before=epochs: len(run.read_metrics()) > before)
            code, output = tula(elsewhere, "cancel", *name)
            assert code == 0, output
            output = attached.communicate(timeout=60)[0]
        assert attached.returncode == 1
        assert "the run was cancelled" in output
        assert not running_ranks(tmp_path)
        assert [a.verdict for a in Journal(run.journal).state().of("train")][-1] is Verdict.cancelled
    assert "it goes on now" in output
    assert tula(elsewhere, "cancel", *name)[0] == 0
    assert "cancelled" in tula(elsewhere, "list", f"run_root={tmp_path}/runs")[1]


def test_attach_watches_what_another_works_on(run_folder: RunFolder):
    """It shows the jobs of the journal, and says when their controller is gone and how to go on."""
    planned(run_folder)
    attempt = Attempt("profile/n001-b00032", 1, "tag", 32, 1)
    with controlling(run_folder) as lease:
        Journal(run_folder.journal).intend(attempt)
        with begin(run_folder.path.parent.parent, "attach", run_folder.path.name[:6]) as process:
            assert process.stdout is not None
            assert f"process {os.getpid()}" in process.stdout.readline()
            assert "profile on 1 node, batch 32 a rank: pending" in process.stdout.readline()
            lease.give_back()
            output = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert f"nobody works on {run_folder.path} any more" in output
    assert shown("attach", str(run_folder.path)) in output


def test_leaving_a_watched_run_ends_nothing(run_folder: RunFolder):
    """Ctrl-C ends the watching only."""
    planned(run_folder)
    with controlling(run_folder), begin(run_folder.path.parent.parent, "attach", str(run_folder.path)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert "left; the run goes on" in process.communicate(timeout=60)[0]
    assert process.returncode == 0


def test_a_run_that_ended_before_its_plan_is_told(run_folder: RunFolder):
    """A folder without plan.json is answered with the way out."""
    write_text(run_folder.config, "")
    code, output = tula(run_folder.path, "attach", str(run_folder.path))
    assert code == 1
    assert "no plan.json" in output
    assert "give that command again" in output


def test_logs_are_of_the_rank_that_failed_first(run_folder: RunFolder):
    """Without --rank the first failure is shown, of the newest attempt, or of the one that is named."""
    planned(run_folder)
    journal = Journal(run_folder.journal)
    for number in (1, 2):
        journal.intend(Attempt("profile/n002-b00064", number, "tag", 64, 2))
        attempt = run_folder.attempt("profile/n002-b00064", number)
        for rank in (0, 1):
            write_text(attempt.rank_log(rank), f"attempt {number} rank {rank}")
    write_json(attempt.rank_error(1), {"time": 1.0, "rank": 1})
    name = str(run_folder.path)
    for arguments, words in (
        ([], "attempt 2 rank 1"),
        (["--rank", "0"], "attempt 2 rank 0"),
        (["n002-b00064@1"], "attempt 1 rank 0"),
        (["n002-b00064@1", "--rank=1"], "attempt 1 rank 1"),
    ):
        code, output = tula(run_folder.path, "logs", name, *arguments)
        assert code == 0, output
        assert words in output
    for arguments, words in (
        (["train"], "no job train; its jobs are: n002-b00064@1, n002-b00064@2"),
        (["--rank", "7"], "no log of rank 7; there are: rank-0000.log, rank-0001.log"),
        (["--rank", "x"], "--rank is 'x'"),
        (["controller"], "no log of a controller job"),
    ):
        code, output = tula(run_folder.path, "logs", name, *arguments)
        assert code in (1, 2)
        assert words in output
        assert "Traceback" not in output


def test_the_stage_of_a_run_is_read_from_its_files(run_folder: RunFolder):
    """From planned to finished, each file moves a run one word on."""
    seen = [stage(run_folder, False)]
    planned(run_folder)
    seen.append(stage(run_folder, True))
    journal, attempt = Journal(run_folder.journal), Attempt("profile/n001-b00032", 1, "tag", 32, 1)
    journal.intend(attempt)
    journal.intend(replace(attempt, number=2))
    journal.concluded(attempt, Verdict.failed, "")
    seen += [stage(run_folder, True), stage(run_folder, False)]
    write_json(run_folder.fit, {})
    seen.append(stage(run_folder, True))
    write_json(run_folder.selection, {})
    write_json(run_folder.progress, {"samples": 43, "of_samples": 100})
    seen.append(stage(run_folder, True))
    write_text(run_folder.cancelled, "")
    seen.append(stage(run_folder, False))
    write_json(run_folder.train_result, {})
    write_text(run_folder.report, "")
    seen.append(stage(run_folder, False))
    assert seen == [
        "not begun",
        "planned",
        "profiling 1/2",
        "failed: profiling 1/2",
        "fitted",
        "training 43 %",
        "cancelled",
        "finished",
    ]


def test_a_sweep_ends_with_a_table_and_each_run_knows_its_own_command(tmp_path: Path, smallest: list[str]):
    """The table names both runs, and plan.json holds the command of one run, without the sweep."""
    code, output = tula(tmp_path, "-m", *smallest, "objective=cost,time")
    assert code == 0, output
    runs = [RunFolder(plan.parent) for plan in (tmp_path / "runs").glob("*/plan.json")]
    assert len(runs) == 2
    table = output[output.rindex("run folder: ") :]
    assert table.count("finished") == 2
    for run in runs:
        assert run.path.name in table
        code, output = tula(tmp_path, *read_json(run.plan)["command"][3:])
        assert output.strip().endswith(str(run.path))


def test_a_misspelt_key_of_a_sweep_is_answered_as_without_one(tmp_path: Path):
    """Before Hydra begins with the first run, in our words."""
    code, output = tula(tmp_path, "-m", "grid.max_node=3,4")
    assert code == 2
    assert "did you mean grid.max_nodes" in output
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


def test_the_controller_is_no_part_of_the_result(tiny_settings: Callable[..., Settings]):
    """Where the controller runs does not make another run."""
    settings = tiny_settings("cluster=slurm")
    away_settings = replace(settings, controller=ControllerSettings(ControllerKind.slurm, "long", 60, 2.0))
    assert signature(away_settings) == signature(settings)


def test_a_controller_job_needs_slurm(tmp_path: Path, smallest: list[str]):
    """Local jobs end with their command, so it cannot be sent away; said before anything is made."""
    code, output = tula(tmp_path, *smallest, "controller=slurm", "controller.time_limit_min=3")
    assert code == 2
    for words in ("cluster.kind is local", "controller=here", "controller.time_limit_min is 3"):
        assert words in output
    assert list(tmp_path.iterdir()) == []


def test_the_controllers_batch_script_quotes_what_it_names(
    tiny_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A folder with spaces and quotes reaches the job as it is; site options are those of the cluster."""
    settings = tiny_settings("cluster=slurm", "cluster.account=physics", "cluster.setup=[module load x]")
    run = RunFolder(tmp_path / "it's 100 %" / "tiny-0123456789")
    monkeypatch.setattr(away.slurm_commands, "partitions", lambda: {"main": Partition(4, "1:00:00", True)})
    script = away._script(settings, run).splitlines()
    assert script[:2] == ["#!/bin/bash", "module load x"]
    assert script[2].startswith("exec ")
    assert script[2].endswith("it'\"'\"'s 100 %/tiny-0123456789'")
    options = away._options(settings, run)
    assert "--account=physics" in options
    assert "--time=60" in options
    assert any("it's 100 %%/" in option and option.endswith("/%j_controller.out") for option in options)
