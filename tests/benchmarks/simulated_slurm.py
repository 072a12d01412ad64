"""Slurm's commands as one small program over a state file: enough of Slurm for a controller to work on, at no cost.

`install` writes the commands into a folder for the front of PATH. Time is counted in looks: every `squeue` ends the
tasks that ran since the one before, whose files then appear, and starts the next ones. Each call leaves a line with its
name and duration. Imports little, because every call starts a Python.
"""

import json
import os
import re
import sys
import time

COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "srun")


def install(home, started_per_look, hosts=32):
    """Make the commands in `home`/bin.

    Args:
        home: Folder for all that the simulator keeps. What a task shall leave when it ends is looked for in
            `home`/records/<candidate>/attempt-<n>/; without such a folder the task fails.
        started_per_look: How many tasks one look starts, and the next one ends.
        hosts: Nodes of the only partition.
    """
    os.makedirs(os.path.join(home, "bin"))
    state = {"next_id": 1000, "started_per_look": started_per_look, "hosts": hosts, "tasks": []}
    _save(home, state)
    for command in COMMANDS:
        path = os.path.join(home, "bin", command)
        with open(path, "w") as file:
            file.write(f'#!/bin/sh\nexec {sys.executable} -I -S {os.path.abspath(__file__)} {home} {command} "$@"\n')
        os.chmod(path, 0o755)


def calls(home):
    """How often each command was called, and the seconds they took together."""
    counts, seconds = {}, 0.0
    if os.path.exists(os.path.join(home, "calls.log")):
        with open(os.path.join(home, "calls.log")) as file:
            for line in file:
                name, lasted = line.split()
                counts[name] = counts.get(name, 0) + 1
                seconds += float(lasted)
    return counts, seconds


def _save(home, state):
    with open(os.path.join(home, "state.new"), "w") as file:
        json.dump(state, file)
    os.replace(os.path.join(home, "state.new"), os.path.join(home, "state.json"))


def _sbatch(home, state, arguments):
    if "--test-only" in arguments:
        sys.stdin.read()
        return
    script = arguments[-1]
    with open(script) as file:
        options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", file.read(), re.MULTILINE))
    job_id = state["next_id"]
    state["next_id"] += 1
    last = int(re.match(r"0-(\d+)", options["array"])[1]) if "array" in options else None
    ids = [str(job_id)] if last is None else [f"{job_id}_{index}" for index in range(last + 1)]
    name, nodes = options["job-name"].strip("'\""), options["nodes"]
    folder = os.path.dirname(script)
    state["tasks"] += [
        {"id": i, "name": name, "nodes": nodes, "state": "PENDING", "folder": folder, "user": "me"} for i in ids
    ]
    print(f"Submitted batch job {job_id}")


def _squeue(home, state, arguments):
    for task in state["tasks"]:
        if task["state"] == "RUNNING":
            task["state"] = "COMPLETED" if all(_leave_files(home, a) for a in task["attempts"]) else "FAILED"
    may_start = state["started_per_look"]
    for task in state["tasks"]:
        if may_start > 0 and task["state"] == "PENDING" and _find_work(task):
            task["state"] = "RUNNING"
            may_start -= 1
    layout = next(a.split("=", 1)[1] for a in arguments if a.startswith("--format="))
    for task in state["tasks"]:
        hosts = "" if task["state"] == "PENDING" else f"host[1-{task['nodes']}]"
        reason = "Resources" if task["state"] == "PENDING" else "None"
        values = {"i": task["id"], "j": task["name"], "T": task["state"], "r": reason, "N": hosts, "D": task["nodes"]}
        print(re.sub(r"%\.?\d*(\w)", lambda field, values=values: values.get(field[1], ""), layout))


def _find_work(task):
    """The attempt folders that submitit's pickle hands to the task; without it a task would have nothing to do."""
    try:
        with open(os.path.join(task["folder"], f"{task['id']}_submitted.pkl"), "rb") as file:
            task["attempts"] = [path.decode() for path in re.findall(rb"/[ -~]*?/attempt-\d+", file.read())]
    except FileNotFoundError:
        return False
    return True


def _leave_files(home, attempt):
    """Put the files of a task that ends where its ranks would have written them."""
    records = os.path.join(home, "records", *attempt.rsplit("/", 2)[1:])
    if not os.path.isdir(records):
        return False
    os.mkdir(os.path.join(attempt, "claim"))
    for name in os.listdir(records):
        os.rename(os.path.join(records, name), os.path.join(attempt, name))
    return True


def _scancel(home, state, arguments):
    for task in state["tasks"]:
        if task["id"] in arguments and task["state"] in ("PENDING", "RUNNING"):
            task["state"] = "CANCELLED"


def _sinfo(home, state, arguments):
    print(f"all*|{state['hosts']}|infinite")


def _scontrol(home, state, arguments):
    if arguments[:1] == ["ping"]:
        print("Slurmctld(primary) at simulated is UP")


def _no_answer(home, state, arguments):
    """Accounting is off, and nothing is run by hand."""
    sys.exit(1)


def main():
    began = time.monotonic()
    home, command, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
    with open(os.path.join(home, "state.json")) as file:
        state = json.load(file)
    does = {"sbatch": _sbatch, "squeue": _squeue, "scancel": _scancel, "sinfo": _sinfo, "scontrol": _scontrol}
    try:
        does.get(command, _no_answer)(home, state, arguments)
        if command in ("sbatch", "squeue", "scancel"):
            _save(home, state)
    finally:
        with open(os.path.join(home, "calls.log"), "a") as file:
            file.write(f"{command} {time.monotonic() - began:.6f}\n")


if __name__ == "__main__":
    main()
