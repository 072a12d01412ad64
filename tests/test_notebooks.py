"""The notebooks run from top to bottom, hold no output, and begin with words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def test_there_is_one_for_each_question():
    assert {notebook.stem for notebook in NOTEBOOKS} == {
        "where_is_the_knee",
        "how_good_are_the_predictions",
        "does_ags_help",
        "what_would_it_cost",
        "your_own_run",
    }


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path):
    """Its code cells, one after the other in a fresh process: no magics, so a plain interpreter is enough."""
    code = "\n".join("".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "code")
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.strip()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_output(notebook: Path):
    first, *_ = cells(notebook)
    assert first["cell_type"] == "markdown"
    assert "".join(first["source"]).startswith("# ")
    for cell in cells(notebook):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
