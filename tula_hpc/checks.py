"""The rules that settings must keep, checked once before anything is submitted. A check only complains."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tula_hpc import imports, methods
from tula_hpc.candidates import TYPE_NAME, doublings
from tula_hpc.config import (
    ClusterKind,
    ControllerKind,
    DataKind,
    MethodKind,
    MethodSettings,
    ObjectiveKind,
    OptimizerKind,
    PricingKind,
    Settings,
    TrainingSettings,
    to_plain,
)
from tula_hpc.control.packing import node_hours
from tula_hpc.models.search import SearchMode, first_points

SHORTEST_CONTROLLER_MIN = 10

_POSITIVE = (
    "controller.memory_gib",
    "cluster.cpus_per_rank",
    "cluster.profile_time_limit_min",
    "cluster.train_time_limit_min",
    "cluster.memory_gib",
    "cluster.max_memory_gib",
    "cluster.hang_timeout_min",
    "cluster.max_running_jobs",
    "cluster.poll_interval_s",
    "workload.train_samples",
    "workload.test_samples",
    "workload.sequence_length",
    "workload.vocabulary",
    "data.train_samples",
    "data.test_samples",
    "grid.min_nodes",
    "grid.min_global_batch",
    "grid.min_batch_per_rank",
    "search.timed_steps",
    "search.compute_steps",
    "search.max_seconds",
    "search.tolerance",
    "search.max_points",
    "search.max_node_hours",
    "search.max_minutes",
    "pricing.price_per_node_hour",
    "pricing.price_per_gib_hour",
    "pricing.interruptions_per_node_hour",
    "pricing.checkpoint_interval_min",
    "objective.deadline_h",
    "objective.budget",
    "objective.max_nodes",
    "method.small_batch",
    "method.delta_threshold",
    "method.refresh_epochs",
    "method.refresh_samples",
    "method.refresh_steps",
    "method.exponent",
    "method.lars_lr",
    "method.static_scale",
    "method.trust_coefficient",
    "method.sync_per_epoch",
    "method.step_cap",
    "training.epochs",
    "training.lr",
    "training.eps",
    "training.lr_decay",
    "training.eval_batch_per_rank",
    "training.curvature_samples",
    "training.checkpoint_every_min",
    "training.collective_timeout_s",
)
_NOT_NEGATIVE = (
    "cluster.gpus_per_node",
    "cluster.file_lag_s",
    "data.loader_workers",
    "search.warmup_steps",
    "objective.tie_tolerance",
    "pricing.restart_min",
    "method.scale_floor",
    "method.local_from_epoch",
    "training.momentum",
    "training.weight_decay",
    "training.warmup_epochs",
    "training.max_relaunches",
)
_NULL_IS_NONE = ("method.scale_cap",)
_RANGES = (
    ("cluster.memory_gib", "cluster.max_memory_gib"),
    ("grid.min_nodes", "grid.max_nodes"),
    ("grid.min_nodes", "objective.max_nodes"),
    ("grid.min_batch_per_rank", "grid.max_batch_per_rank"),
    ("grid.min_global_batch", "grid.max_global_batch"),
)


def _value(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check(settings: Settings) -> list[str]:
    """Every rule the settings break, one sentence each: key, value, limit and way out. Changes nothing."""
    first = (
        _check_signs,
        _check_finite,
        _check_folders,
        _check_times,
        _check_queue_waits,
        _check_service_units,
        _check_shape,
        _check_method_values,
        _check_training_values,
        _check_sbatch,
        _check_controller,
        _check_node_types,
    )
    problems = [problem for rule in first for problem in rule(settings)]
    if problems:  # what follows computes with these values
        return problems
    further = (_check_method, _check_optimizer, _check_grid, _check_budget, _check_workload, _check_data, _check_local)
    return [problem for rule in further for problem in rule(settings)]


_INT32 = 2**31 - 1
_AT_MOST = {
    "cluster.cpus_per_rank": 4096,
    "data.loader_workers": 512,
    "search.warmup_steps": 10**6,
    "search.timed_steps": 10**6,
    "search.compute_steps": 10**6,
    "training.collective_timeout_s": 10**6,
    "training.eval_batch_per_rank": _INT32,
    "workload.num_classes": _INT32,
    "workload.sequence_length": _INT32,
    "workload.vocabulary": _INT32,
}
"""What is beyond is a slip of the hand, which only a job would tell: in words of its own, or by a host at its end."""


def _check_signs(settings: Settings) -> list[str]:
    """What a number alone, or with the one above it, must be."""
    positive, not_negative = ({key: _value(settings, key) for key in keys} for keys in (_POSITIVE, _NOT_NEGATIVE))
    problems = [
        f"{key} is {value}; it must be greater than 0 and finite"
        for key, value in positive.items()
        if value is not None and not 0 < value < math.inf
    ]
    problems += [
        f"{key} is {value}; it must be 0 or greater and finite"
        for key, value in not_negative.items()
        if value is not None and not 0 <= value < math.inf
    ]
    problems += [
        f"{key} is {value}; it must be at most {most:g}"
        for key, most in _AT_MOST.items()
        if (value := _value(settings, key)) is not None and most < value < math.inf
    ]
    for low, high in _RANGES:
        least, most = _value(settings, low), _value(settings, high)
        if least is not None and most is not None and least > most:
            problems.append(f"{low} is {least}, above {high}={most}; lower one or raise the other")
    if not 0 < settings.memory_fraction <= 1:
        problems.append(f"search.memory_fraction is {settings.search.memory_fraction}; it must lie in (0, 1]")
    return problems


def _check_finite(settings: Settings) -> list[str]:
    """The other numbers, also those that a user's own keys have."""
    told = {*_POSITIVE, *_NOT_NEGATIVE}

    def walk(value: Any, key: str) -> Iterator[str]:
        if isinstance(value, dict):
            for name, part in value.items():
                yield from walk(part, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list):
            for place, part in enumerate(value):
                yield from walk(part, f"{key}[{place}]")
        elif isinstance(value, float) and not math.isfinite(value) and key not in told:
            yield f"{key} is {value}; give a finite number" + (", or null" if key in _NULL_IS_NONE else "")

    return list(walk(to_plain(settings), ""))


