"""What one measured configuration says of the others, and when a new start is worth it, on synthetic truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tula_hpc.candidates import Candidate, candidate_grid
from tula_hpc.models.limits import Limits, NoFeasibleConfiguration
from tula_hpc.models.pricing import NodeHourPrice
from tula_hpc.models.replan import CLEAR_GAIN, Part, better, refit, relaunched, scaled, with_probes, with_row
from tula_hpc.models.selection import Objective, candidate_table, select
from tula_hpc.models.step_time import StepTimeFit, fit_step_time

GRID = candidate_grid([1, 2, 4, 8], 1, [16, 32, 64, 128], 16, 4096)
TRUTH = {
    "alpha": 0.004,
    "beta": 0.0008,
    "t_floor": 0.01,
    "c_ring": 0.03,
    "lambda": 0.002,
    "kappa": 0.0,
    "c_r": 0.0,
    "before_sync": 0.35,
    "after_backward": 0.08,
}
PRICE = NodeHourPrice(2.0)
FREE = Limits()


def rows(candidates: list[Candidate]) -> pd.DataFrame:
    return pd.DataFrame([vars(c) for c in candidates])


@pytest.fixture(scope="module")
def truth() -> StepTimeFit:
    """The truth as a fit; what it was fitted to does not matter."""
    table = rows(GRID).assign(step_time_s=0.1)
    fit = fit_step_time(table, "overlap")
    parameters = {name: (TRUTH[name], unit) for name, (_, unit) in fit.parameters.items()}
    return replace(fit, parameters=parameters, left_out_errors=(0.01,) * 100)  # with a narrow interval


@pytest.fixture(scope="module")
def fits(truth: StepTimeFit) -> dict[str, StepTimeFit]:
    """Both forms, fitted to the truth's step times."""
    table = rows(GRID).assign(step_time_s=truth.predict(rows(GRID)))
    return {form: fit_step_time(table, form) for form in ("overlap", "additive")}


@pytest.mark.parametrize("form", ["overlap", "additive"])
@pytest.mark.parametrize("factor", [0.5, 1.5, 4.0])
def test_the_factor_of_a_slower_network_is_recovered(fits: dict[str, StepTimeFit], form: str, factor: float):
    """From the step time of one configuration alone, and with it the step time of every other one."""
    fit = fits[form]
    busy = scaled(fit, Part.SYNC, factor)
    running = Candidate(8, 32)
    found = refit(fit, running, float(busy.predict(rows([running]))[0]))
    assert found.part is Part.SYNC
    assert found.factor == pytest.approx(factor, rel=1e-6)
    assert found.fit.predict(rows(GRID)) == pytest.approx(busy.predict(rows(GRID)), rel=1e-6)


def test_one_node_is_slower_by_its_computation(fits: dict[str, StepTimeFit]):
    """Nothing is synchronised on one rank, so that is what other load takes time from."""
    fit, running = fits["overlap"], Candidate(1, 64)
    found = refit(fit, running, 1.5 * float(fit.predict(rows([running]))[0]))
    assert (found.part, found.factor) == (Part.COMPUTE, pytest.approx(1.5))


def test_a_network_is_not_blamed_for_what_it_cannot_do(truth: StepTimeFit):
    """Where synchronisation is next to nothing it would have to be a hundred times slower: it was the computation."""
    fast = scaled(truth, Part.SYNC, 0.01)
    running = Candidate(8, 128)
    found = refit(fast, running, 1.6 * float(fast.predict(rows([running]))[0]))
    assert found.part is Part.COMPUTE


def test_steps_faster_than_their_computation_scale_as_a_whole(truth: StepTimeFit):
    """No network explains that, and the order of the configurations stays."""
    running = Candidate(8, 128)
    found = refit(truth, running, 0.5 * float(truth.predict(rows([running]))[0]))
    assert (found.part, found.factor) == (Part.ALL, pytest.approx(0.5))
    assert found.fit.predict(rows(GRID)) == pytest.approx(0.5 * truth.predict(rows(GRID)))


