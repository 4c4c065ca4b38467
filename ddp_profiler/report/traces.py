"""The table and the JSON of split traces."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from rich.table import Table
from rich.text import Text

from ddp_profiler import units
from ddp_profiler.report import exact
from ddp_profiler.report import ranks as together
from ddp_profiler.report.exact import us
from ddp_profiler.report.text import ms_of_ns, table_of, text_console
from ddp_profiler.trace.analysis import TraceAnalysis
from ddp_profiler.trace.gather import TraceSet
from ddp_profiler.trace.notices import TraceWarning, merged
from ddp_profiler.trace.split import CommShare, Parts, RankSplit, StepParts
from ddp_profiler.trace.steps import StepSource
from ddp_profiler.trace.timeline import Timeline

_STEPS_SHOWN = 8
_RANKS_SHOWN = 32
_FIRST_SHOWN = 4
_LAST_SHOWN = 2
_SHARES_SHOWN = 12

_SOURCES = {
    StepSource.PROFILER_STEP: "ProfilerStep",
    StepSource.GPU_ANNOTATION: "ProfilerStep on the GPU's timeline",
    StepSource.OPTIMIZER_STEP: "calls of the optimizer",
    StepSource.GPU_PATTERN: "the period of the GPU's kernels",
    StepSource.NONE: "nowhere: only the total",
}


# ----------------------------------------------------------------------------------------------
# JSON


def as_json(
    found: TraceSet, analysis: TraceAnalysis | None = None, timeline: Timeline | None = None
) -> dict[str, Any]:
    """Returns the content of ``trace --json``: times in us, None for what does not apply.

    Args:
        found: The ranks.
        analysis: What they tell together; left out where it is None.
        timeline: What was written for Perfetto.
    """
    return cast(dict[str, Any], exact.whole(_content(found, analysis, timeline)))


def json_pieces(
    found: TraceSet, analysis: TraceAnalysis, timeline: Timeline | None = None
) -> Iterator[str]:
    """Yields the text of ``trace --json`` as it is made: times have all their digits.

    Args:
        found: The ranks.
        analysis: What they tell together.
        timeline: What was written for Perfetto.
    """
    yield from exact.pieces(_content(found, analysis, timeline))
    yield "\n"


def _content(
    found: TraceSet, analysis: TraceAnalysis | None, timeline: Timeline | None
) -> dict[str, Any]:
    return {
        "ranks": (_rank_json(rank) for rank in found.ranks),
        "world_size": found.world_size,
        **(together.as_json(found, analysis, timeline) if analysis else {}),
        "warnings": [
            {"code": warning.code, "message": warning.message, "count": warning.count}
            for warning in all_warnings(found, analysis)
        ],
    }


def all_warnings(
    found: TraceSet, analysis: TraceAnalysis | None = None
) -> tuple[TraceWarning, ...]:
    """Returns the warnings of the set, of its ranks and between them, equal ones added up."""
    ranks = [warning for rank in found.ranks for warning in rank.warnings]
    across = analysis.across.warnings if analysis else ()
    return merged((*found.warnings, *across, *ranks))


def _rank_json(rank: RankSplit) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "world_size": rank.trace.world_size,
        "backend": rank.trace.backend,
        "file": str(rank.trace.path),
        "base_time_ns": rank.trace.base_time_ns,
        "step_source": rank.step_source.value,
        "comm_source": "gpu" if rank.on_gpu else "cpu",
        "steps": (_step_json(step) for step in rank.steps),
        "total": _parts_json(rank.total),
        "warnings": [
            {"code": warning.code, "message": warning.message, "count": warning.count}
            for warning in rank.warnings
        ],
    }


def _step_json(found: StepParts) -> Mapping[str, Any]:
    step = found.step
    return {
        "step": step.number,
        "occurrence": step.occurrence,
        "begin_us": us(step.begin_ns),
        "step_us": us(step.end_ns - step.begin_ns),
        "complete": not step.incomplete,
        "incomplete_reason": step.incomplete or None,
        "window_begin_us": us(found.window_begin_ns),
        **_parts_json(found.parts),
    }


def _parts_json(parts: Parts) -> Mapping[str, Any]:
    return {
        "window_us": us(parts.window_ns),
        "compute_us": us(parts.compute_ns),
        "comm_us": us(parts.comm_ns),
        "comm_sum_us": us(parts.comm_sum_ns),
        "overlap_us": us(parts.overlap_ns),
        "exposed_comm_us": us(parts.exposed_comm_ns),
        "memory_us": us(parts.memory_ns),
        "exposed_memory_us": us(parts.exposed_memory_ns),
        "idle_us": us(parts.idle_ns),
        "other_steps_us": us(parts.other_steps_ns),
        "outside_window_us": us(parts.outside_window_ns),
        "overlap_fraction": parts.overlap_fraction,
        "comm_by_kind": [
            {
                "kind": share.kind.value,
                "group": share.group,
                "count": share.count,
                "elements": share.elements,
                "comm_us": us(share.comm_ns),
                "sum_us": us(share.sum_ns),
                "exposed_us": us(share.exposed_ns),
            }
            for share in parts.by_kind
        ],
    }


# ----------------------------------------------------------------------------------------------
# Table


def render(
    found: TraceSet,
    analysis: TraceAnalysis | None = None,
    timeline: Timeline | None = None,
    *,
    color: bool = False,
) -> str:
    """Returns the split as text of at most 80 columns, readable without colour.

    Args:
        found: The ranks.
        analysis: What they tell together; left out where it is None.
        timeline: What was written for Perfetto.
        color: Whether to use colour.
    """
    output = io.StringIO()
    console = text_console(output, color=color)
    for line in _heading(found):
        console.print(Text(units.printable(line)))
    console.print(_steps_table(found))
    if len(found.ranks) > _RANKS_SHOWN:
        more = len(found.ranks) - _RANKS_SHOWN
        console.print(Text(f"({more} more ranks are not shown here and below; --json has all)"))
    shares = _shares_table(found)
    if shares is not None:
        console.print(shares)
    for part in together.lines(found, analysis) if analysis else ():
        console.print(Text(units.printable(part)) if isinstance(part, str) else part)
    for line in together.findings_lines(analysis) if analysis else ():
        console.print(Text(units.printable(line)))
    if timeline is not None:
        console.print(Text(units.printable(together.timeline_line(timeline))))
    warnings = all_warnings(found, analysis)
    if analysis and warnings:
        console.print(Text("\nNotes"))
    for warning in warnings:
        times = f" ({warning.count:,} times)" if warning.count > 1 else ""
        console.print(Text(units.printable(f"{warning.code}{times}: {warning.message}")))
    return output.getvalue()


def _heading(found: TraceSet) -> list[str]:
    ranks = units.ranks(rank.rank for rank in found.ranks)
    of = f" of {found.world_size}" if found.world_size is not None else ""
    backends = sorted({rank.trace.backend for rank in found.ranks if rank.trace.backend})
    backend = f", {backends[0]}" if backends else ""
    sources = list(dict.fromkeys(_SOURCES[rank.step_source] for rank in found.ranks))
    lines = [
        f"{ranks[0].upper()}{ranks[1:]}{of}{backend}; steps from {' and '.join(sources)}; "
        "times in ms."
    ]
    on_cpu = [rank for rank in found.ranks if not rank.on_gpu]
    if any(len(rank.trace.gpu) == 0 for rank in on_cpu):
        lines.append("Communication runs on the CPU: what it overlaps with is not in the trace.")
    elif on_cpu:
        lines.append(
            "Communication runs on the CPU; overlap is with the GPU's kernels. Idle is time in "
            "which neither runs."
        )
    return lines


def _steps_table(found: TraceSet) -> Table:
    several = len(found.ranks) > 1
    columns = [("rank", "right")] if several else []
    columns += [
        ("step", "left"),
        ("window", "right"),
        ("compute", "right"),
        ("comm", "right"),
        ("overlap", "right"),
        ("exposed\ncomm", "right"),
        ("exposed\nmemory", "right"),
        ("idle", "right"),
    ]
    table = table_of(*columns)
    apart = any(len(rank.steps) > 1 for rank in found.ranks)
    for rank in found.ranks[:_RANKS_SHOWN]:
        label = [str(rank.rank)] if several else []
        for step in _shown(rank.steps):
            name = "..." if step is None else f"{step.step.label}{_mark(step)}"
            cells = ["..."] + [""] * 7 if step is None else [name, *_cells(step.parts)]
            table.add_row(*label, *cells)
            label = [""] if several else []
        if len(rank.steps) != 1 or rank.steps[0].parts != rank.total:
            table.add_row(*label, "all", *_cells(rank.total), style="bold")
        if several and apart:
            table.add_section()
    return table


def _mark(step: StepParts) -> str:
    return " (part)" if step.step.incomplete else ""


def _shown(steps: Sequence[StepParts]) -> list[StepParts | None]:
    """Returns the steps to show, None where some are left out."""
    if len(steps) <= _STEPS_SHOWN:
        return list(steps)
    return [*steps[:_FIRST_SHOWN], None, *steps[-_LAST_SHOWN:]]


def _cells(parts: Parts) -> list[str]:
    overlap = ms_of_ns(parts.overlap_ns)
    if parts.overlap_fraction is not None:
        overlap = f"{overlap} {parts.overlap_fraction * 100:.0f}%".rjust(len(overlap) + 5)
    return [
        ms_of_ns(parts.window_ns),
        ms_of_ns(parts.compute_ns),
        ms_of_ns(parts.comm_ns),
        overlap,
        ms_of_ns(parts.exposed_comm_ns),
        ms_of_ns(parts.exposed_memory_ns),
        ms_of_ns(parts.idle_ns),
    ]


def _shares_table(found: TraceSet) -> Table | None:
    rows: list[tuple[RankSplit, CommShare]] = [
        (rank, share) for rank in found.ranks[:_RANKS_SHOWN] for share in rank.total.by_kind
    ]
    if not rows:
        return None
    several = len(found.ranks) > 1
    columns = [("rank", "right")] if several else []
    columns += [
        ("communication", "left"),
        ("group", "left"),
        ("count", "right"),
        ("elements", "right"),
        ("time", "right"),
        ("exposed", "right"),
    ]
    table = table_of(*columns)
    last = None
    for rank, share in rows[: _SHARES_SHOWN * max(1, len(found.ranks))]:
        label = [str(rank.rank) if rank is not last else ""] if several else []
        last = rank
        table.add_row(
            *label,
            share.kind.value,
            units.printable(share.group or units.NOTHING),
            str(share.count),
            units.NOTHING if share.elements is None else f"{share.elements:,}",
            ms_of_ns(share.comm_ns),
            ms_of_ns(share.exposed_ns),
        )
    return table
