"""Which configurations to profile next; the paper's full and partial search (section III-A2)."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from tula_hpc.candidates import Candidate


class SearchMode(str, Enum):
    """How much of the grid is profiled."""

    FULL = "full"
    PARTIAL = "partial"


def next_candidates(
    mode: SearchMode | str, grid: list[Candidate], measured: set[Candidate], infeasible: set[Candidate]
) -> list[Candidate]:
    """The candidates to profile now, by nodes, then batch with the largest last; empty when the search is done.

    `full` profiles the whole grid. `partial` profiles four corners: the smallest and the largest cluster, each with its
    smallest and largest batch per rank. The paper calls them "only the extremum configurations", in places two points;
    two runs that differ in both nodes and batch cannot tell computation from synchronisation. Three identify intercept,
    slope and synchronisation, and the fourth shows how much of it hides behind computation. Where the smallest cluster
    is a single node, which exchanges nothing, the smallest one of several nodes has its two corners as well: without
    them nothing is known of how synchronisation grows (17.5 % instead of 7.7 % median error on public traces).

    When a corner is infeasible, the next smaller batch of the same cluster takes its place until one fits, and when no
    batch of a cluster is feasible, the next cluster does.

    Args:
        mode: `full` or `partial`.
        grid: All candidates of the run.
        measured: Candidates with a finished measurement.
        infeasible: Candidates that ran out of memory; larger batches on the same cluster follow from them.
    """
    open_grid = set(grid) - close_infeasible(grid, infeasible)
    wanted = open_grid if SearchMode(mode) is SearchMode.FULL else _corners(open_grid)
    return sorted(wanted - measured)


def close_infeasible(grid: Collection[Candidate], infeasible: Collection[Candidate]) -> set[Candidate]:
    """The infeasible candidates and all of `grid` with at least their batch per rank on the same cluster."""
    smallest: dict[tuple[int, int], int] = {}
    for candidate in infeasible:
        cluster = _cluster(candidate)
        smallest[cluster] = min(candidate.batch_per_rank, smallest.get(cluster, candidate.batch_per_rank))
    follows = {c for c in grid if _cluster(c) in smallest and c.batch_per_rank >= smallest[_cluster(c)]}
    return set(infeasible) | follows


def _cluster(candidate: Candidate) -> tuple[int, int]:
    return candidate.num_nodes, candidate.gpus_per_node


def _corners(grid: set[Candidate]) -> set[Candidate]:
    clusters = sorted({_cluster(candidate) for candidate in grid})
    several_nodes = [cluster for cluster in clusters if cluster[0] > 1]
    corners = set()
    for cluster in {*clusters[:1], *several_nodes[:1], *clusters[-1:]}:
        batches = sorted(candidate for candidate in grid if _cluster(candidate) == cluster)
        corners |= {batches[0], batches[-1]}
    return corners
