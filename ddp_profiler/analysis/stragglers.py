"""Who comes late to the points where ranks meet, by how much, and in which part it is late.

Ranks meet where they reduce gradients, and at collectives inside forward and backward. At
such a point the others wait for the last one; had it come with the second-last, they would
have waited less by the time between the two. That time is the lag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_LEAST_STEPS = 5
_FIXED_ABOVE = 0.5
_UNCERTAINTIES = 2.0
"""A lag counts if it is larger than so many clock uncertainties."""


@dataclass(frozen=True)
class Straggler:
    """A rank that comes late to a meeting point.

    Attributes:
        rank: Global rank.
        lag_ms: How much later than the second-last it comes, median over the steps in which
            it is late.
        share_of_steps_fraction: Share of the steps in which it is late.
        fixed: Whether it is late in most steps; else now and then (passing).
        cause: The part in which it takes longer than the others: data, forward, backward,
            optimizer or other; None if no part of its own explains half of the lag.
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
    cause: str | None
    at: str
    recoverable_ms: float
    uncertainty_ms: float
    evidence: tuple[str, ...] = ()


def find_stragglers(ranks: Sequence[Steps], uncertainty_ms: float) -> tuple[Straggler, ...]:
    """Returns the stragglers of a level, the one that costs most first.

    A rank is named where the time that the others could recover is at least 2 % of the step,
    where a bootstrap over steps shows that it is last by more than any other rank is, and
    where its lag exceeds what the clocks' uncertainty could feign.

    Args:
        ranks: Each rank's steps, the same ones, with times on one clock.
        uncertainty_ms: By how much two ranks' times may be apart for want of better clocks.
    """
    if len(ranks) < 2 or len(ranks[0]) < _LEAST_STEPS:
        return ()
    step_ms = float(np.mean([steps.wall_ms.mean() for steps in ranks]))
    lags = _lags(ranks)
    found = [
        straggler
        for at in lags
        for place in range(len(ranks))
        if (straggler := _judge(ranks, place, at, lags, step_ms, uncertainty_ms)) is not None
    ]
    return tuple(sorted(found, key=lambda straggler: -straggler.recoverable_ms))


@dataclass(frozen=True)
class _Lags:
    """Who came last at the meeting points of one kind, shape [step] each.

    Attributes:
        last: Place of the rank that came last.
        lag_ms: How much later than the second-last, as far as the others waited for it.
    """

    last: Ints
    lag_ms: Floats

    def of(self, place: int) -> Floats:
        """Returns the lag of one rank in ms, 0 where another came last."""
        return np.where(self.last == place, self.lag_ms, 0.0)


def _judge(
    ranks: Sequence[Steps],
    place: int,
    at: str,
    lags: Mapping[str, _Lags],
    step_ms: float,
    uncertainty_ms: float,
) -> Straggler | None:
    mine = lags[at].of(place)
    if mine.mean() < LEAST_SHARE_OF_STEP * step_ms:
        return None
    others = [lags[at].of(other) for other in range(len(ranks)) if other != place]
    rival = max(others, key=lambda values: float(values.mean()))
    interval = statistics.block_bootstrap(mine - rival, lambda v: np.mean(v, axis=-1))
    if interval is None or interval[0] <= 0:
        return None
    # Half of the typical lag, typical by weight: a rank that is late by 100 ms in every tenth
    # step and by 0.3 ms in others is late in every tenth.
    typical = float((mine**2).sum() / mine.sum())
    late = mine >= typical / 2
    lag = float(np.median(mine[late]))
    if lag <= _UNCERTAINTIES * uncertainty_ms:
        return None
    share = float(late.mean())
    return Straggler(
        rank=ranks[place].rank,
        lag_ms=lag,
        share_of_steps_fraction=share,
        fixed=share >= _FIXED_ABOVE,
        cause=_cause(ranks, place, at, lags, late, lag),
        at=at,
        recoverable_ms=float(mine.mean()),
        uncertainty_ms=uncertainty_ms,
    )


