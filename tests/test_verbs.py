"""Commands on a run folder, with real processes on this machine and no Slurm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from waiting import wait_until

from tula_hpc import verbs
from tula_hpc.config import ControllerKind, ControllerSettings, Settings, to_plain
from tula_hpc.control import away
from tula_hpc.control.controller import Controller
from tula_hpc.control.jobs import Jobs
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.lease import Lease, controlling
from tula_hpc.control.local import LocalScheduler, _Job
from tula_hpc.control.slurm import SlurmScheduler
from tula_hpc.control.slurm_commands import Partition
from tula_hpc.control.verdicts import QueueState, Verdict
from tula_hpc.display import Display
from tula_hpc.errors import TulaError
from tula_hpc.overview import stage
from tula_hpc.ranks.timings import write_rank
from tula_hpc.runs import AttemptFolder, RunFolder, read_json, write_json, write_text
from tula_hpc.signatures import signature
from tula_hpc.starting import RunCancelled, _refuse_other_settings, cancel_of, control, shown

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
        output = process.communicate(timeout=900)[0]
    return process.returncode, output


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
        output = process.communicate(timeout=300)[0]
    run = only_run(tmp_path)
    assert process.returncode == 130
    assert "The same command goes on from here, and so does" in output
    assert [error["kind"] for error in run.attempt("train", 1).errors()] == ["preempted"]  # it saved before
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
            output = attached.communicate(timeout=300)[0]
        assert attached.returncode == 1
        assert "the run was cancelled" in output
        assert not running_ranks(tmp_path)
        assert [a.ending for a in Journal(run.journal).state().of("train")][-1] is Verdict.cancelled
    assert "it goes on now" in output
    assert "resubmit_cancelled: false" in run.config.read_text()  # a job cancelled alone stays so at the next start
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
            output = process.communicate(timeout=300)[0]
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
        assert "left; the run goes on" in process.communicate(timeout=300)[0]
    assert process.returncode == 0


def test_a_run_that_ended_before_its_plan_is_told(run_folder: RunFolder):
    """A folder without plan.json is answered with the way out."""
    write_text(run_folder.config, "")
    code, output = tula(run_folder.path, "attach", str(run_folder.path))
    assert code == 1
    assert "no plan.json" in output
    assert "give that command again" in output


def test_a_run_of_another_version_is_cancelled_but_not_gone_on_with(run_folder: RunFolder):
    """A setting that this version does not know is named, with the file and the way out."""
    planned(run_folder)
    write_text(run_folder.config, "cluster: {kind: local, colour: green}")
    for verb in ("attach", "report"):
        code, output = tula(run_folder.path, verb, str(run_folder.path))
        assert code == 1
        for words in (str(run_folder.config), "cluster.colour", "Use the version that began the run"):
            assert words in output
        assert "Traceback" not in output
    assert tula(run_folder.path, "cancel", str(run_folder.path))[0] == 0


def test_cancel_does_not_say_that_jobs_ended_if_slurm_did_not_hear_it(
    run_folder: RunFolder, command: Callable[..., Path]
):
    """A failing scancel ends cancel with its words, and the attempts are not on record as ended; one that only came
    too late does not."""
    planned(run_folder)
    write_text(run_folder.config, "cluster: {kind: slurm}")
    Journal(run_folder.journal).intend(Attempt("train", 1, f"{run_folder.tag}-train-n1-1-0a1b2c", 32, 1))
    command("squeue", f"7|RUNNING|{run_folder.tag}-train-n1-1-0a1b2c\n")
    for words, code in (("scancel: error: Unable to contact slurm controller", 1), ("", 1)):
        command("scancel", words, code, on_stderr=True)
        answer = tula(run_folder.path, "cancel", str(run_folder.path))
        assert answer[0] == 1
        assert words.removeprefix("scancel: error: ") in answer[1]
        assert "may go on" in answer[1]
        assert [a.ending for a in Journal(run_folder.journal).state().open] == [None]
    command("scancel", "scancel: error: Kill job error on job id 7: Invalid job id specified", 1, on_stderr=True)
    code, output = tula(run_folder.path, "cancel", str(run_folder.path))
    assert code == 0
    assert "1 jobs ended" in output
    assert [a.ending for a in Journal(run_folder.journal).state().open] == [Verdict.cancelled]


def test_what_was_measured_before_a_cancel_counts(
    run_folder: RunFolder, tiny_settings: Callable[..., Settings], rank_meta: Callable[..., dict[str, Any]]
):
    """The next start finds the whole record of an attempt that nobody had judged, and the lack of another's."""
    planned(run_folder)
    write_text(run_folder.config, "cluster: {kind: local}")
    whole, lost = (Attempt(f"profile/n001-b000{batch}", 1, "tag", batch, 1) for batch in (32, 64))
    for attempt in (whole, lost):
        Journal(run_folder.journal).intend(attempt)
    row = [0, 0.01, 0.03, 0.04, 0.005, 0.01, 0.1]
    write_rank(run_folder.attempt(whole.job, 1), 0, [row], rank_meta(world_size=1, batch_per_rank=32))
    assert tula(run_folder.path, "cancel", str(run_folder.path))[0] == 0
    journal, settings = Journal(run_folder.journal), tiny_settings()
    looks = Jobs(settings, run_folder, journal, LocalScheduler(settings), lambda: None).look()
    assert looks is not None
    assert [look.verdict for look in looks] == [Verdict.success, Verdict.cancelled]


