"""The charts of the page. Each says by position and pattern what it says by colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from ddp_profiler import units
from ddp_profiler.analysis.allreduce import AllReduceResult
from ddp_profiler.analysis.bucket_timeline import BucketTimeline, Lane
from ddp_profiler.analysis.heatmap import HeatMap
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.results import LevelResult
from ddp_profiler.predict.outlook import Outlook
from ddp_profiler.report.page.markup import (
    Scale,
    across,
    element,
    joined,
    number,
    thinned,
)

_ROW_PX = 18
_LANE_PX = 22
_TALL_PX = 250
_TOTALS = ("bare", "measured")
_FAR_ABOVE = 3.0
"""A bound that is further above the curves than this would press them flat."""

_MARKERS = (
    '<circle r="4.5"/>',
    '<rect x="-4" y="-4" width="8" height="8"/>',
    '<path d="M0-5.5 5 4-5 4z"/>',
    '<path d="M0-6 6 0 0 6-6 0z"/>',
    '<path d="M0 5.5 5-4-5-4z"/>',
)


@dataclass(frozen=True)
class Key:
    """An entry of a legend: the class of its swatch and its text."""

    style: str
    text: str
    line: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart, what its signs mean, and what it shows in words for those who cannot see it."""

    body: Markup
    keys: tuple[Key, ...]
    label: str


def swatch(key: Key) -> Markup:
    """Returns the sign of a legend's entry."""
    if key.line:
        inner = element("line", x1=0, x2=24, y1=7, y2=7, class_=key.style)
    else:
        inner = element("rect", x=0.5, y=0.5, width=23, height=13, class_=key.style)
    return element("svg", inner, class_="swatch", width=24, height=14, aria_hidden="true")


def _svg(height: float, *children: Markup, **attributes: object) -> Markup:
    return element(
        "svg", *children, width="100%", height=number(height), aria_hidden="true", **attributes
    )


def _bar(begin: float, length: float, style: str, title: str, **more: object) -> Markup:
    """Returns a rectangle; begin and length in per cent of the width."""
    return element(
        "rect",
        element("title", title),
        x=across(begin),
        width=across(max(length, 0.15)),
        class_=style,
        **more,
    )


def _row(name: str, drawn: Markup, value: str, style: str = "bar") -> Markup:
    return element(
        "div",
        element("span", name, class_="name"),
        drawn,
        element("span", value, class_="value"),
        class_=style,
    )


def part_name(part: str) -> str:
    """Returns a part's name as it is shown."""
    return part.replace("_", " ")


def step_split(levels: Sequence[LevelResult]) -> Chart | None:
    """Draws the parts of each level's instrumented step as a bar."""
    steps = [(lv, lv.instrumented_step_ms.mean) for lv in levels if lv.instrumented_step_ms]
    if not steps:
        return None
    longest = max(mean for _, mean in steps) or 1.0
    seen = set()
    rows = []
    for level, mean in steps:
        at, bars = 0.0, []
        for part in PARTS:
            value = level.breakdown_ms.get(part)
            if not value or value <= 0 or value < longest * 1e-3:
                continue
            seen.add(part)
            length = value / longest * 100
            title = f"{part_name(part)} {units.ms(value)} ms"
            bars.append(_bar(at, length, f"p-{part}", title, y=1, height=_LANE_PX))
            at += length
        rows.append(_row(level.id, _svg(_LANE_PX + 2, *bars), f"{units.ms(mean)} ms"))
    return Chart(
        element("div", *rows, class_="bars"),
        tuple(Key(f"p-{part}", part_name(part)) for part in PARTS if part in seen),
        "Parts of the instrumented step at each level, stacked, in ms",
    )


