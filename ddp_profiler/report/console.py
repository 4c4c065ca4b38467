"""The table that a run ends with: parts as rows, levels as columns, at most 80 wide."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from rich.cells import cell_len, chop_cells
from rich.table import Table
from rich.text import Text

from ddp_profiler import units
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.results import ClockOffset, ConfirmedGain, LevelResult, Summary
from ddp_profiler.analysis.roofline import Bound, Hardware
from ddp_profiler.analysis.sampled import lateness
from ddp_profiler.analysis.scaling import Pop
from ddp_profiler.report.micro_batch import micro_batch_lines, micro_batch_table
from ddp_profiler.report.text import WIDTH, simple_table, text_console

_GAP = 2
_HEADER_LEAST = 8
_CORNER = "ms a step"
_CLOCKS_SHOWN = 4
_ROOFS_SHOWN = 3
_WINDOWS_SHOWN = 12

_WATERFALL_LABELS = {
    "bare": "bare model at dp 1",
    "wrapper": "  + DDP's wrapper",
    "slower_compute": "  + slower compute",
    "contention": "  + contention",
    "exposed_transfer": "  + exposed transfer",
    "exposed_wait": "  + exposed wait",
    "residual": "  + residual",
}
"""What the waterfall adds to the parts above, in ms; its other terms are small and in the JSON."""

_SHORT_BOUNDS = {Bound.COMMUNICATION: "comm.", Bound.NONE: "neither"}

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
    console = text_console(output, color=color)
    for line in _heading(summary):
        console.print(Text(units.printable(line)))
    for table in (*_tables(summary.levels), *map(_window_table, summary.levels)):
        if table is not None:
            console.print(table)
    if summary.micro_batches is not None:
        console.print(micro_batch_table(summary.micro_batches))
    for line in (*micro_batch_lines(summary.micro_batches), *_footnotes(summary)):
        console.print(Text(units.printable(line)))
    return output.getvalue()


def _heading(summary: Summary) -> list[str]:
    run = summary.run
    state = ""
    if run.partial:
        state = "  PARTIAL: " + (
            "a part of the record is missing"
            if run.status == "complete"
            else "the run did not end as it should"
        )
    settings = run.settings
    device = next(iter(run.environment.values()), {})
    threads = device.get("threads_per_rank", "?")
    first = (
        f"{settings.get('model', '?')} on {run.world_size} rank"
        f"{'s' if run.world_size > 1 else ''}, {device.get('backend', '?')}, "
        f"{device.get('device_type', '?')}, "
        # A script's own precision is not known.
        + ("" if "script" in settings else f"{settings.get('precision', '?')}, ")
        + f"{threads} thread{'' if threads == 1 else 's'} a rank{state}"
    )
    return [first]


@dataclass(slots=True)
class _Row:
    """A line of the table: a cell for each level."""

    label: str
    cells: list[str]
    style: str
    ends_section: bool = False


def _tables(levels: Sequence[LevelResult]) -> list[Table]:
    """Returns tables of as many levels each as fit without cutting a cell."""
    if not levels:
        return []
    rows = _rows(levels)
    headers = [units.printable(level.id) for level in levels]
    # Only headers may be broken.
    widths = [
        max(min(cell_len(header), _HEADER_LEAST), *(cell_len(row.cells[index]) for row in rows))
        for index, header in enumerate(headers)
    ]
    room = WIDTH - max(cell_len(_CORNER), *(cell_len(row.label) for row in rows))
    tables = []
    begin = 0
    while begin < len(levels):
        end, left = begin + 1, room - _GAP - widths[begin]
        while end < len(levels) and left >= _GAP + widths[end]:
            left -= _GAP + widths[end]
            end += 1
        tables.append(_table(rows, headers, widths, range(begin, end), left))
        begin = end
    return tables


def _table(
    rows: Sequence[_Row], headers: Sequence[str], widths: Sequence[int], part: range, left: int
) -> Table:
    """Returns the table of some levels; ``left`` columns are free for long headers."""
    columns = {index: widths[index] for index in part}
    if left < 0:  # A single level is wider than the screen: its cells are broken too.
        columns[part[0]] += left
    for _ in range(left):
        # To the header that lacks most.
        index = max(part, key=lambda i: cell_len(headers[i]) - columns[i])
        if cell_len(headers[index]) <= columns[index]:
            break
        columns[index] += 1
    table = simple_table()
    table.add_column(_CORNER, no_wrap=True)
    for index, width in columns.items():
        header = Text("\n".join(_broken(headers[index], width)))
        table.add_column(header, justify="right", width=width, overflow="fold")
    for row in rows:
        cells = (Text(row.cells[index]) for index in part)
        table.add_row(row.label, *cells, style=row.style, end_section=row.ends_section)
    return table


def _window_table(level: LevelResult) -> Table | None:
    """Returns the windows of a level, those with the longest steps where there are many."""
    windows = level.windows
    if len(windows) < 2:
        return None
    longest = sorted(windows, key=lambda w: -(w.step_ms or 0.0))[:_WINDOWS_SHOWN]
    shown = [window for window in windows if window in longest]
    table = simple_table()
    few = len(shown) == len(windows)
    header = f"{len(windows)} windows" if few else f"slowest {len(shown)} of {len(windows)} windows"
    table.add_column(f"{header} of {units.printable(level.id)}")
    table.add_column("plain step", justify="right", no_wrap=True)
    table.add_column("late (ms)")
    for window in shown:
        table.add_row(
            f"steps {window.first_step} to {window.last_step}",
            units.ms(window.step_ms),
            lateness(window) or units.NOTHING,
        )
    return table


def _broken(text: str, width: int) -> list[str]:
    """Returns the lines of a header, broken after hyphens where that is enough."""
    lines = [""]
    for piece in text.replace("-", "-\n").split("\n"):
        if cell_len(lines[-1] + piece) <= width:
            lines[-1] += piece
        else:
            lines += chop_cells(piece, width)
    return [line for line in lines if line]


def _rows(levels: Sequence[LevelResult]) -> list[_Row]:
    rows: list[_Row] = []

    def row(label: str, cell: Callable[[LevelResult], str], style: str = "") -> None:
        rows.append(_Row(label, [cell(level) for level in levels], style))

    row(
        "micro-batch x acc. x dp",
        lambda v: f"{_known(v.micro_batch)} x {v.accumulation} x {v.dp}",
    )
    row("global batch (samples)", _batch)
    checks = [level.batch_check for level in levels]
    if any(
        check.ranks_agree is not None or check.gradient_max_rel_error is not None
        for check in checks
    ):
        row("  gradient error", _gradient_error)
    row("plain step (median)", lambda v: units.ms(v.step_ms.median if v.step_ms else None), "bold")
    row("  95 % interval", _interval)
    if any(level.crossing_ms is not None for level in levels):
        row("  of it crossing nodes", _crossing)
    row("samples/s", lambda v: units.rate(v.samples_per_s))
    if any(level.efficiency is not None for level in levels):
        row("speedup / efficiency", _efficiency)
    if any(level.mfu is not None for level in levels):
        row("share of peak FLOP/s", lambda v: units.percent(v.mfu))
    if any(_share_of_sheet(level) is not None for level in levels):
        row("  of the data sheet's", lambda v: units.percent(_share_of_sheet(v)))
    if any(level.tokens_per_s is not None for level in levels):
        row("tokens/s", lambda v: units.rate(v.tokens_per_s))
    if any(level.roofline for level in levels):
        row("roofline", _bound)
    if any(level.noise_scale and level.noise_scale.ci95 for level in levels):
        row("noise scale (samples)", lambda v: _noise_scale(v)[0])
        row("  95 % interval", lambda v: _noise_scale(v)[1])
    rows[-1].ends_section = True
    row(
        "instrumented step (mean)",
        lambda v: units.ms(v.instrumented_step_ms.mean if v.instrumented_step_ms else None),
        "bold",
    )
    for part in PARTS:
        row(f"  {_PART_LABELS[part]}", lambda v, part=part: _part(v, part))  # type: ignore[misc]
    rows[-1].ends_section = True
    if any(level.straggler for level in levels):
        row("straggler (lag)", _straggler)
    row("comm in flight", lambda v: units.ms(v.comm.busy_ms))
    row("  hidden by backward", lambda v: units.percent(v.comm.overlap_fraction, 0))
    row("collectives / buckets", _collectives)
    row("gradients reduced", lambda v: units.nbytes(v.comm.gradient_bytes))
    if any(level.allreduce for level in levels):
        row("buckets alone, one by one", _buckets_alone)
        for name in _link_names(levels):
            row(f"ring bound ({name})", lambda v, name=name: _ring_bound(v, name))  # type: ignore[misc]
        if _link_names(levels):
            row("  link's rate", _link_rate)
            if any(_declared_link(level) for level in levels):
                row("  source of the rate", _link_source)
        row("AllReduce busbw, best", _best_busbw)
    row("cost of measuring", lambda v: _overhead(v)[0])
    row("  95 % interval", lambda v: _overhead(v)[1])
    if any(level.waterfall_ms for level in levels if level.dp > 1):
        rows[-1].ends_section = True
        for term, label in _WATERFALL_LABELS.items():
            row(label, lambda v, term=term: _fall(v, term))  # type: ignore[misc]
    if any(level.pop for level in levels if level.dp > 1):
        rows[-1].ends_section = True
        for factor in fields(Pop):
            label = factor.name.removesuffix("_efficiency").replace("_", " ")
            row(
                f"POP {label}",
                lambda v, name=factor.name: units.percent(  # type: ignore[misc]
                    getattr(v.pop, name) if v.pop else None
                ),
            )
    return rows


def _clock_line(clock: ClockOffset) -> str:
    drift = (
        ""
        if clock.drift_ppm is None or clock.drift_uncertainty_ppm is None
        else f", drift {clock.drift_ppm:+.0f} +- {clock.drift_uncertainty_ppm:.0f} ppm"
    )
    return (
        f"clock of rank {clock.rank} (node {clock.node}): {clock.offset_ms:+.3f} "
        f"+- {clock.uncertainty_ms:.3f} ms from rank 0's{drift}"
    )


def _straggler(level: LevelResult) -> str:
    late = level.straggler
    return units.NOTHING if late is None else f"rank {late.rank} {units.ms(late.lag_ms)}"


def _fall(level: LevelResult, term: str) -> str:
    return units.ms(level.waterfall_ms[term] if level.waterfall_ms else None)


def _buckets_alone(level: LevelResult) -> str:
    return units.ms(level.allreduce.buckets_total_ms if level.allreduce else None)


def _link_names(levels: Sequence[LevelResult]) -> list[str]:
    """Returns the names of the levels' links, each once."""
    links = (level.allreduce.link for level in levels if level.allreduce)
    return list(dict.fromkeys(link.name for link in links if link))


