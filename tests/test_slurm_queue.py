"""What is concluded from squeue and sacct, and how seldom they are asked; commands that print recorded texts."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tula_hpc.config import Settings
from tula_hpc.control import slurm_queue
from tula_hpc.control.scheduler import Seen
from tula_hpc.control.slurm import SlurmScheduler
from tula_hpc.control.slurm_queue import SharedSqueue, SlurmQueue, Snapshot, expand_hosts
from tula_hpc.control.verdicts import QueueState
from tula_hpc.runs import RunFolder

ABSENT, CANCELLED, PENDING, RUNNING = (
    QueueState.absent,
    QueueState.cancelled,
    QueueState.pending,
    QueueState.running,
)
ACCOUNTING = "AccountingStorageType = accounting_storage/slurmdbd\nMinJobAge = 300 sec\n"
ROW = "7_0|RUNNING|None|n1|tula-a\n"


class Clock:
    """The time of day and of the process, moved by hand."""

    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(slurm_queue, "time", clock)
    return clock


@pytest.fixture
def site(command: Callable[..., Path]) -> Callable[..., Path]:
    """A site with accounting whose queue is empty; gives `command`."""
    command("scontrol", ACCOUNTING)
    command("squeue")
    command("sacct")
    return command


def calls(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def state(queue: SlurmQueue, job_id: str = "7_0") -> QueueState | None:
    seen = queue.states([job_id])
    return None if seen is None else seen[job_id].state


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("(null)", ()),
        ("None assigned", ()),
        ("n1", ("n1",)),
        ("n[1-3,7]", ("n1", "n2", "n3", "n7")),
        ("a-[01-03]-ib0", ("a-01-ib0", "a-02-ib0", "a-03-ib0")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("gpu1,n[1-2],login", ("gpu1", "n1", "n2", "login")),
        ("r[1-2]n[3,5]", ("r1n3", "r1n5", "r2n3", "r2n5")),
        ("a[1-2],b[001,003]x", ("a1", "a2", "b001x", "b003x")),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: tuple[str, ...]):
    """Every bracket form of Slurm's host lists, with its leading zeros."""
    assert expand_hosts(text) == hosts


def test_a_row_tells_state_reason_and_hosts(site: Callable[..., Path]):
    """The reason counts while a job waits; a bar in a job's name is part of it."""
    site("squeue", "7_0|RUNNING|None|n[1-2]|a|b\n7_1|PENDING|Resources||a|b\n7_2|PENDING|None||a|b\n")
    queue = SlurmQueue(30)
    assert queue.states(["7_0", "7_1", "7_2"]) == {
        "7_0": Seen(RUNNING, "", ("n1", "n2")),
        "7_1": Seen(PENDING, "Resources"),
        "7_2": Seen(PENDING),
    }
    assert queue.named("a|b") == ["7_0", "7_1", "7_2"]


def test_an_array_cancelled_before_it_began_is_cancelled(site: Callable[..., Path]):
    """Slurm keeps one row without an index for elements that never came to be."""
    site("squeue", "7|CANCELLED|None||tula-a\n")
    assert state(SlurmQueue(30), "7_3") is CANCELLED


def test_two_controllers_ask_once_an_interval(site: Callable[..., Path], clock: Clock):
    """Whoever finds the answer too old asks; the other one reads what it was told."""
    log = site("squeue", ROW)
    one, other = SlurmQueue(30), SlurmQueue(30)
    for _ in range(3):
        assert state(one) is state(other) is RUNNING
        clock.now += 9
    assert calls(log) == 1
    clock.now += 4
    assert state(other) is state(one) is RUNNING
    assert calls(log) == 2


def test_a_failed_query_is_nobodys_answer(site: Callable[..., Path], clock: Clock):
    """A failure is shared like an answer, or each would ask about an outage; it ends with the interval."""
    log = site("squeue", ROW, 1)
    one, other = SlurmQueue(30), SlurmQueue(30)
    assert state(one) is state(other) is one.num_active() is one.named("tula-b") is None
    assert calls(log) == 1
    site("squeue", ROW)
    assert state(other) is None
    clock.now += 31
    assert state(one) is state(other) is RUNNING
    assert calls(log) == 2


