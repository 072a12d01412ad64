"""Step times and memory of the four models on GPUs, for the records in tests/data that predictions are judged by.

    python -m tests.benchmarks.step_times compose SETTINGS              where Hydra is: the settings of the models
    srun -N 4 python -m tests.benchmarks.step_times measure SETTINGS OUT MODEL...
    python -m tests.benchmarks.step_times table OUT > TABLE             one CSV of everything below OUT

`measure` times each batch as a profiling job does (`ranks.profiling.profile`, the same files), with the models and data
built once, and the batches one after the other in one process: on lent machines the start of a process costs more than
the steps. Memory is emptied in between, and batches grow, so that the peak is each one's own. With `--one-host` the
ranks are the GPUs of one node, started as `TULA_RANK=... TULA_WORLD_SIZE=...`.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tula_hpc.candidates import Candidate, doublings
from tula_hpc.config import Settings, from_plain, to_plain
from tula_hpc.models.memory_parts import MEMORY_PARTS
from tula_hpc.ranks.launch import Rank, this_rank
from tula_hpc.ranks.timings import read_point
from tula_hpc.runs import AttemptFolder, RunFolder, write_json

EXPERIMENTS = {
    "resnet50": ("resnet50_imagenet", doublings(8, 512)),
    "vgg11": ("vgg11_cifar100", doublings(32, 4096)),
    "alexnet": ("alexnet_caltech101", doublings(16, 1024)),
    "mobilenetv3": ("mobilenetv3_caltech256", doublings(8, 512)),
}
"""Model -> experiment and batches per rank."""
OVERRIDES = (
    "method=lbt",  # without the scaling, whose cost begins at some batch
    "data=synthetic",
    "cluster.gpus_per_node=1",
    "training.precision=tf32",
    "search.warmup_steps=5",
    "search.timed_steps=12",
    "search.compute_steps=4",
    "search.max_seconds=8",
)
COLUMNS = (
    "model", "num_nodes", "gpus_per_node", "batch_per_rank", "step_time_s", "compute_time_s", "sync_time_s",
    "allreduce_s", "step_time_p10_s", "step_time_p90_s", "data_s", "memory_gib", *MEMORY_PARTS, "limit_gib",
    "allocator_retries", "gradient_mib", "timed_steps",
)  # fmt: skip


def write_settings(file: Path) -> None:
    """The settings of every model in one file."""
    from tula_hpc.composition import compose

    plain = {
        model: to_plain(compose([f"+experiment={experiment}", *OVERRIDES]))
        for model, (experiment, _) in EXPERIMENTS.items()
    }
    file.write_text(json.dumps(plain))


def measure(
    settings_file: Path, out: Path, models: list[str], only: list[int], gpus_per_node: int, until: float
) -> None:
    """Every batch of the models, or those of `only`, on the ranks of this launch; what is there is left alone."""
    import torch

    from tula_hpc.ranks.distributed import pick_device, process_group
    from tula_hpc.ranks.training import set_precision

    me, plain = this_rank(), json.loads(settings_file.read_text())
    device = pick_device(torch.cuda.is_available(), me.local_rank)
    num_nodes = me.world_size // gpus_per_node
    meeting = AttemptFolder(out / "meetings" / me.launch)
    meeting.path.mkdir(parents=True, exist_ok=True)
    interface = None if gpus_per_node > 1 else "eth0"
    with process_group(me, meeting, device, 120.0, interface if device.type == "cuda" else None):
        for model in models:
            settings = from_plain(plain[model])
            set_precision(settings.training.precision)
            batches = [
                b for b in EXPERIMENTS[model][1] if b * me.world_size <= settings.train_samples and b in (only or [b])
            ]
            candidates = [Candidate(num_nodes, b, gpus_per_node) for b in batches]
            _measure_model(settings, candidates, me, RunFolder(out / model), device, until)


def _measure_model(
    settings: Settings, candidates: list[Candidate], me: Rank, run: RunFolder, device: Any, until: float
) -> None:
    import torch

    from tula_hpc.ranks import profiling
    from tula_hpc.ranks.signs import Heartbeat

    model, data = profiling.build_model(settings), profiling.build_dataset(settings, train=True)

    built_once = mock.patch.multiple(
        profiling,
        build_model=lambda settings: copy.deepcopy(model),
        build_dataset=lambda settings, train: data,
    )
    for candidate in candidates:
        attempt = run.attempt(f"profile/g{candidate.gpus_per_node}-{candidate.name}", 1)
        if attempt.rank_json(me.rank).exists():
            continue
        late = torch.tensor(float(time.time() > until), device=device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(late)
        if late > 0:
            return
        attempt.path.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with built_once:
            profiling.profile(settings, candidate, me, attempt, device, 1, Heartbeat(None))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if me.is_first:
            row = read_point(attempt, candidate)
            write_json(attempt.path / "point.json", row)
            words = f"{row['step_time_s'] * 1e3:.1f} ms, {row['memory_gib']:.1f} GiB, {time.monotonic() - began:.1f} s"
            print(run.path.name, candidate.gpus_per_node, candidate.name, words, flush=True)


def table(out: Path) -> None:
    """Prints a CSV of all points."""
    rows = [
        {"model": path.parents[3].name, **json.loads(path.read_text())}
        for path in sorted(out.glob("*/profile/*/*/point.json"))
    ]
    writer = csv.DictWriter(sys.stdout, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.7g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def main() -> None:
    """Whatever the first word says."""
    parser = argparse.ArgumentParser(description="Step times of the paper's models")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("compose").add_argument("settings", type=Path)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("settings", type=Path)
    measuring.add_argument("out", type=Path)
    measuring.add_argument("models", nargs="+", choices=EXPERIMENTS)
    measuring.add_argument("--one-host", action="store_true", help="the ranks are the GPUs of one node")
    measuring.add_argument("--batches", type=int, nargs="*", default=[], help="only these batches per rank")
    measuring.add_argument("--until", type=float, default=float("inf"), help="begin nothing after this time (epoch s)")
    verbs.add_parser("table").add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "compose":
        write_settings(arguments.settings)
    elif arguments.verb == "table":
        table(arguments.out)
    else:
        gpus_per_node = this_rank().world_size if arguments.one_host else 1
        measure(arguments.settings, arguments.out, arguments.models, arguments.batches, gpus_per_node, arguments.until)


if __name__ == "__main__":
    main()
