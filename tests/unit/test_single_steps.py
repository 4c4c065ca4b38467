"""Heat map and bucket timeline: planted stragglers and disturbances, and a step by hand."""

import numpy as np
import pytest

from ddp_profiler.analysis.bucket_timeline import MOST_BUCKETS, MOST_PHASES, Bucket, _merged
from ddp_profiler.analysis.detail import MOST_LEVELS, levels_in_detail
from ddp_profiler.analysis.heatmap import MOST_COLUMNS, MOST_NAMED, MOST_ROWS, heat_map
from tests.unit import report_runs, study_levels
from tests.unit.report_runs import Walls, apart, script


def own(ranks, steps):
    """Work in ms, [rank, step]: 50 everywhere."""
    return np.full((ranks, steps), 50.0)


def map_of(own_ms, wall_ms=100.0):
    parts = ("data", "backward", "exposed_copy", "optimizer", "other")
    zero = np.zeros(own_ms.shape[1])
    return heat_map(
        [Walls(rank, zero + wall_ms) for rank in range(len(own_ms))],
        [{**dict.fromkeys(parts, zero), "forward": one} for one in own_ms],
    )


def test_a_fixed_straggler_is_a_row_and_a_disturbance_a_spot():
    work = own(4, 50)
    work[2] += 10
    work[1, 7] += 30
    # What slows all ranks alike names nobody.
    work[:, 20] += 200
    found = map_of(work)
    cells = np.array(found.excess_ms)
    expected = np.zeros((4, 50))
    expected[2] = 10
    expected[1, 7] = 30
    assert cells == pytest.approx(expected)
    assert (found.steps, found.steps_per_column) == (50, 1)
    assert found.rows == ((0,), (1,), (2,), (3,))
    assert [one.rank for one in found.ranks[:2]] == [2, 1]
    first, second = found.ranks[:2]
    assert first.excess_ms == pytest.approx(10)
    assert (second.excess_ms, second.largest_ms, second.largest_step) == (
        pytest.approx(30 / 50),
        pytest.approx(30),
        7,
    )
    assert first.own_ms == pytest.approx(64)
    assert found.row_excess_ms == pytest.approx((0, 0.6, 10, 0))
    assert found.classes_ms == pytest.approx((2, 5, 10, 20, 50))


def test_of_two_ranks_the_slower_one_has_all_the_excess():
    work = own(2, 5)
    work[0] += 8
    assert np.array(map_of(work).excess_ms) == pytest.approx(np.array([[8.0] * 5, [0.0] * 5]))


def test_many_ranks_and_steps_stay_bounded_and_one_slow_rank_stays_visible():
    work = own(1024, 1000)
    work[777] += 20
    work[5, 500] += 90
    found = map_of(work)
    cells = np.array(found.excess_ms)
    assert len(found.rows) <= MOST_ROWS
    assert cells.shape[1] <= MOST_COLUMNS
    assert len(found.ranks) == MOST_NAMED
    assert found.ranks[0].rank == 777
    (row,) = (i for i, ranks in enumerate(found.rows) if 777 in ranks)
    assert cells[row] == pytest.approx(20)
    assert found.steps_per_column == 9
    (column,) = np.flatnonzero(cells[0] > 1e-9)
    # It is among 9 steps, or 8.
    assert cells[0, column] in (pytest.approx(10), pytest.approx(90 / 8))
    assert column == pytest.approx(cells.shape[1] / 2, abs=1)
    assert [rank for ranks in found.rows for rank in ranks] == list(range(1024))
    assert found.steps == 1000
    cells[row] = 0
    cells[0, column] = 0
    assert not cells.any()


def test_columns_of_fewer_steps_are_means_too():
    work = own(2, MOST_COLUMNS + 1)
    work[1] += 6
    found = map_of(work)
    assert found.steps_per_column == 2
    assert found.excess_ms[1] == pytest.approx((6.0,) * len(found.excess_ms[1]))


def test_one_rank_has_no_map():
    assert map_of(own(1, 9)) is None
    assert map_of(own(3, 0)) is None


def test_own_work_is_the_parts_of_the_summary():
    loaded = script()
    (detail,) = loaded.details
    communication = ("forward_comm", "backward_comm", "exposed_wait", "exposed_transfer")
    for one in detail.heat_map.ranks:
        parts = loaded.summary.levels[0].ranks[one.rank].breakdown_ms
        mine = sum(value for part, value in parts.items() if part not in communication)
        assert one.own_ms == pytest.approx(mine)
    assert detail.heat_map.ranks[0].rank == loaded.summary.levels[0].straggler.rank == 2
    assert detail.heat_map.ranks[0].excess_ms == pytest.approx(10)


