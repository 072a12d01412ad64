"""The report shows what the run folder holds, on one page that needs nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tula_hpc.candidates import Candidate
from tula_hpc.config import MethodKind, Settings, SearchMode, to_plain
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.verdicts import Verdict
from tula_hpc.models.memory import MemoryFit, fit_memory
from tula_hpc.models.pricing import NodeHourPrice
from tula_hpc.models.selection import candidate_table, select
from tula_hpc.models.step_time import StepTimeFit, fit_step_time
from tula_hpc.runs import RunFolder, write_json, write_text


def settings_of(name: str = "demo", **changes: Any) -> Settings:
    """A small run: 1 and 2 nodes, batches 8 to 64 a rank, six epochs; `changes` are `section__field=value`."""
    settings = Settings(name=name)
    settings.workload.name = "cnn"
    settings.workload.model = {"_target_": "torchvision.models.resnet50", "num_classes": 1000}
    settings.workload.dataset = {"_target_": "tula_hpc.ranks.workloads.imagenet"}
    settings.workload.train_samples, settings.workload.test_samples = 50_000, 10_000
    settings.grid.min_nodes, settings.grid.max_nodes = 1, 2
    settings.grid.min_batch_per_rank, settings.grid.max_batch_per_rank = 8, 64
    settings.grid.min_global_batch = 8
    settings.search.mode = SearchMode.full
    settings.training.epochs, settings.training.milestones = 6, [4]
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(settings, section), name, value)
    return settings


def point(candidate: Candidate, limit_gib: float, rng: np.random.Generator, slope_gib: float = 0.085) -> dict[str, Any]:
    """One measured configuration, from known formulas and 3 % noise."""
    n, b = candidate.num_nodes, candidate.batch_per_rank
    compute = 0.012 + 0.0027 * b
    sync = 0.0 if candidate.world_size == 1 else 0.03 if n == 1 else 0.09 + 0.006 * (n - 2)
    step = (compute**3 + sync**3) ** (1 / 3) * rng.lognormal(0, 0.03)
    activations = slope_gib * b * 0.97
    memory = (1.4 + slope_gib * b) * rng.lognormal(0, 0.006)
    return {
        "num_nodes": n,
        "gpus_per_node": candidate.gpus_per_node,
        "batch_per_rank": b,
        "global_batch": candidate.global_batch,
        "step_time_s": step,
        "compute_time_s": compute,
        "sync_time_s": max(step - compute, 0.0),
        "data_s": 0.02 * step,
        "forward_s": 0.33 * (compute - 0.004),
        "backward_s": 0.65 * (compute - 0.004),
        "optimizer_s": 0.004,
        "memory_gib": memory,
        "param_gib": 0.1,
        "grad_gib": 0.1,
        "optimizer_gib": 0.1,
        "activation_gib": activations,
        "batch_gib": 0.0006 * b,
        "other_gib": max(memory - 0.3 - activations - 0.0006 * b, 0.0),
        "limit_gib": limit_gib,
        "allocator_retries": 0,
        "hosts": [f"gpu{i:03d}" for i in range(n)],
        "device": "Tesla V100-SXM2-32GB",
    }


def begin(run: RunFolder, settings: Settings) -> None:
    """What exists from the first second: config and plan."""
    run.create()
    write_text(run.config, json.dumps(to_plain(settings)))  # JSON is YAML
    write_json(
        run.plan,
        {
            "candidates": [c.name for c in settings.grid_candidates()],
            "search": settings.search.mode.name,
            "measurement_signature": "0123456789",
            "command": ["python", "-m", "tula_hpc", f"+experiment={settings.name}", "training.epochs=6"],
            "working_dir": "/home/me/my work",
            "runs_on": "Slurm cluster alps",
            "software": {"python": "3.11.7", "torch": "2.6.0"},
            "started": 1_750_000_000.0,
        },
    )


def profile(run: RunFolder, settings: Settings, limit_gib: float = 31.7, slope_gib: float = 0.085) -> None:
    """Journal and fit.json of a full search in which what needs more memory than there is has run out of it."""
    rng, journal, points, infeasible = np.random.default_rng(3), Journal(run.journal), [], {}
    for c in settings.grid_candidates():
        attempt = Attempt(f"profile/{c.name}", 1, f"tag-{c.name}", c.batch_per_rank, c.num_nodes)
        journal.intend(attempt)
        journal.submitted(attempt, "4242")
        if 1.4 + slope_gib * c.batch_per_rank > limit_gib:
            reason = f"CUDA out of memory. Tried to allocate 2.20 GiB of {limit_gib} GiB"
            journal.concluded(attempt, Verdict.cuda_oom, reason)
            infeasible[c.name] = reason
            continue
        journal.concluded(attempt, Verdict.success, "every expected file is there and whole")
        points.append(point(c, limit_gib, rng, slope_gib))
    table = pd.DataFrame(points)
    memory = fit_memory(table, [int(name.split("-b")[1]) for name in infeasible])
    forms = {form: fit_step_time(table, form).to_dict() for form in ("overlap", "additive")}
    values = {
        "points": points,
        "step_time": forms,
        "step_time_form": "overlap",
        "memory": memory.to_dict(),
        "memory_limit_gib": limit_gib,
        "memory_fraction": 0.9,
        "max_batch_per_rank": memory.max_batch_per_rank(limit_gib, 0.9),
        "infeasible": infeasible,
        "failed": {},
    }
    write_json(run.fit, values)


def choose(run: RunFolder, settings: Settings) -> dict[str, Any]:
    """selection.json, through the project's own table and choice."""
    fit = json.loads(run.fit.read_text())
    price, gpus = NodeHourPrice(settings.pricing.price_per_node_hour), settings.cluster.ranks_per_node
    table = candidate_table(
        settings.grid_candidates(),
        StepTimeFit.from_dict(fit["step_time"]["overlap"]),
        MemoryFit.from_dict(fit["memory"]),
        price,
        settings.train_samples,
        settings.training.epochs,
        fit["memory_limit_gib"],
        fit["memory_fraction"],
        {Candidate.from_name(name, gpus) for name in fit["infeasible"]},
        pd.DataFrame(fit["points"]),
    )
    values = {
        **select(table, settings.objective.kind.name).to_dict(),
        "price": price.describe(),
        "currency": settings.pricing.currency,
        "candidates": json.loads(table.to_json(orient="records", double_precision=15)),
    }
    write_json(run.selection, values)
    return values


