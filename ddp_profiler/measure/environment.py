"""What software and hardware a run used, as far as it decides its speed."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path
from typing import Any

import torch

from ddp_profiler.measure import interfaces, nccl

_RECORDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "CUDA_VISIBLE", nccl.PRELOAD)
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(
    device: torch.device, threads: int, local_world_size: int, backend: str
) -> dict[str, Any]:
    """Describes this node: versions, processor, memory, GPUs, and what was set."""
    cuda = torch.cuda.is_available()
    nccl_version, nccl_library = nccl.in_use() if cuda else (None, None)
    return {
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": nccl_version or (_built_nccl() if cuda else None),
        "nccl_library": nccl_library,
        "backend": backend,
        "network": interfaces.describe(backend),
        "device_type": device.type,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
        "cpu": cpu_model(),
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads_per_rank": threads,
        "local_world_size": local_world_size,
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_RECORDED_PREFIXES)
            and not any(word in name for word in _SECRET_WORDS)
        },
    }


def _built_nccl() -> str:
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def cpu_model() -> str:
    """Returns the model of this node's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
