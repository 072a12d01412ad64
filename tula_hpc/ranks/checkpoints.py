"""Checkpoints of the training: written whole or not at all, read without running anything they contain."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tula_hpc.runs import replacing

KEPT = 2


def save(folder: Path, samples: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint named by the samples seen, and drop all but the newest two.

    Args:
        folder: Folder of the run's checkpoints.
        samples: Training samples seen so far, over all epochs and ranks.
        state: Tensors and plain values only, so that `weights_only=True` can read it.
    """
    path = folder / f"samples-{samples:014d}.pt"
    with replacing(path) as file:
        torch.save(state, file)
    for old in all_of(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def forget_unfinished(folder: Path) -> None:
    """Remove what savings that were killed half-way have left."""
    for path in folder.glob(".samples-*.pt.*"):
        path.unlink(missing_ok=True)


def all_of(folder: Path) -> list[Path]:
    """Every checkpoint, fewest samples first."""
    return sorted(folder.glob("samples-*.pt"))


def load_latest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read, on the CPU; a torn one is passed over. None if there is none.

    The first rank chooses for all: ranks that looked for themselves could find different ones on a network file system.
    """
    if not dist.is_initialized():
        return _newest_readable(folder)[1]
    path, state = _newest_readable(folder) if dist.get_rank() == 0 else (None, None)
    chosen = [None if path is None else path.name]
    dist.broadcast_object_list(chosen, src=0)
    if dist.get_rank() != 0 and chosen[0] is not None:
        state = _load(folder / chosen[0])
    return state


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def _newest_readable(folder: Path) -> tuple[Path | None, dict[str, Any] | None]:
    for path in reversed(all_of(folder)):
        try:
            return path, _load(path)
        except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"checkpoint {path.name} cannot be read ({why}); trying the one before it", flush=True)
    return None, None
