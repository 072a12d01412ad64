"""What is asked of a model's gradients: their norms, how much these change, and whether they can be scaled at all.

Nothing here waits for the device: every result is a tensor on the device of the gradients. Norms are fp32 whatever the
gradients are, because squares overflow in fp16.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def norms(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm of each gradient, fp32, shape (number of gradients,).

    Raises:
        ValueError: On sparse and complex gradients, and on gradients of several devices.
    """
    # The norms are taken in fp32 or wider: torch refuses to narrow fp64 gradients, and fp16 would overflow.
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in gradients) else torch.float32
    try:
        found = torch._foreach_norm(list(gradients), 2, dtype=dtype)
    except RuntimeError:
        refuse_unusual(gradients)
        raise
    return torch.stack(found).float()


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Squared L2 norm over all gradients as one vector, fp32, shape ()."""
    found = norms(gradients)
    return torch.dot(found, found)


def gradient_variability(squared_norm: Tensor, previous: Tensor, weight: float = 1.0) -> Tensor:
    """Eq. (5): the relative change of the squared norm since the last step, shape ().

    With `weight` below 1 the change of its exponential moving average: `previous` is that average, which the new
    squared norm enters with this weight. Infinite, or NaN for 0 / 0, where `previous` is 0: below no threshold.
    """
    return torch.addcdiv(constant(-weight, previous.device), squared_norm, previous, value=weight).abs_()


@functools.lru_cache(maxsize=64)
def constant(value: float, device: torch.device) -> Tensor:
    """A number as an fp32 tensor of shape (), made once: filling one costs a kernel. Not to be written to."""
    return torch.full((), value, dtype=torch.float32, device=device)


def world_size(process_group: dist.ProcessGroup | None = None) -> int:
    """Ranks of the group; 1 without torch.distributed."""
    return dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1


def refuse_sharded(parameters: Iterable[Tensor]) -> None:
    """ValueError if a rank sees only a part of a parameter, whose norm is not the model's."""
    for p in parameters:
        # FSDP2 and tensor parallelism make DTensors, which know their device mesh; FSDP1 marks its parameters.
        if hasattr(p, "device_mesh") or hasattr(p, "_fsdp_flattened"):
            raise ValueError(
                f"The optimizer got a sharded parameter of shape {tuple(p.shape)}, as FSDP or tensor parallelism make "
                "them, but needs whole gradients on every rank; use DistributedDataParallel."
            )


def refuse_unusual(gradients: Iterable[Tensor]) -> None:
    """ValueError on sparse and complex gradients, and on gradients of several devices."""
    gradients = list(gradients)
    if any(grad.layout != torch.strided for grad in gradients):
        raise ValueError(
            "The optimizer got a sparse gradient, but scales dense ones only; build the layer with sparse=False."
        )
    if any(grad.is_complex() for grad in gradients):
        raise ValueError(
            "The optimizer got a complex gradient, but scales real ones only; keep the parameter as "
            "torch.view_as_real(...) of it and go back with torch.view_as_complex in forward."
        )
    devices = sorted({str(grad.device) for grad in gradients})
    if len(devices) > 1:
        raise ValueError(
            f"The optimizer got gradients on {', '.join(devices)}, but handles one device per process; use one process "
            "per device with DistributedDataParallel."
        )
