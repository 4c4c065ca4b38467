"""The recorder: what it hands to its sink, with a clock and a timeline of ours."""

import itertools
from types import SimpleNamespace

import pytest

from ddp_profiler.measure import marks
from ddp_profiler.measure.clock import DeviceTimeline, HostTimeline
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.schema import SPAN_COLUMNS, SpanKind, Variant
from tests.unit.test_clock import Device


class Sink:
    def __init__(self):
        self.batches = []

    def __call__(self, columns):
        self.batches.append(columns)

    def rows(self, batch=-1):
        columns = self.batches[batch]
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]


class Waiting:
    """Stands for the module ``time``: sleeping moves the clock, and something may happen."""

    def __init__(self):
        self.now = 100.0
        self.at = {}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for when in [when for when in self.at if when <= self.now]:
            self.at.pop(when)()


@pytest.fixture
def waiting(monkeypatch):
    fake = Waiting()
    monkeypatch.setattr(marks, "time", SimpleNamespace(monotonic=fake.monotonic, sleep=fake.sleep))
    return fake


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
def recorder(sink):
    ticks = itertools.count(1000, 10)
    return Recorder(HostTimeline(lambda: next(ticks)), sink)


def test_columns_are_those_of_the_schema(recorder, sink):
    recorder.begin_block(3, 1, 7, Variant.INSTRUMENTED)
    recorder.begin_micro_step(5, 2)
    recorder.span(SpanKind.FORWARD, 11, 29, samples=8, value=512)
    recorder.point(SpanKind.LOCAL_BACKWARD_END)
    recorder.step_span(1, 99)
    recorder.flush()
    assert list(sink.batches[0]) == [name for name, _ in SPAN_COLUMNS]
    place = {"level": 3, "repetition": 1, "block": 7, "variant": 1, "step": 5}
    nothing = {"index": -1, "bytes": None, "samples": None, "value": None}
    assert sink.rows() == [
        {
            **place,
            **nothing,
            "micro_step": 2,
            "kind": SpanKind.FORWARD,
            "begin_ns": 11,
            "end_ns": 29,
            "samples": 8,
            "value": 512,
        },
        {
            **place,
            **nothing,
            "micro_step": 2,
            "kind": SpanKind.LOCAL_BACKWARD_END,
            "begin_ns": 1000,
            "end_ns": 1000,
        },
        {
            **place,
            **nothing,
            "micro_step": -1,
            "kind": SpanKind.STEP,
            "begin_ns": 1,
            "end_ns": 99,
        },
    ]


def test_buckets_count_from_0_in_each_micro_step(recorder, sink):
    for micro_step in range(2):
        recorder.begin_micro_step(0, micro_step)
        for kind in (SpanKind.GRADIENT, SpanKind.BOOKKEEPING, SpanKind.GRADIENT):
            span = recorder.hand_over(kind, 64)
            span.end = recorder.mark()
    recorder.flush()
    rows = sink.rows()
    assert [row["index"] for row in rows] == [0, -1, 1] * 2
    assert [row["micro_step"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row["bytes"] for row in rows] == [64] * 6
    assert [(row["begin_ns"], row["end_ns"]) for row in rows[:2]] == [(1000, 1010), (1020, 1030)]


def test_collective_belongs_to_the_micro_step_of_its_hand_over(recorder, sink):
    recorder.begin_micro_step(4, 0)
    span = recorder.hand_over(SpanKind.GRADIENT, 1)
    recorder.begin_micro_step(5, 1)
    span.end = recorder.mark()
    recorder.flush()
    assert [(row["step"], row["micro_step"]) for row in sink.rows()] == [(4, 0)]


def test_each_flush_hands_over_what_is_new(recorder, sink):
    recorder.span(SpanKind.DATA, 1, 2)
    recorder.flush()
    recorder.begin_block(1, 0, 2, Variant.PLAIN)
    recorder.span(SpanKind.DATA, 3, 4)
    recorder.flush()
    recorder.flush()
    assert len(sink.batches) == 2
    assert [(row["level"], row["block"], row["begin_ns"]) for row in sink.rows()] == [(1, 2, 3)]


def test_flush_waits_for_completions_that_come_late(recorder, sink, waiting):
    span = recorder.hand_over(SpanKind.GRADIENT, 1)
    waiting.at[100.2] = lambda: setattr(span, "end", recorder.mark())
    recorder.flush()
    assert [row["end_ns"] for row in sink.rows()] == [1010]
    assert waiting.now == pytest.approx(100.2, abs=0.01)


def test_flush_gives_up_and_leaves_the_end_open(recorder, sink, waiting):
    recorder.hand_over(SpanKind.GRADIENT, 1)
    done = recorder.hand_over(SpanKind.GRADIENT, 1)
    done.end = recorder.mark()
    recorder.flush()
    assert [row["end_ns"] for row in sink.rows()] == [None, 1020]
    assert waiting.now == pytest.approx(100.5, abs=0.01)


def test_flush_does_not_wait_without_reason(recorder, waiting):
    recorder.span(SpanKind.DATA, 1, 2)
    recorder.hand_over(SpanKind.GRADIENT, 1).end = recorder.mark()
    recorder.flush()
    assert waiting.now == 100.0


def test_events_are_released_once_and_used_again(sink):
    """Steps share the mark at which one ends and the next begins."""
    device = Device()
    recorder = Recorder(DeviceTimeline(device.make_event, device.clock), sink)
    made = []
    for _ in range(3):
        begin = recorder.mark()
        for step in range(4):
            recorder.begin_micro_step(step, 0)
            device.enqueue(1_000_000)
            recorder.point(SpanKind.LOCAL_BACKWARD_END)
            recorder.hand_over(SpanKind.GRADIENT, 1).end = recorder.mark()
            device.enqueue(1_000_000)
            end = recorder.mark()
            recorder.step_span(begin, end)
            begin = end
        recorder.flush()
        made.append(device.events)
    assert made[0] == made[1] == made[2]
    steps = [row for row in sink.rows() if row["kind"] == SpanKind.STEP]
    lengths = [row["end_ns"] - row["begin_ns"] for row in steps]
    assert lengths == pytest.approx([2_000_000] * 4, abs=500)
    # Had an event been released twice, two marks of a block would be one event.
    assert len({row["end_ns"] for row in steps}) == 4
