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

    def sleep_rest(self, seconds: float, begin: float) -> None:
        """Sleeps until work that began at ``begin``, by this clock, has taken ``seconds``."""
        self.sleep(seconds - (self.clock() - begin))


class _PacerOfThread(threading.local):
    def __init__(self) -> None:
        self.pacer = Pacer()


_of_thread = _PacerOfThread()


def precise_sleep(seconds: float) -> None:
    """Sleeps for a time in s, exact in the mean over the calling thread's sleeps."""
    _of_thread.pacer.sleep(seconds)
