"""The methods that `accuracy` compares: the package's, the rivals' published rules, and what was tried on the way.

A name is words joined by `+`, each a rule with its number: `lin+cap0.005` multiplies the rate by B/b and then bounds
the relative size of each tensor's update. `METHODS` says what each word does.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.optim.bounded import BoundedOptimizer
from tula_hpc.optim.running_averages import follow_as_many_samples
from tula_hpc.optim.schedules import bound_factor

WARMUP_EPOCHS = 5
LossFn = Callable[[Tensor, Tensor], Tensor]

KEPT_BACK = 2000
"""Images that a watched training does without; a tenth at most."""
PLANS: dict[str, list[tuple[dict[str, tuple[int, ...]], tuple[str, ...], tuple[int, ...]]]] = {}


class Method:
    """How the weights of one training change."""

    def __init__(
        self, name: str, model: nn.Module, loss_fn: LossFn, lr: float, weight_decay: float, batch: int, small: int
    ):
        self.name, self.model, self.loss_fn, self.lr, self.batch, self.small = name, model, loss_fn, lr, batch, small
        self.ratio = batch / small
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.matrices = [p for p in self.params if p.ndim > 1]
        self.is_matrix = torch.tensor([p.ndim > 1 for p in self.params], device=self.params[0].device)
        multiplier, self.rules = 1.0, []
        self.trust, self.tula, self.fresh, self.steps = None, None, None, 0
        self.shuffle = self.free = self.warm = self.warmed = self.cos = False
        self.tau, self.follow, self.anneal, self.factor, self.progress = 0.005, 0.0, 0.0, 1.0, 0.0
        self.usual = self.mean_factor = None
        self.boldness, self.is_watched = 1.0, False
        inner = torch.optim.SGD(self.params, lr=lr, momentum=0.9, weight_decay=weight_decay, fused=True)
        self.inner, self.optimizer = inner, inner
        for word, number in re.findall(r"([a-z_]+)([0-9.]*)", name):
            value = float(number) if number else None
            if word == "lin":
                multiplier *= self.ratio
            elif word == "sqrt":
                multiplier *= math.sqrt(self.ratio)
            elif word == "pow":  # (B/b)^value
                multiplier *= self.ratio ** (value or 1.0)
            elif word == "times":
                multiplier *= value or 1.0
            elif word in RULES:
                self.rules.append((RULES[word], value))
            elif word == "lars":  # without a number the published rate, between 2 at 512 and 10 at 4096
                self.trust = value or 0.001
                if value is None:
                    multiplier = 2 * (batch / 512) ** (math.log(5) / math.log(8)) / lr
            elif word in ("tau", "follow", "anneal"):
                setattr(self, word, value)
            elif word == "watch":
                self.boldness, self.is_watched = value or 1.0, True
            elif word in ("shuffle", "free", "warm", "cos"):
                setattr(self, word, True)
            elif word == "ags":
                multiplier *= self.ratio
                self.optimizer = BoundedOptimizer(inner, global_batch=batch, small_batch=small)
                follow_as_many_samples(model, batch, small)
            elif word in ("ags_paper", "ags_tensor", "ags_global"):
                make = TulaOptimizer.paper if word == "ags_paper" else TulaOptimizer
                options: dict[str, Any] = {} if word == "ags_paper" else {"granularity": word.split("_")[1]}
                self.tula = make(inner, global_batch=batch, small_batch=small, **options)
                self.optimizer = self.tula
            elif word in ("fresh_tensor", "fresh_global"):
                self.fresh = Fresh(self, word == "fresh_global", value or 1.0)
                self.rules.append((self.fresh.rule, None))
            elif word not in ("lbt", "polo"):
                raise ValueError(f"{word!r} is no rule")
        self.multiplier = multiplier
        if self.trust is not None:  # decay is part of the layer-wise rate
            self.weight_decay = weight_decay
            inner.param_groups[0]["weight_decay"] = 0.0

    def set_lr(self, factor: float, epoch: float, epochs: int) -> None:
        """The rate of the coming step, the schedule's share of the tuned one, after so many of the epochs."""
        self.factor, self.progress, self.warmed = factor, epoch / epochs, self.warmed or factor >= 1
        self.rate = self.lr * self.multiplier * factor
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        if isinstance(self.optimizer, BoundedOptimizer):
            factor = bound_factor(epoch, epochs=epochs, warmup_epochs=WARMUP_EPOCHS)
            self.optimizer.bound_factor = factor * self.boldness

    def train_step(self, inputs: Tensor, targets: Tensor, is_last_of_epoch: bool) -> Tensor:
        """One step on a batch; its loss."""
        loss = self._loss(self.model, inputs, targets)
        loss.backward()
        self._step(inputs, targets, is_last_of_epoch)
        return loss.detach()

    def _loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(inputs)
        return self.loss_fn(outputs.float(), targets)

    def _step(self, inputs: Tensor, targets: Tensor, is_last_of_epoch: bool) -> None:
        """After backward: change the gradients, then the weights."""
        if self.tula is not None and is_last_of_epoch:
            with torch.autocast("cuda", torch.bfloat16):
                self.tula.refresh(self.model, self.loss_fn, inputs, targets)
            if self.shuffle and self.tula._pending is not None:
                self.tula._pending = [
                    e.flatten()[torch.randperm(e.numel(), device=e.device)].view_as(e) for e in self.tula._pending
                ]
        with torch.no_grad():
            if self.fresh is not None:
                self.fresh.look(inputs, targets)
            if self.trust is not None:
                self._layer_wise()
            for rule, value in self.rules:
                rule(self, value)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def _layer_wise(self) -> None:
        """LARS: trust |w| / (|g| + decay |w|), on g + decay w; not for biases and norms."""
        grads = [p.grad for p in self.matrices]
        w, g = torch._foreach_norm(self.matrices), torch._foreach_norm(grads)
        decay = self.weight_decay
        torch._foreach_add_(grads, self.matrices, alpha=decay)
        factors = [self.trust * a / (b + decay * a + 1e-9) for a, b in zip(w, g, strict=True)]
        torch._foreach_mul_(grads, factors)

    def facts(self) -> dict[str, Any]:
        """What else belongs into the record."""
        mean = None if self.mean_factor is None else round(float(self.mean_factor) / max(self.steps, 1), 4)
        watched = {"boldness": self.boldness} if self.is_watched else {}
        return {"multiplier": round(self.multiplier, 4), "mean_factor": mean, "steps": self.steps, **watched}

    def multiply(self, factors: list[Tensor] | Tensor) -> None:
        """Multiply all gradients, and keep the mean of the factors for the record."""
        grads = [p.grad for p in self.params]
        torch._foreach_mul_(grads, factors)
        mean = torch.stack(factors).mean() if isinstance(factors, list) else factors
        self.mean_factor = mean if self.mean_factor is None else self.mean_factor + mean