def _check_folders(settings: Settings) -> list[str]:
    problems = []
    if re.fullmatch(r"[^/\0]+", settings.name) is None or settings.name in (".", ".."):
        problems.append(f"name is {settings.name!r}; it becomes a folder name, so use one without '/'")
    folder = str(Path(settings.run_root).expanduser().absolute() / settings.name)
    if settings.cluster.kind is ClusterKind.slurm and (pattern := re.search(r"%\d*[AabJjNnstux%]", folder)):
        problems.append(
            f"run_root and name make the path {folder!r}, and Slurm puts something else for {pattern[0]} in the paths "
            "of logs; choose a run_root, or a folder to start from, without that"
        )
    if not settings.run_root.strip():
        problems.append("run_root is ''; give the folder that holds the run folders, such as runs")
    return problems


def _check_times(settings: Settings) -> list[str]:
    """A job, and the patience with it, outlast the timing of a candidate."""
    return [
        f"{key} is {_value(settings, key):g}, and a candidate may be timed for search.max_seconds="
        f"{settings.search.max_seconds:g}; raise the one or lower the other, and leave a minute for the start"
        for key in ("cluster.profile_time_limit_min", "cluster.hang_timeout_min")
        if 60 * _value(settings, key) <= settings.search.max_seconds < math.inf
    ]


def _check_shape(settings: Settings) -> list[str]:
    workload = settings.workload
    if all(size >= 1 for size in workload.input_shape) and workload.num_classes >= 0:
        return []
    return [
        f"workload.input_shape is {workload.input_shape} and workload.num_classes {workload.num_classes}; sizes must "
        "be 1 or greater"
    ]


