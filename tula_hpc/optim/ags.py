"""Adaptive gradient scaling (AGS), Algorithm 1 of the paper, around any torch optimizer.

A large batch averages away the noise that helps a small one generalise. AGS multiplies the large batch's gradient by
the ratio of the two gradients' magnitudes, measured now and then on a sub-batch, but only while training is calm:

    every step:     compare the gradient's squared norm with the last step's: Δ, Eq. (5)
                    if Δ < δ, multiply the gradient by the scale; otherwise the phase is sensitive: leave it alone
                    let the inner optimizer step
    now and then:   (`refresh`, between backward and step) take a sub-batch of the batch at hand, at the same weights;
                    scale = |g_small| / |g_large|, at most sqrt(B / b); it acts from the next step on

    optimizer = TulaOptimizer(SGD(model.parameters(), lr=0.01, momentum=0.9), global_batch=1024, small_batch=128)
    loss.backward(); optimizer.step()                                # any training loop, LR schedule, GradScaler, DDP
    optimizer.refresh(model, loss_fn, inputs, targets)               # say once an epoch, between these two calls

| code name         | paper              | meaning                                                                    |
|-------------------|--------------------|----------------------------------------------------------------------------|
| `global_batch`    | B, b_large         | samples in one optimizer step over all ranks                               |
| `small_batch`     | b, b_small         | the batch whose noise is wanted: the learning rate was tuned for it        |
| `scale`           | gradscale, s       | what multiplies a gradient, for each element or coarser (`granularity`)    |
| `s_max`, `s_min`  | s_max, s_min       | bounds of the scale; s_max = sqrt(B / b)                                   |
| `delta_threshold` | δ                  | the gate: a step whose variability reaches it stays unscaled               |
| `variability`     | Δ(G)               | relative change of the squared gradient norm since the last step           |
| `eps`             | ε of line 16       | keeps the ratio finite; not the rate coefficient ε of Lemma 1              |

Where the paper leaves a choice: the sub-batch is evaluated before the update, so both gradients differ by the batch
only; scaling comes before momentum and weight decay is not scaled, as for any wrapper; Δ sees all gradients as they
arrive, averaged over ranks, unscaled. Lemma 1 takes the scale as independent of the step's batch: true of the "lagged"
gate and of "off", but the printed gate ("current") looks at the step's own gradient.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from tula_hpc.optim import gradients
from tula_hpc.optim.gradients import Granularity

Gate = Literal["current", "lagged", "off"]
"""Whose variability decides: this step's, the last step's, or nobody's (the scale always acts)."""

LossFn = Callable[[Any, Any], Tensor]


