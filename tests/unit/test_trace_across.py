"""Between ranks: planted clocks, lags and transfer times must come out exactly."""

import json
import random
from itertools import pairwise

import pytest

from ddp_profiler.report import traces
from ddp_profiler.trace.across import compare
from ddp_profiler.trace.analysis import analyse
from ddp_profiler.trace.gather import read_ranks
from ddp_profiler.trace.kernels import KINDS

from .kineto import Recording, number
from .traced_job import Call, make_job


def compared(job, tmp_path, **how):
    found = read_ranks([job.write(tmp_path / "job", **how)])
    return found, compare(found.ranks)


def codes(across):
    return {warning.code: warning.count for warning in across.warnings}


def text_of(across, code):
    (message,) = (w.message for w in across.warnings if w.code == code)
    return message


def rows(across):
    """(kind, group, step, waits by rank, last, transfer) of what was compared."""
    for found in across.meetings:
        for row in range(len(found.match)):
            yield (
                KINDS[found.match.kind[row]].value,
                found.match.label,
                int(found.step[row]),
                dict(zip(found.match.ranks, found.wait_ns[row].tolist(), strict=True)),
                found.match.ranks[found.last[row]],
                int(found.transfer_ns[row]),
            )


def truth(job, label=lambda group: f"{group} (pg{group})"):
    return [
        (met.kind, label(met.group), met.step, met.waits, met.last, met.transfer) for met in job.met
    ]


def same(found, expected):
    def key(row):
        return (row[0], row[1] or "", row[2], sorted(row[3].items()))

    assert sorted(found, key=key) == sorted(expected, key=key)


OFFSETS = {1: 11_560_000_000, 2: -3_000_123, 3: 7}


@pytest.mark.parametrize("seed", range(3))
def test_planted_clocks_lags_and_transfers_come_out_exactly(seed, tmp_path):
    job = make_job(seed, offsets=OFFSETS)
    found, across = compared(job, tmp_path)
    assert codes(across) == {}
    assert across.clocks.offset_ns == {0: 0, **OFFSETS}
    assert (across.clocks.typical_ns, across.clocks.most_ns) == (0, 0)
    assert across.clocks.num_collectives == 9
    same(rows(across), truth(job))
    for split in found.ranks:
        total = across.waiting_total[split.rank]
        assert total.wait_ns == sum(met.waits[split.rank] for met in job.met)
        assert total.transfer_ns == sum(met.transfer for met in job.met)


@pytest.mark.parametrize("seed", range(3))
def test_exposed_waiting_matches_counting(seed, tmp_path):
    job = make_job(seed, offsets=OFFSETS)
    found, across = compared(job, tmp_path)
    for split in found.ranks:
        rank = split.rank
        for place, step in enumerate(split.steps):
            compute = [span[1:] for span in job.compute[rank] if span[0] == place]
            mine = [met for met in job.met if met.step == place]
            waits = [(met.begin[rank], met.begin[met.last]) for met in mine]
            moves = [(met.begin[met.last], met.end) for met in mine]
            marks = sorted({ns for span in (*compute, *waits, *moves) for ns in span})
            exposed = {"wait": 0, "transfer": 0}
            for before, after in pairwise(marks):

                def runs(spans, before=before, after=after):
                    return any(b <= before and after <= e for b, e in spans)

                if not runs(compute):
                    if runs(moves):
                        exposed["transfer"] += after - before
                    elif runs(waits):
                        exposed["wait"] += after - before
            waiting = across.waiting[rank][place]
            assert waiting.exposed_wait_ns == exposed["wait"]
            assert waiting.exposed_transfer_ns == exposed["transfer"]
            assert waiting.exposed_untold_ns == 0
            assert step.parts.exposed_comm_ns == exposed["wait"] + exposed["transfer"]
        total = across.waiting_total[rank]
        assert total.exposed_wait_ns + total.exposed_transfer_ns == split.total.exposed_comm_ns