def _check_method_values(settings: Settings) -> list[str]:
    method, problems = settings.method, []
    if method.scale_floor is not None and method.scale_floor > 1:
        problems.append(f"method.scale_floor is {method.scale_floor}; it must be at most 1, the unscaled step")
    if method.scale_cap is not None and method.scale_cap < 1:
        problems.append(f"method.scale_cap is {method.scale_cap}; it must be at least 1, the unscaled step")
    if not 0 <= method.step_floor <= method.step_cap:
        problems.append(
            f"method.step_floor is {method.step_floor}; it must lie between 0 and method.step_cap={method.step_cap}"
        )
    for key in ("method.scale_smoothing", "method.delta_smoothing"):
        if not 0 <= _value(settings, key) < 1:
            problems.append(f"{key} is {_value(settings, key)}; it must lie in [0, 1), the weight of the past")
    return problems


def _check_training_values(settings: Settings) -> list[str]:
    training, problems = settings.training, []
    if training.momentum >= 1:
        problems.append(f"training.momentum is {training.momentum}; it must be below 1, the weight of the past")
    if not 0 <= training.seed < 2**63:
        problems.append(f"training.seed is {training.seed}; it must lie in [0, 2^63)")
    milestones = training.milestones
    if milestones != sorted(milestones) or any(epoch < 1 for epoch in milestones):
        problems.append(f"training.milestones is {milestones}; list epochs from 1 on in rising order")
    betas = training.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        problems.append(f"training.betas is {betas}; give two weights of the past in [0, 1), such as [0.9, 0.999]")
    if training.curvature_samples is not None and training.curvature_samples > settings.train_samples:
        problems.append(
            f"training.curvature_samples is {training.curvature_samples}, and there are {settings.train_samples} "
            "training samples (workload.train_samples, data.train_samples); give at most that many, some hundred are "
            "enough"
        )
    return problems


_PRICES_OF_TYPES = {
    PricingKind.node_hour: "price_per_node_hour",
    PricingKind.spot: "price_per_node_hour",
    PricingKind.memory: "price_per_gib_hour",
}


def _check_node_types(settings: Settings) -> list[str]:
    """Names and values of the types of node, and that costs which are compared are not those of a default price."""
    types, key = settings.cluster.node_types, "cluster.node_types"
    if not types:
        return []
    problems = []
    if settings.cluster.kind is ClusterKind.local:
        problems.append(
            f"{key} names {', '.join(types)} and cluster.kind is local, a machine of one type; use cluster=slurm, or "
            f"drop {key}"
        )
    for name, own in types.items():
        if re.fullmatch(TYPE_NAME, name) is None:
            problems.append(
                f"{key} has the name {name!r}; it becomes part of folder names, so use letters, digits and _, with a "
                "letter first, such as h100"
            )
        for field in dataclasses.fields(own):
            value, may_be_0 = getattr(own, field.name), field.name == "gpus_per_node"
            if isinstance(value, (int, float)) and not (0 < value < math.inf or (may_be_0 and value == 0)):
                least = "0 or greater" if may_be_0 else "greater than 0"
                problems.append(f"{key}.{name}.{field.name} is {value}; it must be {least} and finite")
        memory_gib, limit_gib = (getattr(settings.of_type(name).cluster, k) for k in ("memory_gib", "max_memory_gib"))
        if memory_gib is not None and limit_gib is not None and memory_gib > limit_gib:
            problems.append(
                f"{key}.{name}: memory_gib is {memory_gib:g}, above max_memory_gib={limit_gib:g}; lower one or raise "
                "the other"
            )
        if own.max_nodes is not None and 0 < own.max_nodes < settings.grid.min_nodes:
            problems.append(
                f"{key}.{name}.max_nodes is {own.max_nodes}, below grid.min_nodes={settings.grid.min_nodes}; raise it, "
                "lower grid.min_nodes, or drop the type"
            )
    price = _PRICES_OF_TYPES.get(settings.pricing.kind)
    without = [name for name, own in types.items() if price and getattr(own, price) is None]
    if price and 0 < len(without) < len(types):
        problems.append(
            f"{key}.{without[0]}.{price} is null and other types have one; give it for {' and '.join(without)} too"
        )
    counts = settings.objective.kind is ObjectiveKind.cost or settings.objective.budget is not None
    if price == "price_per_node_hour" and counts and 1 < len(types) == len(without):
        wanted = "objective.kind is cost" if settings.objective.budget is None else "objective.budget is set"
        problems.append(
            f"{wanted} and none of {key} has a {price}; give each its own, or the same where they cost the same"
        )
    return problems


