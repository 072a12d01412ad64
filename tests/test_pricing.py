"""Costs follow Eq. (4b), the paper's memory-based prices, interrupted runs and Slurm's billing weights."""

from __future__ import annotations

import numpy as np
import pytest

from tula_hpc.config import ClusterSettings
from tula_hpc.models.pricing import (
    MemoryPrice,
    NodeHourPrice,
    ServiceUnitPrice,
    SpotPrice,
    read_billing_weights,
)
from tula_hpc.prices import service_units


def test_node_hours() -> None:
    """Two hours on four nodes at 2.48 cost 8 node-hours, whatever the GPUs and the memory."""
    assert float(NodeHourPrice(2.48).cost(7200.0, 4, 8, float("nan"))) == pytest.approx(8 * 2.48)


def test_memory_hours() -> None:
    """Two hours on four nodes of two ranks with 10 GiB each are 160 GiB-hours."""
    assert float(MemoryPrice(0.15).cost(7200.0, 4, 2, 10.0)) == pytest.approx(160 * 0.15)


def test_unknown_memory_is_an_unknown_cost() -> None:
    """A memory-based price of unknown memory is NaN, not zero."""
    assert np.isnan(MemoryPrice(0.15).cost(7200.0, 4, 2, float("nan")))


@pytest.mark.parametrize("price", [NodeHourPrice(2.0), MemoryPrice(2.0)])
def test_arrays(price: NodeHourPrice | MemoryPrice) -> None:
    """Costs of arrays are the costs of their elements."""
    times, nodes, memory = np.array([3600.0, 7200.0]), np.array([2, 4]), np.array([1.0, 3.0])
    expected = [float(price.cost(t, n, 1, m)) for t, n, m in zip(times, nodes, memory, strict=True)]
    assert price.cost(times, nodes, 1, memory) == pytest.approx(expected)


@pytest.mark.parametrize("kind", [NodeHourPrice, MemoryPrice])
@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_senseless_prices_are_refused(kind: type, price: float) -> None:
    """A price that is not positive and finite is refused with its name."""
    with pytest.raises(ValueError, match=r"price_per_.*must be positive"):
        kind(price)


def test_schemes_describe_themselves() -> None:
    """A scheme says its price and what it is charged for."""
    assert NodeHourPrice(2.48).describe() == "2.48 per node-hour"
    assert "0.15 per GiB" in MemoryPrice(0.15).describe()


# --- spot -------------------------------------------------------------------------------------------------------------


def simulated_hours(train_h: float, rate_per_h: float, interval_h: float, restart_h: float, seed: int) -> float:
    """One run: each interruption throws the training back to its last checkpoint, and restarts may be interrupted."""
    random, clock_h, done_h = np.random.default_rng(seed), 0.0, 0.0
    until_next_h = random.exponential(1 / rate_per_h)
    needed_h = interval_h  # to the next checkpoint, with the restart before it
    while done_h < train_h - 1e-9:
        if until_next_h >= needed_h:
            clock_h, done_h, until_next_h = clock_h + needed_h, done_h + interval_h, until_next_h - needed_h
            needed_h = interval_h
        else:
            clock_h, until_next_h = clock_h + until_next_h, random.exponential(1 / rate_per_h)
            needed_h = restart_h + interval_h
    return clock_h


@pytest.mark.parametrize(("num_nodes", "interruptions"), [(1, 0.05), (8, 0.05), (16, 0.2)])
def test_expected_time_of_spot_nodes_is_the_mean_of_many_runs(num_nodes: int, interruptions: float) -> None:
    """Simulated runs of 20 hours, from hardly to constantly interrupted ones, last as long as the formula says."""
    price = SpotPrice(1.0, interruptions, checkpoint_interval_min=30, restart_min=6)
    runs = [simulated_hours(20.0, num_nodes * interruptions, 0.5, 0.1, seed) for seed in range(600)]
    error = np.std(runs) / np.sqrt(len(runs))
    expected_h = float(price.expected_time_s(20 * 3600.0, num_nodes)) / 3600
    assert expected_h == pytest.approx(np.mean(runs), abs=4 * error)


def test_few_interruptions_cost_half_an_interval_and_a_restart_each() -> None:
    """To first order the time grows by the number of interruptions times tau / 2 + R."""
    price = SpotPrice(1.0, 1e-4, checkpoint_interval_min=20, restart_min=5)
    lost_s = float(price.expected_time_s(100 * 3600.0, 4)) - 100 * 3600.0
    assert lost_s == pytest.approx(100 * 4 * 1e-4 * (20 / 2 + 5) * 60, rel=1e-3)


def test_more_nodes_are_interrupted_more_often() -> None:
    """The share of the time that is lost grows with the nodes, to infinity where no checkpoint is reached."""
    longer = SpotPrice(1.0, 0.1, 10, 5).expected_time_s(1.0, np.array([1, 4, 64, 10**6]))
    assert (np.diff(longer) > 0).all()
    assert np.isinf(longer[-1])