def test_who_is_late_and_how_often(tmp_path):
    # Rank 2 joins 400 us after the second to last in two of three collectives of each step, and
    # rank 1 by 100 us in the third.
    def lag(step, place, rank):
        late = 1 if place == 2 else 2
        return (100_000 if late == 1 else 400_000) + 50_000 if rank == late else 50_000 - rank

    job = make_job(lag=lag, steps=4)
    _, across = compared(job, tmp_path)
    first, second, *rest = across.lateness
    assert (first.rank, first.last, first.joined) == (2, 8, 12)
    assert (first.lag_ns, first.caused_ns) == (400_000, 8 * 400_000)
    assert (first.steps, first.steps_worst) == (4, 4)
    assert (second.rank, second.last, second.lag_ns, second.steps_worst) == (1, 4, 100_000, 0)
    assert [(one.last, one.caused_ns, one.lag_ns) for one in rest] == [(0, 0, None)] * 2
    assert first.behind_ns == (8 * 400_003 + 4 * 1) // 12


def test_a_lag_within_the_uncertainty_names_nobody(tmp_path):
    job = make_job(lag=lambda step, place, rank: rank * 100, end_noise=2000, steps=6)
    _, across = compared(job, tmp_path)
    assert across.refused == ""
    assert 0 < across.clocks.most_ns <= 4000
    assert [one.last for one in across.lateness] == [0, 0, 0, 0]


def test_noise_of_ends_moves_offsets_no_further(tmp_path):
    job = make_job(1, offsets=OFFSETS, end_noise=3000, steps=20)
    _, across = compared(job, tmp_path)
    for rank, ns in OFFSETS.items():
        assert abs(across.clocks.offset_ns[rank] - ns) <= 3000
    assert across.clocks.typical_ns <= 3000
    assert [row[4] for row in rows(across)] == [met.last for met in job.met]


def test_a_drift_is_taken_out(tmp_path):
    job = make_job(2, world=3, steps=150, offsets={1: 5_000_000}, drifts={1: 40.0, 2: -15.0})
    _, across = compared(job, tmp_path)
    assert set(across.clocks.drift_ppm) == {1, 2}
    assert across.clocks.drift_ppm[1] == pytest.approx(40, abs=0.01)
    assert across.clocks.drift_ppm[2] == pytest.approx(-15, abs=0.01)
    assert codes(across) == {"clock_drift": 2}
    # Rounding to ns is all that is left.
    assert across.clocks.most_ns <= 20
    for found, met in zip(rows(across), job.met, strict=True):
        assert found[4] == met.last
        assert found[5] == pytest.approx(met.transfer, abs=60)


def test_bases_and_drifting_begin_do_not_matter(tmp_path):
    job = make_job(3, offsets=OFFSETS)
    plain = compared(job, tmp_path)[1]
    for rank, made in job.recordings.items():
        base = made.origin_ns - 10**9 * (rank + 1)
        for event in made.events:
            sign, text = 1, event["ts"].strip("@")
            whole, _, part = text.partition(".")
            ns = sign * (int(whole) * 1000 + int(part.ljust(3, "0") or 0))
            event["ts"] = number(ns - base)
        made.base_ns = base
    _, across = compared(job, tmp_path)
    assert across.clocks.offset_ns == plain.clocks.offset_ns
    assert list(rows(across)) == list(rows(plain))


# ----------------------------------------------------------------------------------------------
# What must not change it


def content(folder):
    found = read_ranks([folder])
    return json.loads(json.dumps(traces.as_json(found, analyse(found))))


def test_a_shifted_clock_changes_only_the_offset(tmp_path):
    base = content(make_job(5).write(tmp_path / "a"))
    moved = content(make_job(5, offsets={3: 11_560_000_000}).write(tmp_path / "b"))
    assert moved["clock_offsets_us"].pop("3") == 11_560_000.0
    assert base["clock_offsets_us"].pop("3") == 0.0
    assert base["collectives"]
    for name in set(base) - {"ranks"}:
        assert moved[name] == base[name], name


def test_lower_case_names_change_nothing(tmp_path):
    base = content(make_job(5).write(tmp_path / "a"))
    job = make_job(5)
    for made in job.recordings.values():
        for event in made.events:
            if event["cat"] == "kernel":
                event["name"] = event["name"].lower()
    lower = content(job.write(tmp_path / "b"))
    for name in set(base) - {"ranks"}:
        assert lower[name] == base[name], name


# ----------------------------------------------------------------------------------------------
# Groups


HYBRID = [
    Call("AllGather", "1", (0, 1), 800),
    Call("AllGather", "2", (2, 3), 800),
    Call("AllGather", "1", (0, 1), 600),
    Call("AllGather", "2", (2, 3), 600),
    Call("ReduceScatter", "1", (0, 1), 800),
    Call("ReduceScatter", "2", (2, 3), 800),
    Call("AllReduce", "3", (0, 2), 400),
    Call("AllReduce", "4", (1, 3), 400),
]


