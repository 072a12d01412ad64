"""A workload whose faults are switched on by files, so that a test decides when something goes wrong, and a command
line in the background to watch while it does."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.runs import RunFolder

from .cluster import ThrowawaySlurm, wait_until
from .command import environment

MODEL = '''
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tula_hpc.ranks.workloads import small_cnn


class OutOfMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free.")


class Faulty(torch.nn.Module):
    """In training steps, on the last rank only: slow, waits, hangs or fails while a file of that name is there.

    From the batch `from_batch` on, that is; slow it is with any, so that the largest batch is the fastest.
    """

    def __init__(self, folder, from_batch):
        super().__init__()
        self.net = small_cnn(1, 8, 10, 8)
        self.folder, self.from_batch = Path(folder), from_batch

    def on(self, fault):
        return (self.folder / fault).exists()

    def forward(self, images):
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self.training and rank == ranks - 1 and self.on("slow"):
            time.sleep(0.2)
        if self.training and rank == ranks - 1 and len(images) >= self.from_batch:
            while self.on("hold"):
                time.sleep(0.02)
            while self.on("hang"):
                time.sleep(1)
            if self.on("oom-forward"):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free.")
            if self.on("oom-backward"):
                images = OutOfMemoryInBackward.apply(images.requires_grad_())
            if self.on("bug"):
                raise ValueError("a mistake in the model")
        return self.net(images)
'''

WORKLOAD = """
name: faulty
model: {{_target_: faulty_model.Faulty, folder: "{folder}", from_batch: {from_batch}}}
dataset: {{_target_: tula_hpc.ranks.workloads.digits}}
train_samples: 1437
test_samples: 360
input_shape: [1, 8, 8]
num_classes: 10
"""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, 600, what, lambda: "not yet")


@dataclass
class Tula:
    """The command line of a user who works in `folder`, where the faulty workload lies."""

    folder: Path
    overrides: list[str]
    from_batch: int = 0
    driver: str | None = None
    """A program to run in the place of the command line; it calls it."""
    process: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        (self.folder / "workload").mkdir(exist_ok=True, parents=True)
        model = self.folder / "faulty_model.py"
        if not model.exists():  # a job may be reading it
            model.write_text(MODEL)
        text = WORKLOAD.format(folder=self.folder, from_batch=self.from_batch)
        (self.folder / "workload" / "faulty.yaml").write_text(text)

    @property
    def arguments(self) -> list[str]:
        return [
            "--config-dir",
            str(self.folder),
            *self.overrides[:1],
            "workload=faulty",
            "cluster=slurm",
            "cluster.poll_interval_s=0.5",
            "cluster.file_lag_s=3",
            "cluster.memory_gib=1.5",
            "grid.min_batch_per_rank=32",
            *self.overrides[1:],
        ]

    def start(self) -> None:
        program = ["-m", "tula_hpc"] if self.driver is None else ["-c", self.driver]
        command = [sys.executable, *program, *self.arguments]
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def finish(self) -> str:
        """What the command printed; it must have ended well."""
        code, text = self.end()
        assert code == 0, text
        return text

    def end(self) -> tuple[int, str]:
        """Exit code and output, once the command has ended by itself."""
        assert self.process is not None
        text, _ = self.process.communicate(timeout=1800)
        return self.process.returncode, text

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def switch_on(self, fault: str) -> None:
        (self.folder / fault).touch()

    def switch_off(self, fault: str) -> None:
        (self.folder / fault).unlink()

    @property
    def run(self) -> RunFolder:
        """The run, as soon as it exists."""
        wait_for(lambda: any(self.folder.glob("runs/*/config.yaml")), "a run folder")
        (config,) = self.folder.glob("runs/*/config.yaml")
        return RunFolder(config.parent)

    def attempts(self, job: str) -> list[Attempt]:
        return Journal(self.run.journal).state().of(job)

    def wait_submitted(self, job: str, number: int = 1) -> Attempt:
        """The attempt, as soon as its id is on record."""

        def submitted() -> bool:
            attempts = self.attempts(job)
            return len(attempts) >= number and attempts[number - 1].job_id is not None

        wait_for(submitted, f"the id of {job} attempt {number}")
        return self.attempts(job)[number - 1]

    def wait_claimed(self, job: str, number: int = 1) -> Attempt:
        """The attempt, as soon as its rank 0 works and its id is on record."""
        claim = self.run.attempt(job, number).claim
        wait_for(lambda: (claim / "launch.json").exists(), f"{job} attempt {number} to begin")
        return self.wait_submitted(job, number)

    def verdicts(self, job: str) -> list[str]:
        return [a.verdict.value if a.verdict else "none" for a in self.attempts(job)]

    def ran(self, job: str) -> int:
        """How many attempts at a job a rank has worked on."""
        return sum(self.run.attempt(job, a.number).claim.exists() for a in self.attempts(job))


def submissions(slurm: ThrowawaySlurm, run: RunFolder) -> list[str]:
    """Names of all of the run's jobs that Slurm remembers, array elements one by one."""
    return [row["NAME"] for row in slurm.squeue("NAME") if run.path.name[-10:] in row["NAME"]]
