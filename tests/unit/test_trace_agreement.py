"""Ranks that do not fit the others are left out with the reason; the others keep their figures."""

import re

import pytest

from ddp_profiler.naming import name_ranks
from ddp_profiler.report import traces
from ddp_profiler.trace.across import compare
from ddp_profiler.trace.analysis import analyse
from ddp_profiler.trace.gather import read_ranks

from .kineto import number
from .traced_job import Call, make_job


def compared(job, tmp_path, **how):
    found = read_ranks([job.write(tmp_path / "job", **how)])
    return found, compare(found.ranks)


def codes(across):
    return {warning.code: warning.count for warning in across.warnings}


def text_of(across, code):
    (message,) = (w.message for w in across.warnings if w.code == code)
    return message


def waits(across, without=()):
    """Waits of each collective, of all ranks but some."""
    return [
        {
            rank: ns
            for rank, ns in zip(one.match.ranks, row.tolist(), strict=True)
            if rank not in without
        }
        for one in across.meetings
        for row in one.wait_ns[one.told]
    ]


def true_waits(job, odd):
    found = []
    for met in job.met:
        met.begin.pop(odd, None)
        found.append(met.waits)
    return found


def shifted(made, shift):
    """Moves the events of a rank by what ``shift`` says for their time in ns since the origin."""
    for event in made.events:
        whole, _, part = event["ts"].strip("@").partition(".")
        ns = int(whole) * 1000 + int(part.ljust(3, "0") or 0)
        event["ts"] = number(ns + shift(ns - made.origin_ns))


def check_left_out(job, odd, tmp_path):
    """Checks that one rank is left out, and that nothing that is said of others moved."""
    found, across = compared(job, tmp_path)
    assert across.refused == ""
    assert codes(across)["rank_not_aligned"] == 1
    assert f"Rank {odd}: its ends differ from the others' by" in text_of(across, "rank_not_aligned")
    assert "ends_apart" not in codes(across)
    others = sorted(set(job.recordings) - {odd})
    assert list(across.clocks.offset_ns) == others
    assert set(across.clocks.offset_ns.values()) == {0}
    assert across.clocks.most_ns == 0
    assert waits(across) == true_waits(job, odd)
    assert {one.rank for one in across.lateness} == set(others)
    assert odd not in across.waiting_total
    analysis = analyse(found)
    shown = " ".join(traces.render(found, analysis).split())
    assert f"All is said of {name_ranks(others)} only; rank {odd} could not be compared." in shown
    assert "ranks given only" not in shown
    content = traces.as_json(found, analysis)
    by_rank = {one["rank"]: one for one in content["across_ranks"]["ranks"]}
    assert set(by_rank[odd]["total"].values()) == {None}
    (row,) = (
        line.split()
        for line in traces.render(found, analysis).splitlines()
        if re.fullmatch(rf" +{odd}( +-){{8}} *", line)
    )
    assert row[1:] == ["-"] * 8


