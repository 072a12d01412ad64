"""Post-local SGD (Lin, Stich, Patel and Jaggi 2018, arXiv 1808.07217): synchronous training first, then local steps.

In the local phase every rank steps on its own gradients, and the ranks' models are averaged every `period` steps:

    averaging = PostLocalSGD(model, optimizer, period=78)               # `model` in DDP
    outputs = averaging.module(inputs) if local else model(inputs)      # whether `local` is the caller's schedule
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    if local:
        averaging.after_step()

The module inside DDP, called directly, neither averages gradients nor broadcasts buffers. All ranks must take the same
number of steps. Evaluate and save where the models are equal, which is when `since_average` is 0; call `average` to
make them so. Hence no state: what is saved there resumes alike on all ranks, and its counter is 0.

This is a helper beside any optimizer and not an optimizer, so schedules and checkpoints see the real one. Averages are
copied into the tensors in place: a parameter keeps its memory and its format, such as channels_last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tula_hpc.optim.gradients import world_size

LocalMomentum = Literal["keep", "reset", "average"]
"""What an averaging does to the momentum of the ranks: nothing, set it to 0, or average it with the model."""


class PostLocalSGD:
    """Averages the ranks' models every so many steps.

    Args:
        model: The replica, in DDP or not.
        optimizer: Its optimizer; whatever per-element state it has counts as momentum.
        period: Steps from one averaging to the next (H).
        momentum: With "keep", as published, ranks go on with momenta of their own; a checkpoint holds one rank's. A
            rank that has not used a parameter yet has none, which counts as 0 in an average.
        process_group: The ranks that share a model; None means all.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        period: int,
        momentum: LocalMomentum = "keep",
        process_group: dist.ProcessGroup | None = None,
    ):
        if period < 1:
            raise ValueError(f"PostLocalSGD: period is {period}, but must be at least 1 step.")
        if momentum not in get_args(LocalMomentum):
            raise ValueError(
                f"PostLocalSGD: momentum is {momentum!r}; choose one of {', '.join(get_args(LocalMomentum))}."
            )
        inner = getattr(model, "_orig_mod", model)  # of torch.compile(DDP(...)); inside DDP it may stay compiled
        self.module: torch.nn.Module = inner.module if isinstance(inner, DistributedDataParallel) else model
        self.optimizer = optimizer
        self.period = period
        self.momentum = momentum
        self.process_group = process_group
        self.since_average = 0
        """Local steps since the models were last equal."""

    def after_step(self) -> bool:
        """Count a local step, and average after the last one of a period; whether the models are equal now."""
        self.since_average += 1
        if self.since_average == self.period:
            self.average()
        return self.since_average == 0

    @torch.no_grad()
    def average(self) -> None:
        """Make all ranks' models equal to their mean: parameters and floating-point buffers, in one all-reduce.

        Takes two copies of what is averaged while it runs; best called when gradients are cleared.
        """
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        shared = [*parameters, *(b for b in self.module.buffers() if b.is_floating_point())]
        momenta = [self._momenta(p) for p in parameters]
        if self.momentum == "average":
            shared += _complete(parameters, momenta, self.process_group)
        _average(shared, self.process_group)
        held = [v for values in momenta for v in values]
        if self.momentum == "reset" and held:
            torch._foreach_zero_(held)
        self.since_average = 0

    def _momenta(self, parameter: Tensor) -> list[Tensor]:
        """What the optimizer keeps for each element of a parameter; nothing before it has used it."""
        state = self.optimizer.state.get(parameter, {})
        each = [value for name, value in state.items() if name != "step"]  # a count, also where there is one element
        return [value for value in each if isinstance(value, Tensor) and value.shape == parameter.shape]


def _complete(
    parameters: Sequence[Tensor], momenta: Sequence[Sequence[Tensor]], process_group: dist.ProcessGroup | None
) -> list[Tensor]:
    """As many momenta on each rank: a rank that has not used a parameter yet takes part with zeros."""
    counts = torch.tensor([len(values) for values in momenta], device=parameters[0].device)
    if world_size(process_group) > 1:
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=process_group)
    complete = []
    for parameter, values, count in zip(parameters, momenta, counts.tolist(), strict=True):
        complete += [*values, *(torch.zeros_like(parameter) for _ in range(count - len(values)))]
    return complete


def _average(tensors: Sequence[Tensor], process_group: dist.ProcessGroup | None) -> None:
    ranks = world_size(process_group)
    if ranks == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])  # of the widest type among them
    dist.all_reduce(flat, group=process_group)
    pieces = flat.div_(ranks).split([t.numel() for t in tensors])
    torch._foreach_copy_(list(tensors), [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)])
