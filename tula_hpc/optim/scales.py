"""From the gradients of two batch sizes to the factors that gradients are multiplied by.

| code name         | paper              | meaning                                                                    |
|-------------------|--------------------|----------------------------------------------------------------------------|
| `g_small`         | g_small, line 14   | gradient of the mean loss over a small batch                               |
| `g_large`         | g_large, line 3    | gradient of the mean loss over the whole batch, averaged over ranks        |
| `scale`           | s, line 16         | how much larger the small batch's gradient is, kept within [s_min, s_max]  |
| `squares`         |                    | squared magnitude of what shares one scale: a list of tensors, see below   |

Squares and scales are lists: for "element" one tensor for each parameter, else a single vector of all channels, of all
tensors, or of length 1. What is coarse then costs a handful of kernels, whatever the number of parameters. Nothing here
waits for the device; arithmetic is fp32, because 1e-8 is 0 in fp16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tula_hpc.optim.gradients import norms

Granularity = Literal["element", "channel", "tensor", "global"]
"""What shares one scale: nothing, a slice along a parameter's first dimension, a parameter, or the whole model."""

SPREAD_NUMEL = 2**16
"""A coarse scale is written out for each element of tensors up to this size, since kernels that work on many tensors
at once want equal shapes; a larger tensor is worth a kernel of its own."""


def squared_magnitudes(gradients: Sequence[Tensor], granularity: Granularity) -> list[Tensor]:
    """The sums of squares over what shares one scale.

    A one-dimensional parameter has one channel per element, so "channel" treats biases like "element" does.
    """
    if granularity == "element":
        gradients = [grad.float() for grad in gradients]
        return list(torch._foreach_mul(gradients, gradients))
    if granularity == "channel":
        return [torch.cat([_channel_norms(grad.float()) for grad in gradients]).square_()]
    squares = norms(gradients).square_()
    return [squares if granularity == "tensor" else squares.sum(0, keepdim=True)]


def _channel_norms(grad: Tensor) -> Tensor:
    if grad.dim() < 2:
        return grad.abs().reshape(-1)
    return torch.linalg.vector_norm(grad, dim=tuple(range(1, grad.dim())))


def finite(*squares: Sequence[Tensor]) -> Tensor:
    """Whether all of them are finite, bool of shape ()."""
    return norms([square for part in squares for square in part]).sum().isfinite()


def scales_of(
    small: Sequence[Tensor], large: Sequence[Tensor], *, eps: float, exponent: float, s_min: float, s_max: float
) -> list[Tensor]:
    """((|g_small| + eps) / (|g_large| + eps)) ** exponent within [s_min, s_max], from the squares of both.

    Line 16 adds eps to the signed g_large only, which has a pole at g_large = -eps, and gives 0 where both are 0 (dead
    units): that would freeze the weight until the next refresh. Here 0 / 0 is 1.
    """
    scales, magnitudes = list(torch._foreach_sqrt(list(small))), list(torch._foreach_sqrt(list(large)))
    torch._foreach_add_(scales, eps)
    torch._foreach_add_(magnitudes, eps)
    torch._foreach_div_(scales, magnitudes)
    if exponent != 1:
        torch._foreach_pow_(scales, exponent)
    torch._foreach_clamp_min_(scales, s_min)
    torch._foreach_clamp_max_(scales, s_max)
    return scales


def printed_ratio(g_small: Tensor, g_large: Tensor, *, eps: float, s_max: float) -> Tensor:
    """Line 16 to the letter: min(|g_small / (g_large + eps)|, s_max), without a floor; 0 where both are 0.

    The one departure: 0/0 at the pole g_large = -eps gives 1, since a NaN would stay in the weights.
    """
    # Written into a tensor like g_large, so that it has the memory layout of the gradient it will multiply.
    lower = g_large.float() + eps
    return torch.div(g_small, lower, out=lower).abs_().nan_to_num_(nan=1.0, posinf=s_max).clamp_(max=s_max)


