"""A rank's record, condensed: one row for the gradient collectives of a backward call.

With many buckets they are most of a record, and nothing that ranks are compared by needs them
one by one: only the first and the last hand-over of a call, its last completion, and how long
any of them was in flight. So each rank is condensed by itself, where its record lies, before
ranks are joined. The analysis goes through this step whether a rank's file was condensed before
or is read whole, which is why both give the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_profiler.analysis.spans import (
    NULL,
    Columns,
    Ints,
    Lookup,
    call_keys,
    own_start,
    step_keys,
)
from ddp_profiler.schema import CONDENSED_COLUMNS, SpanKind

_ADDED = tuple(name for name, _ in CONDENSED_COLUMNS)


def is_condensed(columns: Columns) -> bool:
    """Tells whether columns are those of a condensed record."""
    return _ADDED[0] in columns


def condense(columns: Columns) -> Columns:
    """Puts the gradient collectives of each micro-step and DDP into one row.

    Such a row stands where the first of them stood, with that one's ``index``. ``begin_ns`` is
    the first hand-over, ``last_begin_ns`` the last one; ``end_ns`` is the last completion that was
    noticed (null if none was), and not before any hand-over of a noticed one; ``bytes`` is the sum;
    ``collectives`` counts them and ``unnoticed`` those without a noticed end. ``busy_ns`` is what
    they add to the time in which any collective is in flight, clamped to the backward call, and
    ``overlapped_ns`` the part of it before the end of local backward. All other spans stay.

    Args:
        columns: The rank's spans by column, shape [span] each; returned as they are if they
            are condensed already.
    """
    if is_condensed(columns):
        return columns
    gradients = np.flatnonzero(columns["kind"] == SpanKind.GRADIENT)
    kept = np.ones(len(columns["kind"]), dtype=np.bool_)
    kept[gradients] = False
    result = {name: np.array(values) for name, values in columns.items()}
    result |= {name: np.zeros(len(kept), dtype=np.int64) for name in _ADDED}
    for name in ("end_ns", "bytes"):
        result[name] = result[name].astype(np.int64)
    for rows in _subsets(columns, gradients):
        own = {name: columns[name][rows].astype(np.int64) for name in _NEEDED}
        first, values = _merge(own)
        at = rows[first]
        kept[at] = True
        for name, merged in values.items():
            result[name][at] = merged
    return {name: values[kept] for name, values in result.items()}


_NEEDED = (
    "repetition",
    "step",
    "micro_step",
    "kind",
    "begin_ns",
    "end_ns",
    "bytes",
    "value",
)


def _subsets(columns: Columns, gradients: Ints) -> Iterator[Ints]:
    """Yields the rows of each level and variant that has gradient collectives."""
    place = columns["level"].astype(np.int64) << 8 | columns["variant"].astype(np.int64)
    for one in np.unique(place[gradients]).tolist():
        yield np.flatnonzero(place == one)


def _merge(spans: Columns) -> tuple[Ints, dict[str, Ints]]:
    """Returns the first row of each group of collectives, and the values of the merged rows."""
    key = call_keys(step_keys(spans["repetition"], spans["step"]), spans["micro_step"])
    rows = np.flatnonzero(spans["kind"] == SpanKind.GRADIENT)
    busy, overlapped = _in_flight(spans, key, rows)
    # Stable: within a group rows stay in their order, so its first one begins it.
    order = np.lexsort((spans["value"][rows], key[rows]))
    rows, busy, overlapped = rows[order], busy[order], overlapped[order]
    own_key, ddp = key[rows], spans["value"][rows]
    begins = np.flatnonzero(np.append(True, (own_key[1:] != own_key[:-1]) | (ddp[1:] != ddp[:-1])))
    begin, end = spans["begin_ns"][rows], spans["end_ns"][rows]
    unnoticed = end == NULL
    end = np.where(unnoticed, NULL, np.maximum(end, begin))
    return rows[begins], {
        "begin_ns": np.minimum.reduceat(begin, begins),
        "end_ns": np.maximum.reduceat(end, begins),
        "bytes": np.add.reduceat(spans["bytes"][rows], begins),
        "collectives": np.diff(np.append(begins, len(rows))),
        "last_begin_ns": np.maximum.reduceat(begin, begins),
        "busy_ns": np.add.reduceat(busy, begins),
        "overlapped_ns": np.add.reduceat(overlapped, begins),
        "unnoticed": np.add.reduceat(unnoticed.astype(np.int64), begins),
    }


def _in_flight(spans: Columns, key: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Returns each collective's own share of the union of intervals, whole and overlapped, in ns.

    Calls of one rank do not overlap in time, so one sweep over all intervals sorted by
    begin is exact: an interval adds what lies beyond the latest end before it. What belongs to
    no recorded backward call of a recorded step adds nothing.

    Args:
        spans: The rank's spans of one level and variant.
        key: Key of each span's micro-step.
        rows: Rows of the collectives.
    """
    busy, overlapped = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    found = clamped(spans, key, rows)
    start = own_start(found.begin, found.end)
    whole = np.maximum(found.end - start, 0)
    part = np.clip(np.minimum(found.end, found.local_end) - start, 0, None)
    busy[found.place] = whole
    overlapped[found.place] = np.minimum(part, whole)
    return busy, overlapped