def _cause(
    ranks: Sequence[Steps],
    place: int,
    at: str,
    lags: Mapping[str, _Lags],
    late: npt.NDArray[np.bool_],
    lag_ms: float,
) -> str | None:
    """Returns the part in which a rank exceeds the others most in the steps it is late in."""
    excess = _excess(ranks, place, at)
    if at != FORWARD_COMM and FORWARD_COMM in lags:
        # What the ranks have waited for already is no cause of what comes after.
        waited = lags[FORWARD_COMM].of(place)
        for values in excess.values():
            taken = np.clip(values, 0, waited)
            values -= taken
            waited = waited - taken
    medians = {part: float(np.median(values[late])) for part, values in excess.items()}
    part = max(medians, key=lambda name: medians[name])
    if medians[part] >= lag_ms / 2:
        return part
    if at == FORWARD_COMM:
        other = _beyond(np.array([steps.parts_ms["other"] for steps in ranks]), place)
        return "other" if np.median(other[late]) >= lag_ms / 2 else None
    return None


def _excess(ranks: Sequence[Steps], place: int, at: str) -> dict[str, Floats]:
    """Returns by how much a rank exceeds the others' median in each part before a meeting point.

    Shape [step] each, in ms, in the order in which the parts come. The optimizer counts in the
    step after it, whose meeting points it delays; a block begins with a barrier, so the first
    step of a block has none. At a collective inside forward only what lies before it counts.
    """

    def part(name: str) -> Floats:
        return np.array([steps.parts_ms[name] for steps in ranks], dtype=float)

    optimizer = np.roll(part("optimizer"), 1, axis=1)
    first = np.ones(len(ranks[0]), dtype=bool)
    first[1:] = np.diff(ranks[0].block) != 0
    optimizer[:, first] = 0.0
    own = {
        in_forward: np.array([_own_before_meetings(steps, in_forward) for steps in ranks])
        for in_forward in (True, False)
    }
    parts = {"optimizer": optimizer, "data": part("data")}
    if at == FORWARD_COMM:
        parts["forward"] = own[True]
    else:
        # Collectives in forward let the ranks begin together again.
        parts["forward"] = part("forward") - own[True]
        parts["other"] = part("other")
        parts["backward"] = own[False] if at == BACKWARD_COMM else part("backward") - own[False]
    return {name: _beyond(values, place) for name, values in parts.items()}


def _own_before_meetings(steps: Steps, in_forward: bool) -> Floats:
    """Returns a rank's own time in forward or backward before collectives there, [step] in ms."""
    mine = steps.meetings.in_forward == in_forward
    own_ms = steps.meetings.own[mine] / 1e6
    total: Floats = np.bincount(
        steps.meetings.step_index[mine], weights=own_ms, minlength=len(steps)
    ).astype(np.float64)
    return total


def _beyond(values: Floats, place: int) -> Floats:
    """Returns a rank's values less the others' median; from [rank, step] to [step]."""
    others: Floats = np.median(np.delete(values, place, axis=0), axis=0)
    beyond: Floats = values[place] - others
    return beyond


def _lags(ranks: Sequence[Steps]) -> dict[str, _Lags]:
    """Returns lags at the kinds of meeting points that the level has."""
    held = np.zeros((len(ranks), len(ranks[0])))
    found: dict[str, _Lags] = {}
    for name, in_forward in ((FORWARD_COMM, True), (BACKWARD_COMM, False)):
        met = _met(ranks, in_forward)
        if met is not None:
            found[name], carried = _at_meetings(*met, steps=len(ranks[0]))
            held += carried
    reduced = _reductions(ranks)
    if reduced is not None:
        found[GRADIENT_REDUCTION] = _at_reductions(*reduced, held)
    return found


