"""Where code runs decides what it may import; every room keeps to it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tula_hpc"
# Modules that run on ranks but hold no torch, so the controller may use them.
TORCH_FREE_RANKS = {
    "tula_hpc.ranks.timings",
    "tula_hpc.ranks.job",
    "tula_hpc.ranks.launch",
    "tula_hpc.ranks.signs",
    "tula_hpc.ranks.packed",
}


def imported_by(path: Path, top_level_only: bool = False) -> set[str]:
    """Dotted names of everything a file imports; imports under TYPE_CHECKING do not count."""
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if top_level_only and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))
    return names


def violations(folder: str, forbidden: tuple[str, ...], allowed: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    found = []
    for path in sorted((PACKAGE / folder).glob("*.py")):
        for name in sorted(imported_by(path)):
            is_forbidden = any(name == f or name.startswith(f + ".") for f in forbidden)
            is_allowed = any(name == a or name.startswith(a + ".") for a in allowed)
            if is_forbidden and not is_allowed:
                found.append(f"{path.relative_to(PACKAGE)} imports {name}")
    return found


def test_control_never_imports_torch_or_what_needs_it():
    """The controller runs on a shared login node and imports nothing that loads torch."""
    assert violations("control", ("torch", "torchvision", "tula_hpc.optim", "tula_hpc.ranks"), TORCH_FREE_RANKS) == []


def test_models_are_pure():
    """Models know no files, no jobs and no torch."""
    forbidden = (
        "torch",
        "tula_hpc.control",
        "tula_hpc.ranks",
        "tula_hpc.optim",
        "tula_hpc.runs",
        "submitit",
        "pathlib",
        "os",
    )
    assert violations("models", forbidden) == []


def test_optim_knows_no_jobs_and_no_files():
    """The optimizer wrapper works in anybody's loop without the rest of the package."""
    forbidden = (
        "tula_hpc.control",
        "tula_hpc.ranks",
        "tula_hpc.runs",
        "tula_hpc.config",
        "submitit",
        "hydra",
        "pathlib",
    )
    assert violations("optim", forbidden) == []


def test_ranks_know_no_scheduler():
    """What runs inside a job does not talk to the scheduler."""
    assert violations("ranks", ("tula_hpc.control", "submitit", "hydra", "kneed")) == []


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("submitit", {"control/slurm.py"}),
        ("hydra", {"composition.py"}),
        ("kneed", {"models/knee.py"}),
        ("matplotlib", {"plots.py", "plot_style.py", "paper/drawing.py"}),
    ],
)
def test_one_file_speaks_each_outside_language(library: str, home: set[str]):
    """Every outside library of consequence is used in one place."""
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name == library or name.startswith(library + ".") for name in imported_by(path))
    }
    assert users <= home


def test_only_slurms_own_modules_run_slurms_commands():
    """What Slurm's commands are called and print is known in few files."""
    commands = {"sbatch", "squeue", "sacct", "sacctmgr", "sinfo", "scontrol", "scancel"}
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and node.args
        if isinstance(node.args[0], ast.Constant) and node.args[0].value in commands
    }
    assert users <= {"control/slurm.py", "control/slurm_commands.py", "control/slurm_queue.py", "control/away.py"}


def test_torch_free_rank_modules_have_no_torch_at_their_top():
    """The rank modules that the controller may import do not load torch when they are imported."""
    for module in TORCH_FREE_RANKS:
        path = PACKAGE.parent / (module.replace(".", "/") + ".py")
        assert not [name for name in imported_by(path, top_level_only=True) if name.split(".")[0] == "torch"]


@pytest.mark.parametrize(
    "module", ["tula_hpc", "tula_hpc.cli", "tula_hpc.control.controller", "tula_hpc.control.slurm", "tula_hpc.report"]
)
def test_login_node_modules_load_no_torch(module: str):
    """Importing what runs on the login node leaves torch unloaded."""
    code = f"import sys, {module}; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