@pytest.mark.parametrize("said", [True, False])
def test_hybrid_sharding_is_matched_by_group(said, tmp_path):
    offsets = {1: 500, 2: 12_345_678, 3: -9_000}
    job = make_job(4, script=HYBRID, offsets=offsets, ranks_said=said)
    found, across = compared(job, tmp_path)
    assert codes(across) == {}
    same(rows(across), truth(job))
    assert [(one.label, one.ranks, one.size, len(one)) for one in across.matches] == [
        ("1 (pg1)", (0, 1), 2, 9),
        ("3 (pg3)", (0, 2), 2, 3),
        ("4 (pg4)", (1, 3), 2, 3),
        ("2 (pg2)", (2, 3), 2, 9),
    ]
    # No group has all ranks: the clocks are tied through several.
    assert across.clocks.offset_ns == {0: 0, **offsets}
    shares = {(s.kind.value, s.group): s.count for s in found.ranks[0].total.by_kind}
    assert shares == {
        ("AllGather", "1 (pg1)"): 6,
        ("ReduceScatter", "1 (pg1)"): 3,
        ("AllReduce", "3 (pg3)"): 3,
    }


def test_ranks_that_no_group_ties_are_compared_among_themselves(tmp_path):
    job = make_job(4, script=HYBRID[:6], offsets={2: 10**9, 3: 10**9 + 500})
    _, across = compared(job, tmp_path)
    assert across.clocks.reference == {0: 0, 1: 0, 2: 2, 3: 2}
    assert across.clocks.offset_ns == {0: 0, 1: 0, 2: 0, 3: 500}
    same(rows(across), truth(job))


def test_groups_of_one_name_are_told_apart_by_their_ranks(tmp_path):
    script = [Call("AllReduce", "dp", (0, 1), 10), Call("AllReduce", "dp", (2, 3), 10)]
    job = make_job(4, script=script)
    _, across = compared(job, tmp_path)
    assert codes(across) == {}
    same(rows(across), truth(job, lambda group: f"{group} (pg{group})"))
    # Where the ranks are not said, nothing is compared rather than something wrong.
    job = make_job(4, script=script, ranks_said=False)
    _, across = compared(job, tmp_path)
    assert across.meetings == ()
    assert codes(across) == {"group_is_several": 4, "across_ranks_refused": 1}
    assert "dp (pgdp) has 2 ranks, but ranks 0-3 have it" in text_of(across, "group_is_several")


def test_the_metadata_may_name_the_ranks_of_groups(tmp_path):
    script = [Call("AllReduce", "dp", (0, 1), 10), Call("AllReduce", "dp", (2, 3), 10)]
    job = make_job(4, script=script, ranks_said=False)
    for rank, made in job.recordings.items():
        config = [{"pg_name": "dp", "pg_size": 2, "ranks": [0, 1] if rank < 2 else [2, 3]}]
        made.more["distributedInfo"] = {
            "rank": rank, "world_size": 4, "backend": "nccl", "pg_config": config,
        }  # fmt: skip
    _, across = compared(job, tmp_path)
    same(rows(across), truth(job))


def test_collectives_without_a_group_are_taken_for_one_of_all(tmp_path):
    job = make_job(4, script=[Call(group=None, elements=None)] * 3)
    _, across = compared(job, tmp_path)
    assert codes(across) == {"group_not_named": 1}
    same(rows(across), truth(job, lambda group: None))


# ----------------------------------------------------------------------------------------------
# Messages and broadcasts


def test_messages_are_not_used_for_clocks(tmp_path):
    script = [Call("SendRecv", elements=None)] * 4
    _, across = compared(make_job(4, script=script), tmp_path)
    assert "at least 3 are needed, and there are 0" in across.refused
    # Beside others they are compared, as all ends lie behind the last begin.
    script = [*script, Call(), Call(elements=7)]
    job = make_job(4, script=script)
    _, across = compared(job, tmp_path)
    same(rows(across), truth(job))
    assert across.clocks.num_collectives == 6


