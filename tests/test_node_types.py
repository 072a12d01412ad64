"""Several types of node in one run: each is measured and modelled on its own, and one choice is made over all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console
from test_next_steps import Told
from test_probe import Measures

from tula_hpc.candidates import Candidate
from tula_hpc.checks import check
from tula_hpc.composition import compose
from tula_hpc.config import Settings, from_plain, to_plain
from tula_hpc.control.away import _options
from tula_hpc.control.choosing import chosen_fit, fit_of, predicted, rows_of
from tula_hpc.control.controller import Controller
from tula_hpc.control.jobs import TRAIN, Jobs, Look, profile_job
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.next_steps import NextSteps
from tula_hpc.control.packing import Submission, submissions
from tula_hpc.control.replanning import Replanning
from tula_hpc.control.slurm import SlurmScheduler, batch_parameters
from tula_hpc.control.slurm_commands import check_site
from tula_hpc.control.verdicts import Verdict
from tula_hpc.display import Display, candidates_table
from tula_hpc.errors import ConfigError
from tula_hpc.models.knee import KNEE_GAIN
from tula_hpc.models.search import first_points, next_round
from tula_hpc.models.selection import UnusableFit
from tula_hpc.planning import plan
from tula_hpc.prices import prices_of
from tula_hpc.report import write_report
from tula_hpc.runs import RunFolder, read_json, write_json
from tula_hpc.signatures import measurement_signature, signature

A100 = "a100: {partition: old, price_per_node_hour: 1}"
H100 = "h100: {partition: new, constraint: nvlink, price_per_node_hour: 100}"
TYPES = f"+cluster.node_types={{{A100}, {H100}}}"
KINDS = ("array", "packed", "single")


class TwoTypes(Measures):
    """An H100 takes 10 ms + 1 ms a sample and holds any batch, an A100 three times as long and holds fewer."""

    a100_oom_from = 128

    def step_time_s(self, candidate: Candidate) -> float:
        return (3.0 if candidate.node_type == "a100" else 1.0) * (0.01 + 0.001 * candidate.batch_per_rank)

    def fits(self, candidate: Candidate) -> bool:
        return candidate.node_type != "a100" or candidate.batch_per_rank < self.a100_oom_from


@dataclass
class Run:
    """A run up to its choice by a scheduler that measures at once."""

    settings: Settings
    folder: RunFolder
    scheduler: Measures

    def controller(self) -> Controller:
        return Controller(self.settings, self.folder, self.scheduler, Display(Console(width=200)), ["python"])

    def chosen(self) -> dict[str, Any]:
        controller = self.controller()
        controller.write_down_the_run()
        controller._fit(controller._profile())
        controller._choose()
        return read_json(self.folder.selection)


@pytest.fixture
def make_settings(tiny_settings: Callable[..., Settings]) -> Callable[..., Settings]:
    def make(*overrides: str) -> Settings:
        return tiny_settings(
            "cluster=slurm", "data=synthetic", "workload.train_samples=100000", "data.train_samples=null",
            "grid.min_nodes=2", "grid.max_nodes=4", "grid.max_batch_per_rank=256", "grid.max_global_batch=null",
            "search=full", "cluster.file_lag_s=0", *overrides,
        )  # fmt: skip

    return make


@pytest.fixture
def make_run(
    make_settings: Callable[..., Settings], tmp_path: Path, rank_meta: Callable[..., dict[str, Any]]
) -> Callable[..., Run]:
    def make(*overrides: str, name: str = "tiny") -> Run:
        settings = make_settings(*overrides)
        scheduler = TwoTypes(settings)
        scheduler.rank_meta = rank_meta
        return Run(settings, RunFolder(tmp_path / "runs" / name), scheduler)

    return make


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_the_grid_has_every_type_with_its_own_size_and_ranks(make_settings: Callable[..., Settings]):
    """A type's largest number of nodes and GPUs are its own; the grid's bound holds for all; names tell the type."""
    types = "+cluster.node_types={a100: {gpus_per_node: 8, max_nodes: 64}, h100: {gpus_per_node: 4, max_nodes: 2}}"
    grid = make_settings(types, "grid.max_batch_per_rank=16").grid_candidates()
    assert grid == [Candidate(2, 16, 8, "a100"), Candidate(4, 16, 8, "a100"), Candidate(2, 16, 4, "h100")]
    assert [c.name for c in grid] == ["a100-n002-b00016", "a100-n004-b00016", "h100-n002-b00016"]
    assert [Candidate.from_name(c.name, c.gpus_per_node) for c in grid] == grid
    assert [Candidate.from_record(c.record()) for c in grid] == grid


def test_the_settings_survive_being_written_down(make_settings: Callable[..., Settings]):
    settings = make_settings(TYPES)
    assert from_plain(to_plain(settings)) == settings


def test_a_type_measures_what_a_run_on_it_alone_measures(make_settings: Callable[..., Settings]):
    """Measurements are those of a run with the type's partition as the only one; not prices and sizes."""
    typed = make_settings(TYPES)
    alone = make_settings("cluster.partition=new", "cluster.constraint=nvlink", "grid.max_nodes=2")
    assert measurement_signature(typed.of_type("h100")) == measurement_signature(alone)
    assert measurement_signature(typed.of_type("a100")) != measurement_signature(alone)


