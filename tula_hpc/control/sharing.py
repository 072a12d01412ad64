"""Runs below one root that measure the same steps measure each point once.

Who measures a point says so first, by a claim below `<run_root>/.points/<measurement signature>/<candidate>/`. Each
type of node has the signature of a run that has only this type, and the candidate is named as in such a run: runs share
points whatever they call the type. Claims are numbered and the newest one counts: it holds while the run it names is
being worked on, or its controller job waits to go on with the point, and has not failed at it since. One that holds no
longer is followed by the next number, which only one of several runs can make; nothing is removed. So is one's own by
who tries a point again: each claim says which attempts came before it. A run that cannot submit what it has claimed
makes a claim of nobody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tula_hpc.candidates import Candidate
from tula_hpc.config import ClusterKind, Settings
from tula_hpc.control import away
from tula_hpc.control.jobs import profile_job
from tula_hpc.control.journal import Attempt, Journal, State
from tula_hpc.control.lease import holder_of
from tula_hpc.control.verdicts import Verdict
from tula_hpc.display import Display, count
from tula_hpc.errors import RecordError
from tula_hpc.ranks.timings import read_point
from tula_hpc.runs import AttemptFolder, RunFolder, read_json, write_json
from tula_hpc.signatures import measurement_signature

# How often a run that is waited for is looked at; on Slurm results take minutes, and the login node is shared.
LOOK_EVERY_S = 2.0
LOOK_EVERY_ON_SLURM_S = 10.0
# Ends that say something about the candidate, so that they hold for every run.
_TELLING = (Verdict.success, Verdict.cuda_oom, Verdict.host_oom)


class _Claim(NamedTuple):
    """To measure a point."""

    number: int
    """0 where nobody has made one."""
    run: RunFolder | None
    after: int
    """The run's newest attempt at the point when it made the claim; 0: it had made none."""


