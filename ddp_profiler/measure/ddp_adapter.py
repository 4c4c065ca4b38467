"""The one adapter to DistributedDataParallel: it sees gradient collectives and broadcasts.

Three mechanisms, tried in this order, each named in the record:

``process_group``
    DDP's reducer is handed a process group of ours that passes each call on to the
    real one and notes hand-over and completion. DDP keeps its own path through the
    reducer, so results stay bit-identical, and ``ddp.process_group`` is never touched.
    The reducer lets go of it again on detaching: a detached DDP runs no code of ours.
``user_hook``
    A communication hook that the user registers while the adapter is installed is
    wrapped: such hooks use a group of their own, which the first mechanism cannot see.
``comm_hook``
    Fallback where the reducer cannot be given another group: a communication hook of
    ours. It costs a pass over the gradients, and DDP never lets go of a hook.

Buffer broadcasts do not go through the reducer; ``_sync_buffers`` is timed as a whole, and so is
``_post_forward`` where DDP looks for unused parameters in it. What
modules send themselves is observed by :mod:`ddp_profiler.measure.collectives`; a hook, which
may use the same functions, is gradient traffic and left out there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_profiler.measure import collectives
from ddp_profiler.measure.backward import mark_end_of_nested_pass
from ddp_profiler.measure.clock import DeviceTimeline
from ddp_profiler.measure.collectives import Unobserved
from ddp_profiler.measure.gradient_norms import GradientNorms
from ddp_profiler.measure.marks import OpenSpan, Recorder
from ddp_profiler.measure.untraced import untraced
from ddp_profiler.schema import SpanKind

PROCESS_GROUP = "process_group"
USER_HOOK = "user_hook"
COMM_HOOK = "comm_hook"
SYNC_BUFFERS = "sync_buffers"

# The C++ method: the Python one of torch.futures adds a frame to every call.
_add_done_callback: Callable[[Any, Callable[[Any], None]], None] = torch._C.Future.add_done_callback


def probe() -> tuple[str, ...]:
    """Returns the mechanisms that the installed torch offers, best first."""
    found = []
    reducer = dist.Reducer  # type: ignore[attr-defined]
    if hasattr(reducer, "_update_process_group") and hasattr(dist.ProcessGroup, "allreduce"):
        found.append(PROCESS_GROUP)
    if hasattr(DDP, "register_comm_hook"):
        found.append(COMM_HOOK)
    return tuple(found)


class _ObservedGroup(dist.ProcessGroup):
    """Passes what a DDP reducer asks for to the real group and notes it.

    A reducer asks for allreduce (gradients; the unused-parameter map, which is int32)
    and broadcast (the order of rebuilt buckets). The object must be kept alive from
    Python while a reducer uses it: its overrides vanish with its last reference.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        recorder: Recorder,
        norms: GradientNorms,
        number: int | None = None,
    ) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._norms = norms
        self._recorder = recorder
        self._number = number
        # Gloo completes on threads of its own, whose current device and stream are not the
        # training's: an event recorded there would tell the time of something else.
        self._tells_ends = not (
            isinstance(recorder.timeline, DeviceTimeline)
            and group._get_backend_name().lower() == "gloo"
        )

    def getBackendName(self) -> str:
        return self._group._get_backend_name()

    # The trampoline of torch calls these with a list and options, never in the other forms.
    @untraced
    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        tensor = tensors[0]
        kind = (
            SpanKind.GRADIENT
            if tensor.is_floating_point() or tensor.is_complex()
            else SpanKind.BOOKKEEPING
        )
        number = self._number if kind is SpanKind.GRADIENT else None
        span = self._recorder.hand_over(kind, tensor.nbytes, number)
        if kind is SpanKind.BOOKKEEPING and tensor.device.type == "cpu":
            # DDP's map of the parameters that this rank has used, not reduced yet.
            span.value = tensor.numel() - int(torch.count_nonzero(tensor))
        if self._norms.wanted and kind is SpanKind.GRADIENT:
            self._norms.hand_over(tensor, self._group.size())
        work = self._group.allreduce(tensors, opts)
        self._note_end(work, span)
        if kind is SpanKind.GRADIENT:
            mark_end_of_nested_pass(self._recorder)
        return work

    @untraced
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        span = self._recorder.hand_over(SpanKind.BOOKKEEPING, tensors[0].nbytes)
        work = self._group.broadcast(tensors, opts)
        self._note_end(work, span)
        return work

    def _note_end(self, work: Any, span: OpenSpan) -> None:
        if self._tells_ends:
            _end_with(work.get_future(), span, self._recorder)
        else:
            span.awaited = False


