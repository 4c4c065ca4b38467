"""Observes the collectives that modules issue themselves, such as synchronised batch norm.

Gradients go through DDP's reducer, in C++. What a module sends in its forward or backward
goes through the functions of ``torch.distributed``: these are replaced, in that module
only, while somebody listens. A call is recorded as ``FORWARD_COMM`` or ``BACKWARD_COMM``
if it comes from the forward or backward of an observed micro-step, and else not at all.

A synchronous call is recorded from its begin to its return. One with ``async_op=True`` gives
two spans: the call, and the time for which ``wait`` blocks. ``wait`` is observed in the class
``Work``: the objects themselves stay those of torch.

Not seen: names imported from ``torch.distributed`` beforehand, functional collectives (such as
those in compiled code), and calls to a process group's own methods.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_profiler.measure.backward import NO_PASS, current_pass
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.untraced import skip_frame
from ddp_profiler.schema import SpanKind

SOURCE = "dist_functions"

FUNCTIONS = tuple(
    name
    for name in (
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "irecv",
        "isend",
        "monitored_barrier",
        "recv",
        "recv_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
        "send_object_list",
    )
    if hasattr(dist, name)
)
"""The functions of ``torch.distributed`` that are observed, as far as this torch has them."""

_KINDS = {
    SpanKind.FORWARD: SpanKind.FORWARD_COMM,
    SpanKind.BACKWARD: SpanKind.BACKWARD_COMM,
}


@dataclass
class _Listener:
    """Who is told, the thread that runs its loop, and how often it has asked to be."""

    recorder: Recorder
    thread: int
    in_backward: bool
    count: int = 1


class _Local(threading.local):
    """How many calls that are not to be recorded this thread is inside of."""

    depth = 0


_local = _Local()
_listeners: list[_Listener] = []
_replaced: dict[str, tuple[Any, Any]] = {}
"""By name: what torch had, and what of ours is there now."""


def listen(recorder: Recorder, *, in_backward: bool = True) -> None:
    """Has the collectives of modules recorded from now on. Call it on the loop's thread.

    Args:
        recorder: Takes the spans; its ``phase`` tells where they belong.
        in_backward: Whether those in backward can be told from gradient traffic.
    """
    for listener in _listeners:
        if listener.recorder is recorder:
            listener.count += 1
            listener.in_backward &= in_backward
            return
    _listeners.append(_Listener(recorder, threading.get_ident(), in_backward))
    if len(_listeners) == 1:
        _install()


def stop_listening(recorder: Recorder) -> None:
    """Takes back one :func:`listen`; with the last one, torch is as it was."""
    for listener in _listeners:
        if listener.recorder is recorder:
            listener.count -= 1
            if not listener.count:
                _listeners.remove(listener)
                if not _listeners:
                    _uninstall()
            return


def is_installed() -> bool:
    """Tells whether functions of ``torch.distributed`` are replaced now."""
    return bool(_replaced)


class Unobserved:
    """What is issued inside, on this thread, is not recorded: it is recorded elsewhere."""

    def __enter__(self) -> None:
        """Begins."""
        _local.depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends; exceptions pass through."""
        _local.depth -= 1


def _hearing() -> list[tuple[Recorder, SpanKind]]:
    """Returns who records a call that this thread makes now, and as what.

    Forward runs on the loop's thread. Backward does too on a CPU; on a GPU autograd has a
    thread for each device. A pass has a number on any thread that works on it, which tells
    it from a backend's callbacks, and from threads that have nothing to do with training.
    """
    if _local.depth:
        return []
    found = []
    for listener in _listeners:
        phase = listener.recorder.phase
        if phase is None or (phase is SpanKind.BACKWARD and not listener.in_backward):
            continue
        if listener.thread == threading.get_ident() or (
            phase is SpanKind.BACKWARD and current_pass() != NO_PASS
        ):
            found.append((listener.recorder, _KINDS[phase]))
    return found


def _observe(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that does what ``original`` does and has it recorded."""
    reduces = original.__name__ in ("all_reduce", "all_reduce_coalesced")

    @functools.wraps(original)
    def observed(*args: Any, **keywords: Any) -> Any:
        # Dynamo sees nothing but the call that it knows how to compile.
        if torch.compiler.is_compiling():
            return original(*args, **keywords)
        hearing = _hearing()
        if not hearing:
            if not reduces:
                return original(*args, **keywords)
            _note_outside(args, keywords)
            # Below ours there may be somebody's function that calls another of these.
            with Unobserved():
                return original(*args, **keywords)
        begins = [recorder.mark() for recorder, _ in hearing]
        # Some of these functions call others of them, and all wait for their work.
        _local.depth += 1
        try:
            result = original(*args, **keywords)
        finally:
            _local.depth -= 1
        nbytes = _payload(args, keywords)
        for (recorder, kind), begin in zip(hearing, begins, strict=True):
            recorder.span(kind, begin, recorder.mark(), nbytes=nbytes)
        return result

    skip_frame(observed)
    return observed


def _note_outside(args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Counts what the loop reduces by itself, outside forward and backward."""
    for listener in _listeners:
        if not _local.depth and listener.thread == threading.get_ident():
            listener.recorder.reduced_outside_bytes += _payload(args, keywords) or 0


def _payload(args: tuple[Any, ...], keywords: dict[str, Any]) -> int | None:
    """Returns the bytes of a call's larger side, such as what an AllGather puts together."""
    return max(map(_nbytes, (*args, *keywords.values())), default=0) or None


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return 0


def _install() -> None:
    for name in FUNCTIONS:
        original = getattr(dist, name)
        ours = _observe(original)
        # Where pickle finds it by its name while it is there.
        ours.__module__ = dist.__name__
        _replaced[name] = (original, ours)
        setattr(dist, name, ours)
    original = dist.Work.__dict__["wait"]
    ours = _observe(original)
    _replaced["Work.wait"] = (original, ours)
    dist.Work.wait = ours  # type: ignore[method-assign]


def _uninstall() -> None:
    for name, (original, ours) in _replaced.items():
        owner: Any = dist.Work if name == "Work.wait" else dist
        attribute = name.rpartition(".")[2]
        # Whoever has put something around ours meanwhile keeps it; ours only passes on then.
        if owner.__dict__[attribute] is ours:
            setattr(owner, attribute, original)
    _replaced.clear()
