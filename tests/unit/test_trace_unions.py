"""Unions and differences of intervals against counting."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_profiler.trace.unions import coarser, union, without

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


def arrays(found):
    begin = np.array([begin for begin, _ in found], np.int64)
    return begin, begin + np.array([length for _, length in found], np.int64)


def cells(found):
    return {ns for begin, end in zip(*(part.tolist() for part in found), strict=True)
            for ns in range(begin, end)}  # fmt: skip


def neat(found):
    begin, end = found
    return (begin < end).all() and (begin[1:] > end[:-1]).all()


@settings(deadline=None)
@given(SPANS, SPANS)
def test_unions_and_differences_match_counting(one, other):
    first, second = union(*arrays(one)), union(*arrays(other))
    assert cells(first) == cells(arrays(one))
    assert neat(first)
    found = without(first, second)
    assert cells(found) == cells(arrays(one)) - cells(arrays(other))
    assert neat(found)
    assert found.total_ns() == len(cells(found))


@settings(deadline=None)
@given(SPANS, st.integers(1, 5))
def test_coarser_closes_the_shortest_gaps(one, most):
    found = union(*arrays(one))
    fewer, gap = coarser([found], most)
    assert fewer.begin_ns.size == min(most, found.begin_ns.size)
    assert cells(found) <= cells(fewer)
    assert neat(fewer[:2])
    assert not fewer.part.any()
    gaps = (found.begin_ns[1:] - found.end_ns[:-1]).tolist()
    closed = len(gaps) - max(0, fewer.begin_ns.size - 1)
    assert gap == (sorted(gaps)[closed - 1] if closed else 0)
    if found.begin_ns.size:
        assert (fewer.end_ns - fewer.begin_ns).sum() == found.total_ns() + sum(
            sorted(gaps)[:closed]
        )


@settings(deadline=None)
@given(SPANS, SPANS, st.integers(1, 5))
def test_parts_that_share_a_track_stay_apart(one, other, most):
    first = union(*arrays(one))
    second = without(union(*arrays(other)), first)
    found, _ = coarser([first, second], most)
    assert found.begin_ns.size == min(most, first.begin_ns.size + second.begin_ns.size)
    assert (found.begin_ns[1:] >= found.end_ns[:-1]).all()
    slices = zip(found.begin_ns.tolist(), found.end_ns.tolist(), found.part.tolist(), strict=True)
    for place, (begin, end, part) in enumerate(slices):
        inside = set(range(begin, end))
        ns = [len(inside & cells(each)) for each in (first, second)]
        assert found.part_ns[place].tolist() == ns
        assert part == (-1 if all(ns) else ns.index(max(ns)))