def _end_with(future: Any, span: OpenSpan, recorder: Recorder) -> None:
    """Marks the end of a span when a future completes.

    Gloo completes it when the data has arrived, NCCL when the kernel is enqueued; for
    the latter, torch runs the callback on a stream that waits for the kernel, so that
    an event recorded there has the kernel's end.

    The callback is put together from built-ins: ``next`` lets ``map`` call the clock and
    pass what it tells to ``setattr(span, "end", ...)``; the future, which torch passes, is
    the default of ``next``, never used. A backend's thread has no Python thread state, so
    torch makes a new one for each callback, and its first Python frame maps memory that
    is unmapped at the end: 40 us where a callback of built-ins takes 10.
    """
    ends = map(partial(setattr, span, "end"), iter(recorder.mark, None))
    _add_done_callback(future, partial(next, ends))


class DdpAdapter:
    """Observes one DDP module; does not keep it alive.

    Args:
        ddp: The module to observe.
        recorder: Takes the marks.
        mechanism: One of :func:`probe`'s; the best of them where None.
        number: Which of several modules this is: the value of its gradient collectives, and the
            index of its buffer broadcasts.

    Attributes:
        norms: Reads the gradients that this module reduces by itself, while it is wanted; those
            that a user's hook reduces it does not see.
    """

    def __init__(
        self,
        ddp: DDP,
        recorder: Recorder,
        mechanism: str | None = None,
        *,
        number: int | None = None,
    ) -> None:
        available = probe()
        self._ddp = weakref.ref(ddp)
        self._recorder = recorder
        self._number = number
        self.mechanism = mechanism or (available[0] if available else None)
        self.norms = GradientNorms(recorder, -1 if number is None else number)
        self._group: _ObservedGroup | None = None
        self._hook_registered = False
        self.attached = False

    @property
    def ddp(self) -> DDP | None:
        """The module; None if it is gone."""
        return self._ddp()

    @property
    def sources(self) -> dict[str, str | None]:
        """Which mechanism gives each figure; None where none can."""
        return {
            "gradient_collectives": self._gradient_source,
            "buffer_broadcasts": SYNC_BUFFERS,
            "forward_comm": collectives.SOURCE,
            "backward_comm": collectives.SOURCE if self._knows_hooks else None,
        }

    @property
    def _gradient_source(self) -> str | None:
        if not self._knows_hooks:
            return None
        return USER_HOOK if self.ddp in _user_hooks else self.mechanism

    @property
    def _knows_hooks(self) -> bool:
        """Whether the collectives of a hook, if there is one, are seen and told from a module's.

        A hook that was registered while the adapter was not installed is not wrapped.
        """
        ddp = self.ddp
        hooked = bool(getattr(ddp, "_comm_hooks", ()))
        return not hooked or self._hook_registered or ddp in _user_hooks

    def attach(self) -> None:
        """Starts observing, if the module is still there. Takes effect with the next backward."""
        ddp = self.ddp
        if self.attached or ddp is None:
            return
        if self.mechanism == PROCESS_GROUP:
            if self._group is None:
                self._group = _ObservedGroup(
                    ddp.process_group, self._recorder, self.norms, self._number
                )
            ddp.reducer._update_process_group(self._group)
        elif self.mechanism == COMM_HOOK and not self._hook_registered:
            ddp.register_comm_hook(self, _observing_hook)
            self._hook_registered = True
        _observers[ddp] = self._recorder, self._number
        _patch_class()
        collectives.listen(self._recorder, in_backward=self._knows_hooks)
        self.attached = True

    def detach(self) -> None:
        """Stops observing. With the process-group mechanism nothing of ours is left in DDP."""
        if not self.attached:
            return
        ddp = self.ddp
        if ddp is not None:
            if self.mechanism == PROCESS_GROUP:
                ddp.reducer._update_process_group(ddp.process_group)
            _observers.pop(ddp, None)
        collectives.stop_listening(self._recorder)
        _unpatch_class()
        self.attached = False


def has_user_hook(ddp: DDP) -> bool:
    """Tells whether a communication hook of the script's reduces a model's gradients."""
    if ddp in _user_hooks:
        return True
    return any(hook is not _observing_hook for hook, _ in getattr(ddp, "_comm_hooks", ()))


