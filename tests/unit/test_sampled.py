"""Windows over a long training: which steps they have, and who was late in which."""

import pytest

from ddp_profiler.analysis.summary import summarize_run
from ddp_profiler.report import console
from ddp_profiler.schema import Variant
from tests.unit.span_columns import Spans

from .test_left_out import script_info

LENGTH = 100


def rank(number, starts, late=None, interrupted=()):
    """Windows of 6 plain and 6 instrumented steps; ``late``: (window's first step, rank, ms)."""
    spans = Spans()
    for window, start in enumerate(starts):
        for i in range(12):
            step = start + i
            begin = 1000 * step
            variant = Variant.PLAIN if i < 6 else Variant.INSTRUMENTED
            place = {"step": step, "variant": int(variant), "block": 2 * window + i // 6}
            lag = next((ms for at, who, ms in late or () if at == start and who == number), 0)
            longest = max([ms for at, _, ms in late or () if at == start], default=0)
            if variant is Variant.INSTRUMENTED:
                spans.forward(begin, begin + 20 + lag, 8, **place)
                spans.backward(begin + 20 + lag, begin + 60 + lag, begin + 70 + longest, **place)
                spans.gradient(begin + 40 + lag, begin + 68 + longest, **place)
            spans.step(begin, begin + LENGTH + longest, index=1, samples=8, **place)
    return spans.columns()


def level_of(starts, late=None):
    info = script_info()
    columns = {r: rank(r, starts, late) for r in range(2)}
    summary = summarize_run(info, columns)
    return summary, summary.levels[0]


def test_one_window_is_no_list():
    summary, level = level_of([5])
    assert level.windows == ()
    assert "windows" not in console.render(summary)


def test_windows_and_who_was_late_in_which():
    summary, level = level_of([5, 105, 205, 305], late=[(105, 1, 30), (305, 0, 50)])
    assert [(w.first_step, w.last_step, w.steps) for w in level.windows] == [
        (start, start + 11, 6) for start in (5, 105, 205, 305)
    ]
    assert [w.step_ms for w in level.windows] == [100, 130, 100, 150]
    late = [[(s.rank, s.lag_ms, s.cause, s.fixed) for s in w.stragglers] for w in level.windows]
    assert late == [[], [(1, 30, "forward", True)], [], [(0, 50, "forward", True)]]
    # All windows together make the figures.
    assert (level.steps, level.step_ms.mean) == (24, 120)
    text = console.render(summary)
    lines = [line.rstrip() for line in text.splitlines() if line.startswith("steps ")]
    assert lines == [
        "steps 5 to 16            100  -",
        "steps 105 to 116         130  rank 1 by 30.0 in 100 % of steps (forward)",
        "steps 205 to 216         100  -",
        "steps 305 to 316         150  rank 0 by 50.0 in 100 % of steps (forward)",
    ]
    assert max(map(len, text.splitlines())) <= 80


def test_who_is_late_in_few_windows_is_found_all_the_same():
    starts = list(range(5, 3005, 100))
    summary, level = level_of(starts, late=[(105, 1, 30)])
    # Over all steps it is less than is worth a name.
    assert level.stragglers == ()
    (found,) = [f for f in summary.findings if f.id == "passing-straggler"]
    assert found.severity == "warning"
    assert "rank 1 is late in 1 of 30 windows, by up to 30.0 ms, in forward" in found.message
    assert "begin at step 105;" in found.evidence
    text = console.render(summary)
    assert "slowest 12 of 30 windows of dp2" in text
    assert text.count("\nsteps ") == 12
    assert "steps 105 to 116 " in text


def test_a_window_that_was_cut_short_is_one():
    columns = {r: rank(r, [5, 105]) for r in range(2)}
    kept = columns[1]["step"] < 108
    columns[1] = {name: values[kept] for name, values in columns[1].items()}
    level = summarize_run(script_info(), columns).levels[0]
    assert [(w.first_step, w.steps) for w in level.windows] == [(5, 6), (105, 3)]


def test_where_a_rank_is_missing_nobody_is_named():
    summary = summarize_run(script_info(), {0: rank(0, [5, 105], [(105, 0, 30)])})
    assert [w.stragglers for w in summary.levels[0].windows] == [(), ()]


@pytest.mark.parametrize("index", [-1])
def test_levels_of_studies_have_none(index):
    columns = rank(0, [5, 105])
    columns["index"][columns["kind"] == 0] = index
    assert summarize_run(script_info(), {0: columns, 1: columns}).levels[0].windows == ()
