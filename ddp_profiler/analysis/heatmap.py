"""Who is slow, and when: each rank's own work in each step, against the other ranks'.

Under DDP a step ends at about the same time on all ranks, so its length names nobody. What a
rank does by itself does: its step less all communication,

    own work = data + forward + backward + exposed_copy + optimizer + other

and excess = own work less that of the lower median rank in the same step. Both are lengths on
the rank's own clock, so they are right where the ranks' clocks cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_profiler.analysis.parts import Floats, Ints, Steps

MOST_ROWS = 32
MOST_COLUMNS = 120
MOST_NAMED = 8

_OWN = ("data", "forward", "backward", "exposed_copy", "optimizer", "other")
_CLASS_FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of the step at which an excess is worth another shade; below the first it is noise,
as for a straggler (see :data:`ddp_profiler.analysis.stragglers.LEAST_SHARE_OF_STEP`)."""


@dataclass(frozen=True)
class RankExcess:
    """One rank's own work over all steps, in ms.

    Attributes:
        rank: Global rank.
        own_ms: Mean own work.
        excess_ms: Mean excess over the lower median rank.
        largest_ms: Largest excess in one step.
        largest_step: Number of that step in the level, from 0 with the first in the map.
    """

    rank: int
    own_ms: float
    excess_ms: float
    largest_ms: float
    largest_step: int


@dataclass(frozen=True)
class HeatMap:
    """A level's excess of own work in ms, by rank and step.

    A cell is the mean over its steps of each rank; where a row holds several ranks, the
    largest of theirs, so that one slow rank among many is not averaged away.

    Attributes:
        rows: The ranks of each row, ascending; more than one where there are many.
        steps_per_column: Steps of a column; some may have one less.
        steps: Steps in the map.
        excess_ms: Shape [row][column].
        row_excess_ms: Mean excess over all steps of each row's slowest rank.
        classes_ms: Ascending limits between shades: 2, 5, 10, 20 and 50 % of the median step.
        step_ms: The median step.
        ranks: The ranks with the largest mean excess, the largest first; at most 8.
    """

    rows: tuple[tuple[int, ...], ...]
    steps_per_column: int
    steps: int
    excess_ms: tuple[tuple[float, ...], ...]
    row_excess_ms: tuple[float, ...]
    classes_ms: tuple[float, ...]
    step_ms: float
    ranks: tuple[RankExcess, ...]

    @property
    def column_begins(self) -> tuple[int, ...]:
        """The first step of each column."""
        return tuple(_column_begins(self.steps, len(self.excess_ms[0])).tolist())


def own_work_ms(breakdown: Mapping[str, Floats]) -> Floats:
    """Returns what a rank does by itself in each step, in ms, shape [step].

    Args:
        breakdown: All parts of its steps.
    """
    own: Floats = np.sum([breakdown[part] for part in _OWN], axis=0)
    return own


def heat_map(ranks: Sequence[Steps], breakdowns: Sequence[Mapping[str, Floats]]) -> HeatMap | None:
    """Compares ranks step by step; None with fewer than two ranks or without steps.

    Args:
        ranks: Each rank's steps, the same ones in the same order.
        breakdowns: All parts of them, in the order of the ranks.
    """
    if len(ranks) < 2 or not len(ranks[0]):
        return None
    own = np.array([own_work_ms(breakdown) for breakdown in breakdowns])
    # The lower one of two: of two ranks, the faster.
    middle = np.sort(own, axis=0)[(len(ranks) - 1) // 2]
    excess = own - middle
    step_ms = float(np.median(np.mean([steps.wall_ms for steps in ranks], axis=0)))
    grouped, each = _by_columns(excess)
    rows = _rows([steps.rank for steps in ranks])
    order = {steps.rank: place for place, steps in enumerate(ranks)}
    places = [[order[rank] for rank in row] for row in rows]
    means = excess.mean(axis=1)
    return HeatMap(
        rows=rows,
        steps_per_column=each,
        steps=excess.shape[1],
        excess_ms=tuple(tuple(grouped[place].max(axis=0).tolist()) for place in places),
        row_excess_ms=tuple(float(means[place].max()) for place in places),
        classes_ms=tuple(fraction * step_ms for fraction in _CLASS_FRACTIONS),
        step_ms=step_ms,
        ranks=_most(ranks, own, excess),
    )


def _by_columns(excess: Floats) -> tuple[Floats, int]:
    """Returns means over neighbouring steps, [rank, column], and the most steps of a column.

    Columns differ by one step at most: one of few steps would look noisier than the rest.
    """
    steps = excess.shape[1]
    each = -(-steps // MOST_COLUMNS)
    columns = -(-steps // each)
    begins = _column_begins(steps, columns)
    sums = np.add.reduceat(excess, begins, axis=1)
    means: Floats = sums / np.diff(np.append(begins, steps))
    return means, each


def _column_begins(steps: int, columns: int) -> Ints:
    begins: Ints = np.arange(columns) * steps // columns
    return begins


def _rows(ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns neighbouring ranks in as many rows as there may be."""
    each = -(-len(ranks) // MOST_ROWS)
    return tuple(tuple(ranks[begin : begin + each]) for begin in range(0, len(ranks), each))


def _most(ranks: Sequence[Steps], own: Floats, excess: Floats) -> tuple[RankExcess, ...]:
    means = excess.mean(axis=1)
    first = np.argsort(-means, kind="stable")[:MOST_NAMED]
    return tuple(
        RankExcess(
            rank=ranks[place].rank,
            own_ms=float(own[place].mean()),
            excess_ms=float(means[place]),
            largest_ms=float(excess[place].max()),
            largest_step=int(excess[place].argmax()),
        )
        for place in first
    )