def test_a_controller_that_learns_of_the_cancel_ends_its_jobs(
    run_folder: RunFolder, tiny_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
):
    """Also the one whose submission was under way when cancel looked at the queue."""
    settings, attempt = tiny_settings("cluster=slurm"), Attempt("train", 1, "tag", 32, 1)

    def go(controller: Controller) -> None:
        controller.journal.intend(attempt)
        controller.journal.submitted(attempt, "42")
        write_text(run_folder.cancelled, "")
        controller.heartbeat()

    ended: list[str] = []
    monkeypatch.setattr(Controller, "go", go)
    monkeypatch.setattr(SlurmScheduler, "cancel", lambda _, job_ids: ended.extend(job_ids))
    with pytest.raises(RunCancelled):
        control(settings, run_folder, [], Display(), None)
    assert ended == ["42"]


def test_settings_given_before_a_controller_takes_the_run_are_in_effect(
    run_folder: RunFolder, tiny_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
):
    """What another command writes while a controller starts counts: that one reads the settings once the run is its."""
    take, seen = Lease.take, []

    def take_late(lease: Lease) -> None:
        take(lease)
        write_text(run_folder.config, yaml.safe_dump(to_plain(tiny_settings("training.max_relaunches=7"))))

    write_text(run_folder.config, yaml.safe_dump(to_plain(tiny_settings())))
    monkeypatch.setattr(Lease, "take", take_late)
    monkeypatch.setattr(Controller, "go", lambda controller: seen.append(controller.settings.training.max_relaunches))
    control(None, run_folder, [], Display(), None)
    assert seen == [7]


@pytest.mark.parametrize("first", [None, "an earlier cancel"])
def test_a_cancel_that_comes_while_a_command_starts_stays(
    run_folder: RunFolder, tiny_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, first: str | None
):
    """The command takes back what was cancelled before it was given, and nothing else."""
    take = Lease.take

    def take_late(lease: Lease) -> None:
        take(lease)
        verbs.cancel([str(run_folder.path)], Display())

    planned(run_folder)
    if first is not None:
        write_text(run_folder.cancelled, first)
    write_text(run_folder.config, yaml.safe_dump(to_plain(tiny_settings())))
    monkeypatch.setattr(verbs, "LEAVES_WITHIN_S", 0.0)
    monkeypatch.setattr(Lease, "take", take_late)
    monkeypatch.setattr(Controller, "go", lambda controller: pytest.fail("it went on"))
    with pytest.raises(RunCancelled):
        control(tiny_settings(), run_folder, [], Display(), cancel_of(run_folder))
    assert run_folder.cancelled.exists()


