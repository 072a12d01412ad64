"""Host memory of this process, and how much of it the job may use. Linux only; elsewhere the answers are unknown."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def reset_peak() -> None:
    """Forget the peak so far: building a data set may take more for a moment than any step does later."""
    with contextlib.suppress(OSError):  # not everywhere allowed; the peak is then the process's
        (PROC / "self" / "clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """Largest resident set of this process since the last `reset_peak`."""
    with contextlib.suppress(OSError, StopIteration):
        lines = (PROC / "self" / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """Resident set of this process now; its peak where /proc is missing."""
    try:
        fields = (PROC / "self" / "statm").read_text().split()
    except FileNotFoundError:
        return peak_resident_bytes()
    return int(fields[1]) * resource.getpagesize()


def children_bytes() -> int:
    """What the children of this process, such as loader workers, hold now and share with nobody; 0 where that cannot be
    read."""
    found = 0
    with contextlib.suppress(OSError):
        for thread in (PROC / "self" / "task").iterdir():
            for child in (thread / "children").read_text().split():
                with contextlib.suppress(OSError):  # it may have ended meanwhile
                    lines = (PROC / child / "smaps_rollup").read_text().splitlines()
                    found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
    return found


def limit_bytes(sharers: int = 1) -> float:
    """What this process may use where `sharers` like it share the host: its part of the tightest limit of the control
    groups above it, and its part of the machine's available memory besides what it has already; infinity where neither
    can be read."""
    return min([_available_bytes() / sharers + resident_bytes(), *(limit / sharers for limit in _cgroup_limits())])


def _available_bytes() -> float:
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
    except FileNotFoundError:
        return math.inf
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), math.inf)


def _cgroup_limits() -> list[float]:
    """Limits of every group from this process's own to the root, version 1 and 2."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except FileNotFoundError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if (folder / name).is_file():
                text = (folder / name).read_text().strip()
                limits.append(math.inf if text == "max" else float(text))
            if folder == root:
                break
    return limits