def waterfall(terms: Mapping[str, float | None], names: Mapping[str, str]) -> Chart:
    """Draws the way from the bare model's step to the measured one, a row for each term.

    Args:
        terms: As ``LevelResult.waterfall_ms``, both totals known.
        names: The rows' names, by term.
    """
    reached, places = 0.0, []
    for name, value in terms.items():
        begin = 0.0 if name in _TOTALS else reached
        reached = begin + (value or 0.0)
        places.append((name, value, begin, reached))
    ends = [place for _, value, begin, end in places if value is not None for place in (begin, end)]
    inner = [end for _, value, _, end in places if value is not None]
    low, high = min(0.0, *ends), max(*ends, 0.0) or 1.0
    cut = min(inner) > 0.6 * high
    if cut:
        low = min(inner) - 0.45 * (high - min(inner))
        cut = low > 0
        low = max(low, 0.0)
    scale = Scale(low, high, 0, 100)
    rows = []
    for name, value, begin, end in places:
        if value is None:
            rows.append(_row(names[name], _svg(_LANE_PX), "not known"))
            continue
        total = name in _TOTALS
        left, right = sorted((max(scale(begin), 0.0), scale(end)))
        style = "w-total" if total else "w-residual" if name == "residual" else None
        style = style or ("w-less" if value < 0 else "w-more")
        shown = units.ms(value) if total else _signed(value)
        bars = [
            element(
                "line", x1=across(scale(end)), x2=across(scale(end)), y1=0, y2="100%", class_="rule"
            ),
        ]
        if right - left > 0.01:
            title = f"{names[name]} {shown} ms"
            bars.append(_bar(left, right - left, style, title, y=2, height=_LANE_PX - 4))
        if total and cut:
            bars.append(_bar(3, 1, "gap", "the axis does not begin at 0", y=0, height=_LANE_PX))
        rows.append(_row(names[name], _svg(_LANE_PX, *bars), f"{shown} ms"))
    keys = [
        Key("w-total", "step"),
        Key("w-more", "adds"),
        Key("w-less", "takes away"),
        Key("w-residual", "what no term explains"),
    ]
    label = "Waterfall from the bare model to the measured step, in ms"
    if cut:
        keys.append(Key("gap", f"the axis begins at {units.ms(low)} ms"))
    return Chart(element("div", *rows, class_="bars"), tuple(keys), label)


def _signed(value: float) -> str:
    text = units.ms(value)
    if text.strip("-0.") == "":
        return text.lstrip("-")
    return text if value < 0 else f"+{text}"


def heat_map(found: HeatMap, named: frozenset[int]) -> Chart:
    """Draws ranks as rows and steps as columns, shaded where a rank takes longer than others.

    Args:
        found: The excess of each rank's own work.
        named: Ranks that a straggler is named for; their rows are marked.
    """
    columns = len(found.excess_ms[0])
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(found.excess_ms):
        classes = [sum(value >= limit for limit in found.classes_ms) for value in row]
        begin = 0
        for x in range(1, columns + 1):
            # Neighbours of one shade are one rectangle.
            if x == columns or classes[x] != classes[begin]:
                if classes[begin]:
                    length = x - begin
                    paths.setdefault(classes[begin], []).append(
                        f"M{begin} {y}h{length}v1h-{length}z"
                    )
                begin = x
    drawn = [
        element("path", d="".join(parts), class_=f"h{shade}")
        for shade, parts in sorted(paths.items())
    ]
    lines = [
        element(
            "path", d="".join(f"M0 {y}H{columns}" for y in range(1, len(found.rows))), class_="hr"
        )
    ]
    height = _ROW_PX * len(found.rows)
    picture = _svg(
        height,
        *drawn,
        *lines,
        viewBox=f"0 0 {columns} {len(found.rows)}",
        preserveAspectRatio="none",
        class_="map",
    )
    labels, means = [], []
    for row, mean in zip(found.rows, found.row_excess_ms, strict=True):
        late = bool(named & set(row))
        name = f"{row[0]}" if len(row) == 1 else f"{row[0]}-{row[-1]}"
        labels.append(
            element(
                "span",
                f"▸ rank {name}" if late else f"rank {name}",
                class_="late" if late else None,
            )
        )
        means.append(element("span", _signed(mean)))
    body = element(
        "div",
        element("div", element("span", "", class_="head"), *labels, class_="names"),
        element(
            "div",
            element(
                "div",
                element("span", "step 0"),
                element("span", f"step {found.steps - 1}"),
                class_="head ends",
            ),
            picture,
        ),
        element("div", element("span", "mean ms", class_="head"), *means, class_="means"),
        class_="heat",
    )
    limits = [units.ms(limit) for limit in found.classes_ms]
    keys = [Key("h0", f"below {limits[0]} ms")]
    keys += [
        Key(f"h{i + 1}", f"{low} to {high} ms") for i, (low, high) in enumerate(pairwise(limits))
    ]
    keys.append(Key(f"h{len(limits)}", f"{limits[-1]} ms and more"))
    label = "Ranks as rows, steps as columns; shaded where a rank takes longer than the others"
    return Chart(body, tuple(keys), label)


