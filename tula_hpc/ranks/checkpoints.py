"""Checkpoints of the training: written whole or not at all, read without running anything they contain."""

from __future__ import annotations

import errno
import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from tula_hpc.errors import TulaError
from tula_hpc.runs import replacing

KEPT = 2


def save(folder: Path, samples: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint named by the samples seen, and drop all but the newest two.

    Args:
        folder: Folder of the run's checkpoints.
        samples: Training samples seen so far, over all epochs and ranks.
        state: Tensors and plain values only, so that `weights_only=True` can read it.
    """
    refuse_unreadable(state)
    path = folder / f"samples-{samples:014d}.pt"
    with replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's writer covers what the disk said
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    for later in all_of(folder):
        if later > path:  # none could be read, else the training would be past it
            later.rename(later.with_suffix(".unreadable"))
    for old in all_of(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def refuse_unreadable(state: Any) -> None:
    """Look whether a checkpoint of this state could be read again, without its numbers.

    Raises:
        TulaError: If something in it is neither a tensor nor a plain value.
    """
    with io.BytesIO() as file:
        torch.save(tree_map(lambda part: torch.empty(0) if isinstance(part, torch.Tensor) else part, state), file)
        file.seek(0)
        try:
            torch.load(file, weights_only=True)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            raise TulaError(
                "the model's or the optimizer's state holds what a checkpoint cannot be read again with "
                f"({found[1] if found else 'weights_only=True refuses it'}); let get_extra_state return tensors, "
                "numbers, texts, and lists and dicts of these only"
            ) from None


def forget_unfinished(folder: Path) -> None:
    """Remove what savings that were killed half-way have left."""
    for path in folder.glob(".samples-*.pt.*"):
        path.unlink(missing_ok=True)


def all_of(folder: Path) -> list[Path]:
    """Every checkpoint, fewest samples first."""
    return sorted(folder.glob("samples-*.pt"))


def load_latest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read, on the CPU; a torn one is passed over. None if none was written yet.

    The first rank chooses for all: ranks that looked for themselves could find different ones on a network file system.

    Raises:
        TulaError: If there are some and none can be read.
        OSError, RuntimeError: If the file system or the memory fails, which says nothing about the checkpoints.
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
        except MemoryError:
            raise
        except Exception as error:  # damage has many names
            is_file_system = isinstance(error, OSError) and error.errno not in (None, errno.ENOENT)
            if is_file_system or "allocate memory" in str(error):
                raise
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"checkpoint {path.name} cannot be read ({why}); trying the one before it", flush=True)
    if left := all_of(folder):
        raise TulaError(
            f"none of the {len(left)} checkpoints in {folder} can be read, as the log of rank 0 says; remove them to "
            "have the training begin anew"
        )
    return None, None