def test_the_run_is_named_by_what_changes_its_result(make_settings: Callable[..., Settings]):
    """A type's price makes another run, its account does not, and no types are as if the setting were not there."""
    typed = make_settings(TYPES)
    assert signature(make_settings(TYPES, "cluster.node_types.h100.account=mine")) == signature(typed)
    assert signature(make_settings(TYPES, "cluster.node_types.h100.price_per_node_hour=99")) != signature(typed)
    assert signature(make_settings("+cluster.node_types={}")) == signature(make_settings())


@pytest.mark.parametrize(
    ("types", "words"),
    [
        ("{a100: {gpus_per_node: -1}}", "cluster.node_types.a100.gpus_per_node is -1; it must be 0 or greater"),
        ("{a100: {price_per_node_hour: 0}}", "cluster.node_types.a100.price_per_node_hour is 0.0; it must be greater"),
        ("{a100: {max_nodes: 1}}", "cluster.node_types.a100.max_nodes is 1, below grid.min_nodes=2"),
        ("{a-100: {partition: x}}", "the name 'a-100'; it becomes part of folder names"),
        ("{a100: {price_per_node_hour: 1}, h100: {partition: x}}", "h100.price_per_node_hour is null and other types"),
        ("{a100: {partition: x}, h100: {partition: y}}", "objective.kind is cost and none of cluster.node_types has a"),
        ("{a100: {memory_gib: 4, max_memory_gib: 2}}", "memory_gib is 4, above max_memory_gib=2"),
        (
            "{a100: {price_per_node_hour: 1}, h100: {gpus_per_node: 100000, price_per_node_hour: 1}}",
            "node type h100: the grid is empty",
        ),
    ],
)
def test_a_type_that_makes_no_sense_is_refused(make_settings: Callable[..., Settings], types: str, words: str):
    """With key, value and way out."""
    problems = check(make_settings(f"+cluster.node_types={types}", "objective=cost"))
    assert any(words in problem for problem in problems), problems


def test_service_units_of_a_type_need_units(make_settings: Callable[..., Settings]):
    """Weights of a type are read as those of the partition would be."""
    types = "{a100: {memory_gib: 4, billing_weights: 'CPU=1,Mem=2'}, h100: {billing_weights: 'CPU=1'}}"
    (problem,) = check(make_settings("pricing=service_units", f"+cluster.node_types={types}"))
    assert problem.startswith("node type a100: pricing.billing_weights is 'CPU=1,Mem=2': 'Mem=2' has no unit")


def test_this_machine_has_no_types(tiny_settings: Callable[..., Settings]):
    (problem,) = check(tiny_settings("cluster=local", TYPES))
    assert problem.startswith("cluster.node_types names a100, h100 and cluster.kind is local")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+cluster.node_types={a100: {partion: x}}", "did you mean cluster.node_types.a100.partition"),
        ("+cluster.node_types.a100.partition=x", "types of node are given all together"),
        ("cluster.node_types.a100.partition=x", "types of node are given all together"),
    ],
)
def test_a_misspelt_type_is_answered_with_what_would_be_right(override: str, words: str):
    with pytest.raises(ConfigError, match=words):
        compose(["+experiment=quickstart", override])


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["partial", "adaptive"])
def test_each_type_is_searched_as_if_it_were_alone(make_settings: Callable[..., Settings], mode: str):
    """Corners and first points are each type's own, and a batch that does not fit one type says nothing of another."""
    grid, none = make_settings(TYPES).grid_candidates(), list[Candidate]()
    infeasible = [Candidate(2, 32, 1, "a100")]
    both = next_round(mode, grid, none, infeasible).candidates
    for node_type, ran_out in (("a100", infeasible), ("h100", none)):
        alone = [c for c in grid if c.node_type == node_type]
        expected = next_round(mode, alone, none, ran_out).candidates
        assert [c for c in both if c.node_type == node_type] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_has_nodes_of_one_type(make_settings: Callable[..., Settings], kind: str):
    """However jobs are shared, and each is bounded by the limit of its own partition."""
    settings = make_settings(TYPES, f"profiling={kind}", "search.max_seconds=60")
    limits = {"a100": 16, "h100": 6}
    found = submissions(settings, settings.profiling.kind, settings.grid_candidates(), limits.__getitem__)
    assert sorted(c for s in found for c in s.candidates) == sorted(settings.grid_candidates())
    assert all({c.node_type for c in s.candidates} == {s.node_type} for s in found)
    if kind == "single":
        assert [len(s.candidates) for s in found] == [8, 2, 3, 3, 3, 1]


