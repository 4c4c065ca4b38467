"""Pictures of a summary, as matplotlib figures; right in grey and for the colour-blind.

Every function takes a summary and returns a figure, or None where the summary holds
nothing for it. Figures belong to no window and change no setting of matplotlib.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ddp_profiler import units
from ddp_profiler.analysis.allreduce import AllReduceResult, AllReduceSize
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.placement import largest, scaling_curve
from ddp_profiler.analysis.results import LevelResult, Summary
from ddp_profiler.record import paths

__all__ = ["allreduce", "batch_split", "save_all", "scaling", "step_parts", "waterfall"]

_DPI = 130
_FAR_ABOVE = 3.0
"""A bound that is further above the curves than this would press them flat."""

# Okabe-Ito colours; neighbours differ in lightness or hatch, so that grey tells them too.
_PART_STYLES: dict[str, tuple[str, str]] = {
    "data": ("#F0E442", ""),
    "forward": ("#56B4E9", ""),
    "forward_comm": ("#FFFFFF", "//"),
    "backward": ("#0072B2", ""),
    "backward_comm": ("#FFFFFF", "xx"),
    "exposed_wait": ("#E69F00", "\\\\"),
    "exposed_transfer": ("#D55E00", "///"),
    "exposed_copy": ("#CC79A7", "...."),
    "optimizer": ("#009E73", "||"),
    "other": ("#FFFFFF", ""),
}

# Marker and dashes tell lines in grey; their counts share no factor, so pairs repeat late.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":")

_TOTAL, _LONGER, _SHORTER, _RESIDUAL = (
    ("#333333", ""),
    ("#D55E00", ""),
    ("#A6D4F2", "//"),
    ("#FFFFFF", "xx"),
)


def step_parts(summary: Summary) -> Figure | None:
    """Draws the parts of the instrumented step of each level as stacked bars, in ms.

    Parts that are below a thousandth of the longest step at every level are left out.
    """
    steps = [(lv, lv.instrumented_step_ms.mean) for lv in summary.levels if lv.instrumented_step_ms]
    if not steps:
        return None
    names = [_column_name(level.id) for level, _ in steps]
    lines = max(name.count("\n") for name in names) + 1
    figure = _figure(max(5.6, 2.6 + 0.8 * len(steps)), 4.4 + 0.15 * lines)
    axes = figure.add_subplot()
    longest = max(mean for _, mean in steps)
    bottom = [0.0] * len(steps)
    for part in PARTS:
        heights = [_known(level.breakdown_ms.get(part)) for level, _ in steps]
        drawn = [(i, h) for i, h in enumerate(heights) if h is not None and h > 0]
        if max((h for _, h in drawn), default=0.0) < longest * 0.001:
            continue
        color, hatch = _PART_STYLES[part]
        axes.bar(
            [i for i, _ in drawn],
            [h for _, h in drawn],
            bottom=[bottom[i] for i, _ in drawn],
            width=0.62,
            label=part.replace("_", " "),
            color=color,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.5,
        )
        for i, height in drawn:
            bottom[i] += height
    for i, (_, mean) in enumerate(steps):
        _note(axes, units.ms(mean), (i, max(mean, bottom[i])), (0, 3), ha="center", va="bottom")
    axes.set_xticks(range(len(steps)), names, parse_math=False)
    axes.set_xlim(-0.6, len(steps) - 0.4)
    axes.set_ylabel("ms a step, mean over ranks")
    axes.set_ylim(0, max(*bottom, longest) * 1.1 or 1.0)
    _thin_hatches(axes.patches)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9
        )
    _title(figure, _parts_title([level for level, _ in steps]))
    return figure


def _parts_title(levels: Sequence[LevelResult]) -> str:
    level = largest(levels) or levels[0]
    parts = {p: v for p in PARTS if (v := _known(level.breakdown_ms.get(p))) is not None}
    if not parts or level.instrumented_step_ms is None:
        return "Where the step time goes"
    most = max(parts, key=lambda part: parts[part])
    return (
        f"Where the step time goes: at {level.id} most in {most.replace('_', ' ')} "
        f"({units.ms(parts[most])} of {units.ms(level.instrumented_step_ms.mean)} ms)"
    )


class _Scaled(NamedTuple):
    """What the scaling picture needs of a level; ``ideal`` is dp x the throughput at dp = 1."""

    level: LevelResult
    samples_per_s: float
    ideal: float
    efficiency: float


def scaling(summary: Summary) -> Figure | None:
    """Draws throughput in samples/s against the ideal line, and efficiency, over dp.

    Levels that differ in dp alone make a line: those of equal micro-batch and accumulation
    (weak scaling), or of equal global batch and micro-batch or accumulation (strong). Levels
    packed on few nodes and levels spread over many are never on one line.
    Levels without an efficiency are left out. None where no level beyond dp = 1 has one.
    """
    points = {
        level.id: _Scaled(level, rate, rate / share, share)
        for level in summary.levels
        if (rate := _known(level.samples_per_s)) and (share := _known(level.efficiency))
    }
    if not any(point.level.dp > 1 for point in points.values()):
        return None
    groups = lines_over_dp([point.level for point in points.values()])
    figure = _figure(9.6 if len(groups) == 1 else 11.0, max(4.2, 1.6 + 0.2 * len(groups)))
    left, right = figure.subplots(1, 2)
    reached, ends = [], []
    for number, (name, levels) in enumerate(groups.items()):
        line = [points[level.id] for level in levels]
        dps = [point.level.dp for point in line]
        left.plot(
            dps,
            [point.ideal for point in line],
            color="0.55",
            linestyle=(0, (1, 1.5)),
            linewidth=1.2,
            marker="_",
            zorder=1,
            label="ideal",
        )
        left.plot(dps, [p.samples_per_s for p in line], **_line_style(number), label=name)
        right.plot(dps, [p.efficiency * 100 for p in line], **_line_style(number), label=name)
        text = units.percent(line[-1].efficiency)
        if len(groups) > 1:
            text = f"{text}  {name}"
            reached.append((dps[-1], line[-1].samples_per_s, name))
        ends.append((dps[-1], line[-1].efficiency * 100, text))
        if len(groups) == 1:
            for point in line:
                _note(
                    left,
                    units.rate(point.samples_per_s),
                    (point.level.dp, point.samples_per_s),
                    (6, -5),
                    ha="left",
                    va="top",
                )
    every_dp = sorted({point.level.dp for point in points.values()})
    for axes in (left, right):
        _log2_ticks(axes, every_dp, [str(dp) for dp in every_dp], room=0.09)
        axes.set_xlabel("dp (data-parallel replicas)")
        axes.grid(axis="y", color="0.9", linewidth=0.6)
    left.set_ylabel("throughput, samples/s (log scale)")
    rates = [v for p in points.values() for v in (p.samples_per_s, p.ideal)]
    left.set_yscale("log")
    left.set_ylim(min(rates) / 1.4, max(rates) * 1.3)
    left.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    left.yaxis.set_minor_locator(NullLocator())
    last = max(points.values(), key=lambda point: (point.level.dp, point.ideal))
    _note(left, "ideal", (last.level.dp, last.ideal), (-8, 3), ha="right", va="bottom")
    right.axhline(100, color="0.55", linestyle=(0, (1, 1.5)), linewidth=1.2, zorder=1)
    right.set_ylabel("efficiency, % of ideal")
    right.set_ylim(0, max(110.0, max(p.efficiency for p in points.values()) * 108))
    _label_ends(left, reached)
    _label_ends(right, ends)
    _title(figure, _scaling_title(list(points.values())))
    return figure


def _scaling_title(points: Sequence[_Scaled]) -> str:
    dp = max(point.level.dp for point in points)
    curve = [level.id for level in scaling_curve([point.level for point in points])]
    last = [point for point in points if point.level.dp == dp and point.level.id in curve]
    low, high = (f(last, key=lambda p: p.efficiency) for f in (min, max))
    if low is high:
        return (
            f"At dp {dp}, throughput is {units.rate(low.samples_per_s)} samples/s: "
            f"{units.percent(low.efficiency)} of the ideal {units.rate(low.ideal)}"
        )
    return (
        f"At dp {dp}, throughput is {units.percent(low.efficiency)} to "
        f"{units.percent(high.efficiency)} of ideal"
    )


def lines_over_dp(levels: Sequence[LevelResult]) -> dict[str, list[LevelResult]]:
    """Groups levels to lines by the settings that stay, in the way that gives the fewest lines.

    Lines are named by the settings in which they differ.
    """

    def weak(level: LevelResult) -> tuple[str, ...]:
        return f"micro-batch {level.micro_batch}", f"accumulation {level.accumulation}"

    def strong(level: LevelResult) -> tuple[str, ...]:
        return f"global batch {level.global_batch}", f"micro-batch {level.micro_batch}"

    def split(level: LevelResult) -> tuple[str, ...]:
        return f"global batch {level.global_batch}", f"accumulation {level.accumulation}"

    candidates = []
    for rule in (weak, strong, split):
        groups: dict[tuple[str, ...], list[LevelResult]] = {}
        for level in sorted(levels, key=lambda lv: lv.dp):
            groups.setdefault((*rule(level), _literal(level.placement)), []).append(level)
        candidates.append(groups)
    fewest = min(candidates, key=len)
    shared = set.intersection(*(set(key) for key in fewest)) if len(fewest) > 1 else set()
    return {
        ", ".join(word for word in key if word not in shared): members
        for key, members in fewest.items()
    }


def waterfall(summary: Summary) -> Figure | None:
    """Draws the way from the bare model's step to the measured one, in ms, at the largest dp.

    Each term is a bar that begins where the last one ended. Where the terms are small beside
    the step, the axis begins above 0 and the bars of the totals show a gap. A term that is
    not known is named, and no bar is drawn. Of several levels at the largest dp, the first
    packed one.
    """
    complete = [
        level
        for level in summary.levels
        if level.waterfall_ms
        and _known(level.waterfall_ms.get("bare")) is not None
        and _known(level.waterfall_ms.get("measured")) is not None
    ]
    level = largest(complete)
    if level is None or level.waterfall_ms is None:
        return None
    terms = level.waterfall_ms
    figure = _figure(max(6.0, 0.9 + 0.66 * len(terms)), 4.6)
    axes = figure.add_subplot()
    reached, last = 0.0, None
    edges = [0.0]
    for i, (name, maybe) in enumerate(terms.items()):
        value = _known(maybe)
        total = name in ("bare", "measured")
        if value is None:
            _note(axes, "not\nknown", (i, reached), (0, 4), ha="center", va="bottom")
            continue
        start = 0.0 if total else reached
        color, hatch = _term_style(name, value)
        axes.bar(
            i,
            value,
            bottom=start,
            width=0.66,
            color=color,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.8,
            label=name,
        )
        if last is not None:
            axes.plot([last + 0.33, i - 0.33], [reached, reached], color="0.4", linewidth=0.7)
        last, reached = i, start + value
        edges.append(reached)
        down = value < 0
        _note(
            axes,
            units.ms(value) if total else _signed(value),
            (i, reached if down or total else max(start, reached)),
            (0, -3 if down else 3),
            ha="center",
            va="top" if down else "bottom",
        )
    low, high = min(edges[1:]), max(edges)
    cut = low > 0.6 * high
    room = (high - low if cut else high - min(edges)) or high or 1.0
    floor = low - 0.45 * room if cut and low - 0.45 * room > 0 else min(0.0, low - 0.1 * room)
    axes.set_ylim(floor, high + 0.1 * room)
    axes.set_ylabel("ms a step")
    if floor > 0:
        axes.set_ylabel(f"ms a step (axis begins at {units.ms(floor)})")
        for i, name in enumerate(terms):
            if name in ("bare", "measured"):
                _gap(axes, i)
    axes.set_xticks(
        range(len(terms)),
        [name.replace("_", "\n") for name in terms],
        fontsize=8.5,
        parse_math=False,
    )
    axes.set_xlim(-0.6, len(terms) - 0.4)
    axes.tick_params(axis="x", length=0)
    _thin_hatches(axes.patches)
    _title(figure, _waterfall_title(level, terms))
    return figure


def _waterfall_title(level: LevelResult, terms: Mapping[str, float | None]) -> str:
    text = (
        f"From the bare model to {level.id}: {units.ms(terms['bare'])} ms become "
        f"{units.ms(terms['measured'])} ms"
    )
    added = {
        name: value
        for name, maybe in terms.items()
        if name not in ("bare", "measured") and (value := _known(maybe) or 0.0) > 0
    }
    if not added:
        return text
    most = max(added, key=lambda name: added[name])
    name = "what no term explains" if most == "residual" else most.replace("_", " ")
    return f"{text}, most by {name} ({_signed(added[most])} ms)"


def _term_style(name: str, value: float) -> tuple[str, str]:
    if name in ("bare", "measured"):
        return _TOTAL
    if name == "residual":
        return _RESIDUAL
    return _SHORTER if value < 0 else _LONGER


def _short(value: float) -> str:
    """Returns a number with three significant digits, or two where it is small."""
    return units.ms(value) if value >= 0.1 else units.significant(value)


def _signed(value: float) -> str:
    text = units.ms(value)
    if text.strip("-0.") == "":
        return text.lstrip("-")
    return text if value < 0 else f"+{text}"


def _gap(axes: Axes, x: float) -> None:
    """Draws the gap of a bar whose foot is cut off."""
    axes.plot(
        [x - 0.4, x + 0.4],
        [0.05, 0.09],
        transform=axes.get_xaxis_transform(),
        color="white",
        linewidth=5,
        solid_capstyle="butt",
        label="gap",
    )


def allreduce(summary: Summary) -> Figure | None:
    """Draws the bus bandwidth of AllReduce in isolation over message size, a line per dp.

    The band holds the 10th to 90th percentile of the times, as bandwidths. Large hollow
    markers are the model's buckets, horizontal lines the rates of the links, which bound a
    ring; one that is far above all that was reached is named only. Of several levels of
    equal dp and placement, which repeat the same measurement, the first is drawn.
    """
    groups: dict[tuple[int, str], tuple[LevelResult, AllReduceResult]] = {}
    repeated = False
    for level in sorted(summary.levels, key=lambda lv: lv.dp):
        result = level.allreduce
        if result is None or not _usable((*result.sizes, *result.buckets)):
            continue
        repeated |= (level.dp, level.placement) in groups
        groups.setdefault((level.dp, level.placement), (level, result))
    if not groups:
        return None
    figure = _figure(8.0, max(4.4, 1.6 + 0.2 * len(groups)))
    axes = figure.add_subplot()
    several = len({placement for _, placement in groups}) > 1
    ends, best, every_size, tallest = [], [], set(), 0.0
    banded = bucketed = False
    for number, ((dp, placement), (_, result)) in enumerate(groups.items()):
        name = f"dp {dp}" + (f" {_literal(placement)}" if several else "")
        style = _line_style(number)
        sizes, buckets = _usable(result.sizes), _usable(result.buckets)
        widths = [size.busbw_gb_per_s for size in sizes]
        if sizes:
            axes.plot([size.bytes for size in sizes], widths, **style, label=name, clip_on=False)
            tallest = max(tallest, *widths)
            band = [(size.bytes, *between) for size in sizes if (between := _busbw_band(size))]
            if len(band) > 1:
                nbytes, low, high = zip(*band, strict=True)
                axes.fill_between(
                    nbytes,
                    low,
                    high,
                    color=style["color"],
                    alpha=0.15 if len(groups) <= 3 else 0.08,
                    linewidth=0,
                    label=name,
                )
                tallest = max(tallest, *high)
                banded = True
        if buckets:
            axes.plot(
                [bucket.bytes for bucket in buckets],
                [bucket.busbw_gb_per_s for bucket in buckets],
                linestyle="none",
                marker=style["marker"],
                markersize=11,
                markerfacecolor="none",
                markeredgecolor=style["color"],
                markeredgewidth=1.8,
                zorder=4,
                label=f"{name} buckets",
            )
            tallest = max(tallest, *(bucket.busbw_gb_per_s for bucket in buckets))
            bucketed = True
        every_size |= {size.bytes for size in sizes or buckets}
        last = max(sizes or buckets, key=lambda size: size.bytes)
        ends.append((last.bytes, last.busbw_gb_per_s, name))
        fastest = max(size.busbw_gb_per_s for size in sizes or buckets)
        best.append(f"{_short(fastest)} GB/s at {name}")
    ticks = sorted(every_size)
    _log2_ticks(axes, ticks, [_binary(size) for size in ticks], room=0.1)
    axes.set_xlabel(
        "message size" + ("; of several levels at a dp, the first is shown" if repeated else "")
    )
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.set_ylim(0, tallest * 1.08)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    bounds = _draw_bounds(axes, [result for _, result in groups.values()], tallest)
    _label_ends(axes, ends)
    _allreduce_key(axes, banded=banded, bucketed=bucketed, bounds=bounds)
    shown = best if len(best) <= 3 else [best[0], best[-1]]
    _title(figure, f"AllReduce in isolation reaches {', '.join(shown)}")
    return figure


def _usable(sizes: Iterable[AllReduceSize]) -> list[AllReduceSize]:
    return [size for size in sizes if _known(size.busbw_gb_per_s) is not None and size.bytes > 0]


def _busbw_band(size: AllReduceSize) -> tuple[float, float] | None:
    """Returns the bus bandwidths in GB/s at the 90th and at the 10th percentile of the time."""
    if not (_known(size.p10_ms) and _known(size.p90_ms)):
        return None
    amount = size.busbw_gb_per_s * size.time_ms
    return amount / size.p90_ms, amount / size.p10_ms


def _draw_bounds(axes: Axes, results: Sequence[AllReduceResult], tallest: float) -> list[Line2D]:
    """Draws the links' rates in GB/s, in the lines' order, and returns their keys."""
    keys, known = [], set()
    for number, result in enumerate(results):
        link = result.link
        if link is None or _known(link.gbit_per_s) is None or link.name in known:
            continue
        known.add(link.name)
        rate = link.gbit_per_s / 8
        name = f"ring bound, {_literal(link.name)}: {_short(rate)} GB/s"
        color = _line_style(number)["color"]
        if rate > _FAR_ABOVE * tallest:
            keys.append(Line2D([], [], linestyle="none", label=f"{name} (above)"))
            continue
        axes.axhline(rate, color=color, linestyle=(0, (1, 1.5)), linewidth=1.4, label=name)
        axes.set_ylim(0, max(axes.get_ylim()[1], rate * 1.08))
        keys.append(Line2D([], [], color=color, linestyle=(0, (1, 1.5)), label=name))
    return keys


def _allreduce_key(axes: Axes, *, banded: bool, bucketed: bool, bounds: Sequence[Line2D]) -> None:
    keys: list[Line2D | Patch] = list(bounds)
    if bucketed:
        keys.append(
            Line2D(
                [],
                [],
                linestyle="none",
                marker="o",
                markersize=10,
                markerfacecolor="none",
                markeredgecolor="black",
                markeredgewidth=1.8,
                label="the model's buckets (large, hollow)",
            )
        )
    if banded:
        keys.append(Patch(color="0.5", alpha=0.3, linewidth=0, label="10th to 90th percentile"))
    if keys:
        axes.figure.legend(
            handles=keys, loc="outside lower center", ncols=2, frameon=False, fontsize=9
        )


def _binary(nbytes: int) -> str:
    """Returns a message size in binary units, as the sweep's powers of two are."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def batch_split(summary: Summary) -> Figure | None:
    """Draws what a sample costs, in ms, when one global batch is split into more micro-steps.

    A line joins the levels of equal dp, placement and global batch that differ in
    accumulation; the cost is the mean plain step over the global batch, the bars are the
    10th and 90th percentile of the steps. None where no global batch was split in two ways.
    """
    groups: dict[tuple[int, int, str], list[LevelResult]] = {}
    for level in sorted(summary.levels, key=lambda lv: (lv.dp, lv.accumulation)):
        if level.step_ms is not None and _known(level.step_ms.mean) and level.global_batch:
            key = (level.dp, level.global_batch, level.placement)
            groups.setdefault(key, []).append(level)
    groups = {k: v for k, v in groups.items() if len({lv.accumulation for lv in v}) > 1}
    if not groups:
        return None
    names = _split_names(list(groups))
    figure = _figure(7.6, max(4.2, 1.6 + 0.2 * len(groups)) + 0.15 * len(groups))
    axes = figure.add_subplot()
    ends, cheapest, highest = [], [], 0.0
    for number, ((dp, batch, _), levels) in enumerate(groups.items()):
        steps = [(lv, lv.step_ms) for lv in levels if lv.step_ms is not None]
        costs = [step.mean / batch for _, step in steps]
        low = [step.p10 / batch for _, step in steps]
        high = [step.p90 / batch for _, step in steps]
        name = names[dp, batch, levels[0].placement]
        at, style = [lv.accumulation for lv, _ in steps], _line_style(number)
        axes.plot(at, costs, **style, label=name)
        axes.vlines(at, low, high, color=style["color"], linewidth=1.2, label=name)
        highest = max(highest, *costs, *high)
        ends.append((at[-1], costs[-1], f"{name}: {_short(costs[-1])} ms"))
        best = min(levels, key=lambda lv: lv.step_ms.mean if lv.step_ms else math.inf)
        cheapest.append(f"{best.micro_batch}x{best.accumulation} at {name}")
    every = sorted({lv.accumulation for levels in groups.values() for lv in levels})
    rows = [{lv.accumulation: str(lv.micro_batch) for lv in levels} for levels in groups.values()]
    labels = ["\n".join([str(k), *(row.get(k, "") for row in rows)]) for k in every]
    _log2_ticks(axes, every, labels, room=0.08)
    heads = ["accumulation", *(f"micro-batch, {names[key]}" for key in groups)]
    # Beside the tick labels, whose offset is the tick's length and pad.
    axes.annotate(
        "\n".join(heads),
        (0, 0),
        xycoords="axes fraction",
        xytext=(-8, -7),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=10,
        parse_math=False,
    )
    axes.set_ylabel("ms a sample (step / global batch)")
    axes.set_ylim(0, highest * 1.15)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    _label_ends(axes, ends)
    axes.text(
        0.01,
        0.98,
        "bars: 10th to 90th percentile of steps",
        transform=axes.transAxes,
        fontsize=8.5,
        va="top",
        bbox={"facecolor": axes.get_facecolor(), "linewidth": 0, "pad": 1.5},
    )
    shown = cheapest if len(cheapest) <= 3 else [cheapest[0], cheapest[-1]]
    _title(figure, f"Cheapest measured micro-batch x accumulation: {', '.join(shown)}")
    return figure


