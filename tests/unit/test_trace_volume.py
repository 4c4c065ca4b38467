"""Gradient elements, bytes, repetitions and busbw from planted sizes and times."""

import pytest

from ddp_profiler.trace.analysis import analyse
from ddp_profiler.trace.gather import read_ranks
from ddp_profiler.trace.kernels import Collective
from ddp_profiler.trace.volume import (
    bus_factor,
    is_floating,
    reductions,
    repeats,
    type_bytes,
)

from .kineto import number
from .traced_job import Call, make_job


def read(job, tmp_path, **how):
    return read_ranks([job.write(tmp_path / "job", **how)])


def test_elements_bytes_and_reductions_of_a_step(tmp_path):
    script = [Call(elements=300), Call(elements=700), Call(elements=12, dtype="Long")]
    found = read(make_job(1, script=script), tmp_path)
    one = reductions(found.ranks[0])
    assert [(s.step, s.count, s.elements, s.bytes) for s in one.steps] == [
        (0, 2, 1000, 4000), (1, 2, 1000, 4000), (2, 2, 1000, 4000),
    ]  # fmt: skip
    assert one.counted == "AllReduce of Float in group 0 (pg0)"


def test_mixed_types_and_unknown_sizes(tmp_path):
    script = [Call(elements=300, dtype="BFloat16"), Call(elements=700, dtype="Float")]
    one = reductions(read(make_job(1, script=script), tmp_path).ranks[0])
    assert (one.steps[0].elements, one.steps[0].bytes) == (1000, 600 + 2800)
    assert "BFloat16 and Float" in one.counted
    (tmp_path / "b").mkdir()
    script = [Call(elements=None), Call(elements=700)]
    one = reductions(read(make_job(1, script=script), tmp_path / "b").ranks[0])
    assert (one.steps[0].count, one.steps[0].elements, one.steps[0].bytes) == (2, None, None)


def test_sharded_gradients_are_those_of_the_largest_data_parallel_group(tmp_path):
    script = [
        Call("AllGather", "dp_shard", (0, 1, 2), 900, "BFloat16"),
        Call("ReduceScatter", "dp_shard", (0, 1, 2), 900, "BFloat16"),
        Call("AllReduce", "dp_replicate", (0, 3), 300, "BFloat16"),
    ]
    found = read(make_job(1, script=script), tmp_path)
    one = reductions(found.ranks[0])
    assert (one.kind, one.group, one.size) == (
        Collective.REDUCE_SCATTER, "dp_shard (pgdp_shard)", 3,
    )  # fmt: skip
    assert [(s.count, s.elements, s.bytes) for s in one.steps] == [(1, 900, 1800)] * 3
    # Nor is it a loss that all ranks average, or an activation within another group.
    (tmp_path / "b").mkdir()
    script += [Call("AllReduce", "0", (0, 1, 2, 3), 1), Call("AllReduce", "5", (0, 1), 5000)]
    one = reductions(read(make_job(1, script=script), tmp_path / "b").ranks[0])
    assert (one.kind, one.group) == (Collective.REDUCE_SCATTER, "dp_shard (pgdp_shard)")
    # Rank 3 has no larger one.
    assert reductions(found.ranks[3]).group == "dp_replicate (pgdp_replicate)"


def parallel(dp, tp):
    """A step of 4 ranks, 2 x 2: two micro-steps of activations, then the gradients."""
    activations = [
        Call("AllReduce", f"{tp}{place}", members, size)
        for size in (100_000, 5000) * 2
        for place, members in enumerate(((0, 1), (2, 3)))
    ]
    return activations + [
        Call("AllReduce", f"{dp}{place}", members, 1000)
        for place, members in enumerate(((0, 2), (1, 3)))
    ]


def by_id(found):
    return {one.id: one for one in analyse(found).findings}


