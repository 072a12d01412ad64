"""What two runs must have in common to be the same run, and to share measurements."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from tula_hpc import imports
from tula_hpc.config import ClusterKind, MethodKind, Settings, to_plain
from tula_hpc.errors import TulaError
from tula_hpc.runs import software_versions


def _result_fields(settings: Any) -> Any:
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {
            f.name: _result_fields(getattr(settings, f.name))
            for f in dataclasses.fields(settings)
            if f.metadata.get("result", True)
            and not (f.metadata.get("unsigned_if_empty") and not getattr(settings, f.name))
        }
    if isinstance(settings, dict):
        return {str(key): _result_fields(value) for key, value in settings.items()}
    return to_plain(settings)


def _short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def signature(settings: Settings) -> str:
    """Ten hex digits of everything that changes the result of the run: settings, and the user's own code."""
    return _short_hash([_result_fields(settings), list(own_code(settings).values())])


def _file_hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def own_code(settings: Settings) -> dict[str, str]:
    """Import path of model, data set or loss -> hash of the file, for those that come from the user's own files; what
    these import is not followed."""
    workload = settings.workload
    targets = [str(node.get("_target_", "")) for node in (workload.model, workload.dataset, workload.loss)]
    return {target: _file_hash(file) for target in targets if (file := imports.own_source(target)) is not None}


def refuse_changed_code(known: dict[str, str], of: Path) -> None:
    """Compare the user's files with what `own_code` said of them for a run or an attempt, whose folder `of` is. A file
    that is not found here, as inside a container that has it installed, is passed over.

    Raises:
        TulaError: If one has changed.
    """
    files = {target: imports.own_source(target) for target in known}
    changed = {str(file) for target, file in files.items() if file is not None and _file_hash(file) != known[target]}
    if changed:
        raise TulaError(
            f"{' and '.join(sorted(changed))} changed since {of} was begun, which goes on with the file as it was; "
            "put that back, or give the run's command again: with the new file it begins a run of its own"
        )


def measurement_signature(settings: Settings) -> str:
    """Ten hex digits of everything that changes a measured step: what two runs must share to share measurements.

    Objective, prices, grid, epochs and learning rates are not in it; the version of torch, the user's own code and,
    where this machine is the cluster, its name are. Of a run on several types of node, ask `Settings.of_type`: what
    one type measures is shared with runs that have only that.
    """
    fields = _result_fields(settings)
    steps = {key: fields["search"][key] for key in ("warmup_steps", "timed_steps", "compute_steps", "max_seconds")}
    training = {
        key: fields["training"][key]
        for key in ("optimizer", "momentum", "precision", "channels_last", "eval_batch_per_rank")
    }
    # these differ in the learning rate only
    is_sgd = settings.method.kind in (MethodKind.lbt, MethodKind.lrs_linear, MethodKind.lrs_sqrt)
    method = "sgd" if is_sgd else fields["method"]
    data = {key: fields["data"][key] for key in ("kind", "root", "loader_workers")}
    machine = platform.node() if settings.cluster.kind is ClusterKind.local else ""
    software = [list(own_code(settings).values()), software_versions()["torch"]]
    settings_part = [fields["cluster"], fields["workload"], data, steps, training, method]
    return _short_hash([settings_part, machine, software])
