from __future__ import annotations

from tula_hpc.control.journal import Attempt, Journal
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
