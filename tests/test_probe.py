"""The choice is measured before the training begins, by a scheduler that measures what a test tells it to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from killing import Killed, Kills

from tula_hpc.candidates import Candidate
from tula_hpc.config import Settings
from tula_hpc.control import controller
from tula_hpc.control.controller import Controller
from tula_hpc.control.jobs import profile_job
from tula_hpc.control.journal import Journal
from tula_hpc.control.local import LocalScheduler
from tula_hpc.control.scheduler import JobRequest, Seen
from tula_hpc.control.verdicts import QueueState, Verdict
from tula_hpc.display import Display
from tula_hpc.ranks.timings import write_rank
from tula_hpc.runs import RunFolder, read_json, write_json

KNEE = Candidate(4, 64)
"""Where a step of 10 ms + 1 ms b has its knee on the largest cluster; the corners do not hold it."""


class Measures(LocalScheduler):
    """Profiling jobs end at once: with a time of 10 ms + 1 ms b, or out of memory from `oom_from` samples a rank on."""

    poll_interval_s = 0.0
    file_lag_s = 0.0
    oom_from = 10**6
    rank_meta: Callable[..., dict[str, Any]]

    def step_time_s(self, candidate: Candidate) -> float:
        return 0.01 + 0.001 * candidate.batch_per_rank

    def fits(self, candidate: Candidate) -> bool:
        return candidate.batch_per_rank < self.oom_from

    def submit(self, request: JobRequest) -> list[str]:
        for folder in request.attempts:
            candidate = Candidate.from_record(read_json(folder.request))
            folder.claim.mkdir(parents=True)
            for rank in range(candidate.world_size):
                batch = candidate.batch_per_rank
                if not self.fits(candidate):
                    write_json(
                        folder.rank_error(rank),
                        {"kind": "cuda_oom", "message": "out of memory", "rank": rank, "time": 0.0},
                    )
                    continue
                step_s = self.step_time_s(candidate)
                meta = self.rank_meta(world_size=candidate.world_size, batch_per_rank=batch, compute_step_s=step_s)
                meta["memory"] |= {"memory_gib": 0.5 + batch / 1000}
                rows = [[float(i), 0.0, step_s / 2, step_s / 2, 0.0, 0.0, step_s] for i in range(4)]
                write_rank(folder, rank, rows, meta)
        return [f"{request.tag}-{i}" for i in range(len(request.attempts))]

    def states(self, job_ids: Collection[str]) -> Mapping[str, Seen]:
        return dict.fromkeys(job_ids, Seen(QueueState.completed))


@dataclass
class Run:
    """A run up to its choice, and the controllers that work on it one after the other."""

    settings: Settings
    folder: RunFolder
    scheduler: Measures

    def controller(self) -> Controller:
        return Controller(self.settings, self.folder, self.scheduler, Display(), [])

    def profiled(self) -> Controller:
        """A controller that has measured the corners and fitted to them."""
        first = self.controller()
        first.write_down_the_run()
        first._fit(first._profile())
        return first

    @property
    def selection(self) -> dict[str, Any]:
        return read_json(self.folder.selection)

    def attempts_at(self, candidate: Candidate) -> list[Verdict | None]:
        return [a.verdict for a in self.controller().journal.state().of(profile_job(candidate))]


@pytest.fixture
def make_run(
    tiny_settings: Callable[..., Settings], run_folder: RunFolder, rank_meta: Callable[..., dict[str, Any]]
) -> Callable[..., Run]:
    def make(*overrides: str) -> Run:
        settings = tiny_settings(
            "data=synthetic",
            "workload.train_samples=100000",
            "data.train_samples=null",
            "grid.min_nodes=2",
            "grid.max_nodes=4",
            "grid.min_batch_per_rank=16",
            "grid.max_batch_per_rank=512",
            "grid.max_global_batch=null",
            "search=partial",
            "objective=knee",
            *overrides,
        )
        scheduler = Measures(settings)
        scheduler.rank_meta = rank_meta
        return Run(settings, run_folder, scheduler)

    return make


def test_a_choice_that_was_not_measured_is_measured(make_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]):
    """It is measured, told, and known to the fit before it is written down as the choice; so is what was chosen on the
    way, when the corners alone spoke for it."""
    run = make_run()
    measured = run.profiled()
    assert run.attempts_at(KNEE) == []
    measured._choose()
    assert (run.selection["num_nodes"], run.selection["batch_per_rank"]) == (4, 64)
    assert run.selection["measured"]
    assert run.attempts_at(KNEE) == [Verdict.success]
    points = read_json(run.folder.fit)["points"]
    assert (4, 64) in [(point["num_nodes"], point["batch_per_rank"]) for point in points]
    assert "4 nodes x 1 rank with 64 samples each would be chosen and was not measured" in capsys.readouterr().out


def test_a_choice_that_was_measured_is_not_measured_again(
    make_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
):
    """The full search leaves nothing to be learnt."""
    run = make_run("search=full")
    run.profiled()._choose()
    assert run.attempts_at(KNEE) == [Verdict.success]
    assert "was not measured" not in capsys.readouterr().out


def test_a_choice_that_does_not_fit_makes_way_for_a_smaller_one(make_run: Callable[..., Run]):
    """What runs out of memory in the probe is infeasible, and the next choice is measured before it is taken."""
    run = make_run()
    measured = run.profiled()
    run.scheduler.oom_from = 64
    measured._choose()
    assert run.attempts_at(KNEE) == [Verdict.cuda_oom]
    assert KNEE.name in read_json(run.folder.fit)["infeasible"]
    assert run.selection["measured"]
    assert run.selection["batch_per_rank"] < 64


def test_a_controller_killed_at_every_step_of_it_goes_on(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Before and after everything that is made durable: each choice is measured once, and the last is written down."""
    run = make_run()
    run.profiled()
    kills = Kills(tmp_path / "survived.txt")

    monkeypatch.setattr(
        Journal, "_append", kills.around(Journal._append, lambda self, event, **values: f"{event} {values.get('job')}")
    )
    monkeypatch.setattr(controller, "write_json", kills.around(controller.write_json, lambda path, value: path.name))
    for _ in range(40):
        try:
            run.controller()._choose()
            break
        except Killed:
            continue
    assert {"after selection.json", "after fit.json", f"after verdict {profile_job(KNEE)}"} <= set(kills.points())
    assert run.attempts_at(KNEE).count(Verdict.success) == 1
    assert len(list((run.folder.path / profile_job(KNEE)).glob("attempt-*/claim"))) == 1
    assert (run.selection["num_nodes"], run.selection["batch_per_rank"]) == (4, 64)
    assert run.selection["measured"]


