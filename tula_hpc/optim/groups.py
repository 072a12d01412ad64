"""Parameter groups that keep some parameters out of adaptive gradient scaling."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

NAMES_TOLD = 8
"""Parameters that an error names: enough to see how they are called."""


def scaled_and_unscaled(
    model: torch.nn.Module, unscaled: Iterable[str | type[torch.nn.Module]]
) -> list[dict[str, Any]]:
    """Two groups for any optimizer, the second with `ags=False`, which TulaOptimizer and BoundedOptimizer leave alone.

        SGD(scaled_and_unscaled(model, ["*.bias", torch.nn.BatchNorm2d, torch.nn.Embedding]), lr=0.1)

    Args:
        model: Parameters that need no gradient are left out; one that has several names (tied weights) fits by any.
        unscaled: Patterns of parameter names, with * and ?, and classes of modules that hold the parameters themselves.

    Raises:
        ValueError: If an entry of `unscaled` fits no parameter: most likely a misspelt one.
    """
    entries = list(unscaled)
    fitting: dict[torch.Tensor, set[Any]] = {}
    names = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            names.append(name)
            fitting.setdefault(parameter, set()).update(
                entry
                for entry in entries
                if (fnmatchcase(name, entry) if isinstance(entry, str) else isinstance(module, entry))
            )
    used = set().union(*fitting.values())
    for entry in entries:
        if entry not in used:
            raise ValueError(
                f"unscaled has {entry!r}, which fits no parameter of the model. It trains {len(fitting)}: "
                f"{', '.join(names[:NAMES_TOLD])}{' ...' if len(names) > NAMES_TOLD else ''}"
            )
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "ags": False}]
    for parameter, fits in fitting.items():
        groups[bool(fits)]["params"].append(parameter)
    return [group for group in groups if group["params"]]
