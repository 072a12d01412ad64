"""The choice is the least time, the least cost or the knee among feasible candidates, and nothing else moves it."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pandas as pd
import pytest

from tula_hpc.candidates import Candidate, candidate_grid
from tula_hpc.models.limits import Limits, NoFeasibleConfiguration
from tula_hpc.models.memory import fit_memory
from tula_hpc.models.pricing import MemoryPrice, NodeHourPrice, SpotPrice
from tula_hpc.models.queue_wait import Wait, given_waits
from tula_hpc.models.selection import (
    Rule,
    Selection,
    UnusableFit,
    candidate_table,
    select,
)
from tula_hpc.models.step_time import StepTimeOutcome, fit_step_time

GRID = candidate_grid([2, 4, 8, 16], 1, [8, 16, 32, 64, 128, 256], 1, 10**6)
KEYS = ["num_nodes", "gpus_per_node", "batch_per_rank"]


def measurements(memory_gib: float = 0.05) -> pd.DataFrame:
    """Four corners of t = 20 ms + 1 ms b + 200 ms (1 - 1/N) and 2 GiB + 0.05 GiB b."""
    rows = [(n, 1, b, 0.02 + 0.001 * b + 0.2 * (1 - 1 / n), 2 + memory_gib * b) for n in (2, 16) for b in (8, 256)]
    return pd.DataFrame(rows, columns=[*KEYS, "step_time_s", "memory_gib"])


def make_table(
    limit_gib: float = 80.0, infeasible: frozenset[Candidate] = frozenset(), **changes: object
) -> pd.DataFrame:
    data = measurements()
    settings = {
        "grid": GRID,
        "step_time_fit": fit_step_time(data, "additive"),
        "memory_fit": fit_memory(data),
        "price": NodeHourPrice(2.48),
        "train_samples": 1_281_167,
        "epochs": 90,
        "limit_gib": limit_gib,
        "memory_fraction": 0.9,
        "infeasible": infeasible,
        "measured": data,
        **changes,
    }
    return candidate_table(**settings)  # type: ignore[arg-type]


def curve(batches: list[int], times: list[float], nodes: int = 1) -> pd.DataFrame:
    """A feasible table with given training times."""
    time = np.array(times, dtype=float)
    return pd.DataFrame(
        {
            "num_nodes": nodes,
            "gpus_per_node": 1,
            "batch_per_rank": np.array(batches) // nodes,
            "global_batch": batches,
            "step_time_s": time / 100,
            "epoch_time_s": time / 10,
            "train_time_s": time,
            "train_time_low_s": time * 0.95,
            "train_time_high_s": time * 1.05,
            "cost": time * nodes,
            "memory_gib": 1.0,
            "feasible": True,
            "why_infeasible": "",
            "extrapolated": False,
        }
    )


DOUBLINGS = [2**power for power in range(8, 15)]
SMOOTH = curve(DOUBLINGS, [1e6 / batch + 1000 for batch in DOUBLINGS])


def choice(table: pd.DataFrame, objective: str) -> Candidate:
    return select(table, objective).candidate


# --- the table --------------------------------------------------------------------------------------------------------


def test_table_has_one_row_per_candidate() -> None:
    """Every candidate has its prediction, interval, time, cost and memory, sorted by nodes, then batch."""
    table = make_table()
    assert [Candidate(n, b, g) for n, g, b in table[KEYS].itertuples(index=False)] == GRID
    row = table.loc[(table["num_nodes"] == 4) & (table["batch_per_rank"] == 64)].iloc[0]
    steps = -(-1_281_167 // 256)
    assert row["step_time_s"] == pytest.approx(0.234)
    assert row["epoch_time_s"] == pytest.approx(0.234 * steps)
    assert row["train_time_s"] == pytest.approx(90 * 0.234 * steps)
    assert row["cost"] == pytest.approx(row["train_time_s"] / 3600 * 4 * 2.48)
    assert row["memory_gib"] == pytest.approx(5.2)
    assert row["train_time_low_s"] < row["train_time_s"] < row["train_time_high_s"]
    assert table["feasible"].all()
    assert not table["extrapolated"].any()


def test_measurements_stand_beside_predictions() -> None:
    """Measured time (median) and memory (largest) appear in their own columns, NaN where nothing was measured."""
    twice = pd.concat([measurements(), measurements().assign(step_time_s=1.0, memory_gib=30.0)])
    table = make_table(measured=twice)
    first = table.iloc[0]
    assert first["measured_step_time_s"] == pytest.approx((0.128 + 1.0) / 2)
    assert first["measured_memory_gib"] == 30.0
    assert table["measured_step_time_s"].notna().sum() == 4


def test_nothing_measured_yet() -> None:
    """No measurements, or unknown memory as JSON's null, are no error."""
    assert make_table(measured=pd.DataFrame())["measured_step_time_s"].isna().all()
    records = [{**record, "memory_gib": None} for record in measurements().to_dict("records")]
    assert make_table(measured=pd.DataFrame(records))["measured_memory_gib"].isna().all()


