"""What the controller does grows with the points it measures, and no faster: counted, not timed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.benchmarks import controller_load, simulated_slurm
from tula_hpc.control import journal
from tula_hpc.ranks import timings

POINTS = (20, 40)
RANKS = 16


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Counter[str]]:
    """What was done to profile and fit runs of some sizes on a simulated Slurm: calls of functions and commands."""
    return {points: _done(points, tmp_path_factory.mktemp(f"load-{points}")) for points in POINTS}


def _done(points: int, folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))  # what another one was told last does not count
        controller_load.prepare(folder, points, RANKS)
        for module, name in ((timings, "read_json"), (journal, "read_json"), (journal, "sync_folder")):
            _count(patch, found, module, name)
        controller_load.profile_and_fit(folder, points, RANKS)
    found.update(simulated_slurm.calls(str(folder / "slurm"))[0])
    found["candidates measured"] = len(json.loads(next(folder.glob("runs/*/fit.json")).read_text())["points"])
    return found


def _count(patch: pytest.MonkeyPatch, found: Counter[str], module: object, name: str) -> None:
    function = getattr(module, name)

    def counted(*arguments: object) -> object:
        found[f"{module.__name__}.{name}"] += 1  # type: ignore[attr-defined]
        return function(*arguments)

    patch.setattr(module, name, counted)


@pytest.mark.parametrize("points", POINTS)
def test_each_rank_record_is_read_once(done: dict[int, Counter[str]], points: int):
    """From the first look to the fit, nothing that a rank wrote is read a second time."""
    ranks = sum(candidate.world_size for candidate in controller_load.grid(points, RANKS))
    assert done[points]["candidates measured"] == points
    assert done[points]["tula_hpc.ranks.timings.read_json"] == ranks


@pytest.mark.parametrize("command", ["sbatch", "squeue"])
def test_slurm_is_asked_no_more_often_for_more_points(done: dict[int, Counter[str]], command: str):
    """A look asks once for all jobs, and points on as many nodes share a submission."""
    few, many = (done[points][command] for points in POINTS)
    assert many == few


def test_the_journal_is_flushed_per_submission_and_look(done: dict[int, Counter[str]]):
    """Events written together share one flush of their folder, and a fresh journal has nothing to read back."""
    few, many = (done[points]["tula_hpc.control.journal.sync_folder"] for points in POINTS)
    assert many == few
    assert done[max(POINTS)]["tula_hpc.control.journal.read_json"] == 0
