"""How a script reduces, from spans made by hand, and what is said of it."""

from dataclasses import replace

import numpy as np
import pytest

from ddp_profiler.analysis.reduction import Cause
from ddp_profiler.analysis.summary import summarize_run
from ddp_profiler.schema import (
    DdpFacts,
    LevelFacts,
    LevelSettings,
    OptimizedParameter,
    ParameterPlace,
    SpanKind,
    Variant,
)
from tests.unit.span_columns import Spans
from tests.unit.test_summary import SOURCES, run_info

DDP = DdpFacts(
    find_unused_parameters=False,
    static_graph=False,
    broadcast_buffers=True,
    buffer_bytes=0,
    compiled_inside=False,
    group_size=2,
    built_by="__main__",
)
PARAMETERS = (
    OptimizedParameter("weight", ParameterPlace.REDUCED, 0),
    OptimizedParameter("bias", ParameterPlace.REDUCED, 0),
)


def a_step(spans, begin, step, micro_steps, *, wait=0.0, ddp=0, unused=None, search=0.0, sync=0.0):
    """A step of 100 ms a micro-step and 10 more; ``micro_steps`` tells which of them reduce.

    Backward from 20 to 60, its bucket in flight from 50 to 60 + ``wait`` + 12, copying until 80.
    """
    for micro, reduces in enumerate(micro_steps):
        at, where = begin + 100 * micro, {"step": step, "micro_step": micro}
        spans.forward(at, at + 15, **where)
        if sync:
            spans.forward_comm(at, at + sync, index=ddp, **where)
        if search:
            spans.add(SpanKind.GRAPH_SEARCH, at + 15 - search, at + 15, **where)
        spans.backward(at + 20, at + 60, at + 80 if reduces else at + 60, **where)
        if reduces:
            spans.gradient(at + 50, at + 60 + wait + 12, 400, value=ddp, **where)
        if unused is not None:
            spans.bookkeeping(at + 55, at + 60 + wait + 15, value=unused, **where)
    end = begin + 100 * len(micro_steps) + 10
    spans.optimizer(end - 10, end, step=step)
    spans.step(begin, end, step=step, index=len(micro_steps), samples=8 * len(micro_steps))
    return end


def script(micro_steps=(True,), facts=None, ddps=(DDP,), digests=((5, 6), (5, 6)), **step):
    """Two ranks with two warm-up steps and two measured ones of each variant."""
    columns = {}
    for rank in range(2):
        at, spans = 0.0, Spans()
        for number, variant in enumerate((Variant.WARMUP, Variant.PLAIN, Variant.INSTRUMENTED)):
            for i in range(2):
                spans.place |= {"variant": int(variant), "block": number}
                own = step if rank == 0 else {**step, "wait": 0.0}
                begin, at = at, a_step(spans, at, 2 * number + i, micro_steps, **own)
                if variant is not Variant.WARMUP:
                    continue
                for index, value in enumerate(digests[rank]):
                    point = {"step": i, "micro_step": len(micro_steps) - 1, "bytes": 200}
                    where = {"index": index, "value": value, **point}
                    spans.add(SpanKind.GRADIENT_DIGEST, begin + 90, begin + 90, **where)
        columns[rank] = spans.columns()
    known = LevelFacts("script", 100, 400, 1, (400,), SOURCES, optimized=PARAMETERS, ddps=ddps)
    known = replace(known, built_by=ddps[0].built_by if ddps else "", **(facts or {}))
    info = run_info(
        settings={"script": "train.py"},
        levels=(LevelSettings("script", 2, 8, len(micro_steps), "packed", (0, 1)),),
        facts=(known,),
    )
    return info, columns


def summary(*args, **keywords):
    return summarize_run(*script(*args, **keywords))


def said(found):
    return [(f.id, f.severity) for f in found.findings if f.id not in ("limit", "straggler")]


def the(found, name):
    return next(f for f in found.findings if f.id == name)


def test_one_reduction_a_step_is_no_finding():
    found = summary((False, False, True))
    reduction = found.levels[0].reduction
    assert (reduction.syncs, reduction.needless_bytes, reduction.needless_ms) == (1, 0, 0)
    assert said(found) == []
    assert found.levels[0].batch_check.ranks_agree is True


