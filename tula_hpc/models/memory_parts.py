"""The terms of the paper's Eq. (3) as they are measured, by name; see `ranks.device_memory` for what each is.

CPUs have no workspace and no reserve, GPUs no loader; in older records `other_gib` is all that no tensor of the model
accounts for. Loads nothing, because every rank imports it.
"""

from __future__ import annotations

CONSTANT_PARTS = ("param_gib", "grad_gib", "bucket_gib", "optimizer_gib", "ags_gib")
"""Do not depend on the batch."""
MEMORY_PARTS = (
    *CONSTANT_PARTS,
    "activation_gib",
    "batch_gib",
    "workspace_gib",
    "reserve_gib",
    "outside_gib",
    "loader_gib",
    "other_gib",
)
"""All of them; what is not constant may grow with the batch."""
