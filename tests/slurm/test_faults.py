"""Each fault on the real Slurm: nothing is lost, nothing runs twice, and the reason is told in one line."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tula_hpc.runs import read_json

from .cluster import SlurmSettings, ThrowawaySlurm
from .faulty import Tula, submissions, wait_for

ONE = ["grid.max_nodes=1", "grid.max_batch_per_rank=32"]
TWO = ["grid.max_nodes=1", "grid.max_batch_per_rank=64", "search=full"]
PAIR = ["grid.min_nodes=2", "grid.max_nodes=2", "grid.max_batch_per_rank=64", "search=full"]
SMALL, LARGE = "profile/n001-b00032", "profile/n001-b00064"
# as long as the training is slow it goes on for a minute: it is not over before a test has done what it wants to
LONG = ["training.epochs=40"]
LONG_EPOCHS = list(range(1, 41))


@pytest.fixture(scope="module")
def slurm_settings() -> SlurmSettings:
    """With a partition whose jobs preempt those of the default one, and those of another, which are warned."""
    preemption = ("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL")
    urgent = "PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP"
    warned = "PartitionName=warned Nodes=ALL PriorityTier=1 GraceTime=30 State=UP"
    return SlurmSettings(requeue_wait_s=10, extra_lines=(*preemption, urgent, warned))


@pytest.fixture
def tula(slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]) -> Iterator[Tula]:
    """A command of one candidate, in the background; whatever it left in Slurm is ended afterwards."""
    command = Tula(tmp_path, [*tiny_overrides, *ONE])
    yield command
    if command.process is not None and command.process.poll() is None:
        command.kill()
    slurm.run("scancel", "--user", "root")


def test_slurmctld_restarted_while_a_job_runs(slurm: ThrowawaySlurm, tula: Tula):
    """The job goes on without its controller, and so does the run."""
    tula.switch_on("hold")
    tula.start()
    tula.wait_claimed(SMALL)
    slurm.stop_controller()
    tula.switch_off("hold")
    wait_for(lambda: tula.run.attempt(SMALL, 1).rank_json(0).exists(), "the measurement")
    slurm.start_controller()
    tula.finish()
    assert tula.verdicts(SMALL) == ["success"]
    assert tula.verdicts("train") == ["success"]


def test_slurmdbd_stopped(slurm: ThrowawaySlurm, tula: Tula):
    """Without its data base Slurm runs jobs, and the run needs nothing of it."""
    slurm.stop_accounting()
    tula.start()
    tula.finish()
    assert tula.verdicts(SMALL) == ["success"]
    assert tula.verdicts("train") == ["success"]


def test_a_node_that_dies_is_not_used_again(slurm: ThrowawaySlurm, tula: Tula):
    """The job of a dead node is run again on another one, and the node is named."""
    tula.switch_on("hold")
    tula.start()
    tula.wait_claimed(SMALL)
    node = read_json(tula.run.attempt(SMALL, 1).launch)["host"]
    slurm.kill_node(node)
    tula.switch_off("hold")
    text = tula.finish()
    assert tula.verdicts(SMALL) == ["node_failure", "success"]
    assert f"{node} will not be used again" in text
    assert read_json(tula.run.attempt(SMALL, 2).launch)["host"] != node
    assert tula.attempts(SMALL)[0].broken_hosts == (node,)


def test_a_cancelled_element_is_left_out_and_the_rest_goes_on(slurm: ThrowawaySlurm, tula: Tula):
    """One running array element and one pending one are cancelled by the user: neither comes back."""
    tula.overrides += [*TWO, "grid.max_batch_per_rank=128", "cluster.max_running_jobs=1"]
    tula.switch_on("hold")
    tula.start()
    running = tula.wait_claimed(SMALL)
    pending = tula.wait_submitted("profile/n001-b00128")
    # one that no answer has shown would be taken for lost: Slurm keeps no trace of what is cancelled before it starts
    answers = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tula_hpc"
    wait_for(lambda: any(f"{pending.job_id}|" in f.read_text() for f in answers.glob("slurm-*/squeue")), "a look at it")
    slurm.run("scancel", str(running.job_id))
    slurm.run("scancel", str(pending.job_id))
    tula.wait_claimed(LARGE)
    tula.switch_off("hold")
    text = tula.finish()
    assert tula.verdicts(SMALL) == ["cancelled"]
    assert tula.verdicts("profile/n001-b00128") == ["cancelled"]
    assert tula.verdicts(LARGE) == ["success"]
    assert "n001-b00032: cancelled: the scheduler says cancelled" in text
    assert read_json(tula.run.selection)["batch_per_rank"] == 64


def test_a_cancelled_run_stays_cancelled(slurm: ThrowawaySlurm, tula: Tula):
    """After the whole array is cancelled the command ends with the reason, and the same command submits nothing."""
    tula.switch_on("hold")
    tula.start()
    attempt = tula.wait_claimed(SMALL)
    slurm.run("scancel", str(attempt.job_id).partition("_")[0])
    code, text = tula.end()
    assert code == 1
    assert "n001-b00032: cancelled" in text
    tula.start()
    code, text = tula.end()
    assert code == 1
    assert len(tula.attempts(SMALL)) == 1
    assert len(submissions(slurm, tula.run)) == 1


def test_a_requeue_is_refused_by_a_job_that_has_one_owner(slurm: ThrowawaySlurm, tula: Tula):
    """`scontrol requeue` is not for our jobs; when it is forced the job goes on from its newest launch, once."""
    tula.switch_on("hold")
    tula.start()
    attempt = tula.wait_claimed(SMALL)
    launch = tula.run.attempt(SMALL, 1).launch
    first = read_json(launch)["launch"]
    refused = subprocess.run(["scontrol", "requeue", str(attempt.job_id)], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    slurm.run("scontrol", "update", f"jobid={attempt.job_id}", "requeue=1")
    slurm.run("scontrol", "requeue", str(attempt.job_id))
    tula.switch_off("hold")
    wait_for(lambda: read_json(launch)["launch"] != first, "the second launch")
    tula.finish()
    assert tula.verdicts(SMALL) == ["success"]
    assert read_json(tula.run.attempt(SMALL, 1).rank_json(0))["launch"] != first


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_cuda_memory_runs_out_on_one_rank_of_a_training(tula: Tula, where: str):
    """One rank of two runs out of memory: the job ends as a whole and goes on with the next smaller batch."""
    tula.from_batch = 64
    tula.__post_init__()
    tula.overrides += [*PAIR, "objective=time", "objective.tie_tolerance=0", "search.memory_fraction=1"]
    tula.overrides += ["training.epochs=3"]
    tula.switch_on("slow")
    tula.start()
    wait_for(tula.run.selection.exists, "the choice")
    tula.switch_on("oom-" + where)
    tula.switch_off("slow")
    text = tula.finish()
    assert read_json(tula.run.selection)["batch_per_rank"] == 64
    assert tula.verdicts("train") == ["cuda_oom", "success"]
    assert "cuda oom: rank 1 on tula-n" in text
    assert "CUDA out of memory" in text
    result = read_json(tula.run.train_result)
    assert (result["global_batch"], result["requested_global_batch"]) == (64, 128)


def test_a_preempted_training_goes_on_with_the_same_samples(slurm: ThrowawaySlurm, tula: Tula):
    """The early signal comes 4 s after the start of a job of five minutes; it is no time-out, and no sample is lost."""
    tula.overrides += ["cluster.train_time_limit_min=5", *LONG]
    tula.start()
    wait_for(tula.run.selection.exists, "the choice")
    tula.switch_on("slow")
    attempt = tula.wait_claimed("train")
    slurm.run("scancel", "--signal=USR2", str(attempt.job_id))
    wait_for(lambda: any(tula.run.checkpoints.glob("*.pt")), "a checkpoint")
    tula.switch_off("slow")
    text = tula.finish()
    assert tula.verdicts("train") == ["preempted", "success"]
    assert "SIGUSR2 came" in text
    assert [line["epoch"] for line in tula.run.read_metrics()] == LONG_EPOCHS


def test_a_training_that_slurm_preempts_goes_on_when_there_is_room(slurm: ThrowawaySlurm, tula: Tula):
    """A job of a more urgent partition takes the nodes without a warning; the training goes on after it."""
    tula.overrides += LONG
    tula.start()
    wait_for(tula.run.selection.exists, "the choice")
    tula.switch_on("slow")
    tula.wait_claimed("train")
    wait_for(lambda: any(tula.run.checkpoints.glob("*.pt")), "a checkpoint")
    slurm.run(
        "sbatch", "--partition=urgent", "--nodes=4", "--exclusive", f"--output={tula.folder}/urgent.log", "--wrap=:"
    )
    wait_for(lambda: tula.verdicts("train")[0] != "none", "the verdict")
    tula.switch_off("slow")
    tula.finish()
    assert tula.verdicts("train") == ["preempted", "success"]
    assert [line["epoch"] for line in tula.run.read_metrics()] == LONG_EPOCHS


@pytest.mark.parametrize("profiling", ["single", "packed"])
def test_a_measurement_that_slurm_preempts_is_made_again(slurm: ThrowawaySlurm, tula: Tula, profiling: str):
    """Where there is a time of grace the job is sent SIGTERM, and what ends then Slurm calls failed."""
    tula.overrides += ["cluster.partition=warned", f"profiling={profiling}"]
    tula.switch_on("hold")
    tula.start()
    tula.wait_claimed(SMALL)
    slurm.run(
        "sbatch", "--partition=urgent", "--nodes=4", "--exclusive", f"--output={tula.folder}/urgent.log", "--wrap=:"
    )
    wait_for(lambda: tula.verdicts(SMALL)[0] != "none", "the verdict")
    tula.switch_off("hold")
    text = tula.finish()
    assert tula.verdicts(SMALL) == ["preempted", "success"]
    assert "SIGTERM came" in text


def test_a_suspended_training_of_several_ranks_is_not_told_as_hung(slurm: ThrowawaySlurm, tula: Tula):
    """Its ranks wait for each other by the clock, which goes on meanwhile."""
    tula.overrides += [*PAIR, *LONG, "training.collective_timeout_s=5"]
    tula.start()
    wait_for(tula.run.selection.exists, "the choice")
    tula.switch_on("slow")
    attempt = tula.wait_claimed("train")
    wait_for(lambda: len(tula.run.read_metrics()) > 0, "an epoch")
    since = time.monotonic()
    slurm.run("scontrol", "suspend", str(attempt.job_id))
    wait_for(lambda: time.monotonic() - since > 10, "the ranks' patience")
    slurm.run("scontrol", "resume", str(attempt.job_id))
    wait_for(lambda: tula.verdicts("train")[0] != "none", "the verdict")
    tula.switch_off("slow")
    text = tula.finish()
    assert tula.verdicts("train") == ["preempted", "success"]
    assert "suspended for longer than training.collective_timeout_s" in text
    assert [line["epoch"] for line in tula.run.read_metrics()] == LONG_EPOCHS


def test_a_training_longer_than_its_time_limit_takes_several_jobs(tula: Tula):
    """A minute is not enough: the job saves before its end and the next one goes on, or on a busy machine the one after
    that."""
    tula.overrides += ["cluster.train_time_limit_min=1", "training.epochs=60", "data.train_samples=null"]
    tula.start()
    wait_for(tula.run.selection.exists, "the choice")
    tula.switch_on("slow")
    wait_for(lambda: len(tula.attempts("train")) > 1, "the second job")
    tula.switch_off("slow")
    tula.finish()
    *before, last = tula.verdicts("train")
    assert set(before) == {"timeout"}
    assert last == "success"
    assert [line["epoch"] for line in tula.run.read_metrics()] == list(range(1, 61))


def run_that_hangs_once(tula: Tula, job: str) -> str:
    """What a run prints whose job hangs until it has its verdict, and not again."""
    tula.switch_on("hang")
    tula.start()
    tula.wait_claimed(job)
    wait_for(lambda: tula.verdicts(job)[0] != "none", "the verdict")
    tula.switch_off("hang")
    return tula.finish()


def test_a_rank_that_hangs_is_ended_with_a_reason(tula: Tula):
    """A job without progress is ended and run again; so is one of whose ranks one keeps the others waiting.

    Half a minute is more than a rank that does not hang needs between two beats, to load torch say.
    """
    tula.overrides += ["cluster.hang_timeout_min=0.5", "search.max_seconds=20"]
    text = run_that_hangs_once(tula, SMALL)
    assert tula.verdicts(SMALL) == ["hung", "success"]
    assert "no sign of progress for 30 s" in text


def test_a_rank_that_keeps_the_others_waiting_ends_the_job(tula: Tula):
    """The rank that waits says for whom; the job ends at the collective time-out, not at its time limit.

    Ranks that do not hang begin less than half a minute apart, also on a busy machine.
    """
    tula.overrides += [*PAIR, "grid.max_batch_per_rank=32", "training.collective_timeout_s=30"]
    job = "profile/n002-b00032"
    text = run_that_hangs_once(tula, job)
    assert tula.verdicts(job) == ["hung", "success"]
    assert "rank 0 on tula-n" in text


@pytest.mark.parametrize(
    ("job", "settings"),
    [(SMALL, ONE), ("profile/n002-b00032", [*PAIR, "grid.max_batch_per_rank=32"])],
    ids=["one rank", "one of two ranks"],
)
def test_an_error_of_the_users_own_is_shown_with_its_place(tula: Tula, job: str, settings: list[str]):
    """A mistake in the model ends the run with the rank, the error and the line, and is not tried again; that the
    other ranks are ended then is no preemption."""
    tula.overrides += settings
    tula.switch_on("bug")
    tula.start()
    code, text = tula.end()
    assert code == 1
    assert "ValueError: a mistake in the model" in text
    assert "faulty_model.py, line" in text
    assert '    raise ValueError("a mistake in the model")' in text
    assert "Traceback" not in text
    assert tula.verdicts(job) == ["failed"]


def test_the_newest_checkpoint_is_corrupt(slurm: ThrowawaySlurm, tula: Tula):
    """The one before it is taken, and the epochs end up complete."""
    tula.overrides += LONG
    tula.start()
    wait_for(tula.run.selection.exists, "the choice")
    tula.switch_on("slow")
    attempt = tula.wait_claimed("train")
    wait_for(lambda: len(list(tula.run.checkpoints.glob("samples-*.pt"))) == 2, "two checkpoints")
    tula.kill()
    slurm.run("scancel", "--signal=KILL", str(attempt.job_id))
    slurm.wait_empty()
    newest = max(tula.run.checkpoints.glob("samples-*.pt"))
    newest.write_bytes(newest.read_bytes()[:1000])
    tula.switch_off("slow")
    tula.overrides += ["cluster.resubmit_cancelled=true"]
    tula.start()
    tula.finish()
    assert [line["epoch"] for line in tula.run.read_metrics()] == LONG_EPOCHS
    logs = "".join(path.read_text() for path in tula.run.scheduler.glob("*_log.out"))
    assert f"{newest.name} cannot be read" in logs


# Harms a rank's file of the first attempt before the controller reads it.
HARMFUL = """
import sys
from tula_hpc.cli import main
from tula_hpc.control import jobs

