"""What a training costs: the paper's Eq. (4b), C = T N p, its memory-based alternative (section IV-C), machines that
may be taken away (spot), and the service units of Slurm's accounting.

Prices are in any currency; costs come in the same one. All schemes know only the training itself, not the profiling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

SECONDS_PER_HOUR = 3600.0


class Price(Protocol):
    """A pricing scheme. Every cost is proportional to the time."""

    def expected_time_s(self, train_time_s: ArrayLike, num_nodes: ArrayLike) -> Array:
        """How long a training is expected to last that needs `train_time_s` if nothing interrupts it."""
        del num_nodes
        return np.asarray(train_time_s, dtype=float)

    def cost(
        self, train_time_s: ArrayLike, num_nodes: ArrayLike, gpus_per_node: ArrayLike, memory_gib: ArrayLike
    ) -> Array:
        """Cost of a training that lasts `train_time_s` in all and whose ranks use `memory_gib` each."""

    def describe(self) -> str:
        """The scheme in words, with its price; begins with a number, so that a currency can stand before it."""


@dataclass(frozen=True)
class NodeHourPrice(Price):
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
class SpotPrice(NodeHourPrice):
    """A price for nodes that may be taken away; C = E[T] N p, where E[T] has the interruptions in it.

    Synchronous training stops as a whole when one of its N nodes goes, so interruptions come N times as often as on one
    node: at the rate r = N lambda. Each loses what was done since the last checkpoint, half a checkpoint interval tau
    on average, and the restart R, which may be interrupted as well. With interruptions that are independent of each
    other and of the time (Poisson), a training of T hours lasts

        E[T] = T exp(r R) (exp(r tau) - 1) / (r tau) = T (1 + r (tau / 2 + R) + ...).

    This is the complete wall-clock model of Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps" (2006), with the writing of checkpoints taken to cost nothing; it holds for long trainings, since the
    last interval counts as a whole one. All nodes are paid for during a restart, and a taken node is replaced within
    R; where spot machines are scarce, neither may hold.
    """

    interruptions_per_node_hour: float
    """lambda: how often one node is taken away, per hour."""
    checkpoint_interval_min: float
    """tau: minutes between two checkpoints."""
    restart_min: float
    """R: minutes from an interruption until the training goes on from its checkpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("interruptions_per_node_hour", self.interruptions_per_node_hour)
        _check("checkpoint_interval_min", self.checkpoint_interval_min)

    def expected_time_s(self, train_time_s: ArrayLike, num_nodes: ArrayLike) -> Array:
        """The time with interruptions; infinite where a checkpoint is practically never reached."""
        rate_per_min = np.asarray(num_nodes, dtype=float) * self.interruptions_per_node_hour / 60
        per_interval = rate_per_min * self.checkpoint_interval_min
        with np.errstate(over="ignore"):
            longer = np.exp(rate_per_min * self.restart_min) * np.expm1(per_interval) / per_interval
            return np.asarray(np.asarray(train_time_s, dtype=float) * longer)

    def describe(self) -> str:
        """The scheme in words, with its price."""
        return (
            f"{self.price_per_node_hour:g} per node-hour of spot nodes, each taken away "
            f"{self.interruptions_per_node_hour:g} times an hour, with {self.checkpoint_interval_min:g} min between "
            f"checkpoints and {self.restart_min:g} min for a restart"
        )


@dataclass(frozen=True)
class MemoryPrice(Price):
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


Billed = Literal["sum", "largest", "largest and gres"]