def test_a_choice_is_taken_as_predicted_if_so_asked(make_run: Callable[..., Run]):
    """Without `search.verify_choice` the choice is not measured, and the record says so."""
    run = make_run("search.verify_choice=false")
    run.profiled()._choose()
    assert run.attempts_at(KNEE) == []
    assert not run.selection["measured"]


class Refuses(Measures):
    """Takes no job of more than two nodes."""

    one_host = False

    def why_rejected(self, request: JobRequest) -> str | None:
        return "QOSMaxNodePerJobLimit" if request.num_nodes > 2 else None

    def longest_job_min(self, node_type: str) -> int | None:
        return None

    def max_attempts(self) -> int | None:
        return None


@pytest.mark.parametrize("search", ["partial", "full", "adaptive"])
def test_nodes_that_the_scheduler_refuses_are_not_chosen(
    make_run: Callable[..., Run], rank_meta: Callable[..., dict[str, Any]], search: str
):
    """Whatever the models promise for more nodes, their jobs would be refused in the training as well."""
    run = make_run("objective=time", f"search={search}", "grid.min_nodes=1")
    run.scheduler = Refuses(run.settings)
    run.scheduler.rank_meta = rank_meta
    small = dataclasses.replace(run.settings, grid=dataclasses.replace(run.settings.grid, max_nodes=2))
    Run(small, run.folder, run.scheduler).profiled()  # so that there is something to go on with
    wide = run.controller()
    wide._fit(wide._profile())
    wide._choose()
    assert run.selection["num_nodes"] == 2
    why = {c["num_nodes"]: c["why_infeasible"] for c in run.selection["candidates"] if not c["feasible"]}
    assert "would not accept its job: QOSMaxNodePerJobLimit" in why[4]
