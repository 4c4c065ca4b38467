"""Who comes late to the points where ranks meet, by how much, and in which part it is late.

Ranks meet where they reduce gradients, and at collectives inside forward and backward. At
such a point the others wait for the last one; had it come with the second-last, they would
have waited less by the time between the two. That time is the lag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_profiler.analysis import statistics
from ddp_profiler.analysis.parts import Floats, Ints, Steps

FORWARD_COMM = "forward_comm"
BACKWARD_COMM = "backward_comm"
GRADIENT_REDUCTION = "gradient_reduction"

LEAST_SHARE_OF_STEP = 0.02
"""Recoverable time below this share of the step is nobody's fault that is worth a name."""
SEVERAL = "several"
_LEAST_STEPS = 5
_FIXED_ABOVE = 0.5
_UNCERTAINTIES = 2.0
"""A lag counts if it is larger than so many clock uncertainties."""
_EXPLAINED = 0.5
"""A rank is late by its own doing where its parts explain this share of its lag."""

_MET = 0.5
"""Ranks have met at a collective where the others waited for this share of the lag."""

_OTHER = "other"
_KINDS = (FORWARD_COMM, BACKWARD_COMM, GRADIENT_REDUCTION)


@dataclass(frozen=True)
class Straggler:
    """A rank that comes late to a meeting point.

    Attributes:
        rank: Global rank.
        lag_ms: How much later than the second-last it comes, median over the steps in which
            it is late; several meeting points of one kind in a step add up.
        share_of_steps_fraction: Share of the steps in which it is late.
        fixed: Whether it is late in most steps; else now and then (passing).
        cause: The part in which it takes longer than the others: data, forward, backward,
            optimizer or other; ``several`` if no single one explains half of the lag.
        parts_ms: What each part contributes to the lag, mean over the steps in which it is late.
        at: Where the others wait for it: ``forward_comm``, ``backward_comm`` or
            ``gradient_reduction``.
        recoverable_ms: Lag per step, mean over all steps.
        uncertainty_ms: By how much the lag may be off because clocks are not known better.
        evidence: What the machine shows about that rank.
    """

    rank: int
    lag_ms: float
    share_of_steps_fraction: float
    fixed: bool
    cause: str
    parts_ms: Mapping[str, float]
    at: str
    recoverable_ms: float
    uncertainty_ms: float
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arrivals:
    """One rank's steps, and how its clock relates to the one that all are compared on.

    Attributes:
        steps: The steps, with times on the rank's own clock.
        common: From times on that clock, in ns, to times on the common one.
    """

    steps: Steps
    common: Callable[[Ints], Ints]


def find_stragglers(ranks: Sequence[Arrivals], uncertainty_ms: float) -> tuple[Straggler, ...]:
    """Returns the stragglers of a level, the one that costs most first.

    A rank is named where the time that the others could recover is at least 2 % of the step,
    by the lower end of a 95 % bootstrap interval over steps; where its own parts explain at
    least half of its lag (else it only left the meeting point before late, which the network
    does to ranks in turn); and where its lag exceeds what the clocks' uncertainty could feign.

    Args:
        ranks: Each rank's steps, the same ones.
        uncertainty_ms: By how much two ranks' times may be apart for want of better clocks.
    """
    if len(ranks) < 2 or len(ranks[0].steps) < _LEAST_STEPS:
        return ()
    step_ms = float(np.mean([rank.steps.wall_ms.mean() for rank in ranks]))
    found = [
        straggler
        for kind, lags in _lags(ranks).items()
        for place in _costly(lags, step_ms)
        if (straggler := _judge(ranks, place, kind, lags, uncertainty_ms)) is not None
    ]
    return tuple(sorted(found, key=lambda straggler: -straggler.recoverable_ms))


@dataclass(frozen=True)
class _Lags:
    """Lags at the meeting points of one kind, in ms.

    Attributes:
        by_rank: How much later than the second-last each rank came, as far as the others
            waited for it, [rank, step]; 0 where it was not the last.
        explained: The part of it that each part of the rank's own work explains, by part.
    """

    by_rank: Floats
    explained: Mapping[str, Floats]


def _costly(lags: _Lags, step_ms: float) -> list[int]:
    """Returns the places of the ranks whose lag costs at least 2 % of the step."""
    # The others have means of 0, and so have all their resamples.
    late = np.flatnonzero(lags.by_rank.any(axis=1))
    intervals = statistics.mean_bootstrap(lags.by_rank[late].T)
    if intervals is None:
        return []
    found: list[int] = late[intervals[0] >= LEAST_SHARE_OF_STEP * step_ms].tolist()
    return found


