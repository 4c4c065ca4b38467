"""The one clock behind all marks, and the timelines that marks are made on.

A timeline makes marks cheaply and tells their time later. On CPU a mark is the
time itself. On a GPU a mark is a CUDA event that the stream reaches when the work
before it is done; its time is read after the fact, so that nothing is
synchronised between the phases of a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Mark = Any
"""What a timeline's ``mark`` returns; only that timeline can tell its time."""


class Clock(Protocol):
    """A monotonic clock in integer nanoseconds. Tests replace it."""

    def __call__(self) -> int:
        """Returns the time in ns."""
        ...


monotonic_clock: Clock = time.monotonic_ns
"""CLOCK_MONOTONIC in ns: common to the processes of one host only.

The built-in itself and no function around it: a mark is made without a Python frame.
"""


class Timeline(Protocol):
    """Makes marks now and tells their time, in ns, later."""

    mark: Callable[[], Mark]

    def ready(self, mark: Mark) -> bool:
        """Tells whether the time of a mark can be read without waiting."""
        ...

    def time_ns(self, mark: Mark) -> int:
        """Returns the time of a mark in ns; waits where the device has not reached it."""
        ...

    def release(self, marks: list[Mark]) -> None:
        """Takes marks back that will not be read again."""
        ...


class HostTimeline:
    """Timeline of a CPU: a mark is its time.

    Args:
        clock: Clock to read.
    """

    def __init__(self, clock: Clock = monotonic_clock) -> None:
        self.mark: Callable[[], Mark] = clock

    def ready(self, mark: Mark) -> bool:
        """Tells that every mark can be read at once."""
        return True

    def time_ns(self, mark: Mark) -> int:
        """Returns the time of a mark in ns."""
        return int(mark)

    def release(self, marks: list[Mark]) -> None:
        """Does nothing: numbers need no pool."""


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that a timeline needs."""

    def record(self) -> None:
        """Puts the event into the current stream."""
        ...

    def query(self) -> bool:
        """Tells whether the stream has reached the event."""
        ...

    def synchronize(self) -> None:
        """Waits until the stream has reached the event."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Returns the time from this event to another in ms."""
        ...


_ANCHOR_TRIES = 5
_LEAST_BASELINE_NS = 1_000_000_000
"""Device time over which its rate against the host's is fitted, at least: over 1 s anchors that
are known to 10 us give the rate to 10 ppm."""
_UNFITTED_RATE = 100e-6
"""By how much a device's rate may differ from the host's while it is not fitted yet."""


class DeviceTimeline:
    """Timeline of a GPU's streams, by pooled events.

    Event times are relative to each other. They are told in ns of the host's clock, from
    an anchor event whose host time was taken when the device had just reached it.
    :meth:`move_anchor` takes a new anchor, for two reasons: the device's clock drifts from
    the host's (some us a second), and ``elapsed_time`` is a 32-bit float in ms (0.5 us up
    to 4 s, 64 us after ten minutes). From all anchors so far comes the device's rate, by
    which times after the latest anchor are told.

    Args:
        make_event: Makes an event with timing enabled, ``torch.cuda.Event(enable_timing=True)``.
        clock: Host clock for the anchor.
    """

    def __init__(self, make_event: Callable[[], Event], clock: Clock = monotonic_clock) -> None:
        self._make_event = make_event
        self._pool: deque[Event] = deque()
        self._anchor: Any = None
        self._anchor_ns = 0
        self._clock = clock
        self._host_total_ns = 0
        self._device_total_ns = 0.0
        self._longest_ns = 0
        self._half_bracket_ns = 0
        self._rate = 1.0
        self.mark: Callable[[], Mark] = self._mark
        self.move_anchor()

    @property
    def rate(self) -> float:
        """Host time that passes in a unit of device time; 1 until it is fitted."""
        return self._rate

    @property
    def uncertainty_ns(self) -> int:
        """By how much a told time may be off the host's clock, in ns.

        Half of the widest bracket of an anchor, and what the uncertainty of the rate makes
        of the longest time between two anchors.
        """
        fitted = self._device_total_ns >= _LEAST_BASELINE_NS
        of_rate = 2 * self._half_bracket_ns / self._device_total_ns if fitted else _UNFITTED_RATE
        return self._half_bracket_ns + round(of_rate * self._longest_ns)

    def _mark(self) -> Mark:
        event = self._pool.popleft() if self._pool else self._make_event()
        event.record()
        return event

    def ready(self, mark: Mark) -> bool:
        """Tells whether the stream has reached the mark."""
        return bool(mark.query())

    def time_ns(self, mark: Mark) -> int:
        """Returns the time of a mark in ns; waits where the stream has not reached it."""
        mark.synchronize()
        return self._anchor_ns + round(float(self._anchor.elapsed_time(mark)) * 1e6 * self._rate)

    def move_anchor(self) -> None:
        """Ties the device's time to the host's anew. Waits for the device.

        Of a few tries the one counts whose host time is bracketed most tightly: between
        recording the event on an idle device and seeing that it was reached.
        """
        best: Any = None
        best_ns, tightest = 0, 0
        for _ in range(_ANCHOR_TRIES):
            event: Any = self._pool.popleft() if self._pool else self._make_event()
            before = self._clock()
            event.record()
            event.synchronize()
            after = self._clock()
            if best is None or after - before < tightest:
                tightest, best_ns = after - before, (before + after) // 2
                event, best = best, event
            if event is not None:
                self._pool.append(event)
        self._half_bracket_ns = max(self._half_bracket_ns, (tightest + 1) // 2)
        if self._anchor is not None:
            passed = best_ns - self._anchor_ns
            self._host_total_ns += passed
            self._device_total_ns += float(self._anchor.elapsed_time(best)) * 1e6
            self._longest_ns = max(self._longest_ns, passed)
            if self._device_total_ns >= _LEAST_BASELINE_NS:
                self._rate = self._host_total_ns / self._device_total_ns
            self._pool.append(self._anchor)
        self._anchor, self._anchor_ns = best, best_ns

    def release(self, marks: list[Mark]) -> None:
        """Puts events back into the pool."""
        self._pool.extend(marks)
