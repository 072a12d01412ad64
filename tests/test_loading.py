"""Loader processes, and what a scheduler sends to all processes of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BEGINS = """
import os, subprocess, sys, torch
from torch.utils.data import Dataset
from tula_hpc.composition import compose
from tula_hpc.ranks.loading import Loader
from tula_hpc.ranks.signs import EarlyWarning

class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return i

def loader():
    return Loader(Numbers(), 1, settings, torch.device("cpu"))

def tell_all(*names):
    for name in names:
        subprocess.run(["kill", "-s", name, "--", f"-{os.getpid()}"], check=True, start_new_session=True)

settings = compose([*sys.argv[1:], "data.loader_workers=2"])
warning = EarlyWarning(600)
warning.listen()
"""


def answer_of(program: str, overrides: list[str]) -> list[str]:
    """What a rank's program says, in a process group of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", BEGINS + program, *overrides]
    answer = subprocess.run(
        command, env=environment, capture_output=True, text=True, start_new_session=True, timeout=300
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.split()


def test_signals_to_all_processes_are_the_ranks(tiny_overrides: list[str]):
    """The rank takes note, and the batches up to its next step boundary still come, as do those of the next epoch."""
    program = """
epochs = loader()
batches = iter(epochs)
next(batches)
tell_all("USR2", "TERM")
print(warning.kind(), 1 + len(list(batches)), len(list(epochs)))
"""
    assert answer_of(program, tiny_overrides) == ["preempted", "40", "40"]


def test_processes_that_begin_are_not_ended(tiny_overrides: list[str]):
    """An evaluation starts new ones each time; until they have their handlers they must not hear anything."""
    program = """
send = f"import os, time\\nwhile True: os.killpg({os.getpid()}, 15); time.sleep(0.001)"
sender = subprocess.Popen([sys.executable, "-c", send], start_new_session=True)
try:
    print(*(len(list(loader())) for _ in range(5)))
finally:
    sender.kill()
"""
    assert answer_of(program, tiny_overrides) == ["40"] * 5


def test_programs_that_a_data_set_starts_can_be_ended(tiny_overrides: list[str]):
    """As a decoder at the end of a pipe is: what a loader process passes over is not passed on to them."""
    program = """
def decoded(self, i):
    decoder = subprocess.Popen(["sleep", "1000"])
    decoder.terminate()
    return -decoder.wait()

Numbers.__getitem__ = decoded
print(*{int(code) for code in loader()})
"""
    assert answer_of(program, tiny_overrides) == ["15"]


def test_a_rank_that_ends_takes_its_loader_processes_along(tiny_overrides: list[str]):
    """Also those that have work left, which Python's own way out would wait for."""
    program = """
batches = iter(loader())
print(int(next(batches)))
"""
    assert answer_of(program, tiny_overrides) == ["0"]