def _judge(
    ranks: Sequence[Arrivals], place: int, at: str, lags: _Lags, uncertainty_ms: float
) -> Straggler | None:
    mine = lags.by_rank[place]
    # Half of the typical lag, typical by weight: a rank that is late by 100 ms in every tenth
    # step and by 0.3 ms in others is late in every tenth.
    typical = float((mine**2).sum() / mine.sum())
    late = mine >= typical / 2
    lag = float(np.median(mine[late]))
    parts = {part: float(values[place][late].mean()) for part, values in lags.explained.items()}
    total = float(mine[late].mean())
    if lag <= _UNCERTAINTIES * uncertainty_ms or sum(parts.values()) < _EXPLAINED * total:
        return None
    share = float(late.mean())
    largest = max(parts, key=lambda part: parts[part])
    return Straggler(
        rank=ranks[place].steps.rank,
        lag_ms=lag,
        share_of_steps_fraction=share,
        fixed=share >= _FIXED_ABOVE,
        cause=largest if parts[largest] >= _EXPLAINED * total else SEVERAL,
        parts_ms=parts,
        at=at,
        recoverable_ms=float(mine.mean()),
        uncertainty_ms=uncertainty_ms,
    )


@dataclass(frozen=True)
class _Slot:
    """One meeting point of every step, such as the first collective in the second micro-step.

    Attributes:
        kind: One of `_KINDS`.
        arrived: When each rank arrived, [rank, step] in ns on its own clock.
        left: When it could go on.
        there: The steps that have it on all ranks, [step].
    """

    kind: str
    arrived: Ints
    left: Ints
    there: npt.NDArray[np.bool_]


def _lags(ranks: Sequence[Arrivals]) -> dict[str, _Lags]:
    """Goes through the meeting points of all steps at once, in the order in which they come.

    Since the last reduction, where all ranks met for certain, each rank has worked; what it
    has worked more than the others makes it late, less what the others have waited for it
    already at a collective in between. A rank that was held at such a collective, though the
    ranks did not all meet there, is late without fault.
    """
    shape = (len(ranks), len(ranks[0].steps))
    begins = _begins(ranks)
    held = np.zeros(shape)
    charged = {part: np.zeros(shape) for part in (*ranks[0].steps.own, _OTHER)}
    totals: dict[str, Floats] = {}
    explained: dict[str, dict[str, Floats]] = {}
    for slot in _slots(ranks):
        common = np.array([r.common(t) for r, t in zip(ranks, slot.arrived, strict=True)])
        relative = (common - common.min(axis=0)) / 1e6 - held
        last, lag = _last(relative)
        if slot.kind == GRADIENT_REDUCTION:
            waited = lag
        else:
            inside = (slot.left - slot.arrived) / 1e6
            until_last = (common.max(axis=0) - common) / 1e6
            stayed = np.clip(np.minimum(inside, until_last), 0, None)
            waited = np.minimum(lag, _lower_median_of_others(stayed, last))
            waited = np.where(waited >= _MET * lag, waited, 0.0)
            held += np.where(slot.there, np.clip(stayed - waited, 0, None), 0.0)
        waited = np.where(slot.there, waited, 0.0)
        is_last = np.arange(len(ranks))[:, None] == last
        excess = {
            part: np.clip(_beyond(values - charged[part]), 0, None)
            for part, values in _worked(ranks, begins, slot.arrived).items()
        }
        # Of several parts each explains its share.
        share = np.minimum(1.0, waited / np.maximum(sum(excess.values()), 1e-9))
        mine = explained.setdefault(slot.kind, {part: np.zeros(shape) for part in excess})
        for part, values in excess.items():
            taken = np.where(is_last & slot.there, values * share, 0.0)
            mine[part] += taken
            charged[part] += taken
        totals.setdefault(slot.kind, np.zeros(shape))
        totals[slot.kind] += np.where(is_last, waited, 0.0)
        if slot.kind == GRADIENT_REDUCTION:
            begins = np.where(slot.there, slot.left, begins)
            held = np.where(slot.there, 0.0, held)
            charged = {p: np.where(slot.there, 0.0, v) for p, v in charged.items()}
    return {kind: _Lags(totals[kind], explained[kind]) for kind in totals}


def _begins(ranks: Sequence[Arrivals]) -> Ints:
    """Returns where each rank's work of a step begins, [rank, step] in ns on its own clock.

    That is the end of the reduction before it, so that an optimizer counts in the step that
    it delays. A block begins with a barrier: there it is the step's own begin.
    """
    result = []
    for rank in ranks:
        steps = rank.steps
        begin = steps.begin.copy()
        calls = steps.backwards
        ends = np.zeros(len(steps), dtype=np.int64)
        np.maximum.at(ends, calls.step_index, calls.end)
        follows = np.zeros(len(steps), dtype=bool)
        follows[1:] = np.diff(steps.block) == 0
        before = np.roll(ends, 1)
        result.append(np.where(follows & (before > 0), before, begin))
    return np.array(result)


def _worked(ranks: Sequence[Arrivals], begins: Ints, arrived: Ints) -> dict[str, Floats]:
    """Returns each part of each rank's work between two moments, [rank, step] in ms."""
    pairs = list(zip((rank.steps for rank in ranks), begins, arrived, strict=True))
    parts = {
        part: np.array([s.own[part].until(a) - s.own[part].until(b) for s, b, a in pairs]) / 1e6
        for part in ranks[0].steps.own
    }
    inside = [_between(steps, begin, end) for steps, begin, end in pairs]
    return {**parts, _OTHER: (arrived - begins) / 1e6 - sum(parts.values()) - np.array(inside)}


