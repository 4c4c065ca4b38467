"""The table and the JSON of what several ranks' traces tell together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from ddp_profiler import units
from ddp_profiler.naming import name_ranks
from ddp_profiler.report.exact import us
from ddp_profiler.report.text import ms_of_ns, table_of
from ddp_profiler.trace.across import AcrossRanks, Meetings, Waiting
from ddp_profiler.trace.analysis import TraceAnalysis
from ddp_profiler.trace.gather import TraceSet
from ddp_profiler.trace.kernels import KINDS
from ddp_profiler.trace.matching import GroupMatch
from ddp_profiler.trace.split import RankSplit
from ddp_profiler.trace.timeline import Timeline
from ddp_profiler.trace.volume import collective_bytes, group_size, transfer_rate

_RANKS_SHOWN = 32
_RATES_SHOWN = 8


# ----------------------------------------------------------------------------------------------
# JSON


def as_json(
    found: TraceSet, analysis: TraceAnalysis, timeline: Timeline | None = None
) -> dict[str, Any]:
    """Returns the part of ``trace --json`` that is of all ranks together; times in us.

    ``collectives`` is an iterator, as there may be many.
    """
    across = analysis.across
    clocks = across.clocks
    told = clocks is not None and not clocks.refused
    return {
        "collectives": iter(_collectives(found, across)),
        "clock_offsets_us": {
            str(rank): us(ns) for rank, ns in (clocks.offset_ns if clocks else {}).items()
        }
        if told
        else None,
        "clock_drift_ppm": {str(rank): ppm for rank, ppm in clocks.drift_ppm.items()}
        if clocks is not None and told
        else None,
        "clock_reference_rank": {str(rank): ref for rank, ref in clocks.reference.items()}
        if clocks is not None and told
        else None,
        "clock_residual_us": us(clocks.most_ns if clocks else None),
        "clock_residual_typical_us": us(clocks.typical_ns if clocks else None),
        "clock_collectives": clocks.num_collectives if clocks else 0,
        "across_ranks": {
            "refused_reason": across.refused or None,
            "matched": sum(len(one) for one in across.matches),
            "compared": sum(int(one.told.sum()) for one in across.meetings),
            "ranks": [_rank(split, across) for split in found.ranks],
            "late_ranks": [
                {
                    "rank": one.rank,
                    "collectives": one.joined,
                    "last": one.last,
                    "last_fraction": one.last / one.joined if one.joined else None,
                    "lag_us": us(one.lag_ns),
                    "behind_first_us": us(one.behind_ns),
                    "caused_us": us(one.caused_ns),
                    "steps": one.steps,
                    "steps_worst": one.steps_worst,
                    "steps_worst_fraction": one.steps_worst / one.steps if one.steps else None,
                    "excess_us": us(one.excess_ns),
                    "clearly": one.clearly,
                    "outliers": one.outliers,
                    "outliers_us": us(one.outlier_ns),
                }
                for one in across.lateness
            ],
        },
        "gradients": [
            {
                "rank": one.rank,
                "counted": one.counted,
                "kind": one.kind.value,
                "group": one.group,
                "group_size": one.size,
                "steps": [
                    {
                        "step": step.step,
                        "occurrence": step.occurrence,
                        "complete": step.complete,
                        "reductions": step.count,
                        "elements": step.elements,
                        "bytes": step.bytes,
                        "repeats": step.repeats,
                    }
                    for step in one.steps
                ],
            }
            for one in analysis.reductions
        ],
        "bandwidth": [
            {
                "kind": one.kind.value,
                "group": one.group,
                "group_size": one.size,
                "count": one.count,
                "bytes": one.bytes,
                "own_busbw_gb_per_s": one.own_gb_per_s,
                "busbw_gb_per_s": one.transfer_gb_per_s,
                "compared": one.compared,
            }
            for one in analysis.bandwidths
        ],
        "idle_launched_late_fraction": {
            str(rank): share for rank, share in analysis.launched_late.items()
        },
        "findings": [
            {
                "id": one.id,
                "severity": one.severity,
                "message": one.message,
                "evidence": one.evidence,
                "expected_gain_ms": one.expected_gain_ms,
                "expected_gain_pct": one.expected_gain_pct,
            }
            for one in analysis.findings
        ],
        "timeline": None
        if timeline is None
        else {
            "file": str(timeline.path),
            "events": timeline.events,
            "left_out_collectives": timeline.left_out,
            "closed_gaps_us": us(timeline.closed_gap_ns),
            "zero_ns": str(timeline.zero_ns),
        },
    }


def _rank(split: RankSplit, across: AcrossRanks) -> Mapping[str, Any]:
    steps = across.waiting.get(split.rank)
    total = across.waiting_total.get(split.rank)
    return {
        "rank": split.rank,
        "steps": [
            {
                "step": step.step.number,
                "occurrence": step.step.occurrence,
                **_waiting(steps[place] if steps else None),
            }
            for place, step in enumerate(split.steps)
        ],
        "total": _waiting(total),
    }


def _waiting(found: Waiting | None) -> Mapping[str, Any]:
    return {
        "wait_us": us(found.wait_ns if found else None),
        "transfer_us": us(found.transfer_ns if found else None),
        "exposed_wait_us": us(found.exposed_wait_ns if found else None),
        "exposed_transfer_us": us(found.exposed_transfer_ns if found else None),
        "exposed_untold_us": us(found.exposed_untold_ns if found else None),
    }


def _collectives(found: TraceSet, across: AcrossRanks) -> Iterable[Mapping[str, Any]]:
    """Yields every collective once: those that belong together, then what only one rank has."""
    by_rank = {split.rank: split for split in found.ranks}
    compared = {id(one.match): one for one in across.meetings}
    done: dict[int, list[Any]] = defaultdict(list)
    for one in across.matches:
        yield from _matched(one, compared.get(id(one)), by_rank, across)
        for column, rank in enumerate(one.ranks):
            done[rank].append(one.places[:, column])
    for split in found.ranks:
        rest = np.ones(len(split.collectives), bool)
        for places in done[split.rank]:
            rest[places] = False
        for place in np.flatnonzero(rest).tolist():
            begin, end = (
                int(times[place])
                for times in (split.collectives.begin_ns, split.collectives.end_ns)
            )
            yield {
                **_described(split, place),
                "begin_us": us(begin),
                "begin_us_by_rank": {str(split.rank): us(begin)},
                "transfer_us": None,
                "wait_us_by_rank": None,
                "last_rank": None,
                "lag_us": None,
                "last_is_clear": None,
                "matched": False,
                "duration_us_by_rank": {str(split.rank): us(end - begin)},
                "busbw_gb_per_s": None,
                "own_busbw_gb_per_s": transfer_rate(split, place, end - begin),
            }


def _matched(
    found: GroupMatch,
    meetings: Meetings | None,
    by_rank: Mapping[int, RankSplit],
    across: AcrossRanks,
) -> Iterable[Mapping[str, Any]]:
    first = by_rank[found.ranks[0]]
    splits = [by_rank[rank] for rank in found.ranks]
    lasted = np.stack(
        [
            (split.collectives.end_ns - split.collectives.begin_ns)[found.places[:, column]]
            for column, split in enumerate(splits)
        ],
        axis=1,
    )
    begins = np.stack(
        [
            split.collectives.begin_ns[found.places[:, column]]
            for column, split in enumerate(splits)
        ],
        axis=1,
    )
    for row in range(len(found)):
        place = int(found.places[row, 0])
        told = meetings is not None and bool(meetings.told[row])
        begin_ns = int(first.collectives.begin_ns[place])
        result: dict[str, Any] = {
            **_described(first, place),
            "begin_us": us(begin_ns),
            "begin_us_by_rank": {
                str(rank): us(ns)
                for rank, ns in zip(found.ranks, begins[row].tolist(), strict=True)
            },
            "transfer_us": None,
            "wait_us_by_rank": None,
            "last_rank": None,
            "lag_us": None,
            "last_is_clear": None,
            "matched": True,
            "duration_us_by_rank": {
                str(rank): us(ns)
                for rank, ns in zip(found.ranks, lasted[row].tolist(), strict=True)
            },
            "busbw_gb_per_s": None,
            "own_busbw_gb_per_s": transfer_rate(first, place, int(np.median(lasted[row]))),
        }
        if meetings is not None and across.clocks is not None and told:
            last = int(meetings.last[row])
            reference = by_rank[across.clocks.reference[found.ranks[0]]]
            zero_ns = across.clocks.zero_ns - (reference.trace.base_time_ns or 0)
            meets = bool(meetings.meets[row])
            transfer_ns = int(meetings.transfer_ns[row])
            result |= {
                "begin_us": us(int(meetings.begin_ns[row, last]) + zero_ns),
                "begin_us_by_rank": {
                    str(rank): us(ns + zero_ns)
                    for rank, ns in zip(found.ranks, meetings.begin_ns[row].tolist(), strict=True)
                },
                "transfer_us": us(transfer_ns) if meetings.whole else None,
                "wait_us_by_rank": {
                    str(rank): us(ns)
                    for rank, ns in zip(found.ranks, meetings.wait_ns[row].tolist(), strict=True)
                },
                "last_rank": found.ranks[last] if meets else None,
                "lag_us": us(int(meetings.lag_ns[row])) if meets else None,
                "last_is_clear": bool(meetings.clear[row]) if meets else None,
                "busbw_gb_per_s": transfer_rate(first, place, transfer_ns)
                if meets and meetings.whole
                else None,
            }
        yield result


def _described(split: RankSplit, place: int) -> Mapping[str, Any]:
    found, trace = split.collectives, split.trace
    columns = (found.elements, found.dtype, found.group, found.step, found.stream)
    elements, dtype, group, step, stream = (int(column[place]) for column in columns)
    return {
        "kind": KINDS[int(found.kind[place])].value,
        "index": int(found.index[place]),
        "elements": elements if elements >= 0 else None,
        "dtype": trace.dtypes[dtype] if dtype >= 0 else None,
        "bytes": collective_bytes(split, place),
        "group": trace.groups[group].label if group >= 0 else None,
        "group_size": group_size(trace, group),
        "stream": stream if stream >= 0 else None,
        "step": split.steps[step].step.number if step >= 0 else None,
        "step_occurrence": split.steps[step].step.occurrence if step >= 0 else None,
    }


# ----------------------------------------------------------------------------------------------
# Table


def lines(found: TraceSet, analysis: TraceAnalysis) -> list[str | Table]:
    """Returns what follows the split in the table: texts and tables, in order."""
    result: list[str | Table] = []
    if len(found.ranks) > 1:
        result += ["", *_across(found, analysis.across)]
    result += _volume(analysis)
    return result


def findings_lines(analysis: TraceAnalysis) -> list[str]:
    """Returns the findings as lines."""
    if not analysis.findings:
        return []
    shown = ["", "Findings"]
    for one in analysis.findings:
        shown += [f"  {one.severity}: {one.message}", f"    ({one.evidence})"]
    return shown


def timeline_line(timeline: Timeline) -> str:
    """Returns where the timeline is, and what of it was left out."""
    less = ""
    if timeline.left_out:
        less += f"; the {timeline.left_out:,} shortest collectives were left out"
    if timeline.closed_gap_ns:
        less += f"; gaps up to {timeline.closed_gap_ns / 1000:.1f} us within a part were closed"
    return f"Timeline: {timeline.path}, {timeline.events:,} events{less}. Open it in Perfetto."


def _across(found: TraceSet, across: AcrossRanks) -> list[str | Table]:
    clocks = across.clocks
    matched = sum(len(one) for one in across.matches)
    if clocks is None or clocks.refused:
        return [f"Across ranks: {matched} collectives matched; not compared. {across.refused}"]
    messages = sum(len(one) for one in across.matches if one.point_to_point)
    note = f", {messages} of them SendRecv, by their order only" if messages else ""
    head = (
        f"Across ranks: {matched} collectives matched{note}. Clocks from {clocks.num_collectives} "
        f"common ends, which agree within {_shown_us(clocks.most_ns)} us (typically "
        f"{_shown_us(clocks.typical_ns)}). Begin is when a kernel starts on its stream: what it "
        "queued for before is not in it."
    )
    given = [split.rank for split in found.ranks]
    left_out = [rank for rank in given if rank not in clocks.reference]
    if left_out:
        compared = name_ranks(rank for rank in given if rank in clocks.reference)
        head += f" All is said of {compared} only; {name_ranks(left_out)} could not be compared."
    elif found.world_size is not None and len(given) < found.world_size:
        head += " All is said of the ranks given only."
    several = len(set(clocks.reference.values())) > 1
    table = table_of(
        ("rank", "right"),
        ("clock\nus" if not several else "clock us\nagainst", "right"),
        ("exposed\nwait", "right"),
        ("exposed\ntransfer", "right"),
        ("after\nfirst", "right"),
        ("last in", "right"),
        ("lag\n(median)", "right"),
        ("others\nwaited", "right"),
        ("worst in\nsteps", "right"),
    )
    late = {one.rank: one for one in across.lateness}
    shown = [split.rank for split in found.ranks]
    if len(shown) > _RANKS_SHOWN:
        shown = sorted([one.rank for one in across.lateness][:_RANKS_SHOWN])
    for rank in shown:
        one, total = late.get(rank), across.waiting_total.get(rank)
        offset = clocks.offset_ns.get(rank)
        clock = units.NOTHING if offset is None else f"{offset / 1000:+.1f}"
        if several and offset is not None:
            clock += f" {clocks.reference[rank]}"
        table.add_row(
            str(rank),
            clock,
            ms_of_ns(total.exposed_wait_ns if total else None),
            ms_of_ns(total.exposed_transfer_ns if total else None),
            ms_of_ns(one.behind_ns if one else None),
            _share(one.last, one.joined) if one else units.NOTHING,
            ms_of_ns(one.lag_ns if one else None),
            ms_of_ns(one.caused_ns if one else None),
            f"{one.steps_worst}/{one.steps}" if one else units.NOTHING,
        )
    result: list[str | Table] = [head, table]
    if len(found.ranks) > len(shown):
        result.append(f"({len(found.ranks) - len(shown)} ranks that cost less are not shown)")
    top = [one for one in across.lateness if one.caused_ns][:3]
    if top:
        words = "; ".join(
            f"rank {one.rank}, {ms_of_ns(one.caused_ns)} ms in {_count(one.last)}" for one in top
        )
        result.append(f"Waited for most: {words}.")
    return result


def _volume(analysis: TraceAnalysis) -> list[str | Table]:
    result: list[str | Table] = []
    if analysis.reductions:
        one = analysis.reductions[0]
        complete = [step for step in one.steps if step.complete and step.count]
        steps = complete or [step for step in one.steps if step.count]
        if steps:
            counts = _range([step.count for step in steps])
            text = f"Reductions a step: {counts}"
            elements = [step.elements for step in steps if step.elements is not None]
            if len(elements) == len(steps):
                text += f", {_range(elements)} elements"
            nbytes = [step.bytes for step in steps if step.bytes is not None]
            if nbytes and len(nbytes) == len(steps):
                text += f", {units.nbytes(max(nbytes))}"
            if len(elements) < len(steps):
                text += "; sizes are not recorded"
            result += ["", f"{text} ({one.counted}, rank {one.rank})."]
    if analysis.bandwidths:
        table = table_of(
            ("busbw, GB/s", "left"),
            ("group", "left"),
            ("ranks", "right"),
            ("count", "right"),
            ("bytes", "right"),
            ("own time", "right"),
            ("transfer", "right"),
        )
        for rate in analysis.bandwidths[:_RATES_SHOWN]:
            table.add_row(
                rate.kind.value,
                units.printable(rate.group or units.NOTHING),
                str(rate.size),
                str(rate.count),
                units.nbytes(rate.bytes),
                units.rate(rate.own_gb_per_s),
                units.rate(rate.transfer_gb_per_s),
            )
        result.append(table)
    return result


def _count(number: int) -> str:
    return f"{number:,} collective{'' if number == 1 else 's'}"


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole}" if whole else units.NOTHING


def _shown_us(ns: float | None) -> str:
    return units.NOTHING if ns is None else f"{ns / 1000:.1f}"
