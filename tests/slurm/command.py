"""The command line as a user runs it, from a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tula_hpc.runs import RunFolder


def environment(**variables: str) -> dict[str, str]:
    """What the command line and its jobs find around them: this checkout, one thread, and the variables."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", **variables}


def tula(
    folder: Path, *arguments: str, program: tuple[str, ...] = ("-m", "tula_hpc"), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line, or a program that calls it, to its end."""
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=1800,
    )


def named_run(answer: subprocess.CompletedProcess[str]) -> RunFolder:
    """The run that a successful command names in its last line."""
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    last = answer.stdout.strip().splitlines()[-1]
    assert last.startswith("run folder: ")
    return RunFolder(Path(last.removeprefix("run folder: ")))
