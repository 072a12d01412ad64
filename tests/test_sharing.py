"""Who measures a point when several runs below one root want it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings
from tula_hpc.control import sharing
from tula_hpc.control.jobs import profile_job
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.lease import controlling
from tula_hpc.control.sharing import SharedPoints
from tula_hpc.control.verdicts import Verdict
from tula_hpc.display import Display
from tula_hpc.ranks.timings import read_point, write_rank
from tula_hpc.runs import RunFolder, write_json, write_text
from tula_hpc.signatures import measurement_signature

POINT = Candidate(1, 32, 1)
ATTEMPT = Attempt(profile_job(POINT), 1, "tag", 32, 1)


def make_run(settings: Settings, name: str) -> RunFolder:
    run = RunFolder.of(settings.run_root, name, "0123456789")
    run.create()
    write_json(run.plan, {"measurement_signature": measurement_signature(settings)})
    return run


def shared(settings: Settings, run: RunFolder, heartbeat: Callable[[], None] = lambda: None) -> SharedPoints:
    return SharedPoints(settings, run, Journal(run.journal), Display(), heartbeat)


def fail_at_the_point(run: RunFolder, verdict: Verdict) -> None:
    journal = Journal(run.journal)
    attempt = replace(ATTEMPT, number=len(journal.state().of(ATTEMPT.job)) + 1)
    journal.intend(attempt)
    journal.concluded(attempt, verdict, "")


def test_a_point_that_a_living_run_measures_is_left_to_it(tiny_settings: Callable[..., Settings]):
    """While the first run is worked on, the second one finds the point elsewhere."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    with controlling(one):
        assert shared(settings, one).divide([POINT]) == ([POINT], [])
        assert shared(settings, one).divide([POINT]) == ([POINT], [])
        assert shared(settings, two).divide([POINT]) == ([], [POINT])


def test_a_point_of_a_run_that_nobody_works_on_is_measured_again(tiny_settings: Callable[..., Settings]):
    """A claim ends with the controller that made it."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    with controlling(one):
        shared(settings, one).divide([POINT])
    assert shared(settings, two).divide([POINT]) == ([POINT], [])


def test_a_point_that_a_run_cannot_submit_is_left_to_the_others(tiny_settings: Callable[..., Settings]):
    """Nobody waits for it, though the run that claimed it is worked on."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    with controlling(one), controlling(two):
        shared(settings, one).divide([POINT])
        shared(settings, one).give_back([POINT])
        assert shared(settings, two).divide([POINT]) == ([POINT], [])
        shared(settings, one).give_back([POINT])  # is not its own any more
        assert shared(settings, one).divide([POINT]) == ([], [POINT])


def test_a_point_that_the_other_run_failed_at_is_measured_again(tiny_settings: Callable[..., Settings]):
    """A failure of another run says nothing about this one; its retry then finds the point elsewhere."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    with controlling(one), controlling(two):
        shared(settings, one).divide([POINT])
        fail_at_the_point(one, Verdict.node_failure)
        assert shared(settings, two).divide([POINT]) == ([POINT], [])
        assert shared(settings, one).divide([POINT]) == ([], [POINT])


def test_a_point_that_its_run_tries_again_is_left_to_it(tiny_settings: Callable[..., Settings]):
    """The failure came before the newest claim; a failure after that leaves the point to others again."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    with controlling(one), controlling(two):
        shared(settings, one).divide([POINT])
        fail_at_the_point(one, Verdict.node_failure)
        assert shared(settings, one).divide([POINT]) == ([POINT], [])
        assert shared(settings, two).divide([POINT]) == ([], [POINT])
        fail_at_the_point(one, Verdict.node_failure)
        assert shared(settings, two).divide([POINT]) == ([POINT], [])


def test_a_result_of_another_run_is_taken_over_when_it_is_there(tiny_settings: Callable[..., Settings]):
    """The wait ends with the other run's verdict, and the next round has the result without measuring."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    with controlling(one):
        shared(settings, one).divide([POINT])
        heard: list[bool] = []

        def heartbeat() -> None:
            if not heard:
                one.attempt(ATTEMPT.job, 1).path.mkdir(parents=True)
                fail_at_the_point(one, Verdict.host_oom)
            heard.append(True)

        points = shared(settings, two, heartbeat)
        points.wait_for(points.divide([POINT])[1])
        assert points.divide([POINT]) == ([], [])
    attempt = Journal(two.journal).state().last(ATTEMPT.job)
    assert attempt is not None
    assert (attempt.verdict, attempt.reason) == (Verdict.host_oom, f"measured in {one.path.name}")


def test_a_result_that_cannot_be_copied_is_measured_again(tiny_settings: Callable[..., Settings]):
    """A folder that somebody cleared away does not keep the others waiting."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    with controlling(one):
        shared(settings, one).divide([POINT])
        fail_at_the_point(one, Verdict.success)  # and no folder of the attempt
        assert shared(settings, two).divide([POINT]) == ([POINT], [])


