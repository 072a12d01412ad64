from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tula_hpc.config import Settings
from tula_hpc.control.jobs import Jobs, profile_job
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.local import LocalScheduler
from tula_hpc.control.next_steps import NextSteps
from tula_hpc.control.verdicts import Verdict
from tula_hpc.runs import RunFolder

ATTEMPT = Attempt("profile/n001-b00032", 1, "tula-x-1", 32, 1)


def test_the_state_is_the_fold_of_the_events(run_folder: RunFolder):
    """Intent, submission and verdict of an attempt add up to what is known of it."""
    journal = Journal(run_folder.journal)
    journal.intend(ATTEMPT)
    assert journal.state().last(ATTEMPT.job) == ATTEMPT
    journal.submitted(ATTEMPT, "42_0")
    journal.concluded(ATTEMPT, Verdict.cuda_oom, "too large")
    (attempt,) = Journal(run_folder.journal).state().of(ATTEMPT.job)
    assert (attempt.job_id, attempt.verdict, attempt.reason) == ("42_0", Verdict.cuda_oom, "too large")


def test_events_are_never_overwritten(run_folder: RunFolder):
    """Two writers on one journal both get their events in, under numbers of their own."""
    first, second = Journal(run_folder.journal), Journal(run_folder.journal)
    for i in range(3):
        first.note(f"first {i}")
        second.note(f"second {i}")
    assert [event["text"] for event in first.events()] == [
        f"{who} {i}" for i in range(3) for who in ("first", "second")
    ]
    assert not list(run_folder.journal.glob(".event*"))


@pytest.mark.parametrize(
    ("setting", "starts", "again"),
    [
        (False, [], False),
        (True, [], False),
        (False, [False], False),
        (True, [False], True),
        (False, [True], True),
        (False, [True, False], True),
        (False, [False, True], True),
    ],
)
def test_a_cancelled_job_runs_again_only_when_a_user_says_so(
    run_folder: RunFolder,
    tiny_settings: Callable[..., Settings],
    setting: bool,
    starts: list[bool],
    again: bool,
):
    """A later start does not bring it back, unless it has the setting or takes back the cancelling of the whole run."""
    settings = tiny_settings(f"cluster.resubmit_cancelled={setting}")
    journal = Journal(run_folder.journal)
    journal.started("here", "command", after_cancel=True)  # of an earlier cancel, which says nothing of this one
    job = profile_job(settings.grid_candidates()[0])
    journal.intend(replace(ATTEMPT, job=job))
    journal.concluded(replace(ATTEMPT, job=job), Verdict.cancelled, "")
    for after_cancel in starts:
        journal.started("here", "command", after_cancel)
    read_again = Journal(run_folder.journal)
    scheduler = LocalScheduler(settings)
    jobs = Jobs(settings, run_folder, read_again, scheduler, lambda: None)
    given_up = NextSteps(settings, read_again, jobs, lambda text: None).given_up()
    assert given_up == (set() if again else {settings.grid_candidates()[0]})
