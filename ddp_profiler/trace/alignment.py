"""How far the clocks of ranks are apart, from collectives that end together on all of them.

An AllReduce, AllGather or ReduceScatter of NCCL ends on all ranks within some us, since nobody
has the result before everybody has given. So the distance of their ends is that of the clocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ddp_profiler.naming import name_ranks
from ddp_profiler.trace.columns import Ints
from ddp_profiler.trace.kernels import KINDS, Collective
from ddp_profiler.trace.matching import GroupMatch
from ddp_profiler.trace.split import RankSplit

Floats = npt.NDArray[np.float64]

ENDS_TOGETHER = np.array(
    [
        kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        for kind in KINDS
    ]
)
"""By the number of the kind: whether it ends on all ranks at once."""

LEAST = 3
"""Common collectives that a rank's clock needs."""

_MOST_OTHERS = 8
_SWEEPS = 2
_PAIR = 2
_DRIFT_FROM = 24
_DRIFT_FROM_NS = 1_000_000_000
_FINE_NS = 20_000
_MOST_OF_SPREAD = 0.2
_APART_TIMES = 20
_APART_NS = 100_000
_MOST_APART = 0.25


@dataclass(frozen=True)
class Clocks:
    """The clocks of the ranks against that of a reference, the lowest rank that they are tied to.

    Attributes:
        zero_ns: A time near the recording, in ns since 1970 where the traces say.
        reference: The reference of each rank that could be tied; several ranks only share one
            where groups tie them.
        offset_ns: What each rank's clock shows more than its reference's, at ``zero_ns``.
        drift_ppm: How much faster it runs, in 10^-6; only where that shows.
        typical_ns: Median distance of an end from the median of its collective's ends, of two
            ranks from the other's end; None where nothing was aligned.
        most_ns: The largest such distance.
        uncertainty_ns: The distance that 95 % of them do not exceed.
        num_collectives: Collectives whose ends were used.
        refused: Why ranks cannot be compared; empty where they can.
        not_tied: Ranks with too few collectives in common with others.
    """

    zero_ns: int
    reference: Mapping[int, int] = field(default_factory=dict)
    offset_ns: Mapping[int, int] = field(default_factory=dict)
    drift_ppm: Mapping[int, float] = field(default_factory=dict)
    typical_ns: float | None = None
    most_ns: float | None = None
    uncertainty_ns: float | None = None
    num_collectives: int = 0
    refused: str = ""
    not_tied: tuple[int, ...] = ()

    def aligned(self, rank: int, since_zero_ns: Ints) -> Ints:
        """Returns times of a rank, since ``zero_ns``, as its reference's clock shows them."""
        result = since_zero_ns - self.offset_ns[rank]
        drift = self.drift_ppm.get(rank)
        if drift:
            result = result - np.rint(result * (drift / (1e6 + drift))).astype(np.int64)
        return result


@dataclass
class _Ends:
    """Ends since zero of one group's collectives that end together: [collective, rank]."""

    ranks: tuple[int, ...]
    ends: Floats


@dataclass
class _Fit:
    """offset_ns + slope x time: how far a clock is ahead."""

    offset_ns: float = 0.0
    slope: float = 0.0

    def aligned(self, ends: Floats) -> Floats:
        """Returns times as the reference's clock shows them."""
        return (ends - self.offset_ns) / (1 + self.slope)


def since_zero(split: RankSplit, times_ns: Ints, zero_ns: int) -> Ints:
    """Returns times of a trace as ns since a common zero."""
    return times_ns + ((split.trace.base_time_ns or 0) - zero_ns)


