"""The gradient noise scale, on gradients whose noise is known."""

import struct

import numpy as np
import pytest
from scipy import stats

from ddp_profiler.analysis.noise_findings import _message as message
from ddp_profiler.analysis.noise_findings import noise_notes
from ddp_profiler.analysis.noise_scale import estimate, noise_scale
from ddp_profiler.analysis.statistics import ratio_interval
from ddp_profiler.analysis.summary import summarize_run
from ddp_profiler.report import console
from ddp_profiler.schema import DdpFacts, LevelFacts, LevelSettings, SpanKind, Variant
from tests.unit.span_columns import Spans
from tests.unit.test_summary import rank_columns, run_info

LOCAL, REDUCED = SpanKind.LOCAL_GRADIENT_NORM, SpanKind.REDUCED_GRADIENT_NORM


def norms(random, *, scale, ranks, steps, batch=8, size=100):
    """Squared norms of gradients of |G|^2 = 1 whose noise scale is ``scale``, by step."""
    noise = np.sqrt(scale / size / batch) * random.standard_normal((steps, ranks, size))
    gradients = noise + np.full(size, size**-0.5)
    return (gradients**2).sum(-1), (gradients.mean(1) ** 2).sum(-1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("scale", [4, 40, 4000])
def test_interval_covers_the_truth_as_often_as_it_says(ranks, scale):
    random = np.random.default_rng(ranks)
    bounded = held = below = 0
    for _ in range(300):
        local, reduced = norms(random, scale=scale, ranks=ranks, steps=6)
        found = estimate(local.mean(1), reduced, 8, 8 * ranks)
        low, high = found.ci95 or (0, None)
        bounded += high is not None
        held += low <= scale and (high is None or scale <= high)
        below += low < scale
    # 95 % of 300 and three standard deviations of a count.
    assert 273 <= held <= 297 + (scale == 4000) * 3
    # Far below the noise scale it says so, and gives a bound; at it, a number.
    assert bounded == 300 if scale == 4 else bounded < 60 if scale == 4000 else bounded > 30
    assert below > 280


def test_by_hand():
    # Two ranks of 4 samples: |G|^2 = (8 B - 4 b) / 4, trace = (b - B) x 8.
    found = estimate(np.array([10.0, 14.0]), np.array([7.0, 9.0]), 4, 8)
    assert found.gradient_norm_sq == pytest.approx((4 + 4) / 2)
    assert found.noise_trace == pytest.approx((24 + 40) / 2)
    assert found.samples == pytest.approx(8)
    assert found.doubling_gain == pytest.approx(2 * (8 + 8) / (16 + 8))
    # |G|^2 is the same in both steps: the interval is that of the mean trace, t of 1 degree.
    half = stats.t.ppf(0.975, 1) * 8 / 4
    assert found.ci95 == pytest.approx((0, 8 + half))
    assert (found.steps, found.small_batch, found.large_batch) == (2, 4, 8)


def test_means_are_taken_before_the_ratio():
    """The mean of the steps' ratios, 1 and 3 and 100, would be far off."""
    signal, noise = np.array([10.0, 10.0, 0.1]), np.array([10.0, 30.0, 10.0])
    found = estimate(signal + noise / 4, signal + noise / 8, 4, 8)
    assert found.noise_trace / found.gradient_norm_sq == pytest.approx(50 / 20.1)


def test_ranks_with_the_same_samples_have_no_noise():
    norm = np.array([3.0, 4.0, 5.0])
    found = estimate(norm, norm, 8, 16)
    assert (found.samples, found.ci95, found.doubling_gain) == (0, (0, 0), 1)
    assert "is above the gradient noise scale of about 0 samples" in message(found)


def test_noise_alone_gives_a_bound():
    """Ranks whose gradients are at right angles: half the norm is left, and no signal is seen."""
    small = np.array([90.0, 110.0, 100.0, 100.0])
    found = estimate(small, small / 2 + np.array([-1, 1, 1, -1]), 8, 16)
    assert found.samples is None
    assert found.ci95 is not None
    assert found.ci95[1] is None
    assert "cannot be told from 0 in 4 steps" in found.reason
    assert "global batch 16 is below the gradient noise scale, which is at least" in message(found)
    assert found.doubling_gain_ci95[1] == 2


def test_nothing_to_tell():
    nothing = estimate(np.zeros(4), np.zeros(4), 8, 16)
    assert (nothing.samples, nothing.ci95, nothing.reason) == (None, None, "the gradients are 0")
    wild = estimate(np.array([1.0, 9.0]), np.array([2.0, 3.0]), 8, 16)
    assert wild.ci95 is None
    assert noise_notes(wild) == (f"The gradient noise scale is not known: {wild.reason}.",)
    assert estimate(np.ones(1), np.ones(1), 8, 16).reason.startswith("1 step")


@pytest.mark.parametrize("seed", range(6))
def test_interval_of_a_ratio_is_all_that_no_t_test_rejects(seed):
    random = np.random.default_rng(seed)
    top = random.normal(6, 3, size=7)
    bottom = random.normal(1 if seed % 2 else 0.2, 0.6, size=7)
    found = ratio_interval(top, bottom)
    grid = np.linspace(0, 300, 3001)
    p_values = stats.ttest_1samp(top[:, None] - grid * bottom[:, None], 0).pvalue
    kept = grid[p_values >= 0.05].tolist()
    assert found is not None
    assert kept[0] == pytest.approx(found[0], abs=0.1)
    assert kept[-1] == pytest.approx(min(found[1], 300), abs=0.1)


def test_interval_of_a_ratio_is_independent_of_the_gradients_scale():
    top, bottom = np.array([1.0, 2, 4, 3]), np.array([1.0, 1.5, 1.4, 1.2])
    assert ratio_interval(top * 1e-12, bottom * 1e-12) == pytest.approx(ratio_interval(top, bottom))
    assert ratio_interval(top[:1], bottom[:1]) is None


def bits(value):
    return struct.unpack("<q", struct.pack("<d", value))[0]


def add(spans, step, local, reduced, *, at=0, batch=8, ranks=2, **place):
    """Points as a study records them."""
    place = {"variant": int(Variant.NOISE), "step": step, "micro_step": at, **place}
    known = {"small": batch, "large": batch * ranks} if batch else {"small": None, "large": None}
    spans.add(LOCAL, step, step, value=bits(local), samples=known["small"], **place)
    spans.add(REDUCED, step, step, value=bits(reduced), samples=known["large"], **place)
    return spans


LEVEL = LevelSettings("dp2", 2, 8, 1, "packed", (0, 1))
FACTS = LevelFacts("dp2", 10, 40, 1, (40,), {"gradient_collectives": "process_group"})


def of(*ranks, level=LEVEL, facts=FACTS):
    columns = {rank: spans.columns() for rank, spans in enumerate(ranks)}
    return noise_scale(columns, 0, level, facts)


def test_ranks_are_averaged_step_by_step():
    one, two = Spans(), Spans()
    for step, (a, b, both) in enumerate([(10, 12, 8), (14, 10, 9), (11, 11, 7)]):
        add(one, step, a, both)
        add(two, step, b, both)
    expected = estimate(np.array([11.0, 12, 11]), np.array([8.0, 9, 7]), 8, 16)
    assert of(one, two) == expected
    assert expected.steps == 3


def test_steps_that_cannot_be_used_are_left_out():
    one, two = Spans(), Spans()
    for step in range(3):
        add(one, step, 10 + step, 8)
        add(two, step, 12, 8)
    whole = of(one, two)
    # Overflow; reduced twice; on one rank only; with a smaller last batch.
    for step, local in ((3, float("inf")), (4, float("nan"))):
        add(one, step, local, 8)
        add(two, step, 12, float("inf"))
    for at in (0, 1):
        add(one, 5, 99, 8, at=at)
        add(two, 5, 99, 8, at=at)
    add(one, 6, 99, 8)
    add(one, 7, 99, 8, batch=4)
    add(two, 7, 99, 8, batch=4)
    add(one, 8, 99, 8, batch=4)
    add(two, 8, 99, 8)
    assert of(one, two) == whole


def test_a_scripts_batch_is_that_of_its_steps():
    level = LevelSettings("script", 2, 4, 3, "packed", (0, 1))
    ranks = []
    for _ in range(2):
        spans = Spans(variant=int(Variant.WARMUP))
        for step in range(3):
            place = {"batch": None, "at": 2, "index": 0, "variant": int(Variant.WARMUP)}
            add(spans, step, 10 + step, 7, **place)
            spans.step(step, step + 1, step=step, samples=12, index=3)
        ranks.append(spans)
    found = of(*ranks, level=level)
    assert (found.small_batch, found.large_batch, found.steps) == (12, 24, 3)
    for spans in ranks:
        for row in spans.rows:
            row["samples"] = None
    assert "known number of samples" in of(*ranks, level=level).reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"level": LevelSettings("dp1", 1, 8, 1, "packed", (0,))}, "dp is 1"),
        ({"facts": None}, "the record holds no norms"),
        (
            {"facts": LevelFacts("dp2", 1, 4, 1, (4,), {"gradient_collectives": "user_hook"})},
            "a communication hook",
        ),
    ],
)
def test_reasons_without_norms(change, reason):
    found = of(Spans().step(0, 1), Spans().step(0, 1), **change)
    assert found.ci95 is None
    assert found.reason.startswith(reason)
    assert noise_notes(found) == ()


