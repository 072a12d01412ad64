"""The learning rate as a function of the epoch: linear warm-up, then steps down at milestones. Needs no torch.

    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step / steps_per_epoch, warmup_epochs=5,
                                                           milestones=[100, 150], decay=0.1))

stepped after every optimiser step. A pure function has no state to save, and its milestones are epochs of the run:
torch's `SequentialLR` counts the milestones of its second schedule from the end of the warm-up instead.
"""

from __future__ import annotations

from collections.abc import Sequence


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
