"""Step times on the throw-away Slurm behind 1 Gbit/s links, as a source for `predictions`; as root.

    python -m tests.benchmarks.slow_links OUT.csv

A net with a million parameters on Fashion-MNIST's shapes, one rank of one core on each of 1, 2 and 4 hosts, which share
this machine's cores: what computes disturbs its neighbours, as on any oversubscribed machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

from tests.slurm.cluster import SlurmSettings, ThrowawaySlurm
from tula_hpc.runs import RunFolder, read_json

COLUMNS = [
    "num_nodes", "gpus_per_node", "batch_per_rank", "step_time_s", "compute_time_s", "sync_time_s", "allreduce_s",
    "step_time_p10_s", "step_time_p90_s", "data_s", "memory_gib", "gradient_mib", "timed_steps",
]  # fmt: skip
ARGUMENTS = [
    "+experiment=fashion_mnist",
    "cluster=slurm",
    "data=synthetic",
    "workload.model.width=48",
    "grid.min_nodes=1",
    "grid.max_nodes=4",
    "grid.min_batch_per_rank=8",
    "grid.max_batch_per_rank=256",
    "search=full",
    "search.timed_steps=12",
    "search.max_seconds=20",
    "cluster.max_running_jobs=1",
    "cluster.poll_interval_s=0.5",
    "cluster.memory_gib=2",
    "until=choice",
]


def main() -> None:
    with (
        ThrowawaySlurm(SlurmSettings(link_rate="1gbit"), lock_wait_s=1800) as slurm,
        tempfile.TemporaryDirectory() as work,
    ):
        environment = {**os.environ, **slurm.env, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tula_hpc", *ARGUMENTS]
        answer = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        print(answer.stdout[-4000:], answer.stderr[-2000:])
        run = RunFolder(Path(answer.stdout.strip().splitlines()[-1].removeprefix("run folder: ")))
        points = pd.DataFrame(read_json(run.fit)["points"])
    table = points[COLUMNS].sort_values(["num_nodes", "batch_per_rank"])
    table.insert(0, "model", "small_cnn")
    table.round(6).to_csv(sys.argv[1], index=False)


if __name__ == "__main__":
    main()