def _ring_bound(level: LevelResult, name: str) -> str:
    result = level.allreduce
    if result is None or result.link is None or result.link.name != name:
        return units.NOTHING
    return units.ms(result.buckets_ring_bound_ms)


def _link_rate(level: LevelResult) -> str:
    link = level.allreduce.link if level.allreduce else None
    return f"{_three_digits(link.gbit_per_s)} Gbit/s" if link else units.NOTHING


def _three_digits(value: float) -> str:
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def _declared_link(level: LevelResult) -> bool:
    link = level.allreduce.link if level.allreduce else None
    return link is not None and link.source == "declared"


def _link_source(level: LevelResult) -> str:
    link = level.allreduce.link if level.allreduce else None
    return link.source if link else units.NOTHING


def _best_busbw(level: LevelResult) -> str:
    if level.allreduce is None:
        return units.NOTHING
    sizes = (*level.allreduce.sizes, *level.allreduce.buckets)
    best = max(sizes, key=lambda size: size.busbw_gb_per_s, default=None)
    return units.NOTHING if best is None else f"{best.busbw_gb_per_s:.2f} GB/s"


def _batch(level: LevelResult) -> str:
    check, configured = level.batch_check, _known(level.global_batch)
    if check.ok is None:
        return configured if level.global_batch is None else f"{configured} ?"
    if check.ok:
        return f"{configured} ok"
    # First of all the user's own word.
    wrong = check.declared is not None and check.declared != check.observed
    return f"{check.declared if wrong else configured} SAW {check.observed}"