def test_memory_limits_candidates() -> None:
    """A batch whose upper end exceeds the share of the limit is infeasible, and the row says by how much."""
    table = make_table(limit_gib=8.0)
    assert set(table.loc[~table["feasible"], "batch_per_rank"]) == {128, 256}
    assert "predicted (upper end)" in table.loc[table["batch_per_rank"] == 128, "why_infeasible"].iloc[0]
    assert "measured" in table.loc[table["batch_per_rank"] == 256, "why_infeasible"].iloc[0]


def test_the_table_agrees_with_the_largest_batch() -> None:
    """On GPUs, too, the feasible batches are those up to the fit's bound, and the others tell what may be used."""
    data, grid = measurements(), [Candidate(2, batch) for batch in range(1, 200)]
    fit, nothing = fit_memory(data, on_gpus=True), data.iloc[:0]
    table = make_table(limit_gib=8.0, memory_fit=fit, grid=grid, measured=nothing)
    largest = table.loc[table["feasible"], "batch_per_rank"].max()
    assert largest == table["feasible"].sum() == fit.max_batch_per_rank(8.0, 0.9)
    assert largest > fit_memory(data).max_batch_per_rank(8.0, 0.9)
    told = table["why_infeasible"].iloc[-1]
    assert told.endswith("exceed 7.4 of 8 GiB (2 GiB that any batch needs, and 90% of the rest)")


def test_out_of_memory_closes_larger_batches() -> None:
    """A candidate that did not fit makes larger batches of its cluster infeasible, and only of that cluster."""
    table = make_table(infeasible=frozenset({Candidate(4, 64)}))
    closed = table.loc[~table["feasible"]]
    assert set(closed[["num_nodes", "batch_per_rank"]].itertuples(index=False, name=None)) == {
        (4, 64),
        (4, 128),
        (4, 256),
    }
    assert set(closed["why_infeasible"]) == {
        "did not fit when profiled",
        "a smaller batch did not fit on the same cluster",
    }


def test_far_extrapolation_of_memory_is_infeasible() -> None:
    """A batch beyond twice the largest measured one is infeasible however much memory there is."""
    table = make_table(grid=[*GRID, Candidate(2, 512), Candidate(2, 1024)])
    reasons = table.set_index("batch_per_rank")["why_infeasible"]
    assert reasons[512] == ""
    assert "more than 2 times" in reasons[1024]


def test_batch_larger_than_the_data_is_infeasible() -> None:
    """A global batch larger than the training set is infeasible."""
    table = make_table(train_samples=1000)
    assert (table["feasible"] == (table["global_batch"] <= 1000)).all()


def test_unknown_memory_bounds_nothing() -> None:
    """Without a memory fit only what failed is infeasible, and the memory-based cost is unknown."""
    table = make_table(memory_fit=None, measured=measurements()[[*KEYS, "step_time_s"]], price=MemoryPrice(0.15))
    assert table["feasible"].all()
    assert table["cost"].isna().all()
    assert select(table, "time").predicted["cost"] is None
    with pytest.raises(NoFeasibleConfiguration, match="needs measured memory"):
        select(table, "cost")