read_point = jobs.read_point


def harm_first(folder, candidate):
    path = folder.rank_json(0)
    if folder.number == 1 and path.exists():
        path.write_text({change})
    return read_point(folder, candidate)


jobs.read_point = harm_first
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("path.read_text()[:-40]", "is not whole"),
        ("path.read_text().replace('\"attempt\": 1', '\"attempt\": 7')", "is of attempt 7"),
    ],
)
def test_torn_and_stale_rank_files(tula: Tula, change: str, words: str):
    """A file that cannot be trusted is named, and its point is measured again."""
    tula.driver = HARMFUL.format(change=change)
    tula.start()
    text = tula.finish()
    assert tula.verdicts(SMALL) == ["incomplete", "success"]
    assert words in text
    assert "attempt-1/rank-0000" in text
    assert [point["attempt"] for point in read_json(tula.run.fit)["points"]] == [2]


def test_two_controllers_at_once(tula: Tula):
    """The second one says who works on the run and leaves it alone."""
    tula.switch_on("hold")
    tula.start()
    tula.wait_claimed(SMALL)
    second = Tula(tula.folder, tula.overrides)
    second.start()
    code, text = second.end()
    assert code == 3
    assert f"process {tula.process.pid}" in text  # type: ignore[union-attr]
    assert "attach" in text
    tula.switch_off("hold")
    tula.finish()
    assert tula.ran(SMALL) == 1