def _split_names(keys: Sequence[tuple[int, int, str]]) -> dict[tuple[int, int, str], str]:
    """Names lines by dp, and by what else is needed to tell them apart."""
    batches = len({batch for _, batch, _ in keys}) > 1
    placements = len({placement for _, _, placement in keys if placement}) > 1
    return {
        (dp, batch, placement): f"dp {dp}"
        + (f", batch {batch}" if batches else "")
        + (f", {_literal(placement)}" if placements else "")
        for dp, batch, placement in keys
    }


_PICTURES = {
    "step_parts": step_parts,
    "scaling": scaling,
    "waterfall": waterfall,
    "allreduce": allreduce,
    "batch_split": batch_split,
}


def save_all(summary: Summary, folder: Path) -> list[Path]:
    """Saves the pictures that apply to a summary below a run folder; returns their paths."""
    saved = []
    for name, draw in _PICTURES.items():
        figure = draw(summary)
        if figure is None:
            continue
        path = paths.make_plots_folder(folder) / f"{name}.png"
        picture = io.BytesIO()
        figure.savefig(picture, dpi=_DPI, format="png")
        paths.write_whole(path, picture.getvalue())
        saved.append(path)
    return saved


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class Picture(Figure):
    """A figure that a notebook shows by itself, with or without pyplot."""

    def _repr_png_(self) -> bytes:
        """Returns the picture as IPython asks for it."""
        file = io.BytesIO()
        # Without the version of matplotlib: equal pictures are equal files.
        self.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()


