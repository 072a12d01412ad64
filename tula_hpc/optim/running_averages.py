"""Running averages of batch normalisation, for batches larger than those they were made for.

With momentum m they follow the last 1 / m steps. Where a model has a small one, as MobileNetV3's 0.01, a large batch
leaves too few steps: evaluation then lags behind the weights by several epochs, shows chance level until the steps
become short, and ends a point or two below what the weights can do.
"""

from __future__ import annotations

from torch import nn

MOST = 0.1
"""torch's own default, a memory of 10 steps: a shorter one has no lag left to lose, and fewer samples to average."""


def follow_as_many_samples(model: nn.Module, global_batch: int, small_batch: int) -> int:
    """Let the averages follow as many samples as at `small_batch`: m becomes 1 - (1 - m)^(B / b), at most `MOST`.

    A momentum that is larger already, or None (the mean of all steps), is left. Call it once, on a model as it was
    built: the momentum is no part of its state, and a second call would shorten the averages again.

    Returns:
        The number of layers changed.
    """
    if global_batch <= small_batch:
        return 0
    changed = 0
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is not None:
            shorter = min(MOST, 1 - (1 - layer.momentum) ** (global_batch / small_batch))
            if shorter > layer.momentum:
                layer.momentum = shorter
                changed += 1
    return changed
