"""Timelines: of the host, and of a simulated device with a stream of its own."""

import random

import numpy as np
import pytest

from ddp_profiler.measure.clock import DeviceTimeline, HostTimeline, monotonic_clock

MS = 1_000_000


class Device:
    """A stream that works off what is put into it, and a host that runs ahead of it.

    Attributes:
        host_ns: The host's time.
        free_ns: The time at which the stream has worked off all that it was given.
        events: Events made so far.
    """

    def __init__(self, host_ns=5_000_000_000):
        self.host_ns = host_ns
        self.free_ns = host_ns
        self.events = 0
        self.waits = 0

    def clock(self):
        return self.host_ns

    def make_event(self):
        self.events += 1
        return Event(self)

    def enqueue(self, length_ns):
        self.free_ns = max(self.free_ns, self.host_ns) + length_ns


class Event:
    """Like ``torch.cuda.Event``: 32-bit milliseconds from another event."""

    def __init__(self, device):
        self.device = device
        self.at_ns = None

    def record(self):
        self.at_ns = max(self.device.free_ns, self.device.host_ns)

    def query(self):
        return self.at_ns <= self.device.host_ns

    def synchronize(self):
        if self.at_ns > self.device.host_ns:
            self.device.waits += 1
            self.device.host_ns = self.at_ns

    def elapsed_time(self, end):
        return float(np.float32((end.at_ns - self.at_ns) / MS))


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def timeline(device):
    return DeviceTimeline(device.make_event, device.clock)


def test_host_marks_are_times():
    ticks = iter([17, 42])
    timeline = HostTimeline(lambda: next(ticks))
    first, second = timeline.mark(), timeline.mark()
    assert (timeline.time_ns(first), timeline.time_ns(second)) == (17, 42)
    assert timeline.ready(first)
    timeline.release([first, second])


def test_monotonic_clock_is_whole_and_never_goes_back():
    times = [monotonic_clock() for _ in range(100)]
    assert all(isinstance(time, int) for time in times)
    assert times == sorted(times)
    assert times[-1] > 0


def test_device_marks_have_the_time_at_which_the_stream_reaches_them(device, timeline):
    device.enqueue(30 * MS)
    begin = timeline.mark()
    device.enqueue(20 * MS)
    end = timeline.mark()
    # The host has not waited: nothing is synchronised between phases.
    assert device.waits == 0
    assert not timeline.ready(begin)
    assert timeline.time_ns(begin) == 5_030 * MS
    assert timeline.time_ns(end) - timeline.time_ns(begin) == 20 * MS


def test_ready_without_waiting(device, timeline):
    device.enqueue(10 * MS)
    mark = timeline.mark()
    assert not timeline.ready(mark)
    device.host_ns += 9 * MS
    assert not timeline.ready(mark)
    device.host_ns += 1 * MS
    assert timeline.ready(mark)
    assert device.waits == 0


def test_reading_a_mark_waits_for_it(device, timeline):
    device.enqueue(10 * MS)
    timeline.time_ns(timeline.mark())
    assert device.waits == 1
    assert device.host_ns == 5_010 * MS


def test_released_events_are_used_again(device, timeline):
    marks = [timeline.mark() for _ in range(8)]
    made = device.events
    timeline.release(marks)
    again = []
    for i in range(8):
        device.host_ns = 6_000 * MS + i * MS
        again.append(timeline.mark())
    assert device.events == made
    assert {id(mark) for mark in again} == {id(mark) for mark in marks}
    assert [timeline.time_ns(mark) for mark in again] == [6_000 * MS + i * MS for i in range(8)]
    # The pool is empty: a ninth mark takes none that is still in use.
    assert timeline.mark() not in again
    assert device.events == made + 1


def test_moving_the_anchor_keeps_times(device, timeline):
    device.enqueue(1_234_567)
    mark = timeline.mark()
    before = timeline.time_ns(mark)
    device.host_ns += 3_000 * MS
    timeline.move_anchor()
    assert timeline.time_ns(mark) == pytest.approx(before, abs=500)


def test_times_stay_right_over_an_hour(device, timeline):
    """With blocks of 4 s the anchor moves 900 times; 32-bit times alone would be 0.25 ms off."""
    generator = random.Random(3)
    start = device.host_ns
    worst = 0
    while device.host_ns - start < 3_600_000 * MS:
        device.enqueue(generator.randrange(1_000 * MS, 4_000 * MS))
        mark = timeline.mark()
        worst = max(worst, abs(timeline.time_ns(mark) - mark.at_ns))
        timeline.release([mark])
        timeline.move_anchor()
    assert worst < 20_000
    # Within a block the error of a length is that of one reading.
    begin = timeline.mark()
    device.enqueue(36_123_456)
    end = timeline.mark()
    assert timeline.time_ns(end) - timeline.time_ns(begin) == pytest.approx(36_123_456, abs=500)


def test_anchor_does_not_grow_the_number_of_events(device, timeline):
    for _ in range(100):
        timeline.move_anchor()
    # The one in force, and two to try with.
    assert device.events <= 3
    assert device.waits == 0


@pytest.mark.parametrize("ppm", [20, -50])
def test_a_device_clock_that_drifts_stays_tied_to_the_host(device, timeline, monkeypatch, ppm):
    """20 ppm are 72 ms in an hour; with the fitted rate not even 10 s between anchors show."""
    ideal = Event.elapsed_time
    monkeypatch.setattr(
        Event, "elapsed_time", lambda self, end: ideal(self, end) * (1 + ppm * 1e-6)
    )
    for number in range(360):
        device.host_ns += 10_000 * MS
        mark = timeline.mark()
        off = abs(timeline.time_ns(mark) - mark.at_ns)
        assert off < (0.6 * MS if number == 0 else 0.005 * MS)
        assert number == 0 or off <= timeline.uncertainty_ns + 2_000
        timeline.release([mark])
        timeline.move_anchor()
    assert timeline.rate == pytest.approx(1 - ppm * 1e-6, abs=1e-7)


def test_the_uncertainty_is_that_of_the_widest_bracket(device, monkeypatch):
    """A device that answers 40 us after it was asked: the anchor is known to half of that."""
    monkeypatch.setattr(Event, "synchronize", lambda self: device.enqueue_host(40_000))
    device.enqueue_host = lambda ns: setattr(device, "host_ns", device.host_ns + ns)
    timeline = DeviceTimeline(device.make_event, device.clock)
    assert timeline.uncertainty_ns == 20_000
    device.host_ns += 4_000 * MS
    timeline.move_anchor()
    # 4 s at a rate that two anchors of 20 us give to 10 ppm.
    assert timeline.uncertainty_ns == pytest.approx(60_000, rel=0.01)
