"""How sharp a minimum is: the largest eigenvalue of the loss' Hessian, by power iteration.

A Hessian is never built: its product with a vector v is the gradient of g·v, where g is the gradient of the loss
(Pearlmutter 1994, "Fast exact multiplication by the Hessian"). Power iteration finds the eigenvalue that is largest in
magnitude. Where that one is negative, or two of opposite sign compete, the iteration is done again with H + c I, whose
eigenvalues are all positive and in the same order, for c the spectral radius.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tula_hpc.optim.reference import batch_size, take

Vector = list[Tensor]
"""One tensor for each parameter."""


def largest_eigenvalue(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    iterations: int = 100,
    tolerance: float = 0.01,
    samples_at_once: int | None = None,
    seed: int = 0,
    on_product: Callable[[], None] = lambda: None,
) -> float:
    """The algebraically largest eigenvalue of the Hessian of the mean loss over these samples, in float32.

    The model is evaluated in eval mode, so that dropout does not act and BatchNorm uses its running statistics: the
    loss is then a function of the parameters alone. Mode, buffers, `.grad` and the random stream are left as they were.
    Power iteration comes from below; with `iterations` spent it is a lower bound.

    Args:
        model: Without DDP around it; parameters with `requires_grad=False` count as constants.
        loss_fn: Mean loss of (outputs, targets).
        inputs: One batch, on the model's device: a tensor, or tensors in a tuple, list or mapping.
        targets: Likewise.
        iterations: Most products with the Hessian, of each of the two iterations.
        tolerance: An iteration ends when |Hv - λv| is at most this share of |Hv|.
        samples_at_once: Samples that go through the model together, to bound memory. None: all.
        seed: Of the vector that the iteration starts from.
        on_product: Called before each product with the Hessian, of which there are up to 2 x `iterations`.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    num_samples = batch_size(inputs)
    # taken once, and not for each of the products
    parts = [
        (len(rows) / num_samples, take(inputs, rows), take(targets, rows))
        for rows in torch.arange(num_samples).split(samples_at_once or num_samples)
    ]
    was_training = {module: module.training for module in model.modules()}

    def product(v: Vector) -> Vector:
        on_product()
        total = [torch.zeros_like(p) for p in parameters]
        for share, some, wanted in parts:
            loss = loss_fn(model(some), wanted) * share
            grads = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
            curved = [(grad, part) for grad, part in zip(grads, v, strict=True) if grad.requires_grad]
            if curved:
                outputs, weights = zip(*curved, strict=True)
                torch._foreach_add_(total, torch.autograd.grad(outputs, parameters, weights, materialize_grads=True))
        return total

    def dominant(shift: float) -> tuple[float, float]:
        """Rayleigh quotient of H + shift I at the last vector v, and the norm of (H + shift I) v."""
        generator = torch.Generator().manual_seed(seed)
        v = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]
        value, size = 0.0, _norm(v)
        for _ in range(iterations):
            v = list(torch._foreach_div(v, size))
            hv = product(v)
            torch._foreach_add_(hv, v, alpha=shift)
            value, size = sum(float((a * b).sum()) for a, b in zip(v, hv, strict=True)), _norm(hv)
            if not math.isfinite(size) or math.sqrt(max(0.0, size**2 - value**2)) <= tolerance * size:
                break
            v = hv
        return value, size

    # attention's faster kernels have no second derivative
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        try:
            model.eval()
            value, radius = dominant(0.0)
            if value < (1 - tolerance) * radius:
                value = dominant(radius)[0] - radius
        finally:
            for module, training in was_training.items():
                module.training = training
    return value


def _norm(v: Vector) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(v))))