def align(ranks: Sequence[RankSplit], matches: Sequence[GroupMatch]) -> Clocks:
    """Ties the clocks of the ranks together.

    The offset of a rank is the median, over the collectives it has in common with ranks already
    tied, of its end less the median of theirs; a drift is fitted where the recording is long and
    the ends show it. Ranks that no group ties to others are refused alone.

    Args:
        ranks: The ranks.
        matches: Their collectives that belong together.
    """
    by_rank = {split.rank: split for split in ranks}
    begins = [
        int(split.collectives.begin_ns.min()) + (split.trace.base_time_ns or 0)
        for split in ranks
        if len(split.collectives)
    ]
    zero_ns = min(begins, default=0)
    if not all(split.on_gpu and split.trace.backend != "gloo" for split in ranks):
        return Clocks(
            zero_ns,
            refused="Their collectives run on the CPU (gloo). There, ends differ by many ms "
            "between ranks, so nothing tells how far their clocks are apart.",
        )
    groups = _ends(by_rank, matches, zero_ns)
    fits, reference = _tied(groups)
    not_tied = tuple(sorted(set(by_rank) - set(fits)))
    if not fits:
        number = max((len(found.ends) for found in groups), default=0)
        return Clocks(
            zero_ns,
            num_collectives=number,
            refused=f"Clocks are compared by the common ends of AllReduce, AllGather and "
            f"ReduceScatter: at least {LEAST} are needed, and there are {number}.",
            not_tied=not_tied,
        )
    residual, spread = _residuals(groups, fits, by_rank, matches, zero_ns)
    size = np.abs(residual)
    typical_ns = float(np.median(size))
    refused = ""
    if typical_ns > max(_FINE_NS, _MOST_OF_SPREAD * spread):
        refused = (
            f"Ends of the same collectives differ by {typical_ns / 1000:.0f} us on ranks (median), "
            f"their begins by {spread / 1000:.0f} us: who waits for whom cannot be told. Are these "
            "the same steps of one run?"
        )
    return Clocks(
        zero_ns=zero_ns,
        reference=reference,
        offset_ns={rank: _whole(fit.offset_ns) for rank, fit in sorted(fits.items())},
        drift_ppm={rank: fit.slope * 1e6 for rank, fit in sorted(fits.items()) if fit.slope},
        typical_ns=typical_ns,
        most_ns=float(size.max()),
        uncertainty_ns=float(np.percentile(size, 95)),
        num_collectives=sum(len(found.ends) for found in groups),
        refused=refused,
        not_tied=not_tied,
    )


def ends_apart(clocks: Clocks, aligned_ends: Ints) -> npt.NDArray[np.bool_]:
    """Returns which collectives that should end together do not: [collective].

    Args:
        clocks: Tells what is usual.
        aligned_ends: Their ends on one clock, [collective, rank].
    """
    apart = aligned_ends.max(axis=1) - aligned_ends.min(axis=1)
    far: npt.NDArray[np.bool_] = apart > max(_APART_NS, _APART_TIMES * (clocks.typical_ns or 0.0))
    return far


# ----------------------------------------------------------------------------------------------


def _ends(
    by_rank: Mapping[int, RankSplit], matches: Sequence[GroupMatch], zero_ns: int
) -> list[_Ends]:
    """Returns ends that are common; broadcasts only where a group has too few others."""
    found = []
    broadcast = KINDS.index(Collective.BROADCAST)
    for one in matches:
        if one.point_to_point:
            continue
        chosen = ENDS_TOGETHER[one.kind]
        if chosen.sum() < LEAST:
            # The root may be done early, so they are only as good as their residual says.
            chosen = chosen | (one.kind == broadcast)
        ends = np.empty((int(chosen.sum()), len(one.ranks)))
        for column, rank in enumerate(one.ranks):
            split = by_rank[rank]
            end_ns = split.collectives.end_ns[one.places[chosen, column]]
            ends[:, column] = since_zero(split, end_ns, zero_ns)
        if len(ends):
            found.append(_Ends(one.ranks, ends))
    return found


def _tied(groups: Sequence[_Ends]) -> tuple[dict[int, _Fit], dict[int, int]]:
    """Fits each rank's clock against those already tied, those with the most in common first."""
    fits: dict[int, _Fit] = {}
    reference: dict[int, int] = {}
    candidates = sorted({rank for found in groups for rank in found.ranks})
    while True:
        common = {
            rank: sum(
                len(found.ends)
                for found in groups
                if rank in found.ranks and any(other in fits for other in found.ranks)
            )
            for rank in candidates
            if rank not in fits
        }
        if not common:
            break
        rank = max(common, key=lambda one: (common[one], -one))
        if common[rank] >= LEAST:
            fits[rank] = _fit(rank, groups, fits, sorted(fits)[:_MOST_OTHERS])
            reference[rank] = next(
                reference[other]
                for found in groups
                if rank in found.ranks
                for other in found.ranks
                if other in reference
            )
            continue
        # None of the rest is tied to them: it begins a group of its own, if it has partners.
        rank = min(common)
        number = sum(len(found.ends) for found in groups if rank in found.ranks)
        if number >= LEAST:
            fits[rank], reference[rank] = _Fit(), rank
        else:
            candidates.remove(rank)
    alone = [rank for rank in fits if sum(ref == reference[rank] for ref in reference.values()) < 2]
    for rank in alone:
        del fits[rank], reference[rank]
    for _ in range(_SWEEPS):
        for rank in sorted(set(fits) - set(reference.values())):
            others = [other for other in sorted(fits) if other != rank]
            fits[rank] = _fit(rank, groups, fits, others[:_MOST_OTHERS])
    return fits, reference