def test_a_job_asks_for_what_its_type_has(
    make_settings: Callable[..., Settings], run_folder: RunFolder, command: Callable[..., Path]
):
    """Partition, GPUs and cores are the type's; what a type leaves out is the cluster's."""
    command("srun", "")  # submitit writes a script only where there is one
    types = (
        "{a100: {partition: old, gpus_per_node: 2}, "
        "h100: {partition: new, qos: long, gpus_per_node: 4, gpu_type: h100, cpus_per_rank: 8, memory_gib: 64}}"
    )
    settings = make_settings(f"+cluster.node_types={types}", "cluster.account=mine", "cluster.cpus_per_rank=3")
    jobs = Jobs(settings, run_folder, Journal(run_folder.journal), Told(settings), lambda: None)
    asked = {}
    for candidate in (Candidate(2, 16, 2, "a100"), Candidate(2, 16, 4, "h100")):
        request = jobs.request("profile", [candidate], 10)
        asked[candidate.node_type] = batch_parameters(settings.of_type(request.node_type).cluster, request)
        assert f"--partition={asked[candidate.node_type]['partition']}\n" in SlurmScheduler(
            settings, run_folder
        ).batch_text(request)
    names = ("partition", "account", "qos", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "mem")
    assert [asked["a100"].get(n) for n in names] == ["old", "mine", None, 2, 3, "2", None]
    assert [asked["h100"].get(n) for n in names] == ["new", "mine", "long", 4, 8, "h100:4", "65536M"]


def test_ranks_are_told_the_settings_of_their_type(make_settings: Callable[..., Settings], run_folder: RunFolder):
    """They need not know that there are others."""
    settings = make_settings(TYPES)
    jobs = Jobs(settings, run_folder, Journal(run_folder.journal), Told(settings), lambda: None)
    candidate = Candidate(2, 16, 1, "h100")
    jobs.submit("profile", Submission([candidate], None))
    request = read_json(run_folder.attempt(profile_job(candidate), 1).request)
    assert from_plain(request["settings"]) == settings.of_type("h100")
    assert Candidate.from_record(request) == candidate
    (attempt,) = Journal(run_folder.journal).state().open
    assert jobs.candidate(attempt) == candidate


def test_the_controllers_job_goes_where_a_type_is(
    make_settings: Callable[..., Settings], run_folder: RunFolder, command: Callable[..., Path]
):
    """To the first type's partition where the site has no common one, which comes before it."""
    command("sinfo", "old*|2|1:00:00\nnew|2|1:00:00\n")
    assert "--partition=old" in _options(make_settings(TYPES), run_folder)
    assert "--partition=new" in _options(make_settings(TYPES, "cluster.partition=new"), run_folder)


def test_runs_share_points_of_a_type_whatever_they_call_it(
    make_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
):
    """A run on one partition takes over what a run on two has measured there, and one with another name for it too."""
    make_run(TYPES).chosen()
    alone = make_run("cluster.partition=old", name="alone")
    controller = alone.controller()
    controller.write_down_the_run()
    controller.shared.take_over_all()
    renamed = make_run("+cluster.node_types={big: {partition: new, constraint: nvlink}}", name="renamed")
    another = renamed.controller()
    another.write_down_the_run()
    another.shared.take_over_all()
    ended = {a.job: a.verdict for a in controller.journal.state().attempts.values()}
    assert ended["profile/n002-b00064"] is Verdict.success
    assert ended["profile/n002-b00128"] is Verdict.cuda_oom
    assert {a.job for a in another.journal.state().attempts.values()} == {
        profile_job(c) for c in renamed.settings.grid_candidates()
    }
    assert all(a.node_type == "big" for a in another.journal.state().attempts.values())


