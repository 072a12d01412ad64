"""Who this process is among the ranks of its job. The only reader of rank variables; loads no torch."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

# Launchers we know: variables for rank, world size, rank on the host, and what identifies the launch. Ours comes first:
# it may run inside a Slurm allocation, whose variables then speak of something else.
_LAUNCHERS = (
    ("TULA_RANK", "TULA_WORLD_SIZE", "TULA_LOCAL_RANK", ("TULA_LAUNCH", "TULA_RESTART")),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")),
)


@dataclass(frozen=True)
class Rank:
    """This process among the ranks of its job."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among those of this host; picks the GPU."""
    launch: str
    """Names this start of the job; differs when Slurm requeues it under the same id."""
    owner: str
    """Names the job; the same after a requeue."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def this_rank() -> Rank:
    """Read from the environment of whichever launcher started this process; alone if none did."""
    for rank, world_size, local_rank, launch in _LAUNCHERS:
        if rank in os.environ:
            parts = [os.environ.get(name, "0") for name in launch]
            return Rank(
                int(os.environ[rank]),
                int(os.environ[world_size]),
                int(os.environ[local_rank]),
                "-".join(parts),
                parts[0],
            )
    return Rank(0, 1, 0, f"pid-{os.getpid()}", f"pid-{os.getpid()}")


def this_host() -> str:
    """The host's name, as Slurm knows it where it is in a Slurm job."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def on_one_host() -> bool:
    """Whether all ranks of the launch are on this host, so that they need not find it by its name."""
    return os.environ.get("TULA_ONE_HOST") == "1"
