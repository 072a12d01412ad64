"""The order of the stages: profile, fit, choose, train, report. A stage whose file exists is not repeated."""

from __future__ import annotations

import functools
import math
import os
import shlex
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tula_hpc import methods
from tula_hpc.candidates import Candidate
from tula_hpc.config import (
    ObjectiveKind,
    ProfilingKind,
    Settings,
    Until,
    write_settings,
)
from tula_hpc.control.budget import within_budget
from tula_hpc.control.choosing import adaptive_round, fitted, limited, predicted, rows_of
from tula_hpc.control.jobs import TRAIN, Jobs, Look, profile_job
from tula_hpc.control.journal import Attempt, Journal, State
from tula_hpc.control.next_steps import NextSteps, if_cancelled
from tula_hpc.control.packing import Submission, submissions
from tula_hpc.control.probe import MOST_PROBES, Probe
from tula_hpc.control.replanning import Replanning
from tula_hpc.control.scheduler import JobRequest, Scheduler
from tula_hpc.control.sharing import SharedPoints, signatures_record
from tula_hpc.control.verdicts import Verdict
from tula_hpc.display import Display, count, count_nodes
from tula_hpc.errors import SubmissionLimited, SubmissionRejected, TulaError
from tula_hpc.models.pricing import Price
from tula_hpc.models.queue_wait import Wait, given_waits
from tula_hpc.models.search import Round, SearchMode, next_round
from tula_hpc.models.selection import Selection, select
from tula_hpc.prices import in_words, prices_of
from tula_hpc.runs import RunFolder, read_json, software_versions, write_json, write_text
from tula_hpc.signatures import own_code