def test_a_point_that_another_run_measures_under_another_name_is_left_to_it(make_run: Callable[..., Run]):
    """The claim is found by what is measured."""
    from tula_hpc.control.lease import controlling

    typed, alone = make_run(TYPES, name="typed"), make_run("cluster.partition=old", name="alone")
    one, two = typed.controller(), alone.controller()
    for controller in (one, two):
        controller.write_down_the_run()
    here, there = Candidate(2, 16, 1, "a100"), Candidate(2, 16)
    with controlling(typed.folder):
        assert one.shared.divide([here]) == ([here], [])
        assert two.shared.divide([there]) == ([], [there])
        journal = Journal(typed.folder.journal)
        attempt = Attempt(profile_job(here), 1, "tag", 16, 2, node_type="a100")
        journal.intend(attempt)
        journal.concluded(attempt, Verdict.node_failure, "")
        assert two.shared.divide([there]) == ([there], [])


# --- models and choice ------------------------------------------------------------------------------------------------


def test_models_of_a_type_are_those_of_a_run_on_it_alone(make_run: Callable[..., Run]):
    """Times, memory and limits of one type do not depend on what was measured on another."""
    typed, alone = make_run(TYPES), make_run("cluster.partition=new", "cluster.constraint=nvlink", name="alone")
    typed.chosen()
    alone.chosen()
    fits = read_json(typed.folder.fit)
    own, expected = fit_of(fits, "h100"), read_json(alone.folder.fit)
    for name in ("step_time", "memory", "memory_limit_gib", "max_batch_per_rank"):
        assert own[name] == expected[name]
    prices = {"a100": prices_of(typed.settings)["h100"], "h100": prices_of(typed.settings)["h100"]}
    there = rows_of(predicted(typed.settings, fits, prices), "h100").reset_index(drop=True)
    here = predicted(alone.settings, expected, {"": prices["h100"]})
    pd.testing.assert_frame_equal(there.drop(columns="node_type"), here)
    assert chosen_fit(own).predict(here)[0] < chosen_fit(fit_of(fits, "a100")).predict(here)[0]


def test_a_type_without_gpus_keeps_a_share_of_all_its_memory(make_run: Callable[..., Run]):
    """Whether constant memory may be used whole depends on the GPUs of the type."""
    run = make_run(
        "+cluster.node_types={old: {partition: old, gpus_per_node: 0}, new: {partition: new, gpus_per_node: 1}}"
    )
    run.chosen()
    fits = read_json(run.folder.fit)
    assert [fit_of(fits, name)["memory"]["on_gpus"] for name in ("old", "new")] == [False, True]


def test_out_of_memory_on_one_type_is_no_bound_on_another(make_run: Callable[..., Run]):
    chosen = make_run(TYPES).chosen()
    feasible = {Candidate.from_record(row): row["feasible"] for row in chosen["candidates"]}
    assert not feasible[Candidate(4, 256, 1, "a100")]
    assert feasible[Candidate(4, 256, 1, "h100")]


def test_larger_batches_are_dropped_on_the_type_that_ran_out(make_settings: Callable[..., Settings], tmp_path: Path):
    """Those that wait on the other type are still measured."""
    settings = make_settings(TYPES)
    told = Told(settings)
    controller = Controller(settings, RunFolder(tmp_path / "run"), told, Display(), [])
    waiting = [Candidate(2, batch, 1, node_type) for node_type in ("a100", "h100") for batch in (64, 128)]
    for candidate in waiting:
        controller.jobs.submit("profile", Submission([candidate], None))
    failed = controller.journal.state().last(profile_job(waiting[0]))
    assert failed is not None
    controller._drop_larger_batches([Look(failed, told.seen, Verdict.cuda_oom)])
    ending = {a.job for a in controller.journal.state().open if a.ending is not None}
    assert ending == {profile_job(waiting[1])}


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (["objective=time"], "h100"),
        (["objective=cost"], "a100"),
        (["objective=time", "objective.budget=0.5"], "a100"),
        (["objective=knee"], "h100"),
    ],
)
def test_one_choice_is_made_over_all_types(make_run: Callable[..., Run], objective: list[str], expected: str):
    """The faster type by time, the cheaper one by its price, and the faster one that a budget cannot pay is not it."""
    run = make_run(TYPES, *objective)
    chosen = run.chosen()
    assert chosen["node_type"] == expected
    assert f"{expected} nodes x" in chosen["reason"]
    assert chosen["price"] == "1 per node-hour (a100), $100 per node-hour (h100)"
    assert {row["node_type"] for row in chosen["candidates"]} == {"a100", "h100"}