def cap(method: Method, tau: float | None) -> None:
    """A tensor's update is at most `tau` of its weights; biases and norms follow the whole model."""
    tau = tau or 0.005
    grads = [p.grad for p in method.params]
    w, g = torch.stack(torch._foreach_norm(method.params)), torch.stack(torch._foreach_norm(grads))
    each = tau * w / (method.rate * g + 1e-12)
    whole = tau * w.norm() / (method.rate * g.norm() + 1e-12)
    method.multiply(list(torch.where(method.is_matrix, each, whole).clamp(max=1.0).unbind()))


def capall(method: Method, tau: float | None) -> None:
    """The whole model's update is at most `tau` of its weights."""
    tau = tau or 0.005
    w = torch.stack(torch._foreach_norm(method.params)).norm()
    g = torch.stack(torch._foreach_norm([p.grad for p in method.params])).norm()
    method.multiply((tau * w / (method.rate * g + 1e-12)).clamp(max=1.0))


def band(method: Method, share: float | None) -> None:
    """A tensor's update is at most `tau` of its weights, and at least `share` of that: small gradients are raised, at
    most tenfold. Both bounds follow the schedule's decays to the power of `follow`, or fall to zero with what remains
    of the training to the power of `anneal`, or by a `cos`ine; `warm` ones rise with the warm-up. `free` vectors have
    none.
    """
    share = share or 0.1
    grads = [p.grad for p in method.params]
    tau = method.tau * method.factor**method.follow * (1 - method.progress) ** method.anneal
    if method.cos:
        tau *= (1 + math.cos(math.pi * method.progress)) / 2
    if method.warm and not method.warmed:
        tau *= method.factor
    w, g = torch.stack(torch._foreach_norm(method.params)), torch.stack(torch._foreach_norm(grads))
    each = tau * w / (method.rate * g + 1e-12)
    whole = tau * w.norm() / (method.rate * g.norm() + 1e-12)
    most = torch.where(method.is_matrix, each, whole)
    factors = torch.minimum(most, (share * most).clamp(1.0, 10.0))
    if method.free:
        factors = torch.where(method.is_matrix, factors, 1.0)
    method.multiply(list(factors.unbind()))


