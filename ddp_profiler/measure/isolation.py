"""Runs a model apart from training, without leaving a trace in it or in the process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

_BACKENDS: Any = torch.backends
_PRECISIONS: tuple[Any, ...] = (
    _BACKENDS.cuda.matmul,
    _BACKENDS.cudnn.conv,
    _BACKENDS.cudnn.rnn,
    _BACKENDS.mkldnn.matmul,
    _BACKENDS.mkldnn.conv,
)
"""What may compute fp32 in tf32 or bf16."""


@contextlib.contextmanager
def state_kept(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Restores buffers and random numbers at the end, and removes gradients before and after.

    Args:
        modules: Whose buffers and gradients; each with all that is inside.
        device: Where they live.
    """
    modules = tuple(modules)
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for top in modules
        for module in top.modules()
        for name, buffer in module._buffers.items()
    ]
    _remove_gradients(modules)
    try:
        with random_kept(device):
            yield
    finally:
        _remove_gradients(modules)
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                # Forward may have put another tensor in its place.
                module._buffers[name] = buffer
                if buffer is not None and content is not None:
                    buffer.copy_(content)


@contextlib.contextmanager
def alone(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Runs a model on one rank while the others wait: a collective raises instead of hanging.

    Synchronised batch norm normalises over the samples that are there.

    Args:
        modules: What is run; each with all that is inside.

    Raises:
        RuntimeError: The model issues a collective.
    """
    with norms_alone(modules), _NoCollectives():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def norms_alone(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Lets synchronised batch norm normalise over the samples that are there.

    Args:
        modules: What is run; each with all that is inside.
    """
    synchronised = [
        module
        for top in modules
        for module in top.modules()
        if isinstance(module, nn.SyncBatchNorm)
    ]
    before = [module.__dict__.get("forward") for module in synchronised]
    for module in synchronised:
        # An attribute of the instance goes before the class's method.
        module.__dict__["forward"] = functools.partial(_BatchNorm.forward, module)
    try:
        yield
    finally:
        for module, forward in zip(synchronised, before, strict=True):
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Computes fp32 as fp32: without autocast, and without tf32 or bf16 inside products.

    All settings come back at the end.

    Args:
        device: Where to compute.
    """
    before = [setting.fp32_precision for setting in _PRECISIONS]
    try:
        for setting in _PRECISIONS:
            setting.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for setting, value in zip(_PRECISIONS, before, strict=True):
            setting.fp32_precision = value


def fp32_rounding(device: torch.device) -> float:
    """Returns the relative rounding of products in fp32, as the settings in force have it.

    Args:
        device: Where they are computed.
    """
    on_gpu = (_BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn)
    settings = [s for s in _PRECISIONS if (s in on_gpu) == (device.type == "cuda")]
    roundings = {"tf32": 2.0**-10, "bf16": 2.0**-7}
    exact = torch.finfo(torch.float32).eps
    return max((roundings.get(s.fp32_precision, exact) for s in settings), default=exact)


def random_kept(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restores torch's random numbers at the end.

    Args:
        device: Whose numbers to restore, beside those of the CPU.
    """
    kept: contextlib.AbstractContextManager[None] = torch.random.fork_rng(
        devices=[device] if device.type == "cuda" else []
    )
    return kept


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where an operation talks to other ranks."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise RuntimeError(f"the model issues a collective of its own ({func})")
        return func(*args, **(kwargs or {}))


def _remove_gradients(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None