@dataclass
class Controller:
    """One run of the whole loop."""

    settings: Settings
    run: RunFolder
    scheduler: Scheduler
    display: Display
    command: list[str]
    """The command line that reproduces the run."""
    heartbeat: Callable[[], None] = lambda: None
    """Called whenever the controller looks at its jobs; says that it is alive."""

    def __post_init__(self) -> None:
        self.journal = Journal(self.run.journal)
        self.jobs = Jobs(self.settings, self.run, self.journal, self.scheduler, self.heartbeat)
        self.next_steps = NextSteps(self.settings, self.journal, self.jobs, self.display.say)
        self.replanning = Replanning(
            self.settings, self.run, self.journal, self.jobs, self.display.say, self._queue_waits
        )
        self._refused: dict[Candidate, str] = {}
        self._told_why = ""
        self.shared = SharedPoints(self.settings, self.run, self.journal, self.display, self.heartbeat)

    def go(self) -> None:
        """Every stage that is not done yet.

        Raises:
            TulaError: If nothing could be measured, nothing is feasible, or the training cannot be brought to an end.
        """
        self.write_down_the_run()
        if not self.run.fit.exists():
            self._fit(self._profile())
        if not self.run.selection.exists():
            self._choose()
        self.display.choice(self.run)
        self._say_what_the_method_does()
        if self.settings.until is Until.choice:
            write_text(self.run.untrained, "")
            self._report()
            self.display.untrained(self.run)
            return
        if not self.run.train_result.exists() or self.journal.state().open:  # it may have ended while nobody watched
            self._train()
        self._report()
        self.display.result(self.run)

    def write_down_the_run(self) -> None:
        """Put down who works on which run, with which settings; the first command's plan stays."""
        self.run.create()
        if self.settings.until is Until.result:
            self.run.untrained.unlink(missing_ok=True)
        if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":  # else Slurm started this controller again, not a user
            self.journal.started(socket.gethostname(), shlex.join(self.command))
        # what `attach` and a controller job go on with: the settings as they were given last
        write_settings(self.run, self.settings)
        if not self.run.plan.exists():
            write_json(
                self.run.plan,
                {
                    "candidates": [c.name for c in self.settings.grid_candidates()],
                    "search": self.settings.search.mode.name,
                    **signatures_record(self.settings),
                    "command": self.command,
                    "working_dir": os.getcwd(),
                    "own_code": own_code(self.settings),
                    "runs_on": self.scheduler.name,
                    "software": software_versions(),
                    "started": time.time(),
                },
            )

    # --- profiling ------------------------------------------------------------------------------------------------

    def _profile(self, only: Candidate | None = None) -> dict[str, Any]:
        """Measure what the search asks for, round by round; a round may depend on what did not fit in the last.

        Args:
            only: Measure this candidate, whatever the search would ask for.

        Returns:
            How the search ended, for the record.
        """
        for why in self.jobs.distrust_damaged():
            self.display.say(f"to be measured again: {why}")
        self.shared.take_over_all()
        grid = self.settings.grid_candidates()
        began, done_before = time.monotonic(), len(self._measured())
        told = {key for key, a in self.journal.state().attempts.items() if a.verdict is not None}
        while True:
            measured, running = self._measured(), self.journal.state().open
            now = self._next_round(grid, measured) if only is None else self._round_of(only)
            wanted = now.candidates
            if not wanted and not running:
                break
            self._tell_round(now)
            wanted, elsewhere = self.shared.divide(wanted)
            all_submitted = self._submit_profiling(wanted)
            total = len(measured) + len(wanted) + len(running)

            def on_look(looks: list[Look], total: int = total) -> None:
                self._drop_larger_batches(looks)
                done = total - sum(look.verdict is None for look in looks)
                elapsed = time.monotonic() - began
                rate = (done - done_before) / elapsed if done > done_before else 0.0
                self.display.jobs("profiling", looks, done, total, (total - done) / rate if rate else None)

            self.jobs.wait(on_look, self.display.silence)
            if all_submitted:  # else another run may wait for what this one has claimed and not submitted
                self.shared.wait_for(elsewhere)
            for attempt in self.journal.state().attempts.values():
                if attempt.key not in told and attempt.verdict not in (Verdict.success, Verdict.skipped):
                    self._tell_end(attempt)
            told |= set(self.journal.state().attempts)
        if not self._measured():
            reasons = "\n".join(
                f"  {c.name}: {why}" for c, why in {**self._infeasible_because(), **self._failed_because()}.items()
            )
            raise TulaError(
                f"no candidate could be measured, so there is nothing to choose from:\n{reasons}\n"
                f"The logs are in {self.run.profile} and {self.run.scheduler}; run the command again when it is mended."
            )
        self._tell_round(now)
        return {"ended_by": now.ended_by, "why": now.why}

    def _next_round(self, grid: list[Candidate], measured: set[Candidate]) -> Round:
        """What the search asks for now; the budgets of adaptive search are kept here."""

        def decide(unmeasured: set[Candidate]) -> Round:
            fit = self._fitted()
            return adaptive_round(self.settings, fit, self._table(fit), unmeasured)

        lost = self.next_steps.given_up() | set(self._refused)
        now = next_round(self.settings.search.mode, grid, measured, self._infeasible(), lost, self._running(), decide)
        if self.settings.search.mode is not SearchMode.adaptive or not now.candidates:
            return now
        minutes = (time.time() - read_json(self.run.plan)["started"]) / 60
        return within_budget(self.settings, self.journal.state(), now, minutes)

    def _round_of(self, only: Candidate) -> Round:
        """A round of one candidate, unless it is measured, cannot be, or runs."""
        lost = self.next_steps.given_up() | set(self._refused)
        settled = self._measured() | self._infeasible() | lost | self._running()
        return Round([] if only in settled else [only])

    def _tell_round(self, now: Round) -> None:
        """Say once why these points come next, or why no others do."""
        if now.why and now.why != self._told_why and (now.candidates or now.ended_by):
            self._told_why = now.why
            names = ", ".join(c.name for c in now.candidates)
            self.display.explain(f"next: {names}: {now.why}" if names else f"the search is done: {now.why}")

    def submissions(self, kind: ProfilingKind, candidates: list[Candidate]) -> list[Submission]:
        """What measures the candidates on this run's scheduler."""
        if self.scheduler.one_host or kind is ProfilingKind.array:  # no queue on one host, so nothing to share
            return submissions(self.settings, ProfilingKind.array, candidates)
        return submissions(self.settings, kind, candidates, self.scheduler.longest_job_min)

    def _submit_profiling(self, wanted: list[Candidate]) -> bool:
        """Submit the candidates; where the scheduler takes only some of them now, the others come in a later round.

        Returns:
            Whether all were submitted.

        Raises:
            SubmissionRejected: If nothing is measured or running and the scheduler refuses what is to be submitted.
        """
        whole = self.submissions(self.settings.profiling.kind, wanted)
        parts = self._acceptable([part for submission in whole for part in self.next_steps.by_memory(submission)])
        for part in parts:
            while (limit := self.jobs.submit("profile", part)) is not None:
                self.display.waiting("profiling jobs", str(limit))
                if self.journal.state().open:
                    return False
                self._wait_for_room(limit)
        return True

    def _acceptable(self, parts: list[Submission]) -> list[Submission]:
        """The submissions that the scheduler would take. The candidates of the others are given up for this time if
        there is anything else to go on with."""
        reasons = {i: self.jobs.why_rejected("profile", part) for i, part in enumerate(parts)}
        refused = {i: reason for i, reason in reasons.items() if reason is not None}
        lines = [f"{count_nodes(parts[i])}{_memory_words(parts[i])}: {why}" for i, why in refused.items()]
        nothing_else = not self._measured() and not self.journal.state().open
        if refused and nothing_else:
            raise SubmissionRejected(
                f"{self.scheduler.name} would not accept the jobs, nothing was submitted:\n  " + "\n  ".join(lines)
            )
        for line in lines:
            self.display.say(f"{self.scheduler.name} would not accept a job, which is left out: {line}")
        for i, why in refused.items():
            left_out = self._candidates_like(parts[i])
            self._refused |= dict.fromkeys(left_out, f"{self.scheduler.name} would not accept its job: {why}")
            self.shared.give_back(set(parts[i].candidates))
        return [part for i, part in enumerate(parts) if i not in refused]

    def _candidates_like(self, part: Submission) -> set[Candidate]:
        """Those whose jobs would be refused as this one is: its own, and all of its number of nodes unless it asks for
        more memory than they do."""
        own = set(part.candidates)
        if part.memory_gib is not None:
            return own
        size = part.node_type, part.num_nodes
        same_size = {c for c in self.settings.grid_candidates() if (c.node_type, c.num_nodes) == size}
        return own | (same_size - self._measured())

    def _wait_for_room(self, limit: SubmissionLimited) -> None:
        if not self.jobs.wait_for_room(limit):
            raise SubmissionRejected(f"{limit}\nNo job of yours is queued, so waiting would not help.")

    def _tell_end(self, attempt: Attempt) -> None:
        assert attempt.verdict is not None
        name = self.jobs.candidate(attempt).name
        self.display.say(f"{name}: {attempt.verdict.value.replace('_', ' ')}: {attempt.reason}")
        if attempt.verdict is Verdict.failed:
            for line in _last_lines(self.run.attempt(attempt.job, attempt.number).errors()):
                self.display.say(f"    {line}")
            logs = ["python", "-m", "tula_hpc", "logs", str(self.run.path), name]
            self.display.say(f"  all it printed: {shlex.join(logs)}")

    def _drop_larger_batches(self, looks: list[Look]) -> None:
        """What did not fit with one batch need not be tried with a larger one on the same nodes."""
        for look in looks:
            failed = look.attempt
            if look.verdict not in self.jobs.too_large(failed.node_type):
                continue
            larger = [
                a
                for a in self.journal.state().open
                if (a.node_type, a.num_nodes) == (failed.node_type, failed.num_nodes)
                if a.batch_per_rank > failed.batch_per_rank and a.ending is None
            ]
            if larger:
                why = f"batch {failed.batch_per_rank} a rank already ran out of memory"
                self.jobs.end(larger, Verdict.skipped, why)

    def _measured(self) -> set[Candidate]:
        return {self.jobs.candidate(a) for a in _profiled(self.journal.state(), {Verdict.success})}

    def _running(self) -> set[Candidate]:
        return {self.jobs.candidate(a) for a in self.journal.state().open if a.is_profiling}

    def _infeasible(self) -> set[Candidate]:
        return set(self._infeasible_because())

    def _infeasible_because(self) -> dict[Candidate, str]:
        """Candidates that did not fit in memory, and what was seen."""
        state = self.journal.state()
        found = {self.jobs.candidate(a): a.reason for a in self._too_large()}
        for attempt in _profiled(state, {Verdict.success}):
            if self.jobs.point(attempt)["allocator_retries"] > 0:
                found[self.jobs.candidate(attempt)] = "the allocator had to free and retry: it fits, but slowly"
        return found

    def _failed_because(self) -> dict[Candidate, str]:
        """Candidates that ended without a measurement for other reasons than memory: nobody knows whether they work."""
        state = self.journal.state()
        last = [state.last(profile_job(c)) for c in self.settings.grid_candidates()]
        skipped = {Verdict.success, Verdict.skipped, None}
        return self._refused | {
            self.jobs.candidate(a): f"{(a.verdict or Verdict.failed).value.replace('_', ' ')} when profiled: {a.reason}"
            for a in last
            if a is not None and a.verdict not in skipped | self.jobs.too_large(a.node_type)
        }

    def _told_of_failed(self) -> str:
        """What the reason of a choice adds where candidates failed: it was made among the others."""
        failed = self._failed_because()
        if not failed:
            return ""
        names = ", ".join(c.name for c in list(failed)[:3]) + (", ..." if len(failed) > 3 else "")
        return f" Left out, because profiling them failed: {count(len(failed), 'candidate')} ({names})."

    def _too_large(self) -> list[Attempt]:
        """Attempts at profiling whose batch did not fit in memory."""
        attempts = self.journal.state().attempts.values()
        return [a for a in attempts if a.is_profiling and a.verdict in self.jobs.too_large(a.node_type)]

    # --- models and choice ------------------------------------------------------------------------------------------

    def _fit(self, search: dict[str, Any]) -> None:
        """Write down the models, and how the search for their points ended."""
        write_json(self.run.fit, {**self._fitted(), "search": search})

    def _fit_again(self) -> None:
        """The same from what is on record by now, after the search."""
        self._fit(read_json(self.run.fit)["search"])

    def _fitted(self) -> dict[str, Any]:
        """Both step-time forms and the memory model from every measured point, with all that the choice depends on."""
        because = self._infeasible_because()
        attempts = _profiled(self.journal.state(), {Verdict.success})
        points = [self.jobs.point(attempt) for attempt in attempts]
        usable = [p for p, a in zip(points, attempts, strict=True) if self.jobs.candidate(a) not in because]
        if not usable:
            raise TulaError("every measured candidate needed allocator retries; lower grid.max_batch_per_rank")
        return {
            "points": points,
            **fitted(self.settings, usable, [self.jobs.candidate(a) for a in self._too_large()]),
            "infeasible": {c.name: why for c, why in because.items()},
            "failed": {c.name: why.splitlines()[0] for c, why in self._failed_because().items()},
        }

    @functools.cached_property
    def _prices(self) -> dict[str, Price]:
        """Of each type of node, the same for every table and the record; Slurm is asked once at most."""
        return prices_of(self.settings)

    def _table(self, fit: dict[str, Any]) -> pd.DataFrame:
        """Every candidate with all that is predicted, and with the wait in the queue where the objective needs it."""
        objective = self.settings.objective
        table = predicted(self.settings, fit, self._prices)
        if objective.kind is ObjectiveKind.time_to_result or objective.deadline_h is not None:
            waits = {each: self._queue_waits(rows_of(table, each)) for each in self.settings.node_types}
            table = predicted(self.settings, fit, self._prices, waits)
        return table

    def _choose(self) -> None:
        """Choose; where nobody has measured the choice, measure it, and choose again with what that told."""
        probe = Probe(self.run, self.display, self._measured, self._profile, self._fit_again)
        choice, table = self._best()
        for _ in range(MOST_PROBES if self.settings.search.verify_choice else 0):
            if not probe.teaches(choice):
                break
            choice, table = self._best()
        write_json(
            self.run.selection,
            {
                **choice.to_dict(),
                "reason": choice.reason + self._told_of_failed(),
                "measured": choice.candidate in self._measured(),
                "price": in_words(self._prices, self.settings.pricing.currency),
                "currency": self.settings.pricing.currency,
                "candidates": [_plain_row(row) for row in table.to_dict("records")],
            },
        )

    def _best(self) -> tuple[Selection, pd.DataFrame]:
        """The choice by the newest fit, and the table of candidates."""
        objective = self.settings.objective
        table = limited(self.settings, self._table(read_json(self.run.fit)))
        return select(table, objective.kind.name, objective.tie_tolerance, self.settings.pricing.currency), table

    def _queue_waits(self, table: pd.DataFrame) -> dict[int, Wait]:
        """How long a training would wait for each number of nodes of one type: by the user's numbers, else by the
        scheduler's estimate for the shortest such training, which asks for the least time and so waits least."""
        fastest = table.loc[table["feasible"]].sort_values("train_time_s").drop_duplicates("num_nodes")
        given = self.settings.objective.queue_wait_min
        if given:
            minutes = {int(nodes): float(wait_min) for nodes, wait_min in given.items()}
            return given_waits(minutes, [int(nodes) for nodes in fastest["num_nodes"]])
        waits = {}
        for row in fastest.to_dict("records"):
            candidate = Candidate.from_record(row)
            limit_min = self._train_time_limit_min(row["train_time_s"], candidate.node_type)
            request = self.jobs.request(TRAIN, [candidate], limit_min)
            seconds = self.scheduler.expected_wait_s(request)
            source = f"estimated by {self.scheduler.name} at the time of the choice"
            if self.scheduler.one_host:
                source = "this machine has no queue"
            waits[candidate.num_nodes] = Wait(seconds, source)
        return waits

    def _say_what_the_method_does(self) -> None:
        chosen = read_json(self.run.selection)
        ranks = chosen["num_nodes"] * chosen["gpus_per_node"]
        for note in methods.notes(self.settings, chosen["global_batch"], ranks):
            self.display.explain(note)

    # --- training -----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Train at the chosen configuration; go on from the checkpoint with a smaller batch when memory runs out."""
        chosen = read_json(self.run.selection)
        candidate = Candidate.from_record(chosen)
        time_limit_min = self._train_time_limit_min(chosen["predicted"]["train_time_s"], candidate.node_type)
        while True:
            last, memory_gib = self.journal.state().last(TRAIN), None
            samples_before = checkpoint_samples(self.run)
            if not self.journal.state().open:  # else it runs, or what was measured beside it
                if last is not None:
                    self.next_steps.refuse_to_repeat(last)
                    candidate, memory_gib = self.next_steps.after(last)
                    if last.verdict is Verdict.replanned and last.successor is not None:
                        time_limit_min = self._train_time_limit_min(last.successor.train_time_s, last.node_type)
                training = Submission([candidate], time_limit_min, memory_gib=memory_gib)
                while (limit := self.jobs.submit(TRAIN, training)) is not None:
                    self.display.waiting("the training", str(limit))
                    self._wait_for_room(limit)
            self.jobs.wait(self._watch_training, self.display.silence)
            last = self.journal.state().last(TRAIN)
            assert last is not None
            assert last.verdict is not None
            if last.verdict is Verdict.success:
                return
            batch, word = self.jobs.candidate(last).global_batch, last.verdict.value.replace("_", " ")
            self.display.say(f"training with batch {batch}: {word}: {last.reason}")
            if not self.next_steps.training_may_go_on(last, progressed=checkpoint_samples(self.run) > samples_before):
                raise TulaError(
                    f"the training did not end: {word}: {last.reason}\n"
                    f"Its folder is {self.run.attempt(TRAIN, last.number).path}. The same command goes on from the "
                    f"newest checkpoint{if_cancelled(last)}."
                )

    def _train_time_limit_min(self, train_time_s: float, node_type: str) -> int | None:
        """The user's limit, or half as long again as predicted; at most the partition's, since training resumes."""
        limit = self.settings.cluster.train_time_limit_min
        if limit is not None or self.scheduler.one_host:
            return limit
        wanted = math.ceil(train_time_s * 1.5 / 60) + 10
        return min(wanted, self.scheduler.longest_job_min(node_type) or wanted)

    def _watch_training(self, looks: list[Look]) -> None:
        progress = self.run.read_progress()
        self.replanning.look(progress, looks)
        drift = next((self.journal.state().drift_of(look.attempt) for look in looks), None)
        self.display.training(looks, progress, self.run.read_metrics()[-1:], drift["headline"] if drift else "")

    def _report(self) -> None:
        from tula_hpc.report import write_report

        write_report(self.run)


