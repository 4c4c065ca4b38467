"""What the page says, section by section: text, charts and the tables of their numbers.

Nothing is computed here. What does not apply says in one line why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from ddp_profiler import units
from ddp_profiler.analysis.allreduce import AllReduceResult
from ddp_profiler.analysis.detail import LevelDetail
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.placement import largest
from ddp_profiler.analysis.results import LevelResult, Summary
from ddp_profiler.analysis.scaling import Pop
from ddp_profiler.predict.outlook import Outlook
from ddp_profiler.report.page import charts
from ddp_profiler.report.page.charts import Chart, part_name
from ddp_profiler.report.plots import lines_over_dp

_MOST_LEVELS = 40
"""Levels that charts show; tables have them all."""
_MOST_FINDINGS = 60
_MOST_NODES = 4
_MOST_OF_WHY = 300
"""Characters on top of the page of why a run is partial."""

_TERMS = {
    "bare": "bare model at dp 1",
    "wrapper": "DDP's wrapper",
    "slower_compute": "slower compute",
    "contention": "contention",
    "forward_comm": "forward comm",
    "backward_comm": "backward comm",
    "exposed_copy": "exposed copy",
    "data": "data",
    "optimizer": "optimizer",
    "other": "other",
    "exposed_transfer": "exposed transfer",
    "exposed_wait": "exposed wait",
    "residual": "residual",
    "measured": "measured step",
}

Cells = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Numbers: the first cell of a row is its head.

    Attributes:
        header: Heads of the columns.
        rows: Cells as text.
        title: What is shown while it is folded; empty for a table that is always open.
    """

    header: Cells
    rows: tuple[Cells, ...]
    title: str = "Numbers"


