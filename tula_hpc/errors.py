"""Errors a user can act on: each carries the whole message and needs no traceback."""

from __future__ import annotations


class TulaError(Exception):
    """Something the user can mend; the message names the key, the value, the limit and the way out."""


class ConfigError(TulaError):
    """All the problems found in a configuration, reported at once.

    Args:
        problems: One complete sentence per problem.
    """

    def __init__(self, problems: list[str]):
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            f"{count} in the configuration, nothing was submitted:\n" + "\n".join(f"  - {p}" for p in problems)
        )


class SubmissionRejected(TulaError):
    """The scheduler refused a job and said why; nothing of it was queued."""


class SubmissionLimited(SubmissionRejected):
    """The scheduler takes no more jobs of this user now, or not so many at once; it may later.

    Args:
        message: With the scheduler's words.
        counts_others: Jobs of other users count, too, so that waiting may help although this user has none.
    """

    def __init__(self, message: str, counts_others: bool = False):
        super().__init__(message)
        self.counts_others = counts_others


class SubmissionUnknown(TulaError):
    """The scheduler neither took nor refused a job: it may be queued all the same, so it must be looked for."""


class SchedulerSilent(TulaError):
    """The scheduler could not be asked; nothing follows from that."""


class RecordError(TulaError):
    """A file of a run folder is missing, torn, of another version or makes no sense; the message names it."""


class RecordMissing(RecordError):
    """The file is not there."""


class RunIsHeld(TulaError):
    """Another controller works on the run."""