def test_unusable_fit_is_refused() -> None:
    """A step-time fit that predicts nothing is refused with its advice."""
    fit = dataclasses.replace(fit_step_time(measurements()), outcome=StepTimeOutcome.NOT_CONVERGED)
    with pytest.raises(UnusableFit, match=r"NOT_CONVERGED.*Profile more"):
        make_table(step_time_fit=fit)


# --- time and cost ----------------------------------------------------------------------------------------------------


def test_least_time_and_cost() -> None:
    """Without ties the least training time and the least cost are chosen."""
    table = make_table()
    for objective, column in (("time", "train_time_s"), ("cost", "cost")):
        selection = select(table, objective, tie_tolerance=0.0)
        assert selection.rule is Rule.MINIMUM
        assert selection.predicted[column] == pytest.approx(table[column].min())


def test_fixed_price_picks_the_smallest_cluster() -> None:
    """Under a fixed price per node the smallest cluster is cheapest, and the reason says that this is usual."""
    selection = select(make_table(), "cost")
    assert selection.num_nodes == 2
    assert "the smallest cluster is the cheapest" in selection.reason


def test_memory_price_moves_the_cheapest_batch() -> None:
    """A price for memory makes large batches dearer than a price for nodes does."""
    by_node = select(make_table(), "cost", tie_tolerance=0.0)
    by_memory = select(make_table(price=MemoryPrice(0.15)), "cost", tie_tolerance=0.0)
    assert by_memory.global_batch < by_node.global_batch


def test_measured_memory_is_what_is_paid_for() -> None:
    """Where memory was measured the cost follows it, whatever the line says there."""
    table = make_table(price=MemoryPrice(0.15), measured=measurements().assign(memory_gib=30.0))
    paid_gib = table["cost"] / (table["train_time_s"] / 3600 * table["num_nodes"] * 0.15)
    expected_gib = table["measured_memory_gib"].fillna(table["memory_gib"])
    assert (expected_gib == 30.0).sum() == 4
    assert paid_gib.to_numpy() == pytest.approx(expected_gib.to_numpy())


def test_the_least_is_in_its_own_tie() -> None:
    """Even a least below 0 is within any tolerance of itself, so there is always a choice."""
    assert select(curve([64, 128], [100.0, 90.0]).assign(cost=[-2.0, -1.0]), "cost").global_batch == 64


def test_ties_go_to_the_smaller_batch() -> None:
    """A smaller batch within the tolerance of the least time is preferred, one outside is not."""
    table = curve([64, 128, 256], [130.0, 101.0, 100.0])
    selection = select(table, "time", tie_tolerance=0.02)
    assert selection.global_batch == 128
    assert selection.rule is Rule.SMALLEST_BATCH_IN_TIE
    assert "1.0% above the least" in selection.reason
    assert select(table, "time", tie_tolerance=0.0).global_batch == 256


def test_interval_widens_a_tie_up_to_twice_the_tolerance() -> None:
    """An interval down to the least makes 3 % a tie at a tolerance of 2 %, but never 5 %; a narrow one does not."""
    table = curve([64, 128, 256], [105.0, 103.0, 100.0])
    assert select(table, "time", tie_tolerance=0.02).global_batch == 128
    narrow = table.assign(train_time_low_s=table["train_time_s"] * 0.99)
    assert select(narrow, "time", tie_tolerance=0.02).global_batch == 256


@pytest.mark.parametrize("objective", ["time", "cost", "knee"])
def test_row_order_does_not_matter(objective: str) -> None:
    """Shuffled rows give the same choice."""
    table = make_table()
    for seed in range(5):
        assert choice(table.sample(frac=1, random_state=seed), objective) == choice(table, objective)


@pytest.mark.parametrize("objective", ["time", "cost", "knee"])
@pytest.mark.parametrize("factor", [1e-3, 1 / 3600, 1e3])
def test_units_of_time_do_not_matter(objective: str, factor: float) -> None:
    """Times in milliseconds or hours give the same choice."""
    table = make_table()
    scaled = table.copy()
    times = [name for name in table.columns if "time" in name] + ["cost"]
    scaled[times] = factor * table[times]
    assert choice(scaled, objective) == choice(table, objective)


