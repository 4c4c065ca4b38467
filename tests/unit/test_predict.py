"""Predictions from studies made by a known law: what was not measured must follow it, too."""

import pytest

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.predict.findings import with_gains
from ddp_profiler.predict.prediction import Predictor
from ddp_profiler.predict.proposals import propose
from ddp_profiler.predict.request import Request
from tests.unit.study_levels import BACKWARD_MS, FORWARD_MS, OPTIMIZER_MS, law, level, summary


def predictor(*levels, **settings):
    return Predictor.of(summary(*levels, **settings))


def step(*arguments, **settings):
    return sum(law(*arguments, **settings)[0].values())


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 8, 16, 64])
def test_other_scales_follow_the_law(dp):
    found = predictor(level(1), level(2), level(4)).predict(Request(dp))
    assert found.step_ms.median == pytest.approx(step(dp), rel=0.01)
    parts, _, _ = law(dp)
    for part, expected in parts.items():
        assert found.breakdown_ms[part] == pytest.approx(expected, abs=0.01 * step(dp)), part
    assert sum(found.breakdown_ms.values()) == pytest.approx(found.step_ms.median)
    low, high = found.step_ms.interval90
    assert low <= found.step_ms.median <= high
    assert found.efficiency == pytest.approx(step(1) / step(dp), rel=0.01)
    assert found.extrapolated is (dp > 4)
    assert found.nodes == dp


@pytest.mark.parametrize("cap_mb", [1.0, 4.0, 8.0, 25.0, 100.0])
def test_other_bucket_caps(cap_mb):
    found = predictor(level(1), level(2)).predict(Request(2, bucket_cap_mb=cap_mb))
    assert found.step_ms.median == pytest.approx(step(2, cap_mb=cap_mb), rel=0.01)
    _, _, buckets = law(2, cap_mb=cap_mb)
    assert found.bucket_bytes == tuple(bucket.nbytes for bucket in buckets)


@pytest.mark.parametrize("accumulation", [1, 2, 4, 16])
def test_other_accumulation(accumulation):
    found = predictor(level(1), level(2)).predict(Request(2, accumulation=accumulation))
    assert found.step_ms.median == pytest.approx(step(2, accumulation=accumulation), rel=0.01)
    assert found.global_batch == 8 * accumulation * 2


@pytest.mark.parametrize("gbit", [0.25, 0.5, 2.0, 10.0])
def test_other_bandwidth(gbit):
    found = predictor(level(1), level(2)).predict(Request(2, bandwidth_gbps=gbit))
    assert found.step_ms.median == pytest.approx(step(2, gbit=gbit), rel=0.01)


def test_half_the_bytes():
    half = predictor(level(1), level(2)).predict(Request(2, gradient_dtype="bf16"))
    # As much time on the wire as with a link of twice the rate.
    assert half.step_ms.median == pytest.approx(step(2, gbit=2.0), rel=0.02)
    assert any("converting" in note for note in half.notes)


def test_nccl_reduces_in_order():
    found = predictor(level(1), level(2), backend="nccl").predict(Request(2, bucket_cap_mb=4))
    assert found.step_ms.median == pytest.approx(step(2, cap_mb=4, at_once=1), rel=0.01)


def test_a_missing_no_sync_is_carried_on_and_taken_away():
    known = predictor(level(1, accumulation=4), level(2, accumulation=4, syncs=4))
    assert known.predict(Request(2)).step_ms.median == pytest.approx(
        step(2, accumulation=4, syncs=4), rel=0.01
    )
    right = known.predict(Request(2, reduce_once=True)).step_ms.median
    assert right == pytest.approx(step(2, accumulation=4), rel=0.01)


def test_without_copies():
    found = predictor(level(1), level(2)).predict(Request(2, bucket_view=True))
    assert found.step_ms.median == pytest.approx(step(2, copies=False), rel=0.01)
    assert found.breakdown_ms["exposed_copy"] == 0


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_a_rank_that_is_always_late_stays_the_only_one(dp):
    late = {1: 60.0}
    known = predictor(level(1), level(2, late=late))
    found = known.predict(Request(dp))
    assert found.step_ms.median == pytest.approx(step(dp) + 60, rel=0.01)
    # The others wait for it; the more there are, the more do so.
    assert found.breakdown_ms["exposed_wait"] == pytest.approx(60 * (dp - 1) / dp, rel=0.02)
    assert found.breakdown_ms["backward"] == pytest.approx(BACKWARD_MS + 60 / dp, rel=0.02)


def test_passing_lateness_grows_with_the_ranks():
    # Uniform between -5 and 5 ms: the largest of n is at 10 n/(n+1) - 5.
    passing = tuple(-5 + 10 * k / 40 for k in range(41))
    known = predictor(level(1), level(2, passing=passing))
    for dp in (2, 4, 8, 32):
        wait = known.predict(Request(dp)).breakdown_ms["exposed_wait"]
        assert wait == pytest.approx(10 * dp / (dp + 1) - 5, abs=0.1)


def test_reductions_that_take_longer_in_training_do_so_elsewhere():
    slow = level(2, in_training=1.3)
    found = predictor(level(1), slow).predict(Request(2))
    assert found.step_ms.median == pytest.approx(slow.step_ms.mean, rel=0.005)
    expected = sum(law(4, in_training=1.3)[0].values())
    found = predictor(level(1), slow).predict(Request(4))
    assert found.step_ms.median == pytest.approx(expected, rel=0.01)