def _share_of_sheet(level: LevelResult) -> float | None:
    return level.roofline.data_sheet_flops_fraction if level.roofline else None


def _bound(level: LevelResult) -> str:
    """Returns what limits the step, and how near the rest of it is to that roof."""
    roof = level.roofline
    if roof is None or roof.bound is None:
        return units.NOTHING
    short = _SHORT_BOUNDS.get(roof.bound, roof.bound.value)
    share = {
        Bound.INPUT: roof.input_fraction,
        Bound.COMMUNICATION: roof.communication_fraction,
    }.get(roof.bound, roof.roof_fraction)
    return f"{short} {units.percent(share, 0)}"


def _hardware_lines(hardware: Hardware | None) -> list[str]:
    """Returns what the device reaches, and its data sheet."""
    if hardware is None:
        return []
    ridge = hardware.ridge_flops_per_byte
    lines = [
        f"{hardware.name} reaches {units.decimal(hardware.flops_per_s, 'FLOP/s')} in products "
        f"({hardware.arithmetic}) and {units.decimal(hardware.memory_bytes_per_s, 'B/s')} in "
        "copies (measured on rank "
        f"{hardware.rank})" + ("" if ridge is None else f"; ridge at {ridge:.3g} FLOP/byte") + "."
    ]
    sheet = hardware.data_sheet
    if sheet is not None:
        peak = sheet.flops_per_s.get(hardware.arithmetic)
        lines.append(
            f"data sheet of {sheet.part}: {units.decimal(peak, 'FLOP/s')}, "
            f"{units.decimal(sheet.memory_bytes_per_s, 'B/s')}"
            + (f"; {hardware.data_sheet_reason}" if hardware.data_sheet_reason else "")
            + "."
        )
    elif hardware.data_sheet_reason:
        lines.append(f"no data sheet for this device: {hardware.data_sheet_reason}.")
    return lines


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)


