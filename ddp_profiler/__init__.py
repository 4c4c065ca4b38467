"""Times every part of a data-parallel training step, at every scale you have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddp_profiler._version import __version__

if TYPE_CHECKING:
    # At run time they are imported when they are asked for: they need torch, or numpy.
    from ddp_profiler.api import Profiling, attach, detach, profile
    from ddp_profiler.notebook.loaded_run import LoadedRun, load_run
    from ddp_profiler.notebook.planning import plan

__all__ = [
    "LoadedRun",
    "Profiling",
    "__version__",
    "attach",
    "detach",
    "load_run",
    "plan",
    "profile",
]

_MODULES = {
    **dict.fromkeys(("Profiling", "attach", "detach", "profile"), "ddp_profiler.api"),
    **dict.fromkeys(("LoadedRun", "load_run"), "ddp_profiler.notebook.loaded_run"),
    "plan": "ddp_profiler.notebook.planning",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