def _check_queue_waits(settings: Settings) -> list[str]:
    key, waits = "objective.queue_wait_min", settings.objective.queue_wait_min
    problems = []
    for nodes, wait_min in waits.items():
        if not str(nodes).isdecimal() or int(str(nodes)) < 1:
            problems.append(f"{key} has the key {nodes!r}; its keys are numbers of nodes, as in {{1: 5, 8: 240}}")
        if isinstance(wait_min, bool) or not isinstance(wait_min, (int, float)) or not 0 <= wait_min < math.inf:
            problems.append(f"{key}.{nodes} is {wait_min!r}; give minutes, 0 or greater and finite")
    if len({str(nodes) for nodes in waits}) < len(waits):
        problems.append(f"{key} gives a number of nodes twice: {waits}; keep one of them")
    return problems


def _check_service_units(settings: Settings) -> list[str]:
    """The weights that the settings give; those of a partition are checked with the site."""
    if settings.pricing.kind is not PricingKind.service_units:
        return []
    given = {node_type: settings.of_type(node_type) for node_type in settings.node_types}
    if any(own.pricing.billing_weights is not None for own in given.values()):
        from tula_hpc.prices import service_units

        problems = []
        for node_type, own in given.items():
            weights, about = own.pricing.billing_weights, f"node type {node_type}: " if node_type else ""
            try:
                if weights is not None:
                    service_units(own.cluster, weights, needs_units=True)
            except ValueError as error:
                problems.append(f"{about}pricing.billing_weights is {weights!r}: {error}")
        return problems
    if settings.cluster.kind is ClusterKind.local:
        return [
            "pricing.billing_weights is null and cluster.kind is local, which has no partition to ask; give weights, "
            "such as \"pricing.billing_weights='CPU=1.0,Mem=0.25G,GRES/gpu=16'\", or another pricing"
        ]
    return []


_OWN_SBATCH_OPTIONS = {
    **dict.fromkeys(("job_name", "comment"), "jobs are found again by it"),
    **dict.fromkeys(("array", "signal", "output", "error", "open_mode", "requeue", "no_requeue"), "this tool sets it"),
    **dict.fromkeys(("nodes", "ntasks", "ntasks_per_node"), "it is the grid's (grid.*, cluster.gpus_per_node)"),
    "time": "set cluster.profile_time_limit_min and cluster.train_time_limit_min",
    "mem": "set cluster.memory_gib (without that it may be 0, for all of a node)",
    "cpus_per_task": "set cluster.cpus_per_rank",
    **{key: f"set cluster.{key}" for key in ("partition", "account", "qos", "constraint")},
}
"""What `cluster.sbatch` may not say, and what to do instead: it would come last, and undo what was asked for."""


def _check_sbatch(settings: Settings) -> list[str]:
    found = []
    for key, value in settings.cluster.sbatch.items():
        name = str(key).strip("-").replace("-", "_")
        all_memory = name == "mem" and str(value) == "0" and settings.cluster.memory_gib is None
        if name in _OWN_SBATCH_OPTIONS and not all_memory:
            found.append(f"cluster.sbatch has the key {key!r}; leave it out: {_OWN_SBATCH_OPTIONS[name]}")
    return found


def _check_controller(settings: Settings) -> list[str]:
    if settings.controller.kind is ControllerKind.here:
        return []
    problems = []
    if settings.cluster.kind is ClusterKind.local:
        problems.append(
            "controller.kind is slurm and cluster.kind is local: jobs of this machine end with the command that "
            "watches them; use controller=here, or cluster=slurm"
        )
    if settings.controller.time_limit_min < SHORTEST_CONTROLLER_MIN:
        problems.append(
            f"controller.time_limit_min is {settings.controller.time_limit_min}; it must be {SHORTEST_CONTROLLER_MIN} "
            "or more: the job has to queue itself again before its end"
        )
    return problems