def agc(method: Method, share: float | None) -> None:
    """The gradient of a tensor is at most `share` of its weights, whatever the rate; biases and norms as `cap` does."""
    share = share or 0.01
    grads = [p.grad for p in method.params]
    w, g = torch.stack(torch._foreach_norm(method.params)), torch.stack(torch._foreach_norm(grads))
    each, whole = share * w / (g + 1e-12), share * w.norm() / (g.norm() + 1e-12)
    method.multiply(list(torch.where(method.is_matrix, each, whole).clamp(max=1.0).unbind()))


def clip(method: Method, times: float | None) -> None:
    """The whole gradient is at most `times` its usual length, a running mean of the logarithm over about 50 steps."""
    g = torch.stack(torch._foreach_norm([p.grad for p in method.params])).norm()
    usual = g.log() if method.usual is None else method.usual
    factor = ((times or 1.0) * usual.exp() / (g + 1e-12)).clamp(max=1.0)
    method.usual = 0.98 * usual + 0.02 * (g * factor).log()
    method.multiply(factor)


def norm(method: Method, length: float | None) -> None:
    """The whole gradient is at most this long."""
    g = torch.stack(torch._foreach_norm([p.grad for p in method.params])).norm()
    method.multiply(((length or 1.0) / (g + 1e-12)).clamp(max=1.0))


RULES: dict[str, Callable[[Method, float | None], None]] = {
    "cap": cap,
    "capall": capall,
    "band": band,
    "agc": agc,
    "clip": clip,
    "norm": norm,
}


class Fresh:
    """Ratio of the small to the large batch's gradient norm, from running means of their squares, drawn every four
    steps on a sub-batch; between 1 and (B/b)^(power / 2), to the power given. Power 2 is AdaScale's gain.
    """

    def __init__(self, method: Method, whole: bool, power: float):
        self.method, self.whole, self.power = method, whole, power
        self.small: Tensor | None = None
        self.large: Tensor | None = None

    def look(self, inputs: Tensor, targets: Tensor) -> None:
        method = self.method
        if method.steps % 4 or method.ratio <= 1:
            return
        buffers = {name: b.clone() for name, b in method.model.named_buffers()}
        parameters = dict(method.model.named_parameters())
        with torch.enable_grad(), torch.random.fork_rng(devices=[torch.cuda.current_device()]):
            with torch.autocast("cuda", torch.bfloat16):
                outputs = torch.func.functional_call(method.model, {**parameters, **buffers}, (inputs[: method.small],))
            loss = method.loss_fn(outputs.float(), targets[: method.small])
            grads = torch.autograd.grad(loss, method.params)
        small = torch.stack(torch._foreach_norm(grads)) ** 2
        large = torch.stack(torch._foreach_norm([p.grad for p in method.params])) ** 2
        if self.small is None or self.large is None:
            self.small, self.large = small, large
        else:
            self.small, self.large = 0.9 * self.small + 0.1 * small, 0.9 * self.large + 0.1 * large

    def rule(self, method: Method, _: float | None) -> None:
        if self.small is None or self.large is None:
            return
        small, large = (self.small.sum(), self.large.sum()) if self.whole else (self.small, self.large)
        gain = (small / (large + 1e-30)).clamp(1.0, method.ratio) ** (self.power / 2)
        method.multiply(gain if self.whole else list(gain.unbind()))


