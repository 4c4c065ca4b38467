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


class CoverBefore:
    """How much of the time before each of some times the union of intervals covers.

    Intervals come in order of their begin, as for ``Cover``.

    Args:
        edges_ns: The times, in order.

    Attributes:
        covered_ns: What is covered before each so far, [edge].
    """

    def __init__(self, edges_ns: Ints) -> None:
        self._edges_ns = edges_ns
        self._reach_ns = _BEFORE_ALL
        self.covered_ns = np.zeros(edges_ns.size, np.int64)

    def add(self, begin_ns: Ints, end_ns: Ints) -> None:
        """Adds intervals, none of which begins before one that was added."""
        if not begin_ns.size:
            return
        reached = np.maximum(np.maximum.accumulate(end_ns), self._reach_ns)
        since = begin_ns.copy()
        since[0] = max(int(since[0]), self._reach_ns)
        np.maximum(since[1:], reached[:-1], out=since[1:])
        self._reach_ns = int(reached[-1])
        # What each adds to those before it: pieces that do not overlap.
        new = end_ns > since
        since, until = since[new], end_ns[new]
        if not since.size:
            return
        before = np.concatenate(([0], np.cumsum(until - since)))
        first = int(np.searchsorted(self._edges_ns, since[0]))
        last = int(np.searchsorted(self._edges_ns, until[-1]))
        edges = self._edges_ns[first:last]
        piece = np.searchsorted(since, edges, "right")
        at = np.maximum(piece - 1, 0)
        not_yet = np.where(piece > 0, np.maximum(until[at] - edges, 0), 0)
        self.covered_ns[first:last] += before[piece] - not_yet
        self.covered_ns[last:] += before[-1]


def covered_ns(begin_ns: Ints, end_ns: Ints) -> int:
    """Returns how much time the union of intervals covers, in ns, in any order.

    >>> covered_ns(np.array([5, 0, 2]), np.array([9, 3, 4]))
    8
    """
    order = np.argsort(begin_ns, kind="stable")
    cover = Cover()
    cover.add(begin_ns[order], end_ns[order])
    return cover.covered_ns