def test_nothing_feasible_has_advice() -> None:
    """Without a feasible row the reasons are counted and a way out is named."""
    with pytest.raises(NoFeasibleConfiguration, match=r"none of the 24 candidates(.|\n)*Add smaller batches"):
        select(make_table(limit_gib=1.0), "time")
    with pytest.raises(NoFeasibleConfiguration, match="grid has no candidate"):
        select(make_table(grid=[]), "time")


def test_record_is_complete() -> None:
    """The record names the choice, its numbers and what other objectives would do, and survives JSON with a version."""
    selection = select(make_table(), "knee")
    values = json.loads(json.dumps({"version": 1, **selection.to_dict()}, allow_nan=False))
    assert Selection.from_dict(values) == selection
    assert values["global_batch"] == values["num_nodes"] * values["gpus_per_node"] * values["batch_per_rank"]
    assert set(values["predicted"]) == {"step_time_s", "epoch_time_s", "train_time_s", "cost", "memory_gib"}
    low, high = values["interval"]["train_time_s"]
    assert low < values["predicted"]["train_time_s"] < high
    assert [other["why"] for other in values["alternatives"]] == [
        "objective time",
        "objective cost",
        "next smaller batch on the curve",
    ]
    assert f"{selection.num_nodes} nodes" in values["reason"]


def test_extrapolation_is_said() -> None:
    """A choice outside the profiled range says that it wants to be verified."""
    table = make_table(grid=[*GRID, Candidate(32, 256)])
    assert "outside the profiled range" in select(table, "time", tie_tolerance=0.0).reason


# --- the knee ---------------------------------------------------------------------------------------------------------


def test_kneedle_decides_where_it_agrees() -> None:
    """On p/B + q over few doublings Kneedle is where larger batches stop to pay, and decides."""
    batches = [256, 362, 512, 724, 1024, 1448, 2048]
    selection = select(curve(batches, [1e5 / batch + 1000 for batch in batches]), "knee")
    assert selection.rule is Rule.KNEEDLE
    assert selection.knee["linear_axis"] == pytest.approx(256 * np.sqrt(8), rel=0.05)
    assert selection.global_batch == 724
    assert "Kneedle" in selection.reason


def test_kneedles_knees_depend_on_the_range_only() -> None:
    """On p/B + q they are at B_min ln(r) on log2 B and B_min sqrt(r) on B, r = B_max / B_min; both are on record."""
    for overhead in (1000, 100):
        knee = select(curve(DOUBLINGS, [1e6 / batch + overhead for batch in DOUBLINGS]), "knee").knee
        assert knee["log2_axis"] == pytest.approx(256 * np.log(64), rel=0.05)
        assert knee["linear_axis"] == pytest.approx(256 * np.sqrt(64), rel=0.05)
        assert (knee["min_global_batch"], knee["max_global_batch"]) == (256, 16384)


def test_the_knee_is_where_a_doubling_saves_too_little() -> None:
    """Where Kneedle is too early, the knee is the last batch whose doubling does not save a tenth of the time."""
    selection = select(SMOOTH, "knee")
    assert selection.rule is Rule.GAIN_PER_DOUBLING
    times = SMOOTH.set_index("global_batch")["train_time_s"]
    savings = {batch: 1 - times[2 * batch] / times[batch] for batch in DOUBLINGS[:-1]}
    assert selection.global_batch == min(batch for batch, saving in savings.items() if saving < 0.1)


def test_a_wider_range_does_not_move_the_knee() -> None:
    """More small batches, or more that do not pay, leave the knee where it is."""
    wide = [2**power for power in range(5, 18)]
    knee = select(curve(wide, [1e6 / batch + 1000 for batch in wide]), "knee")
    assert knee.global_batch == select(SMOOTH, "knee").global_batch