def test_a_message_that_was_done_before_another_began_blames_nobody(tmp_path):
    job = make_job(4, world=2, script=[Call(), Call("SendRecv"), Call(elements=7)])
    sent = [e for e in job.recordings[0].events if "SendRecv" in e["name"]]
    for event in sent:
        event["dur"] = number(100)
    _, across = compared(job, tmp_path)
    (messages,) = (one for one in across.meetings if one.match.point_to_point)
    first = messages.begin_ns[:, 0] + 100 < messages.begin_ns[:, 1]
    assert first.any()
    assert not messages.meets[first].any()
    assert messages.wait_ns[first, 0].tolist() == [100] * int(first.sum())
    assert messages.clear[first].sum() == 0


def test_messages_between_some_ranks_are_not_paired(tmp_path):
    job = make_job(4, script=[Call(), Call("SendRecv")], skip=lambda r, s, c: (r, c) == (1, 1))
    _, across = compared(job, tmp_path)
    assert codes(across) == {"messages_not_paired": 9}
    assert {row[0] for row in rows(across)} == {"AllReduce"}
    # What is not compared is neither waiting nor transfer.
    waiting = across.waiting_total[0]
    assert waiting.exposed_untold_ns > 0


def root_is_done_early(job, ns):
    """Shortens rank 0's broadcasts, of which the root's end tells nothing of the others'."""
    for event in job.recordings[0].events:
        if "Broadcast" in event["name"]:
            event["dur"] = number(round(float(event["dur"].strip("@")) * 1000) - ns)
    return job


@pytest.mark.parametrize("world", [2, 4])
def test_broadcasts_alone_tie_no_clocks(world, tmp_path):
    """A root that is always done 10 us early looks like a clock, and would be called late."""
    job = root_is_done_early(make_job(4, world=world, script=[Call("Broadcast")] * 3), 10_000)
    found, across = compared(job, tmp_path)
    assert "at least 3 are needed, and there are 0. Broadcasts" in across.refused
    assert across.lateness == ()
    assert "late-rank" not in {one.id for one in analyse(found).findings}


def test_broadcasts_move_no_clocks_beside_others(tmp_path):
    script = [Call("Broadcast")] * 5 + [Call()]
    job = root_is_done_early(make_job(4, script=script, offsets=OFFSETS), 10_000)
    _, across = compared(job, tmp_path)
    assert across.clocks.offset_ns == {0: 0, **OFFSETS}
    assert across.clocks.num_collectives == 3


def test_two_others_beside_broadcasts_are_too_few(tmp_path):
    script = [Call("Broadcast")] * 5 + [Call()]
    job = root_is_done_early(make_job(4, script=script, steps=2), 10_000)
    _, across = compared(job, tmp_path)
    assert "at least 3 are needed, and there are 2." in across.refused


# ----------------------------------------------------------------------------------------------
# What is missing or differs


def test_a_missing_rank_is_named_and_the_others_are_compared(tmp_path):
    job = make_job(6, offsets=OFFSETS)
    found, across = compared(job, tmp_path, leave_out=[2])
    assert across.refused == ""
    expected = []
    for met in job.met:
        del met.begin[2]
        expected.append((met.kind, "0 (pg0)", met.step, met.waits, met.last, met.transfer))
    same(rows(across), expected)
    analysis = analyse(found)
    assert "ranks-missing" in {one.id for one in analysis.findings}
    assert "ranks given only" in traces.render(found, analysis).replace("\n", " ")
    assert {warning.code for warning in found.warnings} == {"missing_ranks"}


@pytest.mark.parametrize("annotated", [True, False])
def test_recordings_that_begin_and_end_elsewhere(annotated, tmp_path):
    script = [Call(elements=size) for size in (1000, 1000, 1000, 2000)]

    def skip(rank, step, call):
        return (rank == 1 and (step, call) < (0, 2)) or (rank == 3 and (step, call) > (3, 1))

    job = make_job(7, script=script, steps=4, skip=skip, offsets=OFFSETS, annotated=annotated)
    _, across = compared(job, tmp_path)
    kept = [
        row for row, met in zip(truth(job), job.met, strict=True)
        if met not in job.met[:2] and met not in job.met[-2:]
    ]  # fmt: skip
    same([(row[0], row[1], 0, *row[3:]) for row in rows(across)],
         [(row[0], row[1], 0, *row[3:]) for row in kept])  # fmt: skip
    assert codes(across)["collectives_not_matched"] == 12
    assert across.clocks.offset_ns == {0: 0, **OFFSETS}
    assert not any(code.startswith("collectives_differ") for code in codes(across))


