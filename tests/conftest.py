from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tula_hpc.composition import compose
from tula_hpc.config import Settings
from tula_hpc.runs import RunFolder

# One thread a process: the test machines have few cores, and ranks inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TINY = [
    "+experiment=quickstart",
    "data.train_samples=256",
    "data.test_samples=97",
    "training.epochs=2",
    "search.warmup_steps=1",
    "search.timed_steps=4",
    "search.compute_steps=3",
    "grid.max_batch_per_rank=64",
    "method.small_batch=16",
]

# Only one throw-away Slurm runs at a time, so its tests are one unit of work for one process of `pytest -n`.
ONE_UNIT = "tests/slurm/"
# What takes minutes is begun first, or one process would still be at it when the others have ended.
LONGEST = (
    ONE_UNIT,
    "tests/test_cli.py",
    "tests/test_slow_training.py",
    "tests/test_transformers.py",
    "tests/test_methods.py",
    "tests/test_gradient_trace.py",
    "tests/test_packed.py",
    "tests/test_paper.py",
    "tests/test_verbs.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `pytest -n` the tests of a file stay together, and share its fixtures; all those of Slurm do."""
    if config.option.dist != "load":
        return None  # the user has asked for another way
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ONE_UNIT if nodeid.startswith(ONE_UNIT) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Files(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of `pytest -n`, the longest files first; alone, the order is that of the names."""
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: next((i for i, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))
        )


@pytest.fixture
def tiny_overrides() -> list[str]:
    """Overrides of a run that takes seconds."""
    return list(TINY)


@pytest.fixture
def tiny_settings(tmp_path: Path) -> Callable[..., Settings]:
    """Settings of a run that takes seconds, composed as a user's are; takes overrides."""

    def make(*overrides: str) -> Settings:
        return compose([*TINY, f"run_root={tmp_path}/runs", *overrides])

    return make


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """Runs a function of a test module in two processes that are joined over gloo."""
    from two_ranks import two_processes

    with two_processes(tmp_path_factory.mktemp("ranks")) as run:
        yield run


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / "tiny-0123456789")
    run.create()
    return run


@pytest.fixture
def rank_meta() -> Callable[..., dict[str, Any]]:
    """What a rank writes beside its rows; takes changes."""

    def make(**changes: Any) -> dict[str, Any]:
        parts = dict.fromkeys(
            ("param_gib", "grad_gib", "optimizer_gib", "activation_gib", "batch_gib", "outside_gib"), 0.1
        )
        memory = {"memory_gib": 0.6, "limit_gib": 8.0, "parts": parts, "allocator_retries": 0}
        meta = {
            "world_size": 2,
            "batch_per_rank": 64,
            "host": "n1",
            "device": "CPU",
            "compute_step_s": 0.08,
            "allreduce_s": 0.01,
            "gradient_bytes": 2**20,
            "memory": memory,
        }
        return {**meta, **changes}

    return make


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put commands on the path that print a text, and end with a code, in place of Slurm's.

    Gives the file in which each call leaves a line with its arguments; a second one of the same name takes its place.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))  # what is known of another site does not count

    def make(name: str, text: str = "", code: int = 0, on_stderr: bool = False) -> Path:
        (folder / f"{name}.txt").write_text(text)
        log = folder / f"{name}.log"
        script = folder / f".{name}"
        script.write_text(
            f'#!/bin/sh\necho "$@" >> "{log}"\ncat "{folder}/{name}.txt"{" >&2" if on_stderr else ""}\nexit {code}\n'
        )
        script.chmod(0o755)
        script.replace(folder / name)
        return log

    return make