def profiling_requests(controller: Controller) -> list[tuple[JobRequest, Submission]]:
    """What the first round of profiling would submit if nothing was measured yet."""
    settings = controller.settings
    first = next_round(settings.search.mode, settings.grid_candidates(), set(), set()).candidates
    wanted = controller.submissions(settings.profiling.kind, first)
    return [(controller.jobs.request("profile", *submission), submission) for submission in wanted]


def checkpoint_samples(run: RunFolder) -> int:
    """Samples that the newest checkpoint has seen, by its name; 0 if there is none."""
    names = [path.stem.removeprefix("samples-") for path in run.checkpoints.glob("samples-*.pt")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def _last_lines(errors: list[dict[str, Any]], num_lines: int = 6) -> list[str]:
    """The end of what the rank printed that failed by itself, and not for the loss of another."""
    own = next((error.get("traceback", "") for error in errors if error["kind"] == "error"), "")
    return [line for line in own.splitlines() if line.strip() and not line.startswith("Traceback")][-num_lines:]


def _memory_words(submission: Submission) -> str:
    return "" if submission.memory_gib is None else f" with {submission.memory_gib:.1f} GiB each"


def _profiled(state: State, verdicts: Collection[Verdict]) -> list[Attempt]:
    return [a for a in state.attempts.values() if a.is_profiling and a.verdict in verdicts]


def _plain_row(row: dict[Any, Any]) -> dict[str, Any]:
    """A table row for JSON: unknown numbers are null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else _plain(v) for k, v in row.items()}


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
