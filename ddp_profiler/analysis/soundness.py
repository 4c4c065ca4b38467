"""Finds what contradicts itself in a record that can be read: its figures may be wrong then.

A process has one timeline: its steps follow each other, and the parts of a step lie within it. A
record that was cut is sound; one in which bits have flipped, or whose files were mixed up, mostly
is not. What a wrong time changes within these bounds cannot be known from the record.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ddp_profiler import units
from ddp_profiler.analysis.parts import NULL, Columns
from ddp_profiler.schema import SpanKind

_WITHIN = (
    SpanKind.DATA,
    SpanKind.FORWARD,
    SpanKind.BACKWARD,
    SpanKind.LOCAL_BACKWARD_END,
    SpanKind.OPTIMIZER,
)
"""Kinds that lie within their step; the end of a gradient collective may be noticed after it."""
_ROUNDING_NS = 1_000_000
"""Times of a device's events have a resolution of about 1 us, and are tied to the host's anew."""
_SAME_FROM = 4
_ROUND_NS = 1000


def contradictions(columns_by_rank: Mapping[int, Columns], levels: int) -> tuple[str, ...]:
    """Says which ranks' records contradict themselves or each other, and how.

    Args:
        columns_by_rank: Each rank's spans by column, shape [span] each.
        levels: Number of levels that the run has.
    """
    notes = []
    for what, of in (
        ("spans of levels that the run has not", lambda c: int((c["level"] >= levels).sum())),
        ("steps that overlap or go back in time", _out_of_order),
        ("parts of steps outside of their step", _outside),
        ("parts of a step that together are longer than the step", _too_long),
    ):
        counts = {rank: of(columns) for rank, columns in columns_by_rank.items()}
        ranks = [rank for rank, count in counts.items() if count]
        if ranks:
            notes.append(
                f"The record of {units.ranks(ranks)} contradicts itself: {sum(counts.values())} "
                f"{what}. Figures of it may be wrong."
            )
    notes += [
        f"The records of {units.ranks(same)} have the same times to the ns: one is a copy, and "
        "figures of it are wrong."
        for same in _copies(columns_by_rank)
    ]
    return tuple(notes)


def _step_numbers(columns: Columns) -> npt.NDArray[np.intp]:
    """Numbers the steps that spans belong to; shape [span]."""
    level, variant, repetition, step = (
        columns[name].astype(np.int64) for name in ("level", "variant", "repetition", "step")
    )
    # In two turns, since together they are wider than 64 bits. Sorting rows is far slower.
    _, place = np.unique((level << 32) | ((variant & 0xFF) << 16) | repetition, return_inverse=True)
    _, number = np.unique((place.reshape(-1) << 32) | step, return_inverse=True)
    return number.reshape(-1)


def _out_of_order(columns: Columns) -> int:
    """Counts steps that begin before an earlier step of their level ends, or that go back."""
    is_step = columns["kind"] == SpanKind.STEP
    names = ("level", "repetition", "block", "step", "begin_ns", "end_ns")
    level, repetition, block, step, begin, end = (
        columns[name][is_step].astype(np.int64) for name in names
    )
    # A level's steps are one process's, one after the other, whatever their blocks.
    order = np.lexsort((begin, level))
    overlaps = (np.diff(level[order]) == 0) & (begin[order][1:] < end[order][:-1] - _ROUNDING_NS)
    order = np.lexsort((step, block, repetition, level))
    place = np.stack((level, repetition, block))[:, order]
    back = (np.diff(place, axis=1) == 0).all(axis=0) & (np.diff(begin[order]) < -_ROUNDING_NS)
    return int(overlaps.sum()) + int(back.sum())


def _steps(columns: Columns) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Returns the spans that lie within a step of the record, and the span of that step."""
    is_step = columns["kind"] == SpanKind.STEP
    inside = np.flatnonzero(np.isin(columns["kind"], [int(kind) for kind in _WITHIN]))
    steps = np.flatnonzero(is_step)
    if not len(steps) or not len(inside):
        return inside[:0], steps[:0]
    number = _step_numbers(columns)
    step_of = np.full(len(number), -1)
    step_of[number[steps]] = steps
    found = step_of[number[inside]]
    return inside[found >= 0], found[found >= 0]


def _outside(columns: Columns) -> int:
    inside, step = _steps(columns)
    begin, end = columns["begin_ns"], columns["end_ns"]
    own_end = np.where(end[inside] == NULL, begin[inside], end[inside])
    early = begin[inside] < begin[step] - _ROUNDING_NS
    return int((early | (own_end > end[step] + _ROUNDING_NS)).sum())


def _too_long(columns: Columns) -> int:
    """Counts steps in which data, forward, backward and optimizer take more than the step."""
    inside, step = _steps(columns)
    begin, end = columns["begin_ns"], columns["end_ns"]
    length = np.where(end[inside] == NULL, 0, end[inside] - begin[inside])
    total = np.bincount(step, weights=length, minlength=len(begin))
    rows = np.unique(step)
    return int((total[rows] > (end[rows] - begin[rows]) + _ROUNDING_NS).sum())


def _copies(columns_by_rank: Mapping[int, Columns]) -> list[list[int]]:
    by_times: dict[tuple[bytes, bytes], list[int]] = {}
    for rank, columns in columns_by_rank.items():
        begin, end = columns["begin_ns"], columns["end_ns"]
        # Clocks tick in ns: times that are all rounded were made by hand.
        if np.count_nonzero(begin % _ROUND_NS) >= _SAME_FROM:
            by_times.setdefault((begin.tobytes(), end.tobytes()), []).append(rank)
    return [ranks for ranks in by_times.values() if len(ranks) > 1]
