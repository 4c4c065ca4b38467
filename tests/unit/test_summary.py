"""A run's summary, from spans of two ranks made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.summary import summarize_run
from ddp_profiler.report import console
from ddp_profiler.schema import (
    SCHEMA_VERSION,
    ClockReading,
    CopyRate,
    DevicePeaks,
    Failure,
    LevelFacts,
    LevelSettings,
    OperationCount,
    OperationGroup,
    RankPlace,
    RecordPart,
    RunInfo,
    SpanKind,
    Variant,
)
from tests.unit.span_columns import Spans

SOURCES = {"gradient_collectives": "process_group", "local_backward_end": "autograd_callback"}


def run_info(**changes) -> RunInfo:
    values = {
        "schema_version": SCHEMA_VERSION,
        "run_id": "run-1",
        "status": "complete",
        "created": "2026-01-01T12:00:00+00:00",
        "profiler_version": "0.1.0",
        "world_size": 2,
        "settings": {"model": "mlp"},
        "levels": (LevelSettings("dp2", 2, 8, 1, "packed", (0, 1)),),
        "ranks": tuple(RankPlace(r, r, 0, "host", "boot", "cpu", 17) for r in range(2)),
        "facts": (LevelFacts("dp2", 500, 2000, 2, (1000, 1000), SOURCES),),
        **changes,
    }
    return RunInfo(**values)


def add_instrumented(spans, begin, step, local_end, samples=8, **place):
    """A step of 100: the ranks differ in their local end, gradients end at 80."""
    return (
        spans.data(begin, begin + 5, step=step, **place)
        .forward(begin + 5, begin + 25, samples, step=step, **place)
        .backward(begin + 25, begin + local_end, begin + 85, step=step, **place)
        .gradient(begin + 40, begin + 60, step=step, **place)
        .gradient(begin + local_end, begin + 80, step=step, **place)
        .optimizer(begin + 85, begin + 95, step=step, **place)
        .step(begin, begin + 100, step=step, **place)
    )


def rank_columns(local_end, samples=8, plain_ms=90.0, steps=3):
    spans = Spans()
    plain = {"variant": int(Variant.PLAIN), "block": 1}
    for i in range(steps):
        spans.step(1000 * i, 1000 * i + plain_ms, step=i, **plain)
        add_instrumented(spans, 10_000 + 100 * i, steps + i, local_end, samples, block=2)
    return spans.columns()


@pytest.fixture
def columns():
    """Rank 1 ends its local backward 10 ms after rank 0."""
    return {0: rank_columns(65), 1: rank_columns(75)}


def level_of(columns, **changes):
    return summarize_run(run_info(**changes), columns).levels[0]


def test_steps_under_torch_profiler_are_in_no_figure(columns):
    def traced(local_end):
        spans = Spans(variant=int(Variant.KINETO), block=1_000_000)
        for step in range(4):
            add_instrumented(spans, 10**9 + 700 * step, step, local_end, 99)
            spans.bookkeeping(10**9 + 700 * step, 10**9 + 700 * step + 600, step=step)
        return spans.columns()

    with_them = {
        rank: {name: np.concatenate((part, traced(60 + rank)[name])) for name, part in own.items()}
        for rank, own in columns.items()
    }
    # On clocks that drift, a later moment would be known less well.
    apart = tuple(RankPlace(r, 0, r, f"host{r}", f"boot{r}", "cpu", 17) for r in range(2))
    readings = tuple(ClockReading(1, at * 10**9, -(10**6), 10**6, 0) for at in (5, 11))
    for changes in ({}, {"ranks": apart, "clocks": readings}):
        info = run_info(**changes)
        assert summarize_run(info, with_them) == summarize_run(info, columns)


def test_breakdown_is_the_mean_over_ranks_and_sums_to_the_instrumented_mean(columns):
    level = level_of(columns)
    assert level.breakdown_ms == pytest.approx(
        {
            "data": 5,
            "forward": 20,
            "forward_comm": 0,
            "backward": (40 + 50) / 2,
            "backward_comm": 0,
            "exposed_wait": (10 + 0) / 2,
            "exposed_transfer": 5,
            "exposed_copy": 5,
            "optimizer": 10,
            "other": 5,
        }
    )
    assert tuple(level.breakdown_ms) == PARTS
    assert sum(level.breakdown_ms.values()) == pytest.approx(level.instrumented_step_ms.mean)
    assert level.instrumented_step_ms.mean == pytest.approx(100)


def test_parts_have_intervals_of_their_means():
    """Rank 0 alone: local backward ends after 63, 65 and 67 ms, so backward takes 38 to 42."""

    def rank(ends):
        spans = Spans()
        for i, end in enumerate(ends):
            add_instrumented(spans, 10_000 + 100 * i, i, end, 8, block=0)
        return spans.columns()

    level = level_of({0: rank((63, 65, 67)), 1: rank((63, 65, 67))})
    found = level.breakdown_ci95_ms
    assert set(found) == set(level.breakdown_ms)
    low, high = found["backward"]
    assert low < level.breakdown_ms["backward"] < high
    assert (low + high) / 2 == pytest.approx(40)
    assert found["forward"] == pytest.approx((20, 20))


def test_ranks_are_kept_apart(columns):
    ranks = level_of(columns).ranks
    assert [(r.rank, r.steps, r.hostname) for r in ranks] == [(0, 3, "host"), (1, 3, "host")]
    assert [r.breakdown_ms["exposed_wait"] for r in ranks] == pytest.approx([10, 0])
    assert [sum(r.breakdown_ms.values()) for r in ranks] == pytest.approx(
        [r.step_ms for r in ranks]
    )


def test_headline_is_the_plain_step(columns):
    level = level_of(columns, settings={"model": "gpt", "tokens_per_sample": 64})
    assert level.step_ms.median == pytest.approx(90)
    assert level.samples_per_s == pytest.approx(16 / 0.090)
    assert level.tokens_per_s == pytest.approx(64 * 16 / 0.090)
    assert level.steps == 3
    assert level_of(columns).tokens_per_s is None


def test_plain_step_is_the_mean_over_ranks():
    level = level_of({0: rank_columns(65, plain_ms=80), 1: rank_columns(65, plain_ms=90)})
    assert level.step_ms.mean == pytest.approx(85)


def test_roofline_and_hardware(columns):
    device = DevicePeaks(
        0, "cpu", "cpu", "fp32", flops_per_s=1e9, copies=(CopyRate(1000, 1e9),), operation_s=1e-6
    )
    counted = OperationCount(8, (OperationGroup(2, 1000, 6 * 10**7),))
    facts = LevelFacts(
        "dp2", 500, 2000, 2, (1000, 1000), SOURCES, operations=counted, device=device
    )
    summary = summarize_run(run_info(facts=(facts,)), columns)
    assert summary.run.hardware.ridge_flops_per_byte == pytest.approx(1)
    found = summary.levels[0].roofline
    # A step of 100: 5 of data, 5 of waiting and 5 of transfer.
    assert found.input_fraction == pytest.approx(0.05)
    assert found.communication_fraction == pytest.approx(0.10)
    assert (found.bound, found.roof_fraction) == ("compute", pytest.approx(60 / 85))
    assert found.achieved_flops_per_s == pytest.approx(6e7 / 0.090)
    # Records of earlier versions have neither.
    summary = summarize_run(run_info(), columns)
    assert (summary.run.hardware, summary.levels[0].roofline) == (None, None)


def test_communication(columns):
    comm = level_of(columns).comm
    # Rank 0: 40..60 and 65..80, hidden up to 65. Rank 1: 40..60 and 75..80, up to 75.
    assert comm.busy_ms == pytest.approx((35 + 25) / 2)
    assert comm.overlapped_ms == pytest.approx(20)
    assert comm.overlap_fraction == pytest.approx(20 / 30)
    assert comm.gradient_bytes == 2000
    assert (comm.num_buckets, comm.num_gradient_collectives_per_step) == (2, 2)
    assert comm.unnoticed_completions == 0
    assert comm.sources == SOURCES


def test_alone_there_is_no_communication_but_collectives_are_counted():
    info = run_info(
        world_size=1,
        levels=(LevelSettings("dp1", 1, 8, 1, "packed", (0,)),),
        facts=(LevelFacts("dp1", 500, 2000, 2, (1000, 1000), SOURCES),),
    )
    level = summarize_run(info, {0: rank_columns(65)}).levels[0]
    assert (level.comm.busy_ms, level.comm.overlap_fraction) == (None, None)
    assert level.comm.num_gradient_collectives_per_step == 2
    assert level.breakdown_ms["exposed_copy"] == pytest.approx(20)
    assert level.breakdown_ms["exposed_wait"] == level.breakdown_ms["exposed_transfer"] == 0


def test_no_mechanism_no_figures(columns):
    facts = LevelFacts("dp2", 500, 2000, 2, None, {"gradient_collectives": None})
    comm = level_of(columns, facts=(facts,)).comm
    assert (comm.busy_ms, comm.gradient_bytes, comm.num_gradient_collectives_per_step) == (
        None,
        None,
        None,
    )


def test_batch_as_configured(columns):
    check = level_of(columns).batch_check
    assert (check.configured, check.observed, check.ok, check.notes) == (16, 16, True, ())


def test_batch_other_than_configured():
    check = level_of({0: rank_columns(65, samples=8), 1: rank_columns(75, samples=7)}).batch_check
    assert (check.configured, check.observed, check.ok) == (16, 15, False)
    assert check.notes == ("Observed 15 samples a step, configured 8 x 1 x 2 = 16.",)


def test_samples_that_cannot_be_seen_give_no_batch_and_no_throughput():
    """As of a script that calls ddp.module: 0 in the record, null in all that follows from it."""
    spans = {0: rank_columns(65, samples=0), 1: rank_columns(75, samples=0)}
    settings = (LevelSettings("script", 2, 0, 1, "packed", (0, 1)),)
    facts = (LevelFacts("script", 500, 2000, 2, (1000, 1000), SOURCES),)
    level = level_of(spans, levels=settings, facts=facts, settings={"script": "train.py"})
    assert (level.micro_batch, level.global_batch, level.samples_per_s) == (None, None, None)
    assert level.step_ms is not None
    check = level.batch_check
    assert (check.configured, check.observed, check.ok) == (None, None, None)
    assert check.notes[:1] == ("Samples were not seen: the batch and samples/s are not known.",)


def test_levels_of_unknown_batches_are_not_compared():
    levels = (
        LevelSettings("dp1", 1, 0, 1, "packed", (0,)),
        LevelSettings("dp2", 2, 0, 1, "packed", (0, 1)),
    )
    two = {rank: rank_columns(65, samples=0) for rank in range(2)}
    spans = {rank: {**c, "level": c["level"] + 1} for rank, c in two.items()}
    spans[0] = {name: np.concatenate([two[0][name], spans[0][name]]) for name in two[0]}
    found = summarize_run(run_info(levels=levels, facts=()), spans)
    assert found.levels[1].step_ms is not None
    for level in found.levels:
        assert (level.reference, level.efficiency, level.contention_ms) == (None, None, None)
    assert not [f for f in found.findings if f.id == "accumulation-cost"]


@pytest.mark.parametrize(("settings", "own"), [({"script": None}, None), ({"model": "mlp"}, 1.0)])
def test_a_script_on_one_rank_has_nothing_to_be_compared_with(settings, own):
    levels = (LevelSettings("script", 1, 8, 1, "packed", (0,)),)
    info = run_info(world_size=1, levels=levels, facts=(), settings=settings)
    summary = summarize_run(info, {0: rank_columns(65)})
    level = summary.levels[0]
    assert (level.speedup, level.efficiency) == (own, own)
    assert (level.reference is None) == (own is None)
    assert ("speedup" in console.render(summary)) == (own is not None)


def test_a_rank_whose_samples_are_not_seen_leaves_the_batch_unknown():
    check = level_of({0: rank_columns(65, samples=8), 1: rank_columns(75, samples=0)}).batch_check
    assert (check.observed, check.ok) == (None, None)


def test_forward_calls_other_than_configured(columns):
    levels = (LevelSettings("dp2", 2, 4, 2, "packed", (0, 1)),)
    check = level_of(columns, levels=levels).batch_check
    # The product agrees, the way there does not.
    assert check.ok is True
    assert check.notes == ("1 forward calls a step and rank, not 2.",)


def test_batch_that_differs_between_steps_is_not_observed():
    spans = Spans()
    for step, samples in enumerate((8, 8, 4)):
        add_instrumented(spans, 100 * step, step, 65, samples)
    check = level_of({0: spans.columns(), 1: spans.columns()}).batch_check
    assert (check.observed, check.ok) == (None, None)
    assert len(check.notes) == 1


def test_samples_per_s_counts_what_was_observed():
    level = level_of({0: rank_columns(65, samples=6), 1: rank_columns(75, samples=6)})
    assert level.samples_per_s == pytest.approx(12 / 0.090)


@pytest.mark.parametrize(("plain_ms", "sign"), [(90.0, 1), (110.0, -1)])
def test_overhead_has_the_sign_of_the_difference(plain_ms, sign):
    columns = {r: rank_columns(65, plain_ms=plain_ms) for r in range(2)}
    overhead = level_of(columns).overhead
    assert (overhead.plain_ms, overhead.instrumented_ms) == pytest.approx((plain_ms, 100))
    assert overhead.overhead_pct == pytest.approx((100 / plain_ms - 1) * 100)
    assert np.sign(overhead.overhead_pct) == sign
    # One pair of blocks says nothing about how pairs differ.
    assert overhead.ci95_pct is None


def test_overhead_compares_neighbouring_blocks():
    """The machine slows down twofold between the pairs; the overhead stays 10 %."""
    spans = Spans()
    plain = int(Variant.PLAIN)
    for block, (variant, length) in enumerate(
        [(plain, 100), (1, 110), (1, 220), (plain, 200)], start=1
    ):
        for i in range(3):
            begin = 10_000 * block + 1000 * i
            spans.step(begin, begin + length, step=10 * block + i, block=block, variant=variant)
    overhead = level_of({0: spans.columns(), 1: spans.columns()}).overhead
    assert overhead.overhead_pct == pytest.approx(10)
    assert overhead.ci95_pct == pytest.approx((10, 10))


def test_warmup_is_counted_and_left_out(columns):
    spans = Spans(variant=int(Variant.WARMUP), block=0)
    spans.step(0, 500).step(500, 900, step=1)
    warm = spans.columns()
    columns = {
        rank: {name: np.concatenate([warm[name], values[name]]) for name in values}
        for rank, values in columns.items()
    }
    level = level_of(columns)
    assert (level.warmup_steps, level.warmup_ms) == (2, pytest.approx(900))
    assert level.instrumented_step_ms.mean == pytest.approx(100)


def test_clocks_that_cannot_be_compared(columns):
    ranks = tuple(RankPlace(r, 0, r, f"host{r}", f"boot{r}", "cpu", 17) for r in range(2))
    level = level_of(columns, ranks=ranks)
    assert level.nodes == 2
    assert level.breakdown_ms["exposed_wait"] is None
    # Both together, with nothing lost: 15 on rank 0, 5 on rank 1.
    assert level.breakdown_ms["exposed_transfer"] == pytest.approx(10)
    assert sum(v for v in level.breakdown_ms.values() if v is not None) == pytest.approx(100)
    assert any("exposed_wait and stragglers are withheld" in note for note in level.notes)


def test_whole_run_is_not_partial(columns):
    summary = summarize_run(run_info(), columns)
    assert not summary.run.partial
    assert summary.notes == ()
    assert summary.schema_version == SCHEMA_VERSION


def test_rank_without_record_makes_it_partial(columns):
    del columns[1]
    summary = summarize_run(run_info(), columns)
    assert summary.run.partial
    assert summary.notes == ("The record of rank 1 is missing.",)
    level = summary.levels[0]
    assert level.batch_check.ok is None
    assert [rank.rank for rank in level.ranks] == [0]
    assert level.samples_per_s == pytest.approx(16 / 0.090)


def test_missing_rank_is_said_with_the_place_where_its_node_kept_it(columns):
    info = run_info(
        world_size=4,
        parts=(
            RecordPart(0, "node0", "/a/run", (0,)),
            RecordPart(1, "node1", "/b/run", (1, 2)),
        ),
    )
    assert summarize_run(info, {1: columns[1]}).notes == (
        "The record of rank 0 is missing here; it was written on node0 in /a/run. "
        "Join both with ddp-profiler merge.",
        "The record of rank 2 is missing here; it was written on node1 in /b/run. "
        "Join both with ddp-profiler merge.",
        "The record of rank 3 is missing.",
    )


def test_figures_of_some_ranks_are_said_to_be_that(columns):
    whole = level_of(columns)
    assert not any("means over" in note for note in whole.notes)
    level = level_of({1: columns[1]})
    assert "means over rank 1 of this level's 2" in " ".join(level.notes)
    assert "withheld: the record of a rank is missing" in " ".join(level.notes)
    assert level.pop is None


def test_allreduce_needs_all_ranks(columns):
    """Rank 0 comes 30 late: rank 1 alone would call its waiting a slow network."""
    place = {"variant": int(Variant.ALLREDUCE), "block": 9, "bytes": 1000, "micro_step": -1}
    for rank, length in enumerate((10, 40)):
        spans = Spans(**place).add(SpanKind.ALLREDUCE, 90_000, 90_000 + length, index=0).columns()
        columns[rank] = {k: np.concatenate([columns[rank][k], spans[k]]) for k in spans}
    assert level_of(columns).allreduce.sizes[0].time_ms == pytest.approx(10)
    assert level_of({1: columns[1]}).allreduce is None


def test_level_whose_ranks_all_have_their_record_elsewhere(columns):
    levels = (LevelSettings("dp1", 1, 8, 1, "packed", (0,)), *run_info().levels)
    moved = {**columns[1], "level": columns[1]["level"] + 1}
    summary = summarize_run(run_info(levels=levels), {1: moved})
    first, second = summary.levels
    assert first.step_ms is None
    assert first.notes == ("No step of this level is recorded here: it ran on rank 0.",)
    assert second.step_ms is not None
    assert any("The dp = 1 level has no steps here" in note for note in second.notes)


def test_many_missing_ranks_are_not_all_named():
    info = run_info(world_size=100)
    (note,) = summarize_run(info, {0: rank_columns(65)}).notes
    assert note == "The record of ranks 1-99 is missing."


def test_failures_are_told(columns):
    info = run_info(status="failed", failures=(Failure(1, "level dp2", "ValueError: x"),))
    summary = summarize_run(info, columns, incomplete=[1])
    assert summary.run.partial
    assert summary.notes == (
        "Rank 1 failed in level dp2: ValueError: x",
        "The record of rank 1 was cut: the run did not end.",
    )


def test_level_that_was_not_reached(columns):
    levels = (*run_info().levels, LevelSettings("dp2-acc4", 2, 8, 4, "packed", (0, 1)))
    empty = summarize_run(run_info(status="running", levels=levels), columns).levels[1]
    assert (empty.steps, empty.step_ms, empty.instrumented_step_ms) == (0, None, None)
    assert set(empty.breakdown_ms.values()) == {None}
    assert (empty.samples_per_s, empty.overhead, empty.ranks) == (None, None, ())
    assert not any("withheld" in note for note in empty.notes)


def test_parts_sum_also_where_a_rank_was_cut(columns):
    longer = Spans()
    add_instrumented(longer, 0, 0, 65)
    # A second step that took twice as long, and of which rank 1 has no record.
    longer.data(100, 250, step=1).step(100, 300, step=1)
    shorter = Spans()
    add_instrumented(shorter, 0, 0, 65)
    level = level_of({0: longer.columns(), 1: shorter.columns()})
    assert sum(level.breakdown_ms.values()) == pytest.approx(level.instrumented_step_ms.mean)


@pytest.mark.parametrize(
    ("cores", "threads", "competes"), [(2, 1, False), (4, 2, False), (2, 2, True), (1, 1, True)]
)
def test_ranks_that_compete_for_cores(columns, cores, threads, competes):
    node = {
        "cores": cores,
        "threads_per_rank": threads,
        "local_world_size": 2,
        "device_type": "cpu",
    }
    notes = summarize_run(run_info(environment={"0": node}), columns).notes
    assert any("compete for cores" in note for note in notes) is competes
    on_gpu = run_info(environment={"0": {**node, "device_type": "cuda"}})
    assert summarize_run(on_gpu, columns).notes == ()


def test_each_level_has_its_own_steps(columns):
    levels = tuple(LevelSettings(f"dp2-acc{k}", 2, 8, k, "packed", (0, 1)) for k in (1, 2))
    second = {r: {**c, "level": c["level"] + 1} for r, c in columns.items()}
    both = {
        r: {n: np.concatenate([columns[r][n], second[r][n]]) for n in c} for r, c in second.items()
    }
    info = replace(run_info(), levels=levels, facts=())
    first, other = summarize_run(info, both).levels
    assert first.steps == other.steps == 3
    assert (first.batch_check.ok, other.batch_check.ok) == (True, False)
