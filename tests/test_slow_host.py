"""Which host is slow by the ranks' own forward times, on series with a known truth; how they are taken, and told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_replanning import LARGE, Training

from tula_hpc.config import ReplanKind
from tula_hpc.control.choosing import chosen_fit
from tula_hpc.control.verdicts import QueueState, Verdict
from tula_hpc.models.drift import LASTING
from tula_hpc.models.slow_host import RankTimes, SlowHost, slow_host
from tula_hpc.ranks.clock import ForwardTimes
from tula_hpc.ranks.launch import Rank, this_host
from tula_hpc.runs import read_json, write_json

SINCE = 100.0
USUAL_S = 0.05
random = np.random.default_rng(7)


def rank(host: str, before: float | None, now: float, noise: float = 0.03, number: int = LASTING) -> RankTimes:
    """A rank that took so many times the usual before the change, if there was a before, and since."""
    levels = [] if before is None else [before] * 8
    times = [USUAL_S * level * random.uniform(1 - noise, 1 + noise) for level in [*levels, *[now] * number]]
    return RankTimes(host, [(SINCE + 2 * (i - len(levels) + 1), seconds) for i, seconds in enumerate(times)])


def hosts(*levels: tuple[float | None, float]) -> list[RankTimes]:
    return [rank(f"n{i}", before, now) for i, (before, now) in enumerate(levels, 1)]


@pytest.mark.parametrize("before", [1.0, None])
def test_one_of_several_is_named(before: float | None):
    """With how much slower it is than the others, and what that adds to a pass; from the start or from some time on."""
    found = slow_host(hosts((before, 1.0), (before, 1.02), (before, 1.5), (before, 1.0)), SINCE)
    assert found is not None
    assert found.host == "n3"
    assert found.ratio == pytest.approx(1.5, rel=0.05)
    assert found.added_s == pytest.approx(0.5 * USUAL_S, rel=0.15)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_the_window_that_the_change_falls_into_may_show_little_of_it(share: float):
    """The steps of this window were long enough to count as changed, so it is the first of those since."""
    late = rank("n3", 1.0, 1.5)
    first = next(i for i, (ended, _) in enumerate(late.windows) if ended > SINCE)
    mixed = [(t, USUAL_S * (1 + 0.5 * share) if i == first else s) for i, (t, s) in enumerate(late.windows)]
    found = slow_host([*hosts((1.0, 1.0), (1.0, 1.02)), RankTimes("n3", mixed), *hosts((1.0, 1.0))], SINCE)
    assert found is not None
    assert found.host == "n3"


def test_hosts_that_became_slower_together_are_not_named():
    assert slow_host(hosts((1.0, 1.5), (1.0, 1.5), (1.0, 1.5)), SINCE) is None


def test_a_host_that_has_always_been_slower_is_no_news():
    """What it adds was in the steps before; but not if it is slower still."""
    assert slow_host(hosts((1.0, 1.0), (1.0, 1.0), (1.4, 1.4)), SINCE) is None
    worse = slow_host(hosts((1.0, 1.0), (1.0, 1.0), (1.4, 2.1)), SINCE)
    assert worse is not None
    assert worse.host == "n3"


def test_less_than_the_threshold_and_a_hiccup_are_not_named():
    assert slow_host(hosts((1.0, 1.0), (1.0, 1.12), (1.0, 1.0)), SINCE) is None
    hiccup = RankTimes("n3", [(SINCE + 2 * i, USUAL_S * (3.0 if i in (2, 3, 4) else 1.0)) for i in range(1, 6)])
    assert slow_host([*hosts((None, 1.0), (None, 1.0)), hiccup], SINCE) is None


def test_the_slowest_rank_of_a_host_counts():
    """One of its GPUs is enough to keep all the others waiting."""
    ranks = [rank(host, 1.0, 1.6 if (host, i) == ("n2", 1) else 1.0) for host in ("n1", "n2", "n3") for i in range(2)]
    found = slow_host(ranks, SINCE)
    assert found is not None
    assert found.host == "n2"


def test_of_two_the_slow_one_is_slower_than_it_was():
    """The other may have become faster; without a before, profiling is what it is compared with."""
    found = slow_host(hosts((1.0, 1.0), (1.0, 1.5)), SINCE)
    assert found is not None
    assert found.host == "n2"
    assert slow_host(hosts((1.5, 1.0), (1.5, 1.5)), SINCE) is None
    from_the_start = hosts((None, 1.0), (None, 1.5))
    assert slow_host(from_the_start, SINCE) is None
    assert slow_host(from_the_start, SINCE, usual_s=1.5 * USUAL_S) is None
    named = slow_host(from_the_start, SINCE, usual_s=USUAL_S)
    assert named is not None
    assert named.host == "n2"


def test_too_little_says_nothing():
    """One host, or one whose windows since the change are not there yet; but for the last one, which may be late."""
    assert slow_host(hosts((1.0, 1.5)), SINCE) is None
    others = hosts((1.0, 1.0), (1.0, 1.0))
    assert slow_host([*others, rank("n3", 1.0, 1.5, number=LASTING - 2)], SINCE) is None
    assert slow_host([*others, rank("n3", 1.0, 1.5, number=LASTING - 1)], SINCE) is not None


def test_it_is_the_cause_if_it_adds_half_of_what_steps_became_longer():
    """With all of the computation, of which a forward pass is a part."""
    slow = SlowHost("n3", 1.5, added_s=0.02)
    assert slow.explains(0.1, compute_over_forward=3.0)
    assert not slow.explains(0.2, compute_over_forward=3.0)


# --- the clock --------------------------------------------------------------------------------------------------------


class Sleeps(torch.nn.Module):
    """Its passes take as long as a test's clock says."""

    def __init__(self, tick: Callable[[], None]):
        super().__init__()
        self.tick = tick

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.tick()
        return values


