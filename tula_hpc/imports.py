"""Find out whether an import path can be right, without importing it.

A misspelt `_target_` would only fail inside a job, after waiting in the queue; importing it on the login node would
load torch. So the module's file is located and its top-level names are read from the syntax tree.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def resolve(target: str) -> Any:
    """Import the object a dotted path names. For ranks: this may load torch.

    Raises:
        ImportError: If no prefix of the path is a module, or the module lacks the rest.
    """
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and module_name.startswith(error.name):
                continue
            raise
        for attribute in parts[split:]:
            if not hasattr(found, attribute):
                raise ImportError(f"{found.__name__} has no {attribute!r} (from {target})")
            found = getattr(found, attribute)
        return found
    raise ImportError(f"no module named {parts[0]!r} (from {target})")


def why_not_importable(target: str) -> str | None:
    """A sentence why `target` cannot be imported from here, or None if nothing speaks against it."""
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return "not an import path such as package.module.name"
    if parts[0] in sys.builtin_module_names:
        return None
    source: Path | None = None
    path: list[str] | None = None
    for depth, part in enumerate(parts):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            break
        source = Path(spec.origin) if spec.origin else None
        if spec.submodule_search_locations is None:
            depth += 1
            break
        path = list(spec.submodule_search_locations)
    else:
        depth = len(parts)
    if depth == 0:
        return f"no module {parts[0]!r} on Python's path (which includes the folder you start from)"
    if depth == len(parts):
        return "names a module, not a callable inside one"
    names = None if source is None or source.suffix != ".py" else _top_level_names(source)
    if names is None or parts[depth] in names:
        return None
    module = ".".join(parts[:depth])
    public = sorted(name for name in names if name[0] != "_")
    shown = difflib.get_close_matches(parts[depth], public, n=5) or public[:20]
    return f"{module} has no {parts[depth]!r}; it has {', '.join(shown) or 'nothing public'}"


def _top_level_names(source: Path) -> set[str] | None:
    """Names a module's file binds at its top level; None if they cannot be told (star imports, module __getattr__)."""
    names = {entry.stem for entry in source.parent.iterdir()} if source.name == "__init__.py" else set()
    pending: list[ast.AST] = [ast.parse(source.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue  # what is bound inside it is not the module's
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        pending.extend(ast.iter_child_nodes(node))
    return None if {"*", "__getattr__"} & names else names
