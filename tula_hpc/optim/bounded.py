"""SGD at a rate in proportion to the batch, with each tensor's step kept between two shares of its weights.

A rate in proportion to the batch (Goyal et al. 2017, arXiv 1706.02677) diverges where a few tensors get steps that are
large beside their weights, and plain large-batch training stands still where all steps are small beside them. So the
gradient of each tensor is multiplied by

    scale = min(cap / r, clamp(floor / r, 1, scale_cap)),   r = lr · |g| / |w|

which leaves r alone between floor and cap, shortens what is longer, and lengthens what is shorter, at most scale_cap
times. LARS (You et al. 2017, arXiv 1708.03888) makes r the same for all tensors and steps; here it has a range.

    optimizer = BoundedOptimizer(SGD(model.parameters(), lr=0.08, momentum=0.9), global_batch=1024, small_batch=128)
    ...
    optimizer.bound_factor = bound_factor(epochs_done, epochs=90, warmup_epochs=5)  # before each step
    optimizer.step()

The rate is the caller's, `lr` = B / b times the one tuned for b, with a warm-up. r counts the gradient alone: neither
momentum, which makes a lasting step 1 / (1 - momentum) times as long, nor weight decay.

Steps that stay long keep a training from settling, bounds that follow the rate's decays end it too early, and a model
without normalisation does not begin with long ones: floor and cap rise with the warm-up and then fall to the end of the
training, as `bound_factor` says (`tula_hpc.optim.schedules`).

Biases and the weights of normalisation begin at 0 or 1, and a share of that says nothing about a good step: tensors of
one dimension, and others whose weights are hardly anything yet, take the scale of the whole model's gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tula_hpc.optim import gradients
from tula_hpc.optim.notices import Notices
from tula_hpc.optim.wrapper import WrappedOptimizer

NEAR_ZERO = 0.01
"""A tensor whose root mean square is below this share of the whole model's is taken for not begun yet."""
TINY = 1e-12


class BoundedOptimizer(WrappedOptimizer):
    """An SGD that steps with bounded gradients. Parameter groups with `ags=False` are left as they are and do not
    count, nor do those whose `lr` is the number 0, as a warm-up may begin: there is no step to bound. An
    `lr` that is a tensor of 0 leaves gradients as they are as well.

    `step()` multiplies `.grad` in place and never waits for the device. It keeps nothing from one step to the next, so
    all ranks of DDP, which have the same gradients, take the same step. Gradients must not be multiplied by a loss
    scale: call `scaler.unscale_(optimizer)` before. Inactive, and `step()` is the inner optimizer's, when
    `global_batch` is not larger than `small_batch`.

    Args:
        optimizer: The inner optimizer. Made for SGD: those that divide by the size of the gradient undo the scales.
        global_batch: Samples in one step over all ranks (B).
        small_batch: The batch that the learning rate was tuned for (b).
        step_floor: Smallest r, a share, at a `bound_factor` of 1; 0: none.
        step_cap: Largest r, likewise.
        scale_cap: What a gradient is multiplied by at most.

    Attributes:
        bound_factor: Multiplies floor and cap in the coming step, the caller's to set; left at 1, the bounds stay.

    Raises:
        ValueError: On settings out of range, sharded parameters (FSDP), and on LBFGS; by `step` on sparse and complex
            gradients and gradients of several devices.
    """

    own_key = "bounds"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        global_batch: int,
        small_batch: int,
        step_floor: float = 0.007,
        step_cap: float = 0.01,
        scale_cap: float = 10.0,
    ):
        super().__init__(optimizer)
        self.active = global_batch > small_batch
        self.step_floor, self.step_cap, self.scale_cap = step_floor, step_cap, scale_cap
        problems = _problems(self, global_batch, small_batch)
        if problems:
            raise ValueError(f"BoundedOptimizer: {' '.join(problems)}")
        gradients.refuse_sharded(self._parameters())
        self.bound_factor = 1.0
        self._scales: Tensor | None = None  # of the last step, one for each tensor
        self._sizes: Tensor | None = None
        if "sgd" not in type(optimizer).__name__.lower():
            name = type(optimizer).__name__
            Notices().say(f"{name} is not known as an SGD: the bounds are those of SGD's step.")

    @torch._disable_dynamo  # a traced step loses what it sets on an optimizer
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Bound the gradients, then let the inner optimizer step. Returns the closure's loss."""
        loss = self._evaluated(closure)
        if self.active:
            self._bound()
        self.optimizer.step()
        return loss

    def _bound(self) -> None:
        groups = [
            ([p for p in group["params"] if p.grad is not None], group["lr"])
            for group in self.param_groups
            if group.get("ags", True) and not _is_zero(group["lr"])
        ]
        groups = [(members, lr) for members, lr in groups if members]
        if not groups:
            self._scales = None
            return
        parameters = [p for members, _ in groups for p in members]
        found: list[Any] = [p.grad for p in parameters]
        self._refuse_unusual(found)
        layout = _layout(tuple((p.ndim, p.numel()) for p in parameters), found[0].device)
        weights, steps = gradients.norms([*parameters, *found]).split(len(parameters))
        rates = [lr for _, lr in groups]
        if len(set(rates)) == 1:
            steps = steps * rates[0]
        else:
            lengths = steps.split([len(members) for members, _ in groups])
            steps = torch.cat([length * lr for length, lr in zip(lengths, rates, strict=True)])
        self._scales, self._sizes = self._scales_of(weights, steps, layout.near_zero), layout.sizes
        any_rate_on_device = any(isinstance(lr, Tensor) for lr in rates)
        if any_rate_on_device:  # a rate of 0, which nobody may look at, bounds nothing either
            self._scales = torch.where(steps > 0, self._scales, gradients.constant(1.0, steps.device))
        # On many tensors at once torch has a kernel for a number that all share, and none for a number each: given a
        # list, it copies the numbers one by one as well.
        each = self._scales.unbind()
        if any_rate_on_device:
            alone: Sequence[int] = range(len(found))
        else:
            alone = layout.others
            if layout.vectors:
                torch._foreach_mul_([found[i] for i in layout.vectors], each[layout.vectors[0]])
        for i in alone:
            found[i].mul_(each[i])

    def _scales_of(self, weights: Tensor, steps: Tensor, near_zero: Tensor) -> Tensor:
        """What to multiply each gradient by, from the norms of weights and of rate x gradient: (tensors,) each."""
        all_weights = weights.norm()
        follows = weights < all_weights * near_zero
        ratios = torch.where(follows, steps.norm() / all_weights, steps / weights)
        inverse = ratios.add_(TINY).reciprocal_()
        raised = (inverse * (self.step_floor * self.bound_factor)).clamp_(1.0, self.scale_cap)
        bounded = torch.minimum(inverse.mul_(self.step_cap * self.bound_factor), raised)
        # a model whose weights are all 0 has to begin somehow
        return torch.where(all_weights > 0, bounded, gradients.constant(1.0, bounded.device))

    @property
    def mean_scale(self) -> Tensor | float:
        """Mean over all elements of what the last step's gradients were multiplied by: a number, or of shape () on the
        device. 1 where nothing was multiplied, as before the first step."""
        if self._scales is None or self._sizes is None:
            return 1.0
        return torch.dot(self._scales, self._sizes) / self._sizes.sum()

    def statistics(self) -> dict[str, float]:
        """Numbers for a log, of the last step; none before the first one whose rate is not 0. The only method that
        waits for the device.

        `mean_scale` as above, left out if it is not finite; `raised_fraction` and `lowered_fraction` are the shares of
        tensors whose gradients were lengthened and shortened.
        """
        if self._scales is None:
            return {}
        shares = {"raised_fraction": self._scales > 1, "lowered_fraction": self._scales < 1}
        values = {"mean_scale": float(self.mean_scale)} | {k: float(v.float().mean()) for k, v in shares.items()}
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def __repr__(self) -> str:
        bounds = f"step_floor={self.step_floor}, step_cap={self.step_cap}, scale_cap={self.scale_cap}"
        return f"BoundedOptimizer({bounds}, active={self.active}) of {self.optimizer!r}"

    def _own_state(self) -> dict[str, Any]:
        return {"version": 1}

    def _load_own_state(self, saved: dict[str, Any]) -> None:
        pass

    def _forget(self) -> None:
        pass


