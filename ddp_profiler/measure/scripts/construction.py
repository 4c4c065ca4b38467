"""What is to be known of a DistributedDataParallel that a script or its framework has built."""

from __future__ import annotations

import sys
import weakref

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_profiler.schema import DdpFacts

_NOT_BUILDERS = ("torch", "ddp_profiler", "contextlib", "functools")


def building_package() -> str:
    """Returns the top-level package of the code that is building a DDP; ``__main__`` of a script.

    That is the innermost frame that is neither torch's nor ours; empty where there is none.
    """
    frame = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__") or "").partition(".")[0]
        if package not in _NOT_BUILDERS:
            return package
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


class Construction:
    """How a DDP was built; does not keep it alive.

    Args:
        ddp: The module, just built, or seen for the first time.
        built_by: See :func:`building_package`.
        number: Its number among the script's DDPs.

    Attributes:
        number: As given.
    """

    def __init__(self, ddp: DDP, built_by: str, number: int) -> None:
        self.number = number
        self._ddp = weakref.ref(ddp)
        self._built_by = built_by
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        # Whether a parameter needs a gradient counts when DDP is built, not later.
        self._names = frozenset(
            name
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        )

    @property
    def reduced(self) -> dict[str, nn.Parameter]:
        """The parameters that it reduces, by name; none if it is gone."""
        ddp = self._ddp()
        found = ddp.module.named_parameters() if ddp is not None else ()
        return {name: parameter for name, parameter in found if name in self._names}

    def describe(self) -> DdpFacts | None:
        """Describes how it was built, and what of that was changed since; None if it is gone."""
        ddp = self._ddp()
        if ddp is None:
            return None
        return DdpFacts(
            find_unused_parameters=bool(ddp.find_unused_parameters),
            static_graph=bool(ddp.static_graph),
            broadcast_buffers=bool(ddp.broadcast_buffers),
            buffer_bytes=sum(buffer.nbytes for buffer in getattr(ddp, "modules_buffers", ())),
            compiled_inside=_holds_compiled(ddp.module),
            group_size=ddp.process_group.size(),
            built_by=self._built_by,
            number=self.number,
        )


def _holds_compiled(module: nn.Module) -> bool:
    """Tells whether a module, or a child that holds most of its parameters, was compiled."""
    total = sum(p.numel() for p in module.parameters())
    return any(
        2 * sum(p.numel() for p in child.parameters()) > total
        for child in module.modules()
        if _is_compiled(child)
    )


def _is_compiled(module: nn.Module) -> bool:
    # Of torch.compile(module), and of module.compile(), which leaves the module what it is.
    wrapped = getattr(module, "_orig_mod", None) is not None
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None