def train(run: RunFolder, settings: Settings, epochs: int, relaunched_at: int | None = None) -> None:
    """metrics.jsonl of the first `epochs` epochs and, after all of them, result.json."""
    chosen, rng = json.loads(run.selection.read_text()), np.random.default_rng(4)
    candidate = Candidate(chosen["num_nodes"], chosen["batch_per_rank"], chosen["gpus_per_node"])
    lines: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        if epoch == relaunched_at:
            candidate = Candidate(candidate.num_nodes, candidate.batch_per_rank // 2, candidate.gpus_per_node)
        steps_down = sum(epoch > m for m in settings.training.milestones)
        progress = 1 - np.exp(-epoch / (0.15 * settings.training.epochs))
        noise = rng.normal(0, 1) / (1 + 3 * steps_down)
        top1 = (58 + 6 * min(steps_down, 1) + 4 * min(steps_down, 2)) * progress + noise
        step_s = chosen["predicted"]["step_time_s"] * 1.06 * rng.lognormal(0, 0.01)
        line = {
            "epoch": epoch,
            "samples": epoch * settings.train_samples,
            "lr": settings.training.lr * settings.training.lr_decay**steps_down,
            "train_loss": 6.9 - 4.6 * progress - 0.5 * min(steps_down, 2),
            "train_top1": float(top1 + 3 * steps_down - 1),
            "test_loss": 6.7 - 4.4 * progress - 0.4 * min(steps_down, 2) + 0.05 * noise,
            "test_top1": float(top1),
            "test_top5": float(min(99.0, top1 + 18)),
            "global_batch": candidate.global_batch,
            "method": settings.method.kind.name,
            "num_nodes": candidate.num_nodes,
            "step_time_s": float(step_s),
            "train_s": float(step_s * candidate.steps_per_epoch(settings.train_samples)),
            "epoch_s": float(1.05 * step_s * candidate.steps_per_epoch(settings.train_samples)),
        }
        if settings.method.kind is MethodKind.ags:
            line |= {
                "gradient_variability": float(0.9 * np.exp(-4 * progress) + 0.1 * rng.random()),
                "mean_scale": float(1.5 + 0.4 * progress + 0.05 * noise),
                "scaled_fraction": float(np.clip(progress + 0.02 * noise, 0, 1)),
                "norm": 1.0,
            }
        lines.append(line)
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    if epochs < settings.training.epochs:
        return
    best = max(lines, key=lambda line: line["test_top1"])
    result = {
        "epochs": epochs,
        "num_nodes": candidate.num_nodes,
        "batch_per_rank": candidate.batch_per_rank,
        "global_batch": candidate.global_batch,
        "method": settings.method.kind.name,
        **{key: lines[-1][key] for key in ("test_top1", "test_top5", "train_top1")},
        "best_test_top1": best["test_top1"],
        "best_epoch": best["epoch"],
        "step_time_s": float(np.median([line["step_time_s"] for line in lines])),
        "train_s": sum(line["epoch_s"] for line in lines),
        "last_attempt_s": 1.0,
    }
    write_json(run.train_result, result)