def _compete(settings: Settings, name: str, start: Any, results: Any) -> None:
    run = make_run(settings, name)
    with controlling(run):
        start.wait()
        results.put(len(shared(settings, run).divide([POINT])[0]))
        start.wait()  # work on until all have decided
    results.close()
    results.join_thread()  # else the answer may still be on its way
    os._exit(0)


def test_of_many_at_once_one_measures(tiny_settings: Callable[..., Settings]):
    """Controllers that decide at the same moment do not both measure."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    arguments = [(tiny_settings(), f"run{n}", start, results) for n in range(3)]
    processes = [context.Process(target=_compete, args=each) for each in arguments]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=300) for _ in processes) == [0, 0, 1]
    for process in processes:
        process.join()


def test_what_was_taken_over_may_be_tried_again(tiny_settings: Callable[..., Settings]):
    """A run that wants another attempt at a point in spite of another run's result gets it, and does not wait."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    with controlling(one):
        shared(settings, one).divide([POINT])
        one.attempt(ATTEMPT.job, 1).path.mkdir(parents=True)
        fail_at_the_point(one, Verdict.host_oom)
        assert shared(settings, two).divide([POINT]) == ([], [])
        assert shared(settings, two).divide([POINT]) == ([POINT], [])


def measure(run: RunFolder, meta: dict[str, Any], number: int = 1) -> None:
    """What a successful attempt at the point leaves, without its verdict."""
    row = [0, 0.01, 0.03, 0.04, 0.005, 0.01, 0.1]
    write_rank(run.attempt(ATTEMPT.job, number), 0, [row], {**meta, "world_size": 1, "batch_per_rank": 32})


def test_a_record_is_taken_over_whole_and_under_a_tag_of_its_own(
    tiny_settings: Callable[..., Settings], rank_meta: Callable[..., dict[str, Any]]
):
    """It takes the place of what a crash left there; by the other run's tag this one could cancel the other's job."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    measure(one, rank_meta())
    fail_at_the_point(one, Verdict.success)
    write_text(two.attempt(ATTEMPT.job, 1).rank_json(7), "left by a crash")
    shared(settings, two).take_over_all()
    attempt = Journal(two.journal).state().last(ATTEMPT.job)
    assert attempt is not None
    assert attempt.verdict is Verdict.success
    assert attempt.tag.startswith("taken-")
    folder = two.attempt(ATTEMPT.job, 1)
    assert read_point(folder, POINT)["step_time_s"] == 0.1
    assert list(folder.path.parent.iterdir()) == [folder.path]


def test_a_torn_record_of_another_run_is_not_taken_over(
    tiny_settings: Callable[..., Settings], rank_meta: Callable[..., dict[str, Any]]
):
    """Whatever the other run's journal says of it; nothing of it is left, and the point is measured here."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    measure(one, rank_meta())
    fail_at_the_point(one, Verdict.success)
    csv = one.attempt(ATTEMPT.job, 1).rank_csv(0)
    csv.write_text(csv.read_text()[:-20])
    points = shared(settings, two)
    points.take_over_all()
    assert points.divide([POINT]) == ([POINT], [])
    assert Journal(two.journal).state().attempts == {}
    assert list((two.path / ATTEMPT.job).iterdir()) == []


@pytest.mark.parametrize(
    ("begun", "gone", "left_to_it"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_claim_outlives_the_turns_of_a_controller_job(
    tiny_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, begun: bool, gone: bool, left_to_it: bool
):
    """While the job waits to go on with a point that its run has submitted, nobody else measures that."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    monkeypatch.setattr(sharing.away, "has_ended", lambda job_id: gone)
    with controlling(one):
        shared(settings, one).divide([POINT])
        write_json(one.controller_job, {"job_id": "42"})
        if begun:
            Journal(one.journal).intend(ATTEMPT)
    assert shared(settings, two).divide([POINT]) == (([], [POINT]) if left_to_it else ([POINT], []))


def test_claims_in_another_users_folder_do_not_stop_a_run(
    tiny_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
):
    """Below a root that users share, the folder of the first may be closed to the second, who then measures alone."""
    settings = tiny_settings()
    run = make_run(settings, "one")

    def closed(path: object, value: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sharing, "write_json", closed)
    assert shared(settings, run).divide([POINT]) == ([POINT], [])


def test_waiting_reads_a_journal_again_only_when_it_has_grown(
    tiny_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
):
    """However many points of it are waited for, and however long."""
    settings = tiny_settings()
    one, two = make_run(settings, "one"), make_run(settings, "two")
    read: list[RunFolder] = []

    def counted(folder: Any) -> Journal:
        read.append(folder)
        return Journal(folder)

    looks = iter(range(5))

    def heartbeat() -> None:
        if next(looks) == 4:
            fail_at_the_point(one, Verdict.host_oom)

    monkeypatch.setattr(sharing, "LOOK_EVERY_S", 0.0)
    wanted = settings.grid_candidates()[:3]
    with controlling(one):
        shared(settings, one).divide([POINT, *wanted])
        points = shared(settings, two, heartbeat)
        monkeypatch.setattr(sharing, "Journal", counted)
        assert points.divide([POINT, *wanted]) == ([], [POINT, *wanted])
        points.wait_for([POINT, *wanted])
    assert read == [one.journal, one.journal]
