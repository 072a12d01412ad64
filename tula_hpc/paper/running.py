"""Many command lines of this package brought to their end side by side, each in a process of its own.

Every command goes on where it ended last, so whoever runs them may be killed and started again at any moment.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tula_hpc.paper.scales import Run
from tula_hpc.runs import RunFolder, safe_tag

HELD_BY_ANOTHER = 3
"""Exit code of a command whose run somebody else works on, as another result that needs it does."""
ASK_AGAIN_S = 5.0
LEAVES_WITHIN_S = 30.0


class Runs:
    """The commands of one result.

    Args:
        logs: Folder of what they print, a file each.
        at_once: How many of them work at the same time.
        say: Told of every end, in one line.
    """

    def __init__(self, logs: Path, at_once: int, say: Callable[[str], None]):
        self._logs, self._at_once, self._say = logs, at_once, say
        self._children: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._leaving = False

    def finish(self, runs: Sequence[Run], more: Sequence[str]) -> tuple[dict[Run, RunFolder], dict[Run, str]]:
        """Bring all of them to their end.

        Args:
            runs: Their arguments.
            more: Arguments for every one of them, such as the cluster.

        Returns:
            The folder of each that ended well, and for the others what they said last.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        folders: dict[Run, RunFolder] = {}
        failures: dict[Run, str] = {}
        with ThreadPoolExecutor(max_workers=self._at_once) as pool:
            try:
                for run, (code, text) in zip(runs, pool.map(lambda run: self._one(run, more), runs), strict=True):
                    named = re.search(r"^run folder: (.+)$", text, flags=re.MULTILINE)
                    if code == 0 and named:
                        folders[run] = RunFolder(Path(named[1]))
                    else:
                        failures[run] = _last_words(text) or f"ended with code {code}"
            except BaseException:
                self.leave()
                raise
        return folders, failures

    def leave(self) -> None:
        """End the commands, not their jobs; the next start goes on from there."""
        with self._lock:
            self._leaving = True
            for child in list(self._children):
                child.terminate()
        deadline = time.monotonic() + LEAVES_WITHIN_S
        for child in list(self._children):
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()

    def _one(self, run: Run, more: Sequence[str]) -> tuple[int, str]:
        """Exit code and output of one command, given again for as long as somebody else works on its run."""
        log = self._logs / f"{name_of(run)}.log"
        while True:
            code, text = self._start_and_wait(run, more, log)
            if self._leaving:
                return code, "interrupted"
            if code != HELD_BY_ANOTHER:
                break
            time.sleep(ASK_AGAIN_S)
        self._say(f"{'done' if code == 0 else 'failed'}: {in_words(run)}" + ("" if code == 0 else f"; see {log}"))
        return code, text

    def _start_and_wait(self, run: Run, more: Sequence[str], log: Path) -> tuple[int, str]:
        with self._lock:
            if self._leaving:
                return HELD_BY_ANOTHER, ""
            child = subprocess.Popen(
                [sys.executable, "-u", "-m", "tula_hpc", *run, *more],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
            self._children.add(child)
        try:
            return self._listen(child, log)
        finally:
            self._children.discard(child)

    def _listen(self, child: subprocess.Popen[str], log: Path) -> tuple[int, str]:
        """Exit code and output; the log is for the user: the same result, asked for twice, writes it as well."""
        said: list[str] = []
        with child, log.open("w", encoding="utf-8", buffering=1) as file:
            for line in child.stdout or ():
                said.append(line)
                file.write(line)
        return child.returncode, "".join(said)


def in_words(run: Run) -> str:
    """The command as a user would type it, without the program."""
    return " ".join(run)


def name_of(run: Run) -> str:
    """A file name for the run: its experiment, method, and a hash of the rest."""
    told = [a.partition("=")[2] for a in run if a.startswith(("+experiment=", "method=", "search="))]
    return safe_tag("-".join([*told, hashlib.sha256("\n".join(run).encode()).hexdigest()[:6]]))


def _last_words(text: str) -> str:
    """What a command said of its end: its error with all its lines, or the last line."""
    before, mark, error = text.rpartition("tula_hpc: ")
    lines = [line.strip() for line in (error if mark else before or text).splitlines() if line.strip()]
    return " ".join(lines if mark else lines[-1:])
