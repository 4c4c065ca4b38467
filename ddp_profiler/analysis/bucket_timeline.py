"""One typical step as it passed: phases of a rank, and when each bucket was in flight.

A bucket's part before the end of local backward is hidden behind computation; what lies after
it is exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_profiler.analysis.condensed import is_condensed
from ddp_profiler.analysis.parts import NULL, Columns, Floats, Ints, Steps, step_keys
from ddp_profiler.analysis.stragglers import Arrivals
from ddp_profiler.schema import SpanKind, Variant

MOST_BUCKETS = 48
MOST_PHASES = 120

_NS_PER_MS = 1e6
_SIMPLE = {
    SpanKind.DATA: "data",
    SpanKind.FORWARD: "forward",
    SpanKind.FORWARD_COMM: "forward_comm",
    SpanKind.BACKWARD_COMM: "backward_comm",
    SpanKind.OPTIMIZER: "optimizer",
}
EXPOSED = "exposed"
"""The exposed window where waiting, transfer and copy cannot be told apart."""


@dataclass(frozen=True)
class Phase:
    """A phase of a step: one of the parts' names, or ``exposed``; times in ms."""

    part: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Bucket:
    """Gradient collectives of a step, in flight from hand-over to completion.

    Attributes:
        first: Number of the collective in the step, from 0.
        last: The last one's, where several neighbours are shown as one; else ``first``.
        nbytes: Bytes of all of them.
        begin_ms: The first hand-over.
        hidden_until_ms: End of the hidden part: completion, or the end of local backward.
        end_ms: The last completion.
        noticed: Whether all completions were noticed; else the end is that of backward.
    """

    first: int
    last: int
    nbytes: int
    begin_ms: float
    hidden_until_ms: float
    end_ms: float
    noticed: bool


@dataclass(frozen=True)
class Lane:
    """What one rank did in the step.

    Attributes:
        rank: Global rank.
        phases: In order of time. Inner ones, such as forward_comm, follow what they lie in.
        left_out: Phases of earlier micro-steps that are not shown.
    """

    rank: int
    phases: tuple[Phase, ...]
    left_out: int


@dataclass(frozen=True)
class BucketTimeline:
    """A typical step of a level; ms after the step's begin on the shown rank.

    Attributes:
        step: Its number in the level, from 0 with the first instrumented one that counts.
        steps: Steps that it was chosen from.
        step_ms: Its length, mean over ranks: nearest to the median of all.
        lanes: The rank whose buckets are shown, first; then the rank that the others wait
            for, where clocks allow to name it and it is another one.
        buckets: In the order of hand-over, at most 48 rows.
        collectives: Gradient collectives of the step on that rank.
        span_ms: From the earliest begin to the latest end in ``lanes``.
        told_apart: Whether clocks allow to tell waiting from transfer.
    """

    step: int
    steps: int
    step_ms: float
    lanes: tuple[Lane, ...]
    buckets: tuple[Bucket, ...]
    collectives: int
    span_ms: tuple[float, float]
    told_apart: bool


def bucket_timeline(
    arrivals: Sequence[Arrivals],
    spans_of: Callable[[int], Columns],
    level: int,
    latest_local_end: Sequence[Ints] | None,
    dp: int,
) -> BucketTimeline | None:
    """Picks the step nearest to the median; None at dp = 1 or where nothing was reduced.

    Args:
        arrivals: Each rank's instrumented steps that count, the same ones in the same order.
        spans_of: Gives the spans of a rank by column; of a condensed record all collectives of
            a backward are one row.
        level: Index of the level.
        latest_local_end: For each rank, for each of its backward calls, the latest end of local
            backward over the ranks, on its own clock; None where clocks cannot be compared.
        dp: Ranks of the level.
    """
    if dp < 2 or not arrivals or not len(arrivals[0].steps):
        return None
    walls = np.mean([arrival.steps.wall_ms for arrival in arrivals], axis=0)
    row = int(np.argmin(np.abs(walls - np.median(walls))))
    if not any((arrival.steps.backwards.step_index == row).any() for arrival in arrivals):
        return None
    shown = _shown(arrivals, latest_local_end, row)
    first = arrivals[shown[0]]
    origin = int(first.common(first.steps.begin[row : row + 1])[0])
    lanes, ends = [], []
    for place in shown:
        steps, common = arrivals[place].steps, arrivals[place].common
        latest = None if latest_local_end is None else latest_local_end[place]
        spans = _spans(spans_of(steps.rank), level, int(steps.key[row]))
        if place == shown[0]:
            spans_shown = spans
        lane = _lane(steps, spans, row, latest, _after(origin, common))
        lanes.append(lane)
        ends += [phase.begin_ms for phase in lane.phases] + [p.end_ms for p in lane.phases]
        begin = steps.begin[row : row + 1]
        if lane.left_out == 0:
            ends += [float(_after(origin, common)(begin)[0])]
        ends += [float(_after(origin, common)(begin)[0] + steps.wall_ms[row])]
    buckets = _buckets(first.steps, spans_shown, row, _after(origin, first.common))
    return BucketTimeline(
        step=row,
        steps=len(walls),
        step_ms=float(walls[row]),
        lanes=tuple(lanes),
        buckets=_merged(buckets),
        collectives=sum(bucket.last - bucket.first + 1 for bucket in buckets),
        span_ms=(min(ends), max(ends)),
        told_apart=latest_local_end is not None,
    )