def test_equal_collectives_without_steps_are_paired_by_their_ends(tmp_path):
    script = [Call(elements=None)] * 3
    job = make_job(
        8, script=script, steps=5, annotated=False, offsets=OFFSETS,
        skip=lambda rank, step, call: rank == 1 and step == 0,
    )  # fmt: skip
    _, across = compared(job, tmp_path)
    assert across.clocks.offset_ns == {0: 0, **OFFSETS}
    assert [row[5] for row in rows(across)] == [met.transfer for met in job.met[3:]]


def test_an_even_rhythm_without_steps_is_refused_not_guessed(tmp_path):
    for rank in range(2):
        made = Recording(rank=rank)
        for place in range(8):
            made.comm((place + rank) * 1_000_000, 500_000, **{"Process Group Name": "7"})
        made.write(tmp_path / f"rank{rank}.json")
    across = compare(read_ranks([tmp_path]).ranks)
    assert codes(across)["collectives_differ_in_order"] == 8
    message = text_of(across, "collectives_differ_in_order")
    assert message.endswith("Group 7: 8 of rank 1 fit 8 of rank 0 in several ways.")
    assert "ProfilerSteps" in message
    assert across.meetings == ()


def test_a_collective_that_one_rank_lacks_shifts_nothing(tmp_path):
    script = [Call(elements=size) for size in (10, 20, 30, 40)]
    job = make_job(9, script=script, steps=5, skip=lambda *at: at == (2, 2, 1))
    _, across = compared(job, tmp_path)
    assert codes(across) == {"collectives_differ_in_count": 1, "collectives_not_matched": 3}
    message = text_of(across, "collectives_differ_in_count")
    assert "in step 2: rank 2 has 3 of them, rank 0 has 4" in message
    assert "AllReduce 9 (30 elements)" in message
    expected = [row for place, row in enumerate(truth(job)) if place != 9]
    same(rows(across), expected)


def changed(job, rank, place, **arguments):
    events = [e for e in job.recordings[rank].events if "AllReduce" in e["name"]]
    events[place]["args"] |= arguments
    return job


def test_other_sizes_are_named_and_not_compared(tmp_path):
    job = changed(make_job(9), 3, 4, **{"In msg nelems": 77, "Out msg nelems": 77})
    _, across = compared(job, tmp_path)
    assert codes(across) == {"collectives_differ_in_size": 1, "collectives_not_matched": 4}
    message = text_of(across, "collectives_differ_in_size")
    assert "rank 3 has AllReduce 4 (77 elements), rank 0 has AllReduce 4 (2000" in message
    same(rows(across), [row for place, row in enumerate(truth(job)) if place != 4])


def test_other_kinds_are_named_and_not_compared(tmp_path):
    job = changed(make_job(9), 0, 4, **{"Collective name": "allgather"})
    _, across = compared(job, tmp_path)
    assert codes(across)["collectives_differ_in_kind"] == 1
    message = text_of(across, "collectives_differ_in_kind")
    # The odd one out is named, not the majority.
    assert "rank 0 has AllGather 0 (2000 elements), rank 1 has AllReduce 4" in message
    same(rows(across), [row for place, row in enumerate(truth(job)) if place != 4])


def test_one_broken_time_is_left_out(tmp_path):
    job = make_job(9, steps=5)
    events = [e for e in job.recordings[1].events if "AllReduce" in e["name"]]
    events[4]["dur"] = number(10 * 10**9)
    _, across = compared(job, tmp_path)
    assert codes(across)["ends_apart"] == 1
    assert "AllReduce 4, by 9" in text_of(across, "ends_apart")
    told = [int(t) for one in across.meetings for t in one.told]
    assert told.count(0) == 1
    total = {r.rank: r for r in across.lateness}
    assert sum(one.joined for one in total.values()) == 4 * 14
    assert across.clocks.offset_ns == {0: 0, 1: 0, 2: 0, 3: 0}
    assert across.clocks.most_ns == 0


# ----------------------------------------------------------------------------------------------
# Refused


