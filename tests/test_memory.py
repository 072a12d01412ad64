"""The memory model recovers Eq. (3), bounds the batch from its upper end, and never trusts an untried size far out."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from tula_hpc.models.memory import MemoryFit, MemoryOutcome, fit_memory, usable_gib, usable_in_words


def peaks(batches: list[int], noise_gib: float = 0.0, slope: float = 0.05, repeats: int = 1) -> pd.DataFrame:
    """Peaks of 2 GiB and 0.05 GiB per sample."""
    batch = np.repeat(batches, repeats)
    noise = noise_gib * np.random.default_rng(5).standard_normal(len(batch))
    return pd.DataFrame({"batch_per_rank": batch, "memory_gib": 2 + slope * batch + noise})


def test_line_is_recovered() -> None:
    """Exact peaks give back the constant and the slope."""
    fit = fit_memory(peaks([8, 32, 128]))
    assert fit.outcome is MemoryOutcome.OK
    assert (fit.total.intercept_gib, fit.total.slope_gib) == pytest.approx((2.0, 0.05))
    assert fit.predict([16, 64]) == pytest.approx([2.8, 5.2])


def test_parts_follow_equation_3() -> None:
    """Static parts stay constant, activations and the batch grow, and what is left to the total is `other_gib`."""
    batch = np.array([8, 32, 128])
    table = peaks([8, 32, 128]).assign(
        param_gib=0.4, grad_gib=0.4, optimizer_gib=0.8, activation_gib=0.04 * batch, batch_gib=0.005 * batch
    )
    parts = fit_memory(table).parts(64)
    assert parts == pytest.approx(
        {
            "param_gib": 0.4,
            "grad_gib": 0.4,
            "optimizer_gib": 0.8,
            "activation_gib": 2.56,
            "batch_gib": 0.32,
            "other_gib": 5.2 - 4.48,
        }
    )


def kinds(*nodes: int, noise_gib: float = 0.0) -> pd.DataFrame:
    """Peaks of ranks on as many nodes, one each; those among several have 0.9 GiB more."""
    rows = [peaks([8, 32, 128], noise_gib).assign(num_nodes=n, gpus_per_node=1) for n in nodes]
    table = pd.concat(rows, ignore_index=True)
    return table.assign(memory_gib=table["memory_gib"] + 0.9 * (table["num_nodes"] > 1))


def test_a_rank_alone_needs_less() -> None:
    """What ranks among several have besides is told apart: it neither bends the line nor widens its interval."""
    fit = fit_memory(kinds(1, 2, 4))
    assert (fit.total.intercept_gib, fit.total.slope_gib, fit.alone_less_gib) == pytest.approx((2.9, 0.05, 0.9))
    assert fit.predict([64, 64], [True, False]) == pytest.approx([5.2, 6.1])
    assert fit.residual_gib == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("nodes", [(1,), (4,)])
def test_one_kind_of_ranks_tells_no_difference(nodes: tuple[int, ...]) -> None:
    """Where only ranks alone, or only ranks among several, were measured, one line holds for all, and a batch that ran
    out of memory pulls it up."""
    fit = fit_memory(kinds(*nodes))
    ran_out = fit_memory(kinds(*nodes).assign(limit_gib=12.0), oom_batches=[160])
    for one in (fit, ran_out):
        assert one.alone_less_gib == 0.0
        assert one.predict(64, True) == one.predict(64, False)
    assert float(ran_out.predict(160)) > float(fit.predict(160))


def test_a_rank_alone_never_counts_as_needing_more() -> None:
    """Noise that would make ranks alone need more is no difference."""
    table = kinds(1, 4)
    more = np.where(table["num_nodes"] == 1, 1.0, 0.0)
    assert fit_memory(table.assign(memory_gib=table["memory_gib"] + more)).alone_less_gib == 0.0


def test_parts_without_parts() -> None:
    """Without measured parts everything is `other_gib`."""
    assert fit_memory(peaks([8, 128])).parts(64) == pytest.approx({"other_gib": 5.2})


def test_interval_holds_new_peaks() -> None:
    """With noisy repeats, the 90 % interval holds about that share of new peaks and widens outside the measurements."""
    fit = fit_memory(peaks([8, 32, 128], noise_gib=0.2, repeats=4))
    batch = np.tile([8, 32, 128, 200], 250)
    fresh = 2 + 0.05 * batch + 0.2 * np.random.default_rng(6).standard_normal(len(batch))
    low, high = fit.interval(batch)
    assert ((fresh >= low) & (fresh <= high)).mean() > 0.85
    assert (high - low)[3] > (high - low)[1]


def test_a_line_below_zero_predicts_no_less_than_was_measured() -> None:
    """Memory that bends upwards makes a line that is negative at small batches; no prediction is below the least peak,
    or, at batches below all measured ones, its share."""
    bent = pd.DataFrame({"batch_per_rank": [16, 32, 64, 128, 256, 512], "memory_gib": [1.0, 1.02, 1.1, 1.5, 5.0, 15.0]})
    fit = fit_memory(bent)
    assert fit.total.at(16) < 0
    assert fit.predict([8, 16, 32]) == pytest.approx([0.5, 1.0, 1.0])


def test_upper_end_bounds_the_batch() -> None:
    """The bound comes from the upper end, so noise makes it smaller, and a smaller fraction does too."""
    exact = fit_memory(peaks([8, 32, 128], repeats=4))
    noisy = fit_memory(peaks([8, 32, 128], noise_gib=0.3, repeats=4))
    assert exact.max_batch_per_rank(10.0) == 138  # 1.01 (2 + 0.05 b) <= 9
    assert noisy.max_batch_per_rank(10.0) < 138
    assert exact.max_batch_per_rank(10.0, fraction=0.7) < 138
    assert float(noisy.interval(noisy.max_batch_per_rank(10.0))[1]) <= 9.0


def test_constant_memory_on_gpus_is_used_whole() -> None:
    """On GPUs the share is of what the constant leaves, so that it costs a large model no more samples than a small."""
    table = peaks([8, 32, 128], repeats=4)
    cpus, gpus = fit_memory(table), fit_memory(table, on_gpus=True)
    assert (cpus.constant_gib(), gpus.constant_gib()) == pytest.approx((0.0, 2.0))
    assert cpus.max_batch_per_rank(4.0, 0.9) == 31  # 1.01 (2 + 0.05 b) <= 3.6
    assert gpus.max_batch_per_rank(4.0, 0.9) == 35  # 1.01 (2 + 0.05 b) <= 2 + 0.9 x 2
    assert gpus.max_batch_per_rank(4.0, 1.0) == cpus.max_batch_per_rank(4.0, 1.0)


def test_constant_memory_of_a_rank_alone_is_less() -> None:
    """What a collective library keeps is constant too, and only ranks among several have it."""
    table = kinds(1, 4)
    fit = fit_memory(table, on_gpus=True)
    assert (fit.constant_gib(), fit.constant_gib(alone=True)) == pytest.approx((2.9, 2.0))


def test_a_constant_that_the_fit_cannot_tell_keeps_its_share() -> None:
    """After one batch size, without a rise, or below 0 nothing is known to be constant."""
    negative = peaks([8, 32, 128]).assign(memory_gib=lambda t: t["memory_gib"] - 2.3)
    for table in (peaks([32, 32]), peaks([1, 2, 4], slope=0.0), negative):
        assert fit_memory(table, on_gpus=True).constant_gib() == 0.0
        assert fit_memory(table, on_gpus=True).max_batch_per_rank(5.0) == fit_memory(table).max_batch_per_rank(5.0)


def test_no_batch_fits_below_the_constant() -> None:
    """Where the constant alone reaches the limit nothing fits, no more than the limit may be used, and words say so."""
    fit = fit_memory(peaks([8, 32, 128]), on_gpus=True)
    for limit_gib in (1.5, 2.0):
        assert fit.max_batch_per_rank(limit_gib, 0.5) == 0
        assert usable_gib(limit_gib, 0.5, fit.constant_gib()) == pytest.approx(limit_gib)
    words = usable_in_words(1.5, 0.5, fit.constant_gib())
    assert words == "1.5 GiB, less than the 2 GiB that any batch needs, so none fits"


def test_two_points_keep_a_margin() -> None:
    """A line through two points has no residual; what is expected of other measurements keeps a margin that grows away
    from the two."""
    fit = fit_memory(peaks([8, 128]))
    inside, outside = (float(fit.interval(b)[1] - fit.predict(b)) for b in (68, 256))
    assert 0.02 * 5.4 < inside < outside < 0.1 * 14.8


def test_extrapolation_is_bounded() -> None:
    """However much memory there is, no batch beyond twice the largest measured one is allowed."""
    assert fit_memory(peaks([8, 32])).max_batch_per_rank(1000.0) == 64


def test_out_of_memory_bounds_the_batch() -> None:
    """A batch that ran out of memory is never reached again, whatever the line says."""
    assert fit_memory(peaks([8, 32, 128]), oom_batches=[200, 160]).max_batch_per_rank(1000.0) == 159


def test_out_of_memory_is_a_censored_point() -> None:
    """An out-of-memory batch that the line calls harmless pulls it up; one that the line expects changes nothing."""
    table = peaks([8, 32, 128]).assign(limit_gib=12.0)
    unexpected, expected = fit_memory(table, oom_batches=[160]), fit_memory(table, oom_batches=[256])
    assert float(unexpected.predict(160)) > float(fit_memory(table).predict(160)) + 0.5
    assert expected.total == fit_memory(table).total


def test_nothing_fits() -> None:
    """A limit below the smallest batch gives 0, not a default."""
    assert fit_memory(peaks([8, 32, 128])).max_batch_per_rank(1.0) == 0


@pytest.mark.parametrize("slope", [0.0, -0.001])
def test_not_rising(slope: float) -> None:
    """Memory that does not rise is a named outcome with a flat line, and only extrapolation bounds the batch."""
    fit = fit_memory(peaks([1, 2, 4, 8], slope=slope, noise_gib=0.001 if slope else 0.0))
    assert fit.outcome is MemoryOutcome.NOT_RISING
    assert fit.outcome.advice
    assert fit.total.slope_gib == 0.0
    assert fit.max_batch_per_rank(100.0) == 16


def test_one_batch_size() -> None:
    """One batch size leaves the slope open: the upper end takes everything to grow, the lower one nothing."""
    fit = fit_memory(peaks([32, 32]))
    assert fit.outcome is MemoryOutcome.ONE_BATCH_SIZE
    low, high = fit.interval([16, 64])
    assert low == pytest.approx([1.8, 3.6], rel=0.1)
    assert high == pytest.approx([3.6, 7.2], rel=0.1)


def test_one_batch_of_each_kind_is_no_flat_line() -> None:
    """Ranks alone measured at one batch and ranks among several at a larger one: memory rises between the two, and the
    upper end holds what several need at a larger batch."""
    table = kinds(1, 4)
    fit = fit_memory(table[table["batch_per_rank"] == np.where(table["num_nodes"] == 1, 32, 128)])
    assert fit.outcome is MemoryOutcome.OK
    assert fit.predict(128) == pytest.approx(2.9 + 0.05 * 128)
    assert fit.interval(256)[1] > 2.9 + 0.05 * 256


def test_one_batch_size_with_parts() -> None:
    """With measured activations one batch size is enough for a slope."""
    table = peaks([32]).assign(activation_gib=1.5, batch_gib=0.1)
    assert fit_memory(table).total.slope_gib == pytest.approx(0.05)


def test_limit_is_the_smallest_device() -> None:
    """Without a given limit, the smallest device seen while profiling is the limit; without any, it is asked for."""
    table = peaks([8, 32, 128], repeats=2)
    fit = fit_memory(table.assign(limit_gib=[16.0, 16.0, 10.0, 16.0, 16.0, 16.0]))
    assert fit.limit_gib == 10.0
    assert fit.max_batch_per_rank() == fit.max_batch_per_rank(10.0)
    with pytest.raises(ValueError, match="pass limit_gib"):
        fit_memory(table).max_batch_per_rank()


def test_unmeasured_rows_are_left_out() -> None:
    """Rows without a peak are ignored; a table without any is refused."""
    table = peaks([8, 32, 128])
    unknown = table.assign(memory_gib=np.nan)
    assert fit_memory(pd.concat([table, unknown])) == fit_memory(table)
    with pytest.raises(ValueError, match="memory_gib"):
        fit_memory(unknown)
    with pytest.raises(ValueError, match=r"lacks the columns \['memory_gib'\]"):
        fit_memory(table[["batch_per_rank"]])


def test_json_round_trip() -> None:
    """A fit survives JSON."""
    fit = fit_memory(peaks([8, 128]).assign(param_gib=0.4, limit_gib=16.0), oom_batches=[256], on_gpus=True)
    assert MemoryFit.from_dict(json.loads(json.dumps(fit.to_dict(), allow_nan=False))) == fit


def test_an_older_record_keeps_its_bound() -> None:
    """A fit on record from before constant memory was told apart gives the batch that it gave."""
    fit = fit_memory(peaks([8, 128]), on_gpus=True)
    older = MemoryFit.from_dict({name: value for name, value in fit.to_dict().items() if name != "on_gpus"})
    assert older.max_batch_per_rank(6.0) == fit_memory(peaks([8, 128])).max_batch_per_rank(6.0)