def _figure(width: float, height: float) -> Figure:
    return Picture(figsize=(width, height), layout="constrained")


def _title(figure: Figure, text: str) -> None:
    """Writes the title, broken to the figure's width."""
    columns = int(figure.get_figwidth() * 72 / (11 * 0.62))
    figure.suptitle(
        textwrap.fill(_literal(text), columns),
        x=0.01,
        ha="left",
        fontsize=11,
        parse_math=False,
    )
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)


def _literal(text: str) -> str:
    """Escapes what the default font cannot show."""
    return "".join(
        c if c.isprintable() and ord(c) < 0x250 else c.encode("unicode_escape").decode()
        for c in text
    )


def _column_name(text: str) -> str:
    """Breaks a level's id so that it fits below its bar."""
    return "\n".join(textwrap.wrap(_literal(text), 9)) or " "


def _note(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], ha: str, va: str
) -> None:
    axes.annotate(
        text,
        at,
        xytext=offset,
        textcoords="offset points",
        ha=ha,
        va=va,
        fontsize=9,
        parse_math=False,
    )


def _line_style(number: int) -> dict[str, Any]:
    return {
        "color": _COLORS[number % len(_COLORS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _DASHES[number % len(_DASHES)],
    }


def _thin_hatches(patches: Iterable[Patch]) -> None:
    for patch in patches:
        if hasattr(patch, "set_hatch_linewidth"):  # from matplotlib 3.10 on
            patch.set_hatch_linewidth(0.6)


def _log2_ticks(axes: Axes, at: Sequence[int], labels: Sequence[str], room: float) -> None:
    """Puts ticks at values on a base-2 axis; labels only where a share of its length is free."""
    axes.set_xscale("log", base=2)
    low, high = at[0] / 1.25, at[-1] * 1.25
    axes.set_xlim(low, high)
    length = math.log2(high / low)
    shown = [at[-1]]
    for value in reversed(at[:-1]):
        ends = (shown[-1],) if value == at[0] else (shown[-1], at[0])
        if all(abs(math.log2(value / other)) / length >= room for other in ends):
            shown.append(value)
    axes.set_xticks(
        at,
        [label if value in shown else "" for value, label in zip(at, labels, strict=True)],
        parse_math=False,
    )
    axes.xaxis.set_minor_locator(NullLocator())


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str]]) -> None:
    """Names lines at the right of the axes, pushed apart where they would overlap.

    Args:
        axes: The axes, with their limits set.
        ends: x and y of each line's last point, and its name.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    inches = axes.figure.get_figheight() - 1.5  # type: ignore[union-attr]
    gap = min(14 / 72 / inches, 1 / max(len(ends) - 1, 1))
    wanted = sorted((float(to_axes.transform((x, y))[1]), x, y, text) for x, y, text in ends)
    heights = [height for height, *_ in wanted]
    for _ in range(200):
        moved = False
        for i, (lower, upper) in enumerate(pairwise(heights)):
            if upper - lower < gap - 1e-6:
                middle = (lower + upper) / 2
                heights[i], heights[i + 1] = middle - gap / 2, middle + gap / 2
                moved = True
        if not moved:
            break
    top = max(0.0, heights[-1] - 1.0) if heights else 0.0
    for height, (_, x, y, text) in zip(heights, wanted, strict=True):
        axes.annotate(
            text,
            (x, y),
            xytext=(1.03, height - top),
            textcoords="axes fraction",
            ha="left",
            va="center",
            fontsize=9,
            arrowprops={
                "arrowstyle": "-",
                "linewidth": 0.6,
                "color": "0.5",
                "shrinkB": 5,
                "relpos": (0, 0.5),
            },
            parse_math=False,
        )
