"""Gradients reduced in every micro-step: how often, and what it costs, worked out by hand."""

import pytest

from ddp_profiler.analysis.summary import summarize_run
from ddp_profiler.report.console import render
from ddp_profiler.schema import LevelFacts, LevelSettings, Variant
from tests.unit.span_columns import Spans
from tests.unit.test_summary import SOURCES, run_info

ACCUMULATION = 4
MICRO_STEP_MS, BACKWARD_MS = 65.0, 40.0
SLOWER_MS, TRANSFER_MS, COPY_MS, OPTIMIZER_MS = 10.0, 12.0, 3.0, 10.0
"""What a reduction costs: a slower backward, and the window after it."""


def add_step(spans, begin, step, syncs, *, optimizer=OPTIMIZER_MS, **place):
    """A step whose last ``syncs`` micro-steps reduce two buckets each. Returns its end."""
    at = begin
    for micro in range(ACCUMULATION):
        where = {"step": step, "micro_step": micro, **place}
        spans.data(at, at + 5, **where).forward(at + 5, at + 25, **where)
        local_end = at + MICRO_STEP_MS
        end = local_end
        if micro >= ACCUMULATION - syncs:
            local_end += SLOWER_MS
            end = local_end + TRANSFER_MS + COPY_MS
            spans.gradient(at + 45, local_end, **where)
            spans.gradient(local_end, local_end + TRANSFER_MS, **where)
        spans.backward(at + 25, local_end, end, **where)
        at = end
    spans.optimizer(at, at + optimizer, step=step, **place)
    spans.step(begin, at + optimizer, step=step, **place)
    return at + optimizer


def summary(syncs):
    """Two ranks alike; plain steps as long as instrumented ones."""
    spans = Spans()
    at, step = 0.0, 0
    for block, variant in enumerate((Variant.PLAIN, Variant.INSTRUMENTED, Variant.NO_SYNC)):
        for _ in range(2):
            if variant is Variant.PLAIN:
                end = at + step_ms(syncs)
                spans.step(at, end, step=step, variant=int(variant), block=block)
                at = end
            else:
                quiet = variant is Variant.NO_SYNC
                at = add_step(
                    spans, at, step, 0 if quiet else syncs, variant=int(variant), block=block
                )
            step += 1
    info = run_info(
        levels=(LevelSettings("dp2", 2, 8, ACCUMULATION, "packed", (0, 1)),),
        facts=(LevelFacts("dp2", 500, 2000, 2, (1000, 1000), SOURCES),),
    )
    return summarize_run(info, {rank: spans.columns() for rank in range(2)})


def step_ms(syncs):
    return ACCUMULATION * MICRO_STEP_MS + OPTIMIZER_MS + syncs * (SLOWER_MS + TRANSFER_MS + COPY_MS)


@pytest.mark.parametrize("syncs", [1, 2, ACCUMULATION])
def test_the_step_model_explains_the_step(syncs):
    costs = summary(syncs).levels[0].costs_ms
    assert costs.syncs == syncs
    assert costs.backward == pytest.approx(BACKWARD_MS)
    assert costs.sync_backward == pytest.approx(syncs * SLOWER_MS)
    assert costs.step_ms(ACCUMULATION) == pytest.approx(step_ms(syncs))
    assert costs.needless_ms == pytest.approx(step_ms(syncs) - step_ms(1))


def test_costs_per_reduction_grow_with_accumulation_where_each_micro_step_reduces():
    always, once = (summary(syncs).levels[0].costs_ms for syncs in (ACCUMULATION, 1))
    micro = MICRO_STEP_MS + SLOWER_MS + TRANSFER_MS + COPY_MS
    assert always.step_ms(8) == pytest.approx(8 * micro + OPTIMIZER_MS)
    assert once.step_ms(8) - once.step_ms(4) == pytest.approx(4 * MICRO_STEP_MS)


def test_the_finding_says_how_often_and_what_is_wasted():
    found = summary(ACCUMULATION)
    finding = next(f for f in found.findings if f.id == "needless-reductions")
    assert "8 gradient collectives a step for 2 buckets: 4 x" in finding.message
    gain = 3 * (SLOWER_MS + TRANSFER_MS + COPY_MS)
    assert finding.expected_gain_ms == pytest.approx(gain)
    assert finding.expected_gain_pct == pytest.approx(100 * gain / step_ms(ACCUMULATION))
    assert finding.evidence == "6.0 kB and 75.0 ms a step more than needed, 20 % of it"
    assert finding.message[:40] in " ".join(render(found).split())


def test_one_reduction_a_step_is_no_finding():
    assert [f for f in summary(1).findings if f.id == "needless-reductions"] == []
