"""A comparison as text of at most 80 columns, readable without colour."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from ddp_profiler import units
from ddp_profiler.analysis.comparability import Comparability, Difference, Kind
from ddp_profiler.analysis.compare import Comparison
from ddp_profiler.analysis.comparison import (
    CANNOT_TELL,
    NO_DIFFERENCE,
    LevelComparison,
    RowComparison,
)
from ddp_profiler.analysis.two_samples import Interval
from ddp_profiler.report.text import table_of, text_console

_NAMES_SHOWN = 3
_MOST_OF_A_VALUE = 120
_AROUND = 20
"""Characters around the difference of two values that are too long to be shown whole."""
_ENOUGH = 5
"""Launches a side that know their own spread about well."""
_WORDS = {NO_DIFFERENCE: "", CANNOT_TELL: "?"}


def render(comparison: Comparison, obstacles: Sequence[str] = (), *, color: bool = False) -> str:
    """Returns a comparison as text: what differs first, then each level, then the check.

    Args:
        comparison: What was compared.
        obstacles: Why it means little, where it was asked for all the same.
        color: Whether escapes for colour may be used.
    """
    output = io.StringIO()
    console = text_console(output, color=color)

    def say(text: str = "", style: str = "") -> None:
        console.print(Text(units.printable(text), style=style))

    for line in _differences(comparison.comparability):
        say(line)
    for line in obstacles:
        say(f"Compared all the same: {line}", "bold")
    for name, folders in (("BASE", comparison.base), ("NEW ", comparison.new)):
        say(f"{name} {_names(folders)}")
    for note in comparison.comparability.notes:
        say(f"note: {note}")
    for level in comparison.levels:
        say()
        for line in _verdict(level, mixed=bool(comparison.comparability.differ(Kind.MACHINE))):
            say(line, "bold")
        for note in level.notes:
            say(note)
        say()
        console.print(_table(level))
    say()
    for line in _closing(comparison):
        say(line)
    return output.getvalue()


def _differences(common: Comparability) -> Iterator[str]:
    machine, host = common.differ(Kind.MACHINE), common.differ(Kind.HOST)
    if machine:
        yield (
            f"DIFFERENT MACHINES: {_list(machine)}. What changed below is of the machine and of "
            "the code together."
        )
    elif host:
        yield (
            f"Different hosts of the same kind: {_list(host)}. Two of a kind need not be equally "
            "fast."
        )
    software = common.differ(Kind.SOFTWARE)
    if software:
        yield f"DIFFERENT VERSIONS: {_list(software)}."
    settings = common.differ(Kind.SETTING)
    if settings:
        yield f"Different settings: {_list(settings)}."


def _list(differences: Sequence[Difference]) -> str:
    told = ((one.name, *_shortened(one.base, one.new)) for one in differences)
    return "; ".join(f"{name} {base} -> {new}" for name, base, new in told)


def _shortened(base: str, new: str) -> tuple[str, str]:
    """Returns two long values cut to where they differ, such as arguments of a script."""
    if max(len(base), len(new)) <= _MOST_OF_A_VALUE:
        return base, new
    head = _alike(base, new)
    tail = _alike(base[head:][::-1], new[head:][::-1])
    begin, left_out = max(0, head - _AROUND), max(0, tail - _AROUND)

    def cut(value: str) -> str:
        middle = value[begin : len(value) - left_out]
        after = bool(left_out)
        if len(middle) > _MOST_OF_A_VALUE:
            middle, after = middle[:_MOST_OF_A_VALUE], True
        return f"{'...' if begin else ''}{middle}{'...' if after else ''}"

    return cut(base), cut(new)


def _alike(one: str, other: str) -> int:
    """Returns how many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _names(folders: Sequence[str]) -> str:
    if len(folders) == 1:
        return folders[0]
    shown = ", ".join(folders[:_NAMES_SHOWN])
    more = ", ..." if len(folders) > _NAMES_SHOWN else ""
    return f"{len(folders)} launches: {shown}{more}"


def _verdict(level: LevelComparison, *, mixed: bool) -> Iterator[str]:
    step = level.step
    moved = f"step {units.ms(step.base_ms)} -> {units.ms(step.new_ms)} ms"
    size = f"{_signed_pct(step.change_pct)}{_pct_interval(step)}"
    if level.verdict == CANNOT_TELL:
        yield (
            f"{level.level}: cannot tell: {moved} ({_signed_pct(step.change_pct)}); one launch a "
            "side does not show by how much launches of the same code differ"
        )
    elif level.verdict == NO_DIFFERENCE:
        yield f"{level.level}: no measurable difference: {moved}, {size}"
    else:
        yield f"{level.level}: {level.verdict.upper()}: {moved}, {size}"
        yield f"  {_cause(level)}{', with whatever the other machine changes' if mixed else ''}"
    if step.least_seen_ms is not None:
        yield (
            f"  smallest change that would have been seen (in 9 of 10 comparisons): "
            f"{units.ms(step.least_seen_ms)} ms, {_unsigned_pct(step.least_seen_pct)}"
            f"{_how_sure(step)}"
        )


