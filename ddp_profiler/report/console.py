"""The table that a run ends with: parts as rows, levels as columns, at most 80 wide."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddp_profiler import units
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.results import LevelResult, Summary

WIDTH = 80
_LEVELS_PER_TABLE = 4

_PART_LABELS = {
    "data": "data",
    "forward": "forward",
    "forward_comm": "forward comm",
    "backward": "backward",
    "backward_comm": "backward comm",
    "exposed_wait": "exposed wait",
    "exposed_transfer": "exposed transfer",
    "exposed_copy": "exposed copy",
    "optimizer": "optimizer",
    "other": "other",
}


def render(summary: Summary, *, color: bool = False) -> str:
    """Returns the summary as text of at most 80 columns, readable without colour."""
    output = io.StringIO()
    console = Console(
        file=output,
        width=WIDTH,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for line in _heading(summary):
        console.print(Text(units.printable(line)))
    levels = summary.levels
    for start in range(0, len(levels), _LEVELS_PER_TABLE):
        console.print(_table(levels[start : start + _LEVELS_PER_TABLE]))
    for line in _footnotes(summary):
        console.print(Text(units.printable(line)))
    return output.getvalue()


def _heading(summary: Summary) -> list[str]:
    run = summary.run
    state = "" if not run.partial else "  PARTIAL: the run did not end as it should"
    settings = run.settings
    device = next(iter(run.environment.values()), {})
    first = (
        f"{settings.get('model', '?')} on {run.world_size} rank"
        f"{'s' if run.world_size > 1 else ''}, {device.get('backend', '?')}, "
        f"{device.get('device_type', '?')}, {settings.get('precision', '?')}, "
        f"{device.get('threads_per_rank', '?')} threads a rank{state}"
    )
    return [first]


def _table(levels: Sequence[LevelResult]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("ms a step", no_wrap=True)
    for level in levels:
        table.add_column(units.printable(level.id), justify="right", no_wrap=True)

    def row(label: str, cell: Callable[[LevelResult], str], style: str = "") -> None:
        table.add_row(label, *(cell(level) for level in levels), style=style)

    row(
        "micro-batch x acc. x dp",
        lambda v: f"{v.micro_batch} x {v.accumulation} x {v.dp}",
    )
    row("global batch (samples)", _batch)
    if any(level.batch_check.ranks_agree is not None for level in levels):
        row("  gradient error", _gradient_error)
    row("plain step (median)", lambda v: units.ms(v.step_ms.median if v.step_ms else None), "bold")
    row("  95 % interval", _interval)
    row("samples/s", lambda v: units.rate(v.samples_per_s))
    if any(level.efficiency is not None for level in levels):
        row("speedup / efficiency", _efficiency)
    if any(level.mfu is not None for level in levels):
        row("share of peak FLOP/s", lambda v: units.percent(v.mfu))
    if any(level.tokens_per_s is not None for level in levels):
        row("tokens/s", lambda v: units.rate(v.tokens_per_s))
    table.add_section()
    row(
        "instrumented step (mean)",
        lambda v: units.ms(v.instrumented_step_ms.mean if v.instrumented_step_ms else None),
        "bold",
    )
    for part in PARTS:
        row(f"  {_PART_LABELS[part]}", lambda v, part=part: _part(v, part))  # type: ignore[misc]
    table.add_section()
    row("comm in flight", lambda v: units.ms(v.comm.busy_ms))
    row("  hidden by backward", lambda v: units.percent(v.comm.overlap_fraction, 0))
    row("collectives / buckets", _collectives)
    row("gradients reduced", lambda v: units.nbytes(v.comm.gradient_bytes))
    row("cost of measuring", lambda v: _overhead(v)[0])
    row("  95 % interval", lambda v: _overhead(v)[1])
    return table


def _batch(level: LevelResult) -> str:
    text = str(level.global_batch)
    check = level.batch_check
    if check.ok is None:
        return f"{text} ?"
    return f"{text} ok" if check.ok else f"{text} SAW {check.observed}"


def _gradient_error(level: LevelResult) -> str:
    """Returns the error against one process that sees the whole global batch."""
    check = level.batch_check
    if check.ranks_agree is False:
        return "RANKS DIFFER"
    if check.gradient_max_rel_error is None:
        return units.NOTHING
    return f"{check.gradient_max_rel_error:.0e}"


def _efficiency(level: LevelResult) -> str:
    if level.speedup is None:
        return units.NOTHING
    return f"{level.speedup:.2f}x {units.percent(level.efficiency)}"


def _interval(level: LevelResult) -> str:
    if level.step_ms is None or level.step_ms.ci95 is None:
        return units.NOTHING
    low, high = level.step_ms.ci95
    return f"{units.ms(low)}..{units.ms(high)}"


def _part(level: LevelResult, part: str) -> str:
    value = level.breakdown_ms[part]
    step = level.instrumented_step_ms
    if value is None or step is None:
        return units.NOTHING
    return f"{units.ms(value)} {value / step.mean * 100:4.0f}%"


def _collectives(level: LevelResult) -> str:
    count, buckets = level.comm.num_gradient_collectives_per_step, level.comm.num_buckets
    if count is None or buckets is None:
        return units.NOTHING
    return f"{count:g} / {buckets}"


def _overhead(level: LevelResult) -> tuple[str, str]:
    """Returns the overhead in per cent, and its interval."""
    cost = level.overhead
    if cost is None:
        return units.NOTHING, units.NOTHING
    text = f"{cost.overhead_pct:+.1f} %"
    if cost.ci95_pct is None:
        return text, units.NOTHING
    low, high = cost.ci95_pct
    return text, f"{low:+.1f}..{high:+.1f}"


def _footnotes(summary: Summary) -> list[str]:
    lines = []
    told: dict[str, list[str]] = {}
    for level in summary.levels:
        for note in (*level.notes, *level.batch_check.notes):
            told.setdefault(note, []).append(level.id)
    for note, ids in told.items():
        everywhere = len(ids) == len(summary.levels)
        lines.append(f"{'note' if everywhere else ', '.join(ids)}: {note}")
    for level in summary.levels:
        if level.comm.unnoticed_completions:
            lines.append(
                f"{level.id}: {level.comm.unnoticed_completions} collectives were never seen to "
                "complete; their end is taken as the end of backward."
            )
    lines += [f"note: {note}" for note in summary.notes]
    for finding in summary.findings:
        lines.append(f"{finding.severity}: {finding.message} ({finding.evidence})")
    return lines
