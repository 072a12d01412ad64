"""The step-time models recover what made the data, obey the laws, and say what they cannot tell."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import optimize

from tula_hpc.errors import TulaError
from tula_hpc.models.step_forms import Collective
from tula_hpc.models.step_time import StepTimeFit, StepTimeOutcome, fit_step_time, training_time_s

NODES = [2, 4, 8, 16]
BATCHES = [8, 16, 32, 64, 128, 256]
MODELS = ["overlap", "additive"]


def grid(nodes: list[int] = NODES, batches: list[int] = BATCHES, gpus: list[int] | None = None) -> pd.DataFrame:
    rows = [(n, g, b) for n in nodes for g in gpus or [1] for b in batches]
    return pd.DataFrame(rows, columns=["num_nodes", "gpus_per_node", "batch_per_rank"])


def synchronisation(table: pd.DataFrame, c_ring: float, growth: float) -> np.ndarray:
    """A ring, and a growth with the nodes; none on one node."""
    ranks = table["num_nodes"] * table["gpus_per_node"]
    ring = 2 * (ranks - 1) / ranks
    return np.where(table["num_nodes"] > 1, c_ring * ring + growth * (table["num_nodes"] - 2), 0.0)


def overlapped(
    table: pd.DataFrame,
    before_sync: float = 0.35,
    after_backward: float = 0.08,
    c_ring: float = 0.1,
    growth: float = 0.01,
    noise: float = 0.0,
    seed: int = 1,
) -> pd.DataFrame:
    """A table with the times of known parameters: alpha = 20 ms, beta = 1 ms, t_floor = 50 ms."""
    compute = (0.05**3 + (0.02 + 0.001 * table["batch_per_rank"]) ** 3) ** (1 / 3)
    sync = synchronisation(table, c_ring, growth)
    hiding, hideable = (1 - before_sync) * compute, (1 - after_backward) * sync
    with np.errstate(divide="ignore"):
        hidden = (hiding**-6.0 + hideable**-6.0) ** (-1 / 6)
    errors = np.exp(noise * np.random.default_rng(seed).standard_normal((2, len(table))))
    return table.assign(step_time_s=(compute + sync - hidden) * errors[0], compute_time_s=compute * errors[1])


def added(table: pd.DataFrame) -> pd.DataFrame:
    sync = 0.3 * (1 - 1 / (table["num_nodes"] * table["gpus_per_node"]))
    return table.assign(step_time_s=0.02 + 0.001 * table["batch_per_rank"] + sync)


def corners(table: pd.DataFrame) -> pd.DataFrame:
    ends = table["num_nodes"].isin([min(NODES), max(NODES)]) & table["batch_per_rank"].isin(
        [min(BATCHES), max(BATCHES)]
    )
    return table.loc[ends]


def values(fit: StepTimeFit) -> dict[str, float]:
    return {name: value for name, (value, _) in fit.parameters.items()}


def test_overlap_recovers_parameters() -> None:
    """On exact data with every contrast and usual overlap, every parameter of the overlap form comes back."""
    fit = fit_step_time(overlapped(grid()))
    assert fit.outcome is StepTimeOutcome.OK
    expected = {"alpha": 0.02, "beta": 0.001, "t_floor": 0.05, "c_ring": 0.1, "lambda": 0.01}
    expected |= {"before_sync": 0.35, "after_backward": 0.08}
    assert {name: values(fit)[name] for name in expected} == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (0.6, 0.3), (0.35, 0.08), (0.2, 0.02)])
def test_overlap_predicts_under_noise(shares: tuple[float, float]) -> None:
    """With 3 % noise on the full grid, predictions are within 3 % of the truth in the median and 10 % at worst."""
    truth = overlapped(grid(), *shares)
    fit = fit_step_time(overlapped(grid(), *shares, noise=0.03))
    error = np.abs(fit.predict(truth) / truth["step_time_s"] - 1)
    assert error.median() < 0.03
    assert error.max() < 0.10


@pytest.mark.parametrize("collective", list(Collective))
def test_additive_recovers_parameters(collective: Collective) -> None:
    """A grid determines alpha, beta and the synchronisation of Eq. (2) for every collective."""
    table = grid(nodes=[1, *NODES])
    nodes = table["num_nodes"]
    sync, expected = {
        Collective.RING: (0.3 * (1 - 1 / nodes), {"s": 0.3}),
        Collective.TREE: (0.1 * np.log2(nodes), {"s": 0.1}),
        Collective.REDUCE_SCATTER_ALL_GATHER: (
            0.3 * (1 - 1 / nodes) + 0.02 * np.log2(nodes),
            {"s": 0.3, "l": 0.02},
        ),
        Collective.PARAMETER_SERVER: (0.01 * nodes * (nodes > 1), {"s": 0.01}),
    }[collective]
    times = table.assign(step_time_s=0.02 + 0.001 * table["batch_per_rank"] + sync)
    fit = fit_step_time(times, "additive", collective)
    assert fit.outcome is StepTimeOutcome.OK
    assert values(fit) == pytest.approx({"alpha": 0.02, "beta": 0.001, **expected})


def test_four_corners_predict_the_inside() -> None:
    """From four corners of an overlapped grid, the overlap form predicts the rest better than the additive."""
    truth = overlapped(grid())
    inside = truth.drop(index=corners(truth).index)
    errors = {
        model: float(
            np.median(np.abs(fit_step_time(corners(truth), model).predict(inside) / inside["step_time_s"] - 1))
        )
        for model in MODELS
    }
    assert errors["overlap"] < 0.06 < errors["additive"]


def test_exposed_synchronisation_stands_for_compute() -> None:
    """Without compute_time_s, the step less the exposed synchronisation is taken, to the same result."""
    table = overlapped(grid())
    exposed = table.assign(sync_time_s=table["step_time_s"] - table["compute_time_s"]).drop(columns="compute_time_s")
    assert fit_step_time(exposed).predict(table) == pytest.approx(fit_step_time(table).predict(table))


def test_several_gpus_per_node() -> None:
    """With one and several nodes measured at several GPUs per node, both kinds of link are recovered."""
    table = overlapped(grid(nodes=[1, 2, 8], gpus=[1, 4]), before_sync=1.0)
    within = (table["num_nodes"] == 1) * 0.02 * 2 * (table["gpus_per_node"] - 1) / table["gpus_per_node"]
    between = (table["num_nodes"] > 1) * 0.005 * (table["gpus_per_node"] - 1)
    fit = fit_step_time(table.assign(step_time_s=table["step_time_s"] + within + between))
    assert values(fit)["c_r"] == pytest.approx(0.02, rel=0.1)
    assert values(fit)["kappa"] == pytest.approx(0.005, rel=0.1)
    assert not {"c_r", "kappa"} & set(fit.unidentified)


@pytest.mark.parametrize("model", MODELS)
def test_laws(model: str) -> None:
    """A step takes longer with a larger batch and never less with more nodes, so speed-up is at most linear."""
    fit = fit_step_time(corners(overlapped(grid(), noise=0.05)), model)
    steps = grid(nodes=[1, 2, 3, 4, 8, 16, 32], batches=list(range(1, 513)))
    times = steps.assign(t=fit.predict(steps)).pivot_table(index="num_nodes", columns="batch_per_rank", values="t")
    assert (np.diff(times, axis=1) > 0).all()
    assert (np.diff(times, axis=0) >= 0).all()


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_does_not_synchronise(model: str) -> None:
    """The step of a single rank is its computation alone."""
    table = overlapped(grid(nodes=[1, *NODES]), before_sync=1.0)
    fit = fit_step_time(table if model == "overlap" else added(grid(nodes=[1, *NODES])), model)
    alone = grid(nodes=[1], batches=[64])
    expected = (0.05**3 + 0.084**3) ** (1 / 3) if model == "overlap" else 0.084
    assert fit.predict(alone) == pytest.approx([expected], rel=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_units_of_time_do_not_matter(model: str) -> None:
    """Times given in milliseconds give the same predictions, a thousand times larger."""
    table = overlapped(grid(), noise=0.05)
    slow = table.assign(step_time_s=1e3 * table["step_time_s"], compute_time_s=1e3 * table["compute_time_s"])
    assert fit_step_time(slow, model).predict(table) == pytest.approx(1e3 * fit_step_time(table, model).predict(table))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("nodes", "batches", "outcome"),
    [
        ([4], [32], StepTimeOutcome.TOO_FEW_POINTS),
        ([2, 16], [32], StepTimeOutcome.ONE_BATCH_SIZE),
        ([4], [32, 64, 128], StepTimeOutcome.ONE_CLUSTER_SIZE),
        ([1], [32, 64, 128], StepTimeOutcome.ONE_CLUSTER_SIZE),
        ([2, 16], [32, 256], StepTimeOutcome.OK),
    ],
)
def test_cannot_tell(model: str, nodes: list[int], batches: list[int], outcome: StepTimeOutcome) -> None:
    """What the measurements cannot tell is a named outcome with advice, and what was measured is still reproduced."""
    table = overlapped(grid(nodes, batches), c_ring=0.05, growth=0.0)
    table = table if model == "overlap" else added(grid(nodes, batches))
    fit = fit_step_time(table, model)
    assert fit.outcome is outcome
    assert fit.outcome.usable
    assert fit.outcome.advice
    assert fit.predict(table) == pytest.approx(table["step_time_s"], rel=0.06)


def test_two_opposite_corners_are_too_few() -> None:
    """The paper's two-point reading of partial search cannot tell computation from synchronisation."""
    assert fit_step_time(overlapped(grid()).iloc[[0, -1]]).outcome is StepTimeOutcome.TOO_FEW_POINTS


