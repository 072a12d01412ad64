"""Where the gradient of a small batch comes from: a pass over a part of the batch, or gradients that exist anyway.

Each function returns sums of squares as `tula_hpc.optim.scales` describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    return torch.randperm(num_items, generator=torch.Generator().manual_seed(seed), device="cpu")[:size]


def take(batch: Any, index: Tensor) -> Any:
    """The samples at `index` of a tensor, or of the tensors in a tuple (also a named one), list or mapping; also of a
    list of texts or numbers, one a sample. None stays.

    Raises:
        TypeError: On anything else, and on tensors that have fewer samples.
    """
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or batch.shape[0] <= int(index.max()):
            raise TypeError(
                f"A batch holds a tensor of shape {tuple(batch.shape)}, whose first dimension is not that of the "
                "samples; leave it out, or expand it to a row for each sample."
            )
        if batch.device.type == "cuda" and not index.is_cuda:
            index = index.pin_memory()  # else the copy waits for all that the device has still to do
        return batch.index_select(0, index.to(batch.device, non_blocking=True))
    if batch is None:
        return None
    if isinstance(batch, Mapping):
        chosen = {key: take(value, index) for key, value in batch.items()}
        return chosen if isinstance(batch, dict) else type(batch)(chosen)  # type: ignore[call-arg]
    if _is_plain(batch):
        return type(batch)(batch[i] for i in index.tolist())
    taken = [take(value, index) for value in _sequence(batch)]
    return type(batch)(*taken) if hasattr(batch, "_fields") else type(batch)(taken)


def batch_size(batch: Any) -> int:
    """Length of the first dimension of a tensor, or of the first tensor in a tuple, list or mapping.

    Raises:
        TypeError: If there is none, or something else before it.
    """
    if isinstance(batch, Tensor):
        if batch.dim() == 0:
            raise TypeError("A batch begins with a tensor of shape (), which tells no number of samples; leave it out.")
        return batch.shape[0]
    if _is_plain(batch):
        return len(batch)
    values = batch.values() if isinstance(batch, Mapping) else _sequence(batch)
    first = next((value for value in values if value is not None), None)
    if first is None:
        raise TypeError("There is no tensor in a batch that would tell how many samples it has.")
    return batch_size(first)


def _is_plain(batch: Any) -> bool:
    """Whether it is a list with a text or number for each sample, as a loader makes of what samples tell beside."""
    return isinstance(batch, (list, tuple)) and len(batch) > 0 and all(isinstance(v, (str, int, float)) for v in batch)


def _sequence(batch: Any) -> Sequence[Any]:
    if isinstance(batch, (tuple, list)):
        return batch
    raise TypeError(
        "A batch may be a tensor, or tensors in tuples, lists and mappings, with lists of texts or numbers beside "
        f"them, but a batch holds a {type(batch).__name__}; leave it out."
    )


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

    def pass_through() -> tuple[Tensor | None, ...]:
        loss = loss_fn(module(inputs), targets) * loss_scale
        found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
        if any(grad is None for grad in found):
            _refuse_reentrant(loss)
        return found

    with torch.random.fork_rng(**rng), torch.enable_grad():
        found = _on_other_buffers(module, buffers, pass_through)
    grads = [
        torch.zeros_like(p, dtype=torch.float32) if g is None else g.float()
        for p, g in zip(parameters, found, strict=True)
    ]
    if isinstance(loss_scale, Tensor) or loss_scale != 1:
        torch._foreach_mul_(grads, 1 / loss_scale)
    return grads


def _refuse_reentrant(loss: Tensor) -> None:
    """ValueError if the loss depends on a reentrant checkpoint, inside which parameters seem unused to `grad`."""
    nodes, known = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if node.name().startswith("CheckpointFunction"):
            raise ValueError(
                "The model uses reentrant activation checkpointing, which hides its parameters from the pass over a "
                "part of the batch; give torch.utils.checkpoint.checkpoint use_reentrant=False."
            )
        nodes += [following for following, _ in node.next_functions]


class _Inside(torch.nn.Module):
    """A call that goes through a module."""

    def __init__(self, module: torch.nn.Module, call: Callable[[], Any]):
        super().__init__()
        self.module = module
        self.call = call

    def forward(self) -> Any:
        return self.call()


def _on_other_buffers(module: torch.nn.Module, buffers: dict[str, Tensor], call: Callable[[], Any]) -> Any:
    """What `call` returns while the module has these buffers: all of the call, because with activation checkpointing
    the backward pass goes through the module again."""
    if not buffers:
        return call()
    named = {f"module.{name}": buffer for name, buffer in buffers.items()}
    return torch.func.functional_call(_Inside(module, call), named, ())


def holds_everywhere(here: bool, device: torch.device, process_group: dist.ProcessGroup | None = None) -> bool:
    """Whether it is so on all ranks, known to all alike; with several ranks this waits for the device."""
    if world_size(process_group) == 1:
        return here
    least = torch.tensor(float(here), dtype=torch.float32, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=process_group)
    return bool(least > 0)


def average_over_ranks(tensors: Sequence[Tensor], process_group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The mean over ranks of fp32 tensors, in one all-reduce."""
    ranks = world_size(process_group)
    if ranks == 1:
        return list(tensors)
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=process_group)
    flat.div_(ranks)
    pieces = flat.split([t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


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
