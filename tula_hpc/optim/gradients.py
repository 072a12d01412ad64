"""What adaptive gradient scaling measures on gradients: functions without state.

| code name         | paper              | meaning                                                                    |
|-------------------|--------------------|----------------------------------------------------------------------------|
| `squared_norm`    | abs(G)², Eq. (5)   | squared L2 norm of all gradients taken as one vector                       |
| `variability`     | Δ(G), Eq. (5)      | relative change of `squared_norm` from one step to the next                |
| `g_small`         | g_small, line 14   | gradient of the mean loss over a sub-batch of the step's own batch         |
| `g_large`         | g_large, line 3    | gradient of the mean loss over the whole batch, averaged over ranks        |
| `scale`           | s, line 16         | how much larger the small batch's gradient is, kept within [s_min, s_max]  |

Nothing here waits for the device: every result is a tensor on the device of the gradients. Arithmetic is fp32 whatever
the gradients are, because 1e-8 is 0 in fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Granularity = Literal["element", "channel", "tensor", "global"]
"""What shares one scale: nothing, a slice along a parameter's first dimension, a parameter, or the whole model."""


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Squared L2 norm over all gradients as one vector, fp32, shape ()."""
    # The norms are taken in fp32 or wider: torch refuses to narrow fp64 gradients, and fp16 would overflow.
    dtype = torch.float32
    for grad in gradients:
        dtype = torch.promote_types(dtype, grad.dtype)
    norms = torch._foreach_norm(list(gradients), 2, dtype=dtype)
    return torch.stack(norms).square().sum().float()


def gradient_variability(squared_norm: Tensor, previous: Tensor) -> Tensor:
    """Eq. (5): the relative change of the squared norm since the last step; infinite if `previous` is 0."""
    variability = ((squared_norm - previous) / previous).abs()
    return torch.where(previous > 0, variability, torch.inf)


def squared_magnitudes(gradients: Sequence[Tensor], granularity: Granularity) -> list[Tensor]:
    """For each gradient the sum of squares over what shares one scale, in a shape that broadcasts with the gradient.

    A one-dimensional parameter has one channel per element, so "channel" treats biases like "element" does.
    """
    squares = [grad.float().square() for grad in gradients]
    if granularity == "element":
        return squares
    if granularity == "channel":
        return [s.sum(dim=tuple(range(1, s.dim())), keepdim=True) if s.dim() > 1 else s for s in squares]
    sums = [s.sum() for s in squares]
    if granularity == "tensor":
        return sums
    return [torch.stack(sums).sum()] * len(sums)


def magnitude_ratio(small: Tensor, large: Tensor, *, eps: float, s_min: float, s_max: float) -> Tensor:
    """The scale |g_small| / (|g_large| + eps) within [s_min, s_max], from the two magnitudes; 1 where both are 0.

    Line 16 adds eps to the signed gradient, which has a pole at g_large = -eps; adding it to the magnitude has none.
    Where both are 0 (dead units) nothing is known, and 0 / eps = 0 would freeze the weight until the next refresh.
    """
    ratio = _quotient(small, large + eps).clamp_(s_min, s_max)
    return torch.where((large == 0) & (small == 0), 1.0, ratio)


def printed_ratio(g_small: Tensor, g_large: Tensor, *, eps: float, s_max: float) -> Tensor:
    """Line 16 to the letter: min(|g_small / (g_large + eps)|, s_max), without a floor; 0 where both are 0.

    The one departure: 0/0 at the pole g_large = -eps gives 1, since a NaN would stay in the weights.
    """
    ratio = _quotient(g_small, g_large.float() + eps).abs_()
    return ratio.nan_to_num_(nan=1.0, posinf=s_max).clamp_(max=s_max)


def _quotient(small: Tensor, large: Tensor) -> Tensor:
    """small / large, written into `large`: the result has the memory layout of the gradient it will multiply."""
    return torch.div(small, large, out=large)


def random_subset(num_items: int, size: int, seed: int) -> Tensor:
    """`size` different indices below `num_items`, the same for the same seed; leaves the global random stream alone."""
    return torch.randperm(num_items, generator=torch.Generator().manual_seed(seed))[:size]


def take(batch: Any, index: Tensor) -> Any:
    """The samples at `index` of a tensor, or of the tensors in a tuple, list or dict."""
    if isinstance(batch, Tensor):
        return batch.index_select(0, index.to(batch.device))
    if isinstance(batch, dict):
        return {key: take(value, index) for key, value in batch.items()}
    return type(batch)(take(value, index) for value in batch)


def num_samples(batch: Any) -> int:
    """Length of the first dimension of a tensor, or of the first tensor in a tuple, list or dict."""
    if isinstance(batch, Tensor):
        return batch.shape[0]
    values = batch.values() if isinstance(batch, dict) else batch
    return num_samples(next(iter(values)))


def side_gradients(
    module: torch.nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    parameters: Sequence[Tensor],
    *,
    loss_scale: float | Tensor = 1.0,
) -> list[Tensor]:
    """Gradients of `loss_fn(module(inputs), targets)`, in fp32, zero for unused parameters, without side effects.

    Neither buffers (BatchNorm statistics), nor `.grad`, nor the random stream, nor DDP's reducer notice the pass, so
    that a run with and a run without it see the same numbers. `loss_scale` multiplies the loss and divides the
    gradients again: fp16 gradients of a small loss would otherwise be flushed to zero.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    device = parameters[0].device
    # The CPU's random stream is always forked; other devices must be named, or all of them are forked.
    rng = {"devices": []} if device.type in ("cpu", "mps") else {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**rng), torch.enable_grad():
        outputs = torch.func.functional_call(module, buffers, (inputs,))
        loss = loss_fn(outputs, targets) * loss_scale
        found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    return [
        torch.zeros_like(p, dtype=torch.float32) if g is None else g.float() / loss_scale
        for p, g in zip(parameters, found, strict=True)
    ]