def test_the_shared_answer_is_private(site: Callable[..., Path], tmp_path: Path):
    """Nobody else may read the user's job names or write into what the user's controllers believe."""
    state(SlurmQueue(30))
    (folder,) = (tmp_path / "cache" / "tula_hpc").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["squeue"]


@pytest.mark.parametrize("blocked", ["tula_hpc", "squeue"])
def test_without_a_cache_each_controller_asks_for_itself(
    site: Callable[..., Path], clock: Clock, tmp_path: Path, blocked: str
):
    """Where the folder or the file in it cannot be written, Slurm is asked directly and not more often."""
    log = site("squeue", ROW)
    (tmp_path / "cache").mkdir()
    if blocked == "tula_hpc":
        (tmp_path / "cache" / "tula_hpc").write_text("not a folder")
    else:
        state(SlurmQueue(30))
        (file,) = (tmp_path / "cache" / "tula_hpc").glob("*/squeue")
        file.unlink()
        file.mkdir()
        clock.now += 31
    before = calls(log)
    queue = SlurmQueue(30)
    assert [state(queue) for _ in range(3)] == [RUNNING] * 3
    assert calls(log) == before + 1


def test_while_one_asks_the_others_use_the_last_answer(site: Callable[..., Path], clock: Clock, tmp_path: Path):
    """A controller that is at it is waited for; one that does not come back has crashed, and its turn passes on."""
    log = site("squeue", ROW)
    clock.now = time.time()
    queue = SlurmQueue(30)
    assert state(queue) is RUNNING
    (file,) = (tmp_path / "cache" / "tula_hpc").glob("*/squeue")
    turn = file.parent / "turn"
    turn.touch()
    clock.now += 31
    assert state(queue) is RUNNING
    assert calls(log) == 1
    clock.now += slurm_queue.TURN_EXPIRES_S
    assert state(queue) is RUNNING
    assert calls(log) == 2
    assert not turn.exists()


def test_the_turn_of_a_process_that_was_killed_passes_on_at_once(site: Callable[..., Path], tmp_path: Path):
    """On the host of its holder a lock that nobody holds any more does not make others wait."""
    log = site("squeue", ROW)
    state(SlurmQueue(30))
    (folder,) = (tmp_path / "cache" / "tula_hpc").iterdir()
    (folder / "squeue").unlink()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (folder / "turn").write_text(f"{socket.gethostname()} {dead.pid}")
    assert state(SlurmQueue(30)) is not None
    assert calls(log) == 2


@pytest.mark.parametrize("text", ["", "garbage", "tula_hpc-squeue-0 1.0 answered\n7_0|FAILED|None||x\n"])
def test_a_file_that_makes_no_sense_is_replaced(site: Callable[..., Path], tmp_path: Path, text: str):
    """Torn, empty or of another version: it is asked again."""
    site("squeue", ROW)
    state(SlurmQueue(30))
    (file,) = (tmp_path / "cache" / "tula_hpc").glob("*/squeue")
    file.write_text(text)
    assert state(SlurmQueue(30)) is RUNNING
    assert Snapshot.load(file) is not None


def test_an_answer_from_the_future_is_not_believed(site: Callable[..., Path], clock: Clock):
    """A host whose clock is wrong does not silence the others, nor does a clock that is set back."""
    log = site("squeue", ROW)
    ahead, right = SharedSqueue(30), SharedSqueue(30)
    clock.now += 3600
    assert ahead.look() is not None
    clock.now -= 3600
    assert right.look() is not None
    assert ahead.look() is not None
    assert calls(log) == 2


def test_an_answer_older_than_the_job_says_nothing_of_it(site: Callable[..., Path], clock: Clock):
    """A job that is not in an answer counts as waiting until answers came that began after it was known."""
    site("sacct")
    queue, other = SlurmQueue(1), SlurmQueue(1)
    other.states(["1"])  # the shared answer, without the job
    queue.expect(["7_0"])
    assert state(queue) is PENDING
    clock.now += 1.5
    assert state(queue) is PENDING  # began later, but not by more than clocks may differ
    clock.now += 1.5
    assert state(queue) is PENDING  # missing for the first time
    clock.now += 1.5
    assert state(queue) is ABSENT


