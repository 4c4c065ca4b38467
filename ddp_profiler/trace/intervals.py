"""Arithmetic of intervals in whole ns."""

from __future__ import annotations

import numpy as np

from ddp_profiler.trace.columns import Ints


def merged(begin_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints]:
    """Returns the union of intervals as sorted intervals that do not touch.

    >>> [part.tolist() for part in merged(np.array([5, 0, 2]), np.array([9, 3, 4]))]
    [[0, 5], [4, 9]]
    """
    if not begin_ns.size:
        return begin_ns, end_ns
    if (begin_ns[1:] < begin_ns[:-1]).any():
        order = np.argsort(begin_ns, kind="stable")
        begin_ns, end_ns = begin_ns[order], end_ns[order]
    reach = np.maximum.accumulate(end_ns)
    first = np.flatnonzero(np.concatenate(([True], begin_ns[1:] > reach[:-1])))
    last = np.concatenate((first[1:] - 1, [begin_ns.size - 1]))
    return begin_ns[first], reach[last]


def covered_ns(begin_ns: Ints, end_ns: Ints) -> int:
    """Returns how much time the union of intervals covers, in ns."""
    begins, ends = merged(begin_ns, end_ns)
    return int((ends - begins).sum())


def common_ns(
    one: tuple[Ints, Ints],
    other: tuple[Ints, Ints],
) -> int:
    """Returns how long both unions of intervals cover at once, in ns.

    >>> common_ns((np.array([0, 8]), np.array([4, 9])), (np.array([2]), np.array([10])))
    3
    """
    both = covered_ns(np.concatenate((one[0], other[0])), np.concatenate((one[1], other[1])))
    return covered_ns(*one) + covered_ns(*other) - both
