"""Unions and differences of intervals, as intervals: sorted, disjoint, in whole ns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ddp_profiler.trace.columns import Ints


class Intervals(NamedTuple):
    """Begins and ends in ns, [interval]."""

    begin_ns: Ints
    end_ns: Ints

    def total_ns(self) -> int:
        """Returns the sum of the lengths."""
        return int((self.end_ns - self.begin_ns).sum())


def union(begin_ns: Ints, end_ns: Ints) -> Intervals:
    """Returns the union of intervals; those that touch become one, empty ones vanish.

    >>> [part.tolist() for part in union(np.array([5, 0, 2, 9]), np.array([9, 3, 4, 9]))]
    [[0, 5], [4, 9]]
    """
    lasting = end_ns > begin_ns
    begin, end = begin_ns[lasting], end_ns[lasting]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    if not begin.size:
        return Intervals(begin, end)
    new = np.concatenate(([True], begin[1:] > end[:-1]))
    last = np.concatenate((np.flatnonzero(new)[1:] - 1, [begin.size - 1]))
    return Intervals(begin[new], end[last])


def without(one: Intervals, other: Intervals) -> Intervals:
    """Returns what of the first the second does not cover; both as ``union`` returns them.

    >>> one, other = union(np.array([0]), np.array([9])), union(np.array([2, 8]), np.array([4, 12]))
    >>> [part.tolist() for part in without(one, other)]
    [[0, 4], [2, 8]]
    """
    # Cut at every edge; each piece lies within or outside of either as a whole.
    edges = np.unique(np.concatenate((*one, *other)))
    begin, end = edges[:-1], edges[1:]
    kept = _covers(one, begin) & ~_covers(other, begin)
    return union(begin[kept], end[kept])


def _covers(found: Intervals, times: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    if not found.begin_ns.size:
        return np.zeros(times.size, bool)
    place = np.searchsorted(found.begin_ns, times, "right") - 1
    inside: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (place >= 0) & (
        times < found.end_ns[np.maximum(place, 0)]
    )
    return inside


def coarser(found: Intervals, most: int) -> tuple[Intervals, int]:
    """Returns at most so many intervals, the shortest gaps between them closed.

    Args:
        found: Intervals as ``union`` returns them.
        most: How many at most; at least 1.

    Returns:
        The intervals, and the longest gap that was closed, in ns.
    """
    number = found.begin_ns.size
    if number <= most:
        return found, 0
    gaps = found.begin_ns[1:] - found.end_ns[:-1]
    closed = np.sort(np.argsort(gaps, kind="stable")[: number - most])
    kept = np.ones(number - 1, bool)
    kept[closed] = False
    begin = np.concatenate((found.begin_ns[:1], found.begin_ns[1:][kept]))
    end = np.concatenate((found.end_ns[:-1][kept], found.end_ns[-1:]))
    return Intervals(begin, end), int(gaps[closed].max())
