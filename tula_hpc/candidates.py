"""The configurations a run may choose from: nodes x batch per rank, growing by factors of two."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Candidate:
    """One way to run the training: a cluster size and a batch size."""

    num_nodes: int
    """Hosts allocated to the job."""
    batch_per_rank: int
    """Samples each rank processes in one step."""
    gpus_per_node: int = 1
    """Ranks on each host: one a GPU, or one process a host on CPUs."""

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
        """Folder name of the candidate; sorts by nodes, then batch."""
        return f"n{self.num_nodes:03d}-b{self.batch_per_rank:05d}"

    def steps_per_epoch(self, train_samples: int) -> int:
        """Optimiser steps in one pass over `train_samples`; the last one may be partly filled."""
        return math.ceil(train_samples / self.global_batch)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Candidate:
        """The candidate that a request, a measured point or a selection is about."""
        return cls(record["num_nodes"], record["batch_per_rank"], record["gpus_per_node"])

    @classmethod
    def from_name(cls, name: str, gpus_per_node: int) -> Candidate:
        """The candidate a folder name stands for. Raises ValueError on any other name."""
        found = re.fullmatch(r"n(\d{3,})-b(\d{5,})", name)
        if found is None:
            raise ValueError(f"{name!r} is not a candidate's name such as n004-b00064")
        return cls(int(found[1]), int(found[2]), gpus_per_node)


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
) -> list[Candidate]:
    """Every pair of the two lists whose global batch lies within the bounds, sorted by nodes, then batch.

    `max_global_batch` is at most the data set: a batch larger than an epoch has no meaning. The upper bound by
    memory is not known before measuring; see `models.memory`.
    """
    grid = [Candidate(n, b, gpus_per_node) for n in sorted(set(num_nodes)) for b in sorted(set(batch_per_rank))]
    return [c for c in grid if min_global_batch <= c.global_batch <= max_global_batch]