def test_absence_is_believed_the_second_time(site: Callable[..., Path], clock: Clock):
    """An answer that lacks a job once, as a Slurm gives that has just come back, changes nothing."""
    site("squeue", ROW)
    queue = SlurmQueue(30)
    assert state(queue) is RUNNING
    site("squeue")
    clock.now += 31
    assert [state(queue), state(queue)] == [RUNNING, RUNNING]  # the same answer twice is one
    site("squeue", ROW)
    clock.now += 31
    assert state(queue) is RUNNING
    site("squeue")
    clock.now += 31
    assert state(queue) is RUNNING
    clock.now += 31
    assert queue.states(["7_0"]) == {"7_0": Seen(ABSENT, hosts=("n1",))}


def test_an_end_that_squeue_told_stays_when_it_forgets(site: Callable[..., Path], clock: Clock):
    """What has ended does not become absent."""
    site("squeue", "7_0|TIMEOUT|None|n1|tula-a\n")
    queue = SlurmQueue(30)
    state(queue)
    site("squeue")
    for _ in range(3):
        clock.now += 31
        assert state(queue) is QueueState.timeout


def gone(queue: SlurmQueue, clock: Clock, *job_ids: str) -> dict[str, Seen]:
    """The states of jobs that squeue does not know, once that is believed."""
    queue.states(job_ids)
    for _ in range(2):
        clock.now += 31
        seen = queue.states(job_ids)
    assert seen is not None
    return dict(seen)


def test_accounting_tells_how_forgotten_jobs_ended(site: Callable[..., Path], clock: Clock):
    """One call for all of them, elements that never began included; memory kills are told by the step."""
    text = """\
7_0|TIMEOUT|n1
7_0.batch|CANCELLED|n1
7_1|FAILED|n[2-3]
7_1.batch|FAILED|n2
7_1.0|OUT_OF_MEMORY|n[2-3]
7_2|RUNNING|n4
7_[3-4%2]|CANCELLED by 1000|None assigned
7|CANCELLED by 1000|None assigned
8|CANCELLED by 1000|None assigned
"""
    log = site("sacct", text)
    queue = SlurmQueue(30)
    ids = ["7_0", "7_1", "7_2", "7_3", "7_4", "8_0", "9"]
    assert gone(queue, clock, *ids) == {
        "7_0": Seen(QueueState.timeout, hosts=("n1",)),
        "7_1": Seen(QueueState.out_of_memory, hosts=("n2", "n3")),
        "7_2": Seen(ABSENT),
        "7_3": Seen(CANCELLED),
        "7_4": Seen(CANCELLED),
        "8_0": Seen(CANCELLED),
        "9": Seen(ABSENT),
    }
    assert calls(log) == 1
    assert "--jobs=7,8,9" in log.read_text()


def test_an_end_is_final_and_asked_for_once(site: Callable[..., Path], clock: Clock):
    """What accounting has told of an end is not asked again, whatever it says later."""
    log = site("sacct", "7_0|TIMEOUT|n1\n")
    queue = SlurmQueue(30)
    gone(queue, clock, "7_0")
    site("sacct", "7_0|COMPLETED|n1\n")
    for _ in range(3):
        clock.now += 31
        assert state(queue) is QueueState.timeout
    assert calls(log) == 1


def test_an_accounting_that_is_away_concludes_nothing_and_is_asked_once_an_interval(
    site: Callable[..., Path], clock: Clock
):
    """One bounded call an interval, of lost submissions as well; the job stays absent until the answer comes."""
    log = site("sacct", "", 1)
    queue = SlurmQueue(30)
    assert gone(queue, clock, "7_0")["7_0"].state is ABSENT
    assert queue.named("tula-a") == queue.named("tula-b") == []
    assert state(queue) is ABSENT
    assert calls(log) == 1
    site("sacct", "7_0|COMPLETED|n1\n")
    clock.now += 31
    assert state(queue) is QueueState.completed


def test_without_accounting_sacct_is_never_called(site: Callable[..., Path], clock: Clock):
    """A site that keeps no records is not asked for them."""
    site("scontrol", "AccountingStorageType = accounting_storage/none\n")
    log = site("sacct", "7_0|COMPLETED|n1\n")
    queue = SlurmQueue(30)
    assert gone(queue, clock, "7_0")["7_0"].state is ABSENT
    assert queue.named("tula-a") == []
    assert calls(log) == 0