def _between(steps: Steps, begin: Ints, end: Ints) -> Floats:
    """Returns the time in collectives inside forward and backward between moments, in ms."""
    less = (steps.own["forward"].less[0], steps.own["backward"].less[0])
    total: Floats = sum((p.until(end) - p.until(begin) for p in less), np.zeros(len(begin))) / 1e6
    return total


def _slots(ranks: Sequence[Arrivals]) -> Iterator[_Slot]:
    """Yields the meeting points of the steps, in the order in which they come in a step."""
    shape = (len(ranks), len(ranks[0].steps))
    arrived: dict[tuple[int, int, int], Ints] = {}
    left: dict[tuple[int, int, int], Ints] = {}
    there: dict[tuple[int, int, int], Floats] = {}

    def put(place: int, names: Sequence[Ints], row: Ints, begin: Ints, end: Ints) -> None:
        packed = (names[0] << 2 | names[1]) << 32 | names[2]
        for name in np.unique(packed).tolist():
            mine = packed == name
            key = (name >> 34, name >> 32 & 3, name & 0xFFFFFFFF)
            for table in (arrived, left):
                table.setdefault(key, np.zeros(shape, dtype=np.int64))
            there.setdefault(key, np.zeros(shape))
            arrived[key][place, row[mine]] = begin[mine]
            left[key][place, row[mine]] = end[mine]
            there[key][place, row[mine]] = 1

    for place, rank in enumerate(ranks):
        calls, meetings = rank.steps.backwards, rank.steps.meetings
        kind = np.where(meetings.in_forward, 0, 1)
        put(
            place,
            (_micro_step(meetings.key), kind, meetings.ordinal),
            meetings.step_index,
            meetings.begin,
            meetings.end,
        )
        micro_step = _micro_step(calls.key)
        names = (micro_step, np.full_like(micro_step, 2), np.zeros_like(micro_step))
        put(place, names, calls.step_index, calls.local_end, calls.end)
    counts = _collectives_in_micro_steps(ranks)
    for key in sorted(arrived):
        on_all: npt.NDArray[np.bool_] = there[key].min(axis=0) > 0
        if key[1] < len(_KINDS) - 1:
            # Ranks that issue other numbers of collectives cannot be paired.
            on_all = on_all & counts[key[0]]
        if on_all.any():
            # A step without it has some moment, which nobody looks at.
            moment = np.where(on_all, arrived[key], _begins(ranks))
            yield _Slot(_KINDS[key[1]], moment, np.where(on_all, left[key], moment), on_all)


def _collectives_in_micro_steps(ranks: Sequence[Arrivals]) -> dict[int, npt.NDArray[np.bool_]]:
    """Tells in which steps all ranks issued equally many collectives, by micro-step."""
    counts: dict[int, list[Ints]] = {}
    numbers = [_micro_step(rank.steps.meetings.key) for rank in ranks]
    steps = len(ranks[0].steps)
    for micro_step in set(np.concatenate(numbers).tolist()):
        counts[micro_step] = [
            np.bincount(rank.steps.meetings.step_index[of == micro_step], minlength=steps)
            for rank, of in zip(ranks, numbers, strict=True)
        ]
    return {m: np.all(np.equal(found, found[0]), axis=0) for m, found in counts.items()}


def _micro_step(key: Ints) -> Ints:
    """Returns the micro-step that is packed into the key of a call."""
    return key & ((1 << 14) - 1)


def _last(arrived: Floats) -> tuple[Ints, Floats]:
    """Returns who came last, and how much after the second-last; from [rank, meeting]."""
    latest = np.partition(arrived, len(arrived) - 2, axis=0)[-2:]
    lag: Floats = latest[1] - latest[0]
    return arrived.argmax(axis=0), lag


def _lower_median_of_others(values: Floats, last: Ints) -> Floats:
    """Returns the lower median over the ranks but the last; from [rank, step] to [step].

    A value that was observed: half of two values would make two meetings of one.
    """
    others = np.where(np.arange(len(values))[:, None] == last, np.inf, values)
    middle = (len(values) - 2) // 2
    median: Floats = np.partition(others, middle, axis=0)[middle]
    return median


def _beyond(values: Floats) -> Floats:
    """Returns each rank's values less the others' median; [rank, step] both.

    Without one of them, of n values in order, those from its place on move down by one: so what
    was the k-th is the k-th still where the value left out is larger, else the next one.
    """
    others = len(values) - 1
    middle = (others - 1) // 2, others // 2
    wanted = sorted({place + more for place in middle for more in (0, 1)})
    in_order = np.partition(values, wanted, axis=0)
    low, high = (
        np.where(values > in_order[place], in_order[place], in_order[place + 1]) for place in middle
    )
    beyond: Floats = values - (low + high) / 2 if middle[0] != middle[1] else values - low
    return beyond
