"""The gradients of a training, step by step: their norm, how much it changes, and whether they were scaled.

`train/gradients.csv` holds a row a step, written by the first rank:

| column          | meaning                                                                                        |
|-----------------|------------------------------------------------------------------------------------------------|
| `step`          | optimizer steps so far, from 1                                                                 |
| `epoch`         | the epoch that the step is part of, from 1                                                     |
| `samples`       | training samples seen after the step, over all epochs and ranks                                |
| `global_batch`  | the batch that the training ran with                                                           |
| `gradient_norm` | L2 norm over all parameters, averaged over the ranks, as it was before any scaling             |
| `variability`   | Δ of Eq. 5: relative change of the squared norm since the last step whose norm was finite; nan |
|                 | for the first step of all, and for the first with another batch                                |
| `scaled`        | 1 if the method multiplied the gradients, 0 if the step was sensitive or the method never does |
| `scale`         | what it multiplied them by, the mean over all elements that have a scale; 1 if not `scaled`    |

In the local phase of post-local SGD the norms are those of the first rank's own gradients.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.optim.bounded import BoundedOptimizer
from tula_hpc.optim.gradients import constant, squared_norm
from tula_hpc.runs import write_text

COLUMNS = ("step", "epoch", "samples", "global_batch", "gradient_norm", "variability", "scaled", "scale")


class GradientTrace:
    """Takes an optimizer's steps and writes down what it saw of them.

    Nothing waits for the device before `write`; until then a step keeps three numbers there. The optimizer sees and
    does what it would without.
    """

    def __init__(self, path: Path, optimizer: torch.optim.Optimizer, global_batch: int, samples: int):
        """Rows of steps after the first `samples` will be made again, and are dropped, with a row torn by a crash."""
        self._path = path
        self._optimizer = optimizer
        self._global_batch = global_batch
        self._seen: list[tuple[int, int, Tensor]] = []
        kept = [row for row in read(path) if row["samples"] <= samples]
        write_text(path, ",".join(COLUMNS) + "\n" + "".join(_line(row) for row in kept))
        self._steps = len(kept)
        comparable = [r for r in kept if r["global_batch"] == global_batch and math.isfinite(r["gradient_norm"])]
        same_batch = bool(kept) and kept[-1]["global_batch"] == global_batch
        self._last_norm = comparable[-1]["gradient_norm"] if same_batch and comparable else math.nan

    @torch.no_grad()
    def step(self, epoch: int, samples: int) -> None:
        """Let the optimizer step; `epoch` counts from 1, `samples` are those seen after the step."""
        optimizer = self._optimizer
        norm = squared_norm([p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]).sqrt()
        mean: Tensor | float = optimizer.mean_scale if isinstance(optimizer, TulaOptimizer) else 1.0
        optimizer.step()
        scaled: Tensor | float = optimizer.scaled if isinstance(optimizer, TulaOptimizer) else 0.0
        if isinstance(optimizer, BoundedOptimizer):  # its scales are of the step they act on
            mean, scaled = optimizer.mean_scale, float(optimizer.active)
        numbers = [x if isinstance(x, Tensor) else constant(x, norm.device) for x in (norm, scaled, mean)]
        self._seen.append((epoch, samples, torch.stack(numbers)))

    def write(self) -> None:
        """Add the rows of the steps since the last call. This waits for the device."""
        if not self._seen:
            return
        numbers = torch.stack([values for _, _, values in self._seen]).tolist()
        rows = []
        for (epoch, samples, _), (norm, scaled, mean) in zip(self._seen, numbers, strict=True):
            self._steps += 1
            norm = float(f"{norm:.9g}")  # as it will be read: a training that is resumed finds the same changes
            rows.append(
                {
                    "step": self._steps,
                    "epoch": epoch,
                    "samples": samples,
                    "global_batch": self._global_batch,
                    "gradient_norm": norm,
                    "variability": _variability(norm, self._last_norm),
                    "scaled": int(scaled),
                    "scale": mean if scaled else 1.0,
                }
            )
            self._last_norm = norm if math.isfinite(norm) else self._last_norm
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(_line(row) for row in rows)
        self._seen.clear()


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a trace, without a last one that a crash has torn; none if there is no file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1].splitlines()
    kinds = (int, int, int, int, float, float, int, float)
    return [
        {name: kind(value) for name, kind, value in zip(COLUMNS, kinds, row, strict=True)}
        for row in list(csv.reader(whole))[1:]
    ]


def _variability(norm: float, previous: float) -> float:
    """Eq. 5; nan where there is no previous norm to speak of."""
    return abs(norm**2 - previous**2) / previous**2 if previous else math.nan


def _line(row: dict[str, Any]) -> str:
    return ",".join(f"{row[name]:.9g}" if isinstance(row[name], float) else str(row[name]) for name in COLUMNS) + "\n"