class Watch:
    """Accuracy on images that are kept back decides how bold the bounds are, as the paper's section VI has in mind:
    where it falls by more than chance would have it, the training goes on from its best weights with half the bounds.
    """

    def __init__(self, method: Method, top1: Callable[[], float], samples: int):
        self.method, self.top1, self.samples = method, top1, samples
        self.best = -1.0
        self.look()

    def look(self) -> None:
        """Measure, and go back or go on."""
        top1, method = self.top1(), self.method
        error = math.sqrt(top1 * (100 - top1) / self.samples)
        if top1 < self.best - 2 * error:
            method.model.load_state_dict(self.weights)
            method.inner.load_state_dict(copy.deepcopy(self.momenta))
            method.boldness /= 2
        elif top1 >= self.best:
            self.best = top1
            self.weights = copy.deepcopy(method.model.state_dict())
            self.momenta = copy.deepcopy(method.inner.state_dict())


class PostLocal(Method):
    """Post-local SGD on `WORKERS` simulated ranks, as `method=polo`: synchronous in the warm-up, then each rank steps
    by itself on its share of the batch, and models are averaged four times an epoch.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.copies: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        self.since_epoch = 0

    def train_step(self, inputs: Tensor, targets: Tensor, is_last_of_epoch: bool) -> Tensor:
        if self.factor < 1 and not self.copies:
            return super().train_step(inputs, targets, is_last_of_epoch)
        if not self.copies:
            for _ in range(WORKERS):
                model, inner = copy.deepcopy(self.model), self.inner
                sgd = torch.optim.SGD(model.parameters(), fused=True, **_of(inner))
                for mine, its in zip(model.parameters(), self.params, strict=True):
                    sgd.state[mine] = {k: v.clone() for k, v in inner.state[its].items() if v is not None}
                self.copies.append((model, sgd))
        losses = []
        for (model, sgd), x, y in zip(self.copies, inputs.chunk(WORKERS), targets.chunk(WORKERS), strict=True):
            sgd.param_groups[0]["lr"] = self.rate
            losses.append(self._loss(model, x, y))
            losses[-1].backward()
            sgd.step()
            sgd.zero_grad(set_to_none=True)
        self.steps, self.since_epoch = self.steps + 1, self.since_epoch + 1
        if is_last_of_epoch or self.since_epoch % self.period == 0:
            self._average()
        if is_last_of_epoch:
            self.period, self.since_epoch = max(1, self.since_epoch // 4), 0
        return torch.stack(losses).mean().detach()

    period = 4

    @torch.no_grad()
    def _average(self) -> None:
        """The mean of the copies' weights and buffers, in all of them and in the model."""
        parts = [[t for t in m.state_dict().values() if t.is_floating_point()] for m, _ in self.copies]
        mean = [torch.stack(same).mean(0) for same in zip(*parts, strict=True)]
        own = [t for t in self.model.state_dict().values() if t.is_floating_point()]
        for part in (*parts, own):
            torch._foreach_copy_(part, mean)


WORKERS = 8


def _of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    return {name: group[name] for name in ("lr", "momentum", "weight_decay")}


def build(
    name: str, model: nn.Module, loss_fn: LossFn, lr: float, weight_decay: float, batch: int, small: int
) -> Method:
    """The method of that name for one training."""
    kind = PostLocal if name == "polo" else Method
    return kind(name, model, loss_fn, lr, weight_decay, batch, small)


_ALEXNET, _VGG, _RESNET = {"alexnet": (256, 512, 1024)}, {"vgg11": (4096,)}, {"resnet18": (4096,)}

