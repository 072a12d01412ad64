"""What follows from each kind of end: run it again, with more memory, with a smaller batch, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings
from tula_hpc.control.jobs import TRAIN, Jobs, profile_job
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.packing import Submission
from tula_hpc.control.verdicts import Verdict
from tula_hpc.display import count_nodes
from tula_hpc.errors import TulaError

# Ends that say nothing about the candidate, and how often a profiling job is run again after each; counted from the
# last time that a user started the command. A training is, `training.max_relaunches` times after each.
RETRIES_IN_PROFILING = {
    Verdict.preempted: 5,
    Verdict.node_failure: 3,
    Verdict.never_started: 2,
    Verdict.incomplete: 1,
    Verdict.hung: 1,
    Verdict.host_oom: 2,
}


@dataclass(frozen=True)
class NextSteps:
    """The rules of one run."""

    settings: Settings
    journal: Journal
    jobs: Jobs
    say: Callable[[str], None]

    # --- profiling ------------------------------------------------------------------------------------------------

    def given_up(self) -> set[Candidate]:
        """Candidates that ended without a measurement for reasons other than memory, and are not to be run again.

        A job that somebody cancelled stays so. Others are run again when the user starts the command again.
        """
        state, found = self.journal.state(), set()
        for candidate in self.settings.grid_candidates():
            last = state.last(profile_job(candidate))
            if last is None or last.verdict in (None, Verdict.success, Verdict.skipped):
                continue
            ended, again = last.verdict, last.start < state.start
            if ended is Verdict.cancelled:
                again = self._may_be_resubmitted(last)
            elif ended in RETRIES_IN_PROFILING:
                again = again or state.endings(last.job, ended) <= RETRIES_IN_PROFILING[ended]
                # its job had time for others only; those that had their turn are bounded by their own ends
                others = last.one_after_another and state.verdicts_of(last.tag) != {Verdict.never_started}
                again = again or (ended is Verdict.never_started and others)
                again = again and (ended is not Verdict.host_oom or self.jobs.more_memory_gib(last) is not None)
            elif ended is Verdict.timeout and last.one_after_another:  # it may have begun late
                again = again or Verdict.success in state.verdicts_of(last.tag)
            if not again and ended not in self.jobs.too_large(last.node_type):
                found.add(candidate)
        return found

    def by_memory(self, submission: Submission) -> list[Submission]:
        """The submission in parts that ask for the same host memory: more than configured after an attempt was killed
        for its lack."""
        wanted: dict[float | None, list[Candidate]] = {}
        for candidate in submission.candidates:
            last = self.journal.state().last(profile_job(candidate))
            memory_gib = None if last is None else self.jobs.allowed_gib(last)
            if last is not None and last.verdict is Verdict.host_oom:
                memory_gib = self.jobs.more_memory_gib(last)
            wanted.setdefault(memory_gib, []).append(candidate)
        return [submission._replace(candidates=part, memory_gib=memory_gib) for memory_gib, part in wanted.items()]

    # --- training -------------------------------------------------------------------------------------------------

    def training_may_go_on(self, last: Attempt, progressed: bool) -> bool:
        """Whether the training is started again after this end of it."""
        assert last.verdict is not None
        if progressed and last.verdict in (Verdict.timeout, Verdict.preempted, Verdict.node_failure):
            return True  # a long training needs several jobs
        if last.verdict is Verdict.cancelled:
            return self._may_be_resubmitted(last)
        if last.verdict is Verdict.replanned:
            return True
        relaunches = self.journal.state().endings(TRAIN, last.verdict)
        again = last.verdict in {*RETRIES_IN_PROFILING, Verdict.timeout, Verdict.cuda_oom}
        return again and relaunches <= self.settings.training.max_relaunches

    def _may_be_resubmitted(self, cancelled: Attempt) -> bool:
        """Whether the user has started the command since, and said that what was cancelled shall run all the same: by a
        setting, or because the run was cancelled as a whole."""
        state = self.journal.state()
        return cancelled.start < (state.start if self.settings.cluster.resubmit_cancelled else state.lifted)

    def refuse_to_repeat(self, last: Attempt) -> None:
        """A training that somebody cancelled is not started again behind their back.

        Raises:
            TulaError: If it was, and `cluster.resubmit_cancelled` does not say otherwise.
        """
        if last.verdict is Verdict.cancelled and not self._may_be_resubmitted(last):
            raise TulaError(f"the training was cancelled ({last.reason}); the same command goes on{if_cancelled(last)}")

    def after(self, last: Attempt) -> tuple[Candidate, float | None]:
        """Where the training goes on after an attempt: candidate, and host memory if not the configured one.

        Raises:
            TulaError: If memory ran out and there is neither more of it nor a smaller batch.
        """
        candidate = self.jobs.candidate(last)
        if last.verdict is Verdict.replanned and last.successor is not None:
            next_up = last.successor
            candidate = replace(candidate, num_nodes=next_up.num_nodes, batch_per_rank=next_up.batch_per_rank)
        if last.verdict is Verdict.host_oom:
            memory_gib = self.jobs.more_memory_gib(last)
            if memory_gib is not None:
                self.say(f"relaunching with {memory_gib:.1f} GiB of host memory on each node")
                return candidate, memory_gib
            if Verdict.host_oom not in self.jobs.too_large(last.node_type):
                raise TulaError(
                    f"the training was killed for lack of host memory ({last.reason}), and more is not known to be "
                    "there; a smaller batch would not help its GPUs. Raise cluster.max_memory_gib (without it, what "
                    "Slurm tells of the nodes is the limit) or cluster.memory_gib, or lower data.loader_workers"
                )
        if last.verdict is not None and last.verdict.out_of_memory:
            return self._next_smaller(candidate, last.reason), self.jobs.allowed_gib(last)
        return candidate, self.jobs.allowed_gib(last)

    def _next_smaller(self, failed: Candidate, reason: str) -> Candidate:
        """The next smaller batch of the same nodes; derived from the batch that failed, whatever came before."""
        smaller = [
            c
            for c in self.settings.grid_candidates()
            if (c.node_type, c.num_nodes) == (failed.node_type, failed.num_nodes)
            if c.batch_per_rank < failed.batch_per_rank
        ]
        if not smaller:
            raise TulaError(
                f"the training ran out of memory with the smallest batch of the grid, {failed.batch_per_rank} a rank "
                f"on {count_nodes(failed)} ({reason}); lower grid.min_batch_per_rank or "
                "grid.min_global_batch, or give the job more memory (cluster.memory_gib)"
            )
        self.say(f"relaunching with batch {smaller[-1].batch_per_rank} a rank instead of {failed.batch_per_rank}")
        return smaller[-1]


def if_cancelled(last: Attempt) -> str:
    """How to go on in spite of a cancellation."""
    return " with cluster.resubmit_cancelled=true" if last.verdict is Verdict.cancelled else ""
