"""The learning-rate factor by epoch."""

import subprocess
import sys

import pytest

from tula_hpc.optim.schedules import bound_factor, learning_rate, lr_factor, scaled_lr


@pytest.mark.parametrize(
    ("epoch", "factor"),
    [
        (0, 0.1),
        (2.5, 0.55),
        (5, 1.0),
        (7.999, 1.0),
        (8, 0.1),
        (11.5, 0.1),
        (12, 0.01),
        (100, 0.01),
    ],
)
def test_warms_up_linearly_and_drops_at_unshifted_milestones(epoch, factor):
    """The factor rises from a tenth to one within the warm-up and drops exactly at each milestone, counted from 0."""
    assert lr_factor(epoch, warmup_epochs=5, milestones=[8, 12], decay=0.1) == pytest.approx(factor)


def test_no_warmup_starts_at_one():
    """Without warm-up the first epoch already has the full rate."""
    assert lr_factor(0, warmup_epochs=0, milestones=[], decay=0.1) == 1.0


def test_a_milestone_within_the_warmup_counts():
    """Warm-up and decay multiply, whichever comes first."""
    assert lr_factor(2, warmup_epochs=4, milestones=[1], decay=0.5, warmup_start=0.0) == pytest.approx(0.25)


def test_order_of_milestones_does_not_matter():
    """Milestones may be given in any order."""
    factors = [lr_factor(9, warmup_epochs=0, milestones=m, decay=0.2) for m in ([3, 9, 30], [30, 9, 3])]
    assert factors == pytest.approx([0.04, 0.04])


def test_drops_at_the_first_step_of_an_epoch():
    """With `step / steps_per_epoch` no step is early or late, whatever the number of steps per epoch."""
    for steps_per_epoch in (3, 7, 390):
        before, at = (
            lr_factor((8 * steps_per_epoch + shift) / steps_per_epoch, warmup_epochs=5, milestones=[8], decay=0.1)
            for shift in (-1, 0)
        )
        assert (before, at) == (1.0, pytest.approx(0.1))


def test_refuses_a_negative_warmup():
    """A negative warm-up is named with its value and the way out."""
    with pytest.raises(ValueError, match="warmup_epochs is -1"):
        lr_factor(0, warmup_epochs=-1, milestones=[], decay=0.1)


def test_needs_no_torch():
    """The schedule can be used where torch must not be loaded."""
    code = "import sys, tula_hpc.optim.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


PAPER = {"lr": 0.01, "global_batch": 1024, "small_batch": 128, "warmup_epochs": 5, "milestones": [50], "decay": 0.2}


@pytest.mark.parametrize(("scaling", "rate"), [("none", 0.01), ("sqrt", 0.01 * 8**0.5), ("linear", 0.08)])
def test_the_rate_follows_the_batch(scaling, rate):
    """After the warm-up the rate is the tuned one times nothing, the root of B / b, or B / b, until a milestone."""
    rates = [learning_rate(epoch, **PAPER, scaling=scaling) for epoch in (5, 49.99, 50)]
    assert rates == pytest.approx([rate, rate, 0.2 * rate])


@pytest.mark.parametrize("scaling", ["none", "sqrt", "linear"])
def test_every_warmup_starts_at_a_tenth_of_the_tuned_rate(scaling):
    """However large the batch, its first step is as careful as the small batch's, and the rise is linear."""
    start, middle, end = (learning_rate(epoch, **PAPER, scaling=scaling) for epoch in (0, 2.5, 5))
    assert start == pytest.approx(0.001)
    assert middle == pytest.approx((start + end) / 2)


def test_a_batch_smaller_than_the_tuned_one_has_a_lower_rate():
    """Scaling goes both ways, and the warm-up rises all the same."""
    options = PAPER | {"global_batch": 4}
    start, end = (learning_rate(epoch, **options, scaling="linear") for epoch in (0, 5))
    assert (start, end) == pytest.approx((0.01 / 320, 0.01 / 32))


def test_refuses_an_unknown_scaling():
    """A misspelt rule is answered with those there are."""
    with pytest.raises(ValueError, match="none, sqrt, linear"):
        scaled_lr(0.1, global_batch=2, small_batch=1, scaling="cubic")


@pytest.mark.parametrize(
    ("epoch", "factor"), [(0, 0.1), (2, 0.55 * 0.98**0.75), (4, 0.96**0.75), (100, 0.0), (101, 0.0)]
)
def test_bounds_rise_with_the_warmup_and_fall_to_the_end(epoch, factor):
    """The factor of the bounds is a tenth at first, follows what remains after the warm-up, and is never negative."""
    assert bound_factor(epoch, epochs=100, warmup_epochs=4) == pytest.approx(factor)


def test_a_rate_of_zero_stays_zero_through_the_warm_up():
    """A rate that a sweep sets to 0 is one."""
    assert learning_rate(1, **PAPER | {"lr": 0.0}, scaling="linear") == 0