def test_windows_hold_the_forward_passes_of_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither evaluation nor the first passes nor what lies between; the file is there when a window has closed."""
    now = [0.0]

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("tula_hpc.ranks.clock.time.perf_counter", lambda: now[0])
    module, path = Sleeps(lambda: pass_by(0.25)), tmp_path / "rank-0003.json"
    own = ForwardTimes(module, torch.device("cpu"), path, Rank(3, 4, 0, "launch-1", "job"), skipped_passes=2)
    for number in range(6):
        if number == 2:
            module.tick = lambda: pass_by(0.5)
        module(torch.zeros(1))
        pass_by(10.0)
    module.eval()
    module(torch.zeros(1))
    assert not path.exists()
    own.close_window()
    told = read_json(path)
    assert (told["rank"], told["launch"], told["host"]) == (3, "launch-1", this_host())
    assert [seconds for _, seconds in told["windows"]] == [0.5]
    own.close_window()
    assert read_json(path) == told


# --- what is told, and done -------------------------------------------------------------------------------------------


class OnEight(Training):
    """A training on n1 to n8 whose ranks tell of their forward passes."""

    def forward(self, before: int, slow: dict[str, float], since: int) -> None:
        """So many windows of usual passes, and then of hosts that take so many times as long."""
        ends = [ended for ended, *_ in self.windows]
        for number in range(8):
            factor = slow.get(f"n{number + 1}", 1.0)
            passes = [USUAL_S] * before + [factor * USUAL_S] * since
            told = [list(pair) for pair in zip(ends, passes, strict=True)]
            about = {"rank": number, "launch": str(self.attempt.number), "host": f"n{number + 1}"}
            write_json(self.run.forward_times(number), {**about, "windows": told})

    def slow_down(self, ratio: float = 3.0, **slow: float) -> None:
        """Steps become so many times as long, and the hosts' forward passes as given."""
        usual_s = self.predicted_s(LARGE)
        self.steps(12, usual_s)
        ended = self.windows[-1][0]
        self.windows += [[ended + (i + 1) * 100 * ratio * usual_s, 100, ratio * usual_s, 0.0] for i in range(LASTING)]
        self.forward(12, slow, LASTING)
        del self.windows[-LASTING:]
        self.steps(LASTING, ratio * usual_s)


