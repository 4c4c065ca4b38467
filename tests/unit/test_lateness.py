"""Fixed and passing lateness, told apart in times made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from ddp_profiler.analysis.lateness import lateness
from ddp_profiler.analysis.parts import derive_steps
from ddp_profiler.analysis.stragglers import Arrivals
from ddp_profiler.schema import Variant

from .span_columns import Spans


def arrivals(local_ends_ms):
    """Ranks whose local backward ends at these times after each step's begin, [rank][step]."""
    ranks = []
    for rank, ends in enumerate(local_ends_ms):
        spans = Spans()
        for step, end in enumerate(ends):
            begin = 1000.0 * step
            spans.step(begin, begin + 500, step=step)
            spans.backward(begin + 10, begin + end, begin + 400, step=step)
            spans.gradient(begin + 20, begin + 390, step=step)
        steps = derive_steps(rank, spans.columns(), 0, Variant.INSTRUMENTED)
        ranks.append(Arrivals(steps, lambda times: times))
    return ranks


def test_a_rank_that_is_always_late_is_fixed():
    found = lateness(arrivals([[100] * 5, [130] * 5, [101] * 5]))
    # Against the lower median rank.
    assert found.fixed_ms == pytest.approx({0: -1.0, 1: 29.0, 2: 0.0})
    assert found.passing_ms == pytest.approx([0.0] * 41)


def test_of_two_the_earlier_one_is_the_typical_one():
    found = lateness(arrivals([[130] * 5, [100] * 5]))
    assert found.fixed_ms == pytest.approx({0: 30.0, 1: 0.0})


def test_what_passes_has_the_spread_that_each_rank_has_by_itself():
    random = np.random.default_rng(0)
    for ranks in (2, 3, 8):
        own = random.normal(0, 4.0, (ranks, 400))
        common = random.normal(0, 20.0, 400)
        found = lateness(arrivals((100 + own + common).tolist()))
        assert max(map(abs, found.fixed_ms.values())) < 2.0
        low, high = np.interp([0.16, 0.84], np.linspace(0, 1, 41), found.passing_ms)
        assert (high - low) / 2 == pytest.approx(4.0, rel=0.12)


def test_one_late_step_in_ten_is_passing():
    late = [100.0] * 9 + [150.0]
    found = lateness(arrivals([[100.0] * 10, late, [100.0] * 10, [100.0] * 10]))
    assert max(map(abs, found.fixed_ms.values())) < 1.0
    assert max(found.passing_ms) > 35


def test_clocks_are_brought_together():
    early, late = arrivals([[100] * 5, [130] * 5])
    shifted = replace(late, common=lambda times: times - 5_000_000)
    assert lateness([early, shifted]).fixed_ms == pytest.approx({0: 0.0, 1: 25.0})


def test_one_rank_or_few_steps_tell_nothing():
    assert lateness(arrivals([[100] * 5])) is None
    assert lateness(arrivals([[100] * 2, [100] * 2])) is None
    assert lateness([]) is None


def test_ranks_of_other_steps_are_not_compared():
    assert lateness(arrivals([[100] * 5, [100] * 4])) is None