def _check_method(settings: Settings) -> list[str]:
    """A setting of another method, a local phase that never comes, a package that is not there."""
    method, found = settings.method, []
    for field in dataclasses.fields(MethodSettings):
        value, default = getattr(method, field.name), field.default
        if method.kind not in methods.readers(field.name) and value != default:
            others = " or ".join(kind.name for kind in methods.readers(field.name))
            found.append(
                f"method.{field.name} is {getattr(value, 'name', value)}, which is for method={others}, and the method "
                f"is {method.kind.name}; leave it out, or choose the method by its group, method={others.split()[0]}"
            )
    epochs, local_from = settings.training.epochs, methods.local_from_epoch(settings)
    if method.kind is MethodKind.polo and local_from >= epochs:
        key = "training.warmup_epochs" if method.local_from_epoch is None else "method.local_from_epoch"
        found.append(
            f"{key} lets the local phase of method=polo begin after epoch {local_from}, and training.epochs is "
            f"{epochs}; set method.local_from_epoch to at most {epochs - 1}, or train longer"
        )
    if method.kind is MethodKind.lars and settings.cluster.python is None and find_spec("pytorch_optimizer") is None:
        found.append(
            "method.kind is lars, which needs the package pytorch_optimizer, and this Python has none; run "
            "pip install 'tula-hpc[lars]', or choose another method"
        )
    return found


_SGD_ALONE = {
    MethodKind.ags: "its bounds are those of SGD's step",
    MethodKind.lars: "LARS is an optimizer itself",
    MethodKind.polo: "post-local SGD averages SGD's momentum",
}


def _check_optimizer(settings: Settings) -> list[str]:
    """A method that brings an optimizer of its own, a setting of another optimizer."""
    hyper, method = settings.training, settings.method.kind
    if hyper.optimizer is OptimizerKind.sgd:
        others: tuple[str, ...] = ("betas", "eps")
    elif method in _SGD_ALONE:
        return [
            f"training.optimizer is adamw and method.kind is {method.name}: {_SGD_ALONE[method]}; use "
            "training.optimizer=sgd, or AdamW with method=lrs_sqrt"
        ]
    else:
        others = ("momentum",)
    default = to_plain(TrainingSettings())
    return [
        f"training.{key} is {getattr(hyper, key)}, which training.optimizer={hyper.optimizer.name} does not read; "
        "leave it out, or choose the other optimizer"
        for key in others
        if getattr(hyper, key) != default[key]
    ]


def _check_grid(settings: Settings) -> list[str]:
    with_candidates = {c.node_type for c in settings.grid_candidates()}
    return [
        f"{f'node type {node_type}: ' if node_type else ''}{_empty_grid(settings.of_type(node_type))}"
        for node_type in settings.node_types
        if node_type not in with_candidates
    ]


def _empty_grid(settings: Settings) -> str:
    grid, largest = settings.grid, doublings(settings.grid.min_nodes, settings.grid.max_nodes)[-1]
    ranks = settings.cluster.ranks_per_node
    reach = f"{grid.min_nodes * ranks * grid.min_batch_per_rank} to {largest * ranks * grid.max_batch_per_rank}"
    limit = min(grid.max_global_batch or settings.train_samples, settings.train_samples)
    return (
        f"the grid is empty: {grid.min_nodes} to {largest} nodes x {ranks} ranks x {grid.min_batch_per_rank} to "
        f"{grid.max_batch_per_rank} a rank give global batches of {reach}, and grid.min_global_batch="
        f"{grid.min_global_batch} to {limit} (grid.max_global_batch, or the {settings.train_samples} training samples) "
        "are allowed; widen one of them"
    )


