"""Collectives of modules: which calls are recorded, and that torch is left as it was."""

import threading

import pytest
import torch
import torch.distributed as dist

from ddp_profiler.measure import collectives
from ddp_profiler.measure.clock import HostTimeline
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.schema import SpanKind


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def recorder():
    recorder = Recorder(HostTimeline(), lambda columns: None)
    collectives.listen(recorder)
    yield recorder
    collectives.stop_listening(recorder)
    assert not collectives.is_installed()


def found(recorder):
    """(kind, bytes) of all spans."""
    return [(span[2], span[6]) for span in recorder._spans]


def on_another_thread(action):
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def reduce_in_backward():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: dist.all_reduce(grad.clone()))
    y.sum().backward()


@pytest.mark.parametrize("phase", [SpanKind.FORWARD, SpanKind.BACKWARD])
def test_a_synchronous_call_is_one_span_with_its_bytes(recorder, phase):
    recorder.phase = phase
    dist.all_reduce(torch.zeros(10))
    dist.all_gather([torch.zeros(10)], torch.zeros(10))
    dist.barrier()
    kind = SpanKind.FORWARD_COMM if phase is SpanKind.FORWARD else SpanKind.BACKWARD_COMM
    assert found(recorder) == [(kind, 40), (kind, 40), (kind, None)]


def test_an_asynchronous_call_is_the_call_and_its_wait(recorder):
    recorder.phase = SpanKind.FORWARD
    work = dist.all_reduce(torch.zeros(10), async_op=True)
    assert type(work).__module__.startswith("torch.")
    work.wait()
    assert found(recorder) == [(SpanKind.FORWARD_COMM, 40), (SpanKind.FORWARD_COMM, None)]


def test_nothing_is_recorded_outside_forward_and_backward(recorder):
    dist.all_reduce(torch.zeros(10))
    recorder.phase = SpanKind.FORWARD
    with collectives.Unobserved():
        dist.all_reduce(torch.zeros(10))
    recorder.begin_micro_step(1, 0)
    dist.all_reduce(torch.zeros(10))
    assert found(recorder) == []


def test_what_the_loop_reduces_by_itself_is_counted_once(monkeypatch):
    def all_reduce_coalesced(tensors):
        for tensor in tensors:
            dist.all_reduce(tensor)

    monkeypatch.setattr(dist, "all_reduce_coalesced", all_reduce_coalesced)
    recorder = Recorder(HostTimeline(), lambda columns: None)
    collectives.listen(recorder)
    try:
        dist.all_reduce_coalesced([torch.zeros(10), torch.zeros(5)])
        assert recorder.reduced_outside_bytes == 60
        with collectives.Unobserved():
            dist.all_reduce(torch.zeros(10))
        on_another_thread(lambda: dist.all_reduce(torch.zeros(10)))
        dist.broadcast(torch.zeros(10), 0)
        recorder.phase = SpanKind.FORWARD
        dist.all_reduce_coalesced([torch.zeros(10)])
        assert recorder.reduced_outside_bytes == 60
        recorder.phase = None
        dist.all_reduce(torch.zeros(10))
        assert recorder.reduced_outside_bytes == 100
    finally:
        collectives.stop_listening(recorder)


def test_other_threads_count_in_a_backward_pass_only(recorder):
    for recorder.phase in (SpanKind.FORWARD, SpanKind.BACKWARD):
        on_another_thread(lambda: dist.all_reduce(torch.zeros(10)))
    assert found(recorder) == []
    recorder.phase = SpanKind.BACKWARD
    # As autograd's own thread on a GPU.
    on_another_thread(reduce_in_backward)
    assert found(recorder) == [(SpanKind.BACKWARD_COMM, 8)]


def test_exceptions_pass_and_leave_no_trace(recorder):
    recorder.phase = SpanKind.FORWARD
    with pytest.raises(TypeError):
        dist.all_reduce("no tensor")
    assert found(recorder) == []
    dist.all_reduce(torch.zeros(1))
    assert len(found(recorder)) == 1


def test_backward_can_be_left_out():
    recorder = Recorder(HostTimeline(), lambda columns: None)
    collectives.listen(recorder, in_backward=False)
    for recorder.phase in (SpanKind.FORWARD, SpanKind.BACKWARD):
        dist.all_reduce(torch.zeros(1))
    collectives.stop_listening(recorder)
    assert found(recorder) == [(SpanKind.FORWARD_COMM, 4)]


def test_the_last_listener_takes_everything_away():
    before = [getattr(dist, name) for name in collectives.FUNCTIONS]
    wait = dist.Work.__dict__["wait"]
    first, second = (Recorder(HostTimeline(), lambda columns: None) for _ in range(2))
    for recorder in (first, second, first):
        collectives.listen(recorder)
    for recorder in (first, second):
        collectives.stop_listening(recorder)
        assert dist.all_reduce is not before[collectives.FUNCTIONS.index("all_reduce")]
    collectives.stop_listening(first)
    assert [getattr(dist, name) for name in collectives.FUNCTIONS] == before
    assert dist.Work.__dict__["wait"] is wait


def test_what_others_put_around_it_stays():
    original = dist.all_reduce
    recorder = Recorder(HostTimeline(), lambda columns: None)
    collectives.listen(recorder)
    ours = dist.all_reduce
    try:
        dist.all_reduce = lambda *args, **keywords: ours(*args, **keywords)
        theirs = dist.all_reduce
        collectives.stop_listening(recorder)
        assert dist.all_reduce is theirs
        dist.all_reduce(torch.zeros(1))
        assert found(recorder) == []
    finally:
        dist.all_reduce = original
