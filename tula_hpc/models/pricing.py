"""What a training costs: the paper's Eq. (4b), C = T N p, and its memory-based alternative (section IV-C).

Prices are in any currency; costs come in the same one. Both schemes know only the training itself, not the profiling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

SECONDS_PER_HOUR = 3600.0


class Price(Protocol):
    """A pricing scheme."""

    def cost(
        self, train_time_s: ArrayLike, num_nodes: ArrayLike, gpus_per_node: ArrayLike, memory_gib: ArrayLike
    ) -> Array:
        """Cost of a training that lasts `train_time_s` and whose ranks use `memory_gib` each."""

    def describe(self) -> str:
        """The scheme in words, with its price."""


@dataclass(frozen=True)
class NodeHourPrice:
    """A fixed price for each allocated node; C = T N p."""

    price_per_node_hour: float
    """p: currency per node and hour."""

    def __post_init__(self) -> None:
        _check("price_per_node_hour", self.price_per_node_hour)

    def cost(
        self, train_time_s: ArrayLike, num_nodes: ArrayLike, gpus_per_node: ArrayLike, memory_gib: ArrayLike
    ) -> Array:
        """Cost of a training; GPUs and memory do not matter. Arguments are single values or arrays of one shape."""
        del gpus_per_node, memory_gib
        return np.asarray(_hours(train_time_s) * np.asarray(num_nodes, dtype=float) * self.price_per_node_hour)

    def describe(self) -> str:
        """The scheme in words, with its price."""
        return f"{self.price_per_node_hour:g} per node-hour"


@dataclass(frozen=True)
class MemoryPrice:
    """A price for the GPU memory used, C = T M R p, with M the memory of a rank and R = N g ranks.

    The paper charges 0.15 US dollars per hour and GB of memory used; we count GiB.
    """

    price_per_gib_hour: float
    """p: currency per GiB and hour."""

    def __post_init__(self) -> None:
        _check("price_per_gib_hour", self.price_per_gib_hour)

    def cost(
        self, train_time_s: ArrayLike, num_nodes: ArrayLike, gpus_per_node: ArrayLike, memory_gib: ArrayLike
    ) -> Array:
        """Cost of a training; NaN where the memory is not known. Single values or arrays of one shape."""
        ranks = np.asarray(num_nodes, dtype=float) * np.asarray(gpus_per_node, dtype=float)
        return np.asarray(_hours(train_time_s) * ranks * np.asarray(memory_gib, dtype=float) * self.price_per_gib_hour)

    def describe(self) -> str:
        """The scheme in words, with its price."""
        return f"{self.price_per_gib_hour:g} per GiB of device memory used and hour, on every rank"


def _hours(seconds: ArrayLike) -> Array:
    return np.asarray(seconds, dtype=float) / SECONDS_PER_HOUR


def _check(name: str, price: float) -> None:
    if not (math.isfinite(price) and price > 0):
        raise ValueError(f"{name} is {price}; it must be positive (use 1 to count hours instead of money)")