def _fit(
    rank: int, groups: Sequence[_Ends], fits: Mapping[int, _Fit], others: Sequence[int]
) -> _Fit:
    """Fits a rank's ends against the medians of others' ends."""
    own, theirs = [], []
    for found in groups:
        if rank not in found.ranks:
            continue
        columns = [place for place, one in enumerate(found.ranks) if one in others and one in fits]
        columns = columns or [
            place for place, one in enumerate(found.ranks) if one in fits and one != rank
        ]
        if not columns:
            continue
        aligned = [fits[found.ranks[place]].aligned(found.ends[:, place]) for place in columns]
        theirs.append(np.median(np.stack(aligned), axis=0))
        own.append(found.ends[:, found.ranks.index(rank)])
    end, other = np.concatenate(own), np.concatenate(theirs)
    ahead = end - other
    constant = float(np.median(ahead))
    without = float(np.median(np.abs(ahead - constant)))
    if end.size < _DRIFT_FROM or np.ptp(other) < _DRIFT_FROM_NS:
        return _Fit(constant)
    order = np.argsort(other, kind="stable")
    third = end.size // 3
    first, last = order[:third], order[-third:]
    slope = float(
        (np.median(ahead[last]) - np.median(ahead[first]))
        / (np.median(other[last]) - np.median(other[first]))
    )
    offset = float(np.median(ahead - slope * other))
    with_drift = float(np.median(np.abs(ahead - slope * other - offset)))
    # Below that the slope is noise, or stands for nothing that matters.
    if with_drift * 2 < without and abs(slope) * np.ptp(other) > 1000:
        return _Fit(offset, slope)
    return _Fit(constant)


def _residuals(
    groups: Sequence[_Ends],
    fits: Mapping[int, _Fit],
    by_rank: Mapping[int, RankSplit],
    matches: Sequence[GroupMatch],
    zero_ns: int,
) -> tuple[Floats, float]:
    """Returns distances of ends from their collective's median, and how far begins are apart.

    The latter is the median over collectives, in ns. Collectives that end apart from all others,
    such as one with a broken time, are left out unless they are many.
    """
    found = []
    for one in groups:
        columns = [place for place, rank in enumerate(one.ranks) if rank in fits]
        if len(columns) < 2:
            continue
        aligned = np.stack(
            [fits[one.ranks[place]].aligned(one.ends[:, place]) for place in columns], axis=1
        )
        middle = np.median(aligned, axis=1, keepdims=True)
        # Of two, the middle lies between them: what counts is how far they are from each other.
        found.append((aligned - middle) * (2 if len(columns) == _PAIR else 1))
    usual = float(np.median(np.abs(np.concatenate([part.ravel() for part in found]))))
    kept = []
    for part in found:
        far = np.abs(part).max(axis=1) > max(_APART_NS, _APART_TIMES * usual)
        kept.append(part if far.sum() > max(1, _MOST_APART * far.size) else part[~far])
    spreads = []
    for match in matches:
        chosen = ENDS_TOGETHER[match.kind]
        ranks = [(column, rank) for column, rank in enumerate(match.ranks) if rank in fits]
        if match.point_to_point or len(ranks) < 2 or not chosen.any():
            continue
        begins = []
        for column, rank in ranks:
            split = by_rank[rank]
            begin = split.collectives.begin_ns[match.places[chosen, column]]
            begins.append(fits[rank].aligned(since_zero(split, begin, zero_ns).astype(np.float64)))
        spreads.append(np.ptp(np.stack(begins), axis=0))
    spread = float(np.median(np.concatenate(spreads))) if spreads else 0.0
    return np.concatenate([part.ravel() for part in kept]), spread


def _whole(ns: float) -> int:
    """Rounds halves up, so that a clock that is shifted by whole ns rounds alike."""
    return math.floor(ns + 0.5)


def name_not_tied(clocks: Clocks) -> str:
    """Returns which ranks could not be tied, in words."""
    words = name_ranks(clocks.not_tied)
    return f"{words[0].upper()}{words[1:]}: fewer than {LEAST} collectives with others."