@pytest.mark.parametrize(
    ("dp", "tp"),
    [
        ("DATA_PARALLEL_GROUP_", "TENSOR_MODEL_PARALLEL_GROUP_"), ("mesh_dp_", "x"), ("dp", "tp"),
    ],
)  # fmt: skip
def test_activations_are_no_gradients(dp, tp, tmp_path):
    found = read(make_job(1, script=parallel(dp, tp)), tmp_path)
    one = reductions(found.ranks[0])
    assert one.group == f"{dp}0 (pg{dp}0)"
    assert [(s.count, s.elements, s.repeats) for s in one.steps] == [(1, 1000, 1)] * 3
    assert not {"needless-reductions", "gradients-not-told"} & set(by_id(found))


@pytest.mark.parametrize(("dp", "tp"), [("1", "2"), ("1", "TENSOR_AND_DATA_PARALLEL_")])
def test_gradients_that_cannot_be_told_are_not_counted(dp, tp, tmp_path):
    found = read(make_job(1, script=parallel(f"{dp}0", f"{tp}0")), tmp_path)
    assert [reductions(split) for split in found.ranks] == [None] * 4
    assert analyse(found).reductions == ()
    findings = by_id(found)
    assert "needless-reductions" not in findings
    one = findings["gradients-not-told"]
    assert one.severity == "info"
    assert "on ranks 0-3; rank 0: " in one.evidence
    assert f"{tp}00 (pg{tp}00): 12 of 630,000 elements" in one.evidence
    assert f"{dp}00 (pg{dp}00): 3 of 3,000 elements" in one.evidence


def test_tensor_parallel_groups_alone_have_no_gradients(tmp_path):
    script = [Call("AllReduce", "tp", elements=size) for size in (10, 20)] * 4
    found = read(make_job(1, script=script), tmp_path)
    assert reductions(found.ranks[0]) is None
    assert "needless-reductions" not in by_id(found)


