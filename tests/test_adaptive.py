"""Adaptive search finds the best candidate in few points, says why it ends, and keeps its budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pytest

from tula_hpc.candidates import Candidate, candidate_grid
from tula_hpc.checks import check
from tula_hpc.config import Settings, expected_attempt_s
from tula_hpc.control.budget import within_budget
from tula_hpc.control.choosing import adaptive_round, fitted, predicted
from tula_hpc.control.journal import Attempt, State
from tula_hpc.control.verdicts import Verdict
from tula_hpc.models.adaptive import next_points
from tula_hpc.models.memory import fit_memory
from tula_hpc.models.posterior import NOISE, posterior
from tula_hpc.models.pricing import NodeHourPrice
from tula_hpc.models.search import POINTS_A_ROUND, Round, first_points, next_round
from tula_hpc.models.selection import candidate_table, select
from tula_hpc.models.step_time import fit_step_time
from tula_hpc.prices import prices_of

GRID = candidate_grid([2, 4, 8, 16], 1, [8, 16, 32, 64, 128, 256], 1, 10**6)
TRAIN_SAMPLES = 1_281_167
KEYS = ["num_nodes", "gpus_per_node", "batch_per_rank"]


def true_step_s(candidate: Candidate) -> float:
    """Computation that hides synchronisation, and a slow kernel at a batch of 128 that no form knows of."""
    compute = 0.02 + 0.001 * candidate.batch_per_rank * (1.15 if candidate.batch_per_rank == 128 else 1.0)
    sync = 0.06 + 0.012 * (candidate.num_nodes - 2)
    return float((compute**3 + sync**3) ** (1 / 3))


def measure(candidates: set[Candidate]) -> pd.DataFrame:
    rows = [(c.num_nodes, 1, c.batch_per_rank, true_step_s(c), 2 + 0.2 * c.batch_per_rank) for c in sorted(candidates)]
    return pd.DataFrame(rows, columns=[*KEYS, "step_time_s", "memory_gib"])


@dataclass
class Search:
    """A search on the true times; batches above `largest_batch` run out of memory."""

    objective: str = "time"
    tolerance: float = 0.02
    largest_batch: int = 10**6
    lost: set[Candidate] = field(default_factory=set)
    limit_gib: float | None = None
    measured: set[Candidate] = field(default_factory=set)
    infeasible: set[Candidate] = field(default_factory=set)
    rounds: list[Round] = field(default_factory=list)

    def table(self) -> tuple[pd.DataFrame, np.ndarray]:
        seen = measure(self.measured)
        fit, memory = fit_step_time(seen), fit_memory(seen, [c.batch_per_rank for c in self.infeasible])
        price, limit = NodeHourPrice(1.0), self.limit_gib
        table = candidate_table(GRID, fit, memory, price, TRAIN_SAMPLES, 1, limit, 0.9, self.infeasible, seen)
        return table, posterior(fit, seen, table).covariance

    def ask(self) -> Round:
        def decide(unmeasured: set[Candidate]) -> Round:
            return next_points(*self.table(), unmeasured, self.objective, self.tolerance)

        return next_round("adaptive", GRID, self.measured, self.infeasible, self.lost, decide=decide)

    def run(self) -> Search:
        while (now := self.ask()).candidates:
            self.rounds.append(now)
            self.infeasible |= {c for c in now.candidates if c.batch_per_rank > self.largest_batch}
            self.measured |= set(now.candidates) - self.infeasible
        self.rounds.append(now)
        return self


@pytest.mark.parametrize("objective", ["time", "cost", "knee"])
def test_the_choice_is_the_best_in_few_points(objective: str):
    """On a surface that no form fits exactly, the choice is within 2 % of the best after less than half of it."""
    search = Search(objective).run()
    truth = search.table()[0]
    truth["step_time_s"] = [true_step_s(c) for c in GRID]
    factor = truth["step_time_s"] / search.table()[0]["step_time_s"]
    truth["train_time_s"] *= factor
    truth["cost"] *= factor
    metric = "cost" if objective == "cost" else "train_time_s"
    ours, best = (select(t, objective, 0.0).candidate for t in (search.table()[0], truth))
    values = dict(zip(GRID, truth[metric], strict=True))
    assert values[ours] == pytest.approx(values[best], rel=0.02)
    assert len(search.measured) < len(GRID) / 2
    assert search.rounds[-1].ended_by == "tolerance"


def test_the_choice_itself_is_measured():
    """The search does not end on a choice that only the model speaks for."""
    search = Search("knee").run()
    assert select(search.table()[0], "knee", 0.0).candidate in search.measured


def test_a_looser_tolerance_needs_no_more_points():
    """A choice that may be half as good again is certain earlier."""
    assert len(Search("cost", tolerance=0.5).run().measured) < len(Search("cost", tolerance=0.001).run().measured)


def test_a_round_is_small_and_measures_each_number_of_nodes_once():
    """A round after the first asks for few points, each of another cluster, so that they can run side by side."""
    for each in Search("cost", tolerance=0.001).run().rounds[1:]:
        nodes = [c.num_nodes for c in each.candidates]
        assert len(nodes) == len(set(nodes)) <= POINTS_A_ROUND


def test_the_same_measurements_ask_for_the_same_points():
    """A controller that was killed and started again asks for what it asked for before."""
    search = Search("cost").run()
    assert len(search.rounds) > 2
    again = Search("cost")
    for before in search.rounds:
        assert again.ask() == before
        again.measured |= set(before.candidates)


def test_batches_that_do_not_fit_are_not_tried_in_vain():
    """A batch that runs out of memory on one cluster is not tried on the others."""
    search = Search("time", largest_batch=64, limit_gib=20.0).run()
    assert len(search.infeasible) <= 2  # 256, then 128, on one cluster
    assert max(c.batch_per_rank for c in search.measured) == 64
    assert select(search.table()[0], "time", 0.0).candidate == Candidate(16, 64)


def test_lost_points_are_replaced_and_not_asked_for_again():
    """What ended without a measurement is given up, and a first point moves to its neighbour."""
    lost = {Candidate(16, 256), Candidate(8, 256)}
    search = Search("time", lost=lost).run()
    assert not lost & {c for each in search.rounds for c in each.candidates}
    assert Candidate(16, 128) in search.rounds[0].candidates


def test_it_waits_for_what_runs():
    """With points still in the queue nothing is asked for, so a restart in the middle of a round repeats nothing."""
    now = next_round("adaptive", GRID, {Candidate(2, 8)}, set(), running={Candidate(16, 8)})
    assert now.candidates == []
    assert now.ended_by == ""


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([1, 2, 4], {(2, 8), (4, 8), (4, 64)}),  # a single node tells nothing of synchronisation
        ([1, 2], {(1, 8), (2, 8), (2, 64)}),
        ([4], {(4, 8), (4, 32), (4, 64)}),
    ],
)
def test_first_points(nodes: list[int], expected: set[tuple[int, int]]):
    """Three points differ in the batch on the largest cluster and in the cluster at a small batch."""
    found = first_points(candidate_grid(nodes, 1, [8, 16, 32, 64], 1, 10**6))
    assert {(c.num_nodes, c.batch_per_rank) for c in found} == expected


def test_measured_points_are_known_and_neighbours_better_than_the_rest():
    """The uncertainty is the noise where a point was measured, and grows with the distance to it."""
    seen = measure({Candidate(2, 8), Candidate(16, 8), Candidate(16, 256)})
    rows = pd.DataFrame([(16, 1, 256), (16, 1, 128), (4, 1, 64)], columns=KEYS)
    at, near, far = np.sqrt(np.diag(posterior(fit_step_time(seen), seen, rows).covariance))
    assert at <= NOISE < near < far


# --- budgets ----------------------------------------------------------------------------------------------------------


def state(*candidates: Candidate, tag: str = "t", verdict: Verdict = Verdict.success) -> State:
    attempts = [
        Attempt(f"profile/{c.name}", 1, f"{tag}-{i}", c.batch_per_rank, c.num_nodes, verdict=verdict)
        for i, c in enumerate(candidates)
    ]
    return State({a.key: a for a in attempts})


WANTED = Round([Candidate(2, 16), Candidate(16, 16)], why="because")
TRIED = [Candidate(2, 8), Candidate(16, 8), Candidate(16, 256)]


@pytest.mark.parametrize(
    ("budget", "minutes", "left", "ended_by"),
    [
        ("search.max_points=null", 1e6, 2, ""),
        ("search.max_points=4", 0, 1, ""),
        ("search.max_points=3", 0, 0, "max_points"),
        ("search.max_node_hours=1.21", 0, 1, ""),  # 34 nodes x 2 min are spent, 2 x 2 min fit
        ("search.max_node_hours=1.15", 0, 0, "max_node_hours"),
        ("search.max_minutes=60", 59, 2, ""),
        ("search.max_minutes=60", 60, 0, "max_minutes"),
    ],
)
def test_each_budget_ends_the_search_and_is_named(
    tiny_settings: Callable[..., Settings], budget: str, minutes: float, left: int, ended_by: str
):
    """A round is cut to what the budget still holds; an empty one names the budget and its value."""
    now = within_budget(tiny_settings("search=adaptive", budget), state(*TRIED), WANTED, minutes)
    assert now.candidates == WANTED.candidates[:left]
    assert now.ended_by == ended_by
    assert ended_by in now.why


def test_a_shared_job_is_counted_with_all_its_nodes(tiny_settings: Callable[..., Settings]):
    """Three candidates in one job of 16 nodes hold 48 nodes in turn, whatever they use of them."""
    settings = tiny_settings("search=adaptive", "profiling=single", "search.max_node_hours=1.6")
    attempts = [
        Attempt(f"profile/{c.name}", 1, "t", c.batch_per_rank, c.num_nodes, one_after_another=True) for c in TRIED
    ]
    now = within_budget(settings, State({a.key: a for a in attempts}), WANTED, 0)
    assert now.ended_by == "max_node_hours"


def test_what_costs_nothing_is_in_no_budget(tiny_settings: Callable[..., Settings]):
    """Measurements of other runs and jobs that never began are free."""
    settings = tiny_settings("search=adaptive", "search.max_points=3")
    assert within_budget(settings, state(*TRIED, tag="taken"), WANTED, 0) == WANTED
    assert within_budget(settings, state(*TRIED, verdict=Verdict.never_started), WANTED, 0) == WANTED


def test_a_round_beyond_the_first_points_is_in_the_budget_though_those_were_taken_over(
    tiny_settings: Callable[..., Settings],
):
    """Another objective of the same run finds them measured, and may spend no more than it was given."""
    settings = tiny_settings("search=adaptive", "search.max_points=1")
    assert within_budget(settings, state(*TRIED, tag="taken"), WANTED, 0).candidates == WANTED.candidates[:1]


def test_a_budget_is_held_against_the_jobs_that_the_first_points_share(tiny_settings: Callable[..., Settings]):
    """In one job of the largest size each first point takes all its nodes."""
    options = ("search=adaptive", "grid.min_nodes=1", "grid.max_nodes=2")
    first = first_points(tiny_settings(*options).grid_candidates())
    nodes_apart, nodes_together = sum(c.num_nodes for c in first), len(first) * max(c.num_nodes for c in first)
    each_h = expected_attempt_s(tiny_settings(*options)) / 3600
    enough_apart = f"search.max_node_hours={each_h * (nodes_apart + nodes_together) / 2}"
    assert check(tiny_settings(*options, enough_apart)) == []
    (problem,) = check(tiny_settings(*options, enough_apart, "profiling=single"))
    assert f"the first points alone take {each_h * nodes_together:.2g} " in problem


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["search=partial", "search.max_points=9"], "search=adaptive"),
        (["search=adaptive", "search.max_points=2"], "the first points alone take 3"),
        (["search=adaptive", "search.max_node_hours=0.01"], "the first points alone take"),
        (["search=adaptive", "search.max_minutes=0"], "must be greater than 0"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    tiny_settings: Callable[..., Settings], overrides: list[str], words: str
):
    """A budget on a search that cannot stop, or below the first points, is told with the way out."""
    (problem,) = check(tiny_settings(*overrides))
    assert words in problem
    assert overrides[1].partition("=")[0] in problem


def test_a_deadline_that_nothing_keeps_does_not_end_the_search_early(tiny_settings: Callable[..., Settings]):
    """While intervals are wide, the search goes on as if there was no limit."""
    settings = tiny_settings("search=adaptive", "objective=time", "objective.deadline_h=1e-9")
    grid = settings.grid_candidates()
    first = first_points(grid)
    points = measure(first).assign(limit_gib=np.inf).to_dict("records")
    fit = fitted(settings, [{str(k): v for k, v in p.items()} | {"hosts": []} for p in points])
    fit = {**fit, "points": points, "infeasible": {}, "failed": {}}
    now = adaptive_round(settings, fit, predicted(settings, fit, prices_of(settings)), set(grid) - first)
    assert now.candidates or now.ended_by == "tolerance"


def test_a_point_with_allocator_retries_says_nothing_of_its_neighbours(tiny_settings: Callable[..., Settings]):
    """The form is not fitted to it, so it corrects no prediction either, and its row tells why it is out."""
    settings = tiny_settings("grid.max_nodes=2")
    slow = settings.grid_candidates()[-1]
    points = measure(set(settings.grid_candidates())).assign(limit_gib=np.inf, allocator_retries=0)
    records = [{**point, "hosts": []} for point in points.to_dict("records")]
    usable = [record for record in records if Candidate.from_record(record) != slow]
    fit = {**fitted(settings, usable), "points": usable, "infeasible": {slow.name: "it fits, but slowly"}, "failed": {}}
    retried = {**records[-1], "step_time_s": 3 * records[-1]["step_time_s"], "allocator_retries": 7}
    without, told = (
        predicted(settings, {**fit, "points": [*usable, *more]}, prices_of(settings)) for more in ([], [retried])
    )
    assert told["step_time_s"].to_numpy() == pytest.approx(without["step_time_s"].to_numpy())
    assert told["measured_step_time_s"].iloc[-1] == retried["step_time_s"]
    assert told["why_infeasible"].iloc[-1] == "it fits, but slowly"