def test_noise_moves_the_knee_by_little() -> None:
    """With 5 % noise on every time, the time at the knee stays within a fifth, which is a doubling here."""
    times, rng = SMOOTH.set_index("global_batch")["train_time_s"], np.random.default_rng(3)
    true = times[select(SMOOTH, "knee").global_batch]
    for _ in range(40):
        noisy = curve(DOUBLINGS, list(times * np.exp(0.05 * rng.standard_normal(len(times)))))
        assert times[select(noisy, "knee").global_batch] == pytest.approx(true, rel=0.2)


def test_knee_is_on_the_envelope() -> None:
    """The knee is a candidate that no smaller or equal batch beats in time."""
    table = make_table()
    selection = select(table, "knee")
    smaller = table.loc[table["global_batch"] <= selection.global_batch]
    assert selection.predicted["train_time_s"] == pytest.approx(smaller["train_time_s"].min())


@pytest.mark.parametrize(
    ("batches", "times", "chosen", "why"),
    [
        # straight on log2 B, straight on B, flat, and too few points
        (DOUBLINGS, [800 - 100 * k for k in range(7)], 16384, "depends on that range"),
        (DOUBLINGS, [20000 - batch for batch in DOUBLINGS], 16384, "no knee"),
        (DOUBLINGS, [500.0] * 7, 256, "no knee"),
        ([128, 256, 512, 1024], [1000, 400, 210, 200], 512, "too few"),
        ([128], [1000], 128, "too few"),
    ],
)
def test_curves_without_a_knee(batches: list[int], times: list[float], chosen: int, why: str) -> None:
    """Where Kneedle cannot tell, the gain of a doubling decides, and the reason says why."""
    selection = select(curve(batches, times), "knee")
    assert selection.rule is Rule.GAIN_PER_DOUBLING
    assert selection.global_batch == chosen
    assert why in selection.reason


def test_rising_end_of_the_curve_is_not_chosen() -> None:
    """Where larger batches get slower again, they never are the knee."""
    times = [*SMOOTH["train_time_s"].iloc[:4], 2000.0, 3000.0, 4000.0]
    assert select(curve(DOUBLINGS, times), "knee").global_batch <= DOUBLINGS[3]


def test_infeasible_rows_do_not_move_the_knee() -> None:
    """Infeasible batches beyond the feasible ones, however fast, neither are chosen nor stretch the axis."""
    beyond = curve([2**15, 2**16, 2**20], [900.0, 500.0, 1.0]).assign(feasible=False, why_infeasible="too large")
    with_them, without = select(pd.concat([SMOOTH, beyond]), "knee"), select(SMOOTH, "knee")
    assert with_them == without
    for objective in ("time", "cost"):
        assert select(pd.concat([SMOOTH, beyond]), objective).global_batch <= 16384


# --- waiting in the queue ---------------------------------------------------------------------------------------------

HOUR_S = 3600.0


def waiting(*seconds: float | None) -> pd.DataFrame:
    """Three numbers of nodes that train in 10, 6 and 4 hours and wait that long."""
    tables = [curve([64 * n], [hours * HOUR_S], nodes=n) for n, hours in ((1, 10), (2, 6), (4, 4))]
    table = pd.concat(tables, ignore_index=True)
    table["queue_wait_s"] = np.array(seconds, dtype=float)
    table["queue_wait_source"] = "estimated by Slurm"
    table["time_to_result_s"] = table["train_time_s"] + table["queue_wait_s"].fillna(0.0)
    return table


@pytest.mark.parametrize(
    ("waits_h", "nodes"), [((0, 0, 0), 4), ((0, 1, 4), 2), ((0, 12, 24), 1), ((None, None, None), 4)]
)
def test_a_long_wait_makes_a_smaller_cluster_the_sooner_one(waits_h: tuple[float | None, ...], nodes: int) -> None:
    """The least sum of wait and training is chosen; a wait that nobody knows counts as none."""
    table = waiting(*[None if wait is None else wait * HOUR_S for wait in waits_h])
    assert select(table, "time_to_result").num_nodes == nodes


