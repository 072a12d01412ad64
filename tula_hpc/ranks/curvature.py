"""How sharp the loss is where a training stands: the largest eigenvalue of its Hessian."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Vector = Sequence[Tensor]
"""As long as the parameters, and with their shapes."""


def largest_eigenvalue(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    *,
    iterations: int = 50,
    tolerance: float = 1e-3,
) -> float:
    """The algebraically largest eigenvalue of the Hessian of the loss on one batch, by power iteration.

    Power iteration finds the eigenvalue of largest size; where that is negative, it is done again on the Hessian moved
    up by it. The model is put into eval mode meanwhile, so that the loss is one function of the parameters: no dropout,
    BatchNorm with its running statistics. Gradients, buffers and the random stream stay as they are.

    Args:
        model: Not wrapped by DDP.
        loss_fn: Mean loss of (outputs, targets).
        inputs: A batch on the model's device.
        targets: Likewise.
        iterations: Most Hessian-vector products of each power iteration.
        tolerance: It ends when the eigenvalue changes by less than this share.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            first = torch.autograd.grad(loss_fn(model(inputs), targets), parameters, create_graph=True)

        def hessian_times(vector: Vector) -> Vector:
            return torch.autograd.grad(first, parameters, vector, retain_graph=True)

        dominant = _power_iteration(hessian_times, parameters, iterations, tolerance)
        if dominant >= 0:
            return dominant

        def moved(vector: Vector) -> Vector:
            return torch._foreach_add(list(hessian_times(vector)), list(vector), alpha=-dominant)

        return dominant + _power_iteration(moved, parameters, iterations, tolerance)
    finally:
        model.train(training)


def _power_iteration(times: Callable[[Vector], Vector], like: Vector, iterations: int, tolerance: float) -> float:
    """The eigenvalue of largest size, with its sign, of the symmetric matrix that `times` multiplies by."""
    generator = torch.Generator(device=like[0].device).manual_seed(0)
    vector: Vector = [torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype) for p in like]
    vector = torch._foreach_div(list(vector), _length(vector))
    found = 0.0
    for _ in range(iterations):
        image = times(vector)
        before, found = found, float(sum((a * b).sum() for a, b in zip(vector, image, strict=True)))
        length = _length(image)
        if length == 0 or abs(found - before) <= tolerance * abs(found):
            break
        vector = torch._foreach_div(list(image), length)
    return found


def _length(vector: Vector) -> float:
    return float(torch.stack(torch._foreach_norm(list(vector))).norm())
