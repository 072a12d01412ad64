"""The configurations a run may choose from: nodes x batch per rank, growing by factors of two, on each type of node."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

TYPE_NAME = r"[A-Za-z][A-Za-z0-9_]*"
"""What a type of node may be called: a part of folder names, told from the rest by a dash."""
SIZES = ["num_nodes", "gpus_per_node", "batch_per_rank"]
"""Columns of a table that say how large a candidate is."""
KEYS = ("node_type", *SIZES)
"""Columns of a table that say which candidate a row is about; those of one type of node need not name it."""


def keys_of(columns: Collection[str]) -> list[str]:
    """Those of `KEYS` that a table with these columns has."""
    return [name for name in KEYS if name in columns]


def nodes_of(num_nodes: int, node_type: str) -> str:
    """`1 node`, `4 nodes`, `4 h100 nodes`."""
    return f"{num_nodes} {f'{node_type} node'.strip()}{'' if num_nodes == 1 else 's'}"


@dataclass(frozen=True, order=True)
class Candidate:
    """One way to run the training: a cluster size and a batch size."""

    num_nodes: int
    """Hosts allocated to the job."""
    batch_per_rank: int
    """Samples each rank processes in one step."""
    gpus_per_node: int = 1
    """Ranks on each host: one a GPU, or one process a host on CPUs."""
    node_type: str = ""
    """Name of the nodes' type in `cluster.node_types`; empty in a run that has none."""

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.num_nodes * self.gpus_per_node

    @property
    def global_batch(self) -> int:
        """Samples in one optimiser step over all ranks (B = N g b)."""
        return self.world_size * self.batch_per_rank

    @property
    def name(self) -> str:
        """Folder name of the candidate, such as `n004-b00064` or `h100-n004-b00064`; sorts by type, nodes, batch."""
        on_type = f"{self.node_type}-" if self.node_type else ""
        return f"{on_type}n{self.num_nodes:03d}-b{self.batch_per_rank:05d}"

    def steps_per_epoch(self, train_samples: int) -> int:
        """Optimiser steps in one pass over `train_samples`; the last one may be partly filled."""
        return math.ceil(train_samples / self.global_batch)

    @classmethod
    def from_record(cls, record: Mapping[Any, Any]) -> Candidate:
        """The candidate that a request, a measured point, a table's row or a selection is about."""
        sizes = int(record["num_nodes"]), int(record["batch_per_rank"]), int(record["gpus_per_node"])
        return cls(*sizes, record.get("node_type", ""))

    def record(self) -> dict[str, Any]:
        """What `from_record` reads; a type stands in it only where there is one."""
        sizes = {name: getattr(self, name) for name in SIZES}
        return {**({"node_type": self.node_type} if self.node_type else {}), **sizes}

    @classmethod
    def from_name(cls, name: str, gpus_per_node: int) -> Candidate:
        """The candidate a folder name stands for. Raises ValueError on any other name."""
        found = re.fullmatch(rf"(?:({TYPE_NAME})-)?n(\d{{3,}})-b(\d{{5,}})", name)
        if found is None:
            raise ValueError(f"{name!r} is not a candidate's name such as n004-b00064")
        return cls(int(found[2]), int(found[3]), gpus_per_node, found[1] or "")


def doublings(smallest: int, largest: int) -> list[int]:
    """smallest, 2 smallest, 4 smallest ... up to and, if a doubling hits it, including `largest`."""
    values = []
    while smallest <= largest:
        values.append(smallest)
        smallest *= 2
    return values


def candidate_grid(
    num_nodes: list[int],
    gpus_per_node: int,
    batch_per_rank: list[int],
    min_global_batch: int,
    max_global_batch: int,
    node_type: str = "",
) -> list[Candidate]:
    """Every pair of the two lists whose global batch lies within the bounds, sorted by nodes, then batch.

    `max_global_batch` is at most the data set: a batch larger than an epoch has no meaning. The upper bound by
    memory is not known before measuring; see `models.memory`.
    """
    grid = [
        Candidate(n, b, gpus_per_node, node_type) for n in sorted(set(num_nodes)) for b in sorted(set(batch_per_rank))
    ]
    return [c for c in grid if min_global_batch <= c.global_batch <= max_global_batch]
