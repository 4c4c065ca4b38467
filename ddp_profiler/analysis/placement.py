"""What crossing nodes costs: levels spread over nodes against the same levels packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_profiler.analysis.results import LevelResult
from ddp_profiler.analysis.statistics import difference


def packed_twin(level: LevelResult, levels: Sequence[LevelResult]) -> LevelResult | None:
    """Returns the packed level of a spread one: same dp, micro-batch and accumulation."""
    if level.placement != "spread":
        return None
    setting = (level.dp, level.micro_batch, level.accumulation)
    for other in levels:
        same = (other.dp, other.micro_batch, other.accumulation) == setting
        if same and other.placement == "packed":
            return other
    return None


def with_crossing(levels: Sequence[LevelResult]) -> tuple[LevelResult, ...]:
    """Returns the levels with the price of crossing nodes filled in at the spread ones.

    Price: the median plain step of the spread level less that of its packed twin.
    """
    return tuple(_priced(level, packed_twin(level, levels)) for level in levels)


def largest(levels: Sequence[LevelResult]) -> LevelResult | None:
    """Returns the level that stands for the study: the largest dp, packed where it was both."""
    return max(levels, key=lambda level: (level.dp, level.placement == "packed"), default=None)


def scaling_curve(levels: Sequence[LevelResult]) -> list[LevelResult]:
    """Returns the levels that make a curve over dp: spread ones only where no packed one is.

    Spread and packed levels of one dp are never on the same curve.
    """
    return [level for level in levels if packed_twin(level, levels) is None]


def _priced(level: LevelResult, packed: LevelResult | None) -> LevelResult:
    if packed is None or level.step_ms is None or packed.step_ms is None:
        return level
    price, interval = difference(level.step_ms, packed.step_ms)
    return replace(
        level,
        crossing_ms=price,
        crossing_ci95_ms=interval,
        crossing_fraction=price / level.step_ms.median,
    )
