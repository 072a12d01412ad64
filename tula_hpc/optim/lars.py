"""LARS (You, Gitman and Ginsburg 2017, arXiv 1708.03888): SGD whose step on each weight tensor follows its own norm.

    trust  = trust_coefficient · ‖w‖ / (‖g‖ + weight_decay · ‖w‖), one for each tensor
    buffer = momentum · buffer + trust · (g + weight_decay · w)
    w      = w - lr · buffer

The update is `pytorch_optimizer`'s, an optional dependency (`pip install 'tula-hpc[lars]'`). Biases and the weights of
normalisation, whose norms say nothing about a good step, take plain momentum steps without decay. The two kinds are put
into parameter groups here, so that this does not hang on what an implementation leaves out by itself.

After `step()` the package leaves the momentum buffer in `.grad`: read gradients before, and clear them after.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def lars(
    parameters: Iterable[torch.Tensor],
    lr: float,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_coefficient: float = 0.001,
) -> torch.optim.Optimizer:
    """LARS over `parameters`: those of two and more dimensions with trust ratio and decay, the others without either.

    Args:
        parameters: What to train.
        lr: The rate that multiplies every step; a schedule may change it in both groups.
        momentum: Of the buffer, which is kept without `lr`.
        weight_decay: Added to the gradient of weight tensors, and counted in their trust ratio.
        trust_coefficient: How far a step may move a weight tensor at `lr` 1 without momentum, as a share of its norm.

    Raises:
        TypeError: On parameter groups or named parameters.
        ImportError: If `pytorch_optimizer` is not installed.
    """
    try:
        from pytorch_optimizer import LARS
    except ModuleNotFoundError as error:
        raise ImportError("LARS needs the package pytorch_optimizer; pip install 'tula-hpc[lars]'") from error
    parameters = list(parameters)
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"lars got a {type(parameter).__name__} among the parameters, but makes the groups itself; give it "
                "model.parameters()."
            )
    weights = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay}
    vectors = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
    groups = [group for group in (weights, vectors) if group["params"]]
    return LARS(groups, lr, momentum=momentum, trust_coefficient=trust_coefficient)
