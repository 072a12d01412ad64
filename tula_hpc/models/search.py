"""Which configurations to profile next: the paper's full and partial search (section III-A2), and an adaptive one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from tula_hpc.candidates import Candidate

Cluster = tuple[int, int, str]
"""Nodes, ranks on each, and their type."""

POINTS_A_ROUND = 3
"""Most points that adaptive search asks for at once, each of another number of nodes where several resolve as much.
In replays of public traces three needed fewer rounds than two (3.7 instead of 4.6 for the knee) and no more points;
each round waits in the queue once."""


class SearchMode(Enum):
    """How much of the grid is profiled."""

    full = "full"
    partial = "partial"
    adaptive = "adaptive"


@dataclass(frozen=True)
class Round:
    """What to measure now."""

    candidates: list[Candidate] = field(default_factory=list)
    """By nodes, then batch, the largest last; empty when the search is done or waits for what runs."""
    ended_by: str = ""
    """What ended an adaptive search: `tolerance`, `exhausted`, or the name of a budget."""
    why: str = ""
    """Why these points, or why no others, in words."""


def next_round(
    mode: SearchMode | str,
    grid: list[Candidate],
    measured: Collection[Candidate],
    infeasible: Collection[Candidate],
    lost: Collection[Candidate] = (),
    running: Collection[Candidate] = (),
    decide: Callable[[set[Candidate]], Round] | None = None,
) -> Round:
    """The candidates to profile now; a pure function of what is measured, so a restarted controller asks the same.

    `full` profiles the whole grid. `partial` profiles four corners: the smallest and the largest cluster, each with its
    smallest and largest batch per rank. The paper calls them "only the extremum configurations", in places two points;
    two runs that differ in both nodes and batch cannot tell computation from synchronisation. Three identify intercept,
    slope and synchronisation, and the fourth shows how much of it hides behind computation. Where the smallest cluster
    is a single node, which exchanges nothing, the smallest one of several nodes has its two corners as well: without
    them nothing is known of how synchronisation grows (17.5 % instead of 7.7 % median error on public traces). Where
    one node of several GPUs is among larger clusters, its corners tell how fast the links inside it are: taken to be
    like those between nodes, two H200s on NVLink seemed thirty times too slow beside links of 10 Gbit/s, and one GPU
    was chosen, at twice the time.

    `adaptive` begins with three: the smallest cluster of several nodes with its smallest batch, the largest cluster
    with its smallest and largest; and for the links inside a node a fourth, its largest batch on one node of several
    GPUs, which also is what often is best there. Then `decide` names the points on which the decision depends most,
    until there are none.

    When a corner is infeasible, the next smaller batch of the same cluster takes its place until one fits, and when no
    batch of a cluster is feasible, the next cluster does. The first points of `adaptive` also move on when one is lost.

    Corners and first points are those of each type of node, since its models are its own; what `decide` names may be of
    any.

    Args:
        mode: `full`, `partial` or `adaptive`.
        grid: All candidates of the run.
        measured: Candidates with a finished measurement.
        infeasible: Candidates that ran out of memory; larger batches on the same cluster follow from them.
        lost: Candidates that ended without a measurement for other reasons and are not to be tried again.
        running: Candidates being measured; `adaptive` waits for them before it decides anew.
        decide: For `adaptive`: takes the candidates that may still be measured and returns the next round.

    Raises:
        ValueError: There is no such mode.
    """
    mode = SearchMode(mode)
    open_grid = set(grid) - close_infeasible(grid, infeasible)
    if mode is not SearchMode.adaptive:
        wanted = open_grid if mode is SearchMode.full else _of_each_type(open_grid, _corners)
        return Round(sorted(wanted - set(measured) - set(lost) - set(running)))
    if running:
        return Round(why="waiting for the points that are being measured")
    open_grid -= set(lost) | _hopeless(grid, measured, lost)
    first = first_points(open_grid) - set(measured)
    if first:
        return Round(sorted(first), why="the first points: enough to tell computation from synchronisation")
    unmeasured = open_grid - set(measured)
    if not unmeasured or decide is None:
        return Round(ended_by="exhausted", why="every candidate that can be measured is")
    return decide(unmeasured)


def _hopeless(
    grid: Collection[Candidate], measured: Collection[Candidate], lost: Collection[Candidate]
) -> set[Candidate]:
    """The candidates of types of node of which nothing was measured, and as many were lost as the first points are:
    what ended these would end the others as well."""
    hopeless = set()
    for node_type in {c.node_type for c in grid} - {c.node_type for c in measured}:
        of_type = {c for c in grid if c.node_type == node_type}
        if len(of_type.intersection(lost)) >= len(_first_few(of_type)):
            hopeless |= of_type
    return hopeless


def first_points(grid: Collection[Candidate]) -> set[Candidate]:
    """Where adaptive search begins: at most four points of each type of node, that tell intercept, slope and
    synchronisation apart, between nodes and inside one."""
    return _of_each_type(grid, _first_few)


def _of_each_type(grid: Collection[Candidate], choose: Callable[[set[Candidate]], set[Candidate]]) -> set[Candidate]:
    """What is chosen of the candidates of each type of node."""
    types = {c.node_type for c in grid}
    return {c for node_type in types for c in choose({c for c in grid if c.node_type == node_type})}


def _first_few(grid: set[Candidate]) -> set[Candidate]:
    clusters = sorted({_cluster(candidate) for candidate in grid})
    if not clusters:
        return set()
    largest = clusters[-1]
    smaller = [cluster for cluster in clusters[:-1] if cluster[0] > 1] or clusters[:-1]
    batches = _batches(grid, largest)
    if not smaller:  # one cluster: only the batch varies
        return {batches[0], batches[len(batches) // 2], batches[-1]}
    inside = {_batches(grid, cluster)[-1] for cluster in _within_a_node(clusters)}
    return {_batches(grid, smaller[0])[0], batches[0], batches[-1]} | inside


def close_infeasible(grid: Collection[Candidate], infeasible: Collection[Candidate]) -> set[Candidate]:
    """The infeasible candidates and all of `grid` with at least their batch per rank on the same cluster."""
    smallest: dict[Cluster, int] = {}
    for candidate in infeasible:
        cluster = _cluster(candidate)
        smallest[cluster] = min(candidate.batch_per_rank, smallest.get(cluster, candidate.batch_per_rank))
    follows = {c for c in grid if _cluster(c) in smallest and c.batch_per_rank >= smallest[_cluster(c)]}
    return set(infeasible) | follows


def _cluster(candidate: Candidate) -> Cluster:
    return candidate.num_nodes, candidate.gpus_per_node, candidate.node_type


def _batches(grid: Collection[Candidate], cluster: Cluster) -> list[Candidate]:
    return sorted(candidate for candidate in grid if _cluster(candidate) == cluster)


def _within_a_node(clusters: list[Cluster]) -> list[Cluster]:
    """The largest cluster that synchronises over the links inside a node only, if any."""
    return [cluster for cluster in clusters if cluster[0] == 1 and cluster[1] > 1][-1:]


def _corners(grid: set[Candidate]) -> set[Candidate]:
    clusters = sorted({_cluster(candidate) for candidate in grid})
    several_nodes = [cluster for cluster in clusters if cluster[0] > 1]
    corners = set()
    for cluster in {*clusters[:1], *_within_a_node(clusters), *several_nodes[:1], *clusters[-1:]}:
        batches = _batches(grid, cluster)
        corners |= {batches[0], batches[-1]}
    return corners
