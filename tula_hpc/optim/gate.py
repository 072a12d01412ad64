"""Whether a step is calm enough for its gradient to be scaled: gradient variability, Eq. (5), against a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tula_hpc.optim.gradients import gradient_variability

GateKind = Literal["current", "lagged", "off"]
"""Whose variability decides: this step's, the last step's, or nobody's (the scale always acts)."""


@dataclass
class Gate:
    """Compares each step's squared gradient norm with the last. The settings are `TulaOptimizer`'s."""

    kind: GateKind
    delta_threshold: float
    delta_smoothing: float
    squared_norm: Tensor | None = None
    """|G|² of the last step that had a finite one, or its moving average."""
    variability: Tensor | None = None
    """Δ of the last step."""
    observed: Tensor | None = None
    """|G|² of the coming step, if the caller knows it."""
    _last_variability: Tensor | None = None

    def problems(self) -> list[str]:
        """One sentence for each bad setting."""
        problems = []
        if self.kind not in get_args(GateKind):
            problems.append(f"gate is {self.kind!r}; choose one of {', '.join(get_args(GateKind))}.")
        if not self.delta_threshold > 0:
            problems.append(f"delta_threshold is {self.delta_threshold}, but must exceed 0; the paper's is 0.5.")
        if not 0 <= self.delta_smoothing < 1:
            problems.append(f"delta_smoothing is {self.delta_smoothing}, but must lie in [0, 1); 0 forgets the past.")
        return problems

    @property
    def wants_norm(self) -> bool:
        """Whether the coming step needs a norm that nobody has given yet."""
        return self.kind != "off" and self.observed is None

    def watch(self, norm: Tensor) -> None:
        """Take note of this step's |G|², fp32 of shape ()."""
        previous = torch.zeros_like(norm) if self.squared_norm is None else self.squared_norm
        weight = 1 - self.delta_smoothing
        self._last_variability = self.variability
        self.variability = gradient_variability(norm, previous, weight)
        latest = norm if weight == 1 else torch.where(previous > 0, torch.lerp(previous, norm, weight), norm)
        # A norm that is not finite is not worth comparing the next step with.
        self.squared_norm = torch.where(norm < math.inf, latest, previous)
        self.observed = None

    def state(self) -> Tensor | None:
        """Whether the step that was watched last is scaled, as 1 or 0 in a device tensor of shape (), or None for
        always: a branch on the host would wait, and split the ranks."""
        if self.kind == "off":
            return None
        deciding = self.variability if self.kind == "current" else self._last_variability
        assert self.variability is not None
        if deciding is None:
            return torch.zeros_like(self.variability)
        return torch.lt(deciding, self.delta_threshold, out=torch.empty_like(deciding))

    def forget(self) -> None:
        """The next step counts as the first."""
        self.squared_norm = self.variability = self.observed = self._last_variability = None
