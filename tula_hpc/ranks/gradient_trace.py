"""What the gradient of every training step was like: `train/gradients.csv`, for a training that asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from tula_hpc.optim import gradients
from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.runs import write_text

HEADER = "step,epoch,samples,gradient_norm,variability,scaled"
WRITES_EVERY_STEPS = 1000
"""Steps whose numbers wait on the device: reading them makes the host wait for it."""


class GradientTrace:
    """A row for each optimiser step.

    Columns: `step` from 1 on; `epoch` from 1 on, the one it is in; `samples` seen after it; `gradient_norm`, the L2
    norm of all gradients as one vector, averaged over the ranks (in local steps the first rank's own), before any
    scaling; `variability`, Eq. (5), empty for the first step; `scaled`, whether the optimizer scaled them, 1 or 0.

    Args:
        path: Where the rows go; None: nowhere, as on all ranks but the first.
        optimizer: Of the training.
        samples_before: Samples that the training has seen; rows of later ones are of steps that are made again.
    """

    def __init__(self, path: Path | None, optimizer: torch.optim.Optimizer, samples_before: int):
        self._path, self._optimizer = path, optimizer
        self._waiting: list[tuple[int, int, Tensor, Tensor | float]] = []
        self._norm: Tensor | None = None
        self._step, self._last_norm = 0, math.nan
        self._scaled_before = float(self._scaled_steps())
        if path is not None:
            self._keep_before(path, samples_before)

    def before_step(self, parameters: Iterable[Tensor]) -> None:
        """Take the norm of the gradients as they are."""
        if self._path is not None:
            found = [p.grad for p in parameters if p.grad is not None]
            self._norm = gradients.squared_norm(found).sqrt() if found else None

    def after_step(self, epoch: int, samples: int) -> None:
        """Note the step whose norm was taken, which is in `epoch` (from 1 on) and ends at so many samples."""
        if self._norm is None:
            return
        self._waiting.append((epoch, samples, self._norm, self._scaled_steps()))
        if len(self._waiting) >= WRITES_EVERY_STEPS:
            self.write()

    def write(self) -> None:
        """Put all that waits into the file; waits for the device."""
        if self._path is None or not self._waiting:
            return
        norms = torch.stack([norm for _, _, norm, _ in self._waiting]).tolist()
        lines = []
        for (epoch, samples, _, scaled_steps), norm in zip(self._waiting, norms, strict=True):
            self._step += 1
            scaled, self._scaled_before = float(scaled_steps) > self._scaled_before, float(scaled_steps)
            lines.append(f"{self._step},{epoch},{samples},{norm:.6g},{self._variability(norm)},{int(scaled)}\n")
            self._last_norm = norm
        self._waiting.clear()
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _scaled_steps(self) -> Tensor | float:
        return self._optimizer.scaled_steps if isinstance(self._optimizer, TulaOptimizer) else 0.0

    def _variability(self, norm: float) -> str:
        """Eq. (5) against the step before; empty where there is none to compare with."""
        if not self._last_norm > 0:
            return ""
        return f"{abs(norm**2 - self._last_norm**2) / self._last_norm**2:.6g}"

    def _keep_before(self, path: Path, samples_before: int) -> None:
        """Drop the rows of steps that are made again, and one that a crash has torn."""
        rows = path.read_text(encoding="utf-8").splitlines(keepends=True)[1:] if path.exists() else []
        whole = [row for row in rows if row.endswith("\n") and row.count(",") == HEADER.count(",")]
        kept = [row for row in whole if int(row.split(",")[2]) <= samples_before]
        if kept:
            self._step, self._last_norm = int(kept[-1].split(",")[0]), float(kept[-1].split(",")[3])
        write_text(path, "".join([HEADER + "\n", *kept]))
