"""Sleeping without busy waiting, yet exact in the mean.

A thread wakes up late: by the kernel's timer slack (50 us by default on Linux), by
waiting for a core, and by waiting for the interpreter lock. What one sleep took too
much, the next one takes less.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pacer:
    """Sleeps whose mean length is what was asked for.

    Only the lateness of the sleep itself is made up for, never the work between sleeps.

    Args:
        clock: Returns a monotonic time in s; kept as an attribute.
        sleep: Waits for a time in s, or longer.
    """

    # A process that was stopped for seconds should not skip its sleeps for seconds.
    MAX_DEBT_S = 0.1

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.clock = clock
        self._sleep = sleep
        self._debt_s = 0.0

    @property
    def debt_s(self) -> float:
        """Time in s by which the sleeps so far were too long, not yet made up for."""
        return self._debt_s

    def sleep(self, seconds: float) -> None:
        """Sleeps for ``seconds``, less what earlier sleeps were late; not below 0."""
        if seconds <= 0:
            return
        left = seconds - self._debt_s
        if left <= 0:
            self._debt_s = -left
            return
        begin = self.clock()
        self._sleep(left)
        self._debt_s = min(self.clock() - begin - left, self.MAX_DEBT_S)

    def begin(self) -> float:
        """Returns when a layer that is called now begins: now."""
        return self.clock()

    def finish(self, seconds: float, begin: float) -> None:
        """Sleeps until work that began at ``begin``, by this clock, has taken ``seconds``."""
        self.sleep(seconds - (self.clock() - begin))


class Schedule:
    """Ends the layers of a pass on a schedule, so that the whole pass takes what was planned.

    A layer begins where the one before it should have ended, unless more than
    ``max_gap_s`` lies between: then it begins now. Small work between layers and late
    wake-ups (0.1 to 0.5 ms a layer on a virtual machine) are absorbed, larger delays are not.

    Args:
        clock: Returns a monotonic time in s; kept as an attribute.
        sleep: Waits for a time in s, or longer.
        max_gap_s: The longest gap in s that is absorbed.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        max_gap_s: float = 0.0015,
    ) -> None:
        self.clock = clock
        self._sleep = sleep
        self._max_gap_s = max_gap_s
        self._planned_end = float("-inf")

    def begin(self) -> float:
        """Returns when a layer that is called now begins, by the schedule."""
        now = self.clock()
        return self._planned_end if now - self._planned_end < self._max_gap_s else now

    def finish(self, seconds: float, begin: float) -> None:
        """Sleeps until ``seconds`` after ``begin``, which :meth:`begin` returned."""
        self._planned_end = begin + seconds
        left = self._planned_end - self.clock()
        if left > 0:
            self._sleep(left)


class _PacerOfThread(threading.local):
    def __init__(self) -> None:
        self.pacer = Pacer()


_of_thread = _PacerOfThread()


def precise_sleep(seconds: float) -> None:
    """Sleeps for a time in s, exact in the mean over the calling thread's sleeps."""
    _of_thread.pacer.sleep(seconds)