def phases(lane):
    return [(p.part, p.begin_ms, p.end_ms) for p in lane.phases]


def test_a_step_by_hand():
    """Rank 2 comes 10 ms late: the others wait from 65 to 75, and all transfer until 90."""
    found = script().details[0].timeline
    waiting, last = found.lanes
    assert (waiting.rank != 2, last.rank) == (True, 2)
    assert phases(waiting) == [
        ("data", 0.0, 5.0),
        ("forward", 5.0, 25.0),
        ("backward", 25.0, 65.0),
        ("exposed_wait", 65.0, 75.0),
        ("exposed_transfer", 75.0, 90.0),
        ("exposed_copy", 90.0, 95.0),
        ("optimizer", 95.0, 105.0),
    ]
    assert phases(last)[1:4] == [
        ("forward", 5.0, 35.0),
        ("backward", 35.0, 75.0),
        ("exposed_transfer", 75.0, 90.0),
    ]
    hidden, exposed = found.buckets
    assert (hidden.begin_ms, hidden.hidden_until_ms, hidden.end_ms) == (30, 45, 45)
    assert (exposed.begin_ms, exposed.hidden_until_ms, exposed.end_ms) == (65, 65, 90)
    assert (found.collectives, found.told_apart) == (2, True)
    assert found.span_ms == (0, 110)
    assert found.step_ms == pytest.approx(110)


def test_without_common_clocks_waiting_is_not_told():
    loaded = script(4, ranks=apart(4))
    assert loaded.summary.levels[0].breakdown_ms["exposed_wait"] is None
    (detail,) = loaded.details
    (lane,) = detail.timeline.lanes
    assert ("exposed", 65.0, 90.0) in phases(lane)
    assert not detail.timeline.told_apart
    assert "not compared" in detail.withheld
    # Own work needs no common clock.
    assert detail.heat_map.ranks[0].excess_ms == pytest.approx(10)


def test_the_typical_step_is_that_of_the_median():
    def late(step):
        return 40.0 if step == 0 else 4.0 * (step == 3)

    info = report_runs.run_info(2)
    columns = {
        0: report_runs.rank_columns(worst_ms=late, steps=7),
        1: report_runs.rank_columns(late, worst_ms=late, steps=7),
    }
    _, (detail,) = report_runs.summarize_in_detail(info, columns)
    assert detail.timeline.step_ms == pytest.approx(100)
    assert detail.timeline.step not in (0, 3)
    assert detail.timeline.steps == 7


def test_one_rank_has_neither():
    (detail,) = script(1, None).details
    assert detail.heat_map is None
    assert detail.timeline is None


def test_many_buckets_are_shown_as_neighbours():
    found = script(2, None, buckets=200).details[0].timeline
    assert found.collectives == 200
    assert len(found.buckets) <= MOST_BUCKETS
    assert sum(bucket.nbytes for bucket in found.buckets) == 200 * 1000
    assert [found.buckets[0].first, found.buckets[-1].last] == [0, 199]
    assert len(found.lanes[0].phases) <= MOST_PHASES


def test_neighbours_of_two_micro_steps_hide_nothing_more():
    """The second bucket is handed over when backward is done: nothing of it is hidden."""
    hidden = [Bucket(i, i, 1, 0.0, 10.0, 12.0, True) for i in range(MOST_BUCKETS)]
    exposed = [Bucket(i, i, 1, 20.0, 20.0, 30.0, True) for i in range(MOST_BUCKETS)]
    merged = _merged([one for pair in zip(hidden, exposed, strict=True) for one in pair])
    assert {(b.begin_ms, b.hidden_until_ms, b.end_ms) for b in merged} == {(0.0, 10.0, 30.0)}


def test_levels_in_detail():
    levels = [study_levels.level(dp) for dp in (1, 2, 4, 8)]
    assert levels_in_detail(levels) == (levels[-1].id,)
    late = report_runs.script().summary.levels[0].straggler
    marked = [report_runs.replace(level, straggler=late) for level in levels]
    assert len(levels_in_detail(marked)) == MOST_LEVELS
    assert levels_in_detail(marked)[0] == levels[-1].id
    assert levels_in_detail([]) == ()
