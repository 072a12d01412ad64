"""Which host keeps the others waiting, by the time that each rank spends in its own forward passes.

With synchronous training all ranks' steps are as long as the slowest one's, so the step time cannot tell one slow host
from a slow network; forward passes, which wait for nobody, can. A host is slow if its slowest rank takes more than
`SLOWER` times the median of the other hosts', in the median of its newest windows and by more than half of that in each
of them, as a drift is lasting (see `drift`), but for the one that the change falls into, which may show little of it.
Where there are windows from before the steps changed, it must have become so much slower since: hosts may differ all
the time, and that is no news.

Of two hosts either could be the usual one, so the slow one must be slower than it was itself: than before, or than in
profiling where it is so from the start.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tula_hpc.models.drift import LASTING

SLOWER = 1.2
"""Times the median of the others."""
AT_LEAST = 1 + (SLOWER - 1) / 2
"""What each window must show."""
EXPLAINS = 0.5
"""Share of the time that steps have become longer by which a slow host must add, to be the cause of it."""

CLOCKS_DIFFER_S = 0.5
"""How far the hosts' clocks may be apart; windows are at least a second long."""


@dataclass(frozen=True)
class RankTimes:
    """What one rank has told of its forward passes."""

    host: str
    windows: Sequence[tuple[float, float]]
    """(when it ended, in seconds since 1970; mean time of a pass in s), oldest first."""


@dataclass(frozen=True)
class SlowHost:
    """A host that computes lastingly longer than the others."""

    host: str
    ratio: float
    """Of its forward time over the others' median."""
    added_s: float
    """What a forward pass takes longer there, seconds."""

    def explains(self, longer_s: float, compute_over_forward: float) -> bool:
        """Whether it is the cause of steps that have become `longer_s` seconds longer.

        Args:
            longer_s: What a step takes more than expected.
            compute_over_forward: Computation of a whole step over its forward pass; all of it is slow there.
        """
        return self.added_s * compute_over_forward >= EXPLAINS * longer_s


@dataclass(frozen=True)
class _Host:
    name: str
    now: Sequence[float]
    """Newest windows of its slowest rank."""
    whole: Sequence[float]
    """Those of them that began after the change."""
    before_s: float | None

    @property
    def now_s(self) -> float:
        return statistics.median(self.now)

    def is_slower(self, than_s: float) -> bool:
        return self.now_s > SLOWER * than_s and min(self.whole) > AT_LEAST * than_s


def slow_host(ranks: Sequence[RankTimes], since: float, usual_s: float | None = None) -> SlowHost | None:
    """The slowest host, if it is slow by the module's rule.

    Args:
        ranks: All ranks of the training.
        since: When its steps became slower, seconds since 1970.
        usual_s: What a forward pass took in profiling, seconds; None: not measured at this configuration.
    """
    names = sorted({rank.host for rank in ranks})
    if len(names) < 2:
        return None
    hosts = []
    for name in names:
        found = [_host(rank, since) for rank in ranks if rank.host == name]
        known = [host for host in found if host is not None]
        if len(known) < len(found):
            return None
        hosts.append(max(known, key=lambda host: host.now_s))
    slowest = max(hosts, key=lambda host: host.now_s)
    others = [host for host in hosts if host is not slowest]
    others_s = statistics.median(host.now_s for host in others)
    if not slowest.is_slower(others_s):
        return None
    before = [host.before_s for host in others if host.before_s is not None]
    if slowest.before_s is not None and len(before) == len(others):
        usual_ratio = slowest.before_s / statistics.median(before)
        if not slowest.is_slower(others_s * usual_ratio):
            return None
    own_s = usual_s if slowest.before_s is None else slowest.before_s
    if len(hosts) == 2 and (own_s is None or not slowest.is_slower(own_s)):
        return None
    return SlowHost(slowest.name, slowest.now_s / others_s, slowest.now_s - others_s)


def _host(rank: RankTimes, since: float) -> _Host | None:
    """A host by one of its ranks; None if too little is known of it. The newest window may not be visible yet."""
    began = since + CLOCKS_DIFFER_S
    since_then = [seconds for ended, seconds in rank.windows if ended > began]
    now, whole = since_then[-LASTING:], since_then[1:][-LASTING:]
    before = [seconds for ended, seconds in rank.windows if ended <= began]
    if len(now) < LASTING - 1 or min(now) <= 0:
        return None
    return _Host(rank.host, now, whole, statistics.median(before) if len(before) >= LASTING else None)
