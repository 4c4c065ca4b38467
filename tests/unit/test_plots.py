"""The pictures: what they draw is what the summary says, and nothing where it says nothing."""

import math
import warnings
from dataclasses import fields, replace

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from ddp_profiler.analysis.allreduce import AllReduceResult, AllReduceSize
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.results import (
    BatchCheck,
    Communication,
    Distribution,
    LevelResult,
    RunResult,
    Summary,
)
from ddp_profiler.record import paths
from ddp_profiler.report import plots

BREAKDOWN = dict(zip(PARTS, (1.5, 20.0, 0.5, 40.0, 0.0, 3.0, 5.0, 2.0, 7.0, 1.0), strict=True))

TERMS = {
    "bare": 60.0,
    "wrapper": 2.0,
    "slower_compute": -1.5,
    "contention": 0.25,
    "forward_comm": 0.5,
    "backward_comm": 0.0,
    "exposed_copy": 0.75,
    "data": -0.125,
    "optimizer": 0.125,
    "other": 0.0,
    "exposed_transfer": 9.0,
    "exposed_wait": 6.0,
    "residual": -1.0,
    "measured": 76.0,
}


def distribution(mean: float) -> Distribution:
    return Distribution(mean, mean * 0.99, mean * 0.9, mean * 1.2, (mean * 0.95, mean * 1.05))


def make_level(dp: int = 2, micro_batch: int = 8, accumulation: int = 1, **changes) -> LevelResult:
    batch = dp * micro_batch * accumulation
    values = {
        **dict.fromkeys(field.name for field in fields(LevelResult)),
        "id": f"dp{dp}",
        "dp": dp,
        "nodes": 1,
        "placement": "packed",
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "global_batch": batch,
        "steps": 20,
        "repetitions": 1,
        "warmup_steps": 5,
        "step_ms": distribution(79.0),
        "instrumented_step_ms": distribution(80.0),
        "breakdown_ms": BREAKDOWN,
        "comm": Communication(18.0, 10.8, 0.6, 25_000_000, 4, 4.0, 0, {}),
        "batch_check": BatchCheck(
            **{
                **dict.fromkeys(f.name for f in fields(BatchCheck)),
                "configured": batch,
                "notes": (),
            }
        ),
        "gradient_ready": (),
        "ranks": (),
        "notes": (),
        **changes,
    }
    return LevelResult(**values)


def empty_level(**changes) -> LevelResult:
    """A level of a run that was cut short before its first step."""
    return make_level(
        step_ms=None,
        instrumented_step_ms=None,
        breakdown_ms=dict.fromkeys(PARTS),
        comm=Communication(None, None, None, None, None, None, 0, {}),
        **changes,
    )


def make_summary(*levels: LevelResult) -> Summary:
    run = RunResult("run-1", "complete", "", "0.1.0", 2, 1, False, {}, {}, "steps")
    return Summary(1, run, levels, (), ())


def scaled(dp: int, efficiency: float, single: float = 100.0, **changes) -> LevelResult:
    speedup = efficiency * dp
    return make_level(
        dp=dp,
        samples_per_s=single * speedup,
        speedup=speedup,
        efficiency=efficiency,
        **changes,
    )


def reduced(nbytes: int, ms: float, dp: int) -> AllReduceSize:
    algbw = nbytes / ms / 1e6
    return AllReduceSize(nbytes, 20, ms, ms * 0.8, ms * 2, algbw, algbw * 2 * (dp - 1) / dp)


def reductions(dp: int) -> AllReduceResult:
    sizes = tuple(reduced(4096 * 4**i, dp * (0.5 + 4**i / 500), dp) for i in range(8))
    return AllReduceResult(sizes, (reduced(1_000_000, 1.5 * dp, dp), reduced(9_000_000, 9, dp)), 9)


def split(dp: int, accumulation: int, step_ms: float, **changes) -> LevelResult:
    return make_level(
        dp=dp,
        micro_batch=32 // dp // accumulation,
        accumulation=accumulation,
        id=f"dp{dp}-mb{32 // dp // accumulation}-acc{accumulation}",
        step_ms=distribution(step_ms),
        **changes,
    )


