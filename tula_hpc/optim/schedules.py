"""The learning rate as a function of batch and epoch: scaled, linear warm-up, steps down at milestones. Needs no torch.

    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step / steps_per_epoch, warmup_epochs=5,
                                                           milestones=[100, 150], decay=0.1))

stepped after every optimiser step. A pure function has no state to save, and its milestones are epochs of the run:
torch's `SequentialLR` counts the milestones of its second schedule from the end of the warm-up instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

LrScaling = Literal["none", "sqrt", "linear"]
"""How the rate follows the batch: not at all, as its square root (Krizhevsky 2014, arXiv 1404.5997), or in proportion
to it (Goyal et al. 2017, arXiv 1706.02677)."""
_EXPONENTS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def scaled_lr(lr: float, *, global_batch: int, small_batch: int, scaling: LrScaling) -> float:
    """The rate for `global_batch`, if `lr` was tuned for `small_batch`; lower where the batch is smaller."""
    if scaling not in _EXPONENTS:
        raise ValueError(f"scaling is {scaling!r}; choose one of {', '.join(_EXPONENTS)}.")
    return lr * (global_batch / small_batch) ** _EXPONENTS[scaling]


def learning_rate(
    epoch: float,
    *,
    lr: float,
    global_batch: int,
    small_batch: int,
    scaling: LrScaling,
    warmup_epochs: float,
    milestones: Sequence[float],
    decay: float,
) -> float:
    """The learning rate at `epoch`, for every method.

    The warm-up rises to the scaled rate from a tenth of `lr`, whatever the batch: the first steps of a large batch are
    those that its rate endangers (Goyal et al., section 2.2). It never starts above a tenth of the scaled rate.

    Args:
        epoch: Epochs done so far, fractions included.
        lr: The rate tuned for `small_batch`.
        global_batch: Samples in one step over all ranks (B).
        small_batch: The batch that `lr` belongs to (b).
        scaling: How the rate follows B / b.
        warmup_epochs: See `lr_factor`.
        milestones: See `lr_factor`.
        decay: See `lr_factor`.
    """
    scaled = scaled_lr(lr, global_batch=global_batch, small_batch=small_batch, scaling=scaling)
    start = 0.1 * min(1.0, 1 / scaled_lr(1.0, global_batch=global_batch, small_batch=small_batch, scaling=scaling))
    return scaled * lr_factor(
        epoch, warmup_epochs=warmup_epochs, milestones=milestones, decay=decay, warmup_start=start
    )


def lr_factor(
    epoch: float, *, warmup_epochs: float, milestones: Sequence[float], decay: float, warmup_start: float = 0.1
) -> float:
    """What to multiply the base learning rate by at `epoch`.

    Args:
        epoch: Epochs done so far, fractions included; compute it as `step / steps_per_epoch`, which is exact at
            whole epochs, rather than by adding up small steps.
        warmup_epochs: The factor rises linearly over so many epochs; 0 means no warm-up. The warm-up takes the place
            of the first epochs, it does not shift the milestones.
        milestones: Epochs from which on the rate is lower, in any order; a milestone counts from `epoch` equal to it.
        decay: Multiplies the factor once for each milestone reached.
        warmup_start: The factor at epoch 0, if there is a warm-up.
    """
    if warmup_epochs < 0:
        raise ValueError(f"warmup_epochs is {warmup_epochs}, but must be at least 0; use 0 for no warm-up.")
    steps_down = sum(epoch >= milestone for milestone in milestones)
    warmup = warmup_start + (1 - warmup_start) * epoch / warmup_epochs if epoch < warmup_epochs else 1.0
    return float(warmup * decay**steps_down)


def bound_factor(epoch: float, *, epochs: float, warmup_epochs: float) -> float:
    """What to multiply the bounds of `BoundedOptimizer` by at `epoch`.

    From a tenth to 1 over the warm-up, times the share of the training that remains to the power of 3/4. The power lies
    between a root, which leaves running averages of normalisation behind at the end, and a line, with which VGG11 and
    AlexNet ended too early (tests/data/accuracy).

    Args:
        epoch: Epochs done so far, fractions included.
        epochs: Those of the whole training.
        warmup_epochs: See `lr_factor`.
    """
    rise = lr_factor(epoch, warmup_epochs=warmup_epochs, milestones=(), decay=1.0)
    return rise * max(0.0, 1 - epoch / epochs) ** 0.75