def test_the_reason_says_how_much_of_the_time_is_waiting() -> None:
    """The wait, its source and the sum stand in the reason, and where nobody knows, that."""
    reason = select(waiting(0, HOUR_S, None), "time_to_result", tie_tolerance=0.0).reason
    assert "How long a job of 4 nodes would wait is not known and counts as 0." in reason
    reason = select(waiting(0, HOUR_S, 5 * HOUR_S), "time_to_result").reason
    assert "Its time to the result of 7 h has 1 h of waiting in the queue in it (estimated by Slurm)." in reason


def test_other_objectives_pass_over_the_wait() -> None:
    """With the same waits the fastest training stays the fastest."""
    assert select(waiting(0, HOUR_S, 50 * HOUR_S), "time").num_nodes == 4


def test_the_table_has_the_wait_of_each_number_of_nodes() -> None:
    """Waits are added to the training time by number of nodes, and one that is missing stays unknown."""
    table = make_table(waits={2: Wait(60.0, "given"), 4: Wait(120.0, "given")})
    by_nodes = table.groupby("num_nodes")["queue_wait_s"].first()
    assert by_nodes[[2, 4]].tolist() == [60.0, 120.0]
    assert by_nodes[[8, 16]].isna().all()
    added = (table["time_to_result_s"] - table["train_time_s"]).groupby(table["num_nodes"]).first()
    assert added.tolist() == pytest.approx([60.0, 120.0, 0.0, 0.0])


def test_given_waits_are_interpolated_between_and_held_outside() -> None:
    """Half-way between two given numbers of nodes is half-way between their waits; beyond them the nearest counts."""
    waits = given_waits({2: 10, 6: 30}, [1, 2, 4, 6, 8])
    assert [wait.seconds for wait in waits.values()] == [600.0, 600.0, 1200.0, 1800.0, 1800.0]
    assert waits[4].source == "from the given ones in objective.queue_wait_min"


# --- limits -----------------------------------------------------------------------------------------------------------


def clusters() -> pd.DataFrame:
    """1, 2 and 4 nodes that train in 10, 6 and 4 hours (5 % more at the upper end) and cost 10, 12 and 16."""
    tables = [curve([64 * n], [hours * HOUR_S], nodes=n) for n, hours in ((1, 10), (2, 6), (4, 4))]
    table = pd.concat(tables, ignore_index=True)
    return table.assign(cost=table["cost"] / HOUR_S)


def reasons(limits: Limits, table: pd.DataFrame) -> list[str]:
    return list(limits.keep(table, "$")["why_infeasible"])


def test_a_deadline_is_compared_with_the_upper_end() -> None:
    """Six hours that may become 6.3 do not keep a deadline of 6.2, and the reason says which end it means."""
    slow = "10.5 h (upper end) exceed objective.deadline_h=6.2"
    assert reasons(Limits(deadline_h=6.2), clusters()) == [
        slow,
        "6.3 h (upper end) exceed objective.deadline_h=6.2",
        "",
    ]
    assert reasons(Limits(deadline_h=6.3), clusters())[1:] == ["", ""]


def test_without_an_interval_the_prediction_is_compared() -> None:
    """A row whose interval is not known is held to what is predicted, and the reason says so."""
    unsure = clusters().assign(train_time_high_s=np.nan)
    words = "6 h (predicted, without an interval) exceed objective.deadline_h=5"
    assert reasons(Limits(deadline_h=5), unsure)[1] == words
    assert reasons(Limits(deadline_h=6), unsure)[1] == ""


def test_a_deadline_counts_the_known_wait() -> None:
    """An hour in the queue is part of the deadline, a wait that nobody knows is not."""
    table = clusters().assign(queue_wait_s=[0.0, HOUR_S, np.nan])
    kept = reasons(Limits(deadline_h=7), table)
    assert kept[1:] == ["7.3 h (upper end, 1 h of it in the queue) exceed objective.deadline_h=7", ""]


