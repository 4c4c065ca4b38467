"""Finds the end of local backward: the moment at which autograd has no local work left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ddp_profiler.measure.marks import Recorder
from ddp_profiler.schema import SpanKind

SOURCE = "autograd_callback"


class BackwardWatch:
    """Marks the end of local backward of each watched loss.

    The first gradient of a backward pass is that of the loss. A callback queued on
    the autograd engine at that moment runs when the graph has been worked off, and
    before the callback that DDP queues at its last bucket, which waits for the
    collectives. On a GPU the mark is an event on the stream that called backward,
    which the engine has by then made to wait for the streams of the pass.

    Reentrant checkpoints run passes of their own inside the pass, and DDP then finishes in
    one of them; :func:`mark_end_of_nested_pass` covers that.

    Args:
        recorder: Takes the marks.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def watch(self, loss: Tensor) -> Any:
        """Marks the end of the next backward pass through ``loss``; changes no gradient.

        Returns:
            A handle whose ``remove`` ends that.
        """
        return loss.register_hook(self._at_first_gradient)  # type: ignore[no-untyped-call]

    def _at_first_gradient(self, _: Tensor) -> None:
        self._recorder.backward_pass = current_pass()
        queue_callback(self._at_end)

    def _at_end(self) -> None:
        self._recorder.point(SpanKind.LOCAL_BACKWARD_END)


def mark_end_of_nested_pass(recorder: Recorder) -> None:
    """Marks the end of the pass that runs now, if it is not the one that is watched.

    Called when DDP hands over a bucket. Of several marks the analysis takes the first one
    after the last hand-over; DDP queues its finishing after that hand-over, so behind it.
    """
    if current_pass() not in (recorder.backward_pass, NO_PASS):
        queue_callback(lambda: recorder.point(SpanKind.LOCAL_BACKWARD_END))


NO_PASS = -1
"""What :func:`current_pass` returns where there is none."""


def current_pass() -> int:
    """Returns the number of the autograd pass that runs on this thread; -1 without one."""
    number: int = torch._C._current_graph_task_id()
    return number


def queue_callback(callback: Callable[[], None]) -> None:
    """Has the autograd engine call ``callback`` at the end of the pass that runs now."""
    Variable._execution_engine.queue_callback(callback)
