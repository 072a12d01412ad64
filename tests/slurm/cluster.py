"""A throw-away real Slurm on one machine, so that tests meet the scheduler itself and not an imitation of it.

Each "host" is a network namespace with its own name, address and, if wanted, link rate; jobs are held to their memory
by cgroups; accounting lives in a private MariaDB. Configuration, ports, logs, state and data base are the cluster's
own, in a temporary folder: a Slurm or a MariaDB that this machine already runs is neither used nor touched. Outside
that folder there are only namespaces and interfaces named after the hosts, lines in /etc/hosts, and munge.

By hand:  python tests/slurm/cluster.py start --nodes 4 --link-rate 1gbit     (and later: stop)
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

NODE_PREFIX = "tula-n"
NODE_LINK_PREFIX = "tula-v"
BRIDGE = "tula-br0"
HOSTS_FILE = Path("/etc/hosts")
HOSTS_MARK = "# throw-away Slurm of the tula_hpc tests"
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_PARENT = CGROUP_ROOT / "system.slice"  # Slurm insists on it for version 2, also where there is no systemd
RECORD_FOLDER = Path("/run/tula-throwaway-slurm")  # fixed, so that a later process finds what a crashed one left behind
CONTROLLER_PORT, ACCOUNTING_PORT, NODE_PORT = 16817, 16819, 16818

CLUSTER = "throwaway"
CONTROLLER, ACCOUNTING, DATABASE = "slurmctld", "slurmdbd", "mariadbd"

USABLE_STATES = ("idle", "mix", "alloc")

PATIENCE_S = 180.0
"""How long whatever takes a moment may take on a machine that is busy with something else."""

PROGRAMS = {  # program: the Debian package that brings it
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "ss": "iproute2",
    "nsenter": "util-linux",
}
ACCOUNTING_PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}


class SlurmClusterError(Exception):
    """The throw-away Slurm could not do what was asked; the message holds the reason and the tails of the logs."""


class CommandFailed(SlurmClusterError):
    """One of Slurm's commands ended with an error."""


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """What the cluster looks like; two clusters with equal settings are interchangeable."""

    num_nodes: int = 4
    """Hosts, 1 to 200."""
    cpus_per_node: int = 2
    """CPUs that Slurm counts per host; may exceed what the machine has, hosts share the real ones."""
    memory_mib_per_node: int = 4000
    """Memory that Slurm counts per host; may exceed what the machine has."""
    link_rate: str | None = None
    """Rate of each host's link in both directions, in tc's words ("1gbit"); None: as fast as the machine."""
    accounting: bool = True
    """Whether there is a slurmdbd, so that sacct answers."""
    min_job_age_s: int = 3600
    """Seconds for which squeue and scontrol remember a finished job; long, so that a test may count a run's jobs."""
    max_array_size: int = 1001
    """One more than the largest array index."""
    kill_wait_s: int = 5
    """Seconds between TERM and KILL when a job is cancelled or over its time."""
    node_timeout_s: int = 20
    """Seconds of silence after which Slurm begins to doubt a host; it calls it down after about twice as long."""
    message_timeout_s: int = 10
    """Seconds a command waits for a controller that does not answer."""
    requeue_wait_s: int = 120
    """Seconds a requeued job waits (reason BeginTime). Also the life time of job credentials, hence not below 10."""
    network: str = "10.77.0"
    """First three numbers of the hosts' /24 network; change it where this one is in use."""
    extra_lines: tuple[str, ...] = ()
    """Further lines of slurm.conf, for the one test that needs them."""

    @property
    def node_names(self) -> list[str]:
        return [f"{NODE_PREFIX}{index}" for index in range(1, self.num_nodes + 1)]

    def address(self, node: str) -> str:
        return f"{self.network}.{node.removeprefix(NODE_PREFIX)}"

    @property
    def login_address(self) -> str:
        """Where the hosts reach the controller, the accounting and an srun on this machine."""
        return f"{self.network}.254"