def test_the_knee_is_the_best_of_the_types_own_knees(make_run: Callable[..., Run]):
    """By gain: least T B^e over all rows, whichever type that is on."""
    chosen = make_run(TYPES, "objective=knee").chosen()
    rows = pd.DataFrame([row for row in chosen["candidates"] if row["feasible"]])
    score = rows["train_time_s"] * rows["global_batch"] ** -math.log2(1 - KNEE_GAIN)
    best = {t: rows.loc[score[rows["node_type"] == t].idxmin()] for t in ("a100", "h100")}
    assert chosen["knee"]["rule"] == "gain_per_doubling"
    assert score[best["h100"].name] < score[best["a100"].name]
    assert Candidate.from_record(chosen) == Candidate.from_record(best["h100"].to_dict())


def test_a_type_of_which_nothing_fits_leaves_the_choice_to_the_others(make_run: Callable[..., Run]):
    """Its candidates stand in the table with the reason."""
    run = make_run(TYPES, "objective=cost")
    run.scheduler.a100_oom_from = 1  # type: ignore[attr-defined]
    chosen = run.chosen()
    assert chosen["node_type"] == "h100"
    out = [row for row in chosen["candidates"] if row["node_type"] == "a100"]
    assert {row["why_infeasible"] for row in out} == {"nothing that could be used was measured on a node of type a100"}
    assert {row["step_time_s"] for row in out} == {None}
    with pytest.raises(UnusableFit):
        fit_of(read_json(run.folder.fit), "a100")
    write_report(run.folder)


def test_adaptive_search_leaves_a_type_alone_that_cannot_win(make_run: Callable[..., Run]):
    """After the first points of each it measures where the decision is open."""
    run = make_run(TYPES, "objective=time", "search=adaptive", "search.verify_choice=false")
    assert run.chosen()["node_type"] == "h100"
    first = first_points(run.settings.grid_candidates())
    tried = {
        Candidate.from_name(job.removeprefix("profile/"), 1) for job, _ in run.controller().journal.state().attempts
    }
    slow = {c for c in tried if c.node_type == "a100" and c.batch_per_rank < TwoTypes.a100_oom_from}
    assert slow <= first | {Candidate(4, 64, 1, "a100")}  # takes the place of the corner that did not fit


def test_waits_are_asked_for_the_partition_of_the_type(make_run: Callable[..., Run]):
    """A type that would wait for long loses to a slower one that starts at once."""

    class Busy(TwoTypes):
        def expected_wait_s(self, request: Any) -> float | None:
            return 1e6 if request.node_type == "h100" else 0.0

    run = make_run(TYPES, "objective=time_to_result")
    run.scheduler.__class__ = Busy
    chosen = run.chosen()
    assert chosen["node_type"] == "a100"
    waits = {(row["node_type"], row["queue_wait_s"]) for row in chosen["candidates"] if row["feasible"]}
    assert waits == {("a100", 0.0), ("h100", 1e6)}


def test_each_partition_is_asked_what_it_bills(make_settings: Callable[..., Settings], command: Callable[..., Path]):
    """Service units are those of the type's partition."""
    command("sinfo", "old*|2|1:00:00\nnew|2|1:00:00\n")
    asked = command("scontrol", "TRESBillingWeights=CPU=2")
    prices = prices_of(make_settings(TYPES, "pricing=service_units", "cluster.node_types.h100.cpus_per_rank=3"))
    assert "show partition old" in asked.read_text()
    assert "show partition new" in asked.read_text()
    assert {t: float(p.cost(3600.0, 1, 1, 0.0)) for t, p in prices.items()} == {"a100": 2.0, "h100": 6.0}


# --- the training, and what is shown ----------------------------------------------------------------------------------


@pytest.mark.parametrize("node_type", ["a100", "h100"])
def test_a_smaller_batch_stays_on_the_type(
    make_settings: Callable[..., Settings], run_folder: RunFolder, node_type: str
):
    settings = make_settings(TYPES)
    journal = Journal(run_folder.journal)
    jobs = Jobs(settings, run_folder, journal, Told(settings), lambda: None)
    attempt = Attempt(TRAIN, 1, "tag", 64, 4, node_type=node_type, verdict=Verdict.cuda_oom)
    candidate, _ = NextSteps(settings, journal, jobs, lambda text: None).after(attempt)
    assert candidate == Candidate(4, 32, 1, node_type)


