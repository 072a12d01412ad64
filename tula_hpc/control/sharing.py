"""Runs below one root that measure the same steps measure each point once.

Who measures a point says so first, by a claim below `<run_root>/.points/<measurement signature>/<candidate>/`. Claims
are numbered and the newest one counts: it holds while the run it names is being worked on and has not failed at the
point. One that holds no longer is followed by the next number, which only one of several runs can make; nothing is
removed.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings, measurement_signature
from tula_hpc.control.jobs import profile_job
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.lease import holder_of
from tula_hpc.control.verdicts import Verdict
from tula_hpc.display import Display, count
from tula_hpc.errors import RecordError
from tula_hpc.runs import RunFolder, read_json, write_json

LOOK_EVERY_S = 2.0
# Ends that say something about the candidate, so that they hold for every run.
_TELLING = (Verdict.success, Verdict.cuda_oom, Verdict.host_oom)


class SharedPoints:
    """What one run takes from the others below its root, and what it leaves to them."""

    def __init__(
        self, settings: Settings, run: RunFolder, journal: Journal, display: Display, heartbeat: Callable[[], None]
    ):
        self._run = run
        self._journal = journal
        self._display = display
        self._heartbeat = heartbeat
        self._signature = measurement_signature(settings)
        self._grid = {profile_job(c) for c in settings.grid_candidates()}
        self._unusable: set[RunFolder] = set()
        self._claims = run.path.parent / ".points" / self._signature

    def take_over_all(self) -> None:
        """Copy what any run under the same root has measured of the same steps."""
        for plan in sorted(self._run.path.parent.glob("*/plan.json")):
            self._take_over(RunFolder(plan.parent))

    def divide(self, wanted: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Of the candidates to measure, those that are now this run's to measure, and those that others measure now.

        Both are empty if results of others were taken over, because then other candidates may be wanted.
        """
        claimants = {run for _, run in map(self._newest, wanted) if run is not None}
        if sum(map(self._take_over, claimants)):
            return [], []
        mine = [candidate for candidate in wanted if self._claim(candidate)]
        return mine, [candidate for candidate in wanted if candidate not in mine]

    def wait_for(self, candidates: list[Candidate]) -> None:
        """Until one of the points that others measure is there, or nobody measures it any more."""
        if not candidates:
            return
        names = ", ".join(c.name for c in candidates)
        self._display.say(f"{names}: measured by another run at this moment; waiting for the result")
        while all(self._is_in_progress(c) for c in candidates):
            self._heartbeat()
            time.sleep(LOOK_EVERY_S)

    # --- claims -------------------------------------------------------------------------------------------------------

    def _newest(self, candidate: Candidate) -> tuple[int, RunFolder | None]:
        """Number and run of the claim that counts; (0, None) if there is none."""
        folder = self._claims / candidate.name
        number = max((int(path.stem) for path in folder.glob("[0-9]*.json")), default=0)
        try:
            return number, RunFolder(self._run.path.parent / read_json(folder / f"{number}.json")["run"])
        except RecordError:
            return number, None

    def _claim(self, candidate: Candidate) -> bool:
        """Whether this run may measure the candidate: its claim counts, or could be made."""
        folder = self._claims / candidate.name
        while True:
            number, claimant = self._newest(candidate)
            if claimant is not None and claimant.path == self._run.path:
                return True
            if claimant is not None and (self._is_in_progress(candidate) or self._has_result(claimant, candidate)):
                return False
            mine = folder / f".{uuid.uuid4().hex}"
            write_json(mine, {"run": self._run.path.name, "time": time.time()})
            try:
                os.link(mine, folder / f"{number + 1}.json")  # of several runs one succeeds; the others look again
                return True
            except FileExistsError:
                continue
            finally:
                mine.unlink()

    def _is_in_progress(self, candidate: Candidate) -> bool:
        claimant = self._newest(candidate)[1]
        if claimant is None or holder_of(claimant) is None:
            return False
        last = _last(claimant, candidate)
        return last is None or last.verdict is None

    def _has_result(self, claimant: RunFolder, candidate: Candidate) -> bool:
        """Whether there is a result to take over, by the next round."""
        if claimant in self._unusable or self._has(profile_job(candidate)):  # had it, and this run wants to try again
            return False
        last = _last(claimant, candidate)
        return last is not None and last.verdict in _TELLING

    def _has(self, job: str) -> bool:
        return any(attempt.verdict in _TELLING for attempt in self._journal.state().of(job))

    # --- results ------------------------------------------------------------------------------------------------------

    def _take_over(self, other: RunFolder) -> int:
        """Copy what another run has measured of this one's grid, and return how much that was."""
        try:
            if (
                other.path == self._run.path
                or read_json(other.plan)["measurement_signature"] != self._signature
                or not other.journal.exists()
            ):
                return 0
            attempts = Journal(other.journal).state().attempts.values()
        except (RecordError, KeyError):
            return 0
        running = {a.job for a in self._journal.state().open}
        taken = [
            a for a in attempts if a.job in self._grid - running and a.verdict in _TELLING and not self._has(a.job)
        ]
        try:
            for attempt in taken:
                self._copy(other, attempt)
        except (OSError, RecordError):  # somebody is clearing that folder away
            self._unusable.add(other)
            return 0
        if taken:
            self._display.say(f"{count(len(taken), 'measurement')} taken over from {other.path}")
        return len(taken)

    def _copy(self, other: RunFolder, attempt: Attempt) -> None:
        number = len(self._journal.state().of(attempt.job)) + 1
        mine = Attempt(attempt.job, number, attempt.tag, attempt.batch_per_rank, attempt.num_nodes)
        source, target = other.attempt(attempt.job, attempt.number), self._run.attempt(attempt.job, number)
        shutil.copytree(source.path, target.path, dirs_exist_ok=True)
        if number != attempt.number:  # a record says which attempt it is of
            for path in target.path.glob("rank-*.json"):
                write_json(path, {**read_json(path), "attempt": number})
        self._journal.intend(mine)
        self._journal.concluded(mine, attempt.verdict or Verdict.success, f"measured in {other.path.name}")


def _last(run: RunFolder, candidate: Candidate) -> Attempt | None:
    """The newest attempt at a candidate in another run's journal, as far as it can be read."""
    with suppress(RecordError):
        return Journal(run.journal).state().last(profile_job(candidate))
    return None