def timeline(found: BucketTimeline) -> Chart:
    """Draws a step of a rank: its phases, and below them each bucket while it was in flight."""
    low, high = found.span_ms
    scale = Scale(low, high if high > low else low + 1, 0, 100)
    rows: list[tuple[str, list[Markup]]] = []
    parts: list[str] = []

    def lane(one: Lane) -> list[Markup]:
        bars = []
        for phase in one.phases:
            inner = phase.part in ("forward_comm", "backward_comm")
            parts.append(phase.part)
            title = f"{part_name(phase.part)} {units.ms(phase.end_ms - phase.begin_ms)} ms"
            bars.append(
                _bar(
                    scale(phase.begin_ms),
                    scale(phase.end_ms) - scale(phase.begin_ms),
                    f"p-{phase.part}",
                    title,
                    y=8 if inner else 3,
                    height=_LANE_PX - (14 if inner else 6),
                )
            )
        return bars

    first = found.lanes[0]
    rows.append((f"rank {first.rank}", lane(first)))
    for bucket in found.buckets:
        several = bucket.last > bucket.first
        name = f"buckets {bucket.first}-{bucket.last}" if several else f"bucket {bucket.first}"
        middle = scale(bucket.hidden_until_ms)
        bars = []
        if bucket.hidden_until_ms > bucket.begin_ms:
            length = middle - scale(bucket.begin_ms)
            hidden = units.ms(bucket.hidden_until_ms - bucket.begin_ms)
            bars.append(
                _bar(
                    scale(bucket.begin_ms),
                    length,
                    "b-hidden",
                    f"hidden {hidden} ms",
                    y=6,
                    height=10,
                )
            )
        if bucket.end_ms > bucket.hidden_until_ms:
            begin = max(bucket.hidden_until_ms, bucket.begin_ms)
            exposed = units.ms(bucket.end_ms - begin)
            bars.append(
                _bar(
                    scale(begin),
                    scale(bucket.end_ms) - scale(begin),
                    "b-exposed",
                    f"exposed {exposed} ms",
                    y=6,
                    height=10,
                )
            )
        rows.append((name, bars))
    rows += [(f"rank {other.rank}", lane(other)) for other in found.lanes[1:]]
    drawn = [
        element("svg", *bars, x=0, y=number(i * _LANE_PX), width="100%", height=_LANE_PX)
        for i, (_, bars) in enumerate(rows)
    ]
    height = _LANE_PX * len(rows)
    ticks = scale.ticks(5)
    grid = [
        element("line", x1=across(scale(t)), x2=across(scale(t)), y1=0, y2=height, class_="grid")
        for t in ticks
    ]
    ends = [p.end_ms for p in first.phases if p.part == "backward"]
    marks = []
    if ends:
        at = across(scale(ends[-1]))
        marks.append(element("line", x1=at, x2=at, y1=0, y2=height, class_="mark"))
    labels = [
        element(
            "text",
            f"{t:.10g}",
            x=across(scale(t)),
            y=height + 14,
            class_="tick",
            text_anchor=_anchor(scale(t)),
        )
        for t in ticks
    ]
    body = element(
        "div",
        element("div", *(element("span", name) for name, _ in rows), class_="names lanes"),
        element("div", _svg(height + 18, *grid, *drawn, *marks, *labels)),
        class_="time",
    )
    keys = [Key(f"p-{part}", part_name(part)) for part in (*PARTS, "exposed") if part in parts]
    keys = [Key(k.style, "wait or transfer" if k.style == "p-exposed" else k.text) for k in keys]
    if found.buckets:
        keys += [Key("b-hidden", "in flight, hidden"), Key("b-exposed", "in flight, exposed")]
    if ends:
        keys.append(Key("mark", "end of local backward", line=True))
    return Chart(body, tuple(keys), "Phases of a step and its buckets over time, in ms")


def _anchor(percent: float) -> str:
    return "start" if percent < 6 else "end" if percent > 94 else "middle"


