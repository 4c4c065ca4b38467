"""Keeps torch.compile away from code of ours that runs inside a user's training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])


def untraced(function: AnyCallable) -> AnyCallable:
    """Makes Dynamo skip a function and all that it calls; returns the function itself.

    ``torch.compiler.disable`` would do, but it imports all of Dynamo and
    adds a frame to each call. This sets the mark that Dynamo itself sets
    on code that it skips, and falls back to the public way where it is not to be had.
    """
    try:
        _set_skipped(function)
        setattr(function, "_torchdynamo_disable", True)  # noqa: B010 - unknown to its type
    except (ImportError, AttributeError, TypeError):
        disabled: AnyCallable = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled
    return function


def skip_frame(function: Callable[..., Any]) -> None:
    """Keeps Dynamo from compiling a function where it is called by code that it does not trace.

    Code that Dynamo does trace goes on through the function, without a graph break.
    """
    # Without it, Dynamo compiles a frame that says it is compiled, and nothing is observed.
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        _set_skipped(function)


def _set_skipped(function: Callable[..., Any]) -> None:
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