def test_a_budget_is_compared_with_the_upper_end() -> None:
    """16 that may become 16.8 do not keep a budget of 16.5."""
    assert reasons(Limits(budget=16.5), clusters())[1:] == ["", "$16.8 (upper end) exceed objective.budget=16.5"]


def test_an_unknown_cost_keeps_no_budget() -> None:
    """What may cost anything cannot be promised to cost little, and where all are unknown the way out is another."""
    table = clusters().assign(cost=[10.0, np.nan, 16.0])
    assert reasons(Limits(budget=100), table)[1] == "its cost is not known, so objective.budget=100 cannot be promised"
    with pytest.raises(NoFeasibleConfiguration, match=r"Drop objective\.budget, or use a price per node-hour"):
        Limits(budget=100).keep(clusters().assign(cost=np.nan))


def test_all_broken_limits_are_named() -> None:
    """A row that breaks two limits has both in its reason."""
    both = "$16.8 (upper end) exceed objective.budget=11; 4 nodes exceed objective.max_nodes=2"
    assert reasons(Limits(budget=11, max_nodes=2), clusters())[2] == both


@pytest.mark.parametrize(
    ("objective", "limits", "nodes"),
    [
        ("time", Limits(budget=13), 2),
        ("time", Limits(max_nodes=1), 1),
        ("cost", Limits(deadline_h=8), 2),
        ("cost", Limits(deadline_h=8, budget=11), None),
        ("knee", Limits(max_nodes=2), 2),
        ("time_to_result", Limits(max_nodes=2), 2),
    ],
)
def test_every_objective_keeps_limits(objective: str, limits: Limits, nodes: int | None) -> None:
    """The best of what is left is chosen; two limits that exclude each other leave nothing."""
    table = clusters().assign(queue_wait_s=np.nan, queue_wait_source="")
    table["time_to_result_s"] = table["train_time_s"]
    if nodes is None:
        with pytest.raises(NoFeasibleConfiguration):
            limits.keep(table)
    else:
        assert select(limits.keep(table), objective).num_nodes == nodes


def test_no_limit_changes_nothing() -> None:
    """Without limits the table is what it was."""
    pd.testing.assert_frame_equal(Limits().keep(clusters()), clusters())


def test_limits_do_not_stretch_the_knees_axis() -> None:
    """Faster clusters beyond the node limit leave the knee where it is without them."""
    beyond = curve([2**15, 2**16, 2**20], [900.0, 500.0, 1.0], nodes=8)
    limited = Limits(max_nodes=4).keep(pd.concat([SMOOTH, beyond], ignore_index=True))
    assert select(limited, "knee") == select(SMOOTH, "knee")


def test_nothing_left_names_the_limit_the_closest_and_the_way_out() -> None:
    """The limit that excludes most comes first, then what misses least and by how much, then limits that let it in."""
    with pytest.raises(NoFeasibleConfiguration) as caught:
        Limits(deadline_h=4, budget=11).keep(clusters(), "$")
    message = str(caught.value)
    assert message.startswith(
        "no feasible configuration: of 3 that would run, objective.deadline_h excludes 3, objective.budget excludes 2. "
        "The closest is 4 nodes x 1 rank with 64 samples each: 4.2 h (upper end) exceed objective.deadline_h=4, "
        "5.0% too much and $16.8 (upper end) exceed objective.budget=11, 52.7% too much. "
        "It would do with objective.deadline_h=4.2 objective.budget=16.8;"
    )


@pytest.mark.parametrize("deadline_h", [0.001, 1.0, 3.1])
def test_the_way_out_is_one(deadline_h: float) -> None:
    """With the limits that the message tells there is one choice."""
    table = make_table()
    with pytest.raises(NoFeasibleConfiguration) as caught:
        Limits(deadline_h=deadline_h, max_nodes=8).keep(table)
    told = {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)(?=[ ;])", str(caught.value))}
    assert Limits(**{"max_nodes": 8, **told}).keep(table)["feasible"].sum() == 1  # type: ignore[arg-type]


