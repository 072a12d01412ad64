"""What a thousand profile points of sixteen ranks cost the machine that the controller runs on.

    python -m tests.benchmarks.controller_load --points 100 1000 --ranks 16

The controller, its journal, submitit and the record files are the real ones; Slurm is `simulated_slurm`, and the ranks'
files were written before by the functions that ranks use. Each size is measured in processes of its own: one that
submits, watches, collects, checks and fits, and one that finds the run with all points judged and no fit, as after a
crash. Only the grid is not one that settings can give: ten node counts and as many batches as make up the points.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.benchmarks import simulated_slurm
from tula_hpc.candidates import Candidate
from tula_hpc.composition import compose
from tula_hpc.config import Settings
from tula_hpc.models.step_forms import overlap_step
from tula_hpc.ranks.timings import write_rank
from tula_hpc.runs import AttemptFolder, RunFolder, read_json

LOOKS = 10
"""How many looks at the queue the whole array takes, as when each look finds a tenth of the jobs ended."""
STEPS = 20
MEAN_OF_NODE_COUNTS = 16
# of one rank each, so their mean is the mean number of ranks of a point
NODE_COUNTS = (1, 2, 4, 8, 12, 20, 24, 28, 30, 31)
REPOSITORY = Path(__file__).parents[2]
TEMPLATE = REPOSITORY / "tests/data/h100x4-resnet50-synthetic/profile/n002-b00064/attempt-1/rank-0000.json"
# alpha, beta, t_floor, c_ring, lambda, kappa, c_r (seconds), before_sync, after_backward of `step_time`
TRUTH = np.array([0.010, 4e-4, 0.012, 0.020, 0.0015, 0.0, 0.0, 0.35, 0.08])


def grid(points: int, ranks: int) -> list[Candidate]:
    """`points` (a multiple of 10) candidates of `ranks` (a multiple of 16) ranks in the mean."""
    nodes = [n * ranks // MEAN_OF_NODE_COUNTS for n in NODE_COUNTS]
    batches = range(16, 16 + 8 * (points // len(nodes)), 8)
    return [Candidate(n, b) for n in nodes for b in batches]


def settings_of(folder: Path, points: int, ranks: int) -> Settings:
    """What a user's command would compose, with the grid of the benchmark in it."""
    settings = compose(["+experiment=quickstart", "cluster=slurm", "search=full", f"run_root={folder}/runs"])
    settings.grid_candidates = lambda: grid(points, ranks)  # type: ignore[method-assign]
    settings.cluster.poll_interval_s = 0.0
    settings.cluster.python = sys.executable
    return settings