@untraced
def _observing_hook(state: DdpAdapter, bucket: Any) -> Any:
    """Reduces a bucket as DDP does by itself, and notes it while its adapter is attached.

    DDP multiplies by 1/world where it has no hook; dividing would differ in the last bit.
    """
    ddp = state.ddp
    # It owns the reducer that calls this.
    assert ddp is not None
    group = ddp.process_group
    tensor = bucket.buffer().mul_(1.0 / group.size())
    span = None
    if state.attached:
        span = state._recorder.hand_over(SpanKind.GRADIENT, tensor.nbytes, state._number)
        if state.norms.wanted:
            state.norms.hand_over(tensor, group.size())
    with Unobserved():
        work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    future = work.get_future()
    if span is not None:
        _end_with(future, span, state._recorder)
    return future.then(_first_tensor)


# DDP takes a hook whose second parameter is called bucket and is of its own type or unannotated.
_observing_hook.__annotations__ = {}


def _first_tensor(future: Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


_observers: weakref.WeakKeyDictionary[DDP, tuple[Recorder, int | None]] = (
    weakref.WeakKeyDictionary()
)
"""Who observes a module, and the module's number."""
_user_hooks: weakref.WeakSet[DDP] = weakref.WeakSet()
_patches = 0
_original_sync_buffers: Callable[[DDP], None] = DDP._sync_buffers
_original_register_comm_hook = DDP.register_comm_hook
_original_post_forward: Callable[[DDP, Any], Any] = DDP._post_forward


@untraced
def _observed_sync_buffers(self: DDP) -> None:
    observer = _observers.get(self)
    if observer is None:
        _original_sync_buffers(self)
        return
    recorder, number = observer
    begin = recorder.mark()
    # A user's buffer hook may call torch.distributed's functions.
    with Unobserved():
        _original_sync_buffers(self)
    recorder.span(
        SpanKind.FORWARD_COMM, begin, recorder.mark(), index=-1 if number is None else number
    )


@untraced
def _observed_post_forward(self: DDP, output: Any) -> Any:
    observer = _observers.get(self)
    if observer is None or not _searches(self):
        return _original_post_forward(self, output)
    recorder, _ = observer
    begin = recorder.mark()
    result = _original_post_forward(self, output)
    recorder.span(SpanKind.GRAPH_SEARCH, begin, recorder.mark())
    return result


def _searches(ddp: DDP) -> bool:
    """Tells whether DDP looks for unused parameters at the end of this forward."""
    return bool(
        ddp.find_unused_parameters
        and not ddp.static_graph
        and ddp.require_backward_grad_sync
        and torch.is_grad_enabled()
        # Buffers would be broadcast there as well.
        and not ddp._check_sync_bufs_post_fwd()  # type: ignore[no-untyped-call]
    )


def _observed_register_comm_hook(self: DDP, state: object, hook: Callable[..., Any]) -> None:
    if hook is _observing_hook:
        _original_register_comm_hook(self, state, hook)
        return

    # DDP keeps its hook in C++, where nobody finds a cycle: strongly it would live for ever.
    observed_ddp = weakref.ref(self)

    @untraced
    def observed(state: object, bucket: Any) -> Any:
        ddp = observed_ddp()
        recorder, number = (None, None) if ddp is None else _observers.get(ddp, (None, None))
        span = recorder and recorder.hand_over(SpanKind.GRADIENT, bucket.buffer().nbytes, number)
        with Unobserved():
            future = hook(state, bucket)
        if recorder and span:
            _end_with(future, span, recorder)
        return future

    # DDP logs the hook's name.
    observed.__qualname__ = getattr(hook, "__qualname__", "hook")
    observed.__annotations__ = {}
    _user_hooks.add(self)
    _original_register_comm_hook(self, state, observed)


@contextmanager
def installed() -> Iterator[None]:
    """Keeps the class-wide part installed: user hooks registered meanwhile are seen.

    Leaves ``DistributedDataParallel`` as it was.
    """
    _patch_class()
    try:
        yield
    finally:
        _unpatch_class()


def is_installed() -> bool:
    """Tells whether any part of the adapter is installed in torch now."""
    return _patches > 0 or collectives.is_installed()


def _patch_class() -> None:
    # On the class, not on the object: deepcopy and pickle of a DDP copy its attributes.
    global _patches
    _patches += 1
    if _patches == 1:
        DDP._sync_buffers = _observed_sync_buffers  # type: ignore[method-assign]
        DDP._post_forward = _observed_post_forward  # type: ignore[method-assign]
        DDP.register_comm_hook = _observed_register_comm_hook  # type: ignore[method-assign]


def _unpatch_class() -> None:
    global _patches
    _patches -= 1
    if _patches == 0:
        DDP._sync_buffers = _original_sync_buffers  # type: ignore[method-assign]
        DDP._post_forward = _original_post_forward  # type: ignore[method-assign]
        DDP.register_comm_hook = _original_register_comm_hook  # type: ignore[method-assign]