def many(count: int) -> Summary:
    """A summary that has everything, at many levels with long ids."""
    return make_summary(
        *(
            scaled(
                dp,
                0.97**i,
                id=f"dp{dp}-mb{128 // dp}-acc{accumulation}",
                micro_batch=max(1, 128 // dp // accumulation),
                accumulation=accumulation,
                waterfall_ms=TERMS,
                allreduce=reductions(dp) if dp > 1 else None,
                step_ms=distribution(70.0 + accumulation),
            )
            for i, (dp, accumulation) in enumerate(
                [(2**d, 2**a) for d in range(-(-count // 2)) for a in range(2)][:count]
            )
        )
    )


def everything() -> Summary:
    return make_summary(
        *(
            replace(
                split(dp, accumulation, 50.0 * accumulation),
                samples_per_s=100.0 * dp * 0.9,
                speedup=dp * 0.9,
                efficiency=0.9,
                waterfall_ms=TERMS,
                allreduce=reductions(dp) if dp > 1 else None,
            )
            for dp in (1, 2, 4)
            for accumulation in (1, 2, 4)
        )
    )


def nameless() -> Summary:
    """Names that a renderer could take for markup."""
    hostile = (
        r"$\frac{1}$_x^2",
        "a_b_c$",
        "dp" + 60 * "x",
        r"\alpha %s {}",
        "\x1b[31m\n\t点",
        "  ",
    )
    return make_summary(
        *(
            replace(level, id=name)
            for level, name in zip(everything().levels, hostile, strict=False)
        )
    )


def lines(axes, label):
    return [line for line in axes.lines if line.get_label() == label]


def points(line):
    return [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text().strip()]


def rectangles(axes, label):
    container = next(c for c in axes.containers if c.get_label() == label)
    return [bar for bar in container if isinstance(bar, Rectangle)]


# What is drawn


def test_step_parts():
    short = {**BREAKDOWN, "exposed_wait": None, "exposed_transfer": None}
    summary = make_summary(make_level(id="dp2"), make_level(id="dp4", dp=4, breakdown_ms=short))
    axes = plots.step_parts(summary).axes[0]
    assert [c.get_label() for c in axes.containers] == [
        part.replace("_", " ") for part in PARTS if part != "backward_comm"
    ]
    top = [0.0, 0.0]
    for part in PARTS:
        if part == "backward_comm":
            continue
        expected = [BREAKDOWN[part], short[part]]
        bars = rectangles(axes, part.replace("_", " "))
        assert [bar.get_height() for bar in bars] == [h for h in expected if h is not None]
        for column, bar in enumerate(bars):
            assert bar.get_y() == pytest.approx(top[column])
            top[column] += bar.get_height()
    assert texts(axes).count("80.0") >= 2


def test_scaling():
    levels = [scaled(1, 1.0), scaled(2, 0.9), scaled(4, 0.75), make_level(dp=8)]
    left, right = plots.scaling(make_summary(*levels)).axes
    name = "micro-batch 8, accumulation 1, packed"
    assert points(lines(left, name)[0]) == [(1, 100), (2, 180), (4, 300)]
    assert lines(left, "ideal")[0].get_ydata() == pytest.approx([100, 200, 400])
    assert points(lines(right, name)[0]) == [(1, 100), (2, 90), (4, 75)]
    assert {"100.0", "180.0", "300.0", "75.0 %", "ideal"} <= set(texts(left.figure))


def test_scaling_has_a_line_for_each_accumulation():
    levels = [
        scaled(dp, 1 - dp / 20, accumulation=k, id=f"dp{dp}-acc{k}")
        for dp in (4, 1, 2)
        for k in (1, 2)
    ]
    figure = plots.scaling(make_summary(*levels))
    for name in ("accumulation 1", "accumulation 2"):
        assert [x for x, _ in points(lines(figure.axes[0], name)[0])] == [1, 2, 4]
        assert name in texts(figure)


@pytest.mark.parametrize("fixed", ["micro_batch", "accumulation"])
def test_strong_scaling_is_one_line_for_what_stays(fixed):
    levels = [
        scaled(
            dp,
            0.9,
            micro_batch=4 if fixed == "micro_batch" else 32 // dp,
            accumulation=8 // dp if fixed == "micro_batch" else 1,
        )
        for dp in (1, 2, 4)
    ]
    left = plots.scaling(make_summary(*levels)).axes[0]
    assert [len(line.get_xdata()) for line in left.lines if line.get_label() != "ideal"] == [3]


def test_waterfall():
    levels = [
        make_level(dp=2, waterfall_ms=dict.fromkeys(TERMS, 1.0)),
        make_level(dp=4, id="dp4", waterfall_ms=TERMS),
        make_level(dp=8, waterfall_ms=None),
    ]
    figure = plots.waterfall(make_summary(*levels))
    (axes,) = figure.axes
    drawn = {c.get_label(): c[0] for c in axes.containers}
    assert {name: bar.get_height() for name, bar in drawn.items()} == TERMS
    reached = 0.0
    for name, value in TERMS.items():
        begin = 0.0 if name in ("bare", "measured") else reached
        assert drawn[name].get_y() == pytest.approx(begin), name
        reached = begin + value
    assert {"60.0", "+2.00", "-1.50", "0.00", "+9.00", "-1.00", "76.0"} <= set(texts(figure))
    assert "From the bare model to dp4: 60.0 ms become 76.0 ms" in texts(figure)[-1]
    assert "most by exposed transfer (+9.00 ms)" in texts(figure)[-1]


def test_waterfall_shows_where_its_axis_is_cut():
    (cut,) = plots.waterfall(make_summary(make_level(waterfall_ms=TERMS))).axes
    assert cut.get_ylim()[0] > 0
    assert "axis begins at" in cut.get_ylabel()
    assert len(lines(cut, "gap")) == 2
    grown = {**TERMS, "exposed_wait": 200.0, "measured": 270.0}
    (whole,) = plots.waterfall(make_summary(make_level(waterfall_ms=grown))).axes
    assert whole.get_ylim()[0] == 0
    assert whole.get_ylabel() == "ms a step"
    assert not lines(whole, "gap")


def test_waterfall_names_what_is_not_known():
    terms = {**TERMS, "exposed_wait": None, "residual": 5.0}
    figure = plots.waterfall(make_summary(make_level(waterfall_ms=terms)))
    assert "exposed_wait" not in [c.get_label() for c in figure.axes[0].containers]
    assert "not\nknown" in texts(figure)


def test_allreduce():
    levels = [
        make_level(dp=1),
        make_level(dp=4, id="dp4", allreduce=reductions(4)),
        make_level(dp=2, id="dp2", allreduce=reductions(2)),
        make_level(dp=2, id="again", allreduce=reductions(8)),
    ]
    figure = plots.allreduce(make_summary(*levels))
    (axes,) = figure.axes
    for dp in (2, 4):
        result = reductions(dp)
        (line,) = lines(axes, f"dp {dp}")
        assert points(line) == [(s.bytes, s.busbw_gb_per_s) for s in result.sizes]
        (buckets,) = lines(axes, f"dp {dp} buckets")
        assert points(buckets) == [(b.bytes, b.busbw_gb_per_s) for b in result.buckets]
        (band,) = [c for c in axes.collections if c.get_label() == f"dp {dp}"]
        drawn = {tuple(v) for v in band.get_paths()[0].vertices.round(9).tolist()}
        for size in result.sizes:
            for time in (size.p10_ms, size.p90_ms):
                busbw = size.bytes / (time / 1e3) / 1e9 * 2 * (dp - 1) / dp
                assert (float(size.bytes), round(busbw, 9)) in drawn
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks == [f"{v} KiB" for v in (4, 16, 64, 256)] + [f"{v} MiB" for v in (1, 4, 16, 64)]
    assert "the first is shown" in axes.get_xlabel()


def test_allreduce_of_buckets_alone():
    result = replace(reductions(2), sizes=())
    figure = plots.allreduce(make_summary(make_level(allreduce=result)))
    assert len(points(lines(figure.axes[0], "dp 2 buckets")[0])) == 2
    assert not lines(figure.axes[0], "dp 2")


def test_batch_split():
    levels = [
        split(1, 4, 120.0),
        split(1, 1, 50.0),
        split(1, 2, 70.0),
        split(2, 1, 40.0),
        split(2, 2, 64.0),
        split(4, 1, 30.0),
        empty_level(dp=4, micro_batch=4, accumulation=2),
    ]
    figure = plots.batch_split(make_summary(*levels))
    (axes,) = figure.axes
    assert points(lines(axes, "dp 1")[0]) == [(1, 50 / 32), (2, 70 / 32), (4, 120 / 32)]
    assert points(lines(axes, "dp 2")[0]) == [(1, 40 / 32), (2, 64 / 32)]
    assert not lines(axes, "dp 4")
    (bars,) = [c for c in axes.collections if c.get_label() == "dp 2"]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [
        pytest.approx([40 * 0.9 / 32, 40 * 1.2 / 32]),
        pytest.approx([64 * 0.9 / 32, 64 * 1.2 / 32]),
    ]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1\n32\n16", "2\n16\n8", "4\n8\n"]
    assert "32x1 at dp 1, 16x1 at dp 2" in texts(figure)[-1]


# Where there is nothing to draw

NOTHING = {
    "no levels": make_summary(),
    "no steps": make_summary(empty_level(), empty_level(dp=4)),
}


@pytest.mark.parametrize("summary", NOTHING.values(), ids=NOTHING)
def test_nothing_is_drawn_of_nothing(summary, tmp_path):
    for draw in (
        plots.step_parts,
        plots.scaling,
        plots.waterfall,
        plots.allreduce,
        plots.batch_split,
    ):
        assert draw(summary) is None
    assert plots.save_all(summary, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_single_level_has_its_parts_alone(tmp_path):
    saved = plots.save_all(make_summary(scaled(1, 1.0)), tmp_path)
    assert [path.name for path in saved] == ["step_parts.png"]


def test_figures_that_are_not_numbers_are_left_out():
    nan = math.nan
    size = replace(reduced(4096, 1.0, 2), busbw_gb_per_s=nan)
    level = make_level(
        step_ms=distribution(nan),
        breakdown_ms=dict.fromkeys(PARTS, nan),
        samples_per_s=nan,
        speedup=nan,
        efficiency=nan,
        waterfall_ms=dict.fromkeys(TERMS, nan),
        allreduce=AllReduceResult((size,), (), None),
    )
    summary = make_summary(level, replace(level, accumulation=2, micro_batch=4))
    assert plots.step_parts(summary).axes[0].containers == []
    for draw in (plots.scaling, plots.waterfall, plots.allreduce, plots.batch_split):
        assert draw(summary) is None


# Saving


def test_save_all(tmp_path):
    settings = dict(mpl.rcParams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = plots.save_all(everything(), tmp_path)
    names = ("step_parts", "scaling", "waterfall", "allreduce", "batch_split")
    assert saved == [paths.plots_folder(tmp_path) / f"{name}.png" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in saved)
    assert dict(mpl.rcParams) == settings


def test_saving_again_overwrites(tmp_path):
    first = plots.save_all(make_summary(make_level()), tmp_path)
    assert plots.save_all(make_summary(make_level()), tmp_path) == first


# How it looks

SUMMARIES = {
    "everything": everything(),
    "5 levels": many(5),
    "12 levels": many(12),
    "hostile names": nameless(),
    "one level": make_summary(scaled(2, 0.9, waterfall_ms=TERMS, allreduce=reductions(2))),
    "not all known": make_summary(
        empty_level(id="dp1", dp=1),
        make_level(
            id="dp2",
            breakdown_ms={**BREAKDOWN, "exposed_wait": None},
            waterfall_ms={**TERMS, "exposed_wait": None},
        ),
    ),
}
DRAW = ("step_parts", "scaling", "waterfall", "allreduce", "batch_split")


@pytest.fixture(
    scope="module",
    params=[
        (summary, name)
        for summary in SUMMARIES
        for name in DRAW
        if getattr(plots, name)(SUMMARIES[summary]) is not None
    ],
    ids="-".join,
)
def figure(request):
    """A figure that was drawn without a warning, and the texts that appear in it."""
    summary, name = request.param
    drawn = []

    def draw(text, renderer, *args, **kwargs):
        if text.get_text().strip():
            drawn.append(text)
        return original(text, renderer, *args, **kwargs)

    original = Text.draw
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        result = getattr(plots, name)(SUMMARIES[summary])
        patch.setattr(Text, "draw", draw)
        FigureCanvasAgg(result).draw()
    renderer = result.canvas.get_renderer()
    result.shown = [(t.get_text(), Text.get_window_extent(t, renderer)) for t in drawn]
    return result


def test_no_text_leaves_the_picture(figure):
    width, height = figure.canvas.get_width_height()
    assert figure.shown
    for text, box in figure.shown:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
        assert inside, (text, box, width, height)


def test_no_text_covers_another(figure):
    for i, (text, box) in enumerate(figure.shown):
        for other, place in figure.shown[i + 1 :]:
            across = min(box.x1, place.x1) - max(box.x0, place.x0)
            along = min(box.y1, place.y1) - max(box.y0, place.y0)
            assert min(across, along) < 2, (text, other)


def test_axes_names_have_units(figure):
    for axes in figure.axes:
        assert any(unit in axes.get_ylabel() for unit in ("ms", "GB/s", "samples/s", "%"))


def test_names_are_shown_literally():
    shown = "".join(texts(plots.step_parts(nameless()))).replace("\n", "")
    for name in (r"$\frac{1}$_x^2", "a_b_c$", 60 * "x", r"\alpha%s{}", r"\x1b[31m\n\t\u70b9"):
        assert name in shown.replace(" ", "") or name in shown
    for name in DRAW:
        drawn = getattr(plots, name)(nameless())
        assert not any(t.get_parse_math() for t in drawn.findobj(Text) if "$" in t.get_text())


def test_lines_differ_without_colour():
    figure = plots.scaling(many(12))
    seen = [
        (line.get_marker(), line.get_linestyle())
        for line in figure.axes[0].lines
        if line.get_label() != "ideal"
    ]
    assert len(set(seen)) == len(seen)
    parts = plots.step_parts(everything()).axes[0]
    looks = [(c[0].get_hatch() or "", c[0].get_facecolor()) for c in parts.containers]
    greys = [(hatch, round(0.3 * r + 0.59 * g + 0.11 * b, 1)) for hatch, (r, g, b, _) in looks]
    assert len(set(greys)) == len(greys)