def test_assumptions_are_noted() -> None:
    """Terms without contrast in the data are fixed, and each is said in a note."""
    three = corners(overlapped(grid())).drop(columns="compute_time_s").iloc[[0, 2, 3]]
    fit = fit_step_time(three)
    assert values(fit)["before_sync"] == 0.35
    assert values(fit)["after_backward"] == 0.08
    assert values(fit)["alpha"] == 0.0
    assert fit.unidentified == ("alpha", "before_sync", "after_backward")
    assert any("before_sync was taken as usual (0.35)" in note for note in fit.notes)
    assert any("alpha = 0" in note for note in fit.notes)


def test_four_corners_can_show_that_nothing_overlaps() -> None:
    """The overlap that is usual gives way where the corners are those of a sum."""
    table = corners(overlapped(grid(), before_sync=1.0))
    assert fit_step_time(table).predict(table) == pytest.approx(table["step_time_s"], rel=0.06)


def test_advice_names_what_is_not_told_and_what_was_measured() -> None:
    """In words: parameters that the points cannot tell, and the range beyond which predictions are extrapolated."""
    advice = fit_step_time(corners(overlapped(grid(gpus=[4])))).advice
    assert "do not tell alpha, kappa, c_r" in advice
    assert "2 to 16 nodes, 4 GPUs per node and 8 to 256 samples" in advice


