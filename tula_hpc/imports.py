"""Find out whether an import path can be right, without importing it.

A misspelt `_target_` would only fail inside a job, after waiting in the queue; importing it on the login node would
load torch. So the module's file is located and its top-level names are read from the syntax tree.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
import sysconfig
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
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise
        for attribute in parts[split:]:
            if not hasattr(found, attribute):
                raise ImportError(f"{found.__name__} has no {attribute!r} (from {target})")
            found = getattr(found, attribute)
        return found
    raise ImportError(f"no module named {parts[0]!r} (from {target})")


def _sources(parts: list[str]) -> list[Path | None]:
    """Files of the packages and the module that a dotted path goes through; None for one without Python source."""
    sources: list[Path | None] = []
    path: list[str] | None = None
    for part in parts:
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            break
        sources.append(Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None)
        if spec.submodule_search_locations is None:
            break
        path = list(spec.submodule_search_locations)
    return sources


def own_source(target: str) -> Path | None:
    """The file that defines `target` if it is the user's own: neither installed nor part of this package."""
    sources = _sources(target.split("."))
    source = sources[-1] if sources else None
    # not all below sys.prefix: a project may lie inside its virtual environment, or below /usr
    foreign = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parent)
    if source is None or any(source.resolve().is_relative_to(Path(folder).resolve()) for folder in foreign):
        return None
    return None if {"site-packages", "dist-packages"} & set(source.resolve().parts) else source


def why_not_importable(target: str) -> str | None:
    """A sentence why `target` cannot be imported from here, or None if nothing speaks against it."""
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return "not an import path such as package.module.name"
    if parts[0] in sys.builtin_module_names:
        return None
    sources = _sources(parts)
    if not sources:
        return f"no module {parts[0]!r} on Python's path (which includes the folder you start from)"
    # a package may give a function the name of the submodule it comes from
    depth = min(len(sources), len(parts) - 1)
    source = sources[depth - 1]
    try:
        names = None if source is None else _top_level_names(source)
    except SyntaxError as error:
        return f"{source}, line {error.lineno}: {error.msg}"
    if names is None or parts[depth] in names:
        return None
    if len(sources) == len(parts):
        return "names a module, not a callable inside one"
    public = {name for name in names if name[0] != "_"}
    if source is not None and source.name == "__init__.py":
        public |= {entry.stem for entry in source.parent.iterdir() if entry.stem[0] not in "_."}
    shown = difflib.get_close_matches(parts[depth], sorted(public), n=5) or sorted(public)[:20]
    return f"{'.'.join(parts[:depth])} has no {parts[depth]!r}; it has {', '.join(shown) or 'nothing public'}"


def _top_level_names(source: Path) -> set[str] | None:
    """Names a module's file binds at its top level; None if they cannot be told (star imports, module __getattr__)."""
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(source.read_bytes())]  # bytes may begin with a mark, or name their coding
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