@dataclass(frozen=True)
class Clamped:
    """Collectives of recorded backward calls, sorted by begin, shape [collective] each.

    Attributes:
        place: Place among those that were asked for.
        begin: Hand-over in ns, not after the end of the call.
        end: Completion in ns, not after the end of the call; that end where it was not noticed.
        local_end: End of local backward of the call in ns.
    """

    place: Ints
    begin: Ints
    end: Ints
    local_end: Ints


def clamped(spans: Columns, key: Ints, rows: Ints) -> Clamped:
    """Puts gradient collectives into their backward calls; those without one are left out.

    Args:
        spans: The rank's spans of one level and variant, condensed or not.
        key: Key of each span's micro-step.
        rows: Rows of the collectives.
    """
    known = steps_known(spans)
    calls = sync_calls(spans, key, known)
    lookup = Lookup(key[calls])
    call = lookup.find(key[rows])
    inside = np.flatnonzero((call >= 0) & known[rows])
    call, taken = call[inside], rows[inside]
    call_begin, call_end = spans["begin_ns"][calls], spans["end_ns"][calls]
    is_point = (spans["kind"] == SpanKind.LOCAL_BACKWARD_END) & known
    last = spans["last_begin_ns" if is_condensed(spans) else "begin_ns"]
    local = local_end(
        call_begin,
        call_end,
        (lookup.find(key[is_point]), spans["begin_ns"][is_point]),
        (call, last[taken]),
    )[call]
    latest = call_end[call]
    begin, end = spans["begin_ns"][taken], spans["end_ns"][taken]
    begin = np.minimum(begin, latest)
    end = np.clip(np.where(end == NULL, latest, end), begin, latest)
    order = np.argsort(begin, kind="stable")
    return Clamped(inside[order], begin[order], end[order], local[order])


def steps_known(spans: Columns) -> npt.NDArray[np.bool_]:
    """Tells which spans belong to a step whose own span is there, shape [span]."""
    key = step_keys(spans["repetition"], spans["step"])
    known: npt.NDArray[np.bool_] = Lookup(key[spans["kind"] == SpanKind.STEP]).find(key) >= 0
    return known


def sync_calls(spans: Columns, key: Ints, known: npt.NDArray[np.bool_]) -> Ints:
    """Returns the rows of the backward calls in which gradient collectives were handed over.

    Args:
        spans: The rank's spans of one level and variant.
        key: Key of each span's micro-step.
        known: Which spans belong to a step that is there.
    """
    handed = key[(spans["kind"] == SpanKind.GRADIENT) & known]
    calls = np.flatnonzero((spans["kind"] == SpanKind.BACKWARD) & known)
    calls = calls[np.isin(key[calls], handed)]
    return calls[np.argsort(spans["begin_ns"][calls], kind="stable")]


def local_end(
    begin: Ints, end: Ints, points: tuple[Ints, Ints], hand_overs: tuple[Ints, Ints]
) -> Ints:
    """Finds the end of local backward of each call, shape [call].

    Reentrant checkpoints end passes inside the pass, so there can be several marks: the
    first one after the last hand-over counts, else the last one. Where there is none the
    window is empty.

    Args:
        begin: Begin of each call.
        end: End of each call.
        points: Call (-1 for none) and time of each mark.
        hand_overs: Call (-1 for none) and time of each hand-over of a gradient collective.
    """
    call, time = (values[points[0] >= 0] for values in points)
    given, handed = (values[hand_overs[0] >= 0] for values in hand_overs)
    last_hand_over = begin.copy()
    np.maximum.at(last_hand_over, given, handed)
    never, unseen = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    first_after, last = np.full(len(begin), never), np.full(len(begin), unseen)
    after = time >= last_hand_over[call]
    np.minimum.at(first_after, call[after], time[after])
    np.maximum.at(last, call, time)
    found = np.where(first_after < never, first_after, np.where(last > unseen, last, end))
    return np.clip(found, begin, end)
