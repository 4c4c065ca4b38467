"""The table and the JSON of a run's traces of torch.profiler, beside our record of the steps."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from rich.table import Table
from rich.text import Text

from ddp_profiler import units
from ddp_profiler.report import exact, traces
from ddp_profiler.report.exact import us
from ddp_profiler.report.text import simple_table, text_console
from ddp_profiler.trace.analysis import TraceAnalysis
from ddp_profiler.trace.compared import Captured, CapturedLevel, Compared, View
from ddp_profiler.trace.timeline import Timeline


def as_json(
    captured: Captured, analyses: Sequence[TraceAnalysis], timeline: Timeline | None = None
) -> dict[str, Any]:
    """Returns the content of ``trace RUN --json``; times in us.

    Args:
        captured: The run's traces.
        analyses: What each level's tell together.
        timeline: What was written for Perfetto.
    """
    return cast(dict[str, Any], exact.whole(_content(captured, analyses, timeline)))


def json_pieces(
    captured: Captured, analyses: Sequence[TraceAnalysis], timeline: Timeline | None = None
) -> Iterator[str]:
    """Yields the text of ``trace RUN --json`` as it is made: times have all their digits.

    Args:
        captured: The run's traces.
        analyses: What each level's tell together.
        timeline: What was written for Perfetto.
    """
    yield from exact.pieces(_content(captured, analyses, timeline))
    yield "\n"


def _content(
    captured: Captured, analyses: Sequence[TraceAnalysis], timeline: Timeline | None
) -> dict[str, Any]:
    return {
        "levels": (
            {"level": level.level, **traces.content(level.found, analysis, timeline)}
            for level, analysis in zip(captured.levels, analyses, strict=True)
        ),
        "levels_without_traces": list(captured.without),
        "compared": [
            _compared_json(level, one) for level in captured.levels for one in level.compared
        ],
    }


def _compared_json(level: CapturedLevel, one: Compared) -> Mapping[str, Any]:
    return {
        "level": level.level,
        "rank": one.rank,
        "ours": _view_json(one.ours),
        "theirs": None if one.theirs is None else _view_json(one.theirs),
        "difference_pct": one.difference_pct,
        "steps": [
            {"step": step.step, "ours": _view_json(step.ours), "theirs": _view_json(step.theirs)}
            for step in one.steps
        ],
        "notes": list(one.notes),
    }


def _view_json(view: View) -> Mapping[str, Any]:
    return {
        "in_flight_us": us(view.in_flight_ns),
        "collectives": view.collectives,
        "bytes": view.bytes,
    }


def render(
    captured: Captured,
    analyses: Sequence[TraceAnalysis],
    timeline: Timeline | None = None,
    *,
    color: bool = False,
) -> str:
    """Returns a section for each level, as text of at most 80 columns.

    Args:
        captured: The run's traces.
        analyses: What each level's tell together.
        timeline: What was written for Perfetto.
        color: Whether to use colour.
    """
    sections = []
    for level, analysis in zip(captured.levels, analyses, strict=True):
        output = io.StringIO()
        console = text_console(output, color=color)
        console.print(Text(units.printable(f"Level {level.level}, under torch.profiler"), "bold"))
        sections += [output.getvalue()]
        sections += [traces.render(level.found, analysis, timeline, color=color)]
        output.seek(0)
        output.truncate()
        if level.compared:
            console.print(
                Text(
                    "\nThe same steps in our own record and in torch.profiler's (theirs). Gradient "
                    "collectives in flight in ms a step; numbers and bytes of all these steps."
                )
            )
            console.print(_table(level.compared))
            for note, ranks in _notes(level.compared).items():
                console.print(Text(units.printable(f"{units.ranks(ranks)}: {note}")))
        else:
            console.print(Text("\nOur own record of these steps is not here: no comparison."))
        sections += [output.getvalue(), "\n"]
    if captured.without:
        sections.append(f"No traces of level {', '.join(map(units.printable, captured.without))}\n")
    return "".join(sections).rstrip("\n") + "\n"


def _table(compared: Sequence[Compared]) -> Table:
    table = simple_table()
    for header in (
        "rank",
        "steps",
        "in flight\nours",
        "in flight\ntheirs",
        "differ-\nence",
        "collectives\nours, theirs",
        "bytes\nours, theirs",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for one in compared:
        number = max(1, len(one.steps))
        theirs = one.theirs
        table.add_row(
            str(one.rank),
            str(len(one.steps)),
            units.ms(one.ours.in_flight_ns / number / 1e6 if one.steps else None),
            units.ms(None if theirs is None else theirs.in_flight_ns / number / 1e6),
            units.NOTHING if one.difference_pct is None else f"{one.difference_pct:+.1f} %",
            _both(one, lambda view: str(view.collectives)),
            _both(one, lambda view: units.nbytes(view.bytes)),
        )
    return table


def _both(one: Compared, text: Callable[[View], str]) -> str:
    ours = text(one.ours) if one.steps else units.NOTHING
    return f"{ours}, {units.NOTHING if one.theirs is None else text(one.theirs)}"


def _notes(compared: Sequence[Compared]) -> Mapping[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in compared:
        for note in one.notes:
            found.setdefault(note, []).append(one.rank)
    return found
