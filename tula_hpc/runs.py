"""The run folder: every path of a run in one place, and how its files are written and read.

    runs/<experiment>-<signature>/
      config.yaml  plan.json  journal/
      profile/<candidate>/attempt-<n>/rank-0003.csv  rank-0003.json
      fit.json  selection.json
      probe/<candidate>/attempt-<n>/      as in profile/, measured beside the training
      train/attempt-<n>/  train/metrics.jsonl  train/result.json  train/checkpoints/  train/tensorboard/
      report.html  report/*.png
      scheduler/                 batch scripts and logs; nothing in it is ever read as a record

A stage is done when its file exists: files are written under a temporary name, flushed to disk and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tula_hpc.errors import RecordError, RecordMissing

FORMAT_VERSION = 1


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write into that takes the place of `path` when all is written: a reader sees the whole of it or what
    was there before, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of writing that do not say where, as on a full disk, speak of `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def write_text(path: Path, text: str) -> None:
    """Put `text` in the place of what the file held."""
    with replacing(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_text(value: dict[str, Any]) -> str:
    """A JSON object that carries the format's version, as it stands in a file."""
    return json.dumps({"version": FORMAT_VERSION, **value}, indent=1, allow_nan=False) + "\n"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`write_text` of `json_text`."""
    write_text(path, json_text(value))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        RecordMissing: If there is no such file.
        RecordError: If it is torn or of another format version.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordMissing(f"{path} is missing") from None
    except ValueError as error:
        raise RecordError(f"{path} is not whole ({error}); delete it and run the command again") from None
    if not isinstance(value, dict) or value.get("version") != FORMAT_VERSION:
        found = value.get("version") if isinstance(value, dict) else None
        raise RecordError(
            f"{path} has format version {found}, this tula_hpc reads {FORMAT_VERSION}; use the version that wrote it, "
            "or delete it and run the command again"
        )
    return value


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @classmethod
    def of(cls, run_root: str, name: str, signature: str) -> RunFolder:
        return cls(Path(run_root).expanduser().absolute() / f"{name}-{signature}")

    def create(self) -> None:
        """Make the folder, readable by its owner only: it holds the user's data paths, code paths and models."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def lease(self) -> Path:
        """Who works on the run; there while somebody does."""
        return self.path / "controller.json"

    @property
    def controller_job(self) -> Path:
        """The Slurm job that was asked to be the controller."""
        return self.path / "controller-job.json"

    @property
    def cancelled(self) -> Path:
        """There once a user has cancelled the run, until one starts it again."""
        return self.path / "cancelled"

    @property
    def tag(self) -> str:
        """How the names of all its jobs begin; the same experiment below another root has other jobs."""
        place = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:6]
        return f"tula-{safe_tag(self.path.name)}-{place}"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def fit(self) -> Path:
        return self.path / "fit.json"

    @property
    def selection(self) -> Path:
        return self.path / "selection.json"

    @property
    def train(self) -> Path:
        return self.path / "train"

    @property
    def metrics(self) -> Path:
        return self.train / "metrics.jsonl"

    @property
    def gradients(self) -> Path:
        """A row a step, in a training that traces its gradients."""
        return self.train / "gradients.csv"

    @property
    def train_result(self) -> Path:
        return self.train / "result.json"

    @property
    def progress(self) -> Path:
        """Where the training is, rewritten every few seconds by rank 0."""
        return self.train / "progress.json"

    def forward_times(self, rank: int) -> Path:
        """What a rank of the training has told of its own forward passes; rewritten a hundred times in a training."""
        return self.train / "forward" / f"rank-{rank:04d}.json"

    @property
    def checkpoints(self) -> Path:
        return self.train / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.train / "tensorboard"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def untrained(self) -> Path:
        """There once a run that was to end with its choice has done so."""
        return self.path / "untrained"

    @property
    def is_finished(self) -> bool:
        """Whether the training has its result and the report was written after it; or none was wanted, and all else is
        done. What a user deletes of it is made again."""
        if not (self.config.exists() and self.plan.exists() and self.selection.exists()):
            return False
        if self.untrained.exists():
            return True
        try:
            return self.report.stat().st_mtime_ns >= self.train_result.stat().st_mtime_ns
        except FileNotFoundError:
            return False

    @property
    def plots(self) -> Path:
        return self.path / "report"

    @property
    def scheduler(self) -> Path:
        return self.path / "scheduler"

    def read_progress(self) -> dict[str, Any]:
        """How many samples the training has seen, and of how many; none before it has told."""
        try:
            return read_json(self.progress)
        except RecordError:
            return {"samples": 0, "of_samples": 1}

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, one an epoch, without a last one that a crash has torn."""
        lines: list[dict[str, Any]] = []
        if not self.metrics.exists():
            return lines
        for text in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not isinstance(line, dict):
                break
            lines.append(line)
        return lines

    def attempt(self, job: str, number: int) -> AttemptFolder:
        """Folder of one attempt at a job; jobs are `profile/<candidate>`, `train` and `probe/<candidate>`."""
        return AttemptFolder(self.path / job / f"attempt-{number}")


@dataclass(frozen=True)
class AttemptFolder:
    """Paths of one attempt at a job: what its ranks were asked, said and left behind."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name.removeprefix("attempt-"))

    @property
    def run(self) -> RunFolder:
        """The run this attempt belongs to: the closest folder above that holds a config.yaml."""
        for folder in self.path.parents:
            if (folder / "config.yaml").exists():
                return RunFolder(folder)
        raise RecordError(f"{self.path} is not inside a run folder: no config.yaml above it")

    def has_successor(self) -> bool:
        """Whether a later attempt at the same job was made."""
        numbers = (p.name.removeprefix("attempt-") for p in self.path.parent.glob("attempt-*"))
        return any(int(number) > self.number for number in numbers if number.isdigit())

    @property
    def request(self) -> Path:
        """What the ranks are asked to do."""
        return self.path / "request.json"

    @property
    def claim(self) -> Path:
        """Folder made by the first job that works on this attempt; a second one finds it and leaves."""
        return self.path / "claim"

    @property
    def launch(self) -> Path:
        """The newest start of the job that holds the claim; a requeued job is another launch."""
        return self.claim / "launch.json"

    @property
    def heartbeat(self) -> Path:
        """Rewritten by rank 0 while the work goes on."""
        return self.path / "heartbeat.json"

    @property
    def leave(self) -> Path:
        """There once the controller wants a training to save and end, because it goes on elsewhere."""
        return self.path / "leave.json"

    def rendezvous(self, launch: str) -> Path:
        """Where rank 0 of one launch says how to reach it; a requeued job is another launch."""
        return self.path / f"rendezvous-{safe_tag(launch)}.json"

    def rank_csv(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.csv"

    def rank_json(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.json"

    def rank_error(self, rank: int) -> Path:
        return self.path / f"error-{rank:04d}.json"

    def rank_log(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.log"

    def turn(self, launch: str) -> Path:
        """Where attempts share a job: whether the first rank of a launch runs this one, or why it does not."""
        return self.path / f"turn-{safe_tag(launch)}.json"

    def rank_end(self, rank: int) -> Path:
        """Where attempts share a job: the end of a rank's process, written by the one that watched it."""
        return self.path / f"ended-{rank:04d}.json"

    def is_over(self, world_size: int) -> bool:
        """Whether the processes of all ranks are known to have ended, in a job that attempts share."""
        return all(self.rank_end(rank).exists() for rank in range(world_size))

    def errors(self) -> list[dict[str, Any]]:
        """What failing ranks of the newest launch wrote before they ended, earliest first: the others mostly report the
        loss of the first.

        Torn files are passed over.
        """
        newest, found = None, []
        with suppress(RecordError):
            newest = read_json(self.launch)["launch"]
        for path in sorted(self.path.glob("error-*.json")):
            with suppress(RecordError):
                found.append(read_json(path))
        found = [error for error in found if newest is None or error.get("launch") in (None, newest)]
        return sorted(found, key=lambda error: error["time"])


def find_run(text: str, run_root: str = "runs") -> RunFolder:
    """The run a user means by a path or by the beginning of a folder name.

    Raises:
        RecordError: If there is none, or several; the message lists what there is.
    """
    path, root = Path(text).expanduser(), Path(run_root).expanduser()
    for exact in (path, root / text):
        if (exact / "plan.json").exists():
            return RunFolder(exact.absolute())
        if (exact / "config.yaml").exists() or (exact / "controller.json").exists():
            raise RecordError(
                f"{exact} has no plan.json: the command that made it ended before anything was planned or submitted; "
                "give that command again"
            )
    runs = sorted(p.parent for p in root.glob("*/plan.json"))
    matching = [p for p in runs if p.name.startswith(text)]
    if len(matching) == 1:
        return RunFolder(matching[0].absolute())
    listing = "\n".join(f"  {p}" for p in (matching or runs)) or f"  (no runs in {root.absolute()}; see run_root=...)"
    problem = "names several runs" if matching else "is not a run folder"
    raise RecordError(f"{text} {problem}; there are:\n{listing}")


def software_versions() -> dict[str, str]:
    """Versions that a later reader of the run folder wants to know; read from package metadata, imports nothing."""
    from importlib import metadata

    versions = {"python": sys.version.split()[0]}
    for package in ("tula-hpc", "torch", "torchvision", "submitit", "hydra-core", "numpy", "scipy", "pandas"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed as a package"
    return versions


def safe_tag(text: str) -> str:
    """Letters, digits and dashes only: what every Slurm command finds again."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") or "run"
