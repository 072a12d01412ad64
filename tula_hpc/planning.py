"""What a run would submit, what it would cost, and what the queue says; submits nothing."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tula_hpc.candidates import Candidate, nodes_of
from tula_hpc.config import PricingKind, ProfilingKind, Settings
from tula_hpc.control.packing import Submission
from tula_hpc.display import Display, count, duration
from tula_hpc.models.search import POINTS_A_ROUND, SearchMode, next_round
from tula_hpc.runs import RunFolder
from tula_hpc.starting import folder_of, refuse_what_cannot_work, scheduler_of, settled


def plan(settings: Settings, command: list[str], display: Display) -> None:
    """Candidates, jobs, node-hours and cost of the first round of profiling, and the text sbatch would get."""
    from tula_hpc.control.controller import Controller, profiling_requests
    from tula_hpc.control.slurm import SlurmScheduler
    from tula_hpc.prices import in_words, prices_of

    settings = settled(settings, display)
    refuse_what_cannot_work(settings)
    run = folder_of(settings)
    scheduler = scheduler_of(settings, run)
    with _scratch_journal(run) as scratch:
        controller = Controller(settings, scratch, scheduler, display, command)
        requests = profiling_requests(controller)
    grid = settings.grid_candidates()
    wanted = [candidate for _, submission in requests for candidate in submission.candidates]
    display.say(f"{len(grid)} candidates: {', '.join(c.name for c in grid)}")
    first = " at first" if settings.search.mode is SearchMode.adaptive else ""
    display.say(
        f"search={settings.search.mode.name} profiles {len(wanted)} of them{first} in {len(requests)} submissions:"
    )
    prices, currency = prices_of(settings), settings.pricing.currency
    about = atmost = cost = 0.0
    for request, submission in requests:
        names = ", ".join(c.name for c in submission.candidates)
        at_once = 1 if scheduler.one_host else request.max_running
        how = "one after the other in one job" if submission.one_after_another else f"up to {at_once} at once"
        where = nodes_of(request.num_nodes, request.node_type)
        display.say(f"  {where} x {request.ranks_per_node} ranks: {names} ({how})")
        hours = submission.node_hours(settings)
        about += hours
        cost += float(prices[request.node_type].cost(3600 * hours, 1, request.ranks_per_node, math.nan))
        atmost += submission.num_jobs * request.num_nodes * (submission.time_limit_min or 0) / 60
    known = "; its price depends on the memory it will show" if math.isnan(cost) else f", {currency}{cost:.2f}"
    if settings.pricing.kind is PricingKind.service_units and settings.cluster.exclusive_profiling:
        known += " and what else is charged for whole nodes"
    display.say(
        f"profiling takes{first} up to about {about:.2f} node-hours{known}; the time limits allow {atmost:.1f} at most"
    )
    if settings.search.verify_choice and len(wanted) < len(grid):
        display.say("a choice that is none of these is measured, too, before the training: a job more for each try")
    for line in searches_compared(
        settings, grid, lambda candidates: controller.submissions(settings.profiling.kind, candidates)
    ):
        display.say(line)
    if not scheduler.one_host:
        for line in sharing_compared(settings, {kind: controller.submissions(kind, wanted) for kind in ProfilingKind}):
            display.say(line)
    limits = [
        f" objective.{key}={value:g}"
        for key in ("deadline_h", "budget", "max_nodes")
        if (value := getattr(settings.objective, key)) is not None
    ]
    display.say(
        f"objective={settings.objective.kind.name}{''.join(limits)}, price: {currency}{in_words(prices, currency)}"
    )
    display.say(f"the run folder would be {run.path}")
    if isinstance(scheduler, SlurmScheduler):
        for request, _ in requests:
            where = nodes_of(request.num_nodes, request.node_type)
            display.say(f"\n--- sbatch gets, for {where}:\n{scheduler.batch_text(request)}")
            trial = scheduler.try_out(request)
            display.say(f"--- sbatch --test-only: {trial_words(trial.answered, trial.refused, trial.wait_s)}")
    display.say("nothing was submitted")


@contextmanager
def _scratch_journal(run: RunFolder) -> Iterator[RunFolder]:
    """A run folder of the same name that goes away again: planning leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="tula-plan-") as folder:
        yield RunFolder(Path(folder) / run.path.name)


def trial_words(answered: bool, refused: str | None, wait_s: float | None) -> str:
    """What the scheduler says of a request, and when it would start. The start is a guess: Slurm counts with the time
    limits of the jobs before, and knows nothing of those that come later with a higher priority."""
    if refused is not None:
        return refused
    if not answered:
        return "no answer"
    if wait_s is None:
        return "accepted, without an estimate of the start"
    when = "at once" if wait_s < 60 else f"in about {duration(wait_s)}"
    return f"accepted. Slurm's estimate, a hint: would start {when}"


def searches_compared(
    settings: Settings, grid: list[Candidate], submissions_of: Callable[[list[Candidate]], list[Submission]]
) -> list[str]:
    """A line for each search: its points and jobs, what they would use, and that as a share of full search.

    Args:
        settings: Of the run.
        grid: All candidates.
        submissions_of: How this run would submit candidates.
    """

    def node_hours(candidates: list[Candidate]) -> float:
        return sum(s.node_hours(settings) for s in submissions_of(candidates))

    whole_h = node_hours(grid)
    lines = ["searches (what does not fit in memory is replaced by smaller batches, which come on top):"]
    for mode in SearchMode:
        wanted = next_round(mode, grid, set(), set()).candidates
        jobs = sum(s.num_jobs for s in submissions_of(wanted))
        hours = node_hours(wanted)
        mark = " (this plan)" if mode is settings.search.mode else ""
        line = f"  {mode.name}{mark}: {count(len(wanted), 'point')} in {count(jobs, 'job')}"
        line += f"{' at first' if mode is SearchMode.adaptive else ''}, up to about {hours:.2f} node-hours"
        if mode is not SearchMode.full:
            line += f", {hours / whole_h:.0%} of full"
        if mode is SearchMode.adaptive:
            line += f"; then up to {POINTS_A_ROUND} points a round until the choice is certain{_bounds(settings)}"
        lines.append(line)
    return lines


def _bounds(settings: Settings) -> str:
    search = settings.search
    budgets = {"points": search.max_points, "node-hours": search.max_node_hours, "minutes": search.max_minutes}
    given = [f"{value:g} {unit}" for unit, value in budgets.items() if value is not None]
    return f", at most {' and '.join(given)}" if given else ", at most what full search takes"


def sharing_compared(settings: Settings, kinds: Mapping[ProfilingKind, list[Submission]]) -> list[str]:
    """A line for each way to share jobs: how many there would be, what they would use, and the longest of them."""
    lines = ["jobs can share allocations, each of which waits in the queue once (group profiling):"]
    for kind, submissions in kinds.items():
        longest = max(submissions, key=lambda s: (s.expected_s(settings), s.num_nodes))
        mark = " (this plan)" if kind is settings.profiling.kind else ""
        lines.append(
            f"  {kind.name}{mark}: {count(sum(s.num_jobs for s in submissions), 'job')}, up to about "
            f"{sum(s.node_hours(settings) for s in submissions):.2f} node-hours, the longest holds "
            f"{count(longest.num_nodes, 'node')} for up to about {duration(longest.expected_s(settings))}"
        )
    return lines