def test_infeasible_rows_keep_their_reason() -> None:
    """What did not fit in memory is not said to break a deadline."""
    table = make_table(limit_gib=8.0)
    limited = Limits(max_nodes=4).keep(table)
    was_infeasible = ~table["feasible"]
    assert (limited["why_infeasible"] == table["why_infeasible"])[was_infeasible].all()


def test_least_cost_names_the_deadline_that_changes_it() -> None:
    """At the deadline that the reason names the choice is the larger cluster it names, and just above it is not."""
    table = make_table()
    cheapest = select(table, "cost")
    told = re.search(r"below ([\d.]+) h would change.*deadline_h=([\d.]+),.*takes (\d+) nodes", cheapest.reason)
    assert told is not None
    assert select(Limits(deadline_h=float(told[2])).keep(table), "cost").num_nodes == int(told[3]) > cheapest.num_nodes
    assert select(Limits(deadline_h=float(told[1]) * 1.001).keep(table), "cost").num_nodes == cheapest.num_nodes


def test_no_deadline_is_offered_where_none_would_help() -> None:
    """Where more nodes are slower, the reason says that no deadline would change the choice."""
    table = clusters().assign(train_time_s=[4.0, 6.0, 10.0], train_time_high_s=[5.0, 7.0, 11.0], cost=[4.0, 12.0, 40.0])
    assert "no deadline would change that" in select(table, "cost").reason


def test_a_larger_cluster_that_is_cheapest_is_not_called_the_smallest() -> None:
    """Where more nodes pay back, nothing is said of the smallest cluster."""
    assert "smallest cluster" not in select(clusters().assign(cost=[16.0, 12.0, 10.0]), "cost").reason


# --- ties and interruptions -------------------------------------------------------------------------------------------


def test_a_tie_is_explained() -> None:
    """The reason of a choice in a tie has the rule with its two shares."""
    reason = select(curve([64, 128, 256], [105.0, 103.0, 100.0]), "time").reason
    assert "those within 2.0% of the least, and within 4.0% if their interval reaches down to it" in reason


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_a_hopeless_interval_does_not_tie_everything(objective: str) -> None:
    """Intervals from nothing to a hundred times do not bring candidates beyond the bound into a tie."""
    table = curve([64, 128, 256], [200.0, 110.0, 100.0])
    table = table.assign(train_time_low_s=0.0, train_time_high_s=100 * table["train_time_s"])
    assert select(table, objective).global_batch == 256


def test_spot_prices_lengthen_the_training() -> None:
    """The table's training times have the interruptions in them, more of them on more nodes, and the reason says so."""
    plain, spot = make_table(), make_table(price=SpotPrice(2.48, 0.05, 10, 5))
    longer = spot["train_time_s"] / plain["train_time_s"]
    assert longer.groupby(spot["num_nodes"]).first().is_monotonic_increasing
    assert (longer > 1).all()
    assert spot["interruptions_s"].to_numpy() == pytest.approx(
        (spot["train_time_s"] - plain["train_time_s"]).to_numpy()
    )
    assert (spot["cost"] / plain["cost"]).to_numpy() == pytest.approx(longer.to_numpy())
    assert "Expected interruptions take" in select(spot, "time").reason
    assert "interruptions" not in select(plain, "time").reason


def test_a_cluster_that_is_always_interrupted_is_infeasible() -> None:
    """Where no checkpoint is ever reached, the row says so instead of having an infinite time."""
    table = make_table(grid=[Candidate(2, 8), Candidate(10**5, 8)], price=SpotPrice(1.0, 0.1, 10, 5))
    assert list(table["feasible"]) == [True, False]
    assert "interrupted so often that it would take more than 100 times as long" in table["why_infeasible"][1]


def test_what_interruptions_leave_nothing_of_is_told_with_its_own_way_out() -> None:
    """A training that would take thousands of times as long is none, and memory has nothing to do with it."""
    table = make_table(grid=[Candidate(2, 8)], price=SpotPrice(1.0, 60.0, 10, 5))
    with pytest.raises(NoFeasibleConfiguration, match=r"pricing\.checkpoint_interval_min") as caught:
        select(table, "time")
    assert "memory" not in str(caught.value)
