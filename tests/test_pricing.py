"""Costs follow Eq. (4b) and the paper's memory-based prices."""

from __future__ import annotations

import numpy as np
import pytest

from tula_hpc.models.pricing import MemoryPrice, NodeHourPrice


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