def test_sizes_that_cannot_be_count_as_unknown(tmp_path):
    script = [Call(elements=2**62), Call(elements=2**62 + 5), Call("AllGather", elements=2**62)]
    found = read(make_job(1, script=script, steps=5), tmp_path)
    analysis = analyse(found)
    assert [(s.count, s.elements, s.bytes) for s in analysis.reductions[0].steps] == [
        (2, None, None)
    ] * 5
    assert analysis.bandwidths == ()
    (warning,) = (one for one in analysis.across.warnings if one.code == "absurd_elements")
    assert warning.count == 60
    # One that can be is known beside them, also on a single rank.
    (tmp_path / "b").mkdir()
    job = make_job(1, script=[*script, Call(elements=1000)])
    found = read(job, tmp_path / "b", leave_out=[1, 2, 3])
    (rate,) = analyse(found).bandwidths
    assert (rate.kind, rate.bytes) == (Collective.ALL_REDUCE, 3 * 4000)
    assert {one.code for one in analyse(found).across.warnings} == {"absurd_elements"}


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ([], 1), ([3], 1), ([3, 3], 1), ([3, 4], 1), ([3, 4, 3, 4], 2), ([3, 4, 3], 1),
        ([1, 1, 2, 1, 1, 2, 1, 1, 2], 3), ([1, 2, 1, 2, 1], 1), ([1, 1, 2] * 2 + [1], 1),
    ],
)  # fmt: skip
def test_repeats(sizes, times):
    assert repeats(sizes) == times
    # By brute force: the shortest begin that makes up the whole.
    periods = [p for p in range(1, len(sizes) + 1) if len(sizes) % p == 0
               and sizes == sizes[:p] * (len(sizes) // p)]  # fmt: skip
    expected = len(sizes) // periods[0] if periods and len(set(sizes)) > 1 else 1
    assert times == expected


def ids(found):
    return {one.id for one in analyse(found).findings}


def test_reducing_every_micro_step_is_a_finding(tmp_path):
    script = [Call(elements=size) for size in (10, 20, 30)] * 3
    found = read(make_job(1, script=script), tmp_path)
    (one,) = (one for one in analyse(found).findings if one.id == "needless-reductions")
    assert one.severity == "warning"
    assert "the same 3 sizes 3 times over" in one.message
    assert "no_sync" in one.message
    assert "9 in step 0, in all 3 complete steps of ranks 0-3" in one.evidence


@pytest.mark.parametrize(
    ("times", "group", "world"), [(2, "0", 4), (3, None, 4)], ids=["two models", "no name"]
)
def test_what_other_things_may_do_is_a_possibility(times, group, world, tmp_path):
    script = [Call(group=group, elements=size) for size in (10, 20, 30)] * times
    found = read(make_job(1, script=script, world=world), tmp_path)
    if group is None:
        for split in found.ranks:
            assert split.trace.groups == ()
    one = by_id(found)["needless-reductions"]
    assert one.severity == "info"
    assert f"It may be {times} models of one kind" in one.message


@pytest.mark.parametrize(
    "script",
    [
        [Call(elements=10)] * 6,
        [Call(elements=size) for size in (10, 20, 30)],
        [Call(elements=size) for size in (10, 20, 10, 20, 5)],
        [Call("ReduceScatter", elements=size) for size in (10, 20, 10, 20)],
        [Call(elements=None)] * 4,
    ],
)
def test_what_does_not_show_needless_reductions(script, tmp_path):
    assert "needless-reductions" not in ids(read(make_job(1, script=script), tmp_path))


def test_repetition_in_some_steps_only_is_none(tmp_path):
    job = make_job(1, script=[Call(elements=size) for size in (10, 20)] * 2)
    for made in job.recordings.values():
        events = [e for e in made.events if "AllReduce" in e["name"]]
        events[2]["args"] |= {"In msg nelems": 11, "Out msg nelems": 11}
    assert "needless-reductions" not in ids(read(job, tmp_path))


# ----------------------------------------------------------------------------------------------


def test_busbw_of_planted_times(tmp_path):
    job = make_job(1, script=[Call(elements=3000), Call("AllGather", elements=800)])
    found = read(job, tmp_path)
    analysis = analyse(found)
    rates = {one.kind: one for one in analysis.bandwidths}
    for kind, nbytes, factor in (("AllReduce", 12_000, 1.5), ("AllGather", 3200, 0.75)):
        met = [one for one in job.met if one.kind == kind]
        transfers = sorted(nbytes * factor / one.transfer for one in met)
        assert rates[kind].transfer_gb_per_s == pytest.approx(transfers[len(transfers) // 2])
        own = sorted(nbytes * factor / (one.end - b) for one in met for b in one.begin.values())
        middle = len(own) // 2
        assert rates[kind].own_gb_per_s == pytest.approx((own[middle - 1] + own[middle]) / 2)
        assert (rates[kind].size, rates[kind].count, rates[kind].compared) == (4, 12, 3)
        assert rates[kind].bytes == 12 * nbytes


def test_busbw_needs_sizes_types_and_ranks(tmp_path):
    assert analyse(read(make_job(1, script=[Call(elements=None)]), tmp_path)).bandwidths == ()
    (tmp_path / "b").mkdir()
    job = make_job(1, script=[Call(dtype="Mystery")])
    assert analyse(read(job, tmp_path / "b")).bandwidths == ()
    assert bus_factor(Collective.ALL_REDUCE, None) is None
    assert bus_factor(Collective.ALL_REDUCE, 1) is None
    assert bus_factor(Collective.SEND_RECV, 4) is None
    assert bus_factor(Collective.BROADCAST, 4) == 1


def test_one_rank_has_busbw_by_its_own_time_only(tmp_path):
    job = make_job(1, script=[Call(elements=1000)])
    events = [e for e in job.recordings[0].events if "AllReduce" in e["name"]]
    for event in events:
        event["dur"] = number(6000)
    (rate,) = analyse(read(job, tmp_path, leave_out=[1, 2, 3])).bandwidths
    assert rate.own_gb_per_s == pytest.approx(4000 * 1.5 / 6000)
    assert (rate.transfer_gb_per_s, rate.compared) == (None, 0)


def test_types():
    assert [type_bytes(name) for name in ("Half", "Double", "Long", "Float8_e5m2", "Odd")] == [
        2, 8, 8, 1, None,
    ]  # fmt: skip
    names = ("Float", "BFloat16", "Half", "Long", "ComplexFloat", "Int")
    assert [is_floating(name) for name in names] == [True, True, True, False, False, False]
