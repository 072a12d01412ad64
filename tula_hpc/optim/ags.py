"""Adaptive gradient scaling (AGS), Algorithm 1 of the paper, around any torch optimizer.

A large batch averages away the noise that helps a small one generalise. AGS multiplies the large batch's gradient by
the ratio of the two gradients' magnitudes, measured now and then on a small batch, but only while training is calm:

    every step:     compare the gradient's squared norm with the last step's: Δ, Eq. (5)
                    if Δ < δ, multiply the gradient by the scale; otherwise the phase is sensitive: leave it alone
                    let the inner optimizer step
    now and then:   (`refresh`, between backward and step) take a sub-batch of the batch at hand, at the same weights;
                    scale = |g_small| / |g_large|, at most sqrt(B / b); it acts from the next step on

    optimizer = TulaOptimizer(SGD(model.parameters(), lr=0.01), global_batch=1024, small_batch=128, refresh_every=100)
    loss.backward()                                                  # any training loop, LR schedule, GradScaler, DDP
    if optimizer.refresh_due:
        optimizer.refresh(model, loss_fn, inputs, targets)
    optimizer.step()

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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tula_hpc.optim import gradients
from tula_hpc.optim.fused import multiplies_by_itself, step_multiplied
from tula_hpc.optim.gate import Gate, GateKind
from tula_hpc.optim.measuring import Meter, SubBatchPass
from tula_hpc.optim.notices import Notices
from tula_hpc.optim.reference import LossFn, Reference
from tula_hpc.optim.scales import Granularity, Scales
from tula_hpc.optim.wrapper import WrappedOptimizer


class TulaOptimizer(WrappedOptimizer):
    """A torch optimizer that steps with scaled gradients. Parameter groups with `ags=False` are never scaled,
    and one that is added later is not until the next `refresh`.

    `step()` multiplies `.grad` in place and never waits for the device. Order of calls with mixed precision and
    clipping: `backward`, `scaler.unscale_(optimizer)`, `refresh`, `observe_norm(clip_grad_norm_(...))`, `step`.
    AGS is inactive, and `step()` is the inner optimizer's, when `global_batch` is not larger than `small_batch`.

    Args:
        optimizer: The inner optimizer. Made for SGD: optimizers that normalise the gradient divide the scale out again.
        global_batch: Samples in one step over all ranks and accumulated micro-batches (B).
        small_batch: The batch whose gradient noise is wanted (b). With the reference "microbatch" the samples that
            `observe_microbatch` sees the mean gradient of; not given with "local", where it is B / ranks, nor needed
            with `static_scale`.
        delta_threshold: δ. A squared norm that moves by this share or more marks a sensitive step.
        delta_smoothing: Weight of the past, in [0, 1), in an exponential moving average of the squared norm; Δ is then
            the average's change. 0, as printed: the squared norm itself.
        granularity: What shares one scale: "element" as printed, "channel", "tensor" or "global".
        gate: "current" as printed, "lagged" (Δ of the last step) or "off" (always scale; norms are not computed then).
        reference: Where the small batch's gradient comes from: "subbatch" (one more pass, as printed), "microbatch"
            (see `observe_microbatch`) or "local" (see `watch`).
        refresh_every: Steps from one `refresh` to the next that `refresh_due` asks for; None leaves it to the caller.
        first_refresh: Step, from 0, at which `refresh_due` asks for the first one; None: at once if `refresh_every` is
            given, else never.
        refresh_samples: Sub-batches drawn by one `refresh`; their magnitudes are averaged as root mean square.
        scale_smoothing: Weight of the past, in [0, 1), in exponential moving averages over refreshes of the two squared
            magnitudes that make a scale. 0, as printed: the last refresh alone.
        exponent: Power of the ratio: 1 as printed; 2 makes a "tensor" scale AdaScale's gain of that tensor.
        s_min: Smallest scale; None means 1 / s_max.
        s_max: Largest scale; None means (B / b) ** (exponent / 2).
        eps: ε, added to the magnitudes of both gradients.
        static_scale: Eq. (8): this scale for every gradient while the gate is open, and no `refresh`.
        printed_ratio: Line 16 to the letter, signed ε and no floor; see `TulaOptimizer.paper`.
        seed: Of the choice of sub-batches. The global random stream is not used.
        process_group: The ranks that share a batch; None means all.

    Raises:
        ValueError: On settings that contradict each other, sharded parameters (FSDP), and on LBFGS; by `step` and
            `refresh` on sparse and complex gradients and gradients of several devices.
    """

    own_key = "ags"
    _scales: Scales | None  # of the parameters that had a gradient at the last refresh
    _pending: list[Tensor] | None  # measured at this step, to act from the next one on

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        global_batch: int,
        small_batch: int | None = None,
        delta_threshold: float = 0.5,
        delta_smoothing: float = 0.0,
        granularity: Granularity = "element",
        gate: GateKind = "current",
        reference: Reference = "subbatch",
        refresh_every: int | None = None,
        first_refresh: int | None = None,
        refresh_samples: int = 1,
        scale_smoothing: float = 0.0,
        exponent: float = 1.0,
        s_min: float | None = None,
        s_max: float | None = None,
        eps: float = 1e-8,
        static_scale: float | None = None,
        printed_ratio: bool = False,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__(optimizer)
        self.global_batch = global_batch
        self.small_batch = small_batch
        self.refresh_every = refresh_every
        self.first_refresh = first_refresh
        self.static_scale = static_scale
        self._gate = Gate(gate, delta_threshold, delta_smoothing)
        self._meter = Meter(
            granularity=granularity,
            reference=reference,
            refresh_samples=refresh_samples,
            scale_smoothing=scale_smoothing,
            exponent=exponent,
            s_min=s_min,
            s_max=s_max,
            eps=eps,
            printed_ratio=printed_ratio,
            seed=seed,
            process_group=process_group,
        )
        problems = _setting_problems(self) + self._gate.problems() + self._meter.problems(small_batch)
        if problems:
            raise ValueError(f"TulaOptimizer: {' '.join(problems)}")
        gradients.refuse_sharded(self._parameters())
        self._notices = Notices()
        self._steps = 0
        self.scaled: Tensor | float = 0.0
        """Whether the last step's gradients were scaled, 1 or 0: a number, or of shape () on the device."""
        self._scaled_steps: Tensor | float = 0.0
        self._next_refresh = first_refresh
        self._forget()
        self._warn_unless_useful()

    @classmethod
    def paper(
        cls, optimizer: torch.optim.Optimizer, *, global_batch: int, small_batch: int, **others: Any
    ) -> TulaOptimizer:
        """Algorithm 1 as printed: a scale per element, current gate, no floor (so weights of dead units freeze)."""
        printed: dict[str, Any] = {"granularity": "element", "gate": "current", "s_min": 0.0, "printed_ratio": True}
        return cls(optimizer, global_batch=global_batch, small_batch=small_batch, **printed, **others)

    @torch._disable_dynamo  # a traced step loses what it sets on an optimizer, so that nothing would be scaled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Scale the gradients if the gate is open, then let the inner optimizer step. Returns the closure's loss."""
        loss = self._evaluated(closure)
        self.scaled = 0.0
        common = self._scale_gradients() if self.active else None
        if common is None:
            self.optimizer.step()
        else:
            step_multiplied(self.optimizer, common, self._parameters()[0].device)
        if self._pending is not None and self._scales is not None:
            self._scales.hold(self._pending)
            self._pending = None
            self._next_refresh = self._steps - 1 + self.refresh_every if self.refresh_every else None
        return loss

    def _scale_gradients(self) -> Tensor | float | None:
        """Returns the factor for all gradients if it is left to the inner optimizer."""
        self._steps += 1
        norm = self._gate.observed
        if self._gate.wants_norm:
            found = self._gradients()
            if not found:
                return None
            norm = gradients.squared_norm(found)
        if norm is not None:
            self._gate.watch(norm)
        gate_open = self._gate.state()
        common = self._common_factor(gate_open)
        if common is None and (self._scales is None or self._scales.excess is None):
            return None
        self.scaled = 1.0 if gate_open is None else gate_open
        self._scaled_steps = self._scaled_steps + self.scaled
        if common is None:
            assert self._scales is not None
            self._scales.scale(gate_open)
        else:
            grads = [p.grad for p in self._commonly_scaled() if p.grad is not None]
            if multiplies_by_itself(self.optimizer):  # all that has a gradient, so only if all of it is to be scaled
                everything = [p.grad for p in self._parameters() if p.grad is not None]
                if _same(grads, everything):
                    return common
            if grads:
                torch._foreach_mul_(grads, common)
        return None

    def _commonly_scaled(self) -> list[Tensor]:
        """The parameters that a common factor is for: those it was measured on, a static one all that may be scaled."""
        if self.static_scale is not None or self._scales is None:
            return self._parameters(scaled_only=True)
        return self._scales.parameters

    def _common_factor(self, gate_open: Tensor | None) -> Tensor | float | None:
        """What multiplies all gradients alike, a number or of shape (); None if there is no such factor."""
        if self.static_scale is not None:
            if gate_open is None:
                return self.static_scale
            excess = gradients.constant(self.static_scale - 1, gate_open.device)
        elif self._scales is not None and self._scales.excess is not None and self._scales.granularity == "global":
            excess = self._scales.excess[0][0]
        else:
            return None
        one = gradients.constant(1.0, excess.device)
        return one + excess if gate_open is None else torch.addcmul(one, excess, gate_open)

    def observe_norm(self, total_norm: Tensor | float) -> None:
        """Use this L2 norm of all gradients for the next step's Δ: what `clip_grad_norm_` returns, before clipping.

        Clipped gradients have a nearly constant norm, so that Δ of them would call every step calm.
        """
        norm = torch.as_tensor(total_norm).detach().float().square()
        self._gate.observed = norm.to(self._parameters()[0].device)

    @property
    def refresh_due(self) -> bool:
        """Whether `refresh` should be called at the coming step, by `refresh_every` and `first_refresh`.

        True until a `step()` follows a `refresh` that measured. A batch too short for it postpones it, and so does an
        overflow, which voids what was measured and makes GradScaler skip the step: asking the device would be waiting.
        """
        measures = self.active and self.static_scale is None
        return measures and self._next_refresh is not None and self._steps >= self._next_refresh

    @torch._disable_dynamo
    @torch.no_grad()
    def refresh(
        self,
        model: torch.nn.Module | None = None,
        loss_fn: LossFn | None = None,
        inputs: Any = None,
        targets: Any = None,
        *,
        loss_scale: float | Tensor = 1.0,
    ) -> None:
        """Measure a new scale. The coming `step()` does not use it, the ones after do.

        Call it on every rank after `backward` and before `step()`, when `.grad` holds the mean gradient of a *full*
        batch, neither clipped nor multiplied by a loss scale, and under the same autocast as the forward pass. The
        reference "subbatch" costs one forward and backward pass over small_batch / ranks samples per sub-batch and one
        all-reduce of the gradients, and needs the four arguments (the last only if the loss does); while it runs, up to
        three fp32 copies of the model more. It takes the gradient by `torch.autograd.grad`, which reentrant activation
        checkpointing does not allow. Buffers, `.grad`, the random stream and DDP stay untouched. The
        other references cost one small all-reduce, of numbers they have noted before. Several ranks agree first
        whether all of them can measure, and wait for the device to know. Does nothing under a static scale or while AGS
        is inactive.

        Args:
            model: Called as `model(inputs)`; DDP and compiled modules are unwrapped.
            loss_fn: Mean loss of `(outputs, targets)`.
            inputs: This rank's batch (or its last micro-batch): a tensor, or tensors in a tuple, list or mapping.
            targets: Likewise.
            loss_scale: What GradScaler multiplies the loss by, `scaler.get_scale()`: against underflow in fp16 the
                sub-batch loss is multiplied by it as well, and what was noted before `unscale_` is divided by it.
        """
        if not self.active or self.static_scale is not None:
            return
        parameters = self._measured_parameters()
        large_gradients: list[Any] = [p.grad for p in parameters]
        gradients.refuse_unusual(large_gradients)
        if not parameters:
            self._notices.say(
                "AGS keeps its scale: no parameter that may be scaled has a gradient; call refresh after backward and "
                "before zero_grad."
            )
            return
        anew = self._scales is None or not _same(parameters, self._scales.parameters)
        self._pending = None  # there is one if the step after the last refresh was skipped
        batch = None
        if model is not None and loss_fn is not None and inputs is not None:
            batch = SubBatchPass(model, loss_fn, inputs, targets)
        averages = self._meter.averages
        if anew and averages is not None:
            self._meter.averages = None
            self._notices.say(
                "AGS begins its averages anew: other parameters have gradients than at the last refresh, because some "
                "were frozen or not used."
            )
        measured = self._meter.measure(parameters, self.global_batch, self.small_batch, batch, loss_scale)
        if measured is None:
            self._meter.averages = averages
            return
        found, usable = measured
        if self._scales is None or anew:
            self._scales = Scales(parameters, self._meter.granularity)
        excess = torch._foreach_sub(found, 1.0)
        held = self._scales.excess or [torch.zeros_like(e) for e in excess]
        self._pending = [torch.where(usable, new, old) for new, old in zip(excess, held, strict=True)]

    @torch._disable_dynamo
    @torch.no_grad()
    def observe_microbatch(self, num_microbatches: int) -> None:
        """Note the gradient of the first of a step's micro-batches, for the reference "microbatch".

        Call it after that micro-batch's `backward`, when `.grad` holds nothing else: its loss divided by
        `num_microbatches`, as all their losses are, so that `.grad` ends up as the mean. `small_batch` is the number
        of samples of this gradient: those of one rank under DDP's `no_sync`, of all ranks without it. Costs nothing
        where `refresh_every` is given and no refresh is due; with "element" an all-reduce of the model's size.
        """
        if self._meter.reference != "microbatch":
            raise ValueError(f"TulaOptimizer has the reference {self._meter.reference!r}; make it with 'microbatch'.")
        if self._notes():
            self._meter.note_microbatch(self._measured_parameters(), num_microbatches)

    def _measured_parameters(self) -> list[Tensor]:
        """What may be scaled and takes part in the step; a frozen parameter may hold an old gradient."""
        return [p for p in self._parameters(scaled_only=True) if p.grad is not None and p.requires_grad]

    def watch(
        self,
        model: torch.nn.parallel.DistributedDataParallel,
        hook: Callable[[Any, Any], Any] | None = None,
        state: Any = None,
    ) -> None:
        """Note each rank's gradient norms from now on, before DDP averages the ranks, for the reference "local".

        Call it once, before the first backward pass: it registers DDP's communication hook. `hook` (with its `state`)
        then does the averaging, DDP's own all-reduce if None. Costs one norm of each gradient in the steps that a
        refresh is due in, or in all if `refresh_every` is None.
        """
        if self._meter.reference != "local":
            raise ValueError(f"TulaOptimizer has the reference {self._meter.reference!r}; make it with 'local'.")
        self._meter.watch(model, hook, state, self._notes)

    def _notes(self) -> bool:
        """Whether small gradients are worth noting at the coming step."""
        return self.active and (self.refresh_every is None or self.refresh_due)

    @property
    def active(self) -> bool:
        """Whether gradients are watched and may be scaled."""
        if self.static_scale is not None:
            return True
        return self.global_batch > self._meter.reference_batch(self.global_batch, self.small_batch)

    def set_batch(self, global_batch: int) -> None:
        """Go on with another global batch: the last norm and the scale belong to the old one and are dropped."""
        if global_batch < 1:
            raise ValueError(f"global_batch is {global_batch}, but must be at least 1.")
        if global_batch != self.global_batch:
            self.global_batch = global_batch
            self._forget()
            self._warn_unless_useful()

    @property
    def variability(self) -> Tensor | None:
        """Δ of the last step, a tensor of shape () on the device, to be kept and read later; None before it is known
        and where no norm is taken (gate "off" without `observe_norm`). Infinite at the first step."""
        return self._gate.variability

    @property
    def mean_scale(self) -> Tensor | float:
        """Mean over all elements of the scale now held, which acts while the gate is open: a number, or of shape () on
        the device. 1 before the first `refresh`."""
        if self.static_scale is not None:
            return self.static_scale
        return 1.0 if self._scales is None else self._scales.mean()

    def statistics(self) -> dict[str, float]:
        """Finite numbers for a log. The only method that waits for the device: call it every so many steps.

        `gradient_variability` is Δ of the last step and `norm` its gradient norm (or their moving averages), left out
        while they are not known: before the second step, and where the gate is "off" and nobody calls `observe_norm`.
        `scaled_fraction` is the share of all steps whose gradients were scaled; `mean_scale` is the mean over all
        elements of the scale now held, which acts while the gate is open (1 before the first `refresh`).
        """
        values = {
            "gradient_variability": self._gate.variability,
            "scaled_fraction": self._scaled_steps / max(1, self._steps),
            "mean_scale": self.mean_scale,
            "norm": None if self._gate.squared_norm is None else self._gate.squared_norm.sqrt(),
        }
        known = {name: float(value) for name, value in values.items() if value is not None}
        return {name: value for name, value in known.items() if math.isfinite(value)}

    def state_bytes(self) -> int:
        """Bytes AGS holds now besides the inner optimizer.

        "element": one fp32 copy of the model, with `scale_smoothing` three. Coarser: 8 bytes for each element of the
        tensors of up to 65,536 elements ("global": none) and a few for each tensor or channel.
        """
        held = [*(self._pending or []), *self._meter.tensors(), self._gate.squared_norm, self._gate.variability]
        held += [] if self._scales is None else self._scales.tensors()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t is not None}
        return sum(storages.values())

    def __repr__(self) -> str:
        return (
            f"TulaOptimizer(global_batch={self.global_batch}, small_batch={self.small_batch}, granularity="
            f"{self._meter.granularity}, gate={self._gate.kind}, static_scale={self.static_scale}) "
            f"of {self.optimizer!r}"
        )

    def _own_state(self) -> dict[str, Any]:
        return {
            "version": 2,
            **self._geometry(),
            "steps": self._steps,
            "draws": self._meter.draws,
            "scaled_steps": self._scaled_steps,
            "squared_norm": self._gate.squared_norm,
            "variability": self._gate.variability,
            "next_refresh": self._next_refresh,
            "scales": self._by_position(self._scales.excess if self._scales else None),
            "pending": self._by_position(self._pending),
            "averages": self._meter.averages,
        }

    def _by_position(self, excess: list[Tensor] | None) -> dict[int, Tensor] | None:
        """The scale of each parameter, by its place in the groups."""
        if self._scales is None or excess is None:
            return None
        position = {p: i for i, p in enumerate(self._parameters())}
        places = [position[p] for p in self._scales.parameters]
        return dict(zip(places, self._scales.each_scale(excess), strict=True))

    def _geometry(self) -> dict[str, Any]:
        """Settings that a measured scale belongs to: a state saved under others gives up its scale."""
        meter = self._meter
        return {
            "global_batch": self.global_batch,
            "small_batch": self.small_batch,
            "reference_batch": meter.reference_batch(self.global_batch, self.small_batch),
            **{key: getattr(meter, key) for key in ("granularity", "reference", "exponent", "s_min", "s_max")},
        }

    def _load_own_state(self, saved: dict[str, Any]) -> None:
        """Norm and scales are dropped if they were measured at another batch geometry or granularity, or with a
        parameter that is not to be scaled any more."""
        if saved["version"] != 2:
            raise ValueError(f"The AGS state has version {saved['version']}, but this code reads version 2 only.")
        parameters = self._parameters()
        self._steps, self._meter.draws = saved["steps"], saved["draws"]
        self._scaled_steps = float(saved["scaled_steps"])
        self._forget()
        may_be_scaled, known = set(self._parameters(scaled_only=True)), saved["scales"] or saved["pending"] or {}
        other_geometry = any(saved.get(key, value) != value for key, value in self._geometry().items())
        if other_geometry or any(parameters[i] not in may_be_scaled for i in known):
            return
        if self.refresh_every is not None and saved["next_refresh"] is not None:
            latest = max(self._steps + self.refresh_every, self.first_refresh or 0)
            self._next_refresh = min(saved["next_refresh"], latest)
        if self.refresh_every is None and self.first_refresh is not None:
            self._next_refresh = saved["next_refresh"]  # None: it was done
        device = parameters[0].device

        def loaded(value: Any) -> Any:
            return None if value is None else value.to(device, copy=True)

        self._gate.squared_norm, self._gate.variability = loaded(saved["squared_norm"]), loaded(saved["variability"])
        if known:
            self._scales = Scales([parameters[i] for i in known], self._meter.granularity)
            held, pending = (
                self._scales.excess_of([loaded(scale) for scale in named.values()]) if named else None
                for named in (saved["scales"], saved["pending"])
            )
            self._pending = pending
            if held is not None:
                self._scales.hold(held)
        if saved["averages"] is not None:
            small, large = ([loaded(square) for square in squares] for squares in saved["averages"])
            self._meter.averages = small, large

    def _forget(self) -> None:
        """Drop what was measured; the next step counts as the first, and what is missing is measured soon."""
        self._scales = self._pending = None
        self._gate.forget()
        self._meter.forget()
        if self.refresh_every is not None:
            self._next_refresh = max(self._steps, self.first_refresh or 0)
        elif self._next_refresh is None and self.first_refresh is not None:  # it was done, once, for what is dropped
            self._next_refresh = self._steps

    def _gradients(self) -> list[Tensor]:
        """All gradients at hand."""
        found: list[Any] = [p.grad for p in self._parameters()]
        if any(grad is None for grad in found):
            found = [grad for grad in found if grad is not None]
        self._refuse_unusual(found)
        return found

    def _warn_unless_useful(self) -> None:
        name = type(self.optimizer).__name__
        if not self.active:
            self._notices.say(
                f"AGS is inactive: global_batch {self.global_batch} does not exceed small_batch {self.small_batch}, so "
                "there is no large batch to correct."
            )
        elif "sgd" not in name.lower():
            self._notices.say(
                f"{name} is not known as an SGD: an optimizer that divides by the size of the gradient, like Adam or "
                "LARS, divides the scale of AGS out again."
            )


def _same(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(a is b for a, b in zip(these, those, strict=True))


def _setting_problems(optimizer: TulaOptimizer) -> list[str]:
    """One sentence per bad argument."""
    problems = []
    for name in ("global_batch", "small_batch", "refresh_every"):
        value = getattr(optimizer, name)
        if value is not None and not value >= 1:  # so that NaN is refused as well
            problems.append(f"{name} is {value}, but must be at least 1.")
    if optimizer.static_scale is not None and not optimizer.static_scale > 0:
        problems.append(f"static_scale is {optimizer.static_scale}, but must exceed 0; 1 changes nothing.")
    if optimizer.small_batch is None and optimizer.static_scale is None and optimizer._meter.reference != "local":
        problems.append("small_batch is missing; give the batch the learning rate was tuned for, or a static_scale.")
    if isinstance(optimizer.optimizer, torch.optim.LBFGS):
        problems.append("LBFGS evaluates many gradients in one step, there is none to scale; use SGD.")
    return problems
