"""Pictures of single steps, as matplotlib figures, in the style of those of a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddp_profiler import units
from ddp_profiler.analysis.bucket_timeline import EXPOSED, Bucket, BucketTimeline, Lane
from ddp_profiler.analysis.heatmap import HeatMap
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.report.plots import _PART_STYLES, _figure, _thin_hatches, _title

__all__ = ["bucket_timeline", "rank_heat_map"]

# Darker is longer, in grey as well.
_SHADES = ("#FFFFFF", "#FDE0C5", "#FDB77A", "#F28036", "#B8480B", "#5C1F02")
_STYLES = {**_PART_STYLES, EXPOSED: ("#E69F00", "xx")}
_HIDDEN, _SHOWN = ("#A6D4F2", "//"), ("#D55E00", "")


def rank_heat_map(level: str, found: HeatMap) -> Figure:
    """Draws ranks as rows and steps as columns, darker where a rank takes longer than others.

    Args:
        level: The level's id.
        found: The excess of each rank's own work in ms.
    """
    rows, columns = len(found.rows), len(found.excess_ms[0])
    figure = _figure(8.6, min(2.2 + 0.3 * rows, 9.0))
    axes = figure.add_subplot()
    edges = [begin - 0.5 for begin in (*found.column_begins, found.steps)]
    axes.pcolormesh(
        edges,
        [row - 0.5 for row in range(rows + 1)],
        found.excess_ms,
        cmap=ListedColormap(list(_SHADES)),
        norm=BoundaryNorm(found.classes_ms, len(_SHADES), extend="both"),
    )
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_yticks(range(rows), [_row_name(row) for row in found.rows], fontsize=9)
    for edge in range(1, rows):
        axes.axhline(edge - 0.5, color="0.8", linewidth=0.5)
    axes.set_xlabel(
        "step" + (f" ({found.steps_per_column} a column)" if columns < found.steps else "")
    )
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(rows), [units.ms(mean) for mean in found.row_excess_ms], fontsize=9)
    right.set_ylabel("mean, ms")
    right.tick_params(length=0)
    figure.legend(
        handles=[
            Patch(facecolor=shade, edgecolor="0.5", linewidth=0.5, label=text)
            for shade, text in zip(_SHADES, _class_names(found.classes_ms), strict=True)
        ],
        title="longer than the (lower) median rank, in ms",
        title_fontsize=9,
        loc="outside lower center",
        ncols=len(_SHADES),
        frameon=False,
        fontsize=9,
    )
    slowest = found.ranks[0]
    _title(
        figure,
        f"{level}: rank {slowest.rank} does {units.ms(slowest.excess_ms)} ms more work of its own "
        f"than the others in a step of {units.ms(found.step_ms)} ms",
    )
    return figure


def _row_name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _class_names(limits: Sequence[float]) -> list[str]:
    shown = [units.ms(limit) for limit in limits]
    between = [f"{low} to {high}" for low, high in pairwise(shown)]
    return [f"below {shown[0]}", *between, f"{shown[-1]} and more"]


def bucket_timeline(level: str, found: BucketTimeline) -> Figure:
    """Draws a typical step in ms: phases of a rank, and each bucket while it is in flight.

    What is hidden behind computation is hatched, what is exposed is full.

    Args:
        level: The level's id.
        found: The step.
    """
    first, *others = found.lanes
    rows = 1 + len(found.buckets) + len(others)
    figure = _figure(9.0, min(2.4 + 0.28 * rows, 12.0))
    axes = figure.add_subplot()
    names = [f"rank {first.rank}"]
    _draw_lane(axes, first, 0)
    for place, bucket in enumerate(found.buckets, start=1):
        names.append(_bucket_name(bucket))
        _draw_bucket(axes, bucket, place)
    for place, lane in enumerate(others, start=1 + len(found.buckets)):
        names.append(f"rank {lane.rank}")
        _draw_lane(axes, lane, place)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_yticks(range(rows), names, fontsize=9)
    axes.set_xlim(*found.span_ms)
    axes.set_xlabel(f"ms after the step's begin on rank {first.rank}")
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    _thin_hatches(axes.patches)
    drawn = {phase.part for lane in found.lanes for phase in lane.phases}
    figure.legend(
        handles=[
            _key(_STYLES[part], part.replace("_", " "))
            for part in (*PARTS, EXPOSED)
            if part in drawn
        ]
        + [_key(_HIDDEN, "bucket, hidden"), _key(_SHOWN, "bucket, exposed")],
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=9,
    )
    merged = len(found.buckets) < found.collectives
    _title(
        figure,
        f"{level}: a typical step of {units.ms(found.step_ms)} ms (step {found.step} of "
        f"{found.steps}) and its {found.collectives} gradient collectives on rank {first.rank}"
        + (", several in a row" if merged else ""),
    )
    return figure


def _key(style: tuple[str, str], name: str) -> Patch:
    color, hatch = style
    return Patch(facecolor=color, hatch=hatch * 2, edgecolor="black", linewidth=0.5, label=name)


def _bar(
    axes: Axes, begin: float, end: float, row: int, height: float, style: tuple[str, str], name: str
) -> None:
    color, hatch = style
    axes.barh(
        row,
        end - begin,
        left=begin,
        height=height,
        color=color,
        hatch=hatch,
        edgecolor="black",
        linewidth=0.5,
        label=name,
    )


def _draw_lane(axes: Axes, lane: Lane, row: int) -> None:
    for phase in lane.phases:
        inner = phase.part in ("forward_comm", "backward_comm")
        _bar(
            axes,
            phase.begin_ms,
            phase.end_ms,
            row,
            0.4 if inner else 0.8,
            _STYLES[phase.part],
            phase.part,
        )


def _draw_bucket(axes: Axes, bucket: Bucket, row: int) -> None:
    exposed_from = max(bucket.hidden_until_ms, bucket.begin_ms)
    if exposed_from > bucket.begin_ms:
        _bar(axes, bucket.begin_ms, exposed_from, row, 0.5, _HIDDEN, "hidden")
    if bucket.end_ms > exposed_from:
        _bar(axes, exposed_from, bucket.end_ms, row, 0.5, _SHOWN, "exposed")


def _bucket_name(bucket: Bucket) -> str:
    if bucket.last > bucket.first:
        return f"buckets {bucket.first}-{bucket.last}"
    return f"bucket {bucket.first}"
