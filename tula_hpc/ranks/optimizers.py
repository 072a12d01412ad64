"""The optimizer of a run's method, and what averages its ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from tula_hpc.config import MethodKind, OptimizerKind, Settings
from tula_hpc.errors import TulaError
from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.optim.bounded import BoundedOptimizer
from tula_hpc.optim.groups import scaled_and_unscaled
from tula_hpc.optim.lars import lars
from tula_hpc.optim.post_local_sgd import PostLocalSGD
from tula_hpc.ranks.distributed import inner_module


def build_optimizer(settings: Settings, model: torch.nn.Module, global_batch: int) -> torch.optim.Optimizer:
    """LARS, or SGD or AdamW, wrapped for the methods that scale gradients. The loop sets its rate before each step.

    Raises:
        TulaError: If a pattern in `workload.unscaled` fits no parameter.
    """
    hyper, method = settings.training, settings.method
    parameters = [p for p in model.parameters() if p.requires_grad]
    if method.kind is MethodKind.lars:
        options = {"momentum": hyper.momentum, "weight_decay": hyper.weight_decay}
        return lars(parameters, hyper.lr, trust_coefficient=method.trust_coefficient, **options)
    inner = _inner_optimizer(settings, model, parameters)
    batches: dict[str, Any] = {"global_batch": global_batch, "small_batch": method.small_batch}
    if method.kind is MethodKind.ags:
        cap: dict[str, Any] = {} if method.scale_cap is None else {"scale_cap": method.scale_cap}
        return BoundedOptimizer(inner, step_floor=method.step_floor, step_cap=method.step_cap, **cap, **batches)
    if method.kind is MethodKind.ags_paper:
        return TulaOptimizer.paper(inner, delta_threshold=method.delta_threshold, **batches)
    if method.kind is MethodKind.static:
        return TulaOptimizer(
            inner,
            global_batch=global_batch,
            delta_threshold=method.delta_threshold,
            static_scale=method.static_scale,
        )
    if method.kind is not MethodKind.ags_measured:
        return inner
    return TulaOptimizer(
        inner,
        **batches,
        delta_threshold=method.delta_threshold,
        granularity=method.granularity.value,
        gate=method.gate.value,
        s_min=method.scale_floor,
        refresh_samples=method.refresh_samples,
        refresh_every=method.refresh_steps,
        scale_smoothing=method.scale_smoothing,
        delta_smoothing=method.delta_smoothing,
        exponent=method.exponent,
        s_max=method.scale_cap,
    )


def _inner_optimizer(
    settings: Settings, model: torch.nn.Module, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    hyper, groups = settings.training, [{"params": parameters}]
    if settings.method.kind in (MethodKind.ags, MethodKind.ags_measured):
        try:
            groups = scaled_and_unscaled(inner_module(model), settings.workload.unscaled)
        except ValueError as error:
            raise TulaError(f"workload.{error}") from None
    if hyper.optimizer is OptimizerKind.sgd:
        return torch.optim.SGD(groups, hyper.lr, hyper.momentum, weight_decay=hyper.weight_decay)
    betas = (hyper.betas[0], hyper.betas[1])
    return torch.optim.AdamW(groups, hyper.lr, betas, hyper.eps, hyper.weight_decay)


def build_averaging(
    settings: Settings, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> PostLocalSGD | None:
    """What averages the ranks' models, if the method is post-local SGD; at the end of an epoch they are in any case."""
    method = settings.method
    if method.kind is not MethodKind.polo:
        return None
    period = math.ceil(steps_per_epoch / method.sync_per_epoch)
    return PostLocalSGD(model, optimizer, period=period, momentum=method.local_momentum.value)
