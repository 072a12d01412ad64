from __future__ import annotations

import pytest

from tula_hpc.candidates import Candidate, candidate_grid, doublings


def test_grid_keeps_the_global_batch_within_its_bounds():
    """Every candidate's global batch lies between the bounds, and every pair that does is a candidate."""
    grid = candidate_grid([2, 4], 1, doublings(1, 64), min_global_batch=32, max_global_batch=100)
    assert [c.name for c in grid] == ["n002-b00016", "n002-b00032", "n004-b00008", "n004-b00016"]


def test_names_read_back():
    """A folder name gives the candidate that made it."""
    candidate = Candidate(16, 65536, 4)
    assert Candidate.from_name(candidate.name, 4) == candidate


def test_other_names_are_refused():
    """A folder that is not a candidate's is not taken for one."""
    with pytest.raises(ValueError, match="not a candidate's name"):
        Candidate.from_name("attempt-1", 1)


def test_the_last_partial_batch_is_a_step():
    """An epoch has as many steps as it takes to see every sample."""
    assert Candidate(2, 64).steps_per_epoch(129) == 2
    assert Candidate(2, 64).steps_per_epoch(128) == 1


def test_doublings_stay_below_the_largest():
    """A ladder ends at the last doubling that is not above the bound."""
    assert doublings(3, 25) == [3, 6, 12, 24]