def test_needless_reductions_cost_what_the_least_delayed_rank_is_exposed_to():
    found = summary((True, False, True, True), wait=3.0)
    reduction = found.levels[0].reduction
    assert (reduction.syncs, reduction.needless_bytes) == (3, 2 * 400)
    # Two of them; rank 0 has 3 ms of waiting on top, which is not promised.
    assert reduction.needless_ms == pytest.approx(2 * 12)
    finding = the(found, "needless-reductions")
    assert finding.severity == "warning"
    assert "in 3 micro-steps of a step instead of one" in finding.message
    assert finding.evidence.startswith("3 gradient collectives a step, 1 bucket; ")
    assert "800 B a step reduced too early and at least 24.0 ms" in finding.evidence
    assert finding.expected_gain_pct == pytest.approx(100 * 24 / 410)


def test_needless_reductions_are_found_without_known_buckets():
    found = summary((True, True), facts={"num_buckets": None, "bucket_bytes": None})
    assert said(found) == [("needless-reductions", "warning")]
    assert "unknown buckets" in the(found, "needless-reductions").evidence


def test_two_models_with_a_backward_each_reduce_once():
    info, columns = script((True, True), ddps=(DDP, DDP))
    for values in columns.values():
        later = (values["kind"] == SpanKind.GRADIENT) & (values["micro_step"] == 1)
        values["value"][later] = 1
    found = summarize_run(info, columns)
    assert found.levels[0].reduction.syncs == 1
    assert said(found) == []


def test_gain_is_withheld_where_a_record_is_missing():
    info, columns = script((True, True))
    found = summarize_run(info, {0: columns[0]})
    assert found.levels[0].reduction.needless_ms is None
    assert the(found, "needless-reductions").expected_gain_ms is None
    # One rank alone cannot be compared.
    assert found.levels[0].reduction.compared == 0
    assert found.levels[0].batch_check.ranks_agree is None


@pytest.mark.parametrize(
    ("micro_steps", "place", "cause"),
    [
        ((True,), ParameterPlace.REDUCED, Cause.CHANGED),
        ((True, False), ParameterPlace.REDUCED, Cause.ADDED),
        ((True,), ParameterPlace.OUTSIDE, Cause.OUTSIDE),
        ((True,), ParameterPlace.FROZEN, Cause.FROZEN),
    ],
)
def test_gradients_that_differ_are_named_with_their_cause(micro_steps, place, cause):
    parameters = (PARAMETERS[0], OptimizedParameter("bias", place, 0))
    found = summary(micro_steps, {"optimized": parameters}, digests=((5, 6), (5, 7)))
    (differing,) = found.levels[0].reduction.differing
    assert (differing.name, differing.cause, differing.step) == ("bias", cause, 0)
    assert said(found) == [("gradients-differ", "error")]
    assert "1 of 2 compared parameters" in the(found, "gradients-differ").evidence
    assert found.levels[0].batch_check.ranks_agree is False


def test_another_models_collectives_do_not_reduce_this_one():
    parameters = (PARAMETERS[0], OptimizedParameter("other", ParameterPlace.REDUCED, 1))
    found = summary((True,), {"optimized": parameters}, ddps=(DDP, DDP), digests=((5, 6), (5, 7)))
    (differing,) = found.levels[0].reduction.differing
    assert (differing.name, differing.cause) == ("other", Cause.NOT_REDUCED)


@pytest.mark.parametrize("place", [ParameterPlace.IGNORED, ParameterPlace.SUBGROUP])
def test_parameters_that_ranks_do_not_share_are_exempt(place):
    parameters = (PARAMETERS[0], OptimizedParameter("own", place))
    found = summary((True,), {"optimized": parameters}, digests=((5, 6), (5, 7)))
    assert said(found) == []
    assert found.levels[0].reduction.compared == 1


def test_a_shard_of_each_rank_is_not_compared():
    found = summary(digests=((5,), ()))
    assert found.levels[0].reduction.compared == 0
    assert said(found) == []
    info, columns = script(digests=((5, 6), (5, 7)))
    other = (columns[1]["kind"] == SpanKind.GRADIENT_DIGEST) & (columns[1]["index"] == 1)
    columns[1]["bytes"][other] = 100
    assert said(summarize_run(info, columns)) == []


