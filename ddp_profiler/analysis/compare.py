"""A comparison as a whole: what differs, what changed, and what could not be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_profiler.analysis.comparability import Comparability, Launch, figures
from ddp_profiler.analysis.comparison import (
    ERROR_RATE,
    POWER,
    Check,
    LevelComparison,
    check,
    compare_levels,
)
from ddp_profiler.analysis.two_samples import samples

_TYPICAL_SD_FRACTIONS = (0.01, 0.05, 0.17)
"""A quiet machine with a GPU for each rank; a shared one; 20 launches of one job with real
compute on 2 cores."""


@dataclass(frozen=True)
class LeastSeen:
    """What one launch a side could show, if launches of the same code differed by so much.

    Attributes:
        launch_sd_pct: Standard deviation of launches of the same code / their mean, in per cent.
        least_seen_pct: The smallest change of the step that would be told from chance in 9 of
            10 comparisons, in per cent.
    """

    launch_sd_pct: float
    least_seen_pct: float


@dataclass(frozen=True)
class Comparison:
    """BASE against NEW.

    Attributes:
        base: Folders of the launches of BASE.
        new: Those of NEW.
        comparability: What differs between the sides.
        statistics_unit: What is repeated, and what the intervals come from.
        error_rate: Comparisons of the same code in which anything is called a change, at most.
        levels: What became of each level that both have.
        one_launch: Without repetition: what could have been seen, for typical machines; empty
            where launches were repeated, or where it was assumed how they differ.
        check: Of ``--fail-above``; None where it was not asked for.
    """

    base: tuple[str, ...]
    new: tuple[str, ...]
    comparability: Comparability
    statistics_unit: str
    error_rate: float
    levels: tuple[LevelComparison, ...]
    one_launch: tuple[LeastSeen, ...]
    check: Check | None


def compare(
    base: Sequence[Launch],
    new: Sequence[Launch],
    common: Comparability,
    *,
    launch_sd_fraction: float | None = None,
    fail_above_pct: float | None = None,
) -> Comparison:
    """Compares two sides of launches.

    Args:
        base: Launches of BASE.
        new: Launches of NEW.
        common: What ``comparability.examine`` found of them.
        launch_sd_fraction: Where each side has one launch: how much launches of the same code
            differ, by assumption, as standard deviation / mean.
        fail_above_pct: By how much a step may become slower, in per cent.
    """
    levels = compare_levels(
        figures(base, {pair.name: pair.base for pair in common.pairs}),
        figures(new, {pair.name: pair.new for pair in common.pairs}),
        launch_sd_fraction,
    )
    alone = len(base) == len(new) == 1
    return Comparison(
        base=tuple(one.name for one in base),
        new=tuple(one.name for one in new),
        comparability=common,
        statistics_unit=_unit(len(base), len(new), launch_sd_fraction),
        error_rate=ERROR_RATE,
        levels=levels,
        one_launch=_of_one_launch(len(levels)) if alone and launch_sd_fraction is None else (),
        check=None if fail_above_pct is None else check(levels, fail_above_pct),
    )


def _unit(base: int, new: int, sd_fraction: float | None) -> str:
    if base > 1 and new > 1:
        return f"{base} and {new} launches (Welch's t, Holm's correction over levels and parts)"
    if base + new > 2:
        return (
            f"{base} and {new} launches; the side with one is taken to vary as the other does "
            "(Student's t, Holm's correction over levels and parts)"
        )
    if sd_fraction is not None:
        return (
            f"one launch a side, by the assumption that launches of the same code differ by "
            f"{sd_fraction * 100:g} % (standard deviation)"
        )
    return "steps of one launch a side; launches of the same code differ by more"


def _of_one_launch(levels: int) -> tuple[LeastSeen, ...]:
    found = []
    for sd in _TYPICAL_SD_FRACTIONS:
        sides = samples(np.ones(1), np.ones(1), sd)
        if sides is not None:
            least = sides.least_seen(ERROR_RATE / 2 / max(levels, 1), POWER)
            found.append(LeastSeen(sd * 100, least * 100))
    return tuple(found)