class SharedPoints:
    """What one run takes from the others below its root, and what it leaves to them."""

    def __init__(
        self, settings: Settings, run: RunFolder, journal: Journal, display: Display, heartbeat: Callable[[], None]
    ):
        self._run = run
        self._journal = journal
        self._display = display
        self._heartbeat = heartbeat
        self._signatures = _signatures(settings)
        self._grid = {profile_job(c): c for c in settings.grid_candidates()}
        self._look_every_s = LOOK_EVERY_ON_SLURM_S if settings.cluster.kind is ClusterKind.slurm else LOOK_EVERY_S
        self._unusable: set[tuple[RunFolder, str, int]] = set()
        """Attempts of others whose record could not be copied, or was not whole."""
        self._states: dict[RunFolder, tuple[int, State]] = {}
        """What the journals of others said last, and with how many events."""
        self._plans: dict[RunFolder, dict[str, str]] = {}
        self._points = run.path.parent / ".points"

    def take_over_all(self) -> None:
        """Copy what any run under the same root has measured of the same steps."""
        for plan in sorted(self._run.path.parent.glob("*/plan.json")):
            self._take_over(RunFolder(plan.parent))

    def divide(self, wanted: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Of the candidates to measure, those that are now this run's to measure, and those that others measure now.

        Both are empty if results of others were taken over, because then other candidates may be wanted.
        """
        claimants = {claim.run for claim in map(self._newest, wanted) if claim.run is not None}
        if sum(map(self._take_over, claimants)):
            return [], []
        mine = [candidate for candidate in wanted if self._may_measure(candidate)]
        return mine, [candidate for candidate in wanted if candidate not in mine]

    def wait_for(self, candidates: list[Candidate]) -> None:
        """Until one of the points that others measure is there, or nobody measures it any more."""
        if not candidates:
            return
        names = ", ".join(c.name for c in candidates)
        self._display.say(f"{names}: measured by another run at this moment; waiting for the result")
        while self._are_in_progress(candidates):
            self._heartbeat()
            time.sleep(self._look_every_s)

    # --- claims -------------------------------------------------------------------------------------------------------

    def _claims(self, candidate: Candidate) -> Path:
        """The folder of the claims to a point."""
        return self._points / self._signatures[candidate.node_type] / replace(candidate, node_type="").name

    def _newest(self, candidate: Candidate) -> _Claim:
        """The claim that counts."""
        folder = self._claims(candidate)
        number = max((int(path.stem) for path in folder.glob("[0-9]*.json")), default=0)
        try:
            record = read_json(folder / f"{number}.json")
        except (RecordError, PermissionError):
            return _Claim(number, None, 0)
        run = None if record["run"] is None else RunFolder(self._run.path.parent / record["run"])
        return _Claim(number, run, record.get("after", 0))

    def _may_measure(self, candidate: Candidate) -> bool:
        try:
            return self._claim(candidate)
        except PermissionError:  # the claims or the run are another user's: better measured twice than not
            return True

    def _claim(self, candidate: Candidate) -> bool:
        """Whether this run may measure the candidate: its claim counts, or could be made."""
        own = self._journal.state().last(profile_job(candidate))
        while True:
            claim = self._newest(candidate)
            if claim.run is not None and claim.run.path == self._run.path:
                if _end_since(claim, own) is None:
                    return True
            elif claim.run is not None and (
                self._is_measuring(claim.run, [(claim, candidate)]) or self._has_result(claim.run, candidate)
            ):
                return False
            after = 0 if own is None else own.number
            if self._make_claim(candidate, claim.number + 1, self._run.path.name, after):
                return True  # else another was faster; look again

    def _make_claim(self, candidate: Candidate, number: int, run: str | None, after: int = 0) -> bool:
        """Whether the claim of this number could be made; of several runs one succeeds."""
        folder = self._claims(candidate)
        mine = folder / f".{uuid.uuid4().hex}"
        write_json(mine, {"run": run, "after": after, "time": time.time()})
        try:
            os.link(mine, folder / f"{number}.json")
        except FileExistsError:
            return False
        finally:
            mine.unlink()
        return True

    def give_back(self, candidates: Collection[Candidate]) -> None:
        """Let others measure what this run has claimed and cannot submit: a claim of nobody follows."""
        for candidate in candidates:
            with contextlib.suppress(PermissionError):
                claim = self._newest(candidate)
                if claim.run is not None and claim.run.path == self._run.path:
                    self._make_claim(candidate, claim.number + 1, None)

    def _are_in_progress(self, candidates: list[Candidate]) -> bool:
        """Whether others measure all of the candidates; each of those runs is looked at once."""
        claims: dict[RunFolder | None, list[tuple[_Claim, Candidate]]] = {}
        for candidate in candidates:
            claim = self._newest(candidate)
            claims.setdefault(claim.run, []).append((claim, candidate))
        return all(run is not None and self._is_measuring(run, claimed) for run, claimed in claims.items())

    def _is_measuring(self, claimant: RunFolder, claimed: list[tuple[_Claim, Candidate]]) -> bool:
        """Whether a run is, or will be, at work on all that it has claimed of some candidates."""
        state = self._state_of(claimant)
        last = [(claim, state.last(self._job_there(claimant, candidate))) for claim, candidate in claimed]
        if any(_end_since(claim, attempt) is not None for claim, attempt in last):
            return False
        if holder_of(claimant) is not None:
            return True
        # between two turns of a controller job that queued itself again, the jobs it made go on
        has_made = all(attempt is not None and attempt.number > claim.after for claim, attempt in last)
        return has_made and _controller_waits(claimant)

    def _state_of(self, other: RunFolder) -> State:
        """What another run's journal says, as far as it can be read; read again only when it has grown."""
        events = sum(1 for _ in other.journal.glob("[0-9]*.json"))
        if events != self._states.get(other, (None, None))[0]:
            try:
                self._states[other] = events, Journal(other.journal).state()
            except RecordError:
                return State()
        return self._states[other][1]

    def _has_result(self, claimant: RunFolder, candidate: Candidate) -> bool:
        """Whether there is a result to take over, by the next round."""
        if self._has(profile_job(candidate)):  # had it, and this run wants to try again
            return False
        last = self._state_of(claimant).last(self._job_there(claimant, candidate))
        return last is not None and last.verdict in _TELLING and (claimant, *last.key) not in self._unusable

    def _job_there(self, other: RunFolder, candidate: Candidate) -> str:
        """What another run calls the job that measures a point."""
        signature = self._signatures[candidate.node_type]
        same = [node_type for node_type, theirs in self._signatures_of(other).items() if theirs == signature]
        return profile_job(replace(candidate, node_type=same[0] if same else ""))

    def _signatures_of(self, other: RunFolder) -> dict[str, str]:
        """Type of node -> measurement signature of another run, whose plan stays; empty if it cannot be read."""
        if other not in self._plans:
            try:
                self._plans[other] = _signatures_in(read_json(other.plan))
            except (RecordError, KeyError, OSError):
                return {}
        return self._plans[other]

    def _has(self, job: str) -> bool:
        return any(attempt.verdict in _TELLING for attempt in self._journal.state().of(job))

    # --- results ------------------------------------------------------------------------------------------------------

    def _take_over(self, other: RunFolder) -> int:
        """Copy what another run has measured of this one's grid, and return how much that was."""
        theirs = set(self._signatures_of(other).values())
        try:
            if other.path == self._run.path or not theirs or not other.journal.exists():
                return 0
        except OSError:
            return 0
        running, taken = {a.job for a in self._journal.state().open}, 0
        wanted = {
            job: self._job_there(other, candidate)
            for job, candidate in self._grid.items()
            if self._signatures[candidate.node_type] in theirs and job not in running and not self._has(job)
        }
        found = [
            (job, attempt)
            for job, there in wanted.items()
            for attempt in self._state_of(other).of(there)
            if attempt.verdict in _TELLING and (other, *attempt.key) not in self._unusable
        ]
        for job, attempt in found:
            candidate, number = self._grid[job], len(self._journal.state().of(job)) + 1
            try:
                self._copy(
                    other.attempt(attempt.job, attempt.number), self._run.attempt(job, number), attempt, candidate
                )
            except (OSError, RecordError) as error:  # torn, or somebody is clearing that folder away
                self._display.say(f"{attempt.job} is not taken over from {other.path}: {error}")
                self._unusable.add((other, *attempt.key))
                continue
            # a tag of its own: by the other's this run would find, and might cancel, the other's job
            tag = f"taken-{uuid.uuid4().hex[:6]}"
            sizes = candidate.batch_per_rank, candidate.num_nodes
            mine = Attempt(job, number, tag, *sizes, node_type=candidate.node_type)
            with self._journal.together():
                self._journal.intend(mine)
                self._journal.concluded(mine, attempt.verdict or Verdict.success, f"measured in {other.path.name}")
            taken += 1
        if taken:
            self._display.say(f"{count(taken, 'measurement')} taken over from {other.path}")
        return taken

    def _copy(self, source: AttemptFolder, target: AttemptFolder, attempt: Attempt, candidate: Candidate) -> None:
        """Put another run's record in its place among this one's, when it is there as a whole.

        Raises:
            RecordError: If it is not what its run's journal says of it.
        """
        target.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.path.parent, prefix=".taking-") as folder:
            copy = AttemptFolder(Path(folder) / target.path.name)
            shutil.copytree(source.path, copy.path)
            if target.number != source.number:  # a record says which attempt it is of
                for path in copy.path.glob("rank-*.json"):
                    write_json(path, {**read_json(path), "attempt": target.number})
            if attempt.verdict is Verdict.success:
                read_point(copy, candidate)
            if target.path.exists():  # not in the journal, so left by a crash
                shutil.rmtree(target.path)
            copy.path.rename(target.path)


def _end_since(claim: _Claim, last: Attempt | None) -> Verdict | None:
    """How the run's newest attempt has ended; None if it has not, or was made before the claim."""
    return None if last is None or last.number <= claim.after else last.verdict


def _controller_waits(run: RunFolder) -> bool:
    """Whether a controller job is there for a run that nobody works on at this moment."""
    job_id = away.submitted_controller(run)
    return job_id is not None and not run.cancelled.exists() and not away.has_ended(job_id)


def _signatures(settings: Settings) -> dict[str, str]:
    """Type of node -> measurement signature; the name is empty where the run has no types."""
    return {node_type: measurement_signature(settings.of_type(node_type)) for node_type in settings.node_types}


def signatures_record(settings: Settings) -> dict[str, Any]:
    """What plan.json says of them."""
    found = _signatures(settings)
    return {"measurement_signatures": found} if settings.cluster.node_types else {"measurement_signature": found[""]}


def _signatures_in(plan: dict[str, Any]) -> dict[str, str]:
    """What another run's plan.json says of them."""
    return plan["measurement_signatures"] if "measurement_signatures" in plan else {"": plan["measurement_signature"]}
