"""What the controller decided and learnt, one small file per event, never changed; the state is a fold over them.

An event is written before or after the thing it speaks of in the order that makes a crash harmless: the intent before
`sbatch`, the id after it, the verdict after the evidence was read.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tula_hpc.control.verdicts import Verdict
from tula_hpc.runs import json_text, naming, read_json, sync_folder


@dataclass(frozen=True)
class Successor:
    """What a training goes on with, on nodes of the same type, once the controller has had it save and end for that."""

    num_nodes: int
    batch_per_rank: int
    train_time_s: float
    """Predicted time of the steps that are left."""
    without: str = ""
    """A slow host that it is not to run on."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job, as the journal tells it."""

    job: str
    """`profile/<candidate>`, `train`, or `probe/<candidate>` beside the training."""
    number: int
    tag: str
    """Unique name under which the scheduler knows it."""
    batch_per_rank: int
    num_nodes: int
    memory_gib: float | None = None
    """Host memory asked for on each node where it is not the configured one, GiB."""
    one_after_another: bool = False
    """Its submission is one job that runs all its attempts, so the job's end says little of this one."""
    job_id: str | None = None
    """The scheduler's id; None between intent and submission."""
    ending: Verdict | None = None
    """The verdict it will get when it has left the queue, because the controller told the scheduler to end it."""
    verdict: Verdict | None = None
    reason: str = ""
    broken_hosts: tuple[str, ...] = ()
    """Hosts that were found down when the attempt had ended, or that it had end because they were slow."""
    start: int = 0
    """How often a user had started the run's controller when the attempt was made; retries are counted from there."""
    successor: Successor | None = None
    """What comes after it, where the controller had it end for that."""
    node_type: str = ""
    """Of the nodes it runs on; empty in a run that has no types."""

    @property
    def key(self) -> tuple[str, int]:
        return self.job, self.number

    @property
    def is_profiling(self) -> bool:
        return self.job.startswith("profile/")

    @property
    def is_probe(self) -> bool:
        return self.job.startswith("probe/")


@dataclass(frozen=True)
class Move:
    """A configuration that a training would move to, and that is measured beside it before."""

    attempt: int
    """Number of the training's attempt."""
    num_nodes: int
    batch_per_rank: int
    step_time_s: float
    """As predicted when it was offered."""
    probe: int
    """Number of the first attempt at measuring it for this."""


@dataclass(frozen=True)
class State:
    """All attempts of a run, in the order they were intended."""

    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict)
    start: int = 0
    """How often a user has started the run's controller."""
    lifted: int = 0
    """The last of these starts that was to go on with a cancelled run: what was cancelled before it runs again."""
    drifts: tuple[dict[str, Any], ...] = ()
    """Lasting changes of the training's step time, as `replanning` told them, oldest first."""
    moves: tuple[Move, ...] = ()
    """What the training would move to since the newest of these changes, oldest first."""

    def of(self, job: str) -> list[Attempt]:
        """Attempts at one job, oldest first."""
        return self._by_job.get(job, [])

    def last(self, job: str) -> Attempt | None:
        attempts = self.of(job)
        return attempts[-1] if attempts else None

    @property
    def open(self) -> list[Attempt]:
        """Attempts without a verdict."""
        return [a for a in self.attempts.values() if a.verdict is None]

    def endings(self, job: str, verdict: Verdict) -> int:
        """How many attempts at a job ended so since a user last started the controller."""
        return sum(a.verdict is verdict and a.start == self.start for a in self.of(job))

    def verdicts_of(self, tag: str) -> set[Verdict | None]:
        """How the attempts of a submission ended."""
        return {a.verdict for a in self.attempts.values() if a.tag == tag}

    def drift_of(self, attempt: Attempt) -> dict[str, Any] | None:
        """The newest drift, if it was told of what the attempt runs at, and not of a node that is left out since."""
        newest = self.drifts[-1] if self.drifts else None
        if newest is None or newest.get("node") in self.broken_hosts:
            return None
        here = attempt.num_nodes, attempt.batch_per_rank
        return newest if (newest["num_nodes"], newest["batch_per_rank"]) == here else None

    def cancelled_jobs(self) -> list[str]:
        """Jobs that were cancelled and are not wanted again since."""
        last = [attempts[-1] for attempts in self._by_job.values()]
        return [a.job for a in last if a.verdict is Verdict.cancelled and a.start >= self.lifted]

    @property
    def broken_hosts(self) -> tuple[str, ...]:
        """Hosts that took one of this run's jobs down with them, or slowed its training down."""
        return tuple(sorted({host for a in self.attempts.values() for host in a.broken_hosts}))

    @cached_property
    def _by_job(self) -> dict[str, list[Attempt]]:
        found: dict[str, list[Attempt]] = {}
        for attempt in self.attempts.values():
            found.setdefault(attempt.job, []).append(attempt)
        return found


