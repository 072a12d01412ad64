"""One factor for all gradients costs nothing where the optimizer's own kernel applies it.

Fused optimizers divide gradients by `grad_scale`: GradScaler's way in, which `TulaOptimizer` closes to GradScaler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tula_hpc.optim.gradients import constant


def multiplies_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer can multiply all gradients by one number."""
    groups = optimizer.param_groups
    return isinstance(optimizer, torch.optim.SGD) and all(g.get("fused") and g.get("ags", True) for g in groups)


def step_multiplied(optimizer: Any, factor: Tensor | float, device: torch.device) -> None:
    """Step with all gradients multiplied by `factor`, a number or of shape ()."""
    divisor = factor.reciprocal() if isinstance(factor, Tensor) else constant(1 / factor, device)
    optimizer.grad_scale, optimizer.found_inf = divisor, None
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
