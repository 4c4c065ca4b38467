"""An examination as text of at most 80 columns, readable without colour."""

from __future__ import annotations

import io
import textwrap

from rich.text import Text

from ddp_profiler import units
from ddp_profiler.doctor.examination import Examination
from ddp_profiler.doctor.verdict import Status, Verdict
from ddp_profiler.report.text import WIDTH, text_console

_MARKS: dict[Status, str] = {
    "ok": "ok",
    "warning": "WARNING",
    "error": "ERROR",
    "not applicable": "-",
}
_STYLES: dict[Status, str] = {"warning": "yellow", "error": "bold red", "not applicable": "dim"}
_INDENT = 10


def render(examination: Examination, *, color: bool = False) -> str:
    """Returns the verdicts topic by topic, and what they amount to."""
    output = io.StringIO()
    console = text_console(output, color=color)
    ranks, nodes = examination.ranks, examination.nodes
    of = "" if nodes is None else f" of a run on {nodes} node{'' if nodes == 1 else 's'}"
    console.print(
        f"{units.printable(examination.hostname)}, for {ranks} rank{'' if ranks == 1 else 's'} "
        f"({examination.ranks_from}){of}"
    )
    for section in examination.sections:
        console.print(f"\n{section.topic}", style="bold")
        for verdict in section.verdicts:
            for line in _lines(verdict):
                console.print(Text(line, style=_STYLES.get(verdict.status, "")), soft_wrap=True)
    console.print(f"\n{_sum(examination)}")
    return output.getvalue()


def _lines(verdict: Verdict) -> list[str]:
    lines = _wrapped(f"  {_MARKS[verdict.status]}", verdict.message)
    if verdict.remedy is not None:
        lines += _wrapped("       ->", verdict.remedy)
    if verdict.source is not None:
        # In one piece, so that it can be copied.
        lines.append(verdict.source.rjust(min(WIDTH, _INDENT + len(verdict.source))))
    return lines


def _wrapped(before: str, text: str) -> list[str]:
    return textwrap.wrap(
        units.printable(text),
        WIDTH,
        initial_indent=before.ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
    )


def _sum(examination: Examination) -> str:
    counts = examination.counts

    def many(count: int, word: str) -> str:
        return f"{count} {word}{'' if count == 1 else 's'}"

    text = (
        f"{counts['ok']} ok, {many(counts['warning'], 'warning')}, "
        f"{many(counts['error'], 'error')}, {counts['not applicable']} not applicable"
    )
    return text if examination.can_run else f"{text}: a run cannot start"