def test_too_few_collectives_are_refused(tmp_path):
    job = make_job(1, steps=1, script=[Call(), Call(elements=7)])
    found, across = compared(job, tmp_path)
    assert "at least 3 are needed, and there are 2" in across.refused
    assert (across.meetings, across.waiting) == ((), {})
    content_ = traces.as_json(found, analyse(found))
    assert content_["clock_offsets_us"] is None
    assert [row["transfer_us"] for row in content_["collectives"]] == [None, None]
    assert content_["ranks"][0]["total"]["comm_us"] > 0
    assert "not compared" in traces.render(found, analyse(found))


def test_ends_that_do_not_agree_are_refused(tmp_path):
    job = make_job(1, end_noise=15_000_000 // 100, steps=10)
    _, across = compared(job, tmp_path)
    assert "Ends of the same collectives differ by" in across.refused
    assert across.meetings == ()
    assert across.clocks.typical_ns > 20_000


def test_gloo_is_refused_with_the_reason(tmp_path):
    job = make_job(1, backend="gloo")
    for made in job.recordings.values():
        for event in made.events:
            if "AllReduce" in event["name"]:
                event |= {"cat": "user_annotation", "name": "gloo:all_reduce"}
    found, across = compared(job, tmp_path)
    assert not found.ranks[0].on_gpu
    assert "gloo" in across.refused
    assert across.meetings == ()
    assert len(across.matches[0]) == 9


def test_one_rank_has_nobody_to_compare_with(tmp_path):
    job = make_job(1)
    found, across = compared(job, tmp_path, leave_out=[1, 2, 3])
    assert across.refused
    content_ = traces.as_json(found, analyse(found))
    assert len(content_["collectives"]) == 9
    assert {row["transfer_us"] for row in content_["collectives"]} == {None}
    assert content_["collectives"][0]["elements"] == 1000


def test_a_rank_with_too_little_in_common_is_left_out_alone(tmp_path):
    script = [Call("AllReduce", "0", (0, 1, 2)), Call("AllReduce", "9", (2, 3), 5)]
    job = make_job(1, script=script, steps=4, skip=lambda rank, step, call: rank == 3 and step > 1)
    _, across = compared(job, tmp_path)
    assert codes(across)["rank_not_aligned"] == 1
    assert "Rank 3:" in text_of(across, "rank_not_aligned")
    assert {row[1] for row in rows(across)} == {"0 (pg0)"}
    assert set(across.waiting) == {0, 1, 2}


def test_json_has_the_contracts_keys(tmp_path):
    found = read_ranks([make_job(1, offsets=OFFSETS).write(tmp_path / "job")])
    content_ = json.loads(json.dumps(traces.as_json(found, analyse(found)), allow_nan=False))
    row = content_["collectives"][0]
    assert {
        "kind", "index", "elements", "group", "begin_us", "transfer_us", "wait_us_by_rank",
        "last_rank",
    } <= set(row)  # fmt: skip
    assert set(row["wait_us_by_rank"]) == {"0", "1", "2", "3"}
    assert row["wait_us_by_rank"][str(row["last_rank"])] == 0
    assert content_["clock_offsets_us"]["1"] == 11_560_000.0
    assert content_["clock_residual_us"] == 0
    assert [one["index"] for one in content_["collectives"]] == list(range(9))
    # Begin and transfer are on the first rank's clock.
    assert row["begin_us"] + row["transfer_us"] == pytest.approx(
        row["begin_us_by_rank"]["1"] + row["duration_us_by_rank"]["1"], abs=0.5
    )
    text = traces.render(found, analyse(found))
    assert max(map(len, text.splitlines())) <= 80


def test_json_says_how_late_a_rank_is_and_whether_chance_may_be_why(tmp_path):
    lags = random.Random(5)
    job = make_job(
        1, steps=6, lag=lambda step, call, rank: lags.randrange(9000) + 700_000 * (rank == 2)
    )
    found, across = compared(job, tmp_path)
    late = traces.as_json(found, analyse(found))["across_ranks"]["late_ranks"]
    assert late[0]["rank"] == 2
    assert {one["rank"]: one["clearly"] for one in late} == {
        rank: rank == 2 for rank in job.recordings
    }
    for one in late:
        others = [other["caused_us"] for other in late if other is not one]
        more = one["caused_us"] - sum(others) / len(others)
        assert one["excess_us"] == pytest.approx(max(0, more), abs=0.001)
        assert (one["outliers"], one["outliers_us"]) == next(
            (same.outliers, same.outlier_ns / 1000)
            for same in across.lateness
            if same.rank == one["rank"]
        )
    assert late[0]["excess_us"] > 6 * 300