def test_a_lost_submission_is_looked_for_in_an_answer_of_its_own(site: Callable[..., Path], clock: Clock):
    """What others were told before does not count; all elements of one array are found by one squeue."""
    log = site("squeue")
    queue = SlurmQueue(30)
    state(queue)
    site("squeue", "7_0|RUNNING|None|n1|tula-a\n7_1|PENDING|Resources||tula-a\n8|RUNNING|None|n1|tula-ab\n")
    assert [queue.named("tula-a") for _ in range(4)] == [["7_0", "7_1"]] * 4
    assert calls(log) == 2


def test_a_lost_submission_that_squeue_forgot_is_found_in_accounting(site: Callable[..., Path]):
    """By its name, in the records of the last week; waiting elements stand in one row."""
    log = site("sacct", "7_0|COMPLETED\n7_[1-2%1]|PENDING\n")
    queue = SlurmQueue(30)
    assert queue.named("tula-a") == queue.named("tula-a") == ["7_0", "7_1", "7_2"]
    assert calls(log) == 1
    assert "--name=tula-a --starttime=now-7days" in log.read_text()


def test_all_the_users_jobs_count_and_so_do_those_just_submitted(site: Callable[..., Path]):
    """Jobs that wait or run count, whoever submitted them for this user, ours also before squeue has told of them."""
    site("squeue", "7_0|RUNNING|None|n1|x\n7_1|PENDING|None||x\n6|COMPLETED|None|n1|y\n")
    queue = SlurmQueue(30)
    assert queue.num_active() == 2
    queue.expect(["7_0", "9_0", "9_1"])
    assert queue.num_active() == 4


def test_folders_of_two_clusters_are_apart(site: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What one cluster's squeue said is not taken for another's."""
    log = site("squeue", ROW)
    state(SlurmQueue(30))
    monkeypatch.setenv("SLURM_CONF", os.devnull)
    state(SlurmQueue(30))
    assert calls(log) == 2
    assert len(list((tmp_path / "cache" / "tula_hpc").iterdir())) == 2


@pytest.mark.parametrize(
    ("rows", "index", "job_id"),
    [("7_1|RUNNING|None|n1|tula-a\n", 0, "7_0"), ("8|PENDING|None||tula-a\n", 0, "8"), ("", 0, None)],
)
def test_one_element_of_a_lost_array_tells_the_ids_of_all(
    site: Callable[..., Path],
    tiny_settings: Callable[..., Settings],
    run_folder: RunFolder,
    rows: str,
    index: int,
    job_id: str | None,
):
    """Elements that are over and forgotten belonged to it, too; a job alone has no index."""
    site("squeue", rows)
    run_folder.scheduler.mkdir()
    scheduler = SlurmScheduler(tiny_settings(), run_folder)
    assert scheduler.find("tula-a", index, [run_folder.attempt("train", 1)], False) == job_id


@pytest.mark.parametrize(
    ("last_row", "gap_s", "was_waiting"),
    [
        ("7_0|PENDING|Priority||tula-a\n", 40, True),
        ("7_0|PENDING|Priority||tula-a\n", 400, False),  # it may have run and been forgotten
        ("7_0|RUNNING|None|n1|tula-a\n", 40, False),
        ("", 40, False),  # a controller that comes later knows nothing of what was before
    ],
)
def test_a_job_that_vanishes_while_it_waits_was_taken_out(
    site: Callable[..., Path], clock: Clock, last_row: str, gap_s: float, was_waiting: bool
):
    """Only if it was seen waiting, so short before that Slurm would still tell of it had it run."""
    site("squeue", last_row)
    clock.now = 1000.0
    queue = SlurmQueue(30)
    queue.states(["7_0"])
    site("squeue", "8|RUNNING|None|n1|other\n")
    clock.now += gap_s
    queue.states(["7_0"])
    clock.now += 40
    seen = queue.states(["7_0"])
    if seen is not None and seen["7_0"].state is PENDING:  # the very first answer may have been too early to count
        clock.now += 40
        seen = queue.states(["7_0"])
    assert seen is not None
    assert seen["7_0"] == Seen(ABSENT, hosts=seen["7_0"].hosts, was_waiting=was_waiting)
