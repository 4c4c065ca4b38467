"""How much time intervals cover, in whole ns, a block of them at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_profiler.trace.columns import Ints

_BEFORE_ALL = np.iinfo(np.int64).min


@dataclass
class Cover:
    """The time that the union of intervals covers, which come in order of their begin.

    Blocks are added one after the other, so that a long recording needs no more memory than a
    short one. What two unions cover at once follows from three: both alone, less both together.

    Attributes:
        covered_ns: What is covered so far.
        reach_ns: The latest end so far.
    """

    covered_ns: int = 0
    reach_ns: int = _BEFORE_ALL

    def add(self, begin_ns: Ints, end_ns: Ints) -> None:
        """Adds intervals, none of which begins before one that was added."""
        if not begin_ns.size:
            return
        reached = np.maximum.accumulate(end_ns)
        np.maximum(reached, self.reach_ns, out=reached)
        # From where each one adds something: its begin, or where those before it end.
        since = begin_ns.copy()
        since[0] = max(int(since[0]), self.reach_ns)
        np.maximum(since[1:], reached[:-1], out=since[1:])
        np.subtract(end_ns, since, out=since)
        self.covered_ns += int(since[since > 0].sum())
        self.reach_ns = int(reached[-1])


def covered_ns(begin_ns: Ints, end_ns: Ints) -> int:
    """Returns how much time the union of intervals covers, in ns, in any order.

    >>> covered_ns(np.array([5, 0, 2]), np.array([9, 3, 4]))
    8
    """
    order = np.argsort(begin_ns, kind="stable")
    cover = Cover()
    cover.add(begin_ns[order], end_ns[order])
    return cover.covered_ns