def test_floor_at_small_batch() -> None:
    """The step time does not go to zero with the batch, even from two batch sizes."""
    fit = fit_step_time(corners(overlapped(grid())))
    assert fit.predict(grid(nodes=[1], batches=[1])) == pytest.approx([np.hypot(0.05, 0.021)], rel=0.1)


def test_one_straggling_run_is_outvoted() -> None:
    """A run three times too slow moves no other prediction by more than 3 %."""
    table = overlapped(grid())
    factor = np.where(table.index == 9, 3.0, 1.0)
    straggling = fit_step_time(table.assign(step_time_s=table["step_time_s"] * factor))
    assert straggling.predict(table) == pytest.approx(fit_step_time(table).predict(table), rel=0.03)


@pytest.mark.parametrize("model", MODELS)
def test_accumulated_steps_synchronise_once(model: str) -> None:
    """Accumulating four batches adds three computations and no synchronisation to the step."""
    fit = fit_step_time(overlapped(grid(nodes=[1, *NODES]), before_sync=1.0), model)
    several, alone = grid(nodes=[8]), grid(nodes=[1])
    added_s = fit.predict(several.assign(accumulation=4)) - fit.predict(several)
    assert added_s == pytest.approx(3 * fit.predict(alone))


@pytest.mark.parametrize("model", MODELS)
def test_accumulated_runs_fit_like_single_ones(model: str) -> None:
    """Runs that accumulate give the same predictions as runs that do not."""
    table = added(grid(nodes=[1, *NODES]))
    compute = 0.02 + 0.001 * table["batch_per_rank"]
    accumulated = table.assign(accumulation=2, step_time_s=table["step_time_s"] + compute)
    pair = [fit_step_time(each, model).predict(table) for each in (table, accumulated)]
    assert pair[0] == pytest.approx(pair[1], rel=0.1 if model == "overlap" else 1e-6)