def _met(ranks: Sequence[Steps], in_forward: bool) -> tuple[Ints, Ints, Ints] | None:
    """Pairs the collectives inside forward or backward over ranks.

    Returns:
        Row of the step, [meeting]; arrivals and departures in ns, [rank, meeting]; None where
        there are none that all ranks have.
    """
    places = []
    for steps in ranks:
        chosen = np.flatnonzero(steps.meetings.in_forward == in_forward).tolist()
        names = zip(steps.meetings.key.tolist(), steps.meetings.ordinal.tolist(), strict=True)
        by_index = list(names)
        places.append({by_index[index]: index for index in chosen})
    shared = sorted(set(places[0]).intersection(*places[1:]))
    if not shared:
        return None
    indexes = [[place[name] for name in shared] for place in places]
    return (
        ranks[0].meetings.step_index[indexes[0]],
        np.array([s.meetings.begin[i] for s, i in zip(ranks, indexes, strict=True)]),
        np.array([s.meetings.end[i] for s, i in zip(ranks, indexes, strict=True)]),
    )


def _at_meetings(row: Ints, arrived: Ints, left: Ints, steps: int) -> tuple[_Lags, Floats]:
    """Judges collectives inside forward or backward.

    A broadcast lets its source go on without the others, so a rank may come last and nobody
    waits. What counts is how long the others really waited, the median over them. A few that
    did wait, as ranks that pass a broadcast on, are late from there on without fault: how
    late is returned too.

    Returns:
        The lags, and for how long each rank was held in a step though the ranks did not meet,
        [rank, step] in ms.
    """
    last, lag = _last(arrived)
    held = np.clip(np.minimum(left, arrived.max(axis=0)) - arrived, 0, None) / 1e6
    is_last = np.arange(len(arrived))[:, None] == last
    waited = np.minimum(lag, np.nanmedian(np.where(is_last, np.nan, held), axis=0))
    return _totals(row, last, waited, len(arrived), steps), _per_step(
        row, np.clip(held - waited, 0, None), steps
    )


def _reductions(ranks: Sequence[Steps]) -> tuple[Ints, Ints] | None:
    """Returns the step's row and the arrivals in ns, [rank, call], of all gradient reductions."""
    shared = ranks[0].backwards.key
    for steps in ranks[1:]:
        shared = np.intersect1d(shared, steps.backwards.key)
    if not len(shared):
        return None
    arrived, row = [], shared
    for steps in ranks:
        order = np.argsort(steps.backwards.key)
        chosen = order[np.searchsorted(steps.backwards.key[order], shared)]
        arrived.append(steps.backwards.local_end[chosen])
        row = steps.backwards.step_index[chosen]
    return row, np.array(arrived)


def _at_reductions(row: Ints, arrived: Ints, held: Floats) -> _Lags:
    """Judges gradient reductions; being ``held`` before, [rank, step] in ms, is no fault."""
    relative = (arrived - arrived.min(axis=0)).astype(float)
    # In the first reduction of a step; to later ones the ranks come from the one before.
    _, first = np.unique(row, return_index=True)
    relative[:, first] -= held[:, row[first]] * 1e6
    last, lag = _last(relative)
    return _totals(row, last, lag, len(arrived), held.shape[1])


def _last(arrived: npt.NDArray[np.generic]) -> tuple[Ints, Floats]:
    """Returns who came last, and how many ms after the second-last; from [rank, meeting]."""
    in_order = np.sort(arrived, axis=0)
    lag: Floats = (in_order[-1] - in_order[-2]) / 1e6
    return arrived.argmax(axis=0), lag


def _totals(row: Ints, last: Ints, lag_ms: Floats, ranks: int, steps: int) -> _Lags:
    """Adds up each rank's lags in a step; the rank with most is the step's last."""
    by_rank = np.array([np.where(last == place, lag_ms, 0.0) for place in range(ranks)])
    totals = _per_step(row, by_rank, steps)
    return _Lags(last=totals.argmax(axis=0), lag_ms=totals.max(axis=0))


def _per_step(row: Ints, values: Floats, steps: int) -> Floats:
    """Adds up values of meetings in a step; from [rank, meeting] to [rank, step]."""
    return np.array([np.bincount(row, weights=each, minlength=steps) for each in values])