PLANS["explore"] = [  # long and short ones in turn, so that processes that share a GPU differ in what they need
    (tasks, methods, (0,))
    for long, short in (
        ((_VGG, ("lin+cap0.001", "sqrt", "lin+clip1")), ("lin", "lin+cap0.001", "lin+cap0.005")),
        ((_VGG, ("lin+cap0.0003", "lin+norm1", "lbt")), ("sqrt", "lbt", "lin+lars0.01")),
        ((_RESNET, ("lin", "lin+cap0.001", "sqrt")), ("lin+times4+cap0.001", "lin+band0.1", "fresh_tensor2")),
        ((_VGG, ("fresh_tensor2", "lin+capall0.001", "lin+band0.1")), ("lin+times4", "lin+times2", "lin+clip1")),
        ((_RESNET, ("lbt", "lin+clip1", "lin+lars")), ("lin+times4+cap0.002", "lin+lars", "ags_paper")),
        (
            (_VGG, ("lin", "ags_paper", "lin+cap0.003")),
            ("lin+times8+cap0.001", "fresh_global2", "lin+lars0.1"),
        ),
    )
    for tasks, methods in (long, (_ALEXNET, short))
] + [({"alexnet": (128,), "vgg11": (128,), "resnet18": (128,)}, ("lbt",), (0,))]

_A, _V, _R, _M = {"alexnet": (1024, 512)}, {"vgg11": (4096,)}, {"resnet18": (4096,)}, {"mobilenetv3": (4096,)}
_BAND, _HALF = "lin+band0.1", "lin+band0.1+follow0.5"

PLANS["explore2"] = [  # what the first look favoured, on all models
    (tasks, methods, (0,))
    for tasks, methods in (
        (_V, (_BAND,)),
        (_R, ("lin", _BAND)),
        (_A, (_HALF, "lin+band0.3")),
        (_M, ("lin",)),
        (_V, (_HALF,)),
        (_A, ("lin+norm1", "lin+band0.3+follow0.5", "lin+band1+follow1")),
        (_R, (_HALF, "lbt")),
        (_M, (_BAND, _HALF)),
        (_A, ("lars", "lin+band0.1+tau0.01")),
        (_V, ("lin+band0.3+follow0.5", "lars")),
        (_A, ("lin+agc0.05", "lin+norm1+band0.1", "lin+band0.1+follow1")),
        (_R, ("lin+norm1", "lars")),
        (_M, ("lbt", "lars", "lin+norm1")),
        (_V, ("lin+agc0.05",)),
    )
]
PLANS["explore3"] = [
    (tasks, methods, (0,))
    for tasks, methods in (
        (_A, ("ags_paper", "ags_paper+shuffle", "polo", "lin+band0.1+tau0.0025")),
        (_V, ("lin+band0.1+tau0.01", "ags_paper")),
        (_R, ("lin+band0.1+tau0.01", "sqrt")),
        (_M, ("sqrt", "lin+band0.1+tau0.01")),
        (_A, ("lin+band0.3+tau0.01", "lin+band0.3+tau0.01+follow0.5", "lin+band0.1+tau0.02")),
        (_R, ("polo",)),
        (_V, ("polo",)),
    )
]

PLANS["explore4"] = [
    (tasks, methods, (0,))
    for tasks, methods in (
        (_M, ("lbt", "lin+band0.3")),
        (_R, ("sqrt", "lin+band0.3", "lbt")),
        (_V, ("lin+band0.3",)),
        (_A, ("sqrt+band0.3", "lin+band0.3+tau0.0025")),
        (_M, (_BAND, "sqrt")),
        (_R, ("sqrt+band0.1", _HALF, "lin+band0.1+tau0.0025")),
        (_V, ("sqrt+band0.1", "lin+band0.3+tau0.0025")),
        (_A, ("lin+band0.5", "sqrt+band0.1")),
        (_M, ("sqrt+band0.3", "lin+band0.3+follow0.5")),
        (_R, ("sqrt+band0.3", "lin+band0.3+tau0.0025")),
        (_V, ("sqrt+band0.3", "lin+band0.1+tau0.0025")),
        (_R, ("lars", "sqrt+band0.1+follow0.5")),
        (_M, ("lars", "lin+band0.1+tau0.0025")),
        (_V, ("lars", "ags_paper")),
        (_A, ("lin+band0.5+tau0.01",)),
    )
]
_ROWS = {"alexnet": (256, 512, 1024)}
PLANS["rivals"] = [
    ({"alexnet": (1024,)}, ("polo",), (0, 1, 2)),
    (_ROWS, ("lbt", "lin", "sqrt", "lin+band0.3", "lars", "ags_paper"), (0, 1, 2)),
    (_ROWS, ("polo", "lbt+times4", "ags_paper+shuffle", "sqrt+times0.72", "lin+band0.1"), (0, 1, 2)),
    ({"vgg11": (4096,), "resnet18": (4096,), "mobilenetv3": (4096,)}, ("lbt", "sqrt"), (1, 2)),
    ({"alexnet": (128,), "resnet18": (128,), "mobilenetv3": (128,), "vgg11": (128,)}, ("lbt",), (0, 1, 2)),
]


