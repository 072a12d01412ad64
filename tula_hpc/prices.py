"""The prices that the settings ask for, of each type of node; service units are what Slurm's accounting would bill."""

from __future__ import annotations

from collections.abc import Mapping

from tula_hpc.config import ClusterKind, ClusterSettings, PricingKind, Settings
from tula_hpc.errors import SchedulerSilent
from tula_hpc.models.pricing import (
    Billed,
    MemoryPrice,
    NodeHourPrice,
    Price,
    ServiceUnitPrice,
    SpotPrice,
    read_billing_weights,
)


def prices_of(settings: Settings) -> dict[str, Price]:
    """Type of node -> its pricing scheme; the name is empty where the run has no types.

    Raises:
        SchedulerSilent: As `price_of`.
    """
    return {node_type: price_of(settings.of_type(node_type)) for node_type in settings.node_types}


def in_words(prices: Mapping[str, Price], currency: str) -> str:
    """All schemes; begins with a number, so that the currency can stand before it."""
    words = [f"{price.describe()}{f' ({node_type})' if node_type else ''}" for node_type, price in prices.items()]
    return f", {currency}".join(words)


def price_of(settings: Settings) -> Price:
    """The pricing scheme of one type of node; asks Slurm for the weights of its partition where
    `pricing.billing_weights` is null.

    Raises:
        SchedulerSilent: Slurm does not tell its weights.
    """
    pricing = settings.pricing
    if pricing.kind is PricingKind.memory:
        return MemoryPrice(pricing.price_per_gib_hour)
    if pricing.kind is PricingKind.spot:
        return SpotPrice(
            pricing.price_per_node_hour,
            pricing.interruptions_per_node_hour,
            pricing.checkpoint_interval_min,
            pricing.restart_min,
        )
    if pricing.kind is PricingKind.service_units:
        return _billed_price(settings)
    return NodeHourPrice(pricing.price_per_node_hour)


def _billed_price(settings: Settings) -> ServiceUnitPrice:
    from tula_hpc.control import slurm_commands

    on_slurm = settings.cluster.kind is ClusterKind.slurm
    text = settings.pricing.billing_weights
    weights = slurm_commands.billing_weights(settings.cluster) if text is None and on_slurm else text
    if weights is None:
        raise SchedulerSilent(
            "Slurm does not tell the TRESBillingWeights of the partition, so nothing is known of the price; try again "
            "when it answers, or give them in pricing.billing_weights"
        )
    return service_units(settings.cluster, weights, slurm_commands.billed() if on_slurm else "sum")


def service_units(
    cluster: ClusterSettings, weights_text: str, billed: Billed = "sum", needs_units: bool = False
) -> ServiceUnitPrice:
    """What Slurm would bill a training on this cluster: cores, memory and GPUs as the settings ask for them.

    A partition that gives out whole nodes bills all of them, which the settings do not know.

    Raises:
        ValueError: The weights cannot be read, charge nothing, or are for something that the settings leave open.
    """
    weights = read_billing_weights(weights_text, needs_units)
    held = {"cpu": float(cluster.ranks_per_node * cluster.cpus_per_rank), "node": 1.0}
    held["gres/gpu"] = float(cluster.gpus_per_node)
    if cluster.memory_gib is not None:
        held["mem"] = cluster.memory_gib
    elif weights.get("mem", 0.0) > 0:
        raise ValueError("memory is charged and cluster.memory_gib is null; set cluster.memory_gib, GiB a node")
    typed = sorted(name for name in weights if name.startswith("gres/gpu:"))
    if cluster.gpu_type is not None:
        held[f"gres/gpu:{cluster.gpu_type.lower()}"] = float(cluster.gpus_per_node)
    elif typed and cluster.gpus_per_node > 0:
        raise ValueError(f"{', '.join(typed)} is charged and cluster.gpu_type is null; set cluster.gpu_type")
    return ServiceUnitPrice(weights, {name: amount for name, amount in held.items() if amount > 0}, billed)