def test_a_training_is_compared_and_replanned_within_its_type(make_run: Callable[..., Run]):
    """What it is expected to take, and what it is offered to go on with, is that of the nodes it runs on, though others
    are cheaper."""
    run = make_run(TYPES, "objective=cost")
    run.chosen()
    controller = run.controller()
    candidate = Candidate(2, 16, 1, "h100")
    controller.jobs.submit(TRAIN, Submission([candidate], None))
    attempt = controller.journal.state().last(TRAIN)
    assert attempt is not None
    watch: Replanning = controller.replanning
    fit = watch._fit_before(attempt, watch._fit_record(attempt))
    expected = watch._predicted(fit, attempt)
    assert expected.step_time_s == pytest.approx(run.scheduler.step_time_s(candidate), rel=0.02)
    assert expected.step_time_s < 0.5 * run.scheduler.step_time_s(replace(candidate, node_type="a100"))

    folder = run.folder.attempt(TRAIN, 1)
    launched = folder.request.stat().st_mtime
    write_json(folder.launch, {"launch": "1", "host": "n1", "time": launched})
    offer, words = watch._offer(attempt, fit, {"samples": 0, "of_samples": 10**7, "started": launched + 1})
    assert offer is not None, words
    assert offer.candidate.node_type == "h100"


def test_plan_tells_of_each_type(
    make_settings: Callable[..., Settings], command: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    """Its jobs, what they cost at its price, and the text that Slurm would get for its partition."""
    command("sinfo", "old*|4|1:00:00\nnew|4|1:00:00\n")
    command("scontrol", "PriorityFlags = \n")
    command("srun", "")
    command("sbatch", "Job 1 to start at 2026-01-01T00:00:00 a nodes n[1-2]\n", on_stderr=True)
    plan(make_settings(TYPES, "search=partial", "search.max_seconds=60"), ["python"], Display(Console(width=200)))
    told = capsys.readouterr().out
    assert "2 a100 nodes x 1 ranks: a100-n002-b00016, a100-n002-b00256" in told
    assert "4 h100 nodes x 1 ranks: h100-n004-b00016, h100-n004-b00256" in told
    # for each type two candidates of 2 and of 4 nodes, of two minutes
    assert "up to about 0.80 node-hours, $40.40;" in told
    assert "price: $1 per node-hour (a100), $100 per node-hour (h100)" in told
    for node_type, partition in (("a100", "old"), ("h100", "new")):
        text = told.partition(f"sbatch gets, for 2 {node_type} nodes:")[2].partition("--- sbatch --test-only")[0]
        assert f"#SBATCH --partition={partition}\n" in text


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("old*|4|1:00:00\nnew|2|1:00:00\n", "node type h100: grid.max_nodes is 4 and partition new has 2 nodes"),
        ("old*|4|1:00:00\n", "node type h100: cluster.partition is 'new', which this cluster does not have"),
    ],
)
def test_a_partition_that_a_type_cannot_have_is_told(
    make_settings: Callable[..., Settings], command: Callable[..., Path], nodes: str, words: str
):
    """Before anything is submitted."""
    command("sinfo", nodes)
    (problem,) = check_site(make_settings(TYPES))
    assert problem.startswith(words)


def test_tables_and_report_tell_the_type(make_run: Callable[..., Run]):
    """In the terminal's table, the page's tables and models, and the names of its plots."""
    run = make_run(TYPES, "objective=cost")
    selection = run.chosen()
    console = Console(width=200, record=True)
    console.print(candidates_table(selection))
    chosen_line = next(line for line in console.export_text().splitlines() if "<- chosen" in line)
    assert chosen_line.split()[0] == "a100"
    page = write_report(run.folder).read_text()
    assert "Models of a100 nodes" in page
    assert "Models of h100 nodes" in page
    assert "2 to 4 a100 nodes × 1 rank or 2 to 4 h100 nodes × 1 rank" in page
    plots = {path.stem for path in run.folder.plots.glob("*.png")}
    assert {"epoch_time_a100", "epoch_time_h100", "step_time_a100", "memory_h100"} <= plots


def test_without_types_records_do_not_speak_of_them(make_run: Callable[..., Run]):
    """They are as they were before there were types."""
    run = make_run("cluster.partition=old")
    run.chosen()
    texts = [path.read_text() for path in run.folder.path.rglob("*.json")]
    settings = [text.count('"node_types": {}') for text in texts]
    assert sum(text.count("node_type") for text in texts) == sum(settings)
