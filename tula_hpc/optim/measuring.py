"""How a scale is measured: the small batch's gradient, from wherever it comes, against the step's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tula_hpc.optim import reference, scales
from tula_hpc.optim.gradients import world_size
from tula_hpc.optim.notices import Notices
from tula_hpc.optim.reference import LocalNorms, Reference
from tula_hpc.optim.scales import Granularity

Squares = list[Tensor]


@dataclass
class SubBatchPass:
    """What a pass over a part of the batch needs; see `TulaOptimizer.refresh`."""

    model: torch.nn.Module
    loss_fn: reference.LossFn
    inputs: Any
    targets: Any


@dataclass
class Meter:
    """Measures scales and keeps their averages. The settings are `TulaOptimizer`'s."""

    granularity: Granularity
    reference: Reference
    refresh_samples: int
    scale_smoothing: float
    exponent: float
    s_min: float | None
    s_max: float | None
    eps: float
    printed_ratio: bool
    seed: int
    process_group: dist.ProcessGroup | None
    draws: int = 0
    """Sub-batches drawn so far."""
    averages: tuple[Squares, Squares] | None = None
    """Moving averages over refreshes of the small and the large batch's squares."""
    _noted: Squares = field(default_factory=list)
    _local: LocalNorms | None = None
    _notices: Notices = field(default_factory=Notices)

    def problems(self, small_batch: int | None) -> list[str]:
        """One sentence for each bad setting."""
        problems = []
        if self.refresh_samples < 1:
            problems.append(f"refresh_samples is {self.refresh_samples}, but must be at least 1.")
        for name in ("eps", "exponent"):
            if getattr(self, name) <= 0:
                problems.append(
                    f"{name} is {getattr(self, name)}, but must exceed 0; leave it out for the usual value."
                )
        if not 0 <= self.scale_smoothing < 1:
            problems.append(f"scale_smoothing is {self.scale_smoothing}, but must lie in [0, 1); 0 forgets the past.")
        if self.s_min is not None and not 0 <= self.s_min <= 1:
            problems.append(f"s_min is {self.s_min}, but must lie in [0, 1]; None means 1 / s_max.")
        if self.s_max is not None and self.s_max < 1:
            problems.append(f"s_max is {self.s_max}, but must be at least 1; None means (B / b) ** (exponent / 2).")
        for name, choices in {"granularity": get_args(Granularity), "reference": get_args(Reference)}.items():
            if getattr(self, name) not in choices:
                problems.append(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}.")
        printed = {"granularity": "element", "reference": "subbatch", "refresh_samples": 1}
        printed |= {"scale_smoothing": 0, "exponent": 1}
        if self.printed_ratio and any(getattr(self, name) != value for name, value in printed.items()):
            needs = ", ".join(f"{name} {value}" for name, value in printed.items())
            problems.append(f"printed_ratio needs {needs}; set them so or leave it out.")
        if self.reference != "local":
            return problems
        if world_size(self.process_group) == 1:
            problems.append(
                "reference is 'local', which compares ranks, but there is one rank only (or torch.distributed is not "
                "initialised yet); use 'microbatch' with gradient accumulation, else 'subbatch'."
            )
        if self.granularity not in ("tensor", "global"):
            problems.append(f"granularity is {self.granularity!r}, but reference 'local' needs tensor or global.")
        if small_batch is not None:
            problems.append(f"small_batch is {small_batch}, but reference 'local' makes it global_batch / ranks.")
        return problems

    def reference_batch(self, global_batch: int, small_batch: int | None) -> int:
        """Samples whose mean gradient is compared with that of `global_batch`."""
        ranks = world_size(self.process_group)
        if small_batch is None:  # the reference is "local"
            return global_batch // ranks
        if self.reference == "microbatch":
            return small_batch
        # As many on each rank, and BatchNorm cannot normalise a single sample.
        return max(2, math.ceil(small_batch / ranks)) * ranks

    def measure(
        self,
        parameters: list[Tensor],
        global_batch: int,
        small_batch: int | None,
        batch: SubBatchPass | None,
        loss_scale: float | Tensor,
    ) -> tuple[list[Tensor], Tensor] | None:
        """The scales of parameters that all have a gradient, and whether they mean anything, bool of shape (): an
        overflow voids them, on all ranks alike. None if the batch at hand does not allow a measurement."""
        reference_batch = self.reference_batch(global_batch, small_batch)
        g_large: list[Any] = [p.grad for p in parameters]
        large = scales.squared_magnitudes(g_large, self.granularity)
        g_small: list[Tensor] = []
        if self.reference != "subbatch":
            small = self._noted_squares(parameters, large, loss_scale)
        elif batch is None:
            raise TypeError(
                "TulaOptimizer.refresh needs model, loss_fn and inputs (and targets, if the loss does) to measure a "
                "sub-batch."
            )
        else:
            small = []
            for g_small in self._sub_batches(batch, parameters, reference_batch, global_batch, loss_scale):
                squares = scales.squared_magnitudes(g_small, self.granularity)
                small = [a + b for a, b in zip(small, squares, strict=True)] if small else squares
            if small and self.refresh_samples > 1:
                torch._foreach_div_(small, self.refresh_samples)
        if not small:
            return None
        finite = scales.finite(small, large)
        s_max = self.s_max or (global_batch / reference_batch) ** (self.exponent / 2)
        if self.printed_ratio:
            pairs = zip(g_small, g_large, strict=True)
            return [scales.printed_ratio(a, b, eps=self.eps, s_max=s_max) for a, b in pairs], finite
        if self.scale_smoothing:
            small, large = self._average(small, large, finite)
        s_min = 1 / s_max if self.s_min is None else self.s_min
        found = scales.scales_of(small, large, eps=self.eps, exponent=self.exponent, s_min=s_min, s_max=s_max)
        return found, finite

    def _sub_batches(
        self,
        batch: SubBatchPass,
        parameters: list[Tensor],
        reference_batch: int,
        global_batch: int,
        loss_scale: float | Tensor,
    ) -> Iterator[list[Tensor]]:
        """The gradients of `refresh_samples` sub-batches, averaged over ranks; none if a rank's batch is too short."""
        ranks = world_size(self.process_group)
        batch_per_rank = reference_batch // ranks
        local_batch = reference.batch_size(batch.inputs)
        fits = batch_per_rank < local_batch and reference_batch < global_batch
        if not fits:
            self._notices.say(
                f"AGS keeps its scale: {batch_per_rank} samples are no proper part of a rank's batch of {local_batch}; "
                "lower small_batch, or refresh on full batches."
            )
        if not reference.holds_everywhere(fits, parameters[0].device, self.process_group):
            return
        for _ in range(self.refresh_samples):
            self.draws += 1
            index = reference.random_subset(local_batch, batch_per_rank, seed=self.seed + self.draws)
            own = reference.side_gradients(
                reference.unwrapped(batch.model),
                batch.loss_fn,
                reference.take(batch.inputs, index),
                reference.take(batch.targets, index),
                parameters,
                loss_scale=loss_scale,
            )
            yield reference.average_over_ranks(own, self.process_group)

    def note_microbatch(self, parameters: list[Tensor], num_microbatches: int) -> None:
        """Keep the squares of the gradients at hand, for the coming measurement."""
        g_small: list[Any] = [p.grad for p in parameters]
        self._noted = scales.squared_magnitudes(g_small, self.granularity)
        torch._foreach_mul_(self._noted, float(num_microbatches**2))

    def watch(self, model: Any, hook: Callable[[Any, Any], Any] | None, state: Any, due: Callable[[], bool]) -> None:
        """Register the communication hook that notes each rank's gradient norms."""
        if hook is None:
            hook, state = allreduce_hook, self.process_group or model.process_group
        self._local = LocalNorms(hook, state, due)
        model.register_comm_hook(None, self._local.hook)

    def _noted_squares(self, parameters: list[Tensor], like: Squares, loss_scale: float | Tensor) -> Squares:
        """The squares that were noted, averaged over ranks; empty if a rank has none."""
        noted, self._noted = self._noted, []
        own: Squares | None = noted
        if self.reference == "local":
            found = None if self._local is None else self._local.take(parameters)
            own = None if found is None else [found if self.granularity == "tensor" else found.sum(0, keepdim=True)]
        elif len(noted) != len(like) or any(a.shape != b.shape for a, b in zip(noted, like, strict=True)):
            own = None
        if own is None:
            first = "watch(model)" if self.reference == "local" else "observe_microbatch(...) in each step"
            self._notices.say(
                "AGS keeps its scale: no gradients of a small batch were noted for all parameters before the refresh; "
                f"call {first} first."
            )
        if not reference.holds_everywhere(own is not None, like[0].device, self.process_group) or own is None:
            return []
        torch._foreach_mul_(own, 1 / loss_scale**2)
        return reference.average_over_ranks(own, self.process_group)

    def _average(self, small: Squares, large: Squares, finite: Tensor) -> tuple[Squares, Squares]:
        """Let the squares enter their moving averages. These start at 0: what is missing cancels in the ratio."""
        if self.averages is None:
            self.averages = [torch.zeros_like(s) for s in small], [torch.zeros_like(s) for s in large]

        def moved(held: Squares, latest: Squares) -> Squares:
            later = torch._foreach_lerp(held, latest, 1 - self.scale_smoothing)
            return [torch.where(finite, new, old) for new, old in zip(later, held, strict=True)]

        self.averages = moved(self.averages[0], small), moved(self.averages[1], large)
        return self.averages

    def forget(self) -> None:
        """Drop what was measured."""
        self.averages, self._noted = None, []

    def tensors(self) -> list[Tensor]:
        """All that is held on the device."""
        return [*self._noted, *(square for squares in self.averages or () for square in squares)]

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError("A TulaOptimizer with a process_group of its own cannot be copied; copy its state_dict().")
        return self.__dict__ | {"_local": None}  # the hook stays with the model that it is registered on
