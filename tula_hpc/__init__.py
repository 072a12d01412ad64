"""Measure, model and choose nodes and batch size for distributed training on Slurm, then train there.

`import tula_hpc` is cheap: login nodes are slow and shared, so torch is loaded only when `TulaOptimizer` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tula_hpc.optim.ags import TulaOptimizer

__version__ = "0.1.0"
__all__ = ["TulaOptimizer", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "TulaOptimizer":
        from tula_hpc.optim.ags import TulaOptimizer

        return TulaOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