def test_a_record_without_newer_fields_is_read() -> None:
    """A fit.json of before parameters were told by name predicts as it did."""
    fit = fit_step_time(overlapped(grid()))
    record = fit.to_dict()
    del record["unidentified"]
    assert StepTimeFit.from_dict(record).predict(grid()) == pytest.approx(fit.predict(grid()))


def test_a_record_of_the_earlier_form_is_refused() -> None:
    """A fit.json whose overlap form had gamma is not read as if it were this one; the way out is named."""
    record = fit_step_time(overlapped(grid())).to_dict()
    del record["parameters"]["before_sync"], record["parameters"]["after_backward"]
    record["parameters"]["gamma"] = [3.0, "1"]
    with pytest.raises(TulaError, match=r"gamma\); delete its fit.json"):
        StepTimeFit.from_dict(record)


def test_the_last_gradients_are_never_hidden() -> None:
    """However long computation takes, a step on several nodes ends after_backward T_s later than on one."""
    fit = fit_step_time(overlapped(grid(nodes=[1, *NODES])))
    several, alone = grid(nodes=[8], batches=[8192]), grid(nodes=[1], batches=[8192])
    assert fit.predict(several) - fit.predict(alone) == pytest.approx([0.08 * (0.1 * 1.75 + 0.06)], rel=0.1)


@pytest.mark.parametrize(("gradient_mib", "untold"), [(17.3, 1 - 1 / 17.3), (26.5, 0.08), (0.5, 0.95), (np.nan, 0.08)])
def test_gradients_of_one_bucket_are_assumed_to_wait_for_the_last(gradient_mib: float, untold: float) -> None:
    """Until runs tell; a model of more than two buckets, or of unknown size, hides all but the usual 8 %."""
    table = overlapped(grid(batches=[64])).assign(gradient_mib=gradient_mib)
    assert values(fit_step_time(table))["after_backward"] == pytest.approx(untold)


def test_four_corners_of_few_gradients_predict_the_inside() -> None:
    """What waits for the end of the backward pass is told from computation that could hide it."""
    table = overlapped(grid(), after_backward=0.9)
    fit = fit_step_time(corners(table).assign(gradient_mib=17.3))
    assert fit.predict(table) == pytest.approx(table["step_time_s"], rel=0.08)


