"""Ends a controller before and after everything it makes durable, once for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Killed(BaseException):
    """What ends a controller that runs in the test's own process."""


def end_this_controller() -> None:
    raise Killed


@dataclass
class Kills:
    """Where a controller has been killed, kept from one start of it to the next."""

    survived: Path
    """A line for each point."""
    kill: Callable[[], None] = end_this_controller
    counts: Callable[[str], bool] = lambda name: True
    """Whether it is to be killed at what has this name."""

    def points(self) -> list[str]:
        """`before <name>` and `after <name>`, as they came."""
        return self.survived.read_text().splitlines() if self.survived.exists() else []

    def around(self, function: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        """The function, with a kill before and after the first call of each name."""

        def wrapped(*arguments: Any, **values: Any) -> Any:
            name = name_of(*arguments, **values)
            self._once(f"before {name}", name)
            result = function(*arguments, **values)
            self._once(f"after {name}", name)
            return result

        return wrapped

    def _once(self, point: str, name: str) -> None:
        known = self.points()
        if point not in known and self.counts(name):
            self.survived.write_text("".join(f"{line}\n" for line in [*known, point]))
            self.kill()
