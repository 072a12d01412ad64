"""Two partitions over different hosts in one run: each is measured in its own, and the training runs in one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tula_hpc.runs import read_json

from .cluster import SlurmSettings, ThrowawaySlurm
from .command import named_run, tula

PARTITIONS = {"old": ["tula-n1", "tula-n2"], "new": ["tula-n3", "tula-n4"]}
# The choice must not hang on times, which are the same here but for noise.
TYPES = "{a100: {partition: old, price_per_node_hour: 1}, h100: {partition: new, price_per_node_hour: 100}}"
COMMON = [
    "cluster=slurm",
    "training.epochs=1",
    "cluster.poll_interval_s=1",
    "grid.max_nodes=1",
    "grid.max_batch_per_rank=32",
    "search=full",
]


@pytest.fixture(scope="module")
def slurm_settings() -> SlurmSettings:
    """With two partitions that share no host."""
    lines = [f"PartitionName={name} Nodes={','.join(hosts)} State=UP" for name, hosts in PARTITIONS.items()]
    return SlurmSettings(extra_lines=tuple(lines))


def test_each_type_is_measured_in_its_partition_and_the_cheaper_one_trains(
    slurm: ThrowawaySlurm, tmp_path: Path, tiny_overrides: list[str]
):
    """Profiling reaches the hosts of both partitions, the price decides, the training stays in that partition; a run on
    that partition alone takes its measurements over."""
    common = [*tiny_overrides, *COMMON, "run_root=runs"]
    answer = tula(tmp_path, *common, f"+cluster.node_types={TYPES}", "objective=cost")
    run = named_run(answer)

    points, selection = read_json(run.fit)["points"], read_json(run.selection)
    for node_type, partition in (("a100", "old"), ("h100", "new")):
        hosts = {host for point in points if point["node_type"] == node_type for host in point["hosts"]}
        assert hosts
        assert hosts <= set(PARTITIONS[partition])
    assert selection["node_type"] == "a100"
    assert read_json(run.attempt("train", 1).launch)["host"] in PARTITIONS["old"]
    jobs = {(row["NAME"].split("-")[-4], row["PARTITION"]) for row in slurm.squeue("NAME", "PARTITION")}
    assert jobs == {("profile", "old"), ("profile", "new"), ("train", "old")}
    assert "1 a100 node" in answer.stdout

    alone = tula(tmp_path, *common, "cluster.partition=old", "until=choice")
    assert "1 measurement taken over" in alone.stdout
    assert len(read_json(named_run(alone).fit)["points"]) == 1