def _forwarded(name: str) -> Any:
    """An attribute that is the inner optimizer's own, always: a reference kept here goes stale in `load_state_dict`."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


class TulaOptimizer(torch.optim.Optimizer):
    """A torch optimizer that steps with scaled gradients. Parameter groups with `ags=False` are never scaled.

    `step()` multiplies `.grad` in place and never waits for the device. Order of calls with mixed precision and
    clipping: `backward`, `scaler.unscale_(optimizer)`, `refresh`, `observe_norm(clip_grad_norm_(...))`, `step`.
    AGS is inactive, and `step()` is the inner optimizer's, when `global_batch` is not larger than `small_batch`.

    Args:
        optimizer: The inner optimizer. Made for SGD: optimizers that normalise the gradient divide the scale out again.
        global_batch: Samples in one step over all ranks and accumulated micro-batches (B).
        small_batch: The batch whose gradient noise is wanted (b). Not needed with `static_scale`.
        delta_threshold: δ. A squared norm that moves by this share or more marks a sensitive step.
        granularity: What shares one scale: "element" as printed, "channel", "tensor" or "global".
        gate: "current" as printed, "lagged" (Δ of the last step) or "off" (always scale).
        s_min: Smallest scale; None means 1 / s_max.
        eps: ε, added to the magnitude of the large batch's gradient.
        refresh_samples: Sub-batches drawn by one `refresh`; their magnitudes are averaged as root mean square.
        static_scale: Eq. (8): this scale for every gradient while the gate is open, and no `refresh`.
        printed_ratio: Line 16 to the letter, signed ε and no floor; see `TulaOptimizer.paper`.
        seed: Of the choice of sub-batches. The global random stream is not used.
        process_group: The ranks that share a batch; None means all.
    """

    _scales: dict[Tensor, Tensor]  # multiplies a parameter's gradient from now on; not there: the gradient stays
    _pending: dict[Tensor, Tensor] | None  # measured at this step, to act from the next one on
    _squared_norm: Tensor | None  # |G|² of the last step that had a finite one
    _variability: Tensor | None  # Δ of the last step
    _observed: Tensor | None  # |G|² of the coming step, if the caller knows it

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        global_batch: int,
        small_batch: int | None = None,
        delta_threshold: float = 0.5,
        granularity: Granularity = "element",
        gate: Gate = "current",
        s_min: float | None = None,
        eps: float = 1e-8,
        refresh_samples: int = 1,
        static_scale: float | None = None,
        printed_ratio: bool = False,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ):
        self.optimizer = optimizer
        self.global_batch = global_batch
        self.small_batch = small_batch
        self.delta_threshold = delta_threshold
        self.granularity: Granularity = granularity
        self.gate: Gate = gate
        self.s_min = s_min
        self.eps = eps
        self.refresh_samples = refresh_samples
        self.static_scale = static_scale
        self.printed_ratio = printed_ratio
        self.seed = seed
        self.process_group = process_group
        problems = _setting_problems(self)
        if problems:
            raise ValueError(f"TulaOptimizer: {' '.join(problems)}")
        gradients.refuse_sharded(self._parameters())

        # What the base constructor does apart from parameters and state, which we forward: hooks and the hooked step.
        super().__setstate__({})
        self._warned: set[str] = set()
        self._steps = 0
        self._draws = 0
        self._scaled_steps: Tensor | float = 0.0
        self._forget()
        self._warn_unless_useful()

    @classmethod
    def paper(
        cls, optimizer: torch.optim.Optimizer, *, global_batch: int, small_batch: int, **others: Any
    ) -> TulaOptimizer:
        """Algorithm 1 as printed: a scale per element, current gate, no floor (so weights of dead units freeze)."""
        printed: dict[str, Any] = {"granularity": "element", "gate": "current", "s_min": 0.0, "printed_ratio": True}
        return cls(optimizer, global_batch=global_batch, small_batch=small_batch, **printed, **others)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Scale the gradients if the gate is open, then let the inner optimizer step. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.active:
            self._scale_gradients()
        self.optimizer.step()
        if self._pending is not None:
            self._scales, self._pending = self._pending, None
        return loss

    def _scale_gradients(self) -> None:
        found = list(self._gradients().values())
        if not found:
            return
        gradients.refuse_unusual(found)
        norm = gradients.squared_norm(found) if self._observed is None else self._observed.to(found[0].device)
        previous = torch.zeros_like(norm) if self._squared_norm is None else self._squared_norm
        variability = gradients.gradient_variability(norm, previous)
        gate_open = self._gate_is_open(variability)
        self._apply(gate_open)
        self._variability = variability
        # A norm that is not finite is not worth comparing the next step with.
        self._squared_norm = torch.where(norm.isfinite(), norm, previous)
        self._observed = None

    def _gate_is_open(self, variability: Tensor) -> Tensor:
        """Whether this step is scaled, as a device tensor: a branch on the host would wait, and split the ranks."""
        if self.gate == "off":
            return torch.ones_like(variability, dtype=torch.bool)
        deciding = variability if self.gate == "current" else self._variability
        if deciding is None:
            return torch.zeros_like(variability, dtype=torch.bool)
        return deciding < self.delta_threshold

    def _apply(self, gate_open: Tensor) -> None:
        """Multiply the gradients by their scale where the gate is open, and count the step."""
        self._steps += 1
        found = self._gradients(scaled_only=True)
        if self.static_scale is None:
            found = {p: grad for p, grad in found.items() if p in self._scales}
        if not found:
            return
        scales = [self._scales[p] for p in found if p in self._scales]
        if self.static_scale is not None:
            torch._foreach_mul_(list(found.values()), torch.where(gate_open, self.static_scale, 1.0))
        elif self.granularity == "global":
            torch._foreach_mul_(list(found.values()), torch.where(gate_open, scales[0], 1.0))
        else:
            # s or 1, as 1 + open (s - 1): one `where` per tensor takes ten times as long as these calls. It needs one
            # more copy of the scales for a moment, at a time when the activations are gone.
            factors = torch._foreach_sub(scales, 1.0)
            torch._foreach_mul_(factors, gate_open.float())
            torch._foreach_add_(factors, 1.0)
            torch._foreach_mul_(list(found.values()), factors)
        self._scaled_steps = self._scaled_steps + gate_open.float()

    def observe_norm(self, total_norm: Tensor) -> None:
        """Use this L2 norm of all gradients for the next step's Δ: what `clip_grad_norm_` returns, before clipping.

        Clipped gradients have a nearly constant norm, so that Δ of them would call every step calm.
        """
        self._observed = total_norm.detach().float().square()

    @torch.no_grad()
    def refresh(
        self, model: torch.nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, *, loss_scale: float | Tensor = 1.0
    ) -> None:
        """Measure a new scale on a part of the batch at hand. The coming `step()` does not use it, the ones after do.

        Call it on every rank after `backward` and before `step()`, when `.grad` holds the mean gradient of a *full*
        batch, neither clipped nor multiplied by a loss scale, and under the same autocast as the forward pass. It
        costs one forward and backward pass over small_batch / ranks samples per sub-batch and one all-reduce of the
        gradients; while it runs, up to three fp32 copies of the model more. Buffers, `.grad`, the random stream and
        DDP stay untouched. Does nothing under a static scale or while AGS is inactive.

        Args:
            model: Called as `model(inputs)`; DDP and compiled modules are unwrapped.
            loss_fn: Mean loss of `(outputs, targets)`.
            inputs: This rank's batch (or its last micro-batch): a tensor, or tensors in a tuple, list or dict.
            targets: Likewise.
            loss_scale: Multiplies the sub-batch loss and divides its gradients, against underflow in fp16; pass
                `scaler.get_scale()`.
        """
        if not self.active or self.static_scale is not None or self.small_batch is None:
            return
        found = self._gradients(scaled_only=True)
        gradients.refuse_unusual(found.values())
        world_size = gradients.world_size(self.process_group)
        # BatchNorm cannot normalise a single sample.
        batch_per_rank = max(2, math.ceil(self.small_batch / world_size))
        local_batch = gradients.num_samples(inputs)
        fits = batch_per_rank < local_batch and batch_per_rank * world_size < self.global_batch
        if not fits:
            self._warn_once(
                f"AGS keeps its scale: {batch_per_rank} samples are no proper part of a rank's batch of {local_batch}; "
                f"lower small_batch, now {self.small_batch}, or refresh on full batches."
            )
        if not found or (world_size == 1 and not fits):
            return

        def small_gradients() -> Iterator[list[Tensor]]:
            for _ in range(self.refresh_samples):
                self._draws += 1
                own = None
                if fits:
                    index = gradients.random_subset(local_batch, batch_per_rank, seed=self.seed + self._draws)
                    batch = gradients.take(inputs, index), gradients.take(targets, index)
                    module = gradients.unwrapped(model)
                    own = gradients.side_gradients(module, loss_fn, *batch, list(found), loss_scale=loss_scale)
                yield gradients.average_over_ranks(own, list(found), self.process_group)

        s_max = math.sqrt(self.global_batch / (batch_per_rank * world_size))
        s_min = 1 / s_max if self.s_min is None else self.s_min
        measured = gradients.measured_scales(
            list(found.values()), small_gradients(), self.granularity, self.eps, s_min, s_max, self.printed_ratio
        )
        # An overflow voids the measurement, on all ranks alike, since all see the same averages.
        scales = zip(found, measured.scales, strict=True)
        self._pending = {p: torch.where(measured.finite, scale, self._scales.get(p, 1.0)) for p, scale in scales}

    @property
    def active(self) -> bool:
        """Whether gradients are watched and may be scaled."""
        return self.static_scale is not None or (self.small_batch is not None and self.global_batch > self.small_batch)

    def set_batch(self, global_batch: int) -> None:
        """Go on with another global batch: the last norm and the scale belong to the old one and are dropped."""
        if global_batch < 1:
            raise ValueError(f"global_batch is {global_batch}, but must be at least 1.")
        if global_batch != self.global_batch:
            self.global_batch = global_batch
            self._forget()
            self._warn_unless_useful()

    def statistics(self) -> dict[str, float]:
        """Numbers for a log. The only method that waits for the device: call it every so many steps.

        `gradient_variability` is Δ of the last step (infinite at the first, NaN before it) and `norm` its gradient
        norm; `scaled_fraction` is the share of all steps whose gradients were scaled; `mean_scale` is the mean over
        all elements of the scale now held, which acts while the gate is open (1 before the first `refresh`).
        """
        held = [(self._scales[p].mean() * p.numel(), p.numel()) for p in self._parameters(True) if p in self._scales]
        mean_scale: Tensor | float = 1.0 if self.static_scale is None else self.static_scale
        if held:
            mean_scale = torch.stack([total for total, _ in held]).sum() / sum(count for _, count in held)
        values = {
            "gradient_variability": math.nan if self._variability is None else self._variability,
            "scaled_fraction": self._scaled_steps / max(1, self._steps),
            "mean_scale": mean_scale,
            "norm": math.nan if self._squared_norm is None else self._squared_norm.sqrt(),
        }
        return {name: float(value) for name, value in values.items()}

    def state_bytes(self) -> int:
        """Bytes AGS holds now besides the inner optimizer; with "element", one fp32 copy of the model."""
        held = [*self._scales.values(), *(self._pending or {}).values(), self._squared_norm, self._variability]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t is not None}
        return sum(storages.values())

    param_groups = _forwarded("param_groups")
    state = _forwarded("state")
    defaults = _forwarded("defaults")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; it stays unscaled until the next `refresh`."""
        self.optimizer.add_param_group(param_group)
        gradients.refuse_sharded(self.optimizer.param_groups[-1]["params"])

    def __repr__(self) -> str:
        return (
            f"TulaOptimizer(global_batch={self.global_batch}, small_batch={self.small_batch}, "
            f"granularity={self.granularity}, gate={self.gate}, static_scale={self.static_scale}) of {self.optimizer!r}"
        )

    def state_dict(self) -> dict[str, Any]:
        """{"inner": the inner optimizer's state, "ags": ours}: tensors and plain values only."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        position = {p: i for i, p in enumerate(self._parameters())}
        ags = {
            "version": 1,
            "global_batch": self.global_batch,
            "small_batch": self.small_batch,
            "granularity": self.granularity,
            "steps": self._steps,
            "draws": self._draws,
            "scaled_steps": self._scaled_steps,
            "squared_norm": self._squared_norm,
            "variability": self._variability,
            "scales": {position[p]: scale for p, scale in self._scales.items()},
            "pending": None if self._pending is None else {position[p]: s for p, s in self._pending.items()},
        }
        state: dict[str, Any] = {"inner": self.optimizer.state_dict(), "ags": ags}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state = post_hook(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a plain state of the inner optimizer (with a warning).

        The norm and the scale are dropped if they were measured at another batch geometry or granularity.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        if "inner" in state_dict and "ags" in state_dict:
            self.optimizer.load_state_dict(state_dict["inner"])
            self._load(state_dict["ags"])
        elif "param_groups" in state_dict:
            warnings.warn(
                "This is the state of a plain optimizer: TulaOptimizer starts without a scale, until the next refresh.",
                stacklevel=2,
            )
            self.optimizer.load_state_dict(state_dict)
            self._forget()
        else:
            raise ValueError(
                f"TulaOptimizer.load_state_dict got the keys {sorted(state_dict)}, but needs 'inner' and 'ags', or the "
                "'state' and 'param_groups' of the inner optimizer; pass what state_dict() returned."
            )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, saved: dict[str, Any]) -> None:
        if saved["version"] != 1:
            raise ValueError(f"The AGS state has version {saved['version']}, but this code reads version 1 only.")
        parameters = self._parameters()
        self._forget()
        self._steps, self._draws = saved["steps"], saved["draws"]
        self._scaled_steps = float(saved["scaled_steps"])
        if any(saved[key] != getattr(self, key) for key in ("global_batch", "small_batch", "granularity")):
            return

        def loaded(value: Any) -> Any:
            if isinstance(value, dict):
                return {parameters[i]: loaded(scale) for i, scale in value.items()}
            return None if value is None else value.to(parameters[0].device, copy=True)

        self._squared_norm, self._variability = loaded(saved["squared_norm"]), loaded(saved["variability"])
        self._scales, self._pending = loaded(saved["scales"]), loaded(saved["pending"])

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError("A TulaOptimizer with a process_group of its own cannot be copied; copy its state_dict().")
        # Like torch's own optimizers, a copy has no hooks; "step" is there when a scheduler has patched this instance.
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.endswith("_hooks")}

    def _forget(self) -> None:
        """Drop what was measured; the next step counts as the first."""
        self._scales, self._pending = {}, None
        self._squared_norm = self._variability = self._observed = None

    def _parameters(self, scaled_only: bool = False) -> list[Tensor]:
        """All parameters in the order of the groups; `scaled_only` leaves out groups with `ags=False`."""
        groups = [g for g in self.param_groups if g.get("ags", True) or not scaled_only]
        return [p for group in groups for p in group["params"]]

    def _gradients(self, scaled_only: bool = False) -> dict[Tensor, Tensor]:
        """The parameters that have a gradient, with it; each once, even if it was given twice."""
        return {p: p.grad for p in self._parameters(scaled_only) if p.grad is not None}

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def _warn_unless_useful(self) -> None:
        name = type(self.optimizer).__name__
        if not self.active:
            self._warn_once(
                f"AGS is inactive: global_batch {self.global_batch} does not exceed small_batch {self.small_batch}, so "
                "there is no large batch to correct."
            )
        elif "sgd" not in name.lower():
            self._warn_once(
                f"{name} is not known as an SGD: an optimizer that divides by the size of the gradient, like Adam or "
                "LARS, divides the scale of AGS out again."
            )


def _setting_problems(optimizer: TulaOptimizer) -> list[str]:
    """One sentence per bad argument."""
    given = {name: value for name, value in vars(optimizer).items() if value is not None}
    problems = []
    for name in ("global_batch", "small_batch", "refresh_samples"):
        if given.get(name, 1) < 1:
            problems.append(f"{name} is {given[name]}, but must be at least 1.")
    for name in ("delta_threshold", "eps", "static_scale"):
        if given.get(name, 1) <= 0:
            problems.append(f"{name} is {given[name]}, but must exceed 0; leave it out for the usual value.")
    for name, choices in {"granularity": get_args(Granularity), "gate": get_args(Gate)}.items():
        if given[name] not in choices:
            problems.append(f"{name} is {given[name]!r}; choose one of {', '.join(choices)}.")
    if not 0 <= given.get("s_min", 0) <= 1:
        problems.append(f"s_min is {given['s_min']}, but must lie in [0, 1]; None means 1 / s_max.")
    if "small_batch" not in given and "static_scale" not in given:
        problems.append("small_batch is missing; give the batch the learning rate was tuned for, or a static_scale.")
    if optimizer.printed_ratio and (optimizer.granularity != "element" or optimizer.refresh_samples > 1):
        problems.append("printed_ratio needs granularity element and refresh_samples 1; set both or leave it out.")
    if isinstance(optimizer.optimizer, torch.optim.LBFGS):
        problems.append("LBFGS evaluates many gradients in one step, there is none to scale; use SGD.")
    return problems
