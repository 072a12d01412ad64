"""The methods a training can use: what each is called, which settings are its own, how its rate follows the batch.

Nothing here loads torch: the command line, the checks and the report ask as well as the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tula_hpc.config import MethodKind, OptimizerKind, Settings
from tula_hpc.optim import schedules
from tula_hpc.optim.schedules import LrScaling


@dataclass(frozen=True)
class Method:
    words: str
    """What it is, for help and report."""
    scaling: LrScaling = "none"
    """How its learning rate follows the batch."""


METHODS = {
    MethodKind.ags: Method("learning rate in proportion to the batch, each tensor's step bounded", "linear"),
    MethodKind.ags_measured: Method("adaptive gradient scaling"),
    MethodKind.ags_paper: Method("adaptive gradient scaling as printed (Algorithm 1)"),
    MethodKind.lbt: Method("plain large-batch training"),
    MethodKind.lrs_linear: Method("learning rate in proportion to the batch", "linear"),
    MethodKind.lrs_sqrt: Method("learning rate with the square root of the batch", "sqrt"),
    MethodKind.lars: Method("LARS: a rate for each layer, in proportion to the batch", "linear"),
    MethodKind.static: Method("static gradient scaling (Eq. 8)"),
    MethodKind.polo: Method("post-local SGD: synchronous in the warm-up, then local steps and averaged models"),
}

# Who reads a setting of `method`; the ones not named here are read by `ags_measured` alone.
_READERS: dict[str, tuple[MethodKind, ...]] = {
    "kind": tuple(MethodKind),
    "small_batch": tuple(MethodKind),
    "step_floor": (MethodKind.ags,),
    "step_cap": (MethodKind.ags,),
    "scale_cap": (MethodKind.ags, MethodKind.ags_measured),
    "delta_threshold": (MethodKind.ags_measured, MethodKind.ags_paper, MethodKind.static),
    "static_scale": (MethodKind.static,),
    "refresh_epochs": (MethodKind.ags_measured, MethodKind.ags_paper),
    "lars_lr": (MethodKind.lars,),
    "trust_coefficient": (MethodKind.lars,),
    "local_from_epoch": (MethodKind.polo,),
    "sync_per_epoch": (MethodKind.polo,),
    "local_momentum": (MethodKind.polo,),
}


def readers(setting: str) -> tuple[MethodKind, ...]:
    """The methods that a field of `MethodSettings` is for."""
    return _READERS.get(setting, (MethodKind.ags_measured,))


def tuned_lr(settings: Settings) -> float:
    """The learning rate at `method.small_batch`."""
    own = settings.method.lars_lr if settings.method.kind is MethodKind.lars else None
    return settings.training.lr if own is None else own


def tuned_lr_in_words(settings: Settings) -> str:
    scaled = METHODS[settings.method.kind].scaling != "none"
    by = "AdamW, " if settings.training.optimizer is OptimizerKind.adamw else ""
    return f"{by}learning rate {tuned_lr(settings):g}" + (f" for batch {settings.method.small_batch}" if scaled else "")


def in_words(record: dict[str, Any]) -> str:
    """What a line of metrics, or the result, says of the method."""
    text = f"method {record['method']}"
    if record.get("base_lr") is not None:
        text += f", learning rate {record['base_lr']:g}"
    period = record.get("averaging_period_steps")
    return text if period is None else f"{text}, models averaged every {period} step{'' if period == 1 else 's'}"


def base_lr(settings: Settings, global_batch: int) -> float:
    """The learning rate at `global_batch`, after the warm-up and before the first milestone."""
    method = settings.method
    scaling = METHODS[method.kind].scaling
    return schedules.scaled_lr(
        tuned_lr(settings), global_batch=global_batch, small_batch=method.small_batch, scaling=scaling
    )


def learning_rate(settings: Settings, global_batch: int, epoch: float) -> float:
    """The learning rate after `epoch` epochs, which need not be whole."""
    hyper, method = settings.training, settings.method
    return schedules.learning_rate(
        epoch,
        lr=tuned_lr(settings),
        global_batch=global_batch,
        small_batch=method.small_batch,
        scaling=METHODS[method.kind].scaling,
        warmup_epochs=hyper.warmup_epochs,
        milestones=hyper.milestones,
        decay=hyper.lr_decay,
    )


def local_from_epoch(settings: Settings) -> int:
    """Epochs of synchronous training before post-local SGD's local phase."""
    given = settings.method.local_from_epoch
    return math.ceil(settings.training.warmup_epochs) if given is None else given


def notes(settings: Settings, global_batch: int, ranks: int) -> list[str]:
    """What a user would not expect of the method at this batch, on so many ranks."""
    hyper, found = settings.training, _notes_on_the_rate(settings, global_batch, ranks)
    if settings.method.kind is MethodKind.ags and global_batch <= settings.method.small_batch:
        found.append(
            f"the bounds of method=ags act at larger batches than {settings.method.small_batch} (method.small_batch) "
            "only: this is plain SGD"
        )
    if hyper.warmup_epochs > hyper.epochs:
        found.append(
            f"the training ends before its warm-up does (training.epochs={hyper.epochs}, training.warmup_epochs="
            f"{hyper.warmup_epochs:g}), at a learning rate of {learning_rate(settings, global_batch, hyper.epochs):g}; "
            "shorten the warm-up, or train longer"
        )
    return found


def _notes_on_the_rate(settings: Settings, global_batch: int, ranks: int) -> list[str]:
    method = settings.method
    tuned_for = f"tuned for {method.small_batch} (method.small_batch)"
    if method.kind.scales_gradients and settings.training.optimizer is OptimizerKind.adamw:
        return [
            "AdamW divides gradients by their own size, and so the scales of adaptive gradient scaling out again, "
            "except where they have just changed; to train a large batch with AdamW, use method=lrs_sqrt"
        ]
    if method.kind.measures_scales and global_batch <= method.small_batch:
        return [
            f"adaptive gradient scaling has nothing to do at a global batch of {global_batch}: the learning rate was "
            f"{tuned_for}"
        ]
    if METHODS[method.kind].scaling != "none":
        return [
            f"learning rate {base_lr(settings, global_batch):g} at a global batch of {global_batch}: "
            f"{tuned_lr(settings):g} was {tuned_for}"
        ]
    if method.kind is MethodKind.polo and ranks == 1:
        return ["post-local SGD on a single rank is plain SGD: there is no other model to average with"]
    return []