def test_reasons_of_scripts():
    spans = add(add(Spans(), 0, 9, 8, index=0), 1, 9, 8, index=1)
    assert "several DDPs" in of(spans, spans).reason
    ddp = DdpFacts(False, False, True, 0, False, group_size=1, built_by="__main__")
    facts = LevelFacts("script", 1, 4, 1, (4,), {}, ddps=(ddp,))
    spans = add(Spans(), 0, 9, 8)
    assert "some of the ranks" in of(spans, spans, facts=facts).reason
    twice = add(add(Spans(), 0, 9, 8), 0, 9, 8, at=1)
    assert "several reductions" in of(twice, twice).reason


def shown(pairs):
    """The summary of a study of two ranks with these norms, and its table."""
    columns = []
    for local_end in (70, 60):
        spans = Spans()
        for step, (local, reduced) in enumerate(pairs):
            add(spans, step, local, reduced)
        known = rank_columns(local_end)
        columns.append({name: np.append(known[name], v) for name, v in spans.columns().items()})
    summary = summarize_run(run_info(), dict(enumerate(columns)))
    return summary, console.render(summary)


def lines(text, start):
    return [line.split()[len(start.split()) :] for line in text.splitlines() if start in line]


def test_table_and_finding():
    summary, text = shown([(100, 52), (101, 51), (99, 51.5), (100, 51.5)])
    found = summary.levels[0].noise_scale
    assert found.samples == pytest.approx(48.5 * 16 / 3)
    low, high = found.ci95
    assert low < found.samples < high
    assert lines(text, "noise scale (samples)") == [["260"]]
    (finding,) = (f for f in summary.findings if f.id == "noise-scale")
    assert finding.severity == "info"
    assert finding.message.startswith(
        "dp2: global batch 16 is below the gradient noise scale of about 260 samples ["
    )
    assert "pays" in finding.message
    assert "is worth 1.89 of these" in finding.message
    assert "4 steps" in finding.evidence


def test_table_with_a_bound_only():
    _, text = shown([(100, 52), (101, 48), (99, 51.5), (100, 48.5)])
    ((sign, bound),) = lines(text, "noise scale (samples)")
    assert sign == ">="
    assert float(bound) > 16
    assert "which is at least" in text


def test_table_without_norms_says_nothing():
    summary, text = shown([])
    assert "noise scale" not in text
    assert summary.levels[0].noise_scale.reason == "the record holds no norms of gradients"


@pytest.mark.parametrize(
    ("small", "large", "place"),
    [((100, 101), (98, 99), "above"), ((100, 101, 103), (67, 66, 69), "about at")],
)
def test_words_for_the_place(small, large, place):
    found = estimate(np.array(small, float), np.array(large, float), 8, 16)
    assert f"global batch 16 is {place} the gradient noise scale" in message(found)