@pytest.fixture
def small_disk(tula: Tula) -> Iterator[Path]:
    """The run root on a file system of its own that holds 8 MiB."""
    runs = tula.folder / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(runs)], check=True)
    yield runs
    if tula.process is not None and tula.process.poll() is None:
        tula.kill()
    subprocess.run(["umount", "--lazy", str(runs)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room on a file system."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def test_the_disk_of_the_run_folder_is_full(slurm: ThrowawaySlurm, tula: Tula, small_disk: Path):
    """One line says so; with room again the same command goes on, and nothing ran twice."""
    tula.switch_on("hold")
    tula.start()
    tula.wait_claimed(SMALL)
    filler = fill(small_disk)
    tula.switch_off("hold")
    code, text = tula.end()
    assert code == 1
    assert "No space left on device" in text
    assert "Traceback" not in text
    filler.unlink()
    tula.start()
    tula.finish()
    assert tula.verdicts(SMALL)[-1] == "success"
    assert tula.verdicts("train") == ["success"]


def test_the_run_folder_is_read_only(slurm: ThrowawaySlurm, tula: Tula, small_disk: Path):
    """One line says so; once it can be written again the same command goes on."""
    tula.switch_on("hold")
    tula.start()
    tula.wait_claimed(SMALL)
    tula.kill()
    tula.switch_off("hold")
    slurm.wait_empty()
    # a log that Slurm has not closed yet keeps the file system writable
    read_only = ["mount", "-o", "remount,ro", str(small_disk)]
    wait_for(lambda: subprocess.run(read_only, capture_output=True).returncode == 0, "the end of all writing")
    tula.start()
    code, text = tula.end()
    assert code == 1
    assert "Read-only file system" in text
    assert "Traceback" not in text
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    tula.start()
    tula.finish()
    assert tula.verdicts(SMALL) == ["success"]