def test_spot_nodes_are_paid_for_the_time_with_interruptions() -> None:
    """The cost is that of node-hours; what interruptions add is in the time."""
    assert float(SpotPrice(0.9, 0.05, 10, 5).cost(7200.0, 4, 8, float("nan"))) == pytest.approx(8 * 0.9)


# --- service units ----------------------------------------------------------------------------------------------------

GPU_NODE = {"cpu": 32.0, "mem": 256.0, "node": 1.0, "gres/gpu": 4.0}


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("CPU=1.0,Mem=0.25G,GRES/gpu=16", {"cpu": 1.0, "mem": 0.25, "gres/gpu": 16.0}),
        ("mem=0.25", {"mem": 256.0}),
        ("mem=1M", {"mem": 1024.0}),
        ("Mem=2T", {"mem": 2 / 1024}),
        ("cpu=2K , node=.5", {"cpu": 2 / 1024, "node": 0.5}),
        ("GRES/gpu:A100=0,license/x=3,", {"gres/gpu:a100": 0.0, "license/x": 3.0}),
    ],
)
def test_billing_weights_are_read_as_slurm_reads_them(text: str, weights: dict[str, float]) -> None:
    """Names in any case, suffixes by 1024, memory without one for a MiB."""
    assert read_billing_weights(text) == pytest.approx(weights)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("CPU", "'CPU' is not NAME=WEIGHT"),
        ("CPU=-1", "'CPU=-1' is not NAME=WEIGHT"),
        ("Mem=0.25GB", "'Mem=0.25GB' is not"),
        ("Mem=1K", "counts Mem in MiB"),
        ("GPU=16", "'GPU' is no resource of Slurm; write CPU, Mem, Node or GRES/gpu"),
        ("CPU=1,cpu=2", "'cpu' stands twice"),
        ("Mem=0.25", "'Mem=0.25' has no unit; write Mem=0.25G for a GiB"),
    ],
)
def test_senseless_billing_weights_are_refused(text: str, words: str) -> None:
    """The part that cannot be read is named with the way out."""
    with pytest.raises(ValueError, match=words):
        read_billing_weights(text, needs_units=True)


def test_units_are_added_or_the_largest_counts() -> None:
    """Two hours on two nodes: 32 + 64 + 64 units a node-hour, or with MAX_TRES 64."""
    weights = read_billing_weights("CPU=1.0,Mem=0.25G,GRES/gpu=16,license/x=5")
    added, largest = ServiceUnitPrice(weights, GPU_NODE), ServiceUnitPrice(weights, GPU_NODE, billed="largest")
    assert float(added.cost(7200.0, 2, 4, 0.0)) == pytest.approx(4 * 160)
    assert float(largest.cost(7200.0, 2, 4, 0.0)) == pytest.approx(4 * 64)
    assert added.describe() == "160 per node-hour as Slurm bills, the sum of 32 CPU x 1, 256 GiB x 0.25, 4 GPU x 16"


def test_gpus_are_added_to_the_largest_of_the_others() -> None:
    """With MAX_TRES_GRES: 64 for the memory, which is more than 32 for the cores, and 64 for the GPUs."""
    price = ServiceUnitPrice(read_billing_weights("CPU=1.0,Mem=0.25G,GRES/gpu=16"), GPU_NODE, billed="largest and gres")
    assert price.units_per_node_hour == 128


def test_weights_that_charge_nothing_are_no_price() -> None:
    """Weights of 0, or for what the job does not hold, are refused with both."""
    with pytest.raises(ValueError, match=r"gres/gpu=16 charge nothing for cpu=1 on each node"):
        ServiceUnitPrice({"gres/gpu": 16.0}, {"cpu": 1.0})


def test_service_units_are_of_what_the_settings_ask_for() -> None:
    """Two ranks of four cores on two GPUs of a type, with their memory."""
    cluster = ClusterSettings(gpus_per_node=2, cpus_per_rank=4, memory_gib=32.0, gpu_type="A100")
    price = service_units(cluster, "CPU=1,Mem=0.5G,GRES/gpu=2,GRES/gpu:a100=10,GRES/gpu:h100=90")
    assert price.units_per_node_hour == 8 + 16 + 4 + 20


@pytest.mark.parametrize(("weights", "key"), [("Mem=1G", "memory_gib"), ("GRES/gpu:a100=1", "gpu_type")])
def test_what_is_charged_and_not_asked_for_is_named(weights: str, key: str) -> None:
    """A charge for memory or a type of GPU that the settings leave open names the setting."""
    with pytest.raises(ValueError, match=f"cluster.{key} is null; set cluster.{key}"):
        service_units(ClusterSettings(gpus_per_node=2), weights)