def test_status_says_how_what_was_cancelled_goes_on(run_folder: RunFolder):
    """The whole run by attach, a single job by the setting; both with a command to copy."""
    write_json(run_folder.plan, {"command": ["python", "-m", "tula_hpc", "name=a b"]})
    journal, attempt = Journal(run_folder.journal), Attempt("train", 1, "tag", 32, 1)
    journal.intend(attempt)
    journal.concluded(attempt, Verdict.cancelled, "the scheduler says cancelled")
    output = tula(run_folder.path, "status", str(run_folder.path))[1]
    assert "train: cancelled, so not run again" in output
    assert "python -m tula_hpc 'name=a b' cluster.resubmit_cancelled=true" in output
    write_text(run_folder.cancelled, "")
    output = tula(run_folder.path, "status", str(run_folder.path))[1]
    assert f"to go on with it and its jobs: {shown('attach', str(run_folder.path))}" in output


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


@pytest.mark.parametrize(
    ("job", "verdict", "failed"),
    [
        ("profile/n001-b00032", Verdict.cuda_oom, False),
        ("profile/n001-b00032", Verdict.timeout, True),
        ("train", Verdict.replanned, False),
        ("train", Verdict.cuda_oom, True),
    ],
)
def test_an_end_that_the_run_goes_on_after_is_no_failure(
    run_folder: RunFolder, job: str, verdict: Verdict, failed: bool
):
    """A batch that does not fit is an answer, and a training that was moved is to go on."""
    planned(run_folder)
    journal, attempt = Journal(run_folder.journal), Attempt(job, 1, "tag", 32, 1)
    journal.intend(attempt)
    journal.concluded(attempt, verdict, "")
    assert stage(run_folder, False).startswith("failed") == failed


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
    write_text(run_folder.config, "")
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


def test_a_sweep_over_an_interval_is_answered_in_our_words(tmp_path: Path):
    """Hydra's own sweeper knows none."""
    code, output = tula(tmp_path, "-m", "training.lr=interval(0,1)")
    assert code == 2
    assert "training.lr=interval(0,1): nothing says which values of it" in output
    assert "Traceback" not in output


def test_a_controller_that_is_being_queued_again_is_still_there(
    run_folder: RunFolder, command: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    """Slurm shows it as leaving its node at first; what has only that left does not work on the run."""
    name = away.controller_name(run_folder)
    after = {"next": f"7|PENDING|{name}\n"}
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: command("squeue", after["next"]))
    monkeypatch.setattr(away, "time", clock)
    command("squeue", f"7|COMPLETING|{name}\n")
    job = away.queued_controller(run_folder)
    assert job is not None
    assert (job.job_id, job.state) == ("7", QueueState.pending)
    after["next"] = f"7|COMPLETED|{name}\n"
    command("squeue", f"7|COMPLETING|{name}\n")
    assert away.queued_controller(run_folder) is None


def test_the_same_experiment_below_two_roots_has_jobs_of_its_own(
    tmp_path: Path, run_folder: RunFolder, command: Callable[..., Path]
):
    """What cancel ends in one root is not what runs for the other; a link to the root is no other root."""
    other = RunFolder(tmp_path / "elsewhere" / run_folder.path.name)
    (tmp_path / "link").symlink_to(run_folder.path.parent)
    linked = RunFolder(tmp_path / "link" / run_folder.path.name)
    jobs = ("controller", "train-n1-3-0a1b2c", "probe-n2-4-0a1b2c")
    names = [f"{run.tag}-{job}" for run in (run_folder, other) for job in jobs]
    command("squeue", "".join(f"{number}|RUNNING|{name}\n" for number, name in enumerate(names)))
    assert [job.job_id for job in away.jobs_of(linked)] == ["0", "1", "2"]
    assert [job.job_id for job in away.jobs_of(other)] == ["3", "4", "5"]