def missing_reason(settings: SlurmSettings | None = None) -> str | None:
    """None if a throw-away Slurm can run here, else one sentence that says why not."""
    settings = settings or SlurmSettings()
    if os.geteuid() != 0:
        return "a throw-away Slurm needs root, for network namespaces and cgroups"
    programs = PROGRAMS | (ACCOUNTING_PROGRAMS if settings.accounting else {})
    missing = {program: package for program, package in programs.items() if not shutil.which(program, path=_path())}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        return f"a throw-away Slurm needs {', '.join(missing)}; on Debian: apt-get install {packages}"
    try:
        _cgroup_plugin()
    except SlurmClusterError as error:
        return str(error)
    probe = "ip link add probe0 type bridge && ip link add probe1 type veth peer name probe2"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "sh", "-c", probe], capture_output=True, text=True, env=_environment()
    )
    if tried.returncode != 0:
        return f"a throw-away Slurm needs network namespaces with a bridge, refused here: {tried.stderr.strip()}"
    return None


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, detail: Callable[[], str] = str) -> None:
    """Return as soon as the condition holds; after the time limit raise, saying what was waited for. A command that
    fails on the way says nothing: on a busy machine an answer may take longer than Slurm waits."""
    deadline, failure = time.monotonic() + timeout_s, ""
    while True:
        try:
            if condition():
                return
        except CommandFailed as error:
            failure = f"\n{error}"
        if time.monotonic() > deadline:
            raise SlurmClusterError(f"waited {timeout_s:g} s in vain for {what}{failure}\n{detail()}".rstrip())
        time.sleep(0.05)


