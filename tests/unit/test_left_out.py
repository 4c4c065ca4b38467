"""Steps of a script that figures leave out, from spans of two ranks made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from ddp_profiler.analysis.left_out import left_out
from ddp_profiler.analysis.summary import summarize_run
from ddp_profiler.report import console
from ddp_profiler.schema import Interruption, SpanKind, Variant
from tests.unit.span_columns import Spans
from tests.unit.test_summary import SOURCES, run_info

PLAIN = {"variant": int(Variant.PLAIN), "block": 1}
INSTRUMENTED = {"block": 2}


def rank(plain, instrumented):
    """Steps from (number, wall in ms, micro-steps, samples, interruptions in ms by kind)."""
    spans = Spans()
    for block, steps in ((PLAIN, plain), (INSTRUMENTED, instrumented)):
        for number, wall, micro_steps, samples, interruptions in steps:
            begin = 1000 * number
            place = {"step": number, **block}
            if block is INSTRUMENTED:
                spans.forward(begin, begin + 20, samples, **place)
                spans.backward(begin + 20, begin + 40, begin + 50, **place)
                spans.gradient(begin + 30, begin + 45, **place)
            for kind, length in interruptions.items():
                spans.add(
                    SpanKind.INTERRUPTION, begin + 50, begin + 50 + length, index=kind, **place
                )
            spans.step(begin, begin + wall, index=micro_steps, samples=samples, **place)
    return spans.columns()


def usual(*numbers, wall=100):
    return [(number, wall, 2, 16, {}) for number in numbers]


def script_info(**changes):
    info = run_info(settings={"model": "train", "script": "train.py"})
    level = replace(info.levels[0], accumulation=2)
    facts = replace(info.facts[0], sources=SOURCES)
    return replace(info, levels=(level,), facts=(facts,), **changes)


def test_nothing_is_left_out_of_steady_steps():
    columns = rank(usual(0, 1), usual(2, 3))
    found = left_out([columns, columns], 0)
    assert (found.keys.tolist(), found.notes) == ([], ())


def test_interrupted_steps_are_left_out_on_all_ranks():
    evaluated = (1, 500, 2, 16, {Interruption.EVALUATION: 300})
    saved = (4, 900, 2, 16, {Interruption.CHECKPOINT: 700})
    waits = [(1, 500, 2, 16, {}), (4, 900, 2, 16, {})]
    # Only rank 0 evaluates and saves; the other waits for it.
    columns = {
        0: rank([*usual(0), evaluated, *usual(2)], [*usual(3), saved, *usual(5)]),
        1: rank([*usual(0), waits[0], *usual(2)], [*usual(3), waits[1], *usual(5)]),
    }
    found = left_out(list(columns.values()), 0)
    assert found.keys.tolist() == [1, 4]
    assert found.notes == (
        "1 of 6 steps hold evaluation (mean 300 ms of a step of 500 ms) and are left out of all "
        "figures: step 1.",
        "1 of 6 steps hold saving (mean 700 ms of a step of 900 ms) and are left out of all "
        "figures: step 4.",
    )
    level = summarize_run(script_info(), columns).levels[0]
    assert (level.step_ms.mean, level.instrumented_step_ms.mean) == (100, 100)
    assert [(r.steps, r.step_ms) for r in level.ranks] == [(2, 100), (2, 100)]
    assert level.breakdown_ms["other"] == pytest.approx(50)
    assert sum(level.breakdown_ms.values()) == pytest.approx(100)
    assert level.notes[:2] == found.notes


def test_what_lies_between_two_calls_of_an_evaluation_belongs_to_it():
    """Batches are fetched there and metrics computed."""
    columns = rank(usual(0, 1), usual(2, 3, 4))
    more = Spans(step=2, block=2)
    for begin in (2050, 2070, 2140):
        more.add(SpanKind.INTERRUPTION, begin, begin + 10, index=Interruption.EVALUATION)
    evaluated = {name: np.concatenate([columns[name], v]) for name, v in more.columns().items()}
    assert left_out([columns, evaluated], 0).notes == (
        "1 of 5 steps hold evaluation (mean 100 ms of a step of 100 ms) "
        "and are left out of all figures: step 2.",
    )


def test_what_lies_between_two_calls_in_most_steps_is_training():
    teacher = Spans(block=2)
    for step in range(2, 5):
        for begin in (1000 * step + 10, 1000 * step + 70):
            teacher.add(SpanKind.INTERRUPTION, begin, begin + 5, step=step, index=0)
    columns = rank(usual(0), usual(2, 3, 4))
    held = {name: np.concatenate([columns[name], v]) for name, v in teacher.columns().items()}
    assert left_out([held], 0).notes[0].startswith("3 of 4 steps hold evaluation")
    assert "(mean 10.0 ms): taken as a part of training" in left_out([held], 0).notes[0]


def test_what_most_steps_hold_is_a_part_of_training():
    teacher = [(n, 100, 2, 16, {Interruption.EVALUATION: 10}) for n in range(4)]
    columns = rank(teacher[:2], [*teacher[2:], *usual(4)])
    found = left_out([columns, columns], 0)
    assert found.keys.tolist() == []
    assert found.notes == (
        "4 of 5 steps hold evaluation (mean 10.0 ms): taken as a part of training, in `other`.",
    )


def test_incomplete_windows_are_named_with_their_batch():
    short = (2, 60, 1, 8, {})
    columns = {
        0: rank([*usual(0, 1), short], usual(3, 4, 5)),
        1: rank([*usual(0, 1), (2, 60, 1, 5, {})], usual(3, 4, 5)),
    }
    found = left_out(list(columns.values()), 0)
    assert found.keys.tolist() == [2]
    assert found.notes == (
        "1 of 6 steps were incomplete and are left out of all figures (step 2: 1 of 2 "
        "micro-steps, 13 samples).",
    )
    level = summarize_run(script_info(), columns).levels[0]
    assert level.step_ms.mean == 100
    assert level.batch_check.observed == 32


def test_last_batch_that_is_smaller_makes_an_incomplete_window():
    columns = rank(usual(0, 1), [*usual(2, 3), (4, 90, 2, 12, {})])
    other = rank(usual(0, 1), [*usual(2, 3), (4, 90, 2, 16, {})])
    found = left_out([columns, other], 0)
    assert found.keys.tolist() == [4]
    assert found.notes[0].endswith("(step 4: 2 of 2 micro-steps, 28 samples).")


def test_where_batches_vary_no_window_is_incomplete():
    steps = [(n, 100, 2, 10 + n, {}) for n in range(6)]
    columns = rank(steps[:3], steps[3:])
    assert left_out([columns, columns], 0).keys.tolist() == []
    level = summarize_run(script_info(), {0: columns, 1: columns}).levels[0]
    assert level.batch_check.observed is None
    assert level.step_ms.mean == 100


def test_many_are_listed_in_short():
    held = [(n, 200, 2, 16, {Interruption.CHECKPOINT: 50}) for n in range(0, 20, 2)]
    columns = rank([*held, *usual(*range(1, 20, 2))], usual(20, 21))
    assert left_out([columns], 0).notes[0].endswith(": steps 0, 2, 4, 6, 8, 10, 12, 14 and 2 more.")
    short = [(n, 50, 1, 8, {}) for n in range(0, 20, 4)]
    columns = rank([*short, *usual(*range(1, 20, 2))], usual(20, 21))
    assert left_out([columns], 0).notes[0].endswith("8 samples; and 1 more).")


def test_steps_of_studies_and_of_warm_up_are_never_left_out():
    columns = rank(usual(0), [(1, 100, -1, None, {Interruption.CHECKPOINT: 5})])
    columns["index"][columns["kind"] == SpanKind.STEP] = -1
    assert left_out([columns], 0).keys.tolist() == []
    spans = Spans(variant=int(Variant.WARMUP))
    spans.add(SpanKind.INTERRUPTION, 10, 20, index=0).step(0, 100, index=1, samples=8)
    assert left_out([spans.columns()], 0).notes == ()
    assert left_out([], 0).notes == ()


def test_a_script_has_no_dp_1_to_miss_and_no_precision():
    columns = rank(usual(0, 1), usual(2, 3))
    info = script_info()
    summary = summarize_run(info, {0: columns, 1: columns})
    assert not any("dp = 1" in note for note in summary.levels[0].notes)
    assert "?, ?, ? threads a rank" in console.render(summary)
    study = summarize_run(replace(info, settings={"model": "train"}), {0: columns, 1: columns})
    assert any("dp = 1" in note for note in study.levels[0].notes)
    assert "?, ?, ?, ? threads a rank" in console.render(study)
