"""What an array of trivial tasks costs through our scheduler, next to `sbatch --wait` and to submitit.

    python -m tests.benchmarks.array_overhead --tasks 64 --repeats 3       (root, with Slurm's packages)

The tasks of all do the same: a fresh Python under `srun` makes one empty file.

    sbatch            `sbatch --wait --array` of `srun python -c ...`: what Slurm and Python take, nothing else
    sbatch_importing  the same, and each task first imports what submitit's entry point does
    submitit          `map_array`, then `result()` of each job
    ours              `SlurmScheduler.submit`, then `states` every `--poll` seconds until no task is active
    ours_lean         the same, with tasks that import our entry point `tula_hpc.ranks.job` and no submitit

Runs alternate, so that other work on the machine disturbs all alike; ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.slurm.cluster import SlurmSettings, ThrowawaySlurm
from tula_hpc.composition import compose
from tula_hpc.control import slurm as product
from tula_hpc.control.scheduler import JobRequest
from tula_hpc.runs import AttemptFolder, RunFolder, software_versions

BATCH_FILE = """#!/bin/bash
#SBATCH --array=0-{last}%{parallel}
#SBATCH --output={folder}/%A_%a.log
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
srun --unbuffered --output {folder}/%A_%a_%t.log {command}
"""


def command(folder: Path, imports: str = "os") -> str:
    """The trivial task of an array as a command line."""
    touch = f'open("{folder}/attempt-" + str(1 + int(os.environ["SLURM_ARRAY_TASK_ID"])) + "/done", "w")'
    return f"{sys.executable} -u -c 'import os, {imports}; {touch}'"


def touch(folder: str) -> None:
    """The trivial task."""
    open(f"{folder}/done", "w").close()


def attempts_in(folder: Path, tasks: int) -> list[AttemptFolder]:
    attempts = [AttemptFolder(folder / f"attempt-{number}") for number in range(1, tasks + 1)]
    for attempt in attempts:
        attempt.path.mkdir(parents=True)
    return attempts


def with_sbatch(
    slurm: ThrowawaySlurm, folder: Path, tasks: int, poll_s: float, imports: str = "os"
) -> dict[str, float]:
    began = time.monotonic()
    batch = folder / "batch.sh"
    batch.write_text(BATCH_FILE.format(last=tasks - 1, parallel=tasks, folder=folder, command=command(folder, imports)))
    slurm.run("sbatch", "--wait", str(batch), timeout_s=600)
    return {"total_s": time.monotonic() - began}


def with_submitit(slurm: ThrowawaySlurm, folder: Path, tasks: int, poll_s: float) -> dict[str, float]:
    import submitit

    began = time.monotonic()
    executor = submitit.SlurmExecutor(folder / "submitit")
    executor.update_parameters(nodes=1, ntasks_per_node=1, array_parallelism=tasks, stderr_to_stdout=True)
    jobs = executor.map_array(touch, [str(folder / f"attempt-{number}") for number in range(1, tasks + 1)])
    submitted = time.monotonic()
    for job in jobs:
        job.result()
    return {"total_s": time.monotonic() - began, "submit_s": submitted - began}


def with_ours(slurm: ThrowawaySlurm, folder: Path, tasks: int, poll_s: float, lean: bool = False) -> dict[str, float]:
    settings = compose(["+experiment=quickstart", "cluster=slurm", f"run_root={folder}"])
    scheduler = product.SlurmScheduler(settings, RunFolder(folder))
    attempts = tuple(AttemptFolder(folder / f"attempt-{number}") for number in range(1, tasks + 1))
    request = JobRequest("tula-overhead", attempts, 1, 1, time_limit_min=10, max_running=tasks)
    began = time.monotonic()
    if lean:
        scheduler._run.scheduler.mkdir(parents=True)
        executor = scheduler._executor(request)
        executor.parameters["map_count"] = tasks
        job_id = executor._submit_command(command(folder, "tula_hpc.ranks.job")).job_id
        ids = [f"{job_id}_{index}" for index in range(tasks)]
    else:
        with mock.patch.object(product, "run_attempt", touch):
            ids = scheduler.submit(request)
    submitted = time.monotonic()
    looks, looking_s = 0, 0.0
    while True:
        looked = time.monotonic()
        states = scheduler.states(ids)
        looks, looking_s = looks + 1, looking_s + time.monotonic() - looked
        if states is not None and not any(seen.state.active for seen in states.values()):
            break
        time.sleep(poll_s)
    ended = time.monotonic()
    newest = max((a.path / "done").stat().st_mtime for a in attempts)
    return {
        "total_s": ended - began,
        "submit_s": submitted - began,
        "looks": looks,
        "looking_s": looking_s,
        "after_last_file_s": time.time() - newest,
    }


WAYS: dict[str, Callable[[ThrowawaySlurm, Path, int, float], dict[str, float]]] = {
    "sbatch": with_sbatch,
    "sbatch_importing": partial(with_sbatch, imports="numpy, submitit.core.submission"),
    "submitit": with_submitit,
    "ours": with_ours,
    "ours_lean": partial(with_ours, lean=True),
}


def once(way: str, slurm: ThrowawaySlurm, tasks: int, poll_s: float) -> dict[str, float]:
    """One array from submission to the knowledge that all of it ended; its files are there."""
    folder = Path(tempfile.mkdtemp(prefix=f"overhead-{way}-"))
    try:
        attempts = attempts_in(folder, tasks)
        measured = WAYS[way](slurm, folder, tasks, poll_s)
        missing = [a.path.name for a in attempts if not (a.path / "done").exists()]
        assert not missing, f"{way}: {missing} left nothing; {slurm.logs_tail()}"
        return measured
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--poll", type=float, default=1.0, help="seconds between our looks")
    arguments = parser.parse_args()
    # more cores than there are would start more Pythons at once than the machine can run
    settings = SlurmSettings(num_nodes=2, cpus_per_node=max(1, (os.cpu_count() or 2) // 2))
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    slurm = ThrowawaySlurm(settings, lock_wait_s=300)
    with slurm, mock.patch.dict(os.environ, {"SLURM_CONF": str(slurm.conf_file)}):
        slurm.wait_idle()
        for _ in range(arguments.repeats):
            for way in WAYS:
                runs[way].append(once(way, slurm, arguments.tasks, arguments.poll))
                print(way, json.dumps(rounded(runs[way][-1])), flush=True)
    medians = {way: statistics.median(run["total_s"] for run in found) for way, found in runs.items()}
    print(
        json.dumps(
            {
                "tasks": arguments.tasks,
                "median_s": rounded(medians),
                "ratio_to_sbatch": rounded({way: value / medians["sbatch"] for way, value in medians.items()}),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "versions": software_versions(),
            }
        )
    )


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in values.items()}


if __name__ == "__main__":
    main()
