"""Where the user's jobs are: one squeue a user, cluster and interval, however many controllers want to know.

The controllers of a user share each answer through a file in the user's cache folder, because a login node, and Slurm
behind it, is shared with everybody else. Accounting is a second opinion on jobs that squeue has forgotten.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tula_hpc.control import slurm_commands
from tula_hpc.control.scheduler import Seen
from tula_hpc.control.slurm_commands import COMMAND_TIMEOUT_S, answer_of, rows
from tula_hpc.control.verdicts import QueueState, slurm_state
from tula_hpc.runs import write_text

SQUEUE = ("squeue", "--me", "-r", "-h", "-t", "all", "--format=%i|%T|%r|%N|%j")  # the name last, it may hold bars
CLOCK_SKEW_S = 2.0
"""How much the clocks of two login nodes may differ."""
TURN_EXPIRES_S = COMMAND_TIMEOUT_S + 10
"""After this a controller that went to ask Slurm and did not come back is taken to have crashed."""
SACCT_TIMEOUT_S = 10.0
_MAGIC = "tula_hpc-squeue-1"


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a list as Slurm prints it: `n[1-3,7]`, `a-[01-03]-ib0`, `r[1-2]n[1-2]`, several with commas."""
    if text in ("", "(null)", "None assigned"):
        return ()
    return tuple(host for group in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for host in _expand(group))


def _expand(group: str) -> list[str]:
    head, bracket, rest = group.partition("[")
    if not bracket:
        return [group]
    ranges, _, after = rest.partition("]")
    tails = _expand(after)
    return [head + number + tail for number in _numbers(ranges) for tail in tails]