def average_over_ranks(
    gradients: Sequence[Tensor] | None, parameters: Sequence[Tensor], process_group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """The mean of the ranks' fp32 gradients of `parameters`, in one all-reduce.

    A rank without gradients passes None and takes part with NaN, which spoils the mean on every rank alike; staying
    away would leave the others waiting.
    """
    if gradients is None:
        gradients = [torch.full_like(p, torch.nan, dtype=torch.float32) for p in parameters]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    if world_size(process_group) > 1:
        dist.all_reduce(flat, group=process_group)
        flat.div_(world_size(process_group))
    pieces = flat.split([p.numel() for p in parameters])
    return [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]


@dataclass(frozen=True)
class Measured:
    """What one refresh found."""

    scales: list[Tensor]
    """One per parameter, in a shape that broadcasts with its gradient."""
    finite: Tensor
    """Whether all gradients were finite, bool of shape (); if not, the scales mean nothing."""


def measured_scales(
    g_large: Sequence[Tensor],
    draws: Iterable[Sequence[Tensor]],
    granularity: Granularity,
    eps: float,
    s_min: float,
    s_max: float,
    as_printed: bool = False,
) -> Measured:
    """Compare the large batch's gradients, one per parameter, with those of one or more sub-batches.

    The squared magnitudes of several sub-batches are averaged; `as_printed` uses the last one.
    """
    squares: list[Tensor] = []
    num_draws = 0
    for g_small in draws:
        num_draws += 1
        more = squared_magnitudes(g_small, granularity)
        squares = [a + b for a, b in zip(squares, more, strict=True)] if squares else more
    large_squares = squared_magnitudes(g_large, granularity)
    finite = torch.stack([square.sum() for square in (*squares, *large_squares)]).sum().isfinite()
    if as_printed:
        pairs = zip(g_small, g_large, strict=True)
        return Measured([printed_ratio(small, large, eps=eps, s_max=s_max) for small, large in pairs], finite)
    magnitudes = zip(((s / num_draws).sqrt() for s in squares), (s.sqrt() for s in large_squares), strict=True)
    bounds = {"eps": eps, "s_min": s_min, "s_max": s_max}
    return Measured([magnitude_ratio(small, large, **bounds) for small, large in magnitudes], finite)


def world_size(process_group: dist.ProcessGroup | None = None) -> int:
    """Ranks of the group; 1 without torch.distributed."""
    return dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DDP and torch.compile, in either order."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, wrappers) else model._orig_mod  # type: ignore[assignment]
    return model


def refuse_sharded(parameters: Iterable[Tensor]) -> None:
    """ValueError if a rank sees only a part of a parameter, whose norm is not the model's."""
    for p in parameters:
        # FSDP2 and tensor parallelism make DTensors, which know their device mesh; FSDP1 marks its parameters.
        if hasattr(p, "device_mesh") or hasattr(p, "_fsdp_flattened"):
            raise ValueError(
                f"TulaOptimizer got a sharded parameter of shape {tuple(p.shape)}, as FSDP or tensor parallelism make "
                "them, but needs whole gradients on every rank; use DistributedDataParallel."
            )


def refuse_unusual(gradients: Iterable[Tensor]) -> None:
    """ValueError on sparse gradients, and on gradients of several devices."""
    if any(grad.layout != torch.strided for grad in gradients):
        raise ValueError(
            "TulaOptimizer got a sparse gradient, but scales dense ones only; build the layer with sparse=False."
        )
    devices = sorted({str(grad.device) for grad in gradients})
    if len(devices) > 1:
        raise ValueError(
            f"TulaOptimizer got gradients on {', '.join(devices)}, but handles one device per process; use one process "
            "per device with DistributedDataParallel."
        )
