"""How long a step of given settings takes, from whoever can tell.

A source is a function from a batch to a :class:`StepTime`, or to None where it cannot tell.
:func:`first_of` asks several in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_profiler.analysis.micro_batch import MicroBatchCurve
from ddp_profiler.analysis.results import LevelResult, Summary
from ddp_profiler.batch import Batch


@dataclass(frozen=True)
class StepTime:
    """Time of an optimizer step.

    Attributes:
        ms: Expected time in ms: a mean, since a training time is a sum.
        interval_ms: Its interval, (low, high); None where nothing is known of it.
        interval_pct: The share of cases in per cent that the interval is meant to cover.
        source: Where it comes from, in words.
    """

    ms: float
    interval_ms: tuple[float, float] | None
    interval_pct: int | None
    source: str


StepTimes = Callable[[Batch], StepTime | None]
"""A source of step times; None where it cannot tell."""


def unknown(_: Batch) -> StepTime | None:
    """Never knows."""
    return None


def given(step_ms: float, batch: Batch) -> StepTimes:
    """Returns a source that knows one batch, by the user's word (``--step-ms``).

    >>> source = given(120.0, Batch(8, 2, 4))
    >>> source(Batch(8, 2, 4)).ms, source(Batch(4, 4, 4))
    (120.0, None)
    """
    return lambda asked: (
        StepTime(step_ms, None, None, "given by --step-ms") if asked == batch else None
    )


def first_of(*sources: StepTimes) -> StepTimes:
    """Returns a source that asks others in turn."""

    def ask(batch: Batch) -> StepTime | None:
        return next((time for source in sources if (time := source(batch)) is not None), None)

    return ask


def measured(summary: Summary) -> StepTimes:
    """Returns a source that knows the very settings that a run has measured."""
    levels = _levels(summary)

    def ask(batch: Batch) -> StepTime | None:
        asked = (batch.dp, batch.micro_batch, batch.accumulation)
        found = [lv for lv in levels if (lv.dp, lv.micro_batch, lv.accumulation) == asked]
        return _re_expressed(found[0], batch, None) if found else None

    return ask


def re_expressed(summary: Summary) -> StepTimes:
    """Returns a source that knows what a run has measured nearby, at the same dp.

    In this order: a level of the same micro-batch at the nearest accumulation; a level
    re-expressed at the micro-batch as well, by the run's curve of micro-batches at that dp.
    A level is re-expressed by adding to its plain step what the step model says that the other
    setting takes more; a rank that is late by more in more micro-steps is not followed.
    """
    levels = _levels(summary)

    def ask(batch: Batch) -> StepTime | None:
        there = [level for level in levels if level.dp == batch.dp]
        near = sorted(there, key=lambda level: abs(level.accumulation - batch.accumulation))
        for level in near:
            if level.micro_batch == batch.micro_batch:
                time = _re_expressed(level, batch, None)
                if time is not None:
                    return time
        curve = summary.micro_batches
        if curve is None or curve.dp != batch.dp:
            return None
        times = (_re_expressed(level, batch, curve) for level in near)
        return next((time for time in times if time is not None), None)

    return ask


def _levels(summary: Summary) -> list[LevelResult]:
    return [level for level in summary.levels if level.step_ms is not None and level.micro_batch]


def _re_expressed(
    level: LevelResult, batch: Batch, curve: MicroBatchCurve | None
) -> StepTime | None:
    """Returns a level's plain step at the settings asked for; None where that cannot be told."""
    plain = level.step_ms
    assert plain is not None
    assert level.micro_batch is not None
    more, changed = 0.0, []
    if batch.accumulation != level.accumulation:
        if level.costs_ms is None:
            return None
        costs = level.costs_ms
        more += costs.step_ms(batch.accumulation) - costs.step_ms(level.accumulation)
        changed.append(f"accumulation {batch.accumulation}")
    if batch.micro_batch != level.micro_batch:
        if curve is None:
            return None
        here, there = (curve.micro_step_ms(m) for m in (level.micro_batch, batch.micro_batch))
        if here is None or there is None:
            return None
        more += batch.accumulation * (there - here)
        changed.append(f"micro-batch {batch.micro_batch}")
    ms = plain.mean + more
    if ms <= 0:
        return None
    source = f"measured at {level.id}"
    if changed:
        source += f", re-expressed at {' and '.join(changed)}"
    # The interval is of the median, and is moved to the mean and to the other settings.
    scale = ms / plain.median
    interval = None if plain.ci95 is None else (scale * plain.ci95[0], scale * plain.ci95[1])
    return StepTime(ms, interval, 95 if interval else None, source)


def measured_sizes(summary: Summary) -> Sequence[int]:
    """Returns the dp that a run has measured, the largest first."""
    return sorted({level.dp for level in summary.levels if level.step_ms}, reverse=True)