@dataclass(frozen=True)
class ServiceUnitPrice(Price):
    """Service units as Slurm bills them: what a node of the job holds of each resource, times the resource's weight.

    Slurm adds the products, or takes the largest of them under PriorityFlags=MAX_TRES, or adds those of generic
    resources such as GPUs to the largest of the others under MAX_TRES_GRES. Every node of a job holds the same, so a
    node-hour has a fixed number of units.
    """

    weights: Mapping[str, float]
    """Units an hour for one of each resource; from `read_billing_weights`."""
    held: Mapping[str, float]
    """What the job holds on each node, by the same names, memory in GiB; 0 for those that are missing."""
    billed: Billed = "sum"
    """Which of them count."""

    def __post_init__(self) -> None:
        if not self.units_per_node_hour > 0:
            raise ValueError(
                f"the billing weights {_weights_text(self.weights)} charge nothing for "
                f"{_weights_text(self.held)} on each node; a price must be positive"
            )

    @property
    def units_per_node_hour(self) -> float:
        """Service units of one node of the job for an hour."""
        units = {name: weight * self.held.get(name, 0.0) for name, weight in self.weights.items()}
        if self.billed == "sum":
            return sum(units.values())
        added = [name for name in units if self.billed == "largest and gres" and name.startswith("gres/")]
        return sum(units.pop(name) for name in added) + max(units.values(), default=0.0)

    def cost(
        self, train_time_s: ArrayLike, num_nodes: ArrayLike, gpus_per_node: ArrayLike, memory_gib: ArrayLike
    ) -> Array:
        """Service units of a training. What a node holds is part of the price, the device memory used is not."""
        return NodeHourPrice(self.units_per_node_hour).cost(train_time_s, num_nodes, gpus_per_node, memory_gib)

    def describe(self) -> str:
        """The scheme in words, with its price."""
        how = {
            "sum": "the sum of", "largest": "the largest of", "largest and gres": "GPUs and the largest else of"
        }[self.billed]  # fmt: skip
        charged = {name: weight for name, weight in self.weights.items() if weight * self.held.get(name, 0.0) > 0}
        parts = ", ".join(
            f"{self.held[name]:g} {_UNIT_WORDS.get(name, name)} x {weight:g}" for name, weight in charged.items()
        )
        return f"{self.units_per_node_hour:g} per node-hour as Slurm bills, {how} {parts}"


_UNIT_WORDS = {"cpu": "CPU", "mem": "GiB", "gres/gpu": "GPU"}
_MIB_RESOURCES = ("mem", "bb", "vmem")
"""Resources that Slurm counts in MiB."""
_WEIGHT = re.compile(r"(?P<name>[a-z][^=\s]*)=(?P<weight>\d+(\.\d*)?|\.\d+)(?P<unit>[KMGTP]?)", re.IGNORECASE)
_RESOURCE = re.compile(r"cpu|mem|node|energy|billing|vmem|pages|(gres|license|bb|fs|ic)/\S+")


def read_billing_weights(text: str, needs_units: bool = False) -> dict[str, float]:
    """Slurm's TRESBillingWeights, such as `CPU=1.0,Mem=0.25G,GRES/gpu=16`: units an hour for one of each resource.

    As in Slurm, a suffix names the amount that the weight is for: `Mem=0.25G` is 0.25 an hour for a GiB, `Mem=0.25`
    the same for a MiB, `CPU=2K` is 2 for 1024 CPUs.

    Args:
        text: The weights, separated by commas.
        needs_units: Refuse memory without a suffix, which is mostly meant to be for a GiB and is for a MiB.

    Returns:
        By the names in lower case; memory for a GiB, everything else for one.

    Raises:
        ValueError: With the part that cannot be read.
    """
    weights: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        found = _WEIGHT.fullmatch(item)
        if found is None:
            raise ValueError(f"{item!r} is not NAME=WEIGHT with a weight of 0 or more, as in CPU=1.0 or Mem=0.25G")
        name, unit = found["name"].lower(), found["unit"].upper()
        if _RESOURCE.fullmatch(name) is None:
            raise ValueError(f"{found['name']!r} is no resource of Slurm; write CPU, Mem, Node or GRES/gpu")
        if name in weights:
            raise ValueError(f"{found['name']!r} stands twice; keep one of them")
        in_mib = name.partition("/")[0] in _MIB_RESOURCES
        if in_mib and unit == "K":
            raise ValueError(f"{item!r}: Slurm counts {found['name']} in MiB, so its unit is M, G, T or P")
        if in_mib and not unit and needs_units:
            raise ValueError(f"{item!r} has no unit; write {item}G for a GiB, or {item}M for a MiB, Slurm's default")
        amount = 1024.0 ** " KMGTP".index(unit or ("M" if in_mib else " "))
        weights[name] = float(found["weight"]) / amount * (1024.0**3 if in_mib else 1.0)
    return weights


def _weights_text(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={weight:g}" for name, weight in weights.items()) or "none"


def _hours(seconds: ArrayLike) -> Array:
    return np.asarray(seconds, dtype=float) / SECONDS_PER_HOUR


def _check(name: str, price: float) -> None:
    if not (math.isfinite(price) and price > 0):
        raise ValueError(f"{name} is {price}; it must be positive (use 1 to count hours instead of money)")