MODEL = (
    "import torch\n\n\ndef net(**sizes):\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
)


def test_a_run_does_not_go_on_with_other_code(tmp_path: Path, smallest: list[str]):
    """After an edit, neither `attach` nor a job that was submitted before; the same command begins a run of its own."""
    (tmp_path / "mine.py").write_text(MODEL)
    arguments = [*smallest, "workload.model._target_=mine.net", "until=choice"]
    code, output = tula(tmp_path, *arguments)
    assert code == 0, output
    run = only_run(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL + "# other\n")
    run.untrained.unlink()
    code, output = tula(tmp_path, "attach", run.path.name)
    assert code == 1
    assert f"{tmp_path / 'mine.py'} changed since {run.path} was begun" in output
    attempt = run.attempt("profile/n001-b00032", 2)
    attempt.path.mkdir()
    write_json(attempt.request, read_json(run.attempt("profile/n001-b00032", 1).request))
    job = subprocess.run([sys.executable, "-m", "tula_hpc.ranks.job", str(attempt.path)], capture_output=True)
    assert job.returncode == 1
    assert "mine.py changed since" in attempt.errors()[0]["message"]
    assert tula(tmp_path, *arguments)[0] == 0
    assert len(list(tmp_path.glob("runs/*/plan.json"))) == 2


def test_other_settings_than_those_at_work_are_refused(tiny_settings: Callable[..., Settings], run_folder: RunFolder):
    """A controller job goes on with what it began with, so the command says what is not in effect."""
    write_text(run_folder.config, yaml.safe_dump(to_plain(tiny_settings("until=choice"))))
    _refuse_other_settings(tiny_settings("until=choice"), run_folder)
    with pytest.raises(TulaError, match=r"until=result, training\.max_relaunches=9 is not in effect"):
        _refuse_other_settings(tiny_settings("training.max_relaunches=9"), run_folder)


def test_a_name_with_brackets_is_listed_whole(tmp_path: Path):
    """They are no markup."""
    planned(RunFolder(tmp_path / "runs" / "a [v2] b-0123456789"))
    assert "a [v2] b-0123456789" in tula(tmp_path, "list")[1]


def test_a_local_training_is_told_before_its_time_is_over(tiny_settings: Callable[..., Settings], tmp_path: Path):
    """As Slurm does, so that it can save; what only measures is not."""
    scheduler = LocalScheduler(tiny_settings())
    for saves in (True, False):
        with subprocess.Popen(["sleep", "600"]) as process:
            job = _Job(AttemptFolder(tmp_path), 1, 1, saves, state=QueueState.running, processes=[process])
            job.started = time.monotonic() - 50
            scheduler._look_at(job)
            assert job.told is saves
            process.kill()


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


@pytest.mark.parametrize("record", ["fit.json", "selection.json", "plan.json"])
def test_a_record_that_lacks_something_is_told_and_hides_no_other_run(tmp_path: Path, record: str):
    """As of another version, or edited: `report` and `status` say so in one line, `list` in the run's row."""
    root = tmp_path / "runs"
    shutil.copytree(Path(__file__).parent / "data" / "h100x4-resnet50-synthetic", root / "whole")
    shutil.copytree(root / "whole", root / "lacking")
    (root / "lacking" / record).write_text('{"version": 1}')
    code, text = tula(tmp_path, "list", f"run_root={root}")
    assert code == 0, text
    assert "whole" in text
    assert "lacking" in text
    for verb in ("report", "status"):
        assert "Traceback" not in tula(tmp_path, verb, "lacking", f"run_root={root}")[1]
