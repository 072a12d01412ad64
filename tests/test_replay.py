"""Replays what was measured on real GPUs: the records read, and the models predict what was not shown to them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tula_hpc.candidates import Candidate
from tula_hpc.control.journal import Journal
from tula_hpc.control.verdicts import Verdict
from tula_hpc.models.memory import fit_memory
from tula_hpc.models.posterior import SIZES, correction
from tula_hpc.models.pricing import NodeHourPrice
from tula_hpc.models.search import SearchMode, next_round
from tula_hpc.models.selection import candidate_table, select
from tula_hpc.models.step_time import fit_step_time
from tula_hpc.ranks.timings import read_point
from tula_hpc.report import write_report
from tula_hpc.runs import RunFolder, read_json

RECORD = RunFolder(Path(__file__).parent / "data" / "h100x4-resnet50-synthetic")
TRAIN_SAMPLES = 65536


@pytest.fixture(scope="module")
def points() -> pd.DataFrame:
    """The measured table, read again from the ranks' files."""
    measured = [a for a in Journal(RECORD.journal).state().attempts.values() if a.verdict is Verdict.success]
    rows: list[dict[str, Any]] = [
        read_point(RECORD.attempt(a.job, a.number), Candidate(a.num_nodes, a.batch_per_rank))
        for a in measured
        if a.job != "train"
    ]
    return pd.DataFrame(rows).drop(columns=["hosts"])


@pytest.fixture(scope="module")
def corners(points: pd.DataFrame) -> pd.DataFrame:
    """What a partial search would have measured of it."""
    grid = [Candidate(int(r.num_nodes), int(r.batch_per_rank)) for r in points.itertuples()]
    wanted = {(c.num_nodes, c.batch_per_rank) for c in next_round("partial", grid, set(), set()).candidates}
    chosen = [pair in wanted for pair in zip(points["num_nodes"], points["batch_per_rank"], strict=True)]
    return points.loc[chosen]


def test_the_ranks_files_give_the_stored_points(points: pd.DataFrame):
    """Every rank's file is whole, and the table in fit.json is the one they make."""
    stored = pd.DataFrame(read_json(RECORD.fit)["points"])
    assert len(points) == 17
    merged = points.merge(stored, on=["num_nodes", "batch_per_rank"], suffixes=("", "_stored"))
    assert np.allclose(merged["step_time_s"], merged["step_time_s_stored"])


def test_running_out_of_memory_is_on_record_for_each_cluster():
    """Batch 1024 a rank did not fit on 1, 2 and 4 GPUs, and is told from an attempt that never began."""
    state = Journal(RECORD.journal).state()
    for nodes in (1, 2, 4):
        last = state.last(f"profile/n{nodes:03d}-b01024")
        assert last is not None
        assert last.verdict is Verdict.cuda_oom
        assert "CUDA out of memory" in last.reason
    assert [a.verdict for a in state.of("profile/n004-b01024")] == [Verdict.never_started, Verdict.cuda_oom]


def test_corners_predict_the_other_step_times(points: pd.DataFrame, corners: pd.DataFrame):
    """Fitted to the six corners, the overlap form is within 10 % (median) on the points it has not seen."""
    unseen = points.drop(index=corners.index)
    errors = np.abs(fit_step_time(corners, "overlap").predict(unseen) / unseen["step_time_s"] - 1)
    assert float(np.median(errors)) < 0.10


def test_overlap_describes_nvlink_better_than_the_sum(points: pd.DataFrame):
    """Where communication hides behind computation the additive form of the paper is the worse description."""
    assert fit_step_time(points, "overlap").median_error < fit_step_time(points, "additive").median_error


def test_memory_of_small_batches_foretells_the_large_one(points: pd.DataFrame):
    """From batches up to 256 the memory of 512 is predicted within 5 %, and 1024 is never called feasible."""
    seen = points.loc[points["batch_per_rank"] <= 256]
    fit = fit_memory(seen, on_gpus=True)
    measured = points.loc[points["batch_per_rank"] == 512, "memory_gib"].max()
    assert float(fit.predict(512)) == pytest.approx(measured, rel=0.05)
    assert 512 <= fit.max_batch_per_rank(fraction=0.9) < 1024


def test_the_partial_search_chooses_about_as_well_as_the_full_one(points: pd.DataFrame, corners: pd.DataFrame):
    """The fastest candidate by six corners takes at most 5 % longer than the fastest by measurement."""
    grid = [Candidate(int(r.num_nodes), int(r.batch_per_rank)) for r in points.itertuples()]
    fit, memory = fit_step_time(corners, "overlap"), fit_memory(corners)
    price, limit = NodeHourPrice(2.48), float(corners["limit_gib"].min())
    table = candidate_table(grid, fit, memory, price, TRAIN_SAMPLES, 1, limit, 0.9, [], corners)
    choice = select(table, "time", 0.0).candidate
    steps = {c: c.steps_per_epoch(TRAIN_SAMPLES) for c in grid}
    seconds = {
        Candidate(int(r.num_nodes), int(r.batch_per_rank)): float(r.step_time_s)  # type: ignore[arg-type]
        for r in points.itertuples()
    }
    measured = {c: steps[c] * seconds[c] for c in grid}
    assert measured[choice] <= 1.05 * min(measured.values())


def test_a_report_is_made_of_the_record(tmp_path: Path):
    """The report needs nothing but the text records, wherever they lie."""
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(RECORD.path, copy.path)
    write_report(copy)
    page = copy.report.read_text(encoding="utf-8")
    assert "4 nodes" in page
    assert "H100" in page


@pytest.mark.parametrize("turned", [False, True], ids=["first day", "second day"])
def test_another_day_measures_what_one_day_promised(turned: bool):
    """The same configurations on another machine of that kind, a day later: about nine of ten times lie in the 90 %
    intervals, of what was measured as of what was predicted from the corners, and the fastest remain the fastest."""
    days = [
        pd.read_csv(RECORD.path.parent / name) for name in ("step-times/h200-10gbit.csv", "paper-small/step-times.csv")
    ]
    first, second = (day[day["gpus_per_node"] == 1] for day in (days[::-1] if turned else days))
    inside: dict[str, list[bool]] = {"all": [], "corners": []}
    for model in sorted(set(first["model"])):
        known = first[first["model"] == model].reset_index(drop=True)
        again = second[second["model"] == model].merge(known[SIZES], on=SIZES)
        grid = [Candidate.from_record(row) for row in known.to_dict("records")]
        corners = set(next_round(SearchMode.partial, grid, (), ()).candidates)
        for name, seen in (("all", known), ("corners", known[[c in corners for c in grid]])):
            fit = fit_step_time(seen)
            corrected = correction(fit, seen, again)
            low, high = (bound * corrected for bound in fit.interval(again))
            inside[name] += list((again["step_time_s"] >= low) & (again["step_time_s"] <= high))
            rate = again["num_nodes"] * again["batch_per_rank"]
            best = int(np.argmin(fit.predict(again) * corrected / rate))
            assert (again["step_time_s"] / rate).iloc[best] == (again["step_time_s"] / rate).min()
    assert len(inside["all"]) == 43
    assert min(np.mean(inside["all"]), np.mean(inside["corners"])) > 0.8
