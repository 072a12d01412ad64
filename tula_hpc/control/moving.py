"""The training's way to another configuration: measured beside it first, then saved, ended and gone on with there.

What it would move to is written down as a move, measured by a profiling job of its own while the training goes on, and
compared again with what that told: `replanning` does so, and comes back here with whatever it then offers. What was
measured, did not fit, or could not be measured counts until the steps change again, so that nothing is tried twice.

Where the measurement finds no room within `PATIENCE_S`, two cases differ. A move to no more nodes than the training
itself holds is made as predicted, and that is said: its own nodes become free for it, and where the training fills all
that its user may have, no measurement would ever start beside it. A move to more nodes is left: it would wait as long.

The state is the journal's: moves, and the attempts at measuring them. A controller that is killed at any moment leaves
to the next one either no move, which is offered again, or a move whose measurement is on record, wanted, or to be made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from tula_hpc.candidates import Candidate
from tula_hpc.config import ReplanKind, Settings
from tula_hpc.control.choosing import fit_of
from tula_hpc.control.jobs import PROBE, TRAIN, Jobs, Look, probe_job
from tula_hpc.control.journal import Attempt, Journal, Move, Successor
from tula_hpc.control.next_steps import RETRIES_IN_PROFILING
from tula_hpc.control.packing import Submission
from tula_hpc.control.probe import MOST_PROBES
from tula_hpc.control.verdicts import QueueState, Verdict
from tula_hpc.display import count_nodes, duration, nodes_and_batch
from tula_hpc.errors import RecordError, SubmissionRejected
from tula_hpc.models.memory import MemoryFit, usable_gib
from tula_hpc.models.replan import Offer
from tula_hpc.runs import RunFolder, read_json

PATIENCE_S = 300.0
"""How long a measurement may wait in the queue beside the training."""
MAX_REPLANS = 2
"""How often `training.replan=auto` moves one training: a cluster whose state changes more often is not worth following,
since every move waits in the queue. Between two moves lie at least the windows that a new drift takes."""
MOVED_ENOUGH = f"training.replan=auto has moved it {MAX_REPLANS} times"


class _Outcome(Enum):
    """What came of measuring a move."""

    measured = auto()
    too_large = auto()
    no_room = auto()
    failed = auto()


@dataclass(frozen=True)
class Probed:
    """What measurements beside the training have told since its steps changed."""

    points: list[dict[str, Any]] = field(default_factory=list)
    """As `read_point` gives them."""
    why_not: dict[Candidate, str] = field(default_factory=dict)
    """What is not to be offered, and why."""


@dataclass
class Moving:
    """The moves of one run's training."""

    settings: Settings
    run: RunFolder
    journal: Journal
    jobs: Jobs
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._told: set[tuple[str, int]] = set()

    def look(self, looks: list[Look]) -> bool:
        """See to what is measured beside the training.

        Returns:
            Whether it has come to an end, which was told: then what is offered is to be compared again.
        """
        move = self._open_move()
        probes = [] if move is None else self._probes(move)
        stray = [a for a in self.journal.state().open if a.is_probe and a.ending is None and a not in probes]
        if stray:
            self.jobs.end(stray, Verdict.skipped, "the training does not wait for it any more")
        if move is None:
            return False
        if not probes or self._is_to_run_again(probes[-1]):
            self._measure(move)
            return False
        probe = probes[-1]
        if probe.verdict is None:
            self._end_if_there_is_no_room(probe, looks)
        if probe.verdict is None or probe.key in self._told:
            return False
        self._told.add(probe.key)
        self.say(self._words(move, probe))
        return True

    def is_measuring(self) -> bool:
        """Whether a move waits for its measurement."""
        move = self._open_move()
        return move is not None and self._outcome(move) is None

    def may_move(self) -> bool:
        """Whether the training has not been moved as often as it may."""
        return sum(a.successor is not None for a in self.journal.state().of(TRAIN)) < MAX_REPLANS

    def to(self, attempt: Attempt, offer: Offer, why: str) -> None:
        """Have the training save and go on as offered, once that is measured; measure it if nobody has.

        Args:
            attempt: What runs.
            offer: Where it would go on, by all that is known.
            why: What of the steps led to it.
        """
        there, state = offer.candidate, self.journal.state()
        if not self.may_move():
            return
        as_predicted = self._why_as_predicted(attempt, there)
        if as_predicted is not None or self._has(there, _Outcome.measured):
            unmeasured = f", as predicted: it was not measured, {as_predicted}" if as_predicted else ""
            self.say(f"the training saves and goes on with {nodes_and_batch(there)}{unmeasured}")
            successor = Successor(there.num_nodes, there.batch_per_rank, offer.train_time_s)
            self.jobs.replan(attempt, successor, f"{why}; it goes on with {nodes_and_batch(there)}{unmeasured}")
        elif len(state.moves) >= MOST_PROBES:
            self.say(f"the training stays where it is: {MOST_PROBES} configurations were tried beside it by now")
        else:
            self.say(f"measuring {nodes_and_batch(there)} beside the training before it moves (search.verify_choice)")
            first = len(state.of(probe_job(there))) + 1
            move = Move(attempt.number, there.num_nodes, there.batch_per_rank, offer.step_time_s, first)
            self.journal.moving(move)
            self._measure(move)

    def leave_out(self, attempt: Attempt, host: str, train_time_s: float, why: str) -> None:
        """Have the training save and go on as it is, but without a slow host: nothing of it is to be measured.

        Args:
            attempt: What runs.
            host: The run does not use it again.
            train_time_s: Of the steps that are left, elsewhere.
            why: What of the steps led to it.
        """
        if self.may_move():
            self.say(f"the training saves and goes on without {host}")
            successor = Successor(attempt.num_nodes, attempt.batch_per_rank, train_time_s, host)
            self.jobs.replan(attempt, successor, f"{why}; it goes on without {host}")

    def probed(self, attempt: Attempt) -> Probed:
        """What is known beyond the profiled points since the steps changed.

        Args:
            attempt: What runs.
        """
        found = Probed()
        for move in self.journal.state().moves:
            there, outcome = self._candidate(move), self._outcome(move)
            if outcome is _Outcome.measured:
                found.points.append(self.jobs.point(self._probes(move)[-1]))
            elif outcome is _Outcome.too_large:
                found.why_not.update(dict.fromkeys(self._at_least(there), "did not fit beside the training"))
            elif outcome is _Outcome.failed:
                found.why_not[there] = "could not be measured beside the training"
            elif outcome is _Outcome.no_room and move.attempt == attempt.number and not _gives_back(attempt, there):
                as_large = [c for c in self.settings.grid_candidates() if c.num_nodes >= there.num_nodes]
                found.why_not.update(dict.fromkeys(as_large, "so many nodes were not free beside the training"))
        return found

    # --- moves --------------------------------------------------------------------------------------------------------

    def _open_move(self) -> Move | None:
        """What the running training would move to, as far as anybody wants it to."""
        state = self.journal.state()
        attempt, move = state.last(TRAIN), state.moves[-1] if state.moves else None
        if attempt is None or move is None or self.settings.training.replan is not ReplanKind.auto:
            return None
        runs = attempt.verdict is attempt.ending is None
        return move if runs and move.attempt == attempt.number else None

    def _training(self, move: Move) -> Attempt:
        return self.journal.state().of(TRAIN)[move.attempt - 1]

    def _candidate(self, move: Move) -> Candidate:
        running = self.jobs.candidate(self._training(move))
        return Candidate(move.num_nodes, move.batch_per_rank, running.gpus_per_node, running.node_type)

    def _probes(self, move: Move) -> list[Attempt]:
        """The attempts at measuring it, oldest first."""
        following = (m.probe for m in self.journal.state().moves if self._candidate(m) == self._candidate(move))
        end = min((first for first in following if first > move.probe), default=None)
        attempts = self.journal.state().of(probe_job(self._candidate(move)))
        return [a for a in attempts if a.number >= move.probe and (end is None or a.number < end)]

    def _outcome(self, move: Move) -> _Outcome | None:
        """What came of it; None where nothing has, yet or because nobody wanted it any more."""
        probes = self._probes(move)
        if not probes or probes[-1].verdict is None or self._is_to_run_again(probes[-1]):
            return None
        probe = probes[-1]
        if probe.verdict is Verdict.success:
            try:
                return _Outcome.measured if self._fits(probe) else _Outcome.too_large
            except RecordError:  # somebody has cleared it away since
                return _Outcome.failed
        if probe.verdict in self.jobs.too_large(probe.node_type):
            return _Outcome.too_large
        if probe.verdict is Verdict.skipped and probe.ending is Verdict.skipped:
            return None
        # the controller ended it while it waited, or the queue held as many jobs as it may
        no_room = probe.ending is Verdict.never_started or probe.verdict is Verdict.skipped
        return _Outcome.no_room if no_room else _Outcome.failed

    def _outcomes(self, candidate: Candidate) -> Iterator[tuple[Move, _Outcome]]:
        for move in self.journal.state().moves:
            outcome = self._outcome(move)
            if outcome is not None and self._candidate(move) == candidate:
                yield move, outcome

    def _has(self, candidate: Candidate, wanted: _Outcome) -> bool:
        return any(outcome is wanted for _, outcome in self._outcomes(candidate))

    def _why_as_predicted(self, attempt: Attempt, there: Candidate) -> str | None:
        """Why a move is made without a measurement; None if it is not."""
        if not self.settings.search.verify_choice:
            return "as search.verify_choice=false asks"
        if not self.jobs.run_beside_each_other:
            return "this machine runs one job at a time"
        here = [outcome for move, outcome in self._outcomes(there) if move.attempt == attempt.number]
        if _Outcome.no_room in here and _gives_back(attempt, there):
            return "nothing was free for that beside the training"
        return None

    def _fits(self, probe: Attempt) -> bool:
        point, there = self.jobs.point(probe), self.jobs.candidate(probe)
        fit = fit_of(read_json(self.run.fit), there.node_type)
        constant_gib = MemoryFit.from_dict(fit["memory"]).constant_gib(alone=there.world_size == 1)
        limit_gib = math.inf if point["limit_gib"] is None else point["limit_gib"]
        usable = usable_gib(limit_gib, fit["memory_fraction"], constant_gib)
        return point["allocator_retries"] == 0 and point["memory_gib"] <= usable

    def _at_least(self, there: Candidate) -> list[Candidate]:
        """What needs as much memory on the same nodes, or more."""
        same = (there.node_type, there.num_nodes)
        grid = [c for c in self.settings.grid_candidates() if (c.node_type, c.num_nodes) == same]
        return [c for c in grid if c.batch_per_rank >= there.batch_per_rank]

    # --- measurements -------------------------------------------------------------------------------------------------

    def _measure(self, move: Move) -> None:
        """Submit an attempt at it; why one is refused is the attempt's reason."""
        limit_min = self.settings.cluster.profile_time_limit_min
        memory_gib = self.jobs.allowed_gib(self._training(move))
        try:
            self.jobs.submit(PROBE, Submission([self._candidate(move)], limit_min, memory_gib=memory_gib))
        except SubmissionRejected:
            return

    def _is_to_run_again(self, probe: Attempt) -> bool:
        """Whether its end says nothing of the configuration, and it may be tried once more."""
        if probe.verdict is None or probe.verdict not in RETRIES_IN_PROFILING or probe.verdict is Verdict.host_oom:
            return False
        times = self.journal.state().endings(probe.job, probe.verdict)
        return probe.ending is not Verdict.never_started and times <= RETRIES_IN_PROFILING[probe.verdict]

    def _end_if_there_is_no_room(self, probe: Attempt, looks: list[Look]) -> None:
        waits = any(look.attempt.key == probe.key and look.seen.state is QueueState.pending for look in looks)
        since = self.run.attempt(probe.job, probe.number).request.stat().st_mtime
        if waits and probe.ending is None and time.time() - since > PATIENCE_S:
            self.jobs.end([probe], Verdict.never_started, f"it waited in the queue for {duration(PATIENCE_S)}")

    def _words(self, move: Move, probe: Attempt) -> str:
        there, outcome = nodes_and_batch(self._candidate(move)), self._outcome(move)
        if probe.verdict is Verdict.success and outcome is not _Outcome.failed:
            point = self.jobs.point(probe)
            seconds, off = point["step_time_s"], point["step_time_s"] / move.step_time_s - 1
            memory = f"{point['memory_gib']:.2f} GiB of a rank's memory"
            too_much = "" if outcome is _Outcome.measured else ", which is too much"
            return (
                f"{there}: a step takes {duration(seconds)}, {off:+.0%} against the prediction, and {memory}{too_much}"
            )
        if outcome is _Outcome.no_room:
            training = self._training(move)
            left = "" if _gives_back(training, self._candidate(move)) else "; a training on so many would wait as long"
            return f"{there} could not be measured beside the training on {count_nodes(training)}: {probe.reason}{left}"
        verdict = (probe.verdict or Verdict.failed).value.replace("_", " ")
        return f"{there} could not be measured beside the training: {verdict}: {probe.reason}"


def _gives_back(attempt: Attempt, there: Candidate) -> bool:
    """Whether the training leaves as many nodes as it would need."""
    return there.num_nodes <= attempt.num_nodes
