from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tula_hpc.candidates import Candidate
from tula_hpc.errors import RecordError
from tula_hpc.ranks.timings import read_point, write_rank
from tula_hpc.runs import AttemptFolder, RunFolder, read_json, write_json

CANDIDATE = Candidate(2, 64)
FAST = [[i, 0.001, 0.02, 0.03, 0.020, 0.005, 0.100 + i / 1000] for i in range(5)]
SLOW = [[i, 0.002, 0.03, 0.04, 0.010, 0.005, 0.110 + i / 1000] for i in range(5)]


@pytest.fixture
def attempt(run_folder: RunFolder, rank_meta: Callable[..., dict[str, Any]]) -> AttemptFolder:
    folder = run_folder.attempt("profile/n002-b00064", 1)
    write_rank(folder, 0, FAST, rank_meta())
    write_rank(folder, 1, SLOW, rank_meta(compute_step_s=0.09, host="n2"))
    return folder


def test_a_point_is_the_slowest_rank_of_each_step(attempt: AttemptFolder):
    """The step's time is the slowest rank's, the exposed synchronisation the shortest wait, memory the largest."""
    point = read_point(attempt, CANDIDATE)
    assert point["step_time_s"] == pytest.approx(0.112)
    assert point["sync_time_s"] == pytest.approx(0.010)
    assert point["compute_time_s"] == pytest.approx(0.09)
    assert point["hosts"] == ["n1", "n2"]
    assert point["global_batch"] == 128


def test_a_machine_whose_limit_cannot_be_read_has_points(
    attempt: AttemptFolder, rank_meta: Callable[..., dict[str, Any]]
):
    """As on macOS: the limit is unknown, or that of the ranks that know theirs."""
    assert read_point(attempt, CANDIDATE)["limit_gib"] == 8.0
    for rank, limit in ((0, 8.0), (1, None)):
        write_rank(attempt, rank, FAST, rank_meta(memory={**rank_meta()["memory"], "limit_gib": None}))
        assert read_point(attempt, CANDIDATE)["limit_gib"] == limit


def spoil_csv(attempt: AttemptFolder) -> None:
    attempt.rank_csv(1).write_text(attempt.rank_csv(1).read_text()[:-20])


def remove_csv(attempt: AttemptFolder) -> None:
    attempt.rank_csv(1).unlink()


def remove_json(attempt: AttemptFolder) -> None:
    attempt.rank_json(1).unlink()


def tear_json(attempt: AttemptFolder) -> None:
    attempt.rank_json(1).write_text(attempt.rank_json(1).read_text()[:-30])


def make_stale(attempt: AttemptFolder) -> None:
    write_json(attempt.rank_json(1), {**read_json(attempt.rank_json(1)), "attempt": 7})


def copy_other_rank(attempt: AttemptFolder) -> None:
    attempt.rank_json(1).write_text(attempt.rank_json(0).read_text())
    attempt.rank_csv(1).write_text(attempt.rank_csv(0).read_text())


def change_world(attempt: AttemptFolder) -> None:
    write_json(attempt.rank_json(1), {**read_json(attempt.rank_json(1)), "world_size": 4})


def change_launch(attempt: AttemptFolder) -> None:
    write_json(attempt.rank_json(1), {**read_json(attempt.rank_json(1)), "launch": "42-1"})


def add_a_rank(attempt: AttemptFolder) -> None:
    attempt.rank_json(2).write_text(attempt.rank_json(1).read_text())


def spoil_memory(attempt: AttemptFolder) -> None:
    text = attempt.rank_json(1).read_text()
    attempt.rank_json(1).write_text(text.replace('"memory_gib": 0.6', '"memory_gib": NaN'))


def repeat_a_step(attempt: AttemptFolder) -> None:
    meta = read_json(attempt.rank_json(1))
    write_rank(attempt, 1, [*SLOW[:4], SLOW[3]], meta)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (spoil_csv, "torn or was changed"),
        (remove_csv, "missing"),
        (remove_json, "missing"),
        (tear_json, "not whole"),
        (make_stale, "of attempt 7"),
        (copy_other_rank, "rank 0"),
        (change_world, "measured with 4 ranks"),
        (change_launch, "different launches"),
        (add_a_rank, "holds rank-0002.json, but n002-b00064 has 2 ranks"),
        (spoil_memory, "memory_gib is nan"),
        (repeat_a_step, "each once"),
    ],
)
def test_a_point_counts_only_when_every_file_is_right(
    attempt: AttemptFolder, harm: Callable[[AttemptFolder], None], words: str
):
    """A missing, torn, stale or duplicated file is named and the point is not used."""
    harm(attempt)
    with pytest.raises(RecordError, match=words) as caught:
        read_point(attempt, CANDIDATE)
    assert str(attempt.path) in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 0.0])
def test_what_no_clock_gives_is_refused(attempt: AttemptFolder, rank_meta: Callable[..., dict[str, Any]], value: float):
    """A step time that is not a positive number is named with its step."""
    write_rank(attempt, 1, [*SLOW[:3], [3, 0.002, 0.03, 0.04, 0.01, 0.005, value], SLOW[4]], rank_meta())
    with pytest.raises(RecordError, match=r"rank-0001.csv step 3: step_s is not a time"):
        read_point(attempt, CANDIDATE)


def test_ranks_that_timed_different_steps_do_not_make_a_point(
    attempt: AttemptFolder, rank_meta: Callable[..., dict[str, Any]]
):
    """All ranks take part in every step, so they must have timed the same number."""
    write_rank(attempt, 1, SLOW[:3], rank_meta())
    with pytest.raises(RecordError, match="different numbers of steps"):
        read_point(attempt, CANDIDATE)