def test_the_gradient_of_what_is_minimised_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every start it agrees with differences, with every parameter free and with rows that do not synchronise."""
    minimise, seen = optimize.minimize, []

    def watched(function: Any, start: np.ndarray, **options: Any) -> optimize.OptimizeResult:
        steps = 1e-6 * np.diag(start)
        numeric = [(function(start + s)[0] - function(start - s)[0]) / (2 * s.sum()) for s in steps]
        seen.append(function(start)[1] == pytest.approx(np.array(numeric), rel=1e-4, abs=1e-4))
        return minimise(function, start, **options)

    monkeypatch.setattr(optimize, "minimize", watched)
    table = overlapped(grid(nodes=[1, 2, 8], gpus=[1, 4]), noise=0.1)
    fit = fit_step_time(table.assign(allreduce_s=0.1, accumulation=2))
    assert fit.unidentified == ()
    assert len(seen) > 4
    assert all(seen)


def test_an_all_reduce_tells_a_synchronisation_that_is_hidden() -> None:
    """Where every step hides what can be hidden, T_s is the measured all-reduce and not a guess."""
    table = overlapped(grid(batches=[256, 512]), c_ring=0.05, growth=0.005)
    fit = fit_step_time(table.assign(allreduce_s=synchronisation(table, c_ring=0.05, growth=0.005)))
    assert [values(fit)[name] for name in ("c_ring", "lambda")] == pytest.approx([0.05, 0.005], rel=0.05)


def test_twice_the_nodes_of_a_ring_are_foreseen() -> None:
    """From one, two and four nodes the time on eight follows where the all-reduce is a ring's, and does not grow on."""
    table = overlapped(grid(nodes=[1, 2, 4, 8]), growth=0.0, noise=0.02)
    table = table.assign(allreduce_s=synchronisation(table, c_ring=0.1, growth=0.0))
    known, unknown = table.loc[table["num_nodes"] < 8], table.loc[table["num_nodes"] == 8]
    assert fit_step_time(known).predict(unknown) == pytest.approx(unknown["step_time_s"].to_numpy(), rel=0.1)


def test_an_all_reduce_that_the_steps_deny_is_set_aside() -> None:
    """Twenty times shorter than what synchronisation costs the step, it changes no prediction by more than 1 %."""
    table = overlapped(grid())
    fit = fit_step_time(table.assign(allreduce_s=0.005))
    assert fit.predict(table) == pytest.approx(table["step_time_s"], rel=0.01)


def test_all_reduces_are_optional_row_by_row() -> None:
    """Rows without one (NaN, or 0 on a single rank) count like rows of a table without the column."""
    table = overlapped(grid(nodes=[1, *NODES]))
    fit = fit_step_time(table.assign(allreduce_s=np.where(table["num_nodes"] == 1, 0.0, np.nan)))
    assert fit == fit_step_time(table)


def test_unseen_link_between_nodes_is_not_free() -> None:
    """Measured on one node only, several nodes are predicted to synchronise slower, and it counts as extrapolation."""
    one_node = overlapped(grid(nodes=[1], gpus=[4]), before_sync=1.0)
    fit = fit_step_time(one_node.assign(step_time_s=one_node["step_time_s"] + 0.03))
    two_nodes = grid(nodes=[2], gpus=[4])
    assert (fit.predict(two_nodes) > fit.predict(one_node)).all()
    assert fit.extrapolates(two_nodes).all()


@pytest.mark.parametrize("model", MODELS)
def test_poor_fit(model: str) -> None:
    """Times that no parameters explain are a poor fit."""
    noisy = grid().assign(step_time_s=np.random.default_rng(3).uniform(0.1, 2.0, len(grid())))
    assert fit_step_time(noisy, model).outcome is StepTimeOutcome.POOR_FIT


def test_bad_times_are_dropped_and_named() -> None:
    """Rows without a positive finite time are left out, named, and do not change the fit."""
    table = overlapped(grid())
    bad = pd.concat([table, table.iloc[:3].assign(step_time_s=[np.nan, 0.0, np.inf])], ignore_index=True)
    fit = fit_step_time(bad)
    assert fit.dropped_rows == ("24", "25", "26")
    assert fit.predict(table) == pytest.approx(fit_step_time(table).predict(table))