class ThrowawaySlurm:
    """The cluster, as a context manager. One at a time on a machine: a second start waits, then fails with the reason.

    Args:
        settings: What it looks like.
        lock_wait_s: How long to wait for another process that holds a cluster.
    """

    def __init__(self, settings: SlurmSettings | None = None, lock_wait_s: float = 60.0):
        self.settings = settings or SlurmSettings()
        self.folder = Path()
        self._lock_wait_s = lock_wait_s
        self._undo = contextlib.ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ThrowawaySlurm:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, by_hand: bool = False) -> None:
        """Clean what a crashed start left, then start; return when all hosts are idle.

        Args:
            by_hand: The cluster is to outlive this process; later starts leave it alone until it is stopped.
        """
        reason = missing_reason(self.settings)
        if reason:
            raise SlurmClusterError(reason)
        with contextlib.ExitStack() as undo:  # runs also for Ctrl-C: whatever came up must go
            undo.enter_context(_lock(self._lock_wait_s))
            _refuse_if_kept_by_hand()
            _remove_cluster()
            undo.callback(self._reap)
            undo.callback(_remove_cluster)
            self.folder = Path(tempfile.mkdtemp(prefix="tula-slurm-"))
            _write_record(self.folder, by_hand)
            if _cgroup_plugin() == "cgroup/v2":
                _open_cgroups()
            for name in ("etc", "state", "spool", "log", "run", "database"):
                (self.folder / name).mkdir()
            self._start_munge()
            self._lay_network()
            self._write_configuration()
            if self.settings.accounting:
                self._start_database()
                self.start_accounting()
                self.run("sacctmgr", "-i", "add", "cluster", CLUSTER)
            self.start_controller()
            for node in self.node_names:
                self._start_node(node)
            for node in self.node_names:
                self._wait_answer(node)
            self.wait_idle()
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Kill every daemon and every job, and remove all traces."""
        self._undo.close()

    @property
    def conf_file(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """The variables that make Slurm's commands talk to this cluster."""
        return {"SLURM_CONF": str(self.conf_file)}

    @property
    def node_names(self) -> list[str]:
        return self.settings.node_names

    def run(self, *command: str | Path, timeout_s: float = PATIENCE_S) -> str:
        """Run a command against this cluster and return what it printed; raise with its error text if it fails."""
        arguments = [str(part) for part in command]
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=_environment() | self.env,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            raise CommandFailed(
                f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout

    def node_states(self) -> dict[str, str]:
        """State of each host in sinfo's short words ("idle", "mix", "down*"); empty while the controller is silent."""
        with contextlib.suppress(SlurmClusterError, subprocess.TimeoutExpired):
            lines = self.run("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
            return dict(line.split() for line in lines)
        return {}

    def squeue(self, *fields: str) -> list[dict[str, str]]:
        """All jobs that the controller remembers, array tasks one by one; fields as in `squeue -O` ("JobArrayID")."""
        width = 255
        text = self.run("squeue", "-h", "-r", "-t", "all", "-O", ",".join(f"{field}:{width}" for field in fields))
        rows = [
            [line[start : start + width].strip() for start in range(0, len(line), width)] for line in text.splitlines()
        ]
        return [dict(zip(fields, row, strict=False)) for row in rows]

    def sacct(self, job_id: str, *fields: str) -> list[dict[str, str]]:
        """Accounting's rows of a job and its steps, requeued runs too; fields as in `sacct -o` ("JobID", "State")."""
        text = self.run("sacct", "-n", "-P", "-D", "-j", job_id, "-o", ",".join(fields))
        return [dict(zip(fields, line.split("|"), strict=True)) for line in text.splitlines()]

    def logs_tail(self, num_lines: int = 15) -> str:
        """The end of each daemon's log, for failure messages."""
        parts = []
        for file in sorted((self.folder / "log").glob("*.log")):
            lines = file.read_text(errors="replace").splitlines()
            parts += [f"--- {file.name}", *lines[-num_lines:]]
        return "\n".join(parts)

    def wait_idle(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until every host is idle, which also means that no job runs or winds down."""
        expected = dict.fromkeys(self.node_names, "idle")
        self._wait(lambda: self.node_states() == expected, timeout_s, "idle hosts")

    def wait_node_state(self, node: str, state: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until sinfo's word for a host begins with this state, so "down" also accepts "down*"."""
        self._wait(lambda: self.node_states().get(node, "").startswith(state), timeout_s, f"host {node} to be {state}")

    def wait_empty(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until no job waits or runs any more and every host is idle."""
        self._wait(lambda: not self.run("squeue", "-h").strip(), timeout_s, "an empty queue")
        self.wait_idle(timeout_s)

    def cancel_all(self, timeout_s: float = PATIENCE_S) -> None:
        """Cancel every job, waiting ones too, and wait until all hosts are idle."""
        self.run("scancel", "--user", "root")
        self.wait_empty(timeout_s)

    def kill_node(self, node: str) -> None:
        """A host dies without a word: its link goes first, so that nothing it does in dying reaches the controller."""
        self.run("ip", "link", "set", self._link(node), "down")
        _kill_namespace(node)

    def restart_node(self, node: str) -> None:
        """Bring a killed host back and wait until Slurm uses it again."""
        self.run("ip", "link", "set", self._link(node), "up")
        if self._pid(node) is None:
            self._start_node(node)
        self._wait_answer(node)
        self._wait(
            lambda: self.node_states().get(node) in USABLE_STATES, PATIENCE_S, f"host {node} to be used again", node
        )

    def freeze_controller(self) -> None:
        """The controller hangs: connections are accepted and never answered."""
        self._signal(CONTROLLER, signal.SIGSTOP)

    def thaw_controller(self) -> None:
        """End a freeze. The controller then also works through what it was asked meanwhile."""
        self._signal(CONTROLLER, signal.SIGCONT)

    def stop_controller(self) -> None:
        """The controller ends in good order; jobs go on, commands are refused."""
        self._stop_daemon(CONTROLLER)

    def start_controller(self) -> None:
        """Start the controller, or start it again with the jobs it knew, and wait until it answers."""
        self._start_daemon(CONTROLLER, "slurmctld", "-D")
        self._wait(lambda: "is UP" in self._try("scontrol", "ping"), PATIENCE_S, "the controller to answer", CONTROLLER)

    def stop_accounting(self) -> None:
        """The accounting daemon ends; the controller goes on and keeps its records for later."""
        self._stop_daemon(ACCOUNTING)

    def start_accounting(self) -> None:
        """Start the accounting daemon, or start it again, and wait until it can be asked."""
        self._start_daemon(ACCOUNTING, "slurmdbd", "-D")
        self._wait(
            lambda: self._listens(f":{ACCOUNTING_PORT}"), PATIENCE_S, "the accounting daemon to answer", ACCOUNTING
        )

    def heal(self) -> None:
        """Undo whatever of the above a test left undone; where there is nothing, this takes milliseconds."""
        if self._pid(CONTROLLER) is None:
            self.start_controller()
        self.thaw_controller()
        if self.settings.accounting and self._pid(ACCOUNTING) is None:
            self.start_accounting()
        for node, state in self.node_states().items():
            if self._pid(node) is None:
                self.restart_node(node)
            elif state.startswith("dr"):  # drained or draining: Slurm does so itself where a job would not die
                self.run("scontrol", "update", f"nodename={node}", "state=resume")
        self._wait(self._all_usable, PATIENCE_S, "all hosts to be usable")

    def _all_usable(self) -> bool:
        states = self.node_states()
        return len(states) == self.settings.num_nodes and set(states.values()) <= set(USABLE_STATES)

    def _start_munge(self) -> None:
        """Start the usual munge if it is off; its key is the machine's, and an own one would prove nothing more."""
        if self._answers("munge", "-n"):
            return
        socket_folder = Path("/run/munge")
        socket_folder.mkdir(mode=0o755, exist_ok=True)
        shutil.chown(socket_folder, "munge", "munge")
        self.run("su", "-s", "/bin/sh", "munge", "-c", shutil.which("munged", path=_path()) or "munged")
        self._wait(lambda: self._answers("munge", "-n"), PATIENCE_S, "munge to answer")

    def _lay_network(self) -> None:
        network = self.settings.network
        if f" {network}." in self.run("ip", "-4", "-o", "addr") or f"{network}." in self.run("ip", "-4", "route"):
            raise SlurmClusterError(
                f"the network {network}.0/24 is in use on this machine; choose another one in SlurmSettings.network"
            )
        self.run("ip", "link", "add", BRIDGE, "type", "bridge")
        self.run("ip", "addr", "add", f"{self.settings.login_address}/24", "dev", BRIDGE)
        self.run("ip", "link", "set", BRIDGE, "up")
        for node in self.node_names:
            link, inside = self._link(node), ("ip", "-n", node)
            self.run("ip", "netns", "add", node)
            self.run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", node)
            self.run("ip", "link", "set", link, "master", BRIDGE, "up")
            self.run(*inside, "addr", "add", f"{self.settings.address(node)}/24", "dev", "eth0")
            self.run(*inside, "link", "set", "eth0", "up")
            self.run(*inside, "link", "set", "lo", "up")
        if self.settings.link_rate:
            self.limit_links(self.settings.link_rate)
        names = [f"{self.settings.address(node)} {node} {HOSTS_MARK}\n" for node in self.node_names]
        HOSTS_FILE.write_text(_hosts_without_ours() + "".join(names))

    def limit_links(self, rate: str) -> None:
        """Let each host's link carry so much in both directions from now on, as in `SlurmSettings.link_rate`."""
        limit = ("root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms")
        for node in self.node_names:
            self.run("tc", "qdisc", "replace", "dev", self._link(node), *limit)
            self.run("nsenter", f"--net=/run/netns/{node}", "tc", "qdisc", "replace", "dev", "eth0", *limit)

    def _write_configuration(self) -> None:
        texts = {"slurm.conf": _slurm_conf(self.settings, self.folder), "cgroup.conf": _cgroup_conf()}
        if self.settings.accounting:
            texts["slurmdbd.conf"] = _slurmdbd_conf(self.settings, self.folder)
        for name, text in texts.items():
            file = self.folder / "etc" / name
            file.write_text(text)
            file.chmod(0o600 if name == "slurmdbd.conf" else 0o644)  # slurmdbd refuses anything more open

    def _start_database(self) -> None:
        folder = self.folder / "database"
        socket_file, grant = folder / "socket", folder / "grant.sql"
        small = ("--no-defaults", f"--datadir={folder / 'data'}", "--user=root", "--innodb-log-file-size=8M")
        plain = ("--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve")
        self.run("mariadb-install-db", *small, *plain)
        statements = (
            "create database accounting",
            "create user slurm@localhost",
            "grant all on accounting.* to slurm@localhost",
        )
        grant.write_text("".join(f"{statement};\n" for statement in statements))  # must stand one to a line
        private = (f"--socket={socket_file}", "--skip-networking", f"--init-file={grant}")
        self._start_daemon(DATABASE, "mariadbd", *small, *private)
        self._wait(lambda: self._listens(str(socket_file)), PATIENCE_S, "the data base to answer", DATABASE)

    def _start_node(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        # nsenter and not "ip netns exec": the latter hides the cgroup mounts, without which slurmd refuses to start
        enter = ("nsenter", f"--net=/run/netns/{node}", "unshare", "--uts")
        become_node = 'hostname "$0" && exec slurmd -D -N "$0"'
        if _cgroup_plugin() == "cgroup/v2":
            group = CGROUP_PARENT / node  # of its own, because in the root group slurmd sees no limit of swap
            group.mkdir(exist_ok=True)
            become_node = f"echo $$ > {group}/cgroup.procs && {become_node}"
        self._start_daemon(node, *enter, "sh", "-c", become_node, node)

    def _wait_answer(self, node: str) -> None:
        self._wait(lambda: self._listens(f":{NODE_PORT}", node), PATIENCE_S, f"host {node} to answer", node)

    def _link(self, node: str) -> str:
        return NODE_LINK_PREFIX + node.removeprefix(NODE_PREFIX)

    def _start_daemon(self, name: str, *command: str) -> None:
        """Start in the foreground mode, so that the pid is known at once; in an own session, out of Ctrl-C's reach."""
        if self._pid(name) is not None:
            raise SlurmClusterError(f"{name} is already running")
        environment = _environment() | self.env | {"MYSQL_UNIX_PORT": str(self.folder / "database" / "socket")}
        with open(self.folder / "log" / f"{name}.out", "ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
        (self.folder / "run" / f"{name}.pid").write_text(f"{process.pid}\n")
        self._processes[name] = process

    def _reap(self) -> None:
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def _stop_daemon(self, name: str) -> None:
        self._signal(name, signal.SIGTERM)
        self._wait(lambda: self._pid(name) is None, PATIENCE_S, f"{name} to end")

    def _pid(self, name: str) -> int | None:
        process = self._processes.get(name)
        return process.pid if process is not None and process.poll() is None else None

    def _signal(self, name: str, number: signal.Signals) -> None:
        pid = self._pid(name)
        if pid is None:
            raise SlurmClusterError(f"{name} is not running\n{self.logs_tail()}")
        os.kill(pid, number)

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str, daemon: str | None = None) -> None:
        def check() -> bool:
            if daemon is not None and self._pid(daemon) is None:
                output = (self.folder / "log" / f"{daemon}.out").read_text(errors="replace")
                raise SlurmClusterError(f"{daemon} ended at once:\n{output[-2000:]}")
            return condition()

        wait_until(check, timeout_s, what, self.logs_tail)

    def _listens(self, socket_name: str, node: str | None = None) -> bool:
        """Whether something listens there; asked of the kernel, since a trial connection fills the daemons' logs."""
        where = ("-N", node) if node else ()
        return any(word.endswith(socket_name) for word in self.run("ss", *where, "-Hlntx").split())

    def _answers(self, *command: str) -> bool:
        return subprocess.run(command, capture_output=True, env=_environment() | self.env).returncode == 0

    def _try(self, *command: str) -> str:
        with contextlib.suppress(SlurmClusterError):
            return self.run(*command)
        return ""


def _slurm_conf(settings: SlurmSettings, folder: Path) -> str:
    # job ids never repeat from one cluster to the next, so no folder and no cache can mistake an old job for a new one
    first_job_id = int(time.time() * 10) % 50_000_000 + 1
    size = f"CPUs={settings.cpus_per_node} RealMemory={settings.memory_mib_per_node} State=UNKNOWN"
    node_lines = [f"NodeName={n} NodeAddr={settings.address(n)} Port={NODE_PORT} {size}" for n in settings.node_names]
    nodes, further = "\n".join(node_lines), "\n".join(settings.extra_lines)
    accounting = f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={settings.login_address}
AccountingStoragePort={ACCOUNTING_PORT}
AccountingStoreFlags=job_comment
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
"""
    return f"""\
ClusterName={CLUSTER}
SlurmctldHost={_host_name()}({settings.login_address})
SlurmctldPort={CONTROLLER_PORT}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire={settings.requeue_wait_s}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
# not our .pid files: a daemon empties its file before it writes to it
SlurmctldPidFile={folder}/run/{CONTROLLER}.lock
SlurmdPidFile={folder}/run/%n.lock
SlurmctldLogFile={folder}/log/{CONTROLLER}.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU={settings.memory_mib_per_node // settings.cpus_per_node}
# believe the sizes below, even if the machine is smaller
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
ReturnToService=2
JobRequeue=1
FirstJobId={first_job_id}
SlurmctldTimeout=10
SlurmdTimeout={settings.node_timeout_s}
MessageTimeout={settings.message_timeout_s}
KillWait={settings.kill_wait_s}
MinJobAge={settings.min_job_age_s}
MaxArraySize={settings.max_array_size}
{accounting if settings.accounting else ""}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
{further}
"""


def _slurmdbd_conf(settings: SlurmSettings, folder: Path) -> str:
    return f"""\
AuthType=auth/munge
DbdHost={_host_name()}
DbdAddr={settings.login_address}
DbdPort={ACCOUNTING_PORT}
SlurmUser=root
LogFile={folder}/log/{ACCOUNTING}.log
PidFile={folder}/run/{ACCOUNTING}.lock
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=accounting
"""


def _cgroup_plugin() -> str:
    """Slurm's name for this machine's kind of cgroups; raises if neither kind can hold jobs to their memory."""
    if all(os.access(CGROUP_ROOT / controller, os.W_OK) for controller in ("memory", "freezer")):
        return "cgroup/v1"
    if os.access(CGROUP_ROOT, os.W_OK) and "memory" in _words(CGROUP_ROOT / "cgroup.controllers"):
        # in a container this is rarely the real root, and there groups with processes cannot hand controllers down
        is_real_root = not (CGROUP_ROOT / "cgroup.type").exists()
        if is_real_root or "memory" in _words(CGROUP_ROOT / "cgroup.subtree_control"):
            return "cgroup/v2"
    raise SlurmClusterError(
        f"a throw-away Slurm needs cgroups to hold jobs to their memory: {CGROUP_ROOT} offers neither writable memory "
        "and freezer hierarchies (version 1) nor a writable root that hands down the memory controller (version 2)"
    )


def _open_cgroups() -> None:
    """What systemd does where it runs: without it Slurm finds no memory controller in version 2."""
    CGROUP_PARENT.mkdir(exist_ok=True)
    for folder in (CGROUP_ROOT, CGROUP_PARENT):
        # pids only because Slurm 22.05 overlooks the last controller in the kernel's list, which would be memory
        for controller in {"memory", "pids"} - _words(folder / "cgroup.subtree_control"):
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")


def _words(file: Path) -> set[str]:
    return set(file.read_text().split()) if file.exists() else set()


def _cgroup_conf() -> str:
    lines = [f"CgroupPlugin={_cgroup_plugin()}", "ConstrainRAMSpace=yes"]
    if _cgroup_plugin() == "cgroup/v2":
        # without systemd's help, which would want all hosts of this one machine to be one
        lines += ["IgnoreSystemd=yes"]
    if _cgroup_plugin() == "cgroup/v2" or (CGROUP_ROOT / "memory" / "memory.memsw.limit_in_bytes").exists():
        lines += ["ConstrainSwapSpace=yes", "AllowedSwapSpace=0"]  # else a job over its limit swaps and lives on
    return "\n".join([*lines, ""])


@contextlib.contextmanager
def _lock(wait_s: float) -> Iterator[None]:
    RECORD_FOLDER.mkdir(exist_ok=True)
    with open(RECORD_FOLDER / "lock", "a+") as file:

        def taken() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        def holder() -> str:
            file.seek(0)
            return f"It is held by {file.read().strip()}."

        wait_until(taken, wait_s, "another throw-away Slurm on this machine to stop", holder)
        file.truncate(0)
        file.write(f"process {os.getpid()}: {' '.join(sys.argv)}\n")
        file.flush()
        yield


def _write_record(folder: Path, by_hand: bool) -> None:
    (RECORD_FOLDER / "cluster.json").write_text(json.dumps({"folder": str(folder), "by_hand": by_hand}))


def _recorded_cluster() -> tuple[Path, bool] | None:
    """Folder of the cluster that was last started and not yet removed, and whether it was started by hand."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        record = json.loads((RECORD_FOLDER / "cluster.json").read_text())
        return Path(record["folder"]), bool(record["by_hand"])
    return None


def _refuse_if_kept_by_hand() -> None:
    recorded = _recorded_cluster()
    if recorded is None:
        return
    folder, by_hand = recorded
    conf_file = folder / "etc" / "slurm.conf"
    if by_hand and _own_pid(folder / "run" / f"{CONTROLLER}.pid", conf_file) is not None:
        raise SlurmClusterError(
            f"a throw-away Slurm started by hand is running (SLURM_CONF={conf_file}); "
            f"end it with: {sys.executable} {Path(__file__).resolve()} stop"
        )


def _remove_cluster() -> None:
    """Remove whatever cluster there is or was, from what it left on the machine alone."""
    recorded = _recorded_cluster()
    for node in _namespaces():
        _kill_namespace(node)
    if recorded is not None:
        folder, _ = recorded
        _kill_daemons(folder)
    for node in _namespaces():
        subprocess.run(["ip", "netns", "del", node], check=True, env=_environment())
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, env=_environment())  # fails where there is none
    if HOSTS_MARK in HOSTS_FILE.read_text():
        HOSTS_FILE.write_text(_hosts_without_ours())  # in place: in a container the file is often a mount
    _remove_cgroups()
    if recorded is not None:
        shutil.rmtree(folder, ignore_errors=True)
        (RECORD_FOLDER / "cluster.json").unlink()


def _kill_daemons(folder: Path) -> None:
    """KILL and not TERM, because nothing that they would still save is wanted."""

    def all_dead() -> bool:
        pids = [_own_pid(file, folder / "etc" / "slurm.conf") for file in (folder / "run").glob("*.pid")]
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not any(pids)

    wait_until(all_dead, PATIENCE_S, f"the daemons with pid files in {folder / 'run'} to die")


def _own_pid(pid_file: Path, conf_file: Path) -> int | None:
    """The pid in the file, if that process lives and was started for this cluster; a stale pid may be a stranger's."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
        pid = int(pid_file.read_text())
        started_with = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return pid if f"SLURM_CONF={conf_file}".encode() in started_with else None
    return None


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, env=_environment()).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(NODE_PREFIX)]


def _kill_namespace(node: str) -> None:
    """Kill all that runs on a host: its slurmd, the steps and the jobs, which are nobody's children any more."""

    def empty() -> bool:
        listed = subprocess.run(
            ["ip", "netns", "pids", node], capture_output=True, text=True, env=_environment()
        ).stdout
        for state in (CGROUP_ROOT / "freezer" / f"slurm_{node}").glob("**/freezer.state"):
            state.write_text("THAWED")  # a suspended job does not even die
        for pid in listed.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return not listed.strip()

    wait_until(empty, PATIENCE_S, f"the processes of host {node} to die")


def _remove_cgroups() -> None:
    """A killed slurmd leaves its groups, and they can only go once the kernel has buried their processes."""
    found = [*CGROUP_ROOT.glob(f"*/slurm_{NODE_PREFIX}*"), *CGROUP_PARENT.glob(f"{NODE_PREFIX}*")]

    def removed() -> bool:
        for top in found:
            for folder in sorted([top, *(path for path in top.glob("**/*") if path.is_dir())], reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        return not any(top.exists() for top in found)

    wait_until(removed, PATIENCE_S, "the cgroups of the hosts to be removed")


def _hosts_without_ours() -> str:
    return "".join(line for line in HOSTS_FILE.read_text().splitlines(keepends=True) if HOSTS_MARK not in line)


def _host_name() -> str:
    return socket.gethostname().split(".")[0]


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"


def _environment() -> dict[str, str]:
    """This process's variables, without those by which an outer Slurm job or a user's habits steer the commands."""
    steering = ("SLURM", "SBATCH", "SALLOC", "SRUN", "SQUEUE", "SACCT", "SINFO", "SCANCEL")
    return {name: value for name, value in os.environ.items() if not name.startswith(steering)} | {"PATH": _path()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Start or stop a throw-away Slurm on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="start one; it stays until stopped")
    defaults = SlurmSettings()
    start.add_argument("--nodes", type=int, default=defaults.num_nodes)
    start.add_argument("--cpus", type=int, default=defaults.cpus_per_node, help="per node")
    start.add_argument("--memory-mib", type=int, default=defaults.memory_mib_per_node, help="per node")
    start.add_argument("--link-rate", help='for example "1gbit"; left out: unlimited')
    start.add_argument("--min-job-age", type=int, default=defaults.min_job_age_s, metavar="SECONDS")
    start.add_argument("--requeue-wait", type=int, default=defaults.requeue_wait_s, metavar="SECONDS")
    start.add_argument("--no-accounting", action="store_true", help="no sacct")
    commands.add_parser("stop", help="stop it and remove all traces, also those of a crashed test run")
    options = parser.parse_args(arguments)
    try:
        return _start_by_hand(options) if options.command == "start" else _stop_by_hand()
    except SlurmClusterError as error:
        print(error, file=sys.stderr)
        return 1


def _start_by_hand(options: argparse.Namespace) -> int:
    settings = SlurmSettings(
        num_nodes=options.nodes,
        cpus_per_node=options.cpus,
        memory_mib_per_node=options.memory_mib,
        link_rate=options.link_rate,
        accounting=not options.no_accounting,
        min_job_age_s=options.min_job_age,
        requeue_wait_s=options.requeue_wait,
    )
    cluster = ThrowawaySlurm(settings, lock_wait_s=5)
    cluster.start(by_hand=True)
    print(cluster.run("sinfo", "-N"), end="")
    print(f"export SLURM_CONF={cluster.conf_file}")
    return 0


def _stop_by_hand() -> int:
    if os.geteuid() != 0:
        raise SlurmClusterError("stopping a throw-away Slurm needs root")
    with _lock(5):
        _remove_cluster()
    return 0


if __name__ == "__main__":
    sys.exit(main())
