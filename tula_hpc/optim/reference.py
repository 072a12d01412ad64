"""Where the gradient of a small batch comes from: a pass over a part of the batch, or gradients that exist anyway.

Each function returns sums of squares as `tula_hpc.optim.scales` describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tula_hpc.optim.gradients import norms, world_size

Reference = Literal["subbatch", "microbatch", "local"]
"""What a refresh compares the step's gradient with: one more pass over a part of the batch, the gradient of a
micro-batch of an accumulated step, or each rank's gradient before DDP averages them."""

LossFn = Callable[[Any, Any], Tensor]


def random_subset(num_items: int, size: int, seed: int) -> Tensor:
    """`size` different indices below `num_items`, the same for the same seed; leaves the global random stream alone."""
    return torch.randperm(num_items, generator=torch.Generator().manual_seed(seed))[:size]


def take(batch: Any, index: Tensor) -> Any:
    """The samples at `index` of a tensor, or of the tensors in a tuple (also a named one), list or dict."""
    if isinstance(batch, Tensor):
        if batch.device.type == "cuda" and not index.is_cuda:
            index = index.pin_memory()  # else the copy waits for all that the device has still to do
        return batch.index_select(0, index.to(batch.device, non_blocking=True))
    if isinstance(batch, dict):
        return {key: take(value, index) for key, value in batch.items()}
    taken = [take(value, index) for value in batch]
    return type(batch)(*taken) if hasattr(batch, "_fields") else type(batch)(taken)


def batch_size(batch: Any) -> int:
    """Length of the first dimension of a tensor, or of the first tensor in a tuple, list or dict."""
    if isinstance(batch, Tensor):
        return batch.shape[0]
    values = batch.values() if isinstance(batch, dict) else batch
    return batch_size(next(iter(values)))


def side_gradients(
    module: torch.nn.Module,
    loss_fn: LossFn,
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
        outputs = torch.func.functional_call(module, buffers, (inputs,)) if buffers else module(inputs)
        loss = loss_fn(outputs, targets) * loss_scale
        found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    grads = [
        torch.zeros_like(p, dtype=torch.float32) if g is None else g.float()
        for p, g in zip(parameters, found, strict=True)
    ]
    if isinstance(loss_scale, Tensor) or loss_scale != 1:
        torch._foreach_mul_(grads, 1 / loss_scale)
    return grads


def average_over_ranks(
    tensors: Sequence[Tensor] | None, like: Sequence[Tensor], process_group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """The mean over ranks of fp32 tensors shaped like `like`, in one all-reduce.

    A rank without them passes None and takes part with NaN, which spoils the mean on every rank alike; staying away
    would leave the others waiting.
    """
    ranks = world_size(process_group)
    if ranks == 1 and tensors is not None:
        return list(tensors)
    if tensors is None:
        tensors = [torch.full_like(p, torch.nan, dtype=torch.float32) for p in like]
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=process_group)
    flat.div_(ranks)
    pieces = flat.split([p.numel() for p in like])
    return [piece.view(p.shape) for piece, p in zip(pieces, like, strict=True)]


class LocalNorms:
    """A DDP communication hook that notes the norms of this rank's gradients, then averages them as another hook does.

    DDP hands a hook the gradients of a bucket as they are before the ranks are averaged: those of a batch of B / ranks.
    """

    def __init__(self, inner: Callable[[Any, Any], Any], inner_state: Any, due: Callable[[], bool]):
        self.inner = inner
        self.inner_state = inner_state
        self.due = due
        self._buckets: list[tuple[list[Tensor], Tensor]] = []

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, and wants none
        if self.due():
            if bucket.index() == 0:
                self._buckets = []
            self._buckets.append((bucket.parameters(), norms(bucket.gradients())))
        return self.inner(self.inner_state, bucket)

    def take(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """The squared norms noted in the last backward pass, shape (parameters,); None if some are missing."""
        order = [id(p) for bucket, _ in self._buckets for p in bucket]
        found, self._buckets = self._buckets, []
        position = {key: i for i, key in enumerate(order)}
        if any(id(p) not in position for p in parameters):
            return None
        all_norms = torch.cat([n for _, n in found])
        if [id(p) for p in parameters] != order:
            all_norms = torch.stack([all_norms[position[id(p)]] for p in parameters])
        return all_norms.square()


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DDP and torch.compile, in either order."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, wrappers) else model._orig_mod  # type: ignore[assignment]
    return model