def _is_zero(lr: float | Tensor) -> bool:
    """Never of a rate in a tensor, which may lie on the device."""
    return not isinstance(lr, Tensor) and lr == 0


class _Layout(NamedTuple):
    """What does not change of some tensors."""

    vectors: list[int]
    """Places of those of one dimension or none."""
    others: list[int]
    sizes: Tensor
    """Elements of each, fp32, (tensors,)."""
    near_zero: Tensor
    """Share of the whole model's norm below which each takes the whole model's scale, fp32, (tensors,)."""


@functools.lru_cache(maxsize=16)
def _layout(shapes: tuple[tuple[int, int], ...], device: torch.device) -> _Layout:
    """Of tensors of so many dimensions and elements; made once, because the copy to the device takes its time."""
    is_vector = torch.tensor([dimensions <= 1 for dimensions, _ in shapes])
    sizes = torch.tensor([float(elements) for _, elements in shapes], dtype=torch.float32)
    # Without elements both norms are 0, and so a tensor has no ratio of its own.
    near_zero = (NEAR_ZERO * (sizes / sizes.sum()).sqrt()).masked_fill(is_vector | (sizes == 0), math.inf)
    vectors, others = is_vector.nonzero().flatten().tolist(), (~is_vector).nonzero().flatten().tolist()
    return _Layout(vectors, others, sizes.to(device, non_blocking=True), near_zero.to(device, non_blocking=True))


def _problems(optimizer: BoundedOptimizer, global_batch: int, small_batch: int) -> list[str]:
    """One sentence per bad argument."""
    problems = []
    for name, batch in (("global_batch", global_batch), ("small_batch", small_batch)):
        if batch < 1:
            problems.append(f"{name} is {batch}, but must be at least 1.")
    floor, cap = optimizer.step_floor, optimizer.step_cap
    if not 0 <= floor <= cap or cap == 0:
        problems.append(
            f"step_floor is {floor} and step_cap {cap}, but 0 <= step_floor <= step_cap is needed, cap > 0."
        )
    if optimizer.scale_cap < 1:
        problems.append(f"scale_cap is {optimizer.scale_cap}, but must be at least 1.")
    if isinstance(optimizer.optimizer, torch.optim.LBFGS):
        problems.append("LBFGS evaluates many gradients in one step, there is none to bound; use SGD.")
    return problems
