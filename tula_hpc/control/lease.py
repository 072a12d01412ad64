"""One controller for a run: whoever holds the lease; another takes it over only when the holder is gone.

The lease is a file, because login nodes share a file system and not their processes. It names the host, the boot and
the process of its holder: on the same boot of the same host a dead process is seen at once, elsewhere a holder counts
as gone when it has not refreshed the lease for `EXPIRES_S`, or sooner where it was a Slurm job that has ended or was
queued again.
"""

from __future__ import annotations

import getpass
import os
import shlex
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tula_hpc.control import away
from tula_hpc.errors import RecordError, RecordMissing, RunIsHeld, TulaError
from tula_hpc.runs import RunFolder, read_json, write_json

# Long, because a controller may wait minutes for a Slurm that does not answer; on one host death is seen at once.
EXPIRES_S = 900.0
REFRESH_EVERY_S = 20.0
# Silence after which Slurm is asked whether the holder's job still exists.
SUSPICIOUS_S = 3 * REFRESH_EVERY_S


class Lease:
    """The right to work on one run."""

    def __init__(self, run: RunFolder):
        self._run = run
        self._me = {
            "token": uuid.uuid4().hex,
            "user": _user(),
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "pid": os.getpid(),
            "pid_started": _process_start(os.getpid()),
            "slurm_job": _slurm_job(),
            "restart": _restart(),
            "started": time.time(),
        }
        self._refreshed = 0.0

    def take(self) -> None:
        """Become the run's controller.

        Raises:
            TulaError: If another one is; the message says who.
        """
        mine = self._run.path / f".lease-{self._me['token']}"
        write_json(mine, {**self._me, "refreshed": time.time()})
        try:
            while True:
                try:
                    os.link(mine, self._run.lease)  # fails if there is one: only one of two at the same time succeeds
                    break
                except FileExistsError:
                    self._clear_away_a_dead_one()
        finally:
            mine.unlink()
        self._refreshed = time.monotonic()

    def _clear_away_a_dead_one(self) -> None:
        try:
            holder = read_json(self._run.lease)
        except RecordMissing:  # just given back
            return
        except RecordError as error:
            raise TulaError(f"{error}; if no tula_hpc works on {self._run.path}, delete that file") from None
        if not is_gone(holder):
            raise RunIsHeld(
                f"another tula_hpc already works on {self._run.path}: {describe(holder)}; watch it with: "
                f"{shlex.join(['python', '-m', 'tula_hpc', 'attach', str(self._run.path)])}"
            )
        with suppress(RecordError):  # to ask Slurm takes its time, and somebody may have been faster
            if read_json(self._run.lease)["token"] != holder["token"]:
                return
        aside = self._run.path / f".lease-of-{holder['token']}"
        with suppress(FileNotFoundError):
            os.rename(self._run.lease, aside)
            if read_json(aside)["token"] != holder["token"]:  # faster by so little, and this is theirs
                with suppress(FileExistsError):
                    os.link(aside, self._run.lease)
            aside.unlink()

    def refresh(self) -> None:
        """Say that the controller is alive; cheap, so call it often.

        Raises:
            TulaError: If another controller has taken the run over meanwhile.
        """
        if time.monotonic() - self._refreshed < REFRESH_EVERY_S:
            return
        try:
            holder = read_json(self._run.lease)
        except RecordError:
            holder = {"token": None, "host": "an unknown host"}
        if holder["token"] != self._me["token"]:
            raise TulaError(
                f"another controller, on {holder['host']}, took {self._run.path} over while this one was not heard of"
            )
        write_json(self._run.lease, {**self._me, "refreshed": time.time()})
        self._refreshed = time.monotonic()

    def give_back(self) -> None:
        with suppress(RecordError):
            if read_json(self._run.lease)["token"] == self._me["token"]:
                self._run.lease.unlink(missing_ok=True)


def holder_of(run: RunFolder) -> dict[str, Any] | None:
    """Who works on a run; None if nobody does or the one who did is gone."""
    try:
        holder = read_json(run.lease)
    except RecordError:
        return None
    return None if is_gone(holder) else holder


def describe(holder: dict[str, Any]) -> str:
    """Who a holder is, in words."""
    job = f" (Slurm job {holder['slurm_job']})" if holder.get("slurm_job") else ""
    return f"process {holder['pid']} of {holder['user']} on {holder['host']}{job}"


def is_gone(holder: dict[str, Any]) -> bool:
    """Whether the holder of a lease has ended without giving it back."""
    if (holder["host"], holder["boot"]) == (socket.gethostname(), _boot_id()):
        try:
            os.kill(holder["pid"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return _process_start(holder["pid"]) != holder["pid_started"]  # the number may be another process's by now
    job, silent_s = holder.get("slurm_job"), time.time() - holder["refreshed"]
    if job and job == _slurm_job() and holder["restart"] < _restart():  # an earlier run of this very job
        return True
    return silent_s > EXPIRES_S or bool(job and silent_s > SUSPICIOUS_S and away.has_ended(job))


def _slurm_job() -> str | None:
    return os.environ.get("SLURM_JOB_ID")


def _restart() -> int:
    """How often Slurm has started the job that this process is in again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _process_start(pid: int) -> str:
    """When the kernel started a process, in its own ticks; empty where /proc does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers run as a number without a name
        return f"uid {os.getuid()}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


@contextmanager
def controlling(run: RunFolder) -> Iterator[Lease]:
    """Hold the lease of `run` inside the block."""
    lease = Lease(run)
    lease.take()
    try:
        yield lease
    finally:
        lease.give_back()