def test_a_group_of_some_ranks_is_not_compared():
    info, columns = script(digests=((5, 6), (5, 7)))
    level = LevelSettings("script", 2, 8, 1, "packed", (0, 1, 2, 3))
    found = summarize_run(replace(info, levels=(level,), world_size=4), columns)
    assert found.levels[0].reduction.compared == 0


def test_a_hook_of_the_script_may_mean_it():
    sources = {**SOURCES, "gradient_collectives": "user_hook"}
    found = summary(facts={"sources": sources}, digests=((5, 6), (5, 7)))
    assert said(found) == [("gradients-differ", "warning")]


@pytest.mark.parametrize(
    ("digests", "itself", "findings"),
    [
        (((5, 6), (4, 7)), 0, [("never-reduced", "error")]),
        (((5, 6), (5, 6)), 0, [("never-reduced", "error")]),
        # In 4 observed steps it reduces gradients by itself; or something else, such as weights.
        (((5, 6), (5, 6)), 1600, []),
        (((5, 6), (4, 7)), 1600, [("never-reduced", "warning")]),
        # A loss for the log, in every step: in all of them as much as the gradients of one.
        (((5, 6), (4, 7)), 400, [("never-reduced", "error")]),
    ],
)
def test_gradients_that_are_never_reduced(digests, itself, findings):
    found = summary((False, False), {"reduced_outside_bytes": itself}, digests=digests)
    assert said(found) == findings
    assert found.levels[0].reduction.syncs == 0
    if findings:
        assert "every micro-step ran under no_sync()" in the(found, "never-reduced").message


def test_a_model_that_is_called_past_ddp():
    info, columns = script((False,))
    seen = {
        rank: {name: column[own["kind"] != SpanKind.FORWARD] for name, column in own.items()}
        for rank, own in columns.items()
    }
    found = summarize_run(info, seen)
    assert "called past DDP" in the(found, "never-reduced").message


SEARCHING = replace(DDP, find_unused_parameters=True)


def test_searching_for_nothing_costs_search_and_map():
    found = summary(ddps=(SEARCHING,), unused=0, search=4.0)
    reduction = found.levels[0].reduction
    assert (reduction.unused, reduction.search_ms) == (0, pytest.approx(4.0))
    # The map is reduced until 75, the gradients until 72.
    assert reduction.map_ms == pytest.approx(3.0)
    finding = the(found, "needless-unused-search")
    assert finding.severity == "warning"
    assert finding.expected_gain_ms == pytest.approx(7.0)


def test_a_cheap_search_is_mere_information():
    found = summary(ddps=(SEARCHING,), unused=0, search=0.5)
    info, columns = script(ddps=(SEARCHING,), unused=0, search=0.5)
    for values in columns.values():
        is_map = values["kind"] == SpanKind.BOOKKEEPING
        values["end_ns"][is_map] -= 3_000_000
    cheap = summarize_run(info, columns)
    assert said(found) == [("needless-unused-search", "warning")]
    assert said(cheap) == [("needless-unused-search", "info")]


@pytest.mark.parametrize(
    ("ddp", "unused", "notes"),
    [
        (SEARCHING, 1, 0),
        (SEARCHING, None, 1),
        (replace(SEARCHING, static_graph=True), 0, 0),
        (DDP, 0, 0),
        (replace(SEARCHING, built_by="accelerate"), 0, 1),
    ],
)
def test_searching_that_is_needed_unseen_or_a_frameworks(ddp, unused, notes):
    found = summary(ddps=(ddp,), unused=unused, search=4.0)
    assert said(found) == []
    assert len([n for n in found.levels[0].notes if "find_unused_parameters" in n]) == notes


def test_a_map_of_several_backwards_does_not_tell_that_each_uses_all():
    found = summary((False, True), ddps=(SEARCHING,), unused=0, search=4.0)
    assert found.levels[0].reduction.unused is None
    assert said(found) == []