def test_nothing_to_fit_is_refused_by_name() -> None:
    """A table without one good time, or with a broken configuration, is refused with the rows."""
    table = overlapped(grid())
    with pytest.raises(ValueError, match=r"step_time_s must be positive.*rows \['0', '1'\]"):
        fit_step_time(table.iloc[:2].assign(step_time_s=np.nan))
    with pytest.raises(ValueError, match=r"whole numbers.*rows \['0'"):
        fit_step_time(table.assign(batch_per_rank=0.5))
    with pytest.raises(ValueError, match=r"lacks the columns \['step_time_s'\]"):
        fit_step_time(grid())


@pytest.mark.parametrize("seed", range(3))
def test_interval_holds_the_truth(seed: int) -> None:
    """On noisy grids the 90 % interval holds about that share of fresh measurements, and is at most twice too wide."""
    fit = fit_step_time(overlapped(grid(), noise=0.05, seed=seed))
    fresh = pd.concat([overlapped(grid(), noise=0.05, seed=100 + draw) for draw in range(20)])
    low, high = fit.interval(fresh)
    assert ((fresh["step_time_s"] >= low) & (fresh["step_time_s"] <= high)).mean() > 0.85
    assert np.log(high / low).max() / 2 < 2 * 1.645 * 0.05


def test_interval_widens_with_level_and_outside() -> None:
    """A higher level and an extrapolated row widen the interval; few points keep the error of the public traces."""
    fit = fit_step_time(corners(overlapped(grid())))
    inside, outside = grid(nodes=[4], batches=[32]), grid(nodes=[64], batches=[32])

    def half_width(table: pd.DataFrame, level: float = 0.9) -> float:
        low, high = fit.interval(table, level)
        return float(np.log(high[0] / low[0]) / 2)

    assert half_width(inside, 0.5) < half_width(inside, 0.9) < half_width(outside, 0.9)
    assert half_width(inside) > 0.15


def test_extrapolation_is_flagged() -> None:
    """Rows outside the measured nodes, batches or GPUs per node are flagged, rows inside are not."""
    fit = fit_step_time(corners(overlapped(grid())))
    assert not fit.extrapolates(grid()).any()
    for outside in (grid(nodes=[32]), grid(nodes=[1]), grid(batches=[512]), grid(gpus=[2])):
        assert fit.extrapolates(outside).all()


def test_one_node_does_not_bracket_several() -> None:
    """Measured on 1 and 16 nodes, 4 nodes are an extrapolation: nothing is known of synchronisation below 16."""
    table = overlapped(grid(nodes=[1, 16]))
    fit = fit_step_time(table)
    assert fit.extrapolates(grid(nodes=[4])).all()
    assert not fit.extrapolates(table).any()


@pytest.mark.parametrize("model", MODELS)
def test_json_round_trip(model: str) -> None:
    """A fit survives JSON and predicts the same."""
    fit = fit_step_time(overlapped(grid(), noise=0.05), model)
    again = StepTimeFit.from_dict(json.loads(json.dumps(fit.to_dict(), allow_nan=False)))
    assert again == fit
    assert again.predict(grid()) == pytest.approx(fit.predict(grid()))


def test_training_time_counts_whole_steps() -> None:
    """Eq. (4a) with the last step of an epoch counted whole, and extra time once per epoch or once per run."""
    assert training_time_s(0.5, train_samples=1000, epochs=10, global_batch=300) == pytest.approx(10 * 4 * 0.5)
    extra = {"validation_s": 3.0, "checkpoint_s": 2.0, "startup_s": 60.0}
    assert training_time_s(0.5, 1000, 10, 300, **extra) == pytest.approx(10 * (4 * 0.5 + 5) + 60)
    assert training_time_s(np.array([0.5, 1.0]), 1000, 1, np.array([500, 1000])) == pytest.approx([1.0, 1.0])