@pytest.fixture
def on_eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., OnEight]:
    def make(spare: bool = True, **changes: Any) -> OnEight:
        one = OnEight(tmp_path, cluster__gpus_per_node=1, cluster__file_lag_s=0.0, **changes)
        refused = None if spare else "Requested node configuration is not available"
        monkeypatch.setattr(one.told, "why_rejected", lambda request: refused if request.excluded_hosts else None)
        return one

    return make


def test_a_slow_node_is_told_by_name_and_nothing_is_refitted(on_eight: Callable[..., OnEight]):
    """With how to go on without it, and no other configuration in its place; once."""
    one = on_eight()
    one.slow_down(n3=6.0)
    (words,) = one.said
    assert "node n3 computes 6.00 x as long as the others" in words
    assert "To go on without it, end this command (Ctrl-C) and give: python -m tula_hpc" in words
    (drift,) = one.journal.state().drifts
    assert (drift["cause"], drift["node"], drift["part"], drift["offer"]) == ("node", "n3", None, None)
    assert drift["step_time"] == chosen_fit(read_json(one.run.fit)).to_dict()
    assert one.attempt.ending is None
    one.steps(8, one.windows[-1][2])
    assert one.said == [words]


def test_auto_goes_on_without_the_slow_node(on_eight: Callable[..., OnEight]):
    """It saves, and the next job of the same size keeps off it, as after a failure; its steps are then as predicted."""
    one = on_eight(training__replan=ReplanKind.auto)
    one.slow_down(n3=6.0)
    assert one.run.attempt("train", 1).leave.exists()
    assert "the training saves and goes on without n3" in one.said[-1]
    one.look(QueueState.failed)
    assert one.attempt.verdict is Verdict.replanned
    assert one.journal.state().broken_hosts == ("n3",)
    candidate, _ = one.next_steps.after(one.attempt)
    assert (candidate.num_nodes, candidate.batch_per_rank) == (8, 64)
    one.submit(LARGE)
    assert one.told.requests[-1].excluded_hosts == ("n3",)
    said = len(one.said)
    one.told.seen = type(one.told.seen)(QueueState.running)
    one.steps(12, one.predicted_s(LARGE))
    assert len(one.said) == said


def test_the_next_command_with_auto_leaves_it_out(on_eight: Callable[..., OnEight]):
    one = on_eight()
    one.slow_down(n3=6.0)
    one.settings.training.replan = ReplanKind.auto
    one.restart()
    one.steps(1, one.windows[-1][2])
    assert one.attempt.ending is Verdict.replanned
    assert one.attempt.successor is not None
    assert one.attempt.successor.without == "n3"


def test_without_a_spare_node_it_is_only_told(on_eight: Callable[..., OnEight]):
    one = on_eight(spare=False, training__replan=ReplanKind.auto)
    one.slow_down(n3=6.0)
    assert one.attempt.ending is None
    assert "The cluster has no other node in its place" in one.said[-1]


@pytest.mark.parametrize("slow", [{}, {"n3": 1.3}])
def test_a_network_is_still_a_network(on_eight: Callable[..., OnEight], slow: dict[str, float]):
    """Where no host is slower, or one by far less than the steps have become longer."""
    one = on_eight()
    one.slow_down(9.0, **slow)
    (drift,) = one.journal.state().drifts
    assert (drift["cause"], drift["part"]) == ("steps", "sync")
    assert "node" not in drift


def test_ranks_of_an_earlier_launch_do_not_count(on_eight: Callable[..., OnEight]):
    one = on_eight()
    for number in range(8):
        about = {"rank": number, "launch": "another", "host": f"n{number + 1}"}
        write_json(one.run.forward_times(number), {**about, "windows": [[1e12 + i, 1.0 + number] for i in range(9)]})
    usual_s = one.predicted_s(LARGE)
    one.steps(12, usual_s)
    one.steps(12, 9 * usual_s)
    assert one.journal.state().drifts[0]["cause"] == "steps"
