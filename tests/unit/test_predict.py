"""Predictions from studies made by a known law: what was not measured must follow it, too."""

from dataclasses import replace

import pytest

from ddp_profiler.batch import Batch
from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.predict.findings import with_gains
from ddp_profiler.predict.predicted_times import predicted
from ddp_profiler.predict.prediction import Predictor, predictor_of
from ddp_profiler.predict.proposals import best_to_confirm, propose
from ddp_profiler.predict.request import Request
from ddp_profiler.schema import MachineUse
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


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_late_rank_is_late_in_every_micro_step(accumulation):
    known = predictor(level(1), level(2, late={1: 60.0}))
    found = known.predict(Request(2, accumulation=accumulation))
    expected = step(2, accumulation=accumulation) + 60 * accumulation
    assert found.step_ms.median == pytest.approx(expected, rel=0.01)
    assert found.breakdown_ms["exposed_wait"] == pytest.approx(30 * accumulation, rel=0.02)


def test_passing_lateness_grows_with_the_micro_steps():
    passing = tuple(-5 + 10 * k / 40 for k in range(41))
    known = predictor(level(1), level(2, passing=passing))
    waits = [
        known.predict(Request(2, accumulation=k)).breakdown_ms["exposed_wait"] for k in (1, 4, 16)
    ]
    assert waits[1:] == pytest.approx([2 * waits[0], 4 * waits[0]])


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


def test_what_is_confirmed_leaves_training_as_it_is():
    proposals = propose(predictor(level(1, cap_mb=100), level(2, cap_mb=100), cap_mb=100.0))
    assert proposals[0].setting == "accumulation"
    assert best_to_confirm(proposals).setting == "bucket_cap_mb"
    assert best_to_confirm(proposals[:1]) == proposals[0]
    types = [one for one in proposals if one.setting == "gradient_dtype"]
    assert types
    assert best_to_confirm(types) is None


def test_where_nothing_gains_nothing_is_proposed():
    # A link so fast that there is nothing to hide; COPY and OPTIMIZER are all that is left.
    known = predictor(level(1, gbit=1e4), level(2, gbit=1e4))
    assert {one.setting for one in propose(known)} <= {"accumulation"}


def test_gains_are_findings():
    study = summary(level(1, cap_mb=100), level(2, cap_mb=100), cap_mb=100.0)
    found = with_gains(study, Predictor.of(study))
    gains = [finding for finding in found.findings if finding.id == "expected-gain"]
    assert 1 <= len(gains) <= 3
    assert all(finding.severity == "info" for finding in gains)
    assert all(finding.expected_gain_ms > 0 for finding in gains)
    alone = summary(level(1))
    assert with_gains(alone, predictor_of(alone)[0]) == alone


# ----------------------------------------------------------------------------------------------
# As a source of step times for a plan


def test_a_plan_gets_step_times_that_were_not_measured():
    ask = predicted(summary(level(1), level(2), level(4)))
    found = ask(Batch(8, 2, 8))
    assert found.ms == pytest.approx(step(8, accumulation=2), rel=0.01)
    assert found.interval_ms[0] < found.ms < found.interval_ms[1]
    assert (found.interval_pct, found.source) == (90, "predicted, beyond what was measured")
    assert ask(Batch(8, 1, 3)).source == "predicted"
    # Another micro-batch, or a run that carries no prediction: nothing is known.
    assert ask(Batch(4, 2, 8)) is None
    assert predicted(summary(level(1)))(Batch(8, 1, 2)) is None
    one_node = summary(level(1, nodes=1), level(2, nodes=1), per_node=2)
    assert predicted(one_node)(Batch(8, 1, 8)) is None


# ----------------------------------------------------------------------------------------------
# What is said of it


def notes(known, **request):
    return known.predict(Request(**{"dp": 2, **request})).notes


def test_what_goes_beyond_the_data_is_marked():
    known = predictor(level(1), level(2), level(4))
    assert notes(known) == notes(known, dp=3) == ()
    for request, word in (
        ({"accumulation": 5}, "micro-steps"),
        ({"bandwidth_gbps": 5.0}, "far from"),
        ({"bandwidth_gbps": 0.1}, "far from"),
        ({"dp": 8}, "ranks"),
    ):
        (note, *_) = notes(known, **request)
        assert word in note
        assert known.predict(Request(**{"dp": 2, **request})).extrapolated
    for request in ({"accumulation": 4}, {"bandwidth_gbps": 3.0}, {"bucket_cap_mb": 8.0}):
        assert notes(known, **request) == ()


def test_buckets_larger_than_any_allreduce_are_marked():
    big = level(2)
    sizes = tuple(size for size in big.allreduce.sizes if size.bytes <= 2**20)
    known = predictor(level(1), replace(big, allreduce=replace(big.allreduce, sizes=sizes)))
    assert notes(known, bucket_cap_mb=8.0) == ()
    (note,) = notes(known, bucket_cap_mb=100.0)
    assert note.startswith("Buckets of 32.0 MB to 32.0 MB; AllReduces of 4.1 kB to 28.0 MB")


def test_many_more_buckets_than_were_measured_are_marked():
    known = predictor(level(1, cap_mb=100), level(2, cap_mb=100), cap_mb=100.0)
    assert notes(known, bucket_cap_mb=8.0) == ()
    (note,) = notes(known, bucket_cap_mb=1.0)
    assert note.startswith("8 buckets, and 1 when measured")


def test_the_measured_step_stands_beside_the_predicted_one():
    known = predictor(level(1), level(2), level(4))
    assert known.predict(Request(2)).measured_ms == level(2).step_ms.mean
    for other in (Request(3), Request(2, 2), Request(2, bucket_cap_mb=1.0)):
        assert known.predict(other).measured_ms is None