def scaling(lines: Mapping[str, Sequence[LevelResult]], outlook: Outlook) -> Chart | None:
    """Draws throughput over dp beside the ideal lines, and what is predicted beyond.

    Args:
        lines: Levels with throughput and efficiency, by what they have in common.
        outlook: Predictions, drawn hollow with their 90 % intervals.
    """
    if not lines:
        return None
    marks = [
        (level.dp, level.samples_per_s, level.samples_per_s / level.efficiency)
        for line in lines.values()
        for level in line
        if level.samples_per_s and level.efficiency
    ]
    expected = [
        (one.dp, rate, low, high)
        for one, (low, high) in zip(
            outlook.predictions, outlook.samples_per_s_interval90, strict=True
        )
        if (rate := one.samples_per_s) > 0 and low > 0
    ]
    dps = sorted({dp for dp, *_ in marks} | {dp for dp, *_ in expected})
    values = [v for _, *vs in marks for v in vs] + [v for _, *vs in expected for v in vs]
    # Also beyond what was measured: the ideal grows with dp.
    values += [ideal * dps[-1] / dp for dp, _, ideal in marks if expected]
    x = Scale(dps[0], max(dps[-1], dps[0] * 2), 13, 95, log=True)
    y = Scale(min(values) / 1.9, max(values) * 1.3, _TALL_PX, 14, log=True)
    drawn = _grid(x, y, thinned(dps), [f"{dp:g}" for dp in thinned(dps)], "samples/s")
    keys = [Key("ideal", "ideal: dp times the throughput of one rank", line=True)]
    ideals: set[str] = set()
    # The longest first, since its ideal covers that of the others.
    for place, (name, levels) in enumerate(sorted(lines.items(), key=lambda one: -len(one[1]))):
        style = f"s{place % 5}"
        points = [(lv.dp, lv.samples_per_s, lv.efficiency) for lv in levels]
        known = [(dp, rate, share) for dp, rate, share in points if rate and share]
        ideal = [(dp, rate / share) for dp, rate, share in known]
        if expected and ideal and dps[-1] > ideal[-1][0]:
            ideal.append((dps[-1], ideal[-1][1] * dps[-1] / ideal[-1][0]))
        # Lines with one reference share their ideal: drawn twice, its dots would be a line.
        slopes = {f"{value / dp:.3g}" for dp, value in ideal}
        if not slopes <= ideals:
            drawn += _line(x, y, ideal, "ideal")
        ideals |= slopes
        drawn += _line(x, y, [(dp, rate) for dp, rate, _ in known], f"{style} line")
        for dp, rate, share in known:
            drawn.append(_marker(x(dp), y(rate), place, f"{style} dot", f"dp {dp}: {rate:.5g}"))
            if len(lines) == 1:
                drawn.append(
                    element(
                        "text",
                        units.percent(share, 0),
                        x=across(x(dp)),
                        y=number(y(rate) + 18),
                        class_="tick",
                        text_anchor="middle",
                    )
                )
        keys.append(Key(f"{style} line", name or "measured", line=True))
    for dp, rate, low, high in expected:
        at = across(x(dp))
        drawn.append(
            element("line", x1=at, x2=at, y1=number(y(low)), y2=number(y(high)), class_="span")
        )
        drawn.append(_marker(x(dp), y(rate), 0, "hollow", f"dp {dp}: predicted {rate:.5g}"))
    if expected:
        keys.append(Key("span", "hollow: predicted, with its 90 % interval", line=True))
    body = _svg(_TALL_PX + 36, *drawn, _x_name("dp, data-parallel replicas"))
    label = "Throughput over dp, both axes logarithmic, beside the ideal line"
    return Chart(element("div", body, class_="plot"), tuple(keys), label)


def allreduce(found: Mapping[str, AllReduceResult]) -> Chart | None:
    """Draws bus bandwidth over message size, and the rates of the links, which bound a ring."""
    lines = {
        name: [(s.bytes, s.busbw_gb_per_s) for s in (result.sizes or result.buckets) if s.bytes > 0]
        for name, result in found.items()
    }
    points = [point for line in lines.values() for point in line]
    if not points:
        return None
    sizes = sorted({size for size, _ in points})
    tallest = max(rate for _, rate in points) or 1.0
    links = {r.link.name: r.link.gbit_per_s / 8 for r in found.values() if r.link}
    shown = {name: rate for name, rate in links.items() if rate <= _FAR_ABOVE * tallest}
    x = Scale(sizes[0], max(sizes[-1], sizes[0] * 2), 13, 95, log=True)
    y = Scale(0, max(tallest, *shown.values()) * 1.15 if shown else tallest * 1.15, _TALL_PX, 14)
    ticks = thinned(sizes, 5)
    drawn = _grid(x, y, ticks, [units.nbytes(size) for size in ticks], "bus bandwidth, GB/s")
    keys = []
    for place, (name, line) in enumerate(lines.items()):
        style = f"s{place % 5}"
        drawn += _line(x, y, line, f"{style} line")
        drawn += [
            _marker(
                x(size), y(rate), place, f"{style} dot", f"{units.nbytes(size)}: {rate:.3g} GB/s"
            )
            for size, rate in line
        ]
        keys.append(Key(f"{style} line", name, line=True))
    for name, rate in links.items():
        if name in shown:
            drawn.append(
                element(
                    "line",
                    x1="0",
                    x2="100%",
                    y1=number(y(rate)),
                    y2=number(y(rate)),
                    class_="ideal",
                )
            )
            keys.append(Key("ideal", f"ring bound, {name}: {rate:.3g} GB/s", line=True))
        else:
            keys.append(Key("none", f"ring bound, {name}: {rate:.3g} GB/s (far above)"))
    body = _svg(_TALL_PX + 36, *drawn, _x_name("message size"))
    label = "Bus bandwidth of AllReduce in isolation over message size"
    return Chart(element("div", body, class_="plot"), tuple(keys), label)


