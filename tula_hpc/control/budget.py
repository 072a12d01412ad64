"""What an adaptive search may spend: points, node-hours and minutes, counted from the journal."""

from __future__ import annotations

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings, expected_attempt_s
from tula_hpc.control.jobs import profile_job
from tula_hpc.control.journal import Attempt, State
from tula_hpc.control.packing import node_hours
from tula_hpc.control.verdicts import Verdict
from tula_hpc.display import count
from tula_hpc.models.search import Round, first_points

_COST_NOTHING = (Verdict.skipped, Verdict.never_started)


def within_budget(settings: Settings, state: State, wanted: Round, minutes: float) -> Round:
    """The part of a round that the budgets allow; an empty one that names the budget where none of it is left.

    Args:
        settings: Of the run.
        state: Of its journal.
        wanted: What the search asks for.
        minutes: Since the run began.
    """
    search, own = settings.search, _own(state)
    if not own and set(wanted.candidates) <= first_points(settings.grid_candidates()):
        return wanted  # these are in every budget that `check` lets pass
    if search.max_minutes is not None and minutes >= search.max_minutes:
        return _spent("max_minutes", f"{minutes:.0f} min have passed", search.max_minutes)
    tried = {a.job for a in own}
    used = sum(_held_nodes(a, own) for a in own) * expected_attempt_s(settings) / 3600
    allowed: list[Candidate] = []
    for candidate in wanted.candidates:
        points = len(tried | {profile_job(c) for c in [*allowed, candidate]})
        if search.max_points is not None and points > search.max_points:
            ended = _spent("max_points", f"{count(len(tried), 'candidate')} were tried", search.max_points)
            break
        hours = used + node_hours(settings, [*allowed, candidate])
        if search.max_node_hours is not None and hours > search.max_node_hours:
            words = f"up to about {used:.2f} node-hours were used, and {candidate.name} would make them {hours:.2f}"
            ended = _spent("max_node_hours", words, search.max_node_hours)
            break
        allowed.append(candidate)
    else:
        return wanted
    return Round(allowed, why=wanted.why) if allowed else ended


def _own(state: State) -> list[Attempt]:
    """The attempts at profiling whose cost is this run's, whether they measured anything or not."""
    attempts = [a for a in state.attempts.values() if a.is_profiling and a.verdict not in _COST_NOTHING]
    return [a for a in attempts if not a.tag.startswith("taken-")]


def _held_nodes(attempt: Attempt, own: list[Attempt]) -> int:
    """Nodes of the job that measured it, which may be more than it used."""
    shared = attempt.one_after_another
    return max(a.num_nodes for a in own if a.tag == attempt.tag) if shared else attempt.num_nodes


def _spent(name: str, words: str, limit: float) -> Round:
    return Round(ended_by=name, why=f"the budget is spent: {words}, and search.{name} is {limit:g}")