@pytest.mark.parametrize("candidate", [Candidate(1, 16), Candidate(2, 128), Candidate(8, 64)])
@pytest.mark.parametrize("ratio", [0.4, 0.9, 1.2, 3.0, 30.0])
def test_after_the_refit_the_running_configuration_is_predicted_as_measured(
    fits: dict[str, StepTimeFit], candidate: Candidate, ratio: float
):
    for fit in fits.values():
        measured_s = ratio * float(fit.predict(rows([candidate]))[0])
        assert refit(fit, candidate, measured_s).fit.predict(rows([candidate]))[0] == pytest.approx(measured_s)


def test_a_configuration_that_was_not_profiled_becomes_a_row_of_the_table(truth: StepTimeFit):
    """A fit from corners that is off inside is better everywhere with the training's own point."""
    corners = [Candidate(n, b) for n in (1, 2, 8) for b in (16, 128)]
    points = rows(corners).assign(step_time_s=truth.predict(rows(corners)))
    fit = fit_step_time(points, "overlap")
    running = Candidate(4, 64)
    with_training = with_row(points, fit, running, float(truth.predict(rows([running]))[0]))
    assert (4, 1, 64) in with_training.measured
    assert len(with_training.measured) == len(fit.measured) + 1


@pytest.mark.parametrize("form", ["overlap", "additive"])
@pytest.mark.parametrize("link_mbit", [200, 100])
def test_on_a_real_network_one_step_time_tells_the_others(link_mbit: int, form: str):
    """Links that fall from 1 Gbit/s to a fifth and a tenth: predictions of the other configurations are off by a half
    with the fit from before, and by less than a tenth once any one of them on several nodes has told its step time."""
    table = pd.read_csv(Path(__file__).parent / "data" / "busy_network.csv", comment="#")
    fit = fit_step_time(table[table["link_mbit"] == 1000], form)
    busy = table[table["link_mbit"] == link_mbit].reset_index(drop=True)

    def error(other: StepTimeFit, without: int) -> float:
        off = np.abs(other.predict(busy) / busy["step_time_s"] - 1)
        return float(off.drop(without).median())

    for place, row in enumerate(busy.itertuples()):
        if row.num_nodes > 1:
            found = refit(fit, Candidate(row.num_nodes, row.batch_per_rank), row.step_time_s)
            assert found.part is Part.SYNC
            assert error(found.fit, place) < 0.1 < 0.4 < error(fit, place)


# --- the offer --------------------------------------------------------------------------------------------------------


def table_of(fit: StepTimeFit, epochs: float = 10.0) -> pd.DataFrame:
    return candidate_table(GRID, fit, None, PRICE, 100_000, epochs, None, 0.9, [], rows([]))


def offer(fit: StepTimeFit, running: Candidate, start_s: float = 5.0, wait_s: float = 0.0, **how: object):
    arguments = {"objective": Objective.TIME, "limits": FREE, "epochs": 10.0, **how}
    waits = dict.fromkeys((1, 2, 4, 8), wait_s)
    table = relaunched(table_of(fit, arguments["epochs"]), running, start_s, waits)  # type: ignore[arg-type]
    return better(table, running, arguments["objective"], arguments["limits"], 0.02, start_s)  # type: ignore[arg-type]


BUSY = 60.0
"""A network so slow that one node is faster than eight."""


@pytest.mark.parametrize("objective", list(Objective))
def test_nothing_is_offered_while_nothing_has_changed(truth: StepTimeFit, objective: Objective):
    """What was chosen by any objective stays chosen, all of the training or little of it before the end."""
    chosen = select(table_of(truth), objective).candidate
    for epochs in (10.0, 0.5):
        assert offer(truth, chosen, objective=objective, epochs=epochs) is None


