"""Windows of observed steps over a long training: what each of them showed by itself.

All windows together make the figures of a level. Stragglers that come and go are seen only in
those windows in which they were there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_profiler import units
from ddp_profiler.analysis.parts import Columns, Ints, Steps
from ddp_profiler.analysis.stragglers import Arrivals, Straggler, find_stragglers
from ddp_profiler.schema import SpanKind, Variant

_WINDOWS_NAMED = 6


@dataclass(frozen=True)
class SampledWindow:
    """Neighbouring observed steps of a script, with unobserved ones before and after them.

    Attributes:
        first_step: Its first optimizer step.
        last_step: Its last one.
        steps: Plain steps in it that figures are made of.
        step_ms: Median of them, each the mean over ranks; None without any.
        stragglers: Who was late in it, as for a level, the one that cost most first; nobody is
            named where it has fewer than 5 instrumented steps.
    """

    first_step: int
    last_step: int
    steps: int
    step_ms: float | None
    stragglers: tuple[Straggler, ...]


def sampled_windows(
    columns: Sequence[Columns],
    level: int,
    plain: Sequence[Steps],
    arrivals: Sequence[Arrivals],
    uncertainty_ms: float | None,
) -> tuple[SampledWindow, ...]:
    """Returns the windows of a level in order of time; none where it has only one.

    A window ends where the number of the next recorded step is not the next number.

    Args:
        columns: Each rank's spans by column.
        level: Index of the level.
        plain: Each rank's plain steps that count, the same ones.
        arrivals: Each rank's instrumented steps that count, the same ones.
        uncertainty_ms: By how much two ranks' times may be apart for want of better clocks;
            None where they cannot be compared, or a rank's record is missing.
    """
    numbers = _recorded(columns, level)
    begins = np.flatnonzero(np.diff(numbers, prepend=-2) > 1)
    if len(begins) < 2:
        return ()
    result = []
    for first, last in zip(numbers[begins], numbers[[*(begins[1:] - 1), -1]], strict=True):
        walls = [steps.wall_ms[_inside(steps, first, last)] for steps in plain]
        late: tuple[Straggler, ...] = ()
        if uncertainty_ms is not None:
            ranks = [
                Arrivals(a.steps.only(_inside(a.steps, first, last)), a.common) for a in arrivals
            ]
            late = find_stragglers(ranks, uncertainty_ms)
        count = len(walls[0]) if walls else 0
        result.append(
            SampledWindow(
                first_step=int(first),
                last_step=int(last),
                steps=count,
                step_ms=float(np.median(np.mean(walls, axis=0))) if count else None,
                stragglers=late,
            )
        )
    return tuple(result)


def _recorded(columns: Sequence[Columns], level: int) -> Ints:
    """Returns the numbers of all measured steps of a script, ascending."""
    found = [np.empty(0, dtype=np.int64)]
    for spans in columns:
        chosen = (spans["level"] == level) & (spans["kind"] == SpanKind.STEP)
        chosen &= np.isin(spans["variant"], (Variant.PLAIN, Variant.INSTRUMENTED))
        # Only scripts count micro-steps in the span of a step.
        found.append(spans["step"][chosen & (spans["index"] >= 0)])
    return np.unique(np.concatenate(found)).astype(np.int64)


def _inside(steps: Steps, first: int, last: int) -> npt.NDArray[np.bool_]:
    number = steps.key & 0xFFFFFFFF
    return (number >= first) & (number <= last)


def passing(windows: Sequence[SampledWindow]) -> Iterator[tuple[int, list[SampledWindow]]]:
    """Yields each rank that was late in some window, with those windows, by rank."""
    ranks = sorted({late.rank for window in windows for late in window.stragglers})
    for rank in ranks:
        yield rank, [w for w in windows if any(late.rank == rank for late in w.stragglers)]


def lateness(window: SampledWindow) -> str:
    """Says in short who was late in a window, and by how much; empty if nobody was."""
    return "; ".join(
        f"rank {late.rank} by {units.ms(late.lag_ms)} in "
        f"{units.percent(late.share_of_steps_fraction, 0)} of steps ({late.cause})"
        for late in window.stragglers
    )


def named(windows: Sequence[SampledWindow]) -> str:
    """Lists windows by their first steps."""
    shown = ", ".join(str(window.first_step) for window in windows[:_WINDOWS_NAMED])
    more = len(windows) - _WINDOWS_NAMED
    return f"step{'s' if len(windows) > 1 else ''} {shown}{f' and {more} more' if more > 0 else ''}"
