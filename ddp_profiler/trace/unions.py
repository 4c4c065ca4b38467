"""Unions and differences of intervals, as intervals: sorted, disjoint, in whole ns."""

from __future__ import annotations

from collections.abc import Sequence
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


class Slices(NamedTuple):
    """Parts that share a track, in order of their begin, none overlapping another.

    Attributes:
        begin_ns: Begin, [slice].
        end_ns: End, [slice].
        part: Place of the part that it is of; -1 where it is of several, [slice].
        part_ns: How long each part lasts in it, [slice, part].
    """

    begin_ns: Ints
    end_ns: Ints
    part: Ints
    part_ns: Ints


def coarser(parts: Sequence[Intervals], most: int) -> tuple[Slices, int]:
    """Returns at most so many slices of a track, the shortest gaps between them closed.

    All parts are looked at together: closed one by one, gaps of one would hide another. Slices of
    several parts become one where no gap is shorter than that between these.

    Args:
        parts: Intervals as ``union`` returns them; those of one part overlap no other's.
        most: How many at most; at least 1.

    Returns:
        The slices, and the longest gap that was closed, in ns.
    """
    begin = np.concatenate([part.begin_ns for part in parts])
    end = np.concatenate([part.end_ns for part in parts])
    part = np.repeat(np.arange(len(parts)), [one.begin_ns.size for one in parts])
    order = np.argsort(begin, kind="stable")
    begin, end, part = begin[order], end[order], part[order]
    number = begin.size
    new = np.ones(number, bool)
    gap_ns = 0
    if number > most:
        gaps = begin[1:] - end[:-1]
        closed = np.argsort(gaps, kind="stable")[: number - most]
        new[closed + 1] = False
        gap_ns = int(gaps[closed].max())
    of = np.cumsum(new) - 1
    first = np.flatnonzero(new)
    part_ns = np.zeros((first.size, len(parts)), np.int64)
    np.add.at(part_ns, (of, part), end - begin)
    one = np.where((part_ns > 0).sum(axis=1) > 1, -1, part[first])
    last = np.append(first[1:], number)[: first.size] - 1
    return Slices(begin[first], end[last], one, part_ns), gap_ns
