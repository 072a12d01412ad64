"""What a rank takes of its device's memory, in the parts of the paper's Eq. (3), and what is left to it of the device.

On a GPU that is device memory: what the allocator reserved, and what lies outside it. On a CPU it is the resident set.
"""

from __future__ import annotations

import ctypes
import math
import os
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.ranks import host_memory
from tula_hpc.ranks.distributed import inner_module

GIB = 2**30


class MemoryMeter:
    """Looks at memory from before the model is built, so that what was there before is not taken for the model's."""

    def __init__(self, device: torch.device, ranks_on_host: int):
        """
        Args:
            device: The rank's.
            ranks_on_host: Ranks that share the host's memory, which counts where they compute on CPUs.
        """
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = 0
            self._limit = float(torch.cuda.mem_get_info(device)[1] - others_bytes(device))
        else:
            host_memory.reset_peak()
            self._before = host_memory.resident_bytes()
            self._limit = host_memory.limit_bytes(ranks_on_host)

    def record(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch_bytes: int, activation_bytes: int
    ) -> dict[str, Any]:
        """Peak memory of this rank so far, GiB.

        Args:
            model: The model, in DDP or not.
            optimizer: Its optimizer, after a step.
            batch_bytes: Inputs and targets of a step.
            activation_bytes: What forward leaves on a GPU for backward; on a CPU nobody counts it, and activations are
                what is left of the peak.

        Returns:
            memory_gib, limit_gib (what of the device others do not hold, None if unknown),
            allocator_retries, and the parts:

            param, grad, optimizer, ags, batch   tensors, counted
            bucket       a second copy of the gradients that DDP may keep
            activation   measured, see above
            workspace    GPU: the rest of the most that tensors took: what comes and goes within a step
            reserve      GPU: reserved by the allocator and in no tensor
            outside      GPU: context, kernels and NCCL; CPU: the process before the model was built
            loader       CPU: what loader workers hold by themselves
        """
        parameters = list(model.parameters())
        parameter_bytes = _bytes([*parameters, *inner_module(model).buffers()])
        gradient_bytes = _bytes([p for p in parameters if p.requires_grad])
        copied = isinstance(model, DistributedDataParallel) and not model.gradient_as_bucket_view
        states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        parts = {
            "param": parameter_bytes,
            "grad": gradient_bytes,
            "bucket": gradient_bytes if copied else 0,
            "optimizer": _bytes(states),
            "ags": optimizer.state_bytes() if isinstance(optimizer, TulaOptimizer) else 0,
            "batch": batch_bytes,
        }
        counted, seen = sum(parts.values()), {}
        used, limit, retries = peak_bytes(self._device), self._limit, 0
        if self._device.type == "cuda":
            others = others_bytes(self._device)
            used, limit = used - others, min(limit, torch.cuda.mem_get_info(self._device)[1] - others)
            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
            retries = torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)
            parts |= {
                "activation": activation_bytes,
                "workspace": max(0, allocated - counted - activation_bytes),
                "reserve": reserved - allocated,
                "outside": used - reserved,
            }
            seen = {"allocated_gib": allocated / GIB, "reserved_gib": reserved / GIB, "others_gib": others / GIB}
        else:
            loader = host_memory.children_bytes()
            parts |= {"activation": max(0, used - self._before - counted), "outside": self._before, "loader": loader}
            used += loader
        return {
            "memory_gib": used / GIB,
            "limit_gib": limit / GIB if math.isfinite(limit) else None,
            "parts": {f"{name}_gib": size / GIB for name, size in parts.items()},
            "allocator_retries": retries,
            **seen,
        }


def peak_bytes(device: torch.device) -> int:
    """Most memory this rank has taken: on a GPU what the allocator reserved and what lies outside it, which counts what
    other processes hold there; on a CPU the resident set."""
    if device.type != "cuda":
        return host_memory.peak_resident_bytes()
    free, total = torch.cuda.mem_get_info(device)
    outside = max(0, total - free - torch.cuda.memory_reserved(device))
    return torch.cuda.max_memory_reserved(device) + outside


def allocated_bytes(device: torch.device) -> int:
    """What tensors take now on a GPU; 0 on a CPU, where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# --- other processes on the GPU ---------------------------------------------------------------------------------------

NVML_LIBRARY = "libnvidia-ml.so.1"
_MOST_PROCESSES = 256


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of NVML's nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def others_bytes(device: torch.device) -> int:
    """What other processes hold on a GPU now, by the driver's NVML.

    0 where NVML cannot tell: it is missing, or it names processes otherwise than this one knows itself, as in some
    containers. What others hold then counts as this rank's, so that no batch is taken to fit that does not.
    """
    try:
        nvml = ctypes.CDLL(NVML_LIBRARY)
        uuid = f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"
        handle, count, found = ctypes.c_void_p(), ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        failed = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
            or nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found)
        )
    except (OSError, AttributeError):  # no such library, or an older one without these functions
        return 0
    held = {process.pid: process.used_bytes for process in found[: count.value]}
    if failed or os.getpid() not in held:
        return 0
    total = torch.cuda.mem_get_info(device)[1]
    return sum(size for pid, size in held.items() if pid != os.getpid() and size <= total)  # all bits set: not known