def test_back_test_predicts_each_level_from_the_others():
    tests = predictor(level(1), level(2), level(4)).back_test()
    assert [test.held_out for test in tests.tests] == ["dp2-acc1", "dp4-acc1"]
    assert tests.why_not is None
    for test, dp in zip(tests.tests, (2, 4), strict=True):
        assert test.measured_ms == pytest.approx(step(dp))
        assert abs(test.error_pct) < 1


def test_back_test_does_not_see_what_it_holds_out():
    # dp 4 does not follow the law of dp 2: the error must show it.
    odd = level(4, gbit=0.5)
    tests = {t.held_out: t for t in predictor(level(1), level(2), odd).back_test().tests}
    assert tests["dp4-acc1"].predicted_ms == pytest.approx(step(4), rel=0.02)
    assert tests["dp4-acc1"].error_pct < -10


def test_back_test_errors_widen_the_interval():
    right = predictor(level(1), level(2), level(4)).predict(Request(8)).step_ms
    wrong = predictor(level(1), level(2), level(4, gbit=0.5)).predict(Request(8)).step_ms

    def width(interval):
        return (interval.interval90[1] - interval.interval90[0]) / interval.median

    assert width(wrong) > 2 * width(right)


def test_two_levels_leave_nothing_to_hold_out():
    tests = predictor(level(1), level(2)).back_test()
    assert tests.tests == ()
    assert "nothing is left to hold out" in tests.why_not
    assert "ring from a tree" in tests.why_not


def test_naive_answers_lie_on_both_sides():
    found = predictor(level(1), level(2)).predict(Request(2, bucket_cap_mb=4))
    assert found.naive_ms.perfect_overlap_ms < found.step_ms.median < found.naive_ms.no_overlap_ms
    compute = FORWARD_MS + BACKWARD_MS + OPTIMIZER_MS
    assert found.naive_ms.no_overlap_ms == pytest.approx(compute + found.allreduce_ms, abs=1.1)


def test_more_nodes_than_were_seen_need_a_bandwidth():
    known = predictor(level(1, nodes=1), level(2, nodes=1), level(4, nodes=1), per_node=4)
    assert known.predict(Request(4)).nodes == 1
    with pytest.raises(UsageError, match="nothing of the network between nodes"):
        known.predict(Request(8))
    found = known.predict(Request(8, bandwidth_gbps=0.5))
    assert found.nodes == 2
    assert any("was not measured" in note for note in found.notes)
    assert known.predict(Request(8, ranks_per_node=8)).nodes == 1


def test_too_far_is_refused():
    with pytest.raises(UsageError, match="64 times"):
        predictor(level(1), level(2)).predict(Request(256))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dp": 0},
        {"dp": 2, "accumulation": 0},
        {"dp": 2, "bucket_cap_mb": 0.0},
        {"dp": 2, "bandwidth_gbps": float("inf")},
        {"dp": 2, "gradient_dtype": "int8"},
    ],
)
def test_wrong_settings(wrong):
    with pytest.raises(UsageError):
        Request(**wrong)


def test_a_run_without_communication_carries_nothing():
    with pytest.raises(InputError, match="nothing of the network"):
        predictor(level(1))


def test_crowded_cores_slow_down():
    known = predictor(level(1, nodes=1), level(2, nodes=1), per_node=4, cores=2)
    found = known.predict(Request(4))
    assert found.breakdown_ms["forward"] == pytest.approx(2 * FORWARD_MS)
    assert any("share its cores" in note for note in found.notes)


# ----------------------------------------------------------------------------------------------
# What a change would gain


def test_the_right_bucket_cap_is_proposed_with_its_gain():
    # One bucket of 32 MB: nothing can overlap.
    known = predictor(level(1, cap_mb=100), level(2, cap_mb=100), cap_mb=100.0)
    by_setting = {one.setting: one for one in propose(known)}
    found = by_setting["bucket_cap_mb"]
    best = min(step(2, cap_mb=cap) for cap in (1, 2, 4, 10, 25, 50, 200))
    assert found.gain_ms == pytest.approx(step(2, cap_mb=100) - best, rel=0.05)
    low, high = found.gain_interval90
    assert 0 < low < found.gain_ms < high


def test_a_missing_no_sync_is_proposed_with_its_gain():
    known = predictor(level(1, accumulation=4), level(2, accumulation=4, syncs=4))
    found = next(one for one in propose(known) if one.setting == "reduce_once")
    expected = step(2, accumulation=4, syncs=4) - step(2, accumulation=4)
    assert found.gain_ms == pytest.approx(expected, rel=0.02)


def test_accumulation_gains_for_the_same_samples_and_says_so():
    found = next(
        one for one in propose(predictor(level(1), level(2))) if one.setting == "accumulation"
    )
    assert found.gain_ms == pytest.approx(step(2) - step(2, accumulation=4) / 4, rel=0.03)
    assert "4-fold" in found.caveat


def test_where_nothing_gains_nothing_is_proposed():
    # A link so fast that there is nothing to hide; COPY and OPTIMIZER are all that is left.
    known = predictor(level(1, gbit=1e4), level(2, gbit=1e4))
    assert {one.setting for one in propose(known)} <= {"accumulation"}


def test_gains_are_findings():
    found = with_gains(summary(level(1, cap_mb=100), level(2, cap_mb=100), cap_mb=100.0))
    gains = [finding for finding in found.findings if finding.id == "expected-gain"]
    assert 1 <= len(gains) <= 3
    assert all(finding.severity == "info" for finding in gains)
    assert all(finding.expected_gain_ms > 0 for finding in gains)
    alone = summary(level(1))
    assert with_gains(alone) == alone