def _gradient_error(level: LevelResult) -> str:
    """Returns the error against one process that sees the whole global batch."""
    check = level.batch_check
    if check.ranks_agree is False:
        return "RANKS DIFFER"
    if check.gradient_max_rel_error is None:
        return "ranks agree" if check.ranks_agree else units.NOTHING
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


def _crossing(level: LevelResult) -> str:
    """Returns the price of crossing nodes and its share of the step."""
    if level.crossing_ms is None or level.crossing_fraction is None:
        return units.NOTHING
    interval = level.crossing_ci95_ms
    if interval is not None and interval[0] <= 0 <= interval[1]:
        return "not measurable"
    return f"{units.ms(level.crossing_ms)} {level.crossing_fraction * 100:4.0f}%"


def _noise_scale(level: LevelResult) -> tuple[str, str]:
    """Returns the noise scale, or what it is at least, and its interval."""
    scale = level.noise_scale
    if scale is None or scale.ci95 is None:
        return units.NOTHING, units.NOTHING
    low, high = scale.ci95
    if high is None:
        return f">= {units.about(low)}", units.NOTHING
    return units.about(scale.samples), f"{units.about(low)}..{units.about(high)}"


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


def _confirmation(found: ConfirmedGain | None) -> list[str]:
    if found is None:
        return []
    low, high = found.predicted_interval90_ms
    said = f"{found.level}: {found.text}: predicted gain {units.ms(found.predicted_gain_ms)} ms "
    said += f"a step ({units.ms(low)} to {units.ms(high)})"
    if found.gain_ms is None:
        return [f"not confirmed: {said}; {found.problem}"]
    real = f"real gain {units.ms(found.gain_ms)} ms"
    if found.ci95_ms is not None:
        real += f" ({units.ms(found.ci95_ms[0])} to {units.ms(found.ci95_ms[1])})"
    share = found.gain_ms / found.before_ms if found.before_ms else None
    off = "" if found.error_pct is None else f"; the prediction is off by {found.error_pct:+.1f} %"
    # Above 0 for certain, or not.
    word = "confirmed" if found.error_pct is not None and found.gain_ms > 0 else "not confirmed"
    return [
        f"{word}: {said}, {real}, {units.percent(share, 0)} of {units.ms(found.before_ms)} ms{off}"
    ]


def _footnotes(summary: Summary) -> list[str]:
    lines = _hardware_lines(summary.run.hardware)
    roofs = [(level.id, level.roofline) for level in summary.levels if level.roofline]
    lines += [f"{level} roofline: {roof.reason}." for level, roof in roofs[:_ROOFS_SHOWN]]
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
    lines += [_clock_line(clock) for clock in summary.run.clocks[:_CLOCKS_SHOWN]]
    if len(summary.run.clocks) > _CLOCKS_SHOWN:
        lines.append(f"... and {len(summary.run.clocks) - _CLOCKS_SHOWN} more clocks")
    lines += [f"note: {note}" for note in summary.notes]
    lines += _confirmation(summary.confirmation)
    for finding in summary.findings:
        lines.append(f"{finding.severity}: {finding.message} ({finding.evidence})")
    return lines