def buffers(ddp, values, sync=6.0, of_rank_1=None, steps=(0, 1, 4)):
    """Points in two warm-up steps, and one before the first step of a plain block."""
    info, columns = script(ddps=(ddp,), sync=sync)
    for rank, own in columns.items():
        spans = Spans()
        of_rank = values if rank == 0 or of_rank_1 is None else of_rank_1
        for step, value in zip(steps, of_rank, strict=False):
            variant = int(Variant.PLAIN if step == 4 else Variant.WARMUP)
            where = {"step": step, "index": 0, "variant": variant}
            spans.add(SpanKind.BUFFER_DIGEST, 90, 90, value=value, **where)
        added = spans.columns()
        columns[rank] = {n: [*own[n].tolist(), *added[n].tolist()] for n in own}
    arrays = {r: {n: np.array(v) for n, v in own.items()} for r, own in columns.items()}
    return summarize_run(info, arrays)


HOLDING = replace(DDP, buffer_bytes=1000)


def test_buffers_that_do_not_change_are_broadcast_for_nothing():
    found = buffers(HOLDING, (9, 9, 9))
    (broadcast,) = found.levels[0].reduction.broadcasts
    assert (broadcast.changed, broadcast.mean_ms) == (False, pytest.approx(6.0))
    assert broadcast.compared_steps == (0, 4)
    finding = the(found, "needless-buffer-broadcast")
    assert finding.severity == "warning"
    assert finding.expected_gain_ms == pytest.approx(6.0)
    assert "they do not change from step 0 to step 4." in finding.message


@pytest.mark.parametrize("values", [(9, 8, 8), (9, 9, 8), (9, 8, 9)])
@pytest.mark.parametrize("rank", [0, 1])
def test_buffers_that_change_at_any_time_on_any_rank_are_no_finding(values, rank):
    same = (9, 9, 9)
    of_ranks = (values, same) if rank == 0 else (same, values)
    found = buffers(HOLDING, of_ranks[0], of_rank_1=of_ranks[1])
    assert [b.changed for b in found.levels[0].reduction.broadcasts] == [True]
    assert said(found) == []


def test_buffers_that_a_rank_changes_back_after_each_broadcast_are_no_finding():
    assert said(buffers(HOLDING, (9, 9, 9), of_rank_1=(8, 8, 8))) == []
    # Groups of some ranks have buffers of their own.
    apart = buffers(replace(HOLDING, group_size=3), (9, 9, 9), of_rank_1=(8, 8, 8))
    assert said(apart) == [("needless-buffer-broadcast", "warning")]


def test_buffers_of_a_rank_that_has_no_points_are_not_known():
    found = buffers(HOLDING, (9, 9, 9), of_rank_1=())
    assert [b.changed for b in found.levels[0].reduction.broadcasts] == [None]
    assert said(found) == []


def test_spans_name_a_model_by_its_number_among_all_that_were_built():
    other = replace(HOLDING, number=3)
    assert said(buffers(other, (9, 9))) == []
    assert said(buffers(replace(HOLDING, number=0), (9, 9))) != []


@pytest.mark.parametrize(
    ("ddp", "values", "sync"),
    [
        (HOLDING, (9, 8), 6.0),
        # One step tells nothing, and without a broadcast it costs nothing.
        (HOLDING, (9,), 6.0),
        (HOLDING, (9, 9), 0.0),
        (replace(HOLDING, broadcast_buffers=False), (9, 9), 6.0),
        (replace(HOLDING, built_by="lightning"), (9, 9), 6.0),
    ],
)
def test_other_buffers_are_no_finding(ddp, values, sync):
    assert said(buffers(ddp, values, sync)) == []


@pytest.mark.parametrize(
    ("inside", "buckets", "built_by", "findings"),
    [
        (True, 3, "__main__", [("compiled-inside-ddp", "warning")]),
        (True, 1, "__main__", []),
        (False, 3, "__main__", []),
        (True, 3, "lightning", []),
    ],
)
def test_a_compiled_module_inside_ddp(inside, buckets, built_by, findings):
    ddp = replace(DDP, compiled_inside=inside, built_by=built_by)
    found = summary(facts={"num_buckets": buckets}, ddps=(ddp,))
    # Handed over at 50 of a backward from 20 to 60.
    assert found.levels[0].reduction.first_hand_over_fraction == pytest.approx(0.75)
    assert said(found) == findings
    if findings:
        finding = the(found, "compiled-inside-ddp")
        assert finding.expected_gain_ms == pytest.approx(12.0)
        assert "at most 12.0 ms" in finding.evidence


def test_a_study_has_nothing_of_this():
    assert summary(ddps=()).levels[0].reduction is None
