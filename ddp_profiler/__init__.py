"""Times every part of a data-parallel training step, at every scale you have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddp_profiler._version import __version__

if TYPE_CHECKING:
    # At run time they are imported when they are asked for: they need torch.
    from ddp_profiler.api import Profiling, attach, detach, profile

__all__ = ["Profiling", "__version__", "attach", "detach", "profile"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("ddp_profiler.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
