"""The controller is killed at every step it takes, and at every restart goes on: nothing lost, nothing doubled."""

from __future__ import annotations

import signal
from pathlib import Path

from tula_hpc.control.journal import Journal
from tula_hpc.control.verdicts import Verdict
from tula_hpc.runs import read_json

from .cluster import ThrowawaySlurm
from .command import named_run, tula

# Runs the command line and kills itself, once for each, before and after everything the controller makes durable.
DRIVER = """
import os, signal, sys
from pathlib import Path

from tests.killing import Kills
from tula_hpc.cli import main
from tula_hpc.control import controller
from tula_hpc.control.journal import Journal
from tula_hpc.control.slurm import SlurmScheduler

kills = Kills(Path(sys.argv.pop(1)), lambda: os.kill(os.getpid(), signal.SIGKILL))
Journal._append = kills.around(Journal._append, lambda self, event, **values: f"{event} {values.get('job', '')}")
SlurmScheduler.submit = kills.around(SlurmScheduler.submit, lambda self, job: "sbatch " + job.tag.split("-")[-4])
controller.write_json = kills.around(controller.write_json, lambda path, value: path.name)
Controller = controller.Controller
for stage in ("_profile", "_fit", "_choose", "_train", "_report"):
    setattr(Controller, stage, kills.around(getattr(Controller, stage), lambda *arguments, stage=stage: stage))
main(sys.argv[1:])
"""


def test_a_controller_killed_at_every_step_ends_the_run_as_if_it_had_not_been(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]
):
    """Each candidate and the training ran to success exactly once, whatever was killed, and nothing runs twice."""
    (tmp_path / "driver.py").write_text(DRIVER)
    arguments = [
        *tiny_overrides,
        "cluster=slurm",
        "cluster.poll_interval_s=0.5",
        "cluster.file_lag_s=3",
        "cluster.memory_gib=1.5",
        "grid.max_nodes=1",
        "grid.max_batch_per_rank=64",
        "grid.min_batch_per_rank=32",
    ]
    survived = tmp_path / "survived.txt"
    for _ in range(80):
        answer = tula(tmp_path, *arguments, program=("driver.py", str(survived)))
        if answer.returncode != -signal.SIGKILL:
            break
    run = named_run(answer)

    points = survived.read_text().splitlines()
    jobs = ("profile/n001-b00032", "profile/n001-b00064", "train")
    for job in jobs:
        for event in ("intent", "submitted", "verdict"):
            assert f"before {event} {job}" in points
            assert f"after {event} {job}" in points
    for kind in ("profile", "train"):
        assert {f"before sbatch {kind}", f"after sbatch {kind}"} <= set(points)
    assert {"after fit.json", "after selection.json", "after _report"} <= set(points)

    state = Journal(run.journal).state()
    for job in jobs:
        attempts = state.of(job)
        assert [a.verdict for a in attempts].count(Verdict.success) == 1
        claimed = [a for a in attempts if run.attempt(job, a.number).claim.exists()]
        assert len(claimed) == 1, f"{job} ran {len(claimed)} times"
    assert [line["epoch"] for line in run.read_metrics()] == [1, 2]
    assert read_json(run.train_result)["global_batch"] == read_json(run.selection)["global_batch"]


def test_a_submission_without_an_answer_is_found_and_not_repeated(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]
):
    """With a frozen controller sbatch fails although the job is taken; it is found by its tag once Slurm answers."""
    arguments = [*tiny_overrides, "cluster=slurm", "cluster.poll_interval_s=1", "cluster.memory_gib=1.5"]
    one = ["grid.max_nodes=1", "grid.max_batch_per_rank=32", "grid.min_batch_per_rank=32", "cluster.file_lag_s=20"]
    # freezes Slurm at the moment of the first sbatch, and thaws it after sbatch has given up
    driver = """
import os, signal, sys
from tula_hpc.cli import main
from tula_hpc.control.slurm import SlurmScheduler

controller_pid = int(sys.argv.pop(1))
submit = SlurmScheduler.submit


def frozen_once(self, request):
    SlurmScheduler.submit = submit
    os.kill(controller_pid, signal.SIGSTOP)
    try:
        return submit(self, request)
    finally:
        os.kill(controller_pid, signal.SIGCONT)


SlurmScheduler.submit = frozen_once
main(sys.argv[1:])
"""
    (tmp_path / "driver.py").write_text(driver)
    pid = (slurm.folder / "run" / "slurmctld.pid").read_text().strip()
    answer = tula(tmp_path, *arguments, *one, program=("driver.py", pid))
    run = named_run(answer)
    journal = Journal(run.journal)
    assert any("sbatch got no answer" in event.get("text", "") for event in journal.events())
    assert [a.verdict for a in journal.state().of("profile/n001-b00032")] == [Verdict.success]
