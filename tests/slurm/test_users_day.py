"""The README's "A user's day", command by command, as printed there."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tula_hpc.runs import read_json

from .cluster import ThrowawaySlurm, wait_until
from .command import environment, named_run, tula

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
DAY = README.partition("### A user's day")[2].partition("\n### ")[0]
# a choice that happens to be a batch between the measured ones is not measured, which would be another job
SOON = ["cluster.poll_interval_s=0.5", "cluster.file_lag_s=3", "search.verify_choice=false"]


def block(start: str) -> str:
    """The code block of the README whose first line begins with `start`."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return next(text for text in blocks if text.startswith(start))


def commands() -> list[list[str]]:
    """The arguments of the day's commands, in their order; a command that starts a run looks at its jobs often."""
    blocks = re.findall(r"^```bash\n(.*?)^```", DAY, re.DOTALL | re.MULTILINE)
    found = [shlex.split(line)[3:] for text in blocks for line in text.splitlines()]
    return [[*arguments, *(SOON if "--config-dir" in arguments else [])] for arguments in found]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The folder of a user who has written the files."""
    (tmp_path / "mine.py").write_text(block("# mine.py"))
    for name, start in (
        ("workload/spirals", "# conf/workload/spirals.yaml"),
        ("experiment/spirals", "# @package _global_"),
        ("cluster/mysite", "# conf/cluster/mysite.yaml"),
    ):
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block(start))
    return tmp_path


def test_a_users_day(slurm: ThrowawaySlurm, work: Path):
    """Each command does what the text around it says."""
    plan, run_it, status, attach, logs, cheapest, longer, changed, list_all = commands()

    answer = tula(work, *plan)
    assert answer.stdout.strip().splitlines()[-1] == "nothing was submitted", answer.stderr

    started = subprocess.Popen(
        [sys.executable, "-m", "tula_hpc", *run_it],
        cwd=work, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_until(lambda: any(work.glob("runs/*/journal/*-submitted.json")), 300, "the first jobs")
    started.send_signal(signal.SIGINT)
    text, _ = started.communicate(timeout=300)
    assert "detached from the run; its jobs in Slurm go on" in text

    answer = tula(work, *status)
    assert "no controller works on it" in answer.stdout
    answer = tula(work, *attach)
    first = named_run(answer)
    assert f"report: {first.report}" in answer.stdout
    assert first.train_result.exists()
    assert tula(work, *logs).returncode == 0

    for arguments in (cheapest, longer):
        answer = tula(work, *arguments)
        run = named_run(answer)
        assert run != first
        assert "taken over" in answer.stdout
        assert "profile on" not in answer.stdout
        assert not run.train.exists()
    assert read_json(named_run(tula(work, *cheapest)).selection)["objective"] == "cost"

    (work / "mine.py").write_text((work / "mine.py").read_text() + "# tidied\n")
    answer = tula(work, *changed)
    anew = named_run(answer)
    assert anew != first
    assert "profile on" in answer.stdout
    assert "taken over" not in answer.stdout
    listed = tula(work, *list_all).stdout
    assert listed.count("spirals-") == 4
    assert first.path.name in listed
