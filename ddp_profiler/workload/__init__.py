"""What is trained while being measured: built-in models, their data, custom factories.

Importing this package does not import torch: names whose modules need it are loaded
when they are first used, so that ``--help`` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddp_profiler.workload.catalog import BUILTIN_MODELS
from ddp_profiler.workload.pacing import Pacer, precise_sleep
from ddp_profiler.workload.plant import Plant, Planter, parse_plants

if TYPE_CHECKING:  # The types of the names that __getattr__ loads late.
    from ddp_profiler.workload.data import ByteDataset
    from ddp_profiler.workload.definition import Workload, WorkloadSettings
    from ddp_profiler.workload.factory import build

__all__ = [
    "BUILTIN_MODELS",
    "ByteDataset",
    "Pacer",
    "Plant",
    "Planter",
    "Workload",
    "WorkloadSettings",
    "build",
    "parse_plants",
    "precise_sleep",
]

_LATE = {
    "ByteDataset": "ddp_profiler.workload.data",
    "Workload": "ddp_profiler.workload.definition",
    "WorkloadSettings": "ddp_profiler.workload.definition",
    "build": "ddp_profiler.workload.factory",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
