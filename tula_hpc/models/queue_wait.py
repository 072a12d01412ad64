"""How long a training would wait in the queue before it starts, by its number of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Wait:
    """A wait and who says so."""

    seconds: float | None
    """None: nobody knows."""
    source: str
    """Where it comes from, in words that stand in a sentence in brackets."""


def given_waits(minutes: Mapping[int, float], num_nodes: Iterable[int]) -> dict[int, Wait]:
    """The waits that a user's numbers say: between two of them on the straight line, outside the nearest one.

    Args:
        minutes: Number of nodes -> wait, at least one.
        num_nodes: The numbers of nodes to tell about.
    """
    known = sorted(minutes)
    found = {}
    for nodes in num_nodes:
        wait_min = float(np.interp(nodes, known, [minutes[n] for n in known]))
        source = "given" if nodes in minutes else "from the given ones"
        found[nodes] = Wait(round(60 * wait_min, 1), f"{source} in objective.queue_wait_min")
    return found