def _shown(
    arrivals: Sequence[Arrivals], latest_local_end: Sequence[Ints] | None, row: int
) -> list[int]:
    """Returns the rank that waits longest in a step, and the one that comes last."""
    if latest_local_end is None:
        return [0]
    waits = []
    for arrival, latest in zip(arrivals, latest_local_end, strict=True):
        calls = arrival.steps.backwards
        mine = calls.step_index == row
        reached = np.clip(latest[mine], calls.local_end[mine], calls.end[mine])
        waits.append(int((reached - calls.local_end[mine]).sum()))
    waiting, last = int(np.argmax(waits)), int(np.argmin(waits))
    return [waiting] if waits[waiting] == waits[last] else [waiting, last]


def _after(origin: int, common: Callable[[Ints], Ints]) -> Callable[[Ints], Floats]:
    """Returns what tells times of a rank in ms after a moment on the common clock."""
    return lambda times: (common(times) - origin) / _NS_PER_MS


def _spans(columns: Columns, level: int, key: int) -> Columns:
    """Returns the spans of one instrumented step."""
    chosen = (columns["level"] == level) & (columns["variant"] == int(Variant.INSTRUMENTED))
    keys = step_keys(columns["repetition"].astype(np.int64), columns["step"].astype(np.int64))
    chosen &= keys == key
    return {name: values[chosen].astype(np.int64) for name, values in columns.items()}


def _lane(
    steps: Steps,
    spans: Columns,
    row: int,
    latest: Ints | None,
    after: Callable[[Ints], Floats],
) -> Lane:
    calls = steps.backwards
    mine = np.flatnonzero(calls.step_index == row)
    found: list[tuple[int, int, str]] = []
    for kind, part in _SIMPLE.items():
        of = (spans["kind"] == kind) & (spans["end_ns"] != NULL)
        found += [
            (int(b), int(e), part)
            for b, e in zip(spans["begin_ns"][of], spans["end_ns"][of], strict=True)
        ]
    synced = set(calls.begin[mine].tolist())
    of = (spans["kind"] == SpanKind.BACKWARD) & (spans["end_ns"] != NULL)
    for begin, end in zip(spans["begin_ns"][of], spans["end_ns"][of], strict=True):
        if int(begin) not in synced:
            found.append((int(begin), int(end), "backward"))
    for call in mine:
        begin, local, end = (int(v[call]) for v in (calls.begin, calls.local_end, calls.end))
        done = max(int(calls.last_collective[call]), local)
        found.append((begin, local, "backward"))
        if latest is None:
            found += [(local, done, EXPOSED), (done, end, "exposed_copy")]
            continue
        reached = min(max(int(latest[call]), local), end)
        done = max(done, reached)
        found += [
            (local, reached, "exposed_wait"),
            (reached, done, "exposed_transfer"),
            (done, end, "exposed_copy"),
        ]
    # What lies inside something comes after it, to be drawn above it.
    found = sorted((f for f in found if f[1] > f[0]), key=lambda f: (f[0], -f[1]))
    kept = found[-MOST_PHASES:]
    times = after(np.array([f[:2] for f in kept], dtype=np.int64).reshape(-1))
    return Lane(
        rank=steps.rank,
        phases=tuple(
            Phase(part, float(times[2 * i]), float(times[2 * i + 1]))
            for i, (_, _, part) in enumerate(kept)
        ),
        left_out=len(found) - len(kept),
    )


def _buckets(
    steps: Steps, spans: Columns, row: int, after: Callable[[Ints], Floats]
) -> list[Bucket]:
    """Returns a step's gradient collectives in the order of hand-over, as parts.py reads them."""
    calls = steps.backwards
    mine = np.flatnonzero(calls.step_index == row)
    if not len(mine):
        return []
    of = np.flatnonzero(spans["kind"] == SpanKind.GRADIENT)
    of = of[np.argsort(spans["begin_ns"][of], kind="stable")]
    begin = spans["begin_ns"][of]
    call = mine[np.clip(np.searchsorted(calls.begin[mine], begin, "right") - 1, 0, None)]
    end_of_call, local = calls.end[call], calls.local_end[call]
    condensed = is_condensed(spans)
    last = np.cumsum(spans["collectives"][of]) - 1 if condensed else np.arange(len(of))
    first = np.append(0, last[:-1] + 1)
    noticed = spans["unnoticed"][of] == 0 if condensed else spans["end_ns"][of] != NULL
    begin = np.minimum(begin, end_of_call)
    end = np.clip(np.where(noticed, spans["end_ns"][of], end_of_call), begin, end_of_call)
    begin_ms, hidden_ms, end_ms = (after(v) for v in (begin, np.clip(local, begin, end), end))
    return [
        Bucket(
            first=int(first[i]),
            last=int(last[i]),
            nbytes=max(int(spans["bytes"][of[i]]), 0),
            begin_ms=float(begin_ms[i]),
            hidden_until_ms=float(hidden_ms[i]),
            end_ms=float(end_ms[i]),
            noticed=bool(noticed[i]),
        )
        for i in range(len(of))
    ]


def _merged(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Puts neighbours together where there are more than can be shown."""
    each = -(-len(buckets) // MOST_BUCKETS) or 1
    result = []
    for begin in range(0, len(buckets), each):
        some = buckets[begin : begin + each]
        hidden = [b.hidden_until_ms for b in some if b.hidden_until_ms > b.begin_ms]
        first_begin = min(one.begin_ms for one in some)
        result.append(
            Bucket(
                first=some[0].first,
                last=some[-1].last,
                nbytes=sum(one.nbytes for one in some),
                begin_ms=first_begin,
                hidden_until_ms=max(hidden, default=first_begin),
                end_ms=max(one.end_ms for one in some),
                noticed=all(one.noticed for one in some),
            )
        )
    return tuple(result)