def _grid(
    x: Scale, y: Scale, ticks: Sequence[float], names: Sequence[str], unit: str
) -> list[Markup]:
    """Returns lines of an axis's values, with the values on them, and marks across."""
    drawn = [element("text", unit, x="0", y="10", class_="tick")]
    for value in y.ticks():
        at = number(y(value))
        drawn.append(element("line", x1="0", x2="100%", y1=at, y2=at, class_="grid"))
        # Not below the name of the axis.
        if y(value) > 29:
            drawn.append(
                element("text", f"{value:.6g}", x="0", y=number(y(value) - 3), class_="tick")
            )
    for value, name in zip(ticks, names, strict=True):
        at = across(x(value))
        drawn.append(element("line", x1=at, x2=at, y1=_TALL_PX, y2=_TALL_PX + 4, class_="axis"))
        drawn.append(
            element(
                "text", name, x=at, y=_TALL_PX + 17, class_="tick", text_anchor=_anchor(x(value))
            )
        )
    drawn.append(element("line", x1="0", x2="100%", y1=_TALL_PX, y2=_TALL_PX, class_="axis"))
    return drawn


def _x_name(text: str) -> Markup:
    return element("text", text, x="50%", y=_TALL_PX + 33, class_="tick", text_anchor="middle")


def _line(x: Scale, y: Scale, points: Sequence[tuple[float, float]], style: str) -> list[Markup]:
    """Returns the pieces of a line: only pieces can be placed in per cent."""
    return [
        element(
            "line",
            x1=across(x(a)),
            y1=number(y(b)),
            x2=across(x(c)),
            y2=number(y(d)),
            class_=style,
        )
        for (a, b), (c, d) in pairwise(points)
    ]


def _marker(percent: float, height: float, place: int, style: str, title: str) -> Markup:
    # Constants of this module.
    shape = Markup(_MARKERS[place % len(_MARKERS)])
    return element(
        "svg",
        element("g", element("title", title), shape, class_=style),
        x=across(percent),
        y=number(height),
        overflow="visible",
        width=1,
        height=1,
    )


def patterns() -> Markup:
    """Returns what bars are filled with: a colour and a hatch each, so that grey tells them."""
    hatches = {
        "data": "",
        "forward": "",
        "forward_comm": "M-2 2 2-2M0 8 8 0M6 10 10 6",
        "backward": "",
        "backward_comm": "M-2 2 2-2M0 8 8 0M6 10 10 6M-2 6 2 10M0 0 8 8M6-2 10 2",
        "exposed_wait": "M-2 6 2 10M0 0 8 8M6-2 10 2",
        "exposed_transfer": "M-2 2 2-2M0 8 8 0M6 10 10 6",
        "exposed_copy": "M2 2h2v2h-2zM6 6h2v2h-2z",
        "exposed": "M0 4H8",
        "optimizer": "M2 0V8M6 0V8",
        "other": "",
        "more": "",
        "less": "M-2 6 2 10M0 0 8 8M6-2 10 2",
        "residual": "M-2 2 2-2M0 8 8 0M6 10 10 6M-2 6 2 10M0 0 8 8M6-2 10 2",
        "hidden": "",
        "bare_exposed": "M-2 2 2-2M0 8 8 0M6 10 10 6",
    }
    found = []
    for name, path in hatches.items():
        inner = [element("rect", width=8, height=8, class_=f"c-{name}")]
        if path:
            inner.append(element("path", d=path, class_=f"k-{name} hatch"))
        found.append(
            element(
                "pattern",
                *inner,
                id=f"f-{name}",
                width=8,
                height=8,
                patternUnits="userSpaceOnUse",
            )
        )
    return element(
        "svg",
        element("defs", joined(found)),
        width=0,
        height=0,
        class_="defs",
        aria_hidden="true",
    )
