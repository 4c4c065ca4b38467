"""What one rank gives to the join over ranks: derived from its record alone, and much smaller.

Everything here needs no other rank, so it is done for one rank after the other, by several
processes or, condensed, where the rank's record lies; memory holds the small results only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ddp_profiler.analysis.clocks import CommonClock
from ddp_profiler.analysis.condensed import condense
from ddp_profiler.analysis.parts import Columns, Floats, Steps, ready_times, steps_of
from ddp_profiler.analysis.soundness import Soundness, examine
from ddp_profiler.schema import CONDENSED_COLUMNS, RunInfo, SpanKind, Variant

_DERIVED = (
    Variant.PLAIN,
    Variant.INSTRUMENTED,
    Variant.WARMUP,
    Variant.BARE,
    Variant.NO_SYNC,
    Variant.READY,
)
_IN_STEPS = tuple(
    int(kind)
    for kind in (
        SpanKind.DATA,
        SpanKind.FORWARD,
        SpanKind.FORWARD_COMM,
        SpanKind.BACKWARD,
        SpanKind.LOCAL_BACKWARD_END,
        SpanKind.BACKWARD_COMM,
        SpanKind.GRADIENT,
        SpanKind.BOOKKEEPING,
        SpanKind.OPTIMIZER,
        SpanKind.GRADIENT_READY,
    )
)
"""Spans that all figures of a study have from :class:`Steps`; those of a script also otherwise."""


_LOCAL = tuple(
    int(kind) for kind in (SpanKind.LOCAL_BACKWARD_END, SpanKind.OPTIMIZER, SpanKind.GRADIENT_READY)
)
"""Those of which nothing else is made of a script either."""
_OF_COLLECTIVES = frozenset(name for name, _ in CONDENSED_COLUMNS)


@dataclass(frozen=True)
class RankRecord:
    """One rank's part in a summary.

    Attributes:
        rank: Global rank.
        columns: Its condensed spans, as far as figures are made of them beside ``steps``.
        steps: Its steps by level and variant; combinations without spans are absent.
        ready: When each parameter's gradient is ready, in ms after backward was called, by level.
        clock_uncertainty_ns: By how much times on the common clock may be off, by level.
        soundness: Where its record contradicts itself.
    """

    rank: int
    columns: Columns
    steps: Mapping[tuple[int, Variant], Steps]
    ready: Mapping[int, Floats]
    clock_uncertainty_ns: Mapping[int, float]
    soundness: Soundness

    def steps_of(self, level: int, variant: Variant) -> Steps | None:
        """Returns the steps of a level's variant; None where there are none."""
        return self.steps.get((level, variant))


def rank_record(info: RunInfo, rank: int, columns: Columns) -> RankRecord:
    """Derives a rank's part in a summary from its spans.

    Args:
        info: The run's description.
        rank: Global rank.
        columns: Its spans by column, condensed or not.
    """
    columns = condense(without_kineto(columns))
    # Of what is left then, so that a record says the same of itself condensed and whole.
    soundness = examine(columns, len(info.levels))
    place = columns["level"].astype(np.int64) << 8 | columns["variant"].astype(np.int64)
    order = np.argsort(place, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(place[order]) != 0)) if len(order) else order
    parameters = {
        index: len(fact.reduced)
        for index, level in enumerate(info.levels)
        for fact in info.facts
        if fact.id == level.id
    }
    steps: dict[tuple[int, Variant], Steps] = {}
    ready: dict[int, Floats] = {}
    for rows in np.split(order, begins[1:]) if len(order) else ():
        level, number = int(place[rows[0]]) >> 8, int(place[rows[0]]) & 0xFF
        if number not in _DERIVED:
            # Perhaps of a later version.
            continue
        variant = Variant(number)
        spans = {name: values[rows].astype(np.int64) for name, values in columns.items()}
        found = steps_of(rank, spans)
        if len(found):
            steps[level, variant] = found
        if variant is Variant.READY and level in parameters:
            ready[level] = ready_times(spans, level, parameters[level])
    clock = CommonClock(info)
    uncertainty = {
        index: clock.uncertainty_ns(rank, columns["begin_ns"][columns["level"] == index])
        for index in range(len(info.levels))
    }
    kept = _without(columns, _LOCAL if _is_script(info, columns) else _IN_STEPS)
    return RankRecord(rank, kept, steps, ready, uncertainty, soundness)


def without_kineto(columns: Columns) -> Columns:
    """Leaves out steps that ran under torch.profiler: no figure is of them."""
    kept = columns["variant"] != int(Variant.KINETO)
    return columns if kept.all() else {name: values[kept] for name, values in columns.items()}


def _is_script(info: RunInfo, columns: Columns) -> bool:
    if any(fact.ddps or fact.feeds for fact in info.facts):
        return True
    # Only scripts count micro-steps in the span of a step.
    return bool(((columns["kind"] == SpanKind.STEP) & (columns["index"] >= 0)).any())


def _without(columns: Columns, kinds: tuple[int, ...]) -> Columns:
    """Leaves out spans and columns that are not looked at beside the steps."""
    kept = ~np.isin(columns["kind"], kinds)
    return {name: values[kept] for name, values in columns.items() if name not in _OF_COLLECTIVES}
