"""The replay of one backward's communication, against schedules worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_profiler.predict.buckets import Bucket
from ddp_profiler.predict.schedule import Cost, replay

TIMES = st.floats(0, 100, allow_nan=False)
SCHEDULES = st.lists(st.tuples(TIMES, st.floats(0, 20), st.floats(0, 50)), max_size=8)


def made(*rows):
    """Buckets and costs from (ready, latency, wire)."""
    return [Bucket(1, ready) for ready, _, _ in rows], [Cost(lat, wire) for _, lat, wire in rows]


def test_all_hidden():
    found = replay(*made((10, 1, 4), (20, 1, 4)), 30.0, at_once=1)
    assert found.ends == (15.0, 25.0)
    assert (found.exposed_transfer_ms, found.exposed_copy_ms, found.end_ms) == (0.0, 0.0, 30.0)
    assert (found.busy_ms, found.overlapped_ms) == (10.0, 10.0)
    assert found.overlapped_wire_fraction == 1.0


def test_one_after_the_other():
    found = replay(*made((10, 0, 15), (20, 0, 15)), 22.0, at_once=1)
    assert found.ends == (25.0, 40.0)
    assert found.exposed_transfer_ms == 18.0
    assert (found.busy_ms, found.overlapped_ms) == (30.0, 12.0)
    assert found.overlapped_wire_fraction == pytest.approx(12 / 30)


def test_two_at_once_share_the_link():
    # Alone until 20; then half of the rate each: 5 left of the first take 10.
    found = replay(*made((10, 0, 15), (20, 0, 15)), 22.0, at_once=2)
    assert found.ends == (30.0, 40.0)


def test_latencies_are_not_shared():
    # Both are past their latency at 5: then they share.
    found = replay(*made((0, 5, 10), (0, 5, 10)), 0.0, at_once=2)
    assert found.ends == (25.0, 25.0)
    # In order they add up.
    assert replay(*made((0, 5, 10), (0, 5, 10)), 0.0, at_once=1).ends == (15.0, 30.0)


def test_a_third_waits_for_its_turn():
    found = replay(*made((0, 0, 10), (0, 0, 20), (0, 0, 5)), 0.0, at_once=2)
    # 20: the first is through, and the second has 10 left; the third joins it.
    assert found.ends == (20.0, 35.0, 30.0)


def test_buckets_are_handed_over_in_order():
    found = replay(*made((30, 0, 1), (10, 0, 1)), 30.0, at_once=1)
    assert found.begins == (30.0, 30.0)
    assert found.ends == (31.0, 32.0)


def test_copies_of_early_buckets_hide_behind_late_transfers():
    buckets, costs = made((0, 0, 10), (0, 0, 20))
    found = replay(buckets, costs, 12.0, at_once=1, copy_ms=[3.0, 4.0])
    # The first is copied from 12 to 15, the second from 30 to 34.
    assert (found.last_end_ms, found.exposed_copy_ms) == (30.0, 4.0)
    hidden = replay(buckets, costs, 50.0, at_once=1, copy_ms=[3.0, 4.0])
    assert (hidden.exposed_transfer_ms, hidden.exposed_copy_ms) == (0.0, 7.0)


def test_without_buckets():
    found = replay([], [], 5.0, at_once=2)
    assert (found.end_ms, found.busy_ms, found.overlapped_wire_fraction) == (5.0, 0.0, 0.0)


@given(rows=SCHEDULES, local_end=TIMES, at_once=st.integers(1, 3))
def test_the_link_carries_no_more_than_it_can(rows, local_end, at_once):
    buckets, costs = made(*rows)
    found = replay(buckets, costs, local_end, at_once=at_once)
    assert all(
        end >= begin + cost.latency_ms + cost.wire_ms - 1e-6
        for begin, end, cost in zip(found.begins, found.ends, costs, strict=True)
    )
    if rows:
        first, wire = min(found.begins), sum(cost.wire_ms for cost in costs)
        assert max(found.ends) >= first + wire - 1e-6
        # Never idle with work at hand: the last end is at most all work after the last hand-over.
        most = max(found.begins) + wire + sum(cost.latency_ms for cost in costs)
        assert max(found.ends) <= most + 1e-6
    assert 0 <= found.overlapped_ms <= found.busy_ms + 1e-9
    assert 0 <= found.overlapped_wire_fraction <= 1 + 1e-9


@given(rows=SCHEDULES.filter(bool), local_end=TIMES, longer=st.floats(1, 3))
def test_a_slower_link_never_ends_earlier(rows, local_end, longer):
    buckets, costs = made(*rows)
    slower = [Cost(cost.latency_ms, cost.wire_ms * longer) for cost in costs]
    before = replay(buckets, costs, local_end, at_once=1)
    after = replay(buckets, slower, local_end, at_once=1)
    assert after.last_end_ms >= before.last_end_ms - 1e-6
