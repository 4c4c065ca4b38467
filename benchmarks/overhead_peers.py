"""Other observers of a training step, to be measured beside ours: how each is put around it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

NEVER = 1 << 30
"""A sampling rate at which DDP's logger does not sample again within a run."""

Context = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Peer:
    """Another observer, ready for use in this process.

    Attributes:
        name: Its name, as a variant.
        version: Of the package it comes with.
        block: Around a block of steps: what it does there is in no step.
        step: Around each step.
    """

    name: str
    version: str
    block: Context
    step: Context


def torch_profiler(ddp: Any) -> Peer:
    """torch.profiler with CPU activities, recording all steps of a block."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    current: list[Any] = []

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            current.append(found)
            try:
                yield
            finally:
                current.clear()

    @contextlib.contextmanager
    def step() -> Iterator[None]:
        yield
        current[0].step()

    return Peer("torch.profiler", torch.__version__, block, step)


def ddp_logger(ddp: Any) -> Peer:
    """DDP's own logger, sampling at each step, and read after each step as a user would."""
    import torch

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        ddp._set_ddp_runtime_logging_sample_rate(1)
        try:
            yield
        finally:
            ddp._set_ddp_runtime_logging_sample_rate(NEVER)

    @contextlib.contextmanager
    def step() -> Iterator[None]:
        yield
        ddp._get_ddp_logging_data()

    ddp._set_ddp_runtime_logging_sample_rate(NEVER)
    return Peer("DDP's logger", torch.__version__, block, step)


def traceml(ddp: Any) -> Peer:
    """traceml-ai's step tracing, without its launcher: no thread samples, nothing is sent.

    That is the least it can cost. It patches torch for the whole process: what the patches cost
    while no step is traced is in all variants.

    Raises:
        ImportError: It is not installed.
    """
    module = importlib.import_module("traceml_ai")
    # There is one for all modules of a process.
    if importlib.import_module("traceml_ai.sdk.initial").get_init_config() is None:
        module.init(mode="auto")
    version = importlib.metadata.version("traceml-ai")
    return Peer("traceml-ai", version, contextlib.nullcontext, lambda: module.trace_step(ddp))


ALL: dict[str, Callable[[Any], Peer]] = {
    "torch.profiler": torch_profiler,
    "DDP's logger": ddp_logger,
    "traceml-ai": traceml,
}
"""By name: what makes it for a DDP module."""