def test_what_was_measured_since_stands_in_the_place_of_its_prediction(truth: StepTimeFit):
    """With all that follows from it; the running configuration stays as it is, and the neighbours learn from it."""
    table, running, probed, near = table_of(truth), Candidate(8, 128), Candidate(2, 32), Candidate(2, 64)

    def of(rows: pd.DataFrame, c: Candidate) -> pd.Series:
        return rows.query(f"num_nodes == {c.num_nodes} and batch_per_rank == {c.batch_per_rank}").iloc[0]

    fit = replace(truth, left_out_errors=(0.3,) * 100)
    point = {**vars(probed), "step_time_s": 2 * of(table, probed)["step_time_s"], "node_type": ""}
    told = with_probes(table, fit, running, [point], {Candidate(1, 16): "no room"})
    for column in ("step_time_s", "train_time_s", "train_time_high_s", "cost", "time_to_result_s"):
        assert of(told, probed)[column] == pytest.approx(2 * of(table, probed)[column], rel=0.01)
        assert of(told, running)[column] == pytest.approx(of(table, running)[column], rel=0.01)
        assert of(table, near)[column] < of(told, near)[column] < 2 * of(table, near)[column]
    assert of(told, Candidate(1, 16))["why_infeasible"] == "no room"
    assert table["feasible"].all()
    assert not of(told, Candidate(1, 16))["feasible"]


@pytest.mark.parametrize("objective", [Objective.TIME, Objective.KNEE, Objective.TIME_TO_RESULT])
def test_on_a_busy_network_fewer_nodes_are_offered(truth: StepTimeFit, objective: Objective):
    found = offer(scaled(truth, Part.SYNC, BUSY), Candidate(8, 128), objective=objective)
    assert found is not None
    assert found.candidate.num_nodes < 8
    assert found.left_s < (1 - CLEAR_GAIN) * found.left_here_s


@pytest.mark.parametrize("cost_of_a_start", [{"start_s": 1e5}, {"wait_s": 1e5}])
def test_what_a_new_start_costs_is_counted(truth: StepTimeFit, cost_of_a_start: dict[str, float]):
    """A start or a wait longer than the rest of the training is never worth it."""
    assert offer(scaled(truth, Part.SYNC, BUSY), Candidate(8, 128), **cost_of_a_start) is None


def test_shortly_before_the_end_nothing_is_offered(truth: StepTimeFit):
    """What is left is shorter than a new start."""
    assert offer(scaled(truth, Part.SYNC, BUSY), Candidate(8, 128), start_s=30.0, epochs=0.05) is None


def test_the_limits_are_kept(truth: StepTimeFit):
    """A better configuration beyond the node limit is not offered, nor one that costs more than is left."""
    slow = Candidate(1, 16)
    assert offer(truth, slow, limits=Limits(max_nodes=2)).candidate.num_nodes <= 2
    fast = offer(truth, slow)
    assert fast.candidate.num_nodes == 8
    cheapest = offer(truth, slow, objective=Objective.COST)
    budget = 0.99 * fast.cost
    thrifty = offer(truth, slow, limits=Limits(budget=budget))
    assert cheapest.cost <= thrifty.cost <= budget < fast.cost


def test_a_limit_that_would_break_is_reason_enough(truth: StepTimeFit):
    """Where the running configuration misses the deadline, one that costs more and keeps it is offered."""
    running = Candidate(1, 128)
    left_h = float(table_of(truth).query("num_nodes == 1 and batch_per_rank == 128")["train_time_s"].iloc[0]) / 3600
    found = offer(truth, running, objective=Objective.COST, limits=Limits(deadline_h=0.7 * left_h))
    assert found is not None
    assert found.cost > found.cost_here
    assert "objective.deadline_h" in found.why


def test_limits_that_nothing_keeps_are_said(truth: StepTimeFit):
    with pytest.raises(NoFeasibleConfiguration, match="deadline_h"):
        offer(truth, Candidate(8, 128), limits=Limits(deadline_h=1e-6))


def test_what_is_infeasible_is_never_offered(truth: StepTimeFit):
    """What did not fit stays out, and what runs stays in, whatever was predicted of it."""
    running = Candidate(8, 128)
    infeasible = [c for c in GRID if c.num_nodes < 4 and c.batch_per_rank > 16]
    busy = scaled(truth, Part.SYNC, BUSY)
    table = candidate_table(GRID, busy, None, PRICE, 100_000, 10.0, None, 0.9, [*infeasible, running], rows([]))
    found = better(
        relaunched(table, running, 5.0, dict.fromkeys((1, 2, 4, 8), 0.0)), running, Objective.TIME, FREE, 0.02, 5.0
    )
    assert found is None or found.candidate not in infeasible