def prepare(folder: Path, points: int, ranks: int) -> None:
    """A simulated cluster whose jobs will leave plausible records."""
    simulated_slurm.install(str(folder / "slurm"), started_per_look=-(-points // LOOKS))
    random = np.random.default_rng(0)
    with mock.patch("os.fsync", new=_not_flushed):
        for candidate in grid(points, ranks):
            _write_records(AttemptFolder(folder / "slurm/records" / candidate.name / "attempt-1"), candidate, random)


def _not_flushed(handle: int) -> None:
    """A benchmark's input need not survive a crash."""


def _write_records(attempt: AttemptFolder, candidate: Candidate, random: np.random.Generator) -> None:
    meta = read_json(TEMPLATE)
    batch = candidate.batch_per_rank
    alone = np.hypot(TRUTH[0] + TRUTH[1] * batch, TRUTH[2])
    nodes, ones, batches = (np.array([float(v)]) for v in (candidate.num_nodes, 1, batch))
    expected = float(overlap_step(TRUTH, nodes, ones, batches)[0])
    seconds = expected * random.lognormal(0, 0.03, (candidate.world_size, STEPS))
    for rank in range(candidate.world_size):
        sync = max(expected - alone, 0.0)
        rows = [[i, 1e-3, s * 0.25, s * 0.65 - min(sync, s / 2), min(sync, s / 2), s * 0.08, s] for i, s in
                enumerate(seconds[rank])]  # fmt: skip
        memory = {**meta["memory"], "memory_gib": 2.0 + 0.004 * batch * random.lognormal(0, 0.01), "limit_gib": 79.0}
        changes = {
            "candidate": candidate.name,
            "num_nodes": candidate.num_nodes,
            "batch_per_rank": batch,
            "world_size": candidate.world_size,
            "host": f"host{rank}",
            "compute_step_s": float(alone * random.lognormal(0, 0.01)),
            "memory": memory,
        }
        write_rank(attempt, rank, rows, {**meta, **changes})


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """The simulated Slurm's commands before all others."""
    with mock.patch.dict(os.environ, {"PATH": f"{folder}/slurm/bin:{os.environ['PATH']}"}):
        yield


def controller_of(folder: Path, points: int, ranks: int) -> Any:
    """The controller that a command would make, printing to nowhere."""
    from rich.console import Console

    from tula_hpc.control.controller import Controller
    from tula_hpc.control.slurm import SlurmScheduler
    from tula_hpc.display import Display

    settings = settings_of(folder, points, ranks)
    run = RunFolder.of(settings.run_root, "load", "0123456789")
    run.create()
    display = Display()
    display.console = Console(file=io.StringIO(), width=160)
    return Controller(settings, run, SlurmScheduler(settings, run), display, ["controller_load"])


def profile_and_fit(folder: Path, points: int, ranks: int) -> dict[str, Any]:
    """Everything from the first submission to the fit, with what it took."""
    with on_path(folder):
        controller = controller_of(folder, points, ranks)
        slurm_before = simulated_slurm.calls(str(folder / "slurm"))[1]
        began, cpu_began = time.monotonic(), time.process_time()
        submitting: list[float] = []
        controller.jobs.submit = _timed(controller.jobs.submit, submitting)
        controller.write_down_the_run()
        search = controller._profile()
        profiled = time.monotonic()
        controller._fit(search)
        ended, cpu_s = time.monotonic(), time.process_time() - cpu_began
    counts, slurm_s = simulated_slurm.calls(str(folder / "slurm"))
    in_slurm = slurm_s - slurm_before
    fit = read_json(controller.run.fit)
    assert len(fit["points"]) == len(grid(points, ranks))
    journal = list(controller.run.journal.iterdir())
    return {
        "submit_s": sum(submitting),
        "collect_check_s": profiled - began - sum(submitting) - in_slurm,
        "fit_s": ended - profiled,
        "simulated_slurm_s": in_slurm,
        "controller_cpu_s": cpu_s,
        "peak_rss_mib": peak_rss_mib(),
        "slurm_calls": counts,
        "journal_files": len(journal),
        "journal_kib": sum(path.stat().st_size for path in journal) / 1024,
        "outcome": {form: values["outcome"] for form, values in fit["step_time"].items()},
        "median_error": {form: round(values["median_error"], 4) for form, values in fit["step_time"].items()},
    }


def peak_rss_mib() -> float:
    """Of this program alone; getrusage would count what its parent held when it started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        began = time.monotonic()
        try:
            return function(*arguments)
        finally:
            seconds.append(time.monotonic() - began)

    return timed


def measure(points: int, ranks: int, root: Path) -> dict[str, Any]:
    """One size: its simulation, and the two processes that are measured."""
    folder = Path(tempfile.mkdtemp(prefix=f"load-{points}-", dir=root))
    try:
        began = time.monotonic()
        prepare(folder, points, ranks)
        files = sum(2 * c.world_size for c in grid(points, ranks))
        first = _in_new_process(folder, points, ranks)
        (folder / "runs/load-0123456789/fit.json").unlink()
        again = _in_new_process(folder, points, ranks)
        restart = {
            "restart_s": again["submit_s"] + again["collect_check_s"] + again["fit_s"],
            "restart_cpu_s": again["controller_cpu_s"],
            "restart_peak_rss_mib": again["peak_rss_mib"],
        }
        total_s = time.monotonic() - began
        return {"points": points, "ranks": ranks, "rank_files": files, **first, **restart, "benchmark_s": total_s}
    finally:
        shutil.rmtree(folder)


def _in_new_process(folder: Path, points: int, ranks: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.controller_load", "--inside", str(folder)]
    command += ["--points", str(points), "--ranks", str(ranks)]
    answer = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, nargs="+", default=[100, 1000], help="multiples of 10")
    parser.add_argument("--ranks", type=int, default=16, help="ranks of a point in the mean, a multiple of 16")
    parser.add_argument("--root", type=Path, default=None, help="where to put the run folders; removed afterwards")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        print(json.dumps(profile_and_fit(arguments.inside, arguments.points[0], arguments.ranks)))
        return
    before: dict[str, Any] | None = None
    for points in arguments.points:
        measured = measure(points, arguments.ranks, arguments.root or Path(tempfile.gettempdir()))
        print(json.dumps(_rounded(measured)), flush=True)
        if before is not None:
            growth = {k: measured[k] / before[k] for k in measured if k.endswith(("_s", "_mib", "_kib")) and before[k]}
            print(f"growth for {points / before['points']:g} times the points: {json.dumps(_rounded(growth))}")
        before = measured


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}


if __name__ == "__main__":
    main()