@pytest.mark.parametrize(("world", "odd"), [(4, 3), (4, 0), (8, 5), (3, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_of_another_run_is_left_out(world, odd, seed, tmp_path):
    job = make_job(seed, world=world, steps=5)
    other = make_job(seed + 100, world=world, steps=5, offsets={odd: 30 * 10**9})
    job.recordings[odd] = other.recordings[odd]
    check_left_out(job, odd, tmp_path)


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_whose_clock_was_set_is_left_out(odd, tmp_path):
    job = make_job(3, steps=6)
    shifted(job.recordings[odd], lambda ns: 5_000_000 if ns > 31_000_000 else 0)
    check_left_out(job, odd, tmp_path)


def test_a_rank_with_other_step_numbers_is_left_out(tmp_path):
    job = make_job(4, steps=6)
    for event in job.recordings[2].events:
        if event["name"].startswith("ProfilerStep#"):
            event["name"] = f"ProfilerStep#{int(event['name'].partition('#')[2]) + 1}"
    _, across = compared(job, tmp_path)
    assert across.refused == ""
    assert "Rank 2: its ends" in text_of(across, "rank_not_aligned")
    assert list(across.clocks.offset_ns) == [0, 1, 3]
    assert across.clocks.most_ns == 0
    # The pairing itself takes steps that all ranks have.
    assert waits(across) == true_waits(job, 2)[3:]


def test_few_collectives_that_fall_together_by_chance_are_not_enough(tmp_path):
    accepted = 0
    for seed in range(30):
        job = make_job(seed, steps=1)
        job.recordings[1] = make_job(seed + 500, steps=1).recordings[1]
        (tmp_path / str(seed)).mkdir()
        _, across = compared(job, tmp_path / str(seed))
        accepted += 1 in across.clocks.offset_ns
        assert {0, 2, 3} <= set(across.clocks.offset_ns)
    assert accepted <= 1


def test_two_runs_of_which_neither_has_more_ranks_are_refused(tmp_path):
    job, other = make_job(1, steps=5), make_job(2, steps=5)
    for rank in (2, 3):
        job.recordings[rank] = other.recordings[rank]
    _, across = compared(job, tmp_path)
    assert "Are these the same steps of one run?" in across.refused
    assert (across.meetings, across.waiting_total) == ((), {})
    assert not across.clocks.offset_ns


def test_two_ranks_of_which_one_has_another_clock_half_the_time_are_refused(tmp_path):
    job = make_job(3, world=2, steps=6)
    shifted(job.recordings[1], lambda ns: 5_000_000 if ns > 31_000_000 else 0)
    found, across = compared(job, tmp_path)
    assert "Ends of the same collectives differ by" in across.refused
    content = traces.as_json(found, analyse(found))
    assert {one["total"]["exposed_wait_us"] for one in content["across_ranks"]["ranks"]} == {None}


def test_waiting_of_a_step_of_which_nothing_was_compared_is_unknown(tmp_path):
    job = make_job(4, steps=8)
    shifted(job.recordings[1], lambda ns: 5_000_000 if ns > 70_000_000 else 0)
    _, across = compared(job, tmp_path)
    assert codes(across)["ends_apart"] == 3
    *before, last = across.waiting[0]
    assert all(one.exposed_wait_ns is not None for one in before)
    assert (last.wait_ns, last.transfer_ns) == (None, None)
    assert (last.exposed_wait_ns, last.exposed_transfer_ns) == (None, None)
    assert last.exposed_untold_ns > 0


# ----------------------------------------------------------------------------------------------
# Collectives without a group


def nameless(members):
    """A step of hybrid sharding, of 2 x 2, by a version that names no groups."""
    return [
        Call(kind, group, ranks, elements=None)
        for kind, groups in members
        for group, ranks in groups
    ]


INTRA, INTER = [("1", (0, 1)), ("2", (2, 3))], [("3", (0, 2)), ("4", (1, 3))]


@pytest.mark.parametrize(
    "script",
    [
        [("AllGather", INTRA), ("ReduceScatter", INTRA), ("AllReduce", INTER)],
        [("AllReduce", INTRA)] * 3,
        [("AllReduce", INTRA)] * 4 + [("AllReduce", INTER)],
        [("AllReduce", [("0", (0, 1, 2, 3))])] * 3 + [("AllReduce", INTRA)],
    ],
)
@pytest.mark.parametrize("late", [None, 3_000_000])
def test_groups_without_names_are_not_taken_for_one(script, late, tmp_path):
    # Great lateness spreads the begins: it must not excuse ends that differ.
    lag = late and (lambda step, place, rank: 40_000 * ((place * 7 + step * 5 + rank * 3) % 8)
                    + (late if rank == 3 else 0))  # fmt: skip
    job = make_job(6, script=nameless(script), steps=6, lag=lag)
    for made in job.recordings.values():
        for event in made.events:
            for name in ("Process Group Name", "Process Group Description", "Process Group Ranks"):
                event["args"].pop(name, None)
            event["args"].pop("Group size", None)
    found, across = compared(job, tmp_path)
    assert "They name no process group" in across.refused, across.refused
    # Nor does anything tell whose gradients they reduce.
    assert analyse(found).reductions == ()
    assert (across.meetings, across.waiting_total) == ((), {})


def test_an_odd_rank_among_nameless_ones_is_left_out_alone(tmp_path):
    script = [Call(group=None, elements=None)] * 3
    job = make_job(1, script=script, steps=5)
    job.recordings[2] = make_job(9, script=script, steps=5).recordings[2]
    _, across = compared(job, tmp_path)
    assert across.refused == ""
    assert list(across.clocks.offset_ns) == [0, 1, 3]
    assert waits(across) == true_waits(job, 2)
