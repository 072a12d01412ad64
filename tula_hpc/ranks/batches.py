"""What a batch may be, so that any module with a batch dimension can be profiled and trained.

| name      | shape                                                                                                    |
|-----------|----------------------------------------------------------------------------------------------------------|
| `inputs`  | (batch, ...): a tensor, or tensors in a tuple, list or mapping; the model's one argument                 |
| `targets` | (batch, ...): class indices, one for a sample or for each place in it; a negative one, such as the -100  |
|           | that torch's CrossEntropyLoss ignores, is not counted. Anything else is trained on, without accuracies   |
| `outputs` | (batch, classes, ...): classes are dimension 1, the rest is as in the targets; what the loss wants where |
|           | targets are no class indices                                                                             |
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tula_hpc.errors import TulaError
from tula_hpc.optim.reference import batch_size
from tula_hpc.ranks.distributed import inner_module


def to_device(batch: Any, device: torch.device) -> Any:
    """The same batch with its tensors on the device; the host does not wait for pinned ones."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device) for key, value in batch.items()}
        return moved if isinstance(batch, dict) else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, (tuple, list)):
        parts = [to_device(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else parts
    return batch


def num_bytes(batch: Any) -> int:
    """What the tensors of a batch take."""
    if isinstance(batch, Tensor):
        return batch.numel() * batch.element_size()
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return sum(num_bytes(part) for part in parts)


def forward(model: Any, loss_fn: Any, inputs: Any, targets: Any) -> tuple[Any, Tensor]:
    """Outputs and loss.

    Raises:
        TulaError: If the model does not take one argument, the outputs' shape does not belong to targets that are
            class indices, or the loss is not one number.
    """
    try:
        outputs = model(inputs)
    except TypeError:
        _refuse_other_arguments(inner_module(model), inputs)
        raise
    if _are_classes(targets):
        if not isinstance(outputs, Tensor):
            raise TulaError(
                f"workload.model returned a {type(outputs).__name__} for targets that are class indices; let it return "
                "its logits, a tensor of shape (batch, classes, ...)"
            )
        if outputs.dim() < 2 or outputs.shape[:1] + outputs.shape[2:] != targets.shape:
            raise TulaError(
                f"workload.model returned the shape {tuple(outputs.shape)} for targets of the shape "
                f"{tuple(targets.shape)}; the classes must be dimension 1 and the others those of the targets, such as "
                "(batch, classes) or (batch, classes, tokens): outputs.transpose(1, 2) where the classes came last. "
                "Integer targets that are no class indices can be told by a tuple or a dict around them"
            )
    loss = loss_fn(outputs, targets)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TulaError(f"workload.loss gave {what}; let it give one number, as a tensor: the mean over the batch")
    return outputs, loss


def _refuse_other_arguments(model: torch.nn.Module, inputs: Any) -> None:
    """Say what forward is called with, where its signature wants something else."""
    try:
        takes = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a scripted one
        return
    try:
        takes.bind(inputs)
    except TypeError as error:
        names = ", ".join(takes.parameters) if len(takes.parameters) > 1 else "a, b"
        raise TulaError(
            f"workload.model's forward{takes} was called with one argument, the inputs of a batch ({error}); let the "
            f"data set give several in a tuple, (({names}), target), and forward take them apart: {names} = inputs"
        ) from None


def tally(outputs: Any, targets: Any, loss: Tensor, top: tuple[int, ...]) -> Tensor:
    """What sums up over batches: loss times targets, number of targets, and how many of them are among the `top` k
    classes of their outputs, for each k; float64 of shape (2 + len(top),), on the device without waiting for it.

    Targets that are no class indices count as one a sample, and their hits are NaN.
    """
    if _are_classes(targets):
        widest = min(max(top), outputs.shape[1])
        best = outputs.topk(widest, dim=1).indices if widest > 1 else outputs.argmax(1, keepdim=True)
        right = best == targets.unsqueeze(1)
        count, hits = (targets >= 0).sum(), [right[:, :k].sum() for k in top]
    else:
        count = torch.full_like(loss, batch_size(targets), dtype=torch.float64)
        hits = [torch.full_like(count, torch.nan)] * len(top)
    weighed = torch.where(count > 0, loss.detach().double() * count, 0.0)  # a mean over no target is NaN
    return torch.stack([weighed, *(x.double() for x in (count, *hits))])


def _are_classes(targets: Any) -> bool:
    return isinstance(targets, Tensor) and targets.dtype == torch.int64