def _how_sure(step: RowComparison) -> str:
    launches = len(step.base_launches_ms), len(step.new_launches_ms)
    few = max(launches) > 1 and min(launches) < _ENOUGH
    return "; a guess, from so few launches" if few else ""


def _cause(level: LevelComparison) -> str:
    changes = {part.name: part.change_ms for part in level.parts}
    if level.causes:
        named = " and ".join(
            f"{_label(name)} ({_signed(changes[name])} ms)" for name in level.causes
        )
        return f"by {named}: {units.percent(level.explained_fraction, 0)} of it"
    told = [part for part in level.parts if part.verdict == level.verdict]
    if told:
        named = ", ".join(f"{_label(p.name)} ({_signed(p.change_ms)} ms)" for p in told)
        return f"no part explains most of it; told from chance: {named}"
    return "no part's own change can be told from chance"


def _table(level: LevelComparison) -> Table:
    table = table_of(
        ("ms a step", "left"),
        ("BASE", "right"),
        ("NEW", "right"),
        ("change", "right"),
        ("interval", "right"),
        ("seen from", "right"),
        ("", "left"),
    )
    for row in (level.step, *level.parts):
        table.add_row(
            "plain step" if row is level.step else f"  {_label(row.name)}",
            units.ms(row.base_ms),
            units.ms(row.new_ms),
            _signed(row.change_ms),
            _interval(row.interval_ms),
            units.ms(row.least_seen_ms),
            _WORDS.get(row.verdict, row.verdict),
        )
        if row is level.step and (row.base_ci95_ms or row.new_ci95_ms):
            table.add_row("  95 % interval", _plain(row.base_ci95_ms), _plain(row.new_ci95_ms))
    return table


def _closing(comparison: Comparison) -> Iterator[str]:
    yield f"Statistics: {comparison.statistics_unit}."
    if comparison.one_launch:
        seen = ", ".join(
            f"{_unsigned_pct(one.launch_sd_pct)}: {_unsigned_pct(one.least_seen_pct)}"
            for one in comparison.one_launch
        )
        yield (
            "With one launch a side a change of the code cannot be told from the difference "
            "between two launches; the intervals above are of steps and do not hold it. The "
            "smallest change that could have been seen depends on how much launches of the same "
            f"code differ (standard deviation: change of the step): {seen}. Launch each side 5 "
            "times, in turns, or state what launches differ by, with --launch-sd."
        )
    else:
        rate = units.percent(comparison.error_rate, 0)
        yield (
            f"Anything at all is called a change in at most {rate} of comparisons of the same "
            "code. seen from: the smallest change that would have been called in 9 of 10 "
            "comparisons. An empty last column: no measurable difference; ?: not judged."
        )
    if comparison.check is not None:
        yield from _check(comparison)


def _check(comparison: Comparison) -> Iterator[str]:
    check = comparison.check
    if check is None:
        return
    allowed = f"--fail-above {check.fail_above_pct:g} %"
    levels = ", ".join(check.levels)
    if check.outcome == CANNOT_TELL:
        need = (
            ""
            if check.launches_needed is None
            else f" About {check.launches_needed} launches a side would tell."
        )
        yield (
            f"{allowed}: not shown to fail, and not shown to hold: {levels} may be slower by "
            f"more, and this comparison does not see that well enough.{need}"
        )
    elif check.outcome == "holds":
        yield f"{allowed}: holds at {levels}."
    else:
        yield f"{allowed}: FAILS at {levels}."


def _label(part: str) -> str:
    return part.replace("_", " ")


def _signed(value: float) -> str:
    # No -0.00.
    text = units.ms(0.0 if abs(value) < 0.005 else value)
    return text if text.startswith("-") else f"+{text}"


def _signed_pct(value: float | None) -> str:
    return units.NOTHING if value is None else f"{value:+.1f} %"


def _unsigned_pct(value: float | None) -> str:
    return units.NOTHING if value is None else f"{value:.2g} %" if value < 100 else f"{value:.0f} %"


def _pct_interval(step: RowComparison) -> str:
    if step.interval_pct is None:
        return ""
    low, high = step.interval_pct
    return f" ({low:+.1f}..{high:+.1f} %)"


def _interval(interval: Interval | None) -> str:
    return units.NOTHING if interval is None else "..".join(map(_signed, interval))


def _plain(interval: Interval | None) -> str:
    return units.NOTHING if interval is None else "..".join(map(units.ms, interval))