def _numbers(ranges: str) -> Iterable[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if last:
            yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        else:
            yield first


def _task_ids(job_id: str) -> tuple[str, ...]:
    """The ids that one row stands for; accounting prints what still waits of an array as `42_[1-3,5%2]`."""
    return expand_hosts(re.sub(r"%\d+\]", "]", job_id))


@dataclass(frozen=True)
class Entry:
    """One row of squeue."""

    state: QueueState
    reason: str
    nodes: str
    name: str

    @property
    def seen(self) -> Seen:
        why = "" if self.reason == "None" or self.state is not QueueState.pending else self.reason
        return Seen(self.state, why, expand_hosts(self.nodes))


@dataclass(frozen=True)
class Snapshot:
    """One answer of squeue, or that there was none."""

    asked_at: float
    """When squeue began, seconds since 1970 on the clock of whoever ran it."""
    text: str | None
    """What it printed; None if it failed."""

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """The rows by job id."""
        return {
            job_id: Entry(slurm_state(state), reason, nodes, name)
            for job_id, state, reason, nodes, name in rows(self.text or "", 5)
        }

    def entry(self, job_id: str) -> Entry | None:
        """The row of a job; an array that ended before any element of it began is one row without the index."""
        return self.entries.get(job_id) or self.entries.get(job_id.partition("_")[0])

    @property
    def age_s(self) -> float:
        return time.time() - self.asked_at

    @property
    def is_from_the_future(self) -> bool:
        """A clock is wrong, so nothing is known of its age."""
        return self.age_s < -CLOCK_SKEW_S

    def save(self, file: Path) -> None:
        """Put it in the place of the one before."""
        heading = f"{_MAGIC} {self.asked_at!r} {'failed' if self.text is None else 'answered'}\n"
        write_text(file, heading + (self.text or ""))

    @classmethod
    def load(cls, file: Path) -> Snapshot | None:
        """The last one that was saved; None if there is none or it makes no sense."""
        try:
            heading, _, text = file.read_text(encoding="utf-8").partition("\n")
            magic, asked_at, outcome = heading.split(" ")
            return cls(float(asked_at), text if outcome == "answered" else None) if magic == _MAGIC else None
        except (OSError, ValueError):
            return None


def _cache_folder() -> Path:
    """This user's own folder for this cluster.

    Raises:
        OSError: If it is another user's or cannot be made.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(root):
        raise OSError(f"{root} is no place for a cache")  # a user without a home
    cluster = [os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS")]
    key = repr([os.getuid(), *cluster, slurm_commands.site_config().get("ClusterName", "")])
    folder = Path(root) / "tula_hpc" / f"slurm-{hashlib.sha256(key.encode()).hexdigest()[:10]}"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


class SharedSqueue:
    """The last answer of squeue to any controller of this user, refreshed by whoever first finds it too old.

    Where the cache folder cannot be written this process asks for itself, as seldom.

    Args:
        wished_interval_s: How old an answer may become; less if Slurm forgets sooner.
    """

    def __init__(self, wished_interval_s: float):
        self._wished_interval_s = wished_interval_s
        self._newest: Snapshot | None = None

    def look(self) -> Snapshot | None:
        """An answer that is at most an interval old, or the one before while another controller asks for the next.

        None if squeue failed, which a failure told by another controller is, too.
        """
        try:
            folder = _cache_folder()
        except OSError:
            return self._newest_answer() if self._is_current() else self.ask()
        self._learn(Snapshot.load(folder / "squeue"))
        if not self._is_current() and _take_turn(folder / "turn"):
            try:
                self._learn(Snapshot.load(folder / "squeue"))  # the turn may have come because another one has asked
                if not self._is_current():
                    self.ask()
            finally:
                with suppress(OSError):
                    (folder / "turn").unlink()
        return self._newest_answer()

    def ask(self) -> Snapshot | None:
        """Ask now, whatever others know, and let them know; None if squeue fails."""
        asked_at = time.time()
        self._newest = Snapshot(asked_at, answer_of(*SQUEUE))
        with suppress(OSError):
            self._newest.save(_cache_folder() / "squeue")
        return self._newest_answer()

    def _learn(self, found: Snapshot | None) -> None:
        if found is None or found.is_from_the_future:
            return
        if self._newest is None or self._newest.is_from_the_future or found.asked_at > self._newest.asked_at:
            self._newest = found

    def _is_current(self) -> bool:
        if self._newest is None or self._newest.is_from_the_future:
            return False
        return self._newest.age_s < slurm_commands.poll_interval_s(self._wished_interval_s)

    def _newest_answer(self) -> Snapshot | None:
        newest = self._newest
        oldest_s = slurm_commands.poll_interval_s(self._wished_interval_s) + TURN_EXPIRES_S
        return newest if newest is not None and newest.text is not None and newest.age_s < oldest_s else None


def _take_turn(lock: Path) -> bool:
    """Whether it is for us to ask: nobody else is at it, or it cannot be found out."""
    try:
        with suppress(FileNotFoundError):
            # two that find it expired at the same time may both ask, which costs one squeue too many
            if abs(time.time() - lock.stat().st_mtime) > TURN_EXPIRES_S or _has_died(lock.read_text()):
                lock.unlink(missing_ok=True)
        handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.write(handle, f"{socket.gethostname()} {os.getpid()}".encode())
        os.close(handle)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _has_died(holder: str) -> bool:
    """Whether the process that took the turn ran on this host and does no more."""
    host, _, pid = holder.partition(" ")
    return host == socket.gethostname() and pid.isdigit() and not os.path.exists(f"/proc/{pid}")


class Accounting:
    """What sacct says of jobs that have ended; says nothing where accounting is off, away or behind.

    Args:
        wished_interval_s: A question is not repeated, and after a failure none is asked, for as long.
    """

    def __init__(self, wished_interval_s: float):
        self._wished_interval_s = wished_interval_s
        self._ends: dict[str, Seen] = {}
        self._told: dict[tuple[str, ...], tuple[float, str]] = {}
        self._silent_until = 0.0

    def ends(self, job_ids: Collection[str]) -> Mapping[str, Seen]:
        """How those of the jobs ended of which that is known. An end is final: it is asked for once."""
        open_ids = [job_id for job_id in job_ids if job_id not in self._ends]
        if open_ids:
            # whole arrays: the elements of one that never began have no rows of their own
            arrays = ",".join(sorted({job_id.partition("_")[0] for job_id in open_ids}))
            self._learn(open_ids, self._ask("--format=JobID,State,NodeList", f"--jobs={arrays}"))
        return {job_id: self._ends[job_id] for job_id in job_ids if job_id in self._ends}

    def _learn(self, job_ids: Collection[str], text: str) -> None:
        found = rows(text, 3)
        # a step that a cgroup killed for its memory says so, while its job merely failed
        killed = {job.partition(".")[0] for job, state, _ in found if slurm_state(state) is QueueState.out_of_memory}
        told: dict[str, Seen] = {}
        for row_id, state_text, nodes in found:
            state = slurm_state(state_text)
            if state is QueueState.failed and row_id in killed:
                state = QueueState.out_of_memory
            told.update(dict.fromkeys(_task_ids(row_id), Seen(state, hosts=expand_hosts(nodes))))
        for job_id in job_ids:
            last = told.get(job_id) or told.get(job_id.partition("_")[0])
            if last is not None and not last.state.active:
                self._ends[job_id] = last

    def named(self, name: str) -> list[str]:
        """Ids of the last week's jobs of that name."""
        text = self._ask("--format=JobID,State", "--allocations", f"--name={name}", "--starttime=now-7days")
        return [job_id for row_id, _ in rows(text, 2) for job_id in _task_ids(row_id)]

    def _ask(self, *question: str) -> str:
        good_until, text = self._told.get(question, (0.0, ""))
        if time.monotonic() < max(good_until, self._silent_until) or not slurm_commands.has_accounting():
            return text
        answer = answer_of("sacct", "--parsable2", "--noheader", *question, timeout_s=SACCT_TIMEOUT_S)
        until = time.monotonic() + slurm_commands.poll_interval_s(self._wished_interval_s)
        if answer is None:
            self._silent_until = until
            return text
        self._told[question] = (until, answer)
        return answer


class SlurmQueue:
    """Where the jobs of one controller are.

    Args:
        wished_interval_s: Seconds between two questions to Slurm; fewer if it forgets sooner.
    """

    def __init__(self, wished_interval_s: float):
        self._squeue = SharedSqueue(wished_interval_s)
        self._accounting = Accounting(wished_interval_s)
        self._known_since: dict[str, float] = {}
        self._last_seen: dict[str, Seen] = {}
        self._told_at: dict[str, float] = {}
        """When the squeue began that last had a row of the job."""
        self._missed_at: dict[str, float] = {}
        self._looked_for: set[str] = set()

    def expect(self, job_ids: Collection[str]) -> None:
        """These jobs exist from now on: an answer that squeue began to give before says nothing of them."""
        now = time.time()
        for job_id in job_ids:
            self._known_since[job_id] = min(now, self._known_since.get(job_id, now))  # min: clocks are set back, too

    def states(self, job_ids: Collection[str]) -> Mapping[str, Seen] | None:
        """Where the jobs are; None if squeue could not be asked."""
        if not job_ids:
            return {}
        self.expect(job_ids)
        snapshot = self._squeue.look()
        if snapshot is None:
            return None
        seen = {job_id: self._seen(job_id, snapshot) for job_id in job_ids}
        absent = [job_id for job_id, one in seen.items() if one.state is QueueState.absent]
        return {**seen, **self._accounting.ends(absent)}

    def _seen(self, job_id: str, snapshot: Snapshot) -> Seen:
        entry = snapshot.entry(job_id)
        if entry is not None:
            self._missed_at.pop(job_id, None)
            self._last_seen[job_id] = entry.seen
            self._told_at[job_id] = snapshot.asked_at
            return entry.seen
        last = self._last_seen.get(job_id, Seen(QueueState.pending))
        if not last.state.active or snapshot.asked_at <= self._known_since[job_id] + CLOCK_SKEW_S:
            return last
        # once may be an answer of a Slurm that has just come back and does not know all its jobs yet
        missed_at = self._missed_at.setdefault(job_id, snapshot.asked_at)
        if missed_at == snapshot.asked_at:
            return last
        # had it run meanwhile, Slurm would still tell of its end
        gap_s = missed_at - self._told_at.get(job_id, -math.inf)
        waited = last.state is QueueState.pending and gap_s < (slurm_commands.forgets_after_s() or 0.0)
        return Seen(QueueState.absent, hosts=last.hosts, was_waiting=waited)

    def named(self, name: str) -> list[str] | None:
        """Ids of the jobs of that name, asked for after the first call with it; None if squeue could not be asked."""
        snapshot = self._squeue.look()
        if snapshot is not None and name not in self._looked_for:
            snapshot = self._squeue.ask()  # what was asked before the submission got lost says nothing of it
        if snapshot is None:
            return None
        self._looked_for.add(name)
        ids = [job_id for job_id, entry in snapshot.entries.items() if entry.name == name]
        return ids or self._accounting.named(name)

    def num_active(self) -> int | None:
        """Entries of all the user's jobs that wait or run, array elements one by one; None if it cannot be asked."""
        snapshot = self._squeue.look()
        if snapshot is None:
            return None
        newer = [i for i, since in self._known_since.items() if since > snapshot.asked_at and not snapshot.entry(i)]
        return sum(entry.state.active for entry in snapshot.entries.values()) + len(newer)