class Scales:
    """The scales of some parameters, ready to multiply their gradients in few kernels.

    What is held is the excess e = s - 1: a gradient becomes g + e g, and g + 0 g where the gate is shut, without a
    branch on the host.
    """

    def __init__(self, parameters: list[Tensor], granularity: Granularity, excess: list[Tensor] | None = None):
        self.parameters = parameters
        self.granularity = granularity
        self._mean: Tensor | None = None
        self.excess: list[Tensor] | None = None
        """One tensor for each parameter, or one vector; None until something was measured."""
        self._fine: tuple[list[Tensor], list[Tensor]] = [], []  # parameters, and their excess in the gradient's shape
        self._coarse: tuple[list[Tensor], list[Tensor]] = [], []  # the same, to be broadcast
        self._written_out: tuple[Tensor, Tensor] | None = None  # of the small tensors: excess, and where to take it
        if granularity in ("channel", "tensor"):
            self._share_out()
        if excess is not None:
            self.hold(excess)

    def __reduce__(self) -> tuple[Any, ...]:
        # Shared out again: views that plain pickle reads back have storages of their own, which `hold` does not reach.
        return type(self), (self.parameters, self.granularity, self.excess)

    def each(self, vector: Tensor) -> list[Tensor]:
        """The part of a vector of channels, tensors or one that belongs to each parameter; broadcasts with it."""
        if self.granularity == "global":
            return [vector[0]] * len(self.parameters)
        if self.granularity == "tensor":
            return list(vector.unbind())
        pieces = vector.split([p.shape[0] if p.dim() else 1 for p in self.parameters])
        return [
            piece.view(-1, *(1 for _ in p.shape[1:])) if p.dim() else piece[0]
            for p, piece in zip(self.parameters, pieces, strict=True)
        ]

    def _share_out(self) -> None:
        """Lay out `_fine` and `_coarse` as views of two tensors, which `hold` then fills."""
        device = self.parameters[0].device
        channels = sum(p.shape[0] if self.granularity == "channel" and p.dim() else 1 for p in self.parameters)
        self._vector = torch.zeros(channels, dtype=torch.float32, device=device)
        places = self.each(torch.arange(channels, dtype=torch.int32, device=device))
        small = sum(p.numel() for p in self.parameters if p.numel() <= SPREAD_NUMEL)
        index, written = (torch.empty(small, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
        offset = 0
        for p, place, excess in zip(self.parameters, places, self.each(self._vector), strict=True):
            if p.numel() > SPREAD_NUMEL:
                self._coarse[0].append(p)
                self._coarse[1].append(excess)
                continue
            strides = torch.empty_like(p, device="meta").stride()  # those of the gradient, also for channels_last
            index.as_strided(p.shape, strides, offset).copy_(place)
            self._fine[0].append(p)
            self._fine[1].append(written.as_strided(p.shape, strides, offset))
            offset += p.numel()
        self._written_out = written, index

    def hold(self, excess: list[Tensor]) -> None:
        """Use this excess from now on."""
        self.excess, self._mean = excess, None
        if self.granularity == "element":
            self._fine = self.parameters, excess
        elif self._written_out is not None:
            self._vector.copy_(excess[0])
            written, index = self._written_out
            torch.index_select(self._vector, 0, index, out=written)

    def each_scale(self, excess: list[Tensor]) -> list[Tensor]:
        """s = 1 + e of each parameter; exact, as is the way back, because e came from such an s."""
        alike = [1 + e for e in excess]
        return alike if self.granularity == "element" else self.each(alike[0])

    def excess_of(self, each_scale: list[Tensor]) -> list[Tensor]:
        """What `each_scale` was given."""
        excess = [scale - 1 for scale in each_scale]
        if self.granularity == "element":
            return excess
        return [excess[0].view(1) if self.granularity == "global" else torch.cat([e.reshape(-1) for e in excess])]

    def scale(self, gate: Tensor | None) -> None:
        """Multiply the gradients at hand; `gate` is 1 or 0 as a device tensor of shape (), None means open.

        Not for "global", whose one factor is the whole matter.
        """
        (fine, fine_excess), (coarse, coarse_excess) = self._fine, self._coarse
        excess = [*fine_excess, *coarse_excess]
        gated = excess if gate is None else torch._foreach_mul(excess, gate)
        for parameters, factors in ((fine, gated[: len(fine)]), (coarse, gated[len(fine) :])):
            grads: list[Any] = [p.grad for p in parameters]
            if any(grad is None for grad in grads):
                pairs = [(g, e) for g, e in zip(grads, factors, strict=True) if g is not None]
                grads, factors = [g for g, _ in pairs], [e for _, e in pairs]
            if grads:
                torch._foreach_addcmul_(grads, grads, factors)

    def mean(self) -> Tensor | float:
        """Mean scale over all elements, shape (); computed once for what is held."""
        if self.excess is None:
            return 1.0
        if self._mean is not None:
            return self._mean
        each = self.excess if self.granularity == "element" else self.each(self.excess[0])
        # No mean of each: that of a tensor without elements is NaN.
        sums = [e.sum() * (p.numel() / max(1, e.numel())) for p, e in zip(self.parameters, each, strict=True)]
        self._mean = 1 + torch.stack(sums).sum() / sum(p.numel() for p in self.parameters)
        return self._mean

    def tensors(self) -> list[Tensor]:
        """All that is held on the device."""
        vector = [self._vector] if self._written_out is not None else []
        return [*(self.excess or []), *(self._written_out or ()), *vector]
