"""Finds what contradicts itself in a record that can be read: its figures may be wrong then.

A process has one timeline: its steps follow each other, and the parts of a step lie within it. A
record that was cut is sound; one in which bits have flipped, or whose files were mixed up, mostly
is not. What a wrong time changes within these bounds cannot be known from the record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Soundness:
    """What one rank's record says of itself; see `_OFFENCES` for what is counted.

    Attributes:
        counts: How often it contradicts itself, by offence.
        fingerprint: Of all its times, equal for copies only; None where copies cannot be told.
    """

    counts: tuple[int, ...]
    fingerprint: bytes | None


_OFFENCES = (
    "spans of levels that the run has not",
    "steps that overlap or go back in time",
    "parts of steps outside of their step",
    "parts of a step that together are longer than the step",
)


def examine(columns: Columns, levels: int) -> Soundness:
    """Looks for contradictions within one rank's record.

    Args:
        columns: Its condensed spans by column, shape [span] each.
        levels: Number of levels that the run has.
    """
    fingerprint = _fingerprint(columns)
    foreign = int((columns["level"] >= levels).sum())
    # Nothing here looks at collectives.
    looked_at = np.isin(columns["kind"], [int(kind) for kind in (*_WITHIN, SpanKind.STEP)])
    columns = {name: values[looked_at] for name, values in columns.items()}
    inside, step = _steps(columns)
    counts = (
        foreign,
        _out_of_order(columns),
        _outside(columns, inside, step),
        _too_long(columns, inside, step),
    )
    return Soundness(counts, fingerprint)


def contradictions(by_rank: Mapping[int, Soundness]) -> tuple[str, ...]:
    """Says which ranks' records contradict themselves or each other, and how.

    Args:
        by_rank: What each rank's record says of itself.
    """
    notes = []
    for offence, what in enumerate(_OFFENCES):
        counts = {rank: found.counts[offence] for rank, found in by_rank.items()}
        ranks = [rank for rank, count in counts.items() if count]
        if ranks:
            notes.append(
                f"The record of {units.ranks(ranks)} contradicts itself: {sum(counts.values())} "
                f"{what}. Figures of it may be wrong."
            )
    same: dict[bytes, list[int]] = {}
    for rank, found in by_rank.items():
        if found.fingerprint is not None:
            same.setdefault(found.fingerprint, []).append(rank)
    notes += [
        f"The records of {units.ranks(ranks)} have the same times to the ns: one is a copy, and "
        "figures of it are wrong."
        for ranks in same.values()
        if len(ranks) > 1
    ]
    return tuple(notes)


def _keys(columns: Columns) -> npt.NDArray[np.int64]:
    """Returns one number for each span that is the same for spans of the same step."""
    key = np.zeros(len(columns["level"]), dtype=np.int64)
    for name in ("level", "variant", "repetition", "step"):
        values, place = np.unique(columns[name], return_inverse=True)
        key = key * len(values) + place.reshape(-1)
    return key


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
    unique, number = np.unique(_keys(columns), return_inverse=True)
    step_of = np.full(len(unique), -1)
    step_of[number[steps]] = steps
    found = step_of[number[inside]]
    return inside[found >= 0], found[found >= 0]


def _outside(columns: Columns, inside: npt.NDArray[np.intp], step: npt.NDArray[np.intp]) -> int:
    begin, end = columns["begin_ns"], columns["end_ns"]
    own_end = np.where(end[inside] == NULL, begin[inside], end[inside])
    early = begin[inside] < begin[step] - _ROUNDING_NS
    return int((early | (own_end > end[step] + _ROUNDING_NS)).sum())


def _too_long(columns: Columns, inside: npt.NDArray[np.intp], step: npt.NDArray[np.intp]) -> int:
    """Counts steps in which data, forward, backward and optimizer take more than the step."""
    begin, end = columns["begin_ns"], columns["end_ns"]
    length = np.where(end[inside] == NULL, 0, end[inside] - begin[inside])
    total = np.bincount(step, weights=length, minlength=len(begin))
    rows = np.unique(step)
    return int((total[rows] > (end[rows] - begin[rows]) + _ROUNDING_NS).sum())


def _fingerprint(columns: Columns) -> bytes | None:
    begin, end = columns["begin_ns"], columns["end_ns"]
    # Clocks tick in ns: times that are all rounded were made by hand.
    if np.count_nonzero(begin % _ROUND_NS) < _SAME_FROM:
        return None
    return hashlib.blake2b(begin.tobytes() + end.tobytes(), digest_size=16).digest()