@dataclass(frozen=True)
class Figure:
    """A chart with the table of its numbers."""

    title: str
    chart: Chart
    table: Table
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Attributes:
        id: Its anchor.
        title: Its heading.
        lead: What it is about, or what it shows.
        figures: Charts with their tables.
        tables: Tables without a chart.
        notes: What a reader has to know.
        why_not: Why there is nothing; None if there is.
    """

    id: str
    title: str
    lead: str = ""
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    why_not: str | None = None


@dataclass(frozen=True)
class FindingText:
    """A finding as it is shown; ``gain`` is empty where none is expected."""

    severity: str
    message: str
    evidence: str
    gain: str


@dataclass(frozen=True)
class Content:
    """All that the page shows."""

    title: str
    verdict: str
    facts: tuple[tuple[str, str], ...]
    findings: tuple[FindingText, ...]
    findings_left_out: int
    sections: tuple[Section, ...] = field(default_factory=tuple)


def content(
    summary: Summary, details: Sequence[LevelDetail], outlook: Outlook, verdict: str
) -> Content:
    """Puts the page's content together.

    Args:
        summary: A run's.
        details: Single steps of some of its levels.
        outlook: What more ranks would bring.
        verdict: The run in one sentence.
    """
    run = summary.run
    shown = summary.findings[:_MOST_FINDINGS]
    return Content(
        title=f"{_what(summary)}: where the step time goes",
        verdict=verdict,
        facts=tuple(_facts(summary)),
        findings=tuple(
            FindingText(
                finding.severity,
                finding.message,
                finding.evidence,
                _gain(finding.expected_gain_ms, finding.expected_gain_pct),
            )
            for finding in shown
        ),
        findings_left_out=len(summary.findings) - len(shown),
        sections=(
            _step_split(summary),
            _scaling(summary, outlook),
            _waterfall(summary),
            _ranks(summary, details),
            _timeline(summary, details),
            _allreduce(summary),
            _batch(summary),
            _prediction(summary, outlook),
            _noise(summary),
            _hardware(summary),
            _micro_batches(summary),
            _overhead(summary),
            _settings(summary),
            Section(
                "notes",
                "Notes",
                f"Intervals: {run.statistics_unit}." if run.statistics_unit else "",
                notes=tuple(_notes(summary)),
            ),
        ),
    )


def _what(summary: Summary) -> str:
    settings = summary.run.settings
    return str(settings.get("script") or settings.get("model") or "training")


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    run = summary.run
    device = next(iter(run.environment.values()), {})
    yield "run", run.run_id
    if run.created:
        yield "begun", run.created
    yield "ranks", f"{run.world_size} on {_plural(run.nodes, 'node')}"
    for name in ("backend", "device_type"):
        if device.get(name) is not None:
            yield name.replace("_type", ""), str(device[name])
    if run.settings.get("precision") is not None and "script" not in run.settings:
        yield "precision", str(run.settings["precision"])
    yield "levels", _plural(len(summary.levels), "level")
    yield "status", f"{run.status}{', record partial' if run.partial else ''}"
    if run.partial_reason:
        # Beside the figures, and not only in the notes at the end: a reader has to know it first.
        # Some errors are pages long; the notes have them whole.
        why = run.partial_reason
        yield "why", why if len(why) <= _MOST_OF_WHY else f"{why[:_MOST_OF_WHY]}..."


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _gain(ms: float | None, pct: float | None) -> str:
    if ms is None:
        return ""
    return f"{units.ms(ms)} ms a step" + ("" if pct is None else f" ({pct:.0f} %)")


def _by_level(
    levels: Sequence[LevelResult], rows: Sequence[tuple[str, Callable[[LevelResult], str]]]
) -> Table:
    """Returns a table with levels as columns, without rows that say nothing of any level."""
    cells = [(name, *(cell(level) for level in levels)) for name, cell in rows]
    kept = tuple(row for row in cells if any(cell != units.NOTHING for cell in row[1:]))
    return Table(("", *(level.id for level in levels)), kept)


def _number(value: float | None, form: str = ".3g") -> str:
    return units.NOTHING if value is None else format(value, form)


def _interval(interval: tuple[float, float] | None) -> str:
    return (
        units.NOTHING if interval is None else f"{units.ms(interval[0])} to {units.ms(interval[1])}"
    )


def _instrumented(level: LevelResult) -> str:
    step = level.instrumented_step_ms
    return units.ms(step.mean if step else None)


def _step_split(summary: Summary) -> Section:
    id, title = "split", "Where the step time goes"
    levels = [level for level in summary.levels if level.instrumented_step_ms]
    chart = charts.step_split(levels[:_MOST_LEVELS])
    if chart is None:
        return Section(id, title, why_not="No instrumented step was measured.")

    def part(name: str) -> Callable[[LevelResult], str]:
        return lambda level: units.ms(level.breakdown_ms.get(name))

    table = _by_level(
        levels,
        [
            (
                "plain step, median",
                lambda lv: units.ms(lv.step_ms.median if lv.step_ms else None),
            ),
            ("95 % interval", lambda lv: _interval(lv.step_ms.ci95 if lv.step_ms else None)),
            (
                "plain step, 10 % to 90 %",
                lambda lv: _interval((lv.step_ms.p10, lv.step_ms.p90) if lv.step_ms else None),
            ),
            (
                "instrumented step, mean",
                lambda lv: units.ms(
                    lv.instrumented_step_ms.mean if lv.instrumented_step_ms else None
                ),
            ),
            *((part_name(name), part(name)) for name in PARTS),
            ("comm in flight", lambda lv: units.ms(lv.comm.busy_ms)),
            ("hidden by backward", lambda lv: units.percent(lv.comm.overlap_fraction, 0)),
            ("gradients reduced", lambda lv: units.nbytes(lv.comm.gradient_bytes)),
            ("collectives a step", lambda lv: _number(lv.comm.num_gradient_collectives_per_step)),
            ("buckets", lambda lv: _number(lv.comm.num_buckets)),
        ],
    )
    notes = []
    withheld = [lv.id for lv in levels if lv.dp > 1 and lv.breakdown_ms.get("exposed_wait") is None]
    if withheld:
        notes.append(
            f"Waiting is withheld at {', '.join(withheld)}: exposed transfer holds both there. "
            "The notes at the end say why."
        )
    if len(levels) > _MOST_LEVELS:
        notes.append(f"The chart shows {_MOST_LEVELS} of {len(levels)} levels, the table all.")
    lead = "Mean over ranks and instrumented steps, ms. Lengths compare between levels."
    return Section(
        id, title, lead, (Figure("Parts of the step", chart, table),), notes=tuple(notes)
    )


def _scaling(summary: Summary, outlook: Outlook) -> Section:
    id, title = "scaling", "Scaling"
    scaled = [lv for lv in summary.levels if lv.samples_per_s and lv.efficiency]
    if not any(level.dp > 1 for level in scaled):
        return Section(id, title, why_not=_no_scaling(summary))
    lines = lines_over_dp(scaled)
    chart = charts.scaling(lines, outlook)
    assert chart is not None
    rows: list[tuple[str, Callable[[LevelResult], str]]] = [
        ("dp", lambda lv: str(lv.dp)),
        ("nodes", lambda lv: str(lv.nodes)),
        ("global batch", lambda lv: _number(lv.global_batch, "d")),
        ("samples/s", lambda lv: units.rate(lv.samples_per_s)),
        ("tokens/s", lambda lv: units.rate(lv.tokens_per_s)),
        ("speedup", lambda lv: _number(lv.speedup, ".2f")),
        ("efficiency", lambda lv: units.percent(lv.efficiency)),
        ("compared with", lambda lv: lv.reference or units.NOTHING),
        ("crossing nodes, ms", lambda lv: units.ms(lv.crossing_ms)),
        ("its 95 % interval", lambda lv: _interval(lv.crossing_ci95_ms)),
    ]

    def factor(name: str) -> Callable[[LevelResult], str]:
        return lambda lv: units.percent(getattr(lv.pop, name) if lv.pop else None)

    rows += [(f"POP {f.name.replace('_', ' ')}", factor(f.name)) for f in fields(Pop)]
    return Section(
        id,
        title,
        "Throughput over the number of replicas. The nearer to the dotted line, the less is lost.",
        (Figure("Throughput against ideal", chart, _by_level(scaled, rows)),),
    )


def _no_scaling(summary: Summary) -> str:
    if "script" in summary.run.settings and len(summary.levels) < 2:
        return (
            "This is one launch of a script: scaling needs several. "
            "ddp-profiler study --dp 1,2,4 -- SCRIPT makes them."
        )
    if summary.run.world_size < 2:
        return "This run has one rank: scaling needs two or more."
    return "Scaling needs the throughput of a dp = 1 level and of a larger one with the same work."


def _waterfall(summary: Summary) -> Section:
    id, title = "waterfall", "Waterfall of lost time"
    complete = [
        lv
        for lv in summary.levels
        if lv.waterfall_ms
        and lv.waterfall_ms.get("bare") is not None
        and lv.waterfall_ms.get("measured") is not None
    ]
    level = largest(complete)
    if level is None or level.waterfall_ms is None:
        script = "script" in summary.run.settings
        return Section(
            id,
            title,
            why_not="A waterfall needs the model without DDP and steps without reduction, which a "
            + ("study measures and a script's run does not." if script else "dp = 1 level gives."),
        )

    def term(name: str) -> Callable[[LevelResult], str]:
        return lambda lv: units.ms(lv.waterfall_ms.get(name) if lv.waterfall_ms else None)

    table = _by_level(complete, [(name, term(key)) for key, name in _TERMS.items()])
    return Section(
        id,
        title,
        f"From the bare model at dp 1 to the step at {level.id}, ms. The residual is what the "
        "step model does not explain.",
        (
            Figure(
                f"What a step at {level.id} consists of",
                charts.waterfall(level.waterfall_ms, _TERMS),
                table,
            ),
        ),
    )


def _ranks(summary: Summary, details: Sequence[LevelDetail]) -> Section:
    id, title = "ranks", "Ranks against each other"
    levels = {level.id: level for level in summary.levels}
    figures, notes = [], []
    for detail in details:
        found, level = detail.heat_map, levels[detail.level]
        if found is None:
            continue
        late = frozenset(one.rank for one in level.stragglers)
        table = Table(
            ("rank", "own work, mean ms", "excess, mean ms", "largest excess", "in step"),
            tuple(
                (
                    str(one.rank),
                    units.ms(one.own_ms),
                    units.ms(one.excess_ms),
                    units.ms(one.largest_ms),
                    str(one.largest_step),
                )
                for one in found.ranks
            ),
        )
        said = []
        if found.steps_per_column > 1:
            said.append(f"A column is the mean over up to {found.steps_per_column} steps.")
        if len(found.rows[0]) > 1:
            said.append(
                f"A row is the slowest of up to {len(found.rows[0])} ranks, column by column."
            )
        if len(found.ranks) < sum(map(len, found.rows)):
            said.append(f"The table has the {len(found.ranks)} ranks with the largest excess.")
        figures.append(
            Figure(
                f"{level.id}: own work beyond that of the others, step by step",
                charts.heat_map(found, late),
                table,
                tuple(said),
            )
        )
        notes += [
            f"{level.id}: rank {one.rank} is late by {units.ms(one.lag_ms)} ms in "
            f"{units.percent(one.share_of_steps_fraction, 0)} of the steps "
            f"({'fixed' if one.fixed else 'passing'}), cause: {part_name(one.cause)}; "
            "marked with ▸."
            for one in level.stragglers
        ]
    if not figures:
        single = all(level.dp < 2 for level in summary.levels)
        return Section(
            id,
            title,
            why_not="One rank has nobody to be compared with."
            if single
            else "Steps of two ranks or more are needed, and the record has none.",
        )
    if not notes:
        notes.append("No rank is late often and by enough to be named as a straggler.")
    return Section(
        id,
        title,
        "Own work is a rank's step less all communication; shown is by how much it exceeds that "
        "of the lower median rank in the same step. A straggler is a row that stands out, a "
        "disturbance of one rank a spot. Each rank's own clock is enough for it.",
        tuple(figures),
        notes=tuple(notes),
    )


def _timeline(summary: Summary, details: Sequence[LevelDetail]) -> Section:
    id, title = "timeline", "A typical step, bucket by bucket"
    figures = []
    for detail in details:
        found = detail.timeline
        if found is None:
            continue
        first = found.lanes[0]
        rows = [
            (
                f"bucket {b.first}" if b.first == b.last else f"buckets {b.first}-{b.last}",
                units.nbytes(b.nbytes),
                units.ms(b.begin_ms),
                units.ms(b.end_ms) + ("" if b.noticed else " (not noticed)"),
            )
            for b in found.buckets
        ]
        rows += [
            (f"rank {lane.rank}: {part_name(p.part)}", "", units.ms(p.begin_ms), units.ms(p.end_ms))
            for lane in found.lanes
            for p in lane.phases
        ]
        said = []
        if len(found.lanes) > 1:
            said.append(
                f"Rank {first.rank} waits longest in this step; rank {found.lanes[1].rank}, below "
                "the buckets, is the one that it waits for."
            )
        if not found.told_apart:
            why = f": {detail.withheld}" if detail.withheld else ""
            said.append(f"Waiting and transfer are not told apart{why}.")
        if found.buckets and len(found.buckets) < found.collectives:
            said.append(
                f"{found.collectives} collectives are shown in {len(found.buckets)} rows of "
                "neighbours."
            )
        left_out = sum(lane.left_out for lane in found.lanes)
        if left_out:
            said.append(f"{left_out} phases of earlier micro-steps are left out.")
        if any(not bucket.noticed for bucket in found.buckets):
            said.append("Where a completion was not noticed, the end is that of backward.")
        figures.append(
            Figure(
                f"{detail.level}: step {found.step}, {units.ms(found.step_ms)} ms, the nearest to "
                f"the median of {found.steps}",
                charts.timeline(found),
                Table(("what", "bytes", "begin ms", "end ms"), tuple(rows)),
                tuple(said),
            )
        )
    if not figures:
        single = all(level.dp < 2 for level in summary.levels)
        return Section(
            id,
            title,
            why_not="One rank reduces with nobody."
            if single
            else "The record has no step in which gradients were seen to be reduced.",
        )
    return Section(
        id,
        title,
        "Each bucket from its hand-over to its completion. What lies left of the end of local "
        "backward is hidden behind computation; what lies right of it is paid for.",
        tuple(figures),
    )


def _allreduce(summary: Summary) -> Section:
    id, title = "allreduce", "AllReduce against the link"
    found: dict[str, AllReduceResult] = {}
    several = len({level.placement for level in summary.levels}) > 1
    for level in sorted(summary.levels, key=lambda lv: lv.dp):
        name = f"dp {level.dp}" + (f" {level.placement}" if several else "")
        # Levels of equal dp and placement repeat the same measurement.
        if level.allreduce and name not in found:
            found[name] = level.allreduce
    chart = charts.allreduce(found)
    if chart is None:
        why = "A script's run measures no AllReduce in isolation; a study does."
        if "script" not in summary.run.settings:
            why = (
                "No AllReduce was measured in isolation: it needs all records of two ranks or more."
            )
        return Section(id, title, why_not=why)
    rows = []
    for name, result in found.items():
        for kind, sizes in (("", result.sizes), (" (bucket)", result.buckets)):
            rows += [
                (
                    f"{name}{kind}",
                    units.nbytes(size.bytes),
                    units.ms(size.time_ms),
                    f"{units.ms(size.p10_ms)} to {units.ms(size.p90_ms)}",
                    _number(size.algbw_gb_per_s),
                    _number(size.busbw_gb_per_s),
                    units.ms(size.ring_bound_ms),
                )
                for size in sizes
            ]
    notes = []
    for name, result in found.items():
        if result.buckets_total_ms is None:
            continue
        told = (
            f"{name}: all buckets one after the other take {units.ms(result.buckets_total_ms)} ms"
        )
        if result.link is not None and result.buckets_ring_bound_ms is not None:
            told += (
                f"; the ring bound {_of(result.link.name)} ({result.link.gbit_per_s:.3g} Gbit/s, "
                f"{result.link.source}) is {units.ms(result.buckets_ring_bound_ms)} ms"
            )
        notes.append(f"{told}.")
    faster = [
        name
        for name, result in found.items()
        if any(
            size.ring_bound_ms is not None and size.time_ms < size.ring_bound_ms
            for size in (*result.sizes, *result.buckets)
        )
    ]
    if faster:
        notes.append(
            f"{', '.join(faster)}: some AllReduces were faster than the ring bound. It follows "
            "from the link's rate, which was measured at another moment, or given: read it as a "
            "rough one here."
        )
    if any(result.link is None for result in found.values()):
        notes.append("Where no link is named, its rate is not known, and there is no bound.")
    table = Table(
        (
            "ranks",
            "size",
            "median ms",
            "10 % to 90 %",
            "algbw GB/s",
            "busbw GB/s",
            "ring bound ms",
        ),
        tuple(rows),
    )
    return Section(
        id,
        title,
        "On the same ranks, with nothing beside it. The dotted line is the rate of the link, which "
        "bounds a ring.",
        (Figure("Bus bandwidth by message size", chart, table),),
        notes=tuple(notes),
    )


def _of(link: str) -> str:
    return link if link.startswith("within") else f"of {link}"


def _yes(value: bool | None) -> str:
    return units.NOTHING if value is None else "yes" if value else "NO"


def _batch(summary: Summary) -> Section:
    if not summary.levels:
        return Section("batch", "Is the batch what it should be?", why_not="Nothing was measured.")
    checks = {level.id: level.batch_check for level in summary.levels}

    def batch(value: int | None) -> str:
        return "not given" if value is None else str(value)

    table = Table(
        (
            "level",
            "micro-batch x acc. x dp",
            "declared",
            "configured",
            "observed",
            "agree",
            "gradients equal on ranks",
            "gradient error",
            "gradient factor",
        ),
        tuple(
            (
                lv.id,
                f"{lv.micro_batch or '?'} x {lv.accumulation} x {lv.dp}",
                batch(checks[lv.id].declared),
                _number(checks[lv.id].configured, "d"),
                _number(checks[lv.id].observed, "d"),
                _yes(checks[lv.id].ok),
                _yes(checks[lv.id].ranks_agree),
                _number(checks[lv.id].gradient_max_rel_error, ".0e"),
                _number(checks[lv.id].gradient_factor, ".4g"),
            )
            for lv in summary.levels
        ),
        title="",
    )
    told: dict[str, list[str]] = {}
    for level in summary.levels:
        for note in level.batch_check.notes:
            told.setdefault(note, []).append(level.id)
    return Section(
        "batch",
        "Is the batch what it should be?",
        "Samples a step over all ranks: declared by the user, configured by the settings, observed "
        "entering forward. The gradient error is against one process that sees the whole global "
        "batch, max|difference| / max|gradient|.",
        tables=(table,),
        notes=tuple(f"{', '.join(ids)}: {note}" for note, ids in told.items()),
    )


def _prediction(summary: Summary, outlook: Outlook) -> Section:
    id, title = "prediction", "What more ranks would bring"
    if outlook.why_not is not None:
        return Section(id, title, why_not=outlook.why_not)
    predicted = Table(
        ("dp", "nodes", "global batch", "step ms", "90 % interval", "samples/s", "efficiency"),
        tuple(
            (
                f"{one.dp}{' *' if one.extrapolated else ''}",
                str(one.nodes),
                str(one.global_batch),
                units.ms(one.step_ms.median),
                _interval(one.step_ms.interval90),
                units.rate(one.samples_per_s),
                units.percent(one.efficiency),
            )
            for one in outlook.predictions
        ),
        title="",
    )
    parts = Table(
        ("ms a step", *(f"dp {one.dp}" for one in outlook.predictions)),
        tuple(
            (part_name(part), *(units.ms(one.breakdown_ms[part]) for one in outlook.predictions))
            for part in PARTS
        ),
        title="Predicted parts",
    )
    tables = [predicted, parts]
    notes = []
    tests = outlook.back_tests
    if tests is not None and tests.tests:
        tables.append(
            Table(
                ("held out", "predicted ms", "90 % interval", "measured ms", "error"),
                tuple(
                    (
                        test.held_out,
                        units.ms(test.predicted_ms),
                        _interval(test.interval90),
                        units.ms(test.measured_ms),
                        f"{test.error_pct:+.1f} %",
                    )
                    for test in tests.tests
                ),
                title="",
            )
        )
        notes.append("The last table is the error: each measured level, predicted from the others.")
    elif tests is not None and tests.why_not:
        notes.append(f"The error is not known here: {tests.why_not}.")
    by_note: dict[str, list[str]] = {}
    for one in outlook.predictions:
        for note in one.notes:
            by_note.setdefault(note, []).append(str(one.dp))
    notes += [f"* dp {', '.join(dps)}: {note}" for note, dps in by_note.items()]
    return Section(
        id,
        title,
        "DDP's schedule replayed at the next doublings of dp, settings as measured at the largest.",
        tables=tuple(tables),
        notes=tuple(notes),
    )


def _noise(summary: Summary) -> Section:
    id, title = "noise", "Would a larger batch pay? (gradient noise scale)"
    scales = [(lv.id, lv.noise_scale) for lv in summary.levels if lv.noise_scale]
    known = [(name, scale) for name, scale in scales if scale.ci95 is not None]
    if not known:
        reason = next((scale.reason for _, scale in scales if scale.reason), None)
        return Section(id, title, why_not=f"Not known: {reason or 'it was not measured'}.")
    rows = []
    for name, scale in known:
        low, high = scale.ci95 or (0.0, None)
        rows.append(
            (
                name,
                units.about(scale.samples) if high is not None else f"at least {units.about(low)}",
                units.NOTHING if high is None else f"{units.about(low)} to {units.about(high)}",
                _number(scale.large_batch, "d"),
                _number(scale.doubling_gain, ".2f"),
                units.NOTHING
                if scale.doubling_gain_ci95 is None
                else f"{scale.doubling_gain_ci95[0]:.2f} to {scale.doubling_gain_ci95[1]:.2f}",
            )
        )
    table = Table(
        (
            "level",
            "noise scale, samples",
            "95 % interval",
            "global batch",
            "a step of twice the batch is worth",
            "its 95 % interval",
        ),
        tuple(rows),
        title="",
    )
    return Section(
        id,
        title,
        "Far below the noise scale a doubled global batch is worth nearly two steps, far above it "
        "nearly one.",
        tables=(table,),
        notes=tuple(f"{name}: {scale.reason}." for name, scale in known if scale.reason),
    )


def _hardware(summary: Summary) -> Section:
    id, title = "hardware", "What limits the step (roofline)"
    hardware = summary.run.hardware
    roofs = [(lv.id, lv.roofline) for lv in summary.levels if lv.roofline]
    if hardware is None and not roofs:
        script = "script" in summary.run.settings
        return Section(
            id,
            title,
            why_not="The device was not measured; a study does that, a script's run not."
            if script
            else "The device was not measured: the run ended before.",
        )
    tables = []
    if hardware is not None:
        sheet = hardware.data_sheet
        peak = sheet.flops_per_s.get(hardware.arithmetic) if sheet else None
        tables.append(
            Table(
                (hardware.name, "measured", "data sheet"),
                (
                    (
                        f"matrix products, {hardware.arithmetic}",
                        units.decimal(hardware.flops_per_s, "FLOP/s"),
                        units.decimal(peak, "FLOP/s"),
                    ),
                    (
                        "copies within memory",
                        units.decimal(hardware.memory_bytes_per_s, "B/s"),
                        units.decimal(sheet.memory_bytes_per_s if sheet else None, "B/s"),
                    ),
                    ("ridge, FLOP/byte", _number(hardware.ridge_flops_per_byte), units.NOTHING),
                    ("smallest operation, us", _number(hardware.operation_us), units.NOTHING),
                ),
                title="",
            )
        )
    if roofs:
        tables.append(
            Table(
                (
                    "level",
                    "limited by",
                    "waits for data",
                    "exposed comm",
                    "the rest, ms",
                    "least compute ms",
                    "least memory ms",
                    "share of roof",
                    "FLOP/byte",
                    "share of peak",
                ),
                tuple(
                    (
                        name,
                        "not known" if roof.bound is None else str(roof.bound.value),
                        units.percent(roof.input_fraction),
                        units.percent(roof.communication_fraction),
                        units.ms(roof.rest_ms),
                        units.ms(roof.least_compute_ms),
                        units.ms(roof.least_memory_ms),
                        units.percent(roof.roof_fraction),
                        _number(roof.flops_per_byte),
                        units.percent(next(lv.mfu for lv in summary.levels if lv.id == name)),
                    )
                    for name, roof in roofs
                ),
                title="",
            )
        )
    notes = [f"{name}: {roof.reason}." for name, roof in roofs if roof.reason]
    if hardware is not None and hardware.data_sheet_reason:
        notes.append(f"Data sheet: {hardware.data_sheet_reason}.")
    return Section(id, title, tables=tuple(tables), notes=tuple(notes))


def _micro_batches(summary: Summary) -> Section:
    id, title = "micro-batches", "Which micro-batch fits"
    found = summary.micro_batches
    if found is None:
        return Section(id, title, why_not="Not searched for; --find-micro-batch does.")
    table = Table(
        ("micro-batch", "outcome", "peak memory", "micro-step ms", "samples/s"),
        tuple(
            (
                str(point.micro_batch),
                point.outcome.replace("_", " "),
                units.nbytes(point.peak_bytes),
                units.ms(point.micro_step_ms.median if point.micro_step_ms else None),
                units.rate(point.samples_per_s),
            )
            for point in found.points
        ),
        title="",
    )
    lead = (
        "None fits."
        if found.efficient_micro_batch is None
        else f"{found.efficient_micro_batch} is the smallest within 5 % of the best speed; "
        f"{found.largest_micro_batch} is the largest that was seen to fit."
    )
    return Section(id, title, lead, tables=(table,))


def _overhead(summary: Summary) -> Section:
    id, title = "overhead", "What measuring costs"
    costs = [(lv.id, lv.overhead) for lv in summary.levels if lv.overhead]
    if not costs:
        return Section(id, title, why_not="It needs plain and instrumented blocks in turns.")
    table = Table(
        ("level", "plain ms", "instrumented ms", "cost", "95 % interval"),
        tuple(
            (
                name,
                units.ms(cost.plain_ms),
                units.ms(cost.instrumented_ms),
                f"{cost.overhead_pct:+.1f} %",
                units.NOTHING
                if cost.ci95_pct is None
                else f"{cost.ci95_pct[0]:+.1f} to {cost.ci95_pct[1]:+.1f} %",
            )
            for name, cost in costs
        ),
        title="",
    )
    return Section(id, title, "The plain step is what training costs.", tables=(table,))


def _settings(summary: Summary) -> Section:
    run = summary.run
    settings = Table(
        ("setting", "value"),
        (
            ("profiler_version", run.profiler_version),
            *((str(name), _value(value)) for name, value in run.settings.items()),
        ),
        title="Settings",
    )
    names = dict.fromkeys(name for node in run.environment.values() for name in node)
    rows = tuple((str(name), _over_nodes(run.environment, name)) for name in names)
    environment = Table(("environment", "value"), rows, title="Environment")
    return Section("settings", "Settings and environment", tables=(settings, environment))


def _over_nodes(environment: Mapping[str, Mapping[str, object]], name: str) -> str:
    """Returns a variable's values, each once, with the nodes that have it where they differ."""
    values: dict[str, list[str]] = {}
    for node, of_node in environment.items():
        if name in of_node:
            values.setdefault(_value(of_node[name]), []).append(node)
    if len(values) == 1:
        return next(iter(values))
    shown = list(values.items())[:_MOST_NODES]
    text = "; ".join(
        f"node {', '.join(nodes[:_MOST_NODES])}{' and more' if len(nodes) > _MOST_NODES else ''}: "
        f"{value}"
        for value, nodes in shown
    )
    more = len(values) - len(shown)
    return text + (f"; and {more} more values" if more else "")


def _value(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _notes(summary: Summary) -> Iterator[str]:
    yield from summary.notes
    told: dict[str, list[str]] = {}
    for level in summary.levels:
        for note in level.notes:
            told.setdefault(note, []).append(level.id)
    for note, ids in told.items():
        yield f"{', '.join(ids)}: {note}"
    for level in summary.levels:
        if level.comm.unnoticed_completions:
            yield (
                f"{level.id}: {level.comm.unnoticed_completions} collectives were never seen to "
                "complete; their end is taken as the end of backward."
            )
    for clock in summary.run.clocks[:_MOST_NODES]:
        yield (
            f"Clock of rank {clock.rank} (node {clock.node}): {clock.offset_ms:+.3f} ms from rank "
            f"0's, known to {clock.uncertainty_ms:.3f} ms."
        )
    found = summary.confirmation
    if found is not None and found.gain_ms is not None:
        yield (
            f"Confirmed at {found.level}: {found.text}: predicted gain "
            f"{units.ms(found.predicted_gain_ms)} ms a step, real gain "
            f"{units.ms(found.gain_ms)} ms ({_interval(found.ci95_ms)})."
        )
    elif found is not None:
        yield f"Not confirmed at {found.level}: {found.text}: {found.problem}."
