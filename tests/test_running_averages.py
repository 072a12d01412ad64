"""Running averages of batch normalisation follow as many samples whatever the batch, but not fewer than ten steps."""

from __future__ import annotations

import pytest
from torch import nn

from tula_hpc.optim.running_averages import follow_as_many_samples


@pytest.mark.parametrize(
    ("momentum", "global_batch", "expected"),
    [
        (0.01, 1024, 1 - 0.99**8),
        (0.01, 8192, 0.1),  # no more than torch's own
        (0.01, 128, 0.01),
        (0.01, 64, 0.01),  # nor less than the model's
        (0.1, 8192, 0.1),
        (0.5, 8192, 0.5),
        (None, 8192, None),
    ],
)
def test_momentum_by_batch(momentum: float | None, global_batch: int, expected: float | None):
    layer = nn.BatchNorm2d(4, momentum=momentum)
    changed = follow_as_many_samples(nn.Sequential(nn.Conv2d(3, 4, 3), layer), global_batch, small_batch=128)
    assert layer.momentum == pytest.approx(expected)
    assert changed == (expected != momentum)
