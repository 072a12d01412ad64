"""From a wish to a verdict: attempts are intended, submitted, watched, and judged by the evidence they leave."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings, to_plain
from tula_hpc.control.journal import Attempt, Journal, Successor
from tula_hpc.control.packing import Submission
from tula_hpc.control.scheduler import JobRequest, Scheduler, Seen
from tula_hpc.control.verdicts import Evidence, QueueState, RankError, Verdict, conclude
from tula_hpc.display import duration
from tula_hpc.errors import RecordError, SchedulerSilent, SubmissionLimited, SubmissionUnknown
from tula_hpc.ranks.timings import read_point
from tula_hpc.runs import AttemptFolder, RunFolder, read_json, write_json
from tula_hpc.signatures import own_code

TRAIN, PROBE = "train", "probe"
ROOM_PATIENCE_S = 600.0
"""How long to wait for the end of a job before a full queue is tried again all the same."""


def profile_job(candidate: Candidate) -> str:
    return f"profile/{candidate.name}"


def probe_job(candidate: Candidate) -> str:
    return f"{PROBE}/{candidate.name}"


def _job(kind: str, candidate: Candidate) -> str:
    return {"profile": profile_job(candidate), PROBE: probe_job(candidate), TRAIN: TRAIN}[kind]


@dataclass(frozen=True)
class Look:
    """One attempt as seen in one look at the queue."""

    attempt: Attempt
    seen: Seen
    verdict: Verdict | None


def _near_its_limit(folder: AttemptFolder) -> bool:
    """Whether a job was last heard of when its time was nearly over; by its own clock."""
    try:
        limit_min = read_json(folder.request)["time_limit_min"]
        lasted_s = read_json(folder.heartbeat)["time"] - read_json(folder.launch)["time"]
    except (RecordError, KeyError):
        return False
    return limit_min is not None and lasted_s > 0.9 * 60 * limit_min


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
        self._suspended: set[tuple[str, int]] = set()
        """Attempts whose job was seen suspended."""
        self._beats: dict[tuple[str, int], tuple[int, float]] = {}
        """Last heartbeat of each running attempt, and when it was first seen."""
        self._points: dict[tuple[str, int], dict[str, Any]] = {}
        self._own_code = own_code(settings)

    def request(
        self,
        kind: str,
        candidates: list[Candidate],
        time_limit_min: int | None,
        one_after_another: bool = False,
        memory_gib: float | None = None,
    ) -> JobRequest:
        """The next submission for candidates of one type and node count, or of several counts that run one after
        another; nothing is written or submitted.

        Args:
            kind: `profile`, `probe` or `train`; a training is submitted alone.
            candidates: What each attempt of it runs.
            time_limit_min: Time limit of each job; None: no limit.
            one_after_another: One job runs them all; otherwise each has its own.
            memory_gib: Host memory of each node where it is not `cluster.memory_gib`.
        """
        node_type, state = candidates[0].node_type, self._journal.state()
        cluster = self._settings.of_type(node_type).cluster
        nodes, jobs = max(c.num_nodes for c in candidates), [_job(kind, c) for c in candidates]
        # random, because the scheduler remembers the jobs of a run folder that was deleted and made again
        token = uuid.uuid4().hex[:6]
        return JobRequest(
            tag=f"{self._run.tag}-{kind}-n{nodes}-{len(state.attempts) + 1}-{token}",
            attempts=tuple(self._run.attempt(job, len(state.of(job)) + 1) for job in jobs),
            num_nodes=nodes,
            ranks_per_node=cluster.ranks_per_node,
            time_limit_min=time_limit_min,
            max_running=cluster.max_running_jobs,
            measures=kind != TRAIN,
            memory_gib=memory_gib,
            excluded_hosts=state.broken_hosts,
            one_after_another=one_after_another,
            node_type=node_type,
        )

    @property
    def run_beside_each_other(self) -> bool:
        """Whether a job can run while another one does."""
        return not self._scheduler.one_host

    def wait_without(self, host: str, candidate: Candidate, time_limit_min: int | None) -> float | None:
        """Seconds that a training would wait for its nodes without a host, 0 where nobody knows; None if the cluster
        has too few others."""
        request = self.request(TRAIN, [candidate], time_limit_min)
        request = replace(request, excluded_hosts=tuple(sorted({*request.excluded_hosts, host})))
        if self._scheduler.why_rejected(request) is not None:
            return None
        return self._scheduler.expected_wait_s(request) or 0.0

    def why_rejected(self, kind: str, submission: Submission) -> str | None:
        """The scheduler's words if it would refuse a submission; nothing is written or submitted."""
        self._heartbeat()
        return self._tried_out(self.request(kind, *submission))[1]

    def _tried_out(self, request: JobRequest) -> tuple[JobRequest, str | None]:
        """The request, on any host again if there are not enough without those that broke down, and the scheduler's
        words if it would refuse it."""
        reason = self._scheduler.why_rejected(request)
        if reason is None or not request.excluded_hosts:
            return request, reason
        anywhere = replace(request, excluded_hosts=())
        return anywhere, self._scheduler.why_rejected(anywhere)

    def submit(self, kind: str, submission: Submission) -> SubmissionLimited | None:
        """Submit attempts at all candidates, in as few submissions as the scheduler's limits allow.

        Args:
            kind: `profile`, `probe` or `train`; a training is submitted alone.
            submission: What to run, and how.

        Returns:
            None if all were submitted; else why the scheduler takes no more now. What is left out is submitted by a
            later call.

        Raises:
            SubmissionRejected: If the scheduler refuses for good; the attempts are then on record as never started.
        """
        left = list(submission.candidates)
        size = (
            len(left) if submission.one_after_another else min(len(left), self._scheduler.max_attempts() or len(left))
        )
        while left:
            try:
                self._submit_together(kind, submission._replace(candidates=left[:size]))
            except SubmissionLimited as limit:
                if size == 1 or submission.one_after_another:
                    return limit
                size //= 2
            else:
                left = left[size:]
        return None

    def _submit_together(self, kind: str, submission: Submission) -> None:
        """Write down what is wanted, submit it, write down the ids.

        Where the scheduler's answer got lost the attempts stay without an id, and `look` finds out.
        """
        self._heartbeat()
        request = self.request(kind, *submission)
        if request.excluded_hosts:
            request, _ = self._tried_out(request)
        attempts = []
        with self._journal.together():
            for candidate, folder in zip(submission.candidates, request.attempts, strict=True):
                self._write_request(kind, candidate, folder, submission.time_limit_min)
                attempt = Attempt(
                    _job(kind, candidate),
                    folder.number,
                    request.tag,
                    candidate.batch_per_rank,
                    candidate.num_nodes,
                    memory_gib=submission.memory_gib,
                    one_after_another=submission.one_after_another,
                    node_type=candidate.node_type,
                )
                self._journal.intend(attempt)
                attempts.append(attempt)
        try:
            job_ids = self._scheduler.submit(request)
        except SubmissionUnknown as error:
            self._journal.note(f"{request.tag}: {error}")
            return
        except Exception as error:
            verdict = Verdict.skipped if isinstance(error, SubmissionLimited) else Verdict.never_started
            for attempt in attempts:
                self._journal.concluded(attempt, verdict, str(error))
            raise
        with self._journal.together():
            for attempt, job_id in zip(attempts, job_ids, strict=True):
                self._journal.submitted(attempt, job_id)

    def more_memory_gib(self, attempt: Attempt) -> float | None:
        """Host memory for the next attempt after one that was killed for its lack: twice as much, as far as nodes and
        `cluster.max_memory_gib` go, or all where it had what the site gives by itself; None if there is no more."""
        cluster = self._settings.of_type(attempt.node_type).cluster
        had = attempt.memory_gib or cluster.memory_gib
        limit = cluster.max_memory_gib or self._scheduler.memory_gib_per_node(attempt.node_type)
        if had is None or limit is None:
            return limit
        return min(2 * had, limit) if limit > 1.05 * had else None

    def allowed_gib(self, attempt: Attempt) -> float | None:
        """Host memory that was asked for an attempt, within a limit that may have been set since."""
        memory_gib, limit = attempt.memory_gib, self._settings.of_type(attempt.node_type).cluster.max_memory_gib
        return memory_gib if memory_gib is None or limit is None else min(memory_gib, limit)

    def too_large(self, node_type: str) -> frozenset[Verdict]:
        """Ends that say that a batch is too large for a type of node. A host that ran out of memory says so only of a
        batch that is computed on it; the batch of a GPU is not to blame."""
        on_gpu = self._settings.of_type(node_type).cluster.gpus_per_node > 0
        return frozenset({Verdict.cuda_oom} if on_gpu else {Verdict.cuda_oom, Verdict.host_oom})

    def _write_request(
        self, kind: str, candidate: Candidate, folder: AttemptFolder, time_limit_min: int | None
    ) -> None:
        write_json(
            folder.request,
            {
                "kind": TRAIN if kind == TRAIN else "profile",
                "settings": to_plain(self._settings.of_type(candidate.node_type)),
                **candidate.record(),
                "time_limit_min": time_limit_min,
                "ranks_on_host": candidate.world_size if self._scheduler.one_host else candidate.gpus_per_node,
                "working_dir": os.getcwd(),
                "own_code": self._own_code,
            },
        )

    def look(self) -> list[Look] | None:
        """See where every attempt without a verdict is, and judge those that ended; None if nothing could be learnt."""
        open_attempts = self._journal.state().open
        try:
            open_attempts = [a if a.job_id else self._looked_for(a) for a in open_attempts]
        except SchedulerSilent:
            return None
        states = self._scheduler.states([a.job_id for a in open_attempts if a.job_id])
        if states is None:
            return None
        looks = []
        with self._journal.together():
            for attempt in open_attempts:
                seen = states[attempt.job_id] if attempt.job_id else Seen(QueueState.absent)
                over = not seen.state.active or (attempt.one_after_another and self._is_over(attempt))
                verdict = self._judge(attempt, seen) if over else None
                if not over:
                    self._unheard_since.pop(attempt.key, None)
                    self._see_to(attempt, seen.state)
                looks.append(Look(attempt, self._as_shown(attempt, seen), verdict))
        return looks

    def _see_to(self, attempt: Attempt, state: QueueState) -> None:
        """End an attempt in the queue that is to end, or hangs."""
        if attempt.ending is Verdict.replanned:  # by itself, unless it hangs
            self._ask_to_leave(attempt)
        elif attempt.ending is not None:
            self._cancel_jobs_of([attempt])  # the scheduler may not have heard it
            return
        if state is QueueState.suspended:
            self._suspended.add(attempt.key)
        if state is QueueState.running and not (attempt.one_after_another and not self._has_begun(attempt)):
            self._end_if_hung(attempt)
        else:
            self._beats.pop(attempt.key, None)  # a suspended job has no heartbeat

    def _end_if_hung(self, attempt: Attempt) -> None:
        """End a running attempt that has shown no sign of progress for too long, and with it its job."""
        try:
            heartbeat = read_json(self._run.attempt(attempt.job, attempt.number).heartbeat)
        except RecordError:
            heartbeat = {"beat": 0, "doing": "nothing that it told of"}
        beat, since = self._beats.get(attempt.key, (-1, 0.0))
        limit_s = 60 * self._settings.cluster.hang_timeout_min
        if beat != heartbeat["beat"]:
            self._beats[attempt.key] = heartbeat["beat"], time.monotonic()
        elif time.monotonic() - since > limit_s:
            others = [a for a in self._journal.state().open if a.job_id == attempt.job_id and a.key != attempt.key]
            for other in others:  # first, so that after a crash in between the one that hangs is found again
                self._journal.ending(other, Verdict.never_started, f"its job was ended because {attempt.job} hung")
            why = (
                f"no sign of progress for {duration(limit_s)}, last seen {heartbeat['doing']}; if that is normal, "
                "raise cluster.hang_timeout_min"
            )
            self.end([attempt], Verdict.hung, why)

    def _looked_for(self, attempt: Attempt) -> Attempt:
        """An attempt whose submission nobody recorded, with its id if the queue knows its tag."""
        together = [a for a in self._journal.state().attempts.values() if a.tag == attempt.tag]
        folders = [self._run.attempt(a.job, a.number) for a in together]
        index = [a.key for a in together].index(attempt.key)
        job_id = self._scheduler.find(attempt.tag, index, folders, attempt.one_after_another)
        if job_id is None:
            return attempt
        self._journal.submitted(attempt, job_id)
        return replace(attempt, job_id=job_id)

    def _judge(self, attempt: Attempt, seen: Seen) -> Verdict | None:
        """The verdict on an attempt that is no longer in the queue; None while its files may still be on their way."""
        evidence = self._evidence(attempt, seen)
        passed_over = None if evidence.started else self._passed_over(attempt)
        first_seen = self._unheard_since.setdefault(attempt.key, time.monotonic())
        ended_by_us = attempt.ending is not None and attempt.job_id is not None
        known = evidence.complete or passed_over is not None or ended_by_us
        if evidence.cause_may_come and not known and time.monotonic() - first_seen < self._scheduler.file_lag_s:
            return None
        verdict, reason = passed_over or conclude(evidence)
        cancelled_meanwhile = attempt.ending is Verdict.replanned and verdict is Verdict.cancelled
        if attempt.ending is not None and verdict is not Verdict.success and not cancelled_meanwhile:
            verdict, reason = attempt.ending, attempt.reason
        broken = self._scheduler.broken_hosts(seen.hosts) if verdict is Verdict.node_failure and seen.hosts else []
        if verdict is Verdict.replanned and attempt.successor is not None and attempt.successor.without:
            broken = [attempt.successor.without]
        if broken:
            reason += f"; {', '.join(broken)} will not be used again"
        self._journal.concluded(attempt, verdict, reason, broken)
        return verdict

    def _as_shown(self, attempt: Attempt, seen: Seen) -> Seen:
        """Where the attempt is: in a job that others share it may still wait for its turn."""
        if attempt.one_after_another and seen.state is QueueState.running and not self._has_begun(attempt):
            return replace(seen, state=QueueState.pending, why="its turn in the job")
        return seen

    def _has_begun(self, attempt: Attempt) -> bool:
        return self._run.attempt(attempt.job, attempt.number).claim.exists()

    def _passed_over(self, attempt: Attempt) -> tuple[Verdict, str] | None:
        """The verdict on an attempt that its job did not run because a smaller batch, judged before, did not fit."""
        smaller = [
            a.batch_per_rank
            for a in self._journal.state().attempts.values()
            if a.tag == attempt.tag and a.num_nodes == attempt.num_nodes and a.batch_per_rank < attempt.batch_per_rank
            if a.one_after_another and a.verdict in self.too_large(a.node_type)
        ]
        return (Verdict.skipped, f"batch {min(smaller)} a rank already ran out of memory") if smaller else None

    def _is_over(self, attempt: Attempt) -> bool:
        """Whether all ranks of an attempt have ended in a job that goes on with others."""
        return self._run.attempt(attempt.job, attempt.number).is_over(self.candidate(attempt).world_size)

    def _evidence(self, attempt: Attempt, seen: Seen) -> Evidence:
        folder = self._run.attempt(attempt.job, attempt.number)
        missing = self._what_is_missing(attempt, folder)
        over_before = attempt.one_after_another and self._is_over(attempt)
        errors = tuple(RankError(error["kind"], error["message"]) for error in folder.errors()) if missing else ()
        return Evidence(
            complete=missing is None,
            started=folder.claim.exists(),
            queue=QueueState.completed if over_before else seen.state,  # how the job ended later is not about this one
            rank_errors=errors,
            log_tail=self._scheduler.log_tail(folder, attempt.job_id or "") if missing else "",
            incomplete_because=missing or "",
            was_waiting=seen.was_waiting,
            near_its_limit=missing is not None and _near_its_limit(folder),
            shares_job=attempt.one_after_another,
            was_suspended=attempt.key in self._suspended,
        )

    def _what_is_missing(self, attempt: Attempt, folder: AttemptFolder) -> str | None:
        try:
            if attempt.job == TRAIN:
                read_json(self._run.train_result)
            else:
                self.point(attempt)
        except RecordError as error:
            return str(error)
        return None

    def point(self, attempt: Attempt) -> dict[str, Any]:
        """What an attempt at profiling, or a probe, measured, as `read_point` gives it; read once: a whole record
        never changes.

        Raises:
            RecordError: As `read_point` does.
        """
        if attempt.key not in self._points:
            folder = self._run.attempt(attempt.job, attempt.number)
            self._points[attempt.key] = read_point(folder, self.candidate(attempt))
        return self._points[attempt.key]

    def candidate(self, attempt: Attempt) -> Candidate:
        ranks = self._settings.of_type(attempt.node_type).cluster.ranks_per_node
        return Candidate(attempt.num_nodes, attempt.batch_per_rank, ranks, attempt.node_type)

    def end(self, attempts: Collection[Attempt], verdict: Verdict, reason: str) -> None:
        """Have attempts ended; they get the verdict when they have left the queue, unless they were faster."""
        for attempt in attempts:
            self._journal.ending(attempt, verdict, reason)
        self._cancel_jobs_of(attempts)

    def replan(self, attempt: Attempt, successor: Successor, reason: str) -> None:
        """Have a training save and end between two steps, to go on as another attempt; its verdict says so then."""
        self._journal.ending(attempt, Verdict.replanned, reason, successor)
        self._ask_to_leave(attempt)

    def _ask_to_leave(self, attempt: Attempt) -> None:
        leave = self._run.attempt(attempt.job, attempt.number).leave
        if not leave.exists():
            write_json(leave, {})

    def _cancel_jobs_of(self, attempts: Collection[Attempt]) -> None:
        """Cancel the jobs of attempts, but for those that others share which are still waited for."""
        wanted = {a.job_id for a in self._journal.state().open if a.ending is None}
        self._scheduler.cancel({a.job_id for a in attempts if a.job_id} - wanted)

    def wait_for_room(self, limit: SubmissionLimited) -> bool:
        """Wait until the scheduler may take more jobs: one of the user's has ended, or some minutes have passed. False
        if none of them are queued and the limit counts no others, so that no end of any can make room."""
        deadline, before = time.monotonic() + ROOM_PATIENCE_S, self._scheduler.jobs_in_queue()
        if before == 0 and not limit.counts_others:
            return False
        while time.monotonic() < deadline:
            self._heartbeat()
            time.sleep(self._scheduler.poll_interval_s)
            queued = self._scheduler.jobs_in_queue()
            if before is not None and queued is not None and queued < before:
                break
        return True

    def distrust_damaged(self) -> list[str]:
        """Take back the success of attempts whose records cannot be read any more, and say which."""
        damaged = []
        for attempt in self._journal.state().attempts.values():
            if attempt.is_profiling and attempt.verdict is Verdict.success:
                why = self._what_is_missing(attempt, self._run.attempt(attempt.job, attempt.number))
                if why is not None:
                    self._journal.concluded(attempt, Verdict.incomplete, why)
                    damaged.append(why)
        return damaged

    def wait(
        self,
        on_look: Callable[[list[Look]], None],
        on_silence: Callable[[float], None],
    ) -> None:
        """Look again and again until every attempt has its verdict.

        Args:
            on_look: Called after each look that learnt something.
            on_silence: Called with the seconds since the last one, while the scheduler does not answer.
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
                if not self._journal.state().open:
                    return
            time.sleep(self._scheduler.poll_interval_s)
