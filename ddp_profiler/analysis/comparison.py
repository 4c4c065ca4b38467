"""Two sides of launches against each other: did the step change, and in which part?

A launch is the unit of repetition, since launches of the same code differ by more than steps
do. Each launch gives one figure for the step and one for each part; the two sides' figures are
compared by Welch's t, and what is called a change is corrected over all levels and parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.two_samples import (
    Interval,
    Judged,
    Samples,
    holm,
    over_launches,
    samples,
)

ERROR_RATE = 0.01
"""Comparisons of the same code in which anything at all is called a change. Lower than the usual
5 %, since a build that compares each change would else fail for nothing every other week."""

POWER = 0.9
"""Of the least change that would have been seen: it is seen in so many comparisons."""

STEP = "step"
EXPOSED_COMM = "exposed_comm"
"""Exposed wait and transfer together, where a launch could not tell them apart."""

SLOWER = "slower"
FASTER = "faster"
NO_DIFFERENCE = "no measurable difference"
CANNOT_TELL = "cannot tell"

Key = TypeVar("Key", bound=Hashable)

_MOST = 0.5
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class LaunchFigures:
    """What one launch says about one level, in ms.

    Attributes:
        step_ms: Median plain step.
        parts_ms: Mean of each part over ranks and instrumented steps; None where not known.
        step_ci95_ms: Interval of the median within the launch; None where not known.
        parts_ci95_ms: Intervals of the means within the launch, as far as known.
        late: Who made the others wait, as (rank, part); None where nobody stood out.
    """

    step_ms: float
    parts_ms: Mapping[str, float | None]
    step_ci95_ms: Interval | None = None
    parts_ci95_ms: Mapping[str, Interval | None] | None = None
    late: tuple[int, str] | None = None


@dataclass(frozen=True)
class RowComparison:
    """The step, or one of its parts, on both sides.

    Attributes:
        name: ``step`` or a part.
        base_ms: Mean over the launches of BASE.
        new_ms: Mean over the launches of NEW.
        base_ci95_ms: Interval of ``base_ms``: over launches, or within the only one.
        new_ci95_ms: The same of ``new_ms``.
        change_ms: new_ms - base_ms.
        change_pct: change_ms as a share of base_ms, in per cent; None where that is 0.
        interval_ms: Interval of change_ms, at ``interval_confidence``.
        interval_pct: Interval of change_pct, by Fieller; None where it has no limits.
        interval_confidence: Of a judged row the one that correction over levels and parts
            leaves to it, so that the interval holds 0 where no change is called; else 0.95.
        p_value: Of Welch's t, two-sided; None where it cannot be judged.
        p_adjusted: Corrected over levels and parts; a change is called at ERROR_RATE.
        verdict: ``slower``, ``faster``, ``no measurable difference`` or ``cannot tell``.
        least_seen_ms: The smallest change that would have been called in 9 of 10 comparisons.
        least_seen_pct: The same as a share of base_ms, in per cent.
        base_launches_ms: Each launch of BASE.
        new_launches_ms: Each launch of NEW.
    """

    name: str
    base_ms: float
    new_ms: float
    base_ci95_ms: Interval | None
    new_ci95_ms: Interval | None
    change_ms: float
    change_pct: float | None
    interval_ms: Interval | None
    interval_pct: Interval | None
    interval_confidence: float | None
    p_value: float | None
    p_adjusted: float | None
    verdict: str
    least_seen_ms: float | None
    least_seen_pct: float | None
    base_launches_ms: tuple[float, ...]
    new_launches_ms: tuple[float, ...]


@dataclass(frozen=True)
class LevelComparison:
    """One level on both sides.

    Attributes:
        level: Id of the level; both where they differ.
        step: The step.
        parts: Its parts, in their order; those that are 0 everywhere are left out.
        causes: The fewest parts, the largest first, whose own changes are told from chance, go
            the step's way and together make most of its change; empty where there are none, or
            where the step did not change.
        explained_fraction: Their changes / the step's; None without causes.
        notes: What a reader has to know about this level.
    """

    level: str
    step: RowComparison
    parts: tuple[RowComparison, ...]
    causes: tuple[str, ...]
    explained_fraction: float | None
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """That of the step."""
        return self.step.verdict


@dataclass(frozen=True)
class Check:
    """Whether a step became slower by more than the user allows.

    Attributes:
        fail_above_pct: What is allowed, in per cent.
        outcome: ``fails``: some level is measurably slower, and by more than that. ``holds``:
            the intervals of all levels lie below it. Else ``cannot tell``.
        levels: The levels that decide.
        launches_needed: About how many launches a side would tell; None where not known.
    """

    fail_above_pct: float
    outcome: str
    levels: tuple[str, ...]
    launches_needed: int | None = None


def compare_levels(
    base: Mapping[str, Sequence[LaunchFigures]],
    new: Mapping[str, Sequence[LaunchFigures]],
    launch_sd_fraction: float | None = None,
) -> tuple[LevelComparison, ...]:
    """Compares the levels that both sides have.

    With two or more launches on both sides: Welch's t (1947) of the launches' figures. With one
    on one side its launches are taken to vary like the other's. With one on each, only the step
    is judged, and only under an assumed ``launch_sd_fraction``.

    Half of ERROR_RATE is for the steps of all levels, half for all parts, each shared out by
    Holm's rule (1979), which holds whatever the parts have to do with each other.

    Args:
        base: Launches of BASE by level.
        new: The same of NEW.
        launch_sd_fraction: How much launches of the same code differ, as standard deviation /
            mean; used only where each side has one launch.

    Returns:
        One entry a level, in the order of ``base``.
    """
    pairs = {level: _alike(base[level], new[level]) for level in base if level in new}
    steps: dict[str, _Row] = {}
    parts: dict[tuple[str, str], _Row] = {}
    for level, (b, n) in pairs.items():
        steps[level] = _row(
            STEP, [x.step_ms for x in b], [x.step_ms for x in n], launch_sd_fraction
        )
        for part in _parts_of([*b, *n]):
            # An assumption about the step says nothing about its parts.
            parts[level, part] = _row(part, _values(b, part), _values(n, part), None)
    judged_steps, judged_parts = _judge(steps), _judge(parts)
    result = []
    for level, (b, n) in pairs.items():
        within = [x.step_ci95_ms for x in (*b, *n)]
        step = _finished(steps[level], judged_steps.get(level), within)
        own = tuple(
            _finished(row, judged_parts.get((of, part)), [_within(x, part) for x in (*b, *n)])
            for (of, part), row in parts.items()
            if of == level
        )
        causes, share = _causes(step, own)
        result.append(LevelComparison(level, step, own, causes, share, _late_notes(b, n)))
    return tuple(result)


def check(levels: Sequence[LevelComparison], fail_above_pct: float) -> Check:
    """Tells whether a level became slower by more than ``fail_above_pct`` per cent.

    Args:
        levels: The comparison.
        fail_above_pct: What is allowed, 0 or more.
    """
    failing = [
        one.level
        for one in levels
        if one.verdict == SLOWER and (one.step.change_pct or 0.0) > fail_above_pct
    ]
    if failing:
        return Check(fail_above_pct, "fails", tuple(failing))
    open_ones = [one for one in levels if not _below(one.step, fail_above_pct)]
    if not open_ones:
        return Check(fail_above_pct, "holds", tuple(one.level for one in levels))
    return Check(
        fail_above_pct,
        CANNOT_TELL,
        tuple(one.level for one in open_ones),
        _launches_needed([one.step for one in open_ones], fail_above_pct),
    )


def _below(step: RowComparison, fail_above_pct: float) -> bool:
    if step.verdict == CANNOT_TELL or step.interval_pct is None:
        return False
    return step.interval_pct[1] <= fail_above_pct


def _launches_needed(steps: Sequence[RowComparison], pct: float) -> int | None:
    """Returns about how many launches a side would show a change of ``pct`` per cent."""
    counts = []
    for step in steps:
        numbers = len(step.base_launches_ms), len(step.new_launches_ms)
        if min(numbers) < 2 or step.least_seen_pct is None or pct <= 0:
            return None
        mean = 2 / (1 / numbers[0] + 1 / numbers[1])
        counts.append(max(3, math.ceil(mean * (step.least_seen_pct / pct) ** 2)))
    return max(counts, default=None)


def _alike(
    base: Sequence[LaunchFigures], new: Sequence[LaunchFigures]
) -> tuple[list[LaunchFigures], list[LaunchFigures]]:
    """Puts exposed wait and transfer together in all launches, where one of them had to."""
    if _all_know([*base, *new], "exposed_wait"):
        return list(base), list(new)
    return [_joined(one) for one in base], [_joined(one) for one in new]


def _joined(one: LaunchFigures) -> LaunchFigures:
    waited, moved = one.parts_ms.get("exposed_wait"), one.parts_ms.get("exposed_transfer")
    parts = {k: v for k, v in one.parts_ms.items() if k not in ("exposed_wait", "exposed_transfer")}
    parts[EXPOSED_COMM] = None if moved is None else moved + (waited or 0.0)
    return replace(one, parts_ms=parts)


def _all_know(figures: Sequence[LaunchFigures], part: str) -> bool:
    return all(one.parts_ms.get(part) is not None for one in figures)


def _parts_of(figures: Sequence[LaunchFigures]) -> list[str]:
    """Returns the parts that all launches know and that are not 0 in all of them."""
    place = PARTS.index("exposed_copy")
    return [
        part
        for part in (*PARTS[:place], EXPOSED_COMM, *PARTS[place:])
        if _all_know(figures, part) and any(one.parts_ms[part] for one in figures)
    ]


def _values(figures: Sequence[LaunchFigures], part: str) -> list[float]:
    return [one.parts_ms[part] or 0.0 for one in figures]


def _within(one: LaunchFigures, part: str) -> Interval | None:
    return (one.parts_ci95_ms or {}).get(part)


@dataclass(frozen=True)
class _Row:
    """A figure of both sides before it is judged; ``samples`` is None where it cannot be."""

    name: str
    base: tuple[float, ...]
    new: tuple[float, ...]
    samples: Samples | None


def _row(name: str, base: Sequence[float], new: Sequence[float], sd_fraction: float | None) -> _Row:
    return _Row(name, tuple(base), tuple(new), samples(np.array(base), np.array(new), sd_fraction))


def _judge(rows: Mapping[Key, _Row]) -> dict[Key, Judged]:
    """Judges all steps, or all parts, with half of the error rate."""
    p_values = {key: row.samples.p_value() for key, row in rows.items() if row.samples is not None}
    judged = holm(p_values, ERROR_RATE / 2)
    # Both halves together keep ERROR_RATE.
    return {key: replace(one, adjusted=min(1.0, 2 * one.adjusted)) for key, one in judged.items()}


def _finished(row: _Row, judged: Judged | None, within: Sequence[Interval | None]) -> RowComparison:
    base_ms, new_ms = float(np.mean(row.base)), float(np.mean(row.new))
    base_ci, new_ci = over_launches(row.base, _CONFIDENCE), over_launches(row.new, _CONFIDENCE)
    result = RowComparison(
        name=row.name,
        base_ms=base_ms,
        new_ms=new_ms,
        base_ci95_ms=base_ci or (within[0] if len(row.base) == 1 else None),
        new_ci95_ms=new_ci or (within[-1] if len(row.new) == 1 else None),
        change_ms=new_ms - base_ms,
        change_pct=_pct(new_ms - base_ms, base_ms),
        interval_ms=None,
        interval_pct=None,
        interval_confidence=None,
        p_value=None,
        p_adjusted=None,
        verdict=CANNOT_TELL,
        least_seen_ms=None,
        least_seen_pct=None,
        base_launches_ms=row.base,
        new_launches_ms=row.new,
    )
    if row.samples is None or judged is None:
        return _by_steps(result)
    ratios = row.samples.ratio_interval(judged.alpha)
    least = row.samples.least_seen(judged.alpha, POWER)
    return replace(
        result,
        interval_ms=row.samples.interval(judged.alpha),
        interval_pct=None if ratios is None else ((ratios[0] - 1) * 100, (ratios[1] - 1) * 100),
        interval_confidence=1 - judged.alpha,
        p_value=row.samples.p_value(),
        p_adjusted=judged.adjusted,
        verdict=(SLOWER if result.change_ms > 0 else FASTER) if judged.told else NO_DIFFERENCE,
        least_seen_ms=least,
        least_seen_pct=_pct(least, base_ms),
    )


def _by_steps(row: RowComparison) -> RowComparison:
    """Adds the interval that steps within one launch a side give (MOVER; Zou and Donner 2008)."""
    if row.base_ci95_ms is None or row.new_ci95_ms is None:
        return row
    below = math.hypot(row.new_ms - row.new_ci95_ms[0], row.base_ci95_ms[1] - row.base_ms)
    above = math.hypot(row.new_ci95_ms[1] - row.new_ms, row.base_ms - row.base_ci95_ms[0])
    return replace(
        row,
        interval_ms=(row.change_ms - below, row.change_ms + above),
        interval_confidence=_CONFIDENCE,
    )


def _pct(value: float, base: float) -> float | None:
    return value / base * 100 if base > 0 else None


def _causes(
    step: RowComparison, parts: Sequence[RowComparison]
) -> tuple[tuple[str, ...], float | None]:
    """Returns the fewest parts that make most of the step's change, and their share of it."""
    if step.verdict not in (SLOWER, FASTER) or step.change_ms == 0:
        return (), None
    moved = [part for part in parts if part.verdict == step.verdict]
    names: list[str] = []
    share = 0.0
    for part in sorted(moved, key=lambda one: -abs(one.change_ms)):
        names.append(part.name)
        share += part.change_ms / step.change_ms
        if share >= _MOST:
            return tuple(names), share
    return (), None


def _late_notes(base: Sequence[LaunchFigures], new: Sequence[LaunchFigures]) -> tuple[str, ...]:
    """Says where another rank than before, or for another reason, makes the others wait."""
    before, after = _usually_late(base), _usually_late(new)
    if before == after:
        return ()
    return (f"The others wait for {_late_text(after)} in NEW, for {_late_text(before)} in BASE.",)


def _usually_late(figures: Sequence[LaunchFigures]) -> tuple[int, str] | None:
    found, count = Counter(one.late for one in figures).most_common(1)[0]
    return found if count > len(figures) / 2 else None


def _late_text(late: tuple[int, str] | None) -> str:
    return "no rank in particular" if late is None else f"rank {late[0]} (late in {late[1]})"
