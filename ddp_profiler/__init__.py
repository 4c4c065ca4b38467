"""Times every part of a data-parallel training step, at every scale you have."""

from ddp_profiler._version import __version__

__all__ = ["__version__"]
