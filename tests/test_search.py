"""The search profiles the whole grid or its corners, and steps back from what does not fit."""

from __future__ import annotations

import pytest

from tula_hpc.candidates import Candidate, candidate_grid
from tula_hpc.models.search import close_infeasible, first_points, next_round

GRID = candidate_grid([2, 4, 8], 1, [8, 16, 32, 64], 1, 10_000)


def at(*pairs: tuple[int, int]) -> list[Candidate]:
    return [Candidate(nodes, batch) for nodes, batch in pairs]


def asked(mode: str, grid: list[Candidate], measured: set[Candidate], infeasible: set[Candidate]) -> list[Candidate]:
    return next_round(mode, grid, measured, infeasible).candidates


def test_full_search_is_the_rest_of_the_grid() -> None:
    """Full search wants everything not yet measured and not infeasible."""
    wanted = asked("full", GRID, measured=set(at((2, 8))), infeasible=set(at((4, 32))))
    assert set(wanted) == set(GRID) - set(at((2, 8), (4, 32), (4, 64)))


def test_partial_search_is_four_corners() -> None:
    """Partial search wants smallest and largest batch on smallest and largest cluster, the largest batch last."""
    assert next_round("partial", GRID, set(), set()).candidates == at((2, 8), (2, 64), (8, 8), (8, 64))


def test_corners_belong_to_their_cluster() -> None:
    """Where the bounds of the global batch cut the grid, each cluster has its own smallest and largest batch."""
    grid = candidate_grid([2, 8], 1, [8, 16, 32, 64], 32, 256)
    assert next_round("partial", grid, set(), set()).candidates == at((2, 16), (2, 64), (8, 8), (8, 32))


def test_a_single_node_does_not_stand_for_small_clusters() -> None:
    """From one node on, the smallest cluster that exchanges gradients has its two corners as well."""
    grid = candidate_grid([1, 2, 4, 8], 1, [16, 32, 64], 16, 4096)
    names = [c.name for c in next_round("partial", grid, set(), set()).candidates]
    assert names == [f"n{n:03d}-b000{b}" for n in (1, 2, 8) for b in (16, 64)]


def test_the_links_inside_a_node_are_measured_beside_those_between_nodes() -> None:
    """Where one node of several GPUs is a candidate beside several nodes, no search guesses how fast its links are."""
    sizes = [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1)]
    grid = [Candidate(nodes, batch, gpus) for nodes, gpus in sizes for batch in (8, 16, 32)]
    partial = {(c.num_nodes, c.gpus_per_node) for c in asked("partial", grid, set(), set())}
    assert partial == {(1, 1), (1, 4), (2, 1), (4, 1)}
    assert Candidate(1, 32, 4) in asked("adaptive", grid, set(), set())
    ends = {Candidate(4, 8, 1), Candidate(4, 32, 1)}
    assert set(asked("adaptive", grid, set(), {Candidate(1, 32, 4)})) == {
        *ends,
        Candidate(2, 8, 1),
        Candidate(1, 16, 4),
    }


def test_partial_search_ends() -> None:
    """Nothing is wanted when all corners are measured."""
    assert asked("partial", GRID, set(at((2, 8), (2, 64), (8, 8), (8, 64))), set()) == []


def test_partial_search_steps_back_until_one_fits() -> None:
    """When the largest batch of a cluster does not fit, the next smaller one is tried, and again."""
    measured = set(at((2, 8), (2, 64), (8, 8)))
    assert asked("partial", GRID, measured, set(at((8, 64)))) == at((8, 32))
    assert asked("partial", GRID, measured, set(at((8, 64), (8, 32)))) == at((8, 16))
    assert asked("partial", GRID, measured | set(at((8, 16))), set(at((8, 64), (8, 32)))) == []


def test_cluster_without_a_fitting_batch_is_replaced() -> None:
    """When not even the smallest batch of the largest cluster fits, the next cluster gives the corners."""
    assert asked("partial", GRID, set(at((2, 8), (2, 64))), set(at((8, 8)))) == at((4, 8), (4, 64))


def test_nothing_feasible_ends_the_search() -> None:
    """When no batch fits anywhere, nothing is wanted."""
    assert asked("partial", GRID, set(), set(at((2, 8), (4, 8), (8, 8)))) == []


def test_infeasible_closes_upwards_on_its_cluster() -> None:
    """Larger batches of the same cluster are infeasible too, other clusters are untouched."""
    assert close_infeasible(GRID, set(at((4, 32)))) == set(at((4, 32), (4, 64)))
    other_gpus = Candidate(4, 64, gpus_per_node=4)
    assert other_gpus not in close_infeasible([*GRID, other_gpus], set(at((4, 32))))


@pytest.mark.parametrize("mode", ["full", "partial"])
def test_order_of_the_grid_does_not_matter(mode: str) -> None:
    """The result is sorted by nodes, then batch, whatever the order of the grid."""
    wanted = next_round(mode, GRID[::-1], set(), set()).candidates
    assert wanted == sorted(next_round(mode, GRID, set(), set()).candidates)


def test_unknown_mode_is_refused() -> None:
    """A mode that does not exist is refused."""
    with pytest.raises(ValueError, match="thorough"):
        next_round("thorough", GRID, set(), set())


def test_an_error_of_every_first_point_ends_the_search_of_its_type_of_node() -> None:
    """What ends the first points, such as an error of the model, would end the others: they are not tried in turn."""
    grid = [Candidate(n, b, 1, node_type) for node_type in ("a", "b") for n in (2, 4) for b in (8, 16, 32)]
    lost = {c for c in first_points(grid) if c.node_type == "a"}
    now = next_round("adaptive", grid, set(), set(), lost, set(), None)
    assert {c.node_type for c in now.candidates} == {"b"}
    assert next_round("adaptive", grid, set(), set(), first_points(grid), set(), None).ended_by == "exhausted"
    some = set(list(first_points(grid))[:2])
    assert next_round("adaptive", grid, set(), set(), some, set(), None).candidates
