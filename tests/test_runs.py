from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tula_hpc.errors import RecordError
from tula_hpc.runs import RunFolder, find_run, read_json, safe_tag, write_json, write_text


def test_a_run_folder_is_its_owners_alone(run_folder: RunFolder):
    """Others on the login node cannot look into a run."""
    assert stat.S_IMODE(run_folder.path.stat().st_mode) == 0o700


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    """A file is either the old one or the new one, and nothing is left beside it."""
    path = tmp_path / "file.json"
    write_json(path, {"value": 1})
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"value": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert read_json(path)["value"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "missing"), ('{"version": 1, "a"', "not whole"), ("[]", "version None"), ('{"version": 99}', "version 99")],
)
def test_records_that_cannot_be_trusted_are_refused_by_name(tmp_path: Path, text: str | None, words: str):
    """Missing, torn and foreign records are told apart, and the file is named."""
    path = tmp_path / "fit.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecordError, match=words) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_a_torn_last_line_of_metrics_is_passed_over(run_folder: RunFolder):
    """A crash in the middle of a line loses that line only."""
    write_text(run_folder.metrics, '{"epoch": 1}\n{"epoch": 2}\n{"epo')
    assert [line["epoch"] for line in run_folder.read_metrics()] == [1, 2]


def test_a_run_is_found_by_the_beginning_of_its_name(tmp_path: Path):
    """A user need not type a whole folder name; an ambiguous one lists what there is."""
    for name in ("alpha-1", "alpha-2", "beta-1"):
        write_text(tmp_path / name / "plan.json", "")
    assert find_run("beta", str(tmp_path)).path.name == "beta-1"
    with pytest.raises(RecordError, match="several runs") as caught:
        find_run("alpha", str(tmp_path))
    assert "alpha-2" in str(caught.value)
    with pytest.raises(RecordError, match="not a run folder"):
        find_run("gamma", str(tmp_path))


def test_tags_hold_nothing_a_shell_or_squeue_minds():
    """Spaces, quotes, commas and letters of other alphabets do not reach a job's name."""
    assert safe_tag("näme, with 'quotes' %j") == "n-me-with-quotes-j"
