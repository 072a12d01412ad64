from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tula_hpc.ranks import host_memory

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_reset_forgets_what_was_freed_before():
    """The peak after a reset is that of what came later."""
    large = bytearray(200 * MIB)
    high = host_memory.peak_resident_bytes()
    del large
    host_memory.reset_peak()
    assert host_memory.peak_resident_bytes() < high - 100 * MIB
    smaller = bytearray(100 * MIB)
    assert host_memory.peak_resident_bytes() >= host_memory.resident_bytes() - MIB > 100 * MIB
    del smaller


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_what_children_hold_by_themselves_is_seen():
    """A child counts with what it has written, and no longer when it has ended; for a process that has no others."""
    child = f"held = bytearray(b'x' * {100 * MIB}); print('held', flush=True); input()"
    program = f"""
import subprocess, sys
from tula_hpc.ranks import host_memory

command = [sys.executable, "-c", {child!r}]
print(host_memory.children_bytes())
with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print(host_memory.children_bytes())
    child.communicate(b"\\n")
print(host_memory.children_bytes())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    answer = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    before, during, after = map(int, answer.stdout.split())
    assert before == after == 0
    assert during > 90 * MIB


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("4:memory:/slurm/job_3/step_0\n", {"memory/slurm/job_3/memory.limit_in_bytes": "1000"}, 1000.0),
        (
            "4:cpu,memory:/job/step\n",
            {"memory/job/memory.limit_in_bytes": "900", "memory/job/step/memory.limit_in_bytes": "700"},
            700.0,
        ),
        ("0::/system/job\n", {"system/job/memory.max": "max", "system/memory.max": "800"}, 800.0),
        ("0::/\n", {}, math.inf),
    ],
)
def test_the_tightest_group_above_the_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], limit: float
):
    """Limits of version 1 and 2 are found at any level, as Slurm sets them on the job and not on the task."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    assert host_memory.limit_bytes() == limit
    assert host_memory.limit_bytes(sharers=2) == limit / 2


def test_what_a_process_has_is_part_of_what_it_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Available memory does not count what this process holds already; the rest is shared evenly."""
    page = host_memory.resource.getpagesize()
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "self" / "statm").write_text("500 100 50 10 0 200 0")
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    assert host_memory.limit_bytes() == 4000 * 1024 + 100 * page
    assert host_memory.limit_bytes(sharers=4) == 1000 * 1024 + 100 * page
