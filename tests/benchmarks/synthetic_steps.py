"""Step times of made-up trainings whose truth is known: a timeline of layers and buckets, not a formula that is fitted.

A step is the forward pass, then the backward pass layer by layer from the last one. Gradients are gathered into buckets
of 25 MiB in that order, as DDP does; a full bucket is exchanged as soon as the one before is through, by a ring: twice
(N - 1) / N of its bytes over the slowest link, and a latency for each of its 2 (N - 1) hops. The optimizer steps after
both. Layers take a fixed time and one in proportion to the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

BUCKET_BYTES = 25 * 2**20
NOISE = 0.02
"""Standard deviation of the logarithm of a measured time."""


@dataclass(frozen=True)
class Training:
    """A model on a cluster. Lists are from the first layer to the last."""

    name: str
    layer_bytes: tuple[float, ...]
    """Of the gradients of each layer."""
    sample_s: tuple[float, ...]
    """Forward pass of each layer, for a sample; the backward pass takes twice that."""
    launch_s: float
    """Least time of a pass over a layer, however small the batch."""
    bytes_per_s: float
    """Of a node's link."""
    hop_s: float
    batches: tuple[int, ...]


MIB = float(2**20)
TRAININGS = (
    Training("convolutions", (0.5 * MIB,) * 40 + (8 * MIB,), (2e-5,) * 40 + (1e-6,), 6e-5, 1.25e9, 2e-5,
             (8, 16, 32, 64, 128, 256)),
    Training("linear layers last", (1 * MIB,) * 8 + (300 * MIB, 60 * MIB), (3e-5,) * 8 + (4e-6, 2e-6), 8e-5, 1.25e9,
             2e-5, (16, 32, 64, 128, 256, 512)),
    Training("many small layers", (0.1 * MIB,) * 150, (4e-6,) * 150, 9e-5, 1.25e8, 8e-5, (16, 32, 64, 128, 256, 512)),
    Training("fast network", (2 * MIB,) * 50, (1.5e-5,) * 50, 5e-5, 2.5e10, 5e-6, (8, 16, 32, 64, 128, 256)),
)  # fmt: skip


def exchange_s(training: Training, num_nodes: int, gradient_bytes: float) -> float:
    """So many bytes averaged over a ring, by themselves; nothing on one node."""
    share = 2 * (num_nodes - 1) / num_nodes
    return share * gradient_bytes / training.bytes_per_s + 2 * (num_nodes - 1) * training.hop_s


def step_s(training: Training, num_nodes: int, batch: int, synchronises: bool = True) -> float:
    """The time of a step on `num_nodes` ranks, a batch each."""
    forward = [max(training.launch_s, batch * s) for s in training.sample_s]
    now, link_free, filled = sum(forward), 0.0, 0.0
    for layer in reversed(range(len(forward))):
        now += 2 * forward[layer]
        filled += training.layer_bytes[layer]
        if synchronises and num_nodes > 1 and (filled >= BUCKET_BYTES or layer == 0):
            link_free, filled = max(now, link_free) + exchange_s(training, num_nodes, filled), 0.0
    return max(now, link_free) + len(forward) * training.launch_s / 4


def tables(seed: int = 0) -> dict[str, pd.DataFrame]:
    """Noisy measurements of each training on 1 to 16 nodes; columns as in `models.step_time`."""
    noise = np.random.default_rng(seed)
    found = {}
    for training in TRAININGS:
        rows = []
        for num_nodes in (1, 2, 4, 8, 16):
            for batch in training.batches:
                both, alone = (step_s(training, num_nodes, batch, s) for s in (True, False))
                truth = both, alone, exchange_s(training, num_nodes, sum(training.layer_bytes))
                measured, computed, exchanged = np.exp(noise.normal(0, NOISE, 3)) * truth
                rows.append((num_nodes, 1, batch, measured, computed, max(0.0, measured - computed), exchanged))
        times = [f"{what}_s" for what in ("step_time", "compute_time", "sync_time", "allreduce")]
        found[training.name] = pd.DataFrame(rows, columns=["num_nodes", "gpus_per_node", "batch_per_rank", *times])
    return found
