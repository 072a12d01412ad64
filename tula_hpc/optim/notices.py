"""Warnings that point at the user's own line, once each."""

from __future__ import annotations

import inspect
import warnings
from types import FrameType


class Notices:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, message: str) -> None:
        """Warn with this text, unless it was said before, at the first line that is neither ours nor torch's."""
        if message in self._said:
            return
        self._said.add(message)
        depth, frame = 1, inspect.currentframe()
        while (frame := frame.f_back if frame else None) and _module_of(frame).startswith(_NOT_THE_USERS):
            depth += 1
        warnings.warn(message, stacklevel=depth + 1)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))  # code that `exec` runs may have none


_NOT_THE_USERS = ("tula_hpc.optim.", "torch.")
