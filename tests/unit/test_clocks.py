"""Times of several hosts on one clock, against clocks whose truth is known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_profiler.analysis.clocks import CommonClock, HostClock, offsets
from ddp_profiler.measure.clock_sync import leaders, local_clock
from ddp_profiler.schema import ClockReading, RankPlace
from ddp_profiler.workload.plant import PlantedClock
from tests.unit.span_columns import Spans
from tests.unit.test_summary import add_instrumented, run_info

S = 1_000_000_000
US = 1_000


def places(*domains):
    return tuple(RankPlace(r, 0, r, f"node{r}", d, "cpu", 1) for r, d in enumerate(domains))


def reading(own_ns, truth_ns, below=100 * US, above=100 * US, rank=1, real_ns=0):
    return ClockReading(rank, own_ns, truth_ns - below, truth_ns + above, real_ns)


@given(
    offset=st.integers(-(10**15), 10**15),
    ppm=st.floats(-400, 400),
    brackets=st.lists(
        st.tuples(st.integers(0, 5_000_000), st.integers(0, 5_000_000)), min_size=2, max_size=6
    ),
    moment=st.floats(-0.5, 1.5),
)
def test_the_truth_lies_inside_the_bounds(offset, ppm, brackets, moment):
    """Whatever the brackets, for any clock that runs at one rate."""
    start, length = 10**13, 60 * S

    def truth(reference):
        return offset + (reference - start) * ppm / 1e6

    moments = np.linspace(start, start + length, len(brackets))
    clock = HostClock(
        at=np.array([round(m + truth(m)) for m in moments]),
        low=np.array([round(truth(m)) - b for m, (b, _) in zip(moments, brackets, strict=True)]),
        high=np.array([round(truth(m)) + a for m, (_, a) in zip(moments, brackets, strict=True)]),
    )
    now = start + moment * length
    own = np.array([round(now + truth(now))])
    low, high = clock.bounds(own)
    found = own - clock.low[0] - high, own - clock.low[0] - low
    # Rounding of times to ns, and of floats in the interpolation.
    assert found[0][0] - 20 <= round(now) <= found[1][0] + 20
    assert abs(int(clock.to_reference(own)[0]) - round(now)) <= clock.uncertainty_ns(own) + 20


def test_a_single_reading_opens_with_time():
    clock = HostClock(np.array([0]), np.array([-100]), np.array([100]))
    assert clock.uncertainty_ns(np.array([0])) == 100
    # 1000 ppm of 1 s: two hosts that NTP slews in opposite directions.
    assert clock.uncertainty_ns(np.array([S])) == 100 + 1000 * US


def test_between_readings_a_rate_that_changes_is_allowed_for():
    """20 ppm fast for 30 s, then 20 ppm slow: at both ends 0 off, in the middle 600 us."""
    clock = HostClock(np.array([0, 60 * S]), np.array([-100, -100]), np.array([100, 100]))
    low, high = clock.bounds(np.array([30 * S]))
    assert low[0] <= 600 * US <= high[0] + 1


def test_offsets_tell_drift_with_its_uncertainty():
    info = run_info(
        ranks=places("a", "b"),
        clocks=(
            reading(0, 5 * S, real_ns=300_000_000),
            reading(100 * S, 5 * S + 5_000_000),
        ),
    )
    (found,) = offsets(info)
    assert (found.rank, found.node) == (1, 1)
    assert found.offset_ms == pytest.approx(5000)
    assert found.uncertainty_ms == pytest.approx(0.1)
    assert found.drift_ppm == pytest.approx(50)
    # 0.1 ms at both ends of 100 s.
    assert found.drift_uncertainty_ppm == pytest.approx(2)
    assert found.real_time_offset_ms == pytest.approx(300)


def test_one_clock_needs_no_comparison():
    clock = CommonClock(run_info(ranks=places("a", "a")))
    assert clock.compares((0, 1))
    assert clock.uncertainty_ms({0: np.array([1]), 1: np.array([1])}) == 0


def test_hosts_that_were_not_compared_cannot_be():
    clock = CommonClock(run_info(ranks=places("a", "b", "b")))
    assert not clock.compares((0, 1))
    # Among themselves the ranks of the second host can.
    assert clock.compares((1, 2))


def test_two_compared_hosts_add_their_uncertainties():
    info = run_info(
        ranks=places("a", "b", "c"), clocks=(reading(0, 5), reading(0, 7, rank=2, above=300 * US))
    )
    clock = CommonClock(info)
    now = np.array([0])
    assert clock.uncertainty_ms({0: now, 1: now}) == pytest.approx(0.1)
    assert clock.uncertainty_ms({0: now, 1: now, 2: now}) == pytest.approx(0.1 + 0.2)


def columns(shift_ms, local_end):
    spans = Spans()
    for step in range(6):
        add_instrumented(spans, shift_ms + 100 * step, step, local_end, block=2)
    return spans.columns()


def compared(bracket_ns, shift_ms=5000):
    return run_info(
        ranks=places("a", "b"),
        clocks=tuple(
            reading(own, shift_ms * 1_000_000, bracket_ns, bracket_ns)
            for own in (shift_ms * 1_000_000, (shift_ms + 700) * 1_000_000)
        ),
    )


def test_a_clock_that_is_5_s_ahead_changes_nothing():
    from ddp_profiler.analysis.summary import summarize_run

    one_clock = summarize_run(run_info(), {0: columns(0, 65), 1: columns(0, 75)}).levels[0]
    two_clocks = summarize_run(compared(100 * US), {0: columns(0, 65), 1: columns(5000, 75)})
    level = two_clocks.levels[0]
    assert level.breakdown_ms == pytest.approx(one_clock.breakdown_ms, abs=1e-3)
    assert level.breakdown_ms["exposed_wait"] == pytest.approx(5)
    assert level.straggler.rank == one_clock.straggler.rank == 1
    assert level.straggler.lag_ms == pytest.approx(10, abs=1e-3)
    assert level.clock_uncertainty_ms == pytest.approx(0.1, abs=0.02)
    assert one_clock.clock_uncertainty_ms == 0


def test_what_the_uncertainty_does_not_carry_is_withheld():
    from ddp_profiler.analysis.summary import summarize_run

    info = compared(4_000_000)
    level = summarize_run(info, {0: columns(0, 65), 1: columns(5000, 75)}).levels[0]
    assert level.breakdown_ms["exposed_wait"] is None
    # A lag of 10 ms is more than twice 4 ms: that much the clocks carry.
    assert level.straggler.lag_ms == pytest.approx(10)
    assert level.straggler.uncertainty_ms == pytest.approx(4, abs=0.1)
    assert any("known to 4 ms" in note for note in level.notes)
    # The parts still add up.
    assert sum(v for v in level.breakdown_ms.values() if v) == pytest.approx(100)


def test_a_comparison_that_is_off_changes_no_length():
    """Two brackets that lie on either side of the truth bend the common clock by 0.7 %."""
    from ddp_profiler.analysis.summary import summarize_run

    own = (5000 * 1_000_000, 6500 * 1_000_000)
    bent = run_info(
        ranks=places("a", "b"),
        clocks=(
            reading(own[0], 5 * S, 10_200_000, 0),
            reading(own[1], 5 * S, 0, 10_200_000),
        ),
    )
    level = summarize_run(bent, {0: columns(0, 65), 1: columns(5000, 75)}).levels[0]
    assert level.instrumented_step_ms.mean == pytest.approx(100)
    assert level.ranks[1].breakdown_ms["forward"] == pytest.approx(20)


def test_real_time_that_is_off_is_said_and_not_used():
    from ddp_profiler.analysis.summary import summarize_run

    info = compared(100 * US)
    shifted = replace(
        info, clocks=tuple(replace(r, real_offset_ns=400_000_000) for r in info.clocks)
    )
    both = [summarize_run(i, {0: columns(0, 65), 1: columns(5000, 75)}) for i in (info, shifted)]
    assert both[0].levels == both[1].levels
    assert not any("Real time" in note for note in both[0].notes)
    assert any("Real time on rank 1's host is +400 ms" in note for note in both[1].notes)


def test_leaders_are_the_first_ranks_of_each_clock():
    assert leaders(places("a", "a", "b", "c", "b")) == (0, 2, 3)
    assert leaders(places("a", "a")) == (0,)


def test_a_planted_clock_is_wrong_by_what_was_planted():
    right, wrong = local_clock(), local_clock(PlantedClock(1, 5000.0, ppm=50.0, real_ms=300.0))
    before = right.monotonic()
    told = wrong.monotonic()
    after = right.monotonic()
    assert before + before * 50 // 10**6 <= told - 5 * S <= after + after * 50 // 10**6 + 1
    assert wrong.real() - right.real() == pytest.approx(300_000_000, abs=50_000_000)
    assert wrong.domain != right.domain