class Journal:
    """The events of one run folder. The controller is the only writer, so what it has read and written is the state."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._start = 0
        self._lifted = 0
        self._drifts: list[dict[str, Any]] = []
        self._moves: list[Move] = []
        self._state: State | None = None
        self._number = 0
        self._flushed_later = False
        for event in self.events():
            self._number += 1
            self._fold(event)

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event on disk, oldest first."""
        for path in sorted(self._folder.glob("[0-9]*.json")):
            yield read_json(path)

    def state(self) -> State:
        """What all events add up to."""
        if self._state is None:
            self._state = State(
                dict(self._attempts), self._start, self._lifted, tuple(self._drifts), tuple(self._moves)
            )
        return self._state

    @contextmanager
    def together(self) -> Iterator[None]:
        """Flush the folder once for all events of the block: they survive a crash of the machine from its end on."""
        before, self._flushed_later = self._number, True
        try:
            yield
        finally:
            self._flushed_later = False
            if self._number > before:
                sync_folder(self._folder)

    def _fold(self, event: dict[str, Any]) -> None:
        self._state = None
        key = (event.get("job", ""), event.get("attempt", 0))
        if event["event"] == "started":
            self._start += 1
            if event.get("after_cancel"):
                self._lifted = self._start
        elif event["event"] == "intent":
            self._attempts[key] = Attempt(
                event["job"],
                event["attempt"],
                event["tag"],
                event["batch_per_rank"],
                event["num_nodes"],
                event.get("memory_gib"),
                event.get("one_after_another", False),
                start=self._start,
                node_type=event.get("node_type", ""),
            )
        elif event["event"] == "submitted":
            self._attempts[key] = replace(self._attempts[key], job_id=event["job_id"])
        elif event["event"] == "ending":
            verdict, goes_on = Verdict(event["verdict"]), event.get("successor")
            self._attempts[key] = replace(
                self._attempts[key],
                ending=verdict,
                reason=event["reason"],
                successor=Successor(**goes_on) if goes_on else None,
            )
        elif event["event"] == "drift":
            self._drifts.append(event)
            self._moves.clear()  # they were for steps as they were before
        elif event["event"] == "move":
            self._moves.append(Move(**{each.name: event[each.name] for each in fields(Move)}))
        elif event["event"] == "verdict":
            verdict = Verdict(event["verdict"])
            self._attempts[key] = replace(
                self._attempts[key],
                verdict=verdict,
                reason=event["reason"],
                broken_hosts=tuple(event.get("broken_hosts", ())),
            )

    def started(self, host: str, by: str, after_cancel: bool = False) -> None:
        """A user has started a controller: what went wrong before may have been mended, so retries count anew. After a
        cancel the jobs that ended with it are wanted, too."""
        self._append("started", host=host, by=by, **({"after_cancel": True} if after_cancel else {}))

    def intend(self, attempt: Attempt) -> None:
        self._append(
            "intent",
            job=attempt.job,
            attempt=attempt.number,
            tag=attempt.tag,
            batch_per_rank=attempt.batch_per_rank,
            num_nodes=attempt.num_nodes,
            **({"node_type": attempt.node_type} if attempt.node_type else {}),
            **({} if attempt.memory_gib is None else {"memory_gib": attempt.memory_gib}),
            **({"one_after_another": True} if attempt.one_after_another else {}),
        )

    def submitted(self, attempt: Attempt, job_id: str) -> None:
        self._append("submitted", job=attempt.job, attempt=attempt.number, job_id=job_id)

    def ending(self, attempt: Attempt, verdict: Verdict, reason: str, successor: Successor | None = None) -> None:
        """The scheduler, or the training itself, is about to be told to end an attempt, and this is why."""
        more = {} if successor is None else {"successor": asdict(successor)}
        self._append("ending", job=attempt.job, attempt=attempt.number, verdict=verdict.value, reason=reason, **more)
        sync_folder(self._folder)  # also inside `together`: a cancellation nobody knows the reason of is a user's

    def concluded(self, attempt: Attempt, verdict: Verdict, reason: str, broken_hosts: Collection[str] = ()) -> None:
        found = {"broken_hosts": sorted(broken_hosts)} if broken_hosts else {}
        self._append("verdict", job=attempt.job, attempt=attempt.number, verdict=verdict.value, reason=reason, **found)

    def drifted(self, attempt: Attempt, **what: Any) -> None:
        """A training's steps have lastingly come to take another time, and this is what follows from it."""
        self._append("drift", job=attempt.job, attempt=attempt.number, **what)

    def moving(self, move: Move) -> None:
        """A training would go on elsewhere, which is measured first."""
        self._append("move", job="train", **asdict(move))

    def note(self, text: str) -> None:
        """Something a reader of the journal should know, such as measurements taken over from another run."""
        self._append("note", text=text)

    def _append(self, event: str, **values: Any) -> None:
        """Write the next event under a number nobody else has taken."""
        record = {"event": event, "time": time.time(), **values}
        self._folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".event-")
        try:
            with naming(self._folder), os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json_text(record))
                file.flush()
                os.fsync(file.fileno())
            while True:
                self._number += 1
                try:
                    os.link(temporary, self._folder / f"{self._number:06d}-{event}.json")
                    break
                except FileExistsError:
                    continue
        finally:
            os.unlink(temporary)
        if not self._flushed_later:
            sync_folder(self._folder)
        self._fold(record)
