"""The throw-away Slurm is a real one: what the other tests take for granted about it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .cluster import PATIENCE_S, SlurmClusterError, ThrowawaySlurm, wait_until

WRITE_MANIFEST = """
import json, os, socket
task = os.environ["SLURM_ARRAY_TASK_ID"]
with open(f"manifest-{task}.json", "w") as file:
    json.dump({"task": int(task), "host": socket.gethostname()}, file)
"""

MEET = """
import json, os, socket, subprocess
names = subprocess.check_output(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], text=True).split()
rank = int(os.environ["SLURM_PROCID"])
seen = {"host": socket.gethostname(), "addresses": [socket.gethostbyname(name) for name in names]}
if rank == 0:
    with socket.create_server((socket.gethostbyname(names[0]), 29000)) as server:
        server.settimeout(120)
        connection, peer = server.accept()
        seen["peer"] = peer[0]
        connection.close()
else:
    for _ in range(2400):
        try:
            connection = socket.create_connection((names[0], 29000), timeout=120)
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.05)
    seen["peer"] = connection.getpeername()[0]
    connection.close()
with open(f"rank-{rank}.json", "w") as file:
    json.dump(seen, file)
"""

EXCEED_MEMORY = "print(len(b'x' * (600 << 20)))"


def submit(slurm: ThrowawaySlurm, folder: Path, program: str, *options: str, with_srun: bool = False) -> str:
    """Submit a Python program to run in the folder and return the job's id; its output goes to job-*.log."""
    (folder / "program.py").write_text(program)
    command = f"{'srun ' if with_srun else ''}{sys.executable} program.py"
    logs = f"--output={folder}/job-%A-%a.log"
    return slurm.run("sbatch", "--parsable", f"--chdir={folder}", logs, *options, f"--wrap={command}").strip()


def test_hosts_are_idle_and_have_their_own_names(slurm: ThrowawaySlurm) -> None:
    """Four hosts are idle, and a task on each sees that host's name and not the machine's."""
    assert slurm.node_states() == {f"tula-n{index}": "idle" for index in (1, 2, 3, 4)}
    assert sorted(slurm.run("srun", "--nodes=4", "hostname").split()) == slurm.node_names


def test_array_tasks_run_on_hosts_of_their_own(slurm: ThrowawaySlurm, tmp_path: Path) -> None:
    """An array of four tasks that want a whole host each runs on four hosts, and every task leaves its manifest."""
    submit(slurm, tmp_path, WRITE_MANIFEST, "--array=0-3", "--nodes=1", "--exclusive")
    slurm.wait_empty()
    manifests = [json.loads((tmp_path / f"manifest-{task}.json").read_text()) for task in range(4)]
    assert [manifest["task"] for manifest in manifests] == [0, 1, 2, 3]
    assert sorted(manifest["host"] for manifest in manifests) == slurm.node_names


def test_step_over_its_memory_is_killed(slurm: ThrowawaySlurm, tmp_path: Path) -> None:
    """A step that exceeds --mem is killed by its cgroup, and both accounting and the job's log say why."""
    job_id = submit(slurm, tmp_path, EXCEED_MEMORY, "--mem=200", with_srun=True)
    slurm.wait_empty()

    def step_state() -> str:
        rows = slurm.sacct(job_id, "JobID", "State")
        return next((row["State"] for row in rows if row["JobID"] == f"{job_id}.0"), "not yet recorded")

    wait_until(lambda: step_state() == "OUT_OF_MEMORY", PATIENCE_S, "the step to be OUT_OF_MEMORY", step_state)
    (log,) = tmp_path.glob("job-*.log")
    assert "oom_kill" in log.read_text() or "oom-kill" in log.read_text()
    assert str(600 << 20) not in log.read_text()


def test_ranks_on_two_hosts_meet_over_the_network(slurm: ThrowawaySlurm, tmp_path: Path) -> None:
    """Two ranks on two hosts resolve each other's names and connect over TCP from and to the hosts' own addresses."""
    submit(slurm, tmp_path, MEET, "--nodes=2", "--ntasks-per-node=1", with_srun=True)
    slurm.wait_empty()
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    addresses = [slurm.settings.address(first["host"]), slurm.settings.address(second["host"])]
    assert first["host"] != second["host"]
    assert first["addresses"] == second["addresses"] == addresses
    assert [second["peer"], first["peer"]] == addresses


def test_dead_host_is_down_until_it_is_restarted(slurm: ThrowawaySlurm) -> None:
    """A host that dies without a word is seen as down, and is used again after a restart."""
    slurm.kill_node("tula-n4")
    slurm.wait_node_state("tula-n4", "down")
    slurm.restart_node("tula-n4")
    slurm.wait_idle()


def test_frozen_controller_answers_nothing_until_thawed(slurm: ThrowawaySlurm) -> None:
    """Commands against a frozen controller end with an error, and work again once it is thawed."""
    slurm.freeze_controller()
    with pytest.raises(SlurmClusterError, match="squeue"):
        slurm.run("squeue")
    slurm.thaw_controller()
    slurm.wait_idle()


def test_queue_is_known_without_accounting(slurm: ThrowawaySlurm, tmp_path: Path) -> None:
    """While the accounting daemon is away sacct fails, jobs still run, and the controller still remembers them."""
    slurm.stop_accounting()
    with pytest.raises(SlurmClusterError, match="sacct"):
        slurm.sacct("1", "JobID")
    job_id = submit(slurm, tmp_path, "print('done')")
    slurm.wait_empty()
    assert {"JobID": job_id, "State": "COMPLETED"} in slurm.squeue("JobID", "State")
    slurm.start_accounting()