def test_levels_that_cannot_be_held_out_are_named():
    # dp 2 is the only one within a node.
    known = predictor(level(1, nodes=1), level(2, nodes=1), level(4, nodes=2), level(8, nodes=4))
    tests = known.back_test()
    assert [test.held_out for test in tests.tests] == ["dp4-acc1", "dp8-acc1"]
    assert tests.left_out == ("dp2-acc1",)
    only = predictor(level(1, nodes=1), level(2, nodes=1), level(4, nodes=2)).back_test()
    assert only.tests == ()
    assert "dp2-acc1 and dp4-acc1 are each the only level of their kind" in only.why_not


def test_back_tests_have_the_width_that_predictions_get():
    wrong = predictor(level(1), level(2), level(4, gbit=0.5))
    for test in wrong.back_test().tests:
        low, high = test.interval90
        assert (high - low) / test.predicted_ms > 0.5


def test_a_link_that_does_not_bound_is_scaled_by_its_share_only():
    # AllReduce reaches half of the link's rate: half of its time is something else's.
    level_2 = level(2)
    link = replace(level_2.allreduce.link, gbit_per_s=2.0)
    half = replace(level_2, allreduce=replace(level_2.allreduce, link=link))
    known = predictor(level(1), half)
    full = known.predict(Request(2)).breakdown_ms["exposed_transfer"]
    faster = known.predict(Request(2, bandwidth_gbps=8.0))
    assert 0.6 * full < faster.breakdown_ms["exposed_transfer"] < 0.7 * full
    assert any("something else" in note for note in faster.notes)


def test_what_a_plain_step_takes_more_is_in_its_own_work():
    slower = level(2)
    mean = slower.step_ms.mean + 5.0
    slower = replace(slower, step_ms=replace(slower.step_ms, mean=mean))
    found = predictor(level(1), slower).predict(Request(2))
    assert found.step_ms.median == pytest.approx(mean, rel=0.003)
    work = FORWARD_MS + BACKWARD_MS + OPTIMIZER_MS
    share = (work + 5) / work
    assert found.breakdown_ms["forward"] == pytest.approx(share * FORWARD_MS, rel=0.01)
    assert found.efficiency == pytest.approx(level(1).step_ms.mean / mean, rel=0.01)


def test_modules_communicate_in_every_micro_step():
    def with_modules(dp):
        made = level(dp)
        costs = replace(made.costs_ms, forward_comm=15.0, backward_comm=25.0)
        mean = made.step_ms.mean + 40
        return replace(made, costs_ms=costs, step_ms=replace(made.step_ms, mean=mean))

    found = predictor(level(1), with_modules(2)).predict(Request(2, accumulation=4))
    parts = found.breakdown_ms
    assert (parts["forward_comm"], parts["backward_comm"]) == pytest.approx((60.0, 100.0))


def test_buffers_are_broadcast_once_a_step():
    made = level(2)
    costs = replace(made.costs_ms, forward_comm=15.0)
    mean = made.step_ms.mean + 15
    made = replace(made, costs_ms=costs, step_ms=replace(made.step_ms, mean=mean))
    found = predictor(level(1), made).predict(Request(2, accumulation=4))
    assert found.breakdown_ms["forward_comm"] == pytest.approx(15.0)


def test_unseen_contention_widens_where_cores_are_busy():
    def busy(share):
        made = level(2, cap_mb=100)
        use = MachineUse(rank=0, wall_ms=1.0, busy_fraction=share)
        return replace(made, ranks=tuple(replace(rank, machine=use) for rank in made.ranks))

    steps = []
    for share in (0.0, 1.0):
        known = predictor(level(1, cap_mb=100), busy(share), cap_mb=100.0)
        steps.append(known.predict(Request(2, bucket_cap_mb=4)).step_ms)
    assert steps[1].median > steps[0].median


def test_more_buckets_cost_what_filling_lets_expect():
    def filling(dp):
        made = level(dp, cap_mb=100)
        costs = replace(made.costs_ms, sync_backward=0.08)
        mean = made.step_ms.mean + 0.08
        return replace(made, costs_ms=costs, step_ms=replace(made.step_ms, mean=mean))

    known = predictor(filling(1), filling(2), cap_mb=100.0, cores=64)
    one = known.predict(Request(2)).breakdown_ms["backward"]
    eight = known.predict(Request(2, bucket_cap_mb=1)).breakdown_ms["backward"]
    assert eight - one == pytest.approx(7 * 0.08 / 2, abs=0.02)


def test_only_gains_beyond_their_error_are_proposed():
    # A gain of 3 % of the step, in a step that is known to 3 %.
    def noisy(share):
        made = level(2, gbit=1e4)
        step = made.step_ms
        slow = replace(made.costs_ms, exposed_copy=2.0)
        interval = (step.median * (1 - share), step.median * (1 + share))
        return replace(made, costs_ms=slow, step_ms=replace(step, ci95=interval))

    def proposed(share):
        single = level(1, gbit=1e4)
        costs = replace(single.costs_ms, exposed_copy=2.0)
        mean = single.step_ms.mean + 1
        single = replace(single, costs_ms=costs, step_ms=replace(single.step_ms, mean=mean))
        return {one.setting for one in propose(predictor(single, noisy(share)))}

    assert "bucket_view" in proposed(0.001)
    known = predictor(level(1, cap_mb=100), level(2, cap_mb=100), cap_mb=100.0)
    for one in propose(known):
        assert one.gain_interval90[0] > 0
        # The gain's own error, beyond what both steps share.
        assert one.gain_interval90[1] - one.gain_interval90[0] > 0.2 * one.gain_ms
