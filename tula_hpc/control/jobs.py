"""From a wish to a verdict: attempts are intended, submitted, watched, and judged by the evidence they leave."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings, to_plain
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.scheduler import JobRequest, Scheduler, Seen
from tula_hpc.control.verdicts import Evidence, QueueState, Verdict, conclude
from tula_hpc.errors import RecordError, SchedulerSilent, SubmissionRejected, SubmissionUnknown
from tula_hpc.ranks.timings import read_point
from tula_hpc.runs import AttemptFolder, RunFolder, read_json, safe_tag, write_json

TRAIN = "train"


def profile_job(candidate: Candidate) -> str:
    return f"profile/{candidate.name}"


def _job(kind: str, candidate: Candidate) -> str:
    return profile_job(candidate) if kind == "profile" else TRAIN


@dataclass(frozen=True)
class Look:
    """One attempt as seen in one look at the queue."""

    attempt: Attempt
    state: QueueState
    verdict: Verdict | None


class Jobs:
    """The jobs of one run: submits attempts and finds out how they ended."""

    def __init__(
        self,
        settings: Settings,
        run: RunFolder,
        journal: Journal,
        scheduler: Scheduler,
        heartbeat: Callable[[], None],
    ):
        self._settings = settings
        self._run = run
        self._journal = journal
        self._scheduler = scheduler
        self._heartbeat = heartbeat
        self._unheard_since: dict[tuple[str, int], float] = {}

    def request(self, kind: str, candidates: list[Candidate], time_limit_min: int | None) -> JobRequest:
        """The next submission for candidates of one node count; nothing is written or submitted.

        Args:
            kind: `profile` or `train`; a training is submitted alone.
            candidates: What each attempt of it runs.
            time_limit_min: Time limit of each attempt; None: no limit.
        """
        cluster, state = self._settings.cluster, self._journal.state()
        nodes, jobs = candidates[0].num_nodes, [_job(kind, c) for c in candidates]
        return JobRequest(
            tag=f"tula-{safe_tag(self._run.path.name)}-{kind}-n{nodes}-{len(state.attempts) + 1}",
            attempts=tuple(self._run.attempt(job, len(state.of(job)) + 1) for job in jobs),
            num_nodes=nodes,
            ranks_per_node=cluster.ranks_per_node,
            time_limit_min=time_limit_min,
            max_running=cluster.max_running_jobs,
            measures=kind == "profile",
        )

    def refuse_what_would_be_rejected(self, groups: list[list[Candidate]], time_limit_min: int) -> None:
        """Ask the scheduler about every submission of a round of profiling before the first is made.

        Raises:
            SubmissionRejected: With the scheduler's words for each that it would refuse.
        """
        reasons = []
        for group in groups:
            reason = self._scheduler.why_rejected(self.request("profile", group, time_limit_min))
            if reason is not None:
                reasons.append(f"{group[0].num_nodes} nodes: {reason}")
        if reasons:
            raise SubmissionRejected(
                f"{self._scheduler.name} would not accept the jobs, nothing was submitted:\n  " + "\n  ".join(reasons)
            )

    def submit(self, kind: str, candidates: list[Candidate], time_limit_min: int | None) -> None:
        """Write down what is wanted, submit it, write down the ids.

        The arguments are those of `request`.

        Where the scheduler's answer got lost the attempts stay without an id, and `look` finds out.

        Raises:
            SubmissionRejected: If the scheduler refuses; the attempts are then on record as never started.
        """
        request = self.request(kind, candidates, time_limit_min)
        attempts = []
        for candidate, folder in zip(candidates, request.attempts, strict=True):
            self._write_request(kind, candidate, folder)
            job = _job(kind, candidate)
            attempt = Attempt(job, folder.number, request.tag, candidate.batch_per_rank, candidate.num_nodes)
            self._journal.intend(attempt)
            attempts.append(attempt)
        try:
            job_ids = self._scheduler.submit(request)
        except SubmissionUnknown as error:
            self._journal.note(f"{request.tag}: {error}")
            return
        except Exception as error:
            for attempt in attempts:
                self._journal.concluded(attempt, Verdict.never_started, str(error))
            raise
        for attempt, job_id in zip(attempts, job_ids, strict=True):
            self._journal.submitted(attempt, job_id)

    def _write_request(self, kind: str, candidate: Candidate, folder: AttemptFolder) -> None:
        write_json(
            folder.request,
            {
                "kind": kind,
                "settings": to_plain(self._settings),
                "num_nodes": candidate.num_nodes,
                "gpus_per_node": candidate.gpus_per_node,
                "batch_per_rank": candidate.batch_per_rank,
                "ranks_on_host": candidate.world_size if self._scheduler.one_host else candidate.gpus_per_node,
                "working_dir": os.getcwd(),
            },
        )

    def look(self) -> list[Look] | None:
        """See where every attempt without a verdict is, and judge those that ended; None if nothing could be learnt."""
        open_attempts = [a for a in self._journal.state().attempts.values() if a.verdict is None]
        try:
            open_attempts = [a if a.job_id else self._looked_for(a) for a in open_attempts]
        except SchedulerSilent:
            return None
        states = self._scheduler.states([a.job_id for a in open_attempts if a.job_id])
        if states is None:
            return None
        looks = []
        for attempt in open_attempts:
            seen = states[attempt.job_id] if attempt.job_id else Seen(QueueState.absent)
            verdict = None if seen.state.active else self._judge(attempt, seen.state)
            looks.append(Look(attempt, seen.state, verdict))
        return looks

    def _looked_for(self, attempt: Attempt) -> Attempt:
        """An attempt whose submission nobody recorded, with its id if the queue knows its tag."""
        together = [a for a in self._journal.state().attempts.values() if a.tag == attempt.tag]
        job_id = self._scheduler.find(
            attempt.tag, together.index(attempt), self._run.attempt(attempt.job, attempt.number)
        )
        if job_id is None:
            return attempt
        self._journal.submitted(attempt, job_id)
        return replace(attempt, job_id=job_id)

    def _judge(self, attempt: Attempt, state: QueueState) -> Verdict | None:
        """The verdict on an attempt that is no longer in the queue; None while its files may still be on their way."""
        evidence = self._evidence(attempt, state)
        first_seen = self._unheard_since.setdefault(attempt.key, time.monotonic())
        files_may_come = state in (QueueState.completed, QueueState.absent) and not evidence.rank_errors
        if not evidence.complete and files_may_come and time.monotonic() - first_seen < self._scheduler.file_lag_s:
            return None
        verdict, reason = conclude(evidence)
        self._journal.concluded(attempt, verdict, reason)
        return verdict

    def _evidence(self, attempt: Attempt, state: QueueState) -> Evidence:
        folder = self._run.attempt(attempt.job, attempt.number)
        missing = self._what_is_missing(attempt, folder)
        errors = tuple((error["kind"], error["message"]) for error in folder.errors())
        return Evidence(
            complete=missing is None,
            started=folder.claim.exists(),
            queue=state,
            rank_errors=errors,
            log_tail=self._scheduler.log_tail(folder, attempt.job_id or "") if missing else "",
            incomplete_because=missing or "",
        )

    def _what_is_missing(self, attempt: Attempt, folder: AttemptFolder) -> str | None:
        try:
            if attempt.job == TRAIN:
                read_json(self._run.train_result)
            else:
                read_point(folder, self.candidate(attempt))
        except RecordError as error:
            return str(error)
        return None

    def candidate(self, attempt: Attempt) -> Candidate:
        return Candidate(attempt.num_nodes, attempt.batch_per_rank, self._settings.cluster.ranks_per_node)

    def cancel(self, attempts: Collection[Attempt], reason: str) -> None:
        """End attempts that are no longer wanted, and put down why."""
        self._scheduler.cancel([a.job_id for a in attempts if a.job_id])
        for attempt in attempts:
            self._journal.concluded(attempt, Verdict.skipped, reason)

    def wait(
        self,
        on_look: Callable[[list[Look]], None],
        on_silence: Callable[[float], None],
        poll_interval_s: float,
    ) -> None:
        """Look again and again until every attempt has its verdict.

        Args:
            on_look: Called after each look that learnt something.
            on_silence: Called with the seconds since the last one, while the scheduler does not answer.
            poll_interval_s: Time between two looks.
        """
        heard_at = time.monotonic()
        while True:
            self._heartbeat()
            looks = self.look()
            if looks is None:
                on_silence(time.monotonic() - heard_at)
            else:
                heard_at = time.monotonic()
                on_look(looks)
                if not any(a.verdict is None for a in self._journal.state().attempts.values()):
                    return
            time.sleep(poll_interval_s)
