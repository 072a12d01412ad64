from __future__ import annotations

import multiprocessing
import os
import socket
import time
from typing import Any

import pytest

from tula_hpc.control import away
from tula_hpc.control import lease as lease_module
from tula_hpc.control.lease import EXPIRES_S, Lease, controlling
from tula_hpc.errors import TulaError
from tula_hpc.runs import RunFolder, read_json, write_json


def leave_a_lease(run: RunFolder, **changes: Any) -> None:
    """A lease as a controller that was killed leaves it."""
    holder = {
        "token": "other",
        "user": "anna",
        "host": socket.gethostname(),
        "boot": lease_module._boot_id(),
        "pid": os.getpid(),
        "pid_started": lease_module._process_start(os.getpid()),
        "started": time.time(),
        "refreshed": time.time(),
    }
    write_json(run.lease, {**holder, **changes})


def test_a_second_controller_is_told_who_holds_the_run(run_folder: RunFolder):
    """While the holder lives, another one leaves with its name, host and process."""
    leave_a_lease(run_folder)
    with pytest.raises(TulaError, match=f"process {os.getpid()} of anna on {socket.gethostname()}"):
        Lease(run_folder).take()


def test_a_dead_holder_on_this_host_is_replaced_at_once(run_folder: RunFolder):
    """A controller that was killed does not keep its run for itself."""
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    leave_a_lease(run_folder, pid=process.pid)
    with controlling(run_folder):
        assert read_json(run_folder.lease)["pid"] == os.getpid()


def test_another_process_with_the_holders_number_is_not_the_holder(run_folder: RunFolder):
    """A number that the kernel gave away again does not lock a run for ever."""
    leave_a_lease(run_folder, pid=1)
    with controlling(run_folder):
        pass


def test_a_lease_that_cannot_be_read_is_told(run_folder: RunFolder):
    """Garbage in the place of a lease ends with its path, and not in a loop."""
    run_folder.lease.write_text("garbage")
    with pytest.raises(TulaError, match="delete that file"):
        Lease(run_folder).take()


def test_a_silent_holder_elsewhere_is_replaced_after_its_time(run_folder: RunFolder):
    """A holder on another host counts as gone only when it has not been heard of for long enough."""
    leave_a_lease(run_folder, host="login2", refreshed=time.time() - EXPIRES_S / 2)
    with pytest.raises(TulaError, match="login2"):
        Lease(run_folder).take()
    leave_a_lease(run_folder, host="login2", refreshed=time.time() - EXPIRES_S - 1)
    with controlling(run_folder):
        pass


def test_the_lease_is_given_back(run_folder: RunFolder):
    """Nothing is left when a controller leaves, and the next one can begin."""
    with controlling(run_folder), pytest.raises(TulaError):
        Lease(run_folder).take()
    assert list(run_folder.path.iterdir()) == []


def test_a_controller_that_was_replaced_stops(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    """One that wakes up after another has taken over does not go on."""
    monkeypatch.setattr(lease_module, "REFRESH_EVERY_S", 0.0)
    with controlling(run_folder) as lease:
        lease.refresh()
        leave_a_lease(run_folder, host="login2")
        with pytest.raises(TulaError, match="login2, took"):
            lease.refresh()
    assert read_json(run_folder.lease)["token"] == "other"


def _compete(run: RunFolder, start: Any, results: Any) -> None:
    start.wait()
    try:
        Lease(run).take()
        results.put(True)
        start.wait()  # hold it until all have tried
    except TulaError:
        results.put(False)
        start.wait()


def test_a_lease_that_is_taken_while_slurm_is_asked_stays(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    """Who found the old holder gone looks again: the run is another's by now, and is not touched."""
    leave_a_lease(run_folder, host="login2", token="gone")

    def ask(holder: dict[str, Any]) -> bool:
        if holder["token"] == "gone":
            leave_a_lease(run_folder, host="login3")
        return bool(holder["token"] == "gone")

    moved: list[Any] = []
    monkeypatch.setattr(lease_module, "is_gone", ask)
    monkeypatch.setattr(lease_module.os, "rename", lambda *paths: moved.append(paths))
    with pytest.raises(TulaError, match="login3"):
        Lease(run_folder).take()
    assert moved == []
    assert read_json(run_folder.lease)["host"] == "login3"


def test_of_many_at_once_one_gets_it(run_folder: RunFolder):
    """Controllers that find the same expired lease at the same moment do not share the run."""
    leave_a_lease(run_folder, host="login2", refreshed=0.0)
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_compete, args=(run_folder, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(outcomes) == [False, False, False, True]


def test_a_controller_job_that_was_queued_again_goes_on_at_once(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    """The holder was an earlier run of the same Slurm job, on another host; two processes of one run are told apart."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    leave_a_lease(run_folder, host="node7", slurm_job="42", restart=0)
    with pytest.raises(TulaError, match="Slurm job 42"):
        Lease(run_folder).take()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with controlling(run_folder):
        assert read_json(run_folder.lease)["restart"] == 1


def test_a_silent_holder_whose_job_has_ended_is_replaced(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    """Slurm is asked once the holder is late, and believed."""
    monkeypatch.setattr(lease_module.away, "has_ended", lambda job_id: job_id == "42")
    leave_a_lease(run_folder, host="node7", slurm_job="42", restart=0, refreshed=time.time() - 100)
    with controlling(run_folder):
        pass


@pytest.mark.parametrize(
    ("first", "then", "ended"),
    [
        ("42|COMPLETED\n", "42|RUNNING\n", True),
        ("", "", True),
        ("7|RUNNING\n", "42|PENDING\n", False),
        ("42|RUNNING\n", "", False),
        ("", None, False),
        (None, "", False),
    ],
)
def test_a_job_is_missed_twice_before_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, first: str | None, then: str | None, ended: bool
):
    """Seen among the ended, or lacking in two answers; a Slurm that does not answer says nothing. Then it is not asked
    again for a while."""
    answers = iter([first, then])
    monkeypatch.setattr(away, "answer_of", lambda *command: next(answers))
    monkeypatch.setattr(away, "ASKED_AGAIN_AFTER_S", 0.0)
    monkeypatch.setattr(away, "_has_ended", {})
    assert [away.has_ended("42") for _ in range(3)] == [ended] * 3