def _on_each_model(*methods: str) -> list[tuple[dict[str, tuple[int, ...]], tuple[str, ...], tuple[int, ...]]]:
    """One seed of each method on its largest batches, method by method."""
    return [(tasks, (method,), (0,)) for method in methods for tasks in (_M, _R, _V, _A)]


# what LARS has on nets with normalisation: longer steps that follow the decays, free vectors
PLANS["explore5"] = _on_each_model(
    "lin+band1+tau0.01+follow1+free",
    "lin+band0.3+follow1",
    "lin+band0.3+tau0.01+follow1",
    "lin+band1+tau0.01+follow1",
    "lin+band0.3+free",
    "lin+band0.1+tau0.01+follow1+free",
    "ags",
    "lars",
    "lin+band0.3+tau0.02+follow1+free",
)
# bounds that fall evenly to the end, whatever the schedule's steps
PLANS["explore6"] = _on_each_model(
    "lin+band0.3+tau0.01+anneal1", "lin+band1+tau0.01+anneal1", "lin+band0.5+tau0.01+anneal0.5", "lars"
)
# MobileNetV3 wants longer steps, at which VGG11 does not begin: do they agree after a warm-up?
PLANS["explore7"] = _on_each_model(
    "lin+band1+tau0.01+anneal0.5+warm",
    "lin+band0.7+tau0.01+anneal0.5+warm",
    "lin+band0.5+tau0.01+anneal0.5+warm",
    "lin+band0.5+tau0.02+anneal1+warm",
    "lin+band0.7+tau0.01+anneal0.5",
)
# the running averages of MobileNetV3's normalisation follow the last hundred steps: it gains from an end at rest
PLANS["explore8"] = [
    *_on_each_model("lin+band0.7+tau0.01+cos+warm", "lin+band0.5+tau0.015+cos+warm"),
    (_M, ("lars",), (1,)),
    (_M, ("lin+band0.7+tau0.01+anneal0.5+warm",), (1,)),
    *_on_each_model("lin+band0.7+tau0.01+anneal0.75+warm"),
]

# bounds that the accuracy on images kept back decides, where to begin with them are twice or four times the default's
PLANS["watched"] = _on_each_model("ags+watch2", "ags+watch4", "ags+watch1")

_LARGE = {"vgg11": (4096, 2048, 1024), "resnet18": (4096, 2048, 1024), "mobilenetv3": (4096,)}
_MORE = {"mobilenetv3": (2048, 1024)}
_RIVALS = ("lbt", "lars", "lin", "sqrt", "ags_paper", "polo")
# Seeds outermost: what the time cuts off is whole seeds.
PLANS["finals"] = [
    (tasks, methods, (seed,))
    for seed in (0, 1, 2)
    for tasks, methods in (
        (_LARGE, _RIVALS),
        (_ROWS, (*_RIVALS, "lbt+times4", "sqrt+times0.72", "ags_paper+shuffle")),
    )
]
PLANS["default"] = [({**_LARGE, **_ROWS}, ("ags",), (seed,)) for seed in (0, 1, 2)]
PLANS["more"] = [(_MORE, ("ags", *_RIVALS), (seed,)) for seed in (0, 1, 2)]
# The small batch, whose many steps take ten minutes where large batches share the GPU: best by itself, all at once.
PLANS["small"] = [
    ({"resnet18": (128,), "mobilenetv3": (128,), "vgg11": (128,), "alexnet": (128,)}, ("lbt",), (seed,))
    for seed in (0, 1, 2)
]