def _check_budget(settings: Settings) -> list[str]:
    """A budget needs a search that can stop, and must hold its first points."""
    search = settings.search
    given = {key: getattr(search, key) for key in ("max_points", "max_node_hours", "max_minutes")}
    given = {key: value for key, value in given.items() if value is not None}
    if search.mode is not SearchMode.adaptive:
        return [
            f"search.{key} is {value:g} and search.mode is {search.mode.name}, which measures the same points whatever "
            f"they cost; use search=adaptive, or drop search.{key}"
            for key, value in given.items()
        ]
    first = first_points(settings.grid_candidates())
    needs = {
        "max_points": float(len(first)),
        "max_node_hours": node_hours(settings, sorted(first)),
    }
    return [
        f"search.{key} is {given[key]:g}; the first points alone take {math.ceil(100 * need - 1e-9) / 100:g} "
        f"({', '.join(c.name for c in sorted(first))}); raise it to that at least"
        for key, need in needs.items()
        if key in given and given[key] < need
    ]


def _check_workload(settings: Settings) -> list[str]:
    problems = []
    for part in ("model", "dataset", "loss"):
        node = getattr(settings.workload, part)
        if "_target_" not in node:
            problems.append(
                f"workload.{part} has no _target_; give the import path of a callable, such as {_EXAMPLES[part]}"
            )
        elif (reason := imports.why_not_importable(str(node["_target_"]))) is not None:
            problems.append(f"workload.{part}._target_ is {node['_target_']}: {reason}")
    workload = settings.workload
    known = (workload.input_shape and workload.num_classes) or (workload.sequence_length and workload.vocabulary)
    if settings.data.kind is DataKind.synthetic and not known:
        problems.append(
            "data=synthetic needs workload.input_shape and workload.num_classes; set them to the shape of one input "
            "and the number of classes, or set workload.sequence_length and workload.vocabulary where inputs are tokens"
        )
    return problems


_EXAMPLES = {
    "model": "torchvision.models.resnet18",
    "dataset": "tula_hpc.ranks.workloads.cifar100",
    "loss": "torch.nn.CrossEntropyLoss",
}


def data_is_missing(settings: Settings) -> bool:
    """Whether the data set should be below `data.root` and is not."""
    files = settings.workload.data_files
    return (
        settings.data.kind is DataKind.real
        and bool(files)
        and not any((Path(settings.data.root).expanduser() / name).exists() for name in files)
    )


def _check_data(settings: Settings) -> list[str]:
    if settings.data.download and not settings.workload.data_files and settings.data.kind is DataKind.real:
        return [
            "data.download is true and workload.data_files is empty, so nothing tells whether the data set is there; "
            "name a file of it in workload.data_files, or drop data.download where there is nothing to fetch"
        ]
    if settings.data.download or not data_is_missing(settings):
        return []
    root = Path(settings.data.root).expanduser().absolute()
    return [
        f"data.root is {root}, which holds none of {', '.join(settings.workload.data_files)}; set data.root to the "
        "folder that does, or data.download=true to fetch the data set on this machine, or data=synthetic to profile "
        "without it"
    ]


def _check_local(settings: Settings) -> list[str]:
    """GPUs of this machine must be as many as the largest local candidate has ranks, and cores as many as one asks for:
    CPU ranks may share them, as nodes that are only tried out."""
    if settings.cluster.kind is not ClusterKind.local:
        return []
    cores, wanted = os.cpu_count() or 1, settings.cluster.cpus_per_rank
    if wanted > cores:
        return [f"cluster.cpus_per_rank is {wanted} and this machine has {cores} cores; lower it"]
    if settings.cluster.gpus_per_node == 0:
        return []
    largest = max((c.world_size for c in settings.grid_candidates()), default=0)
    present = count_local_gpus()
    if largest <= present:
        return []
    return [
        f"grid.max_nodes is {settings.grid.max_nodes} with cluster.gpus_per_node={settings.cluster.gpus_per_node}: "
        f"that needs {largest} GPUs and this machine has {present}; lower one of them, or set cluster.gpus_per_node=0 "
        "for CPUs"
    ]


def count_local_gpus() -> int:
    """NVIDIA GPUs that processes started here may use, asked without torch; 0 if nvidia-smi is missing or fails."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = [device.strip() for device in visible.split(",") if device.strip()]
        return devices.index("-1") if "-1" in devices else len(devices)  # what follows it is not seen by CUDA
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return 0
    try:
        listing = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
