"""How far the clocks of ranks are apart, from collectives that end together on all of them.

An AllReduce, AllGather or ReduceScatter of NCCL ends on all ranks within some us, since nobody
has the result before everybody has given. So the distance of their ends is that of the clocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
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
_SAMPLED = 200
_SWEEPS = 2
_PAIR = 2
_DRIFT_FROM = 24
_DRIFT_FROM_NS = 1_000_000_000
_MOST_DRIFT = 1e-3
_FINE_NS = 20_000
_COARSE_NS = 200_000
_MOST_OF_TRANSFER = 0.02
_MOST_OF_OTHER_GROUPS = 0.1
_APART_TIMES = 20
_APART_NS = 100_000
_NEAR_TIMES = 5
_MANY = 8
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
        not_tied: Why a rank is left out, by rank.
        unconfirmed: Why collectives that name no group are left out; empty where they are not.
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
    not_tied: Mapping[int, str] = field(default_factory=dict)
    unconfirmed: str = ""

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
    named: bool

    def of(self, chosen: Collection[int]) -> _Ends | None:
        """Returns those of some ranks; None where fewer than two are left."""
        columns = [place for place, rank in enumerate(self.ranks) if rank in chosen]
        if len(columns) < _PAIR:
            return None
        return _Ends(
            tuple(self.ranks[place] for place in columns), self.ends[:, columns], self.named
        )


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

    Two ranks agree if the distance of their common ends stays within some us for nearly all
    collectives. Of the ranks that have collectives in common those are kept that agree with one
    another, if they are more than any others that do; each other one is left out with the reason.
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
    bound_ns = _bound_ns(by_rank, matches)
    groups = _ends(by_rank, matches, zero_ns)
    agreement = _agreement(groups, bound_ns)
    unconfirmed = ""
    for found in groups:
        if not found.named and len(found.ranks) > _PAIR:
            own = agreement if len(groups) == 1 else _agreement([found], bound_ns)
            unconfirmed = unconfirmed or _several_groups(found, own, bound_ns)
    if unconfirmed:
        groups = [found for found in groups if found.named]
        agreement = _agreement(groups, bound_ns)
    groups_named = all(found.named or len(found.ranks) == _PAIR for found in groups)
    kept, not_tied = _kept(by_rank, agreement)
    groups = [only for found in groups if (only := found.of(kept)) is not None]
    fits, reference = _tied(groups)
    for rank in set(by_rank) - set(fits) - set(not_tied):
        not_tied[rank] = f"it has fewer than {LEAST} collectives in common with others"
    not_tied = dict(sorted(not_tied.items()))
    if not fits:
        why = unconfirmed or _why_none(agreement, groups_named, bound_ns)
        return Clocks(
            zero_ns,
            typical_ns=agreement.typical_ns,
            num_collectives=agreement.most_common,
            refused=why,
            not_tied=not_tied,
            unconfirmed=why if agreement.pairs and not groups_named else unconfirmed,
        )
    residual = _residuals(groups, fits)
    size = np.abs(residual)
    return Clocks(
        zero_ns=zero_ns,
        reference=reference,
        offset_ns={rank: _whole(fit.offset_ns) for rank, fit in sorted(fits.items())},
        drift_ppm={rank: fit.slope * 1e6 for rank, fit in sorted(fits.items()) if fit.slope},
        typical_ns=float(np.median(size)),
        most_ns=float(size.max()),
        uncertainty_ns=float(np.percentile(size, 95)),
        num_collectives=sum(len(found.ends) for found in groups),
        not_tied=not_tied,
        unconfirmed=unconfirmed,
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
    """Returns ends that are common.

    Broadcasts never serve: the root may be done early, always by as much, and a constant
    distance is what a clock that is off looks like.
    """
    found = []
    for one in matches:
        if one.point_to_point:
            continue
        chosen = ENDS_TOGETHER[one.kind]
        ends = np.empty((int(chosen.sum()), len(one.ranks)))
        for column, rank in enumerate(one.ranks):
            split = by_rank[rank]
            end_ns = split.collectives.end_ns[one.places[chosen, column]]
            ends[:, column] = since_zero(split, end_ns, zero_ns)
        if len(ends):
            found.append(_Ends(one.ranks, ends, one.label is not None))
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
    return _line(ahead, other)


def _line(ahead: Floats, other: Floats) -> _Fit:
    """Fits how far ends are ahead of others' by a constant, or by a drift where that shows."""
    constant = float(np.median(ahead))
    if ahead.size < _DRIFT_FROM or np.ptp(other) < _DRIFT_FROM_NS:
        return _Fit(constant)
    without = float(np.median(np.abs(ahead - constant)))
    order = np.argsort(other, kind="stable")
    third = ahead.size // 3
    first, last = order[:third], order[-third:]
    slope = float(
        (np.median(ahead[last]) - np.median(ahead[first]))
        / (np.median(other[last]) - np.median(other[first]))
    )
    offset = float(np.median(ahead - slope * other))
    with_drift = float(np.median(np.abs(ahead - slope * other - offset)))
    # Below that the slope is noise, or stands for nothing that matters; no clock is so far off
    # as a run with longer steps.
    if with_drift * 2 < without and 1000 / np.ptp(other) < abs(slope) <= _MOST_DRIFT:
        return _Fit(offset, slope)
    return _Fit(constant)


def _residuals(groups: Sequence[_Ends], fits: Mapping[int, _Fit]) -> Floats:
    """Returns distances of ends from their collective's median, in ns.

    Collectives that end apart from all others, such as one with a broken time, are left out
    unless they are many.
    """
    found = []
    for one in groups:
        columns = [place for place, rank in enumerate(one.ranks) if rank in fits]
        if len(columns) < _PAIR:
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
    return np.concatenate([part.ravel() for part in kept])


def _whole(ns: float) -> int:
    """Rounds halves up, so that a clock that is shifted by whole ns rounds alike."""
    return math.floor(ns + 0.5)


def name_not_tied(clocks: Clocks) -> str:
    """Returns which ranks could not be tied, and why, in words."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in clocks.not_tied.items():
        by_reason.setdefault(reason, []).append(rank)
    told = []
    for reason, ranks in by_reason.items():
        words = name_ranks(ranks)
        told.append(f"{words[0].upper()}{words[1:]}: {reason}.")
    kept = name_ranks(clocks.offset_ns)
    return f"{' '.join(told)} What is said across ranks is of {kept} only."


# ----------------------------------------------------------------------------------------------
# Which ranks agree


@dataclass
class _Pair:
    """How well the ends of two ranks agree.

    Attributes:
        common: Collectives of both that were looked at.
        near: How many of them end at the usual distance.
        typical_ns: Median of how far they are from it.
        agrees: Whether that is what one run's collectives do.
    """

    common: int
    near: int
    typical_ns: float
    agrees: bool


@dataclass
class _Agreement:
    """Of each pair of ranks with enough in common, the lower first, how well they agree."""

    pairs: dict[tuple[int, int], _Pair]
    most_common: int

    @property
    def typical_ns(self) -> float | None:
        """How far ends are apart, the median over pairs; None without any."""
        if not self.pairs:
            return None
        return float(np.median([pair.typical_ns for pair in self.pairs.values()]))

    def of(self, rank: int, others: Collection[int]) -> list[_Pair]:
        """Returns a rank's pairs with some others."""
        keys = ((min(rank, other), max(rank, other)) for other in others if other != rank)
        return [self.pairs[key] for key in keys if key in self.pairs]

    def parts(self, ranks: Collection[int], *, agreeing: bool) -> list[set[int]]:
        """Returns the ranks in sets that pairs, or pairs that agree, tie; the largest first."""
        set_of = {rank: {rank} for rank in ranks}
        for (one, other), pair in self.pairs.items():
            if one not in set_of or other not in set_of or (agreeing and not pair.agrees):
                continue
            if set_of[one] is not set_of[other]:
                both = set_of[one] | set_of[other]
                for rank in both:
                    set_of[rank] = both
        parts = {id(part): part for part in set_of.values()}
        return sorted(parts.values(), key=lambda part: (-len(part), min(part)))


def _bound_ns(by_rank: Mapping[int, RankSplit], matches: Sequence[GroupMatch]) -> float:
    """Returns how far ends of one collective may be apart (median): 20 us, or 2 % of a transfer.

    A transfer is what the last to join needs, however late it is. 200 us is the most.
    """
    found = []
    for one in matches:
        chosen = ENDS_TOGETHER[one.kind]
        if one.point_to_point or not chosen.any():
            continue
        lasted = [
            (by_rank[rank].collectives.end_ns - by_rank[rank].collectives.begin_ns)[
                one.places[chosen, column]
            ]
            for column, rank in enumerate(one.ranks)
        ]
        found.append(np.min(np.stack(lasted), axis=0))
    transfer_ns = float(np.median(np.concatenate(found))) if found else 0.0
    return min(max(_FINE_NS, _MOST_OF_TRANSFER * transfer_ns), _COARSE_NS)


def _agreement(groups: Sequence[_Ends], bound_ns: float) -> _Agreement:
    """Compares the ends of each two ranks, over all groups that they share."""
    ranks = sorted({rank for found in groups for rank in found.ranks})
    rows = []
    for found in groups:
        ends = found.ends[:: -(-len(found.ends) // _SAMPLED) or 1]
        wide = np.full((len(ends), len(ranks)), np.nan)
        wide[:, [ranks.index(rank) for rank in found.ranks]] = ends
        rows.append(wide)
    result = _Agreement({}, 0)
    if not rows:
        return result
    every = np.concatenate(rows)
    has = ~np.isnan(every)
    for place, one in enumerate(ranks):
        for other_place in range(place + 1, len(ranks)):
            both = has[:, place] & has[:, other_place]
            common = int(both.sum())
            result.most_common = max(result.most_common, common)
            if common >= LEAST:
                ends = every[both]
                key = one, ranks[other_place]
                result.pairs[key] = _pair(ends[:, place], ends[:, other_place], bound_ns)
    return result


def _pair(one: Floats, other: Floats, bound_ns: float) -> _Pair:
    ahead = other - one
    found = _judged(np.abs(ahead - np.median(ahead)), one, bound_ns)
    if found.agrees:
        return found
    fit = _line(ahead, one)
    return _judged(np.abs(ahead - fit.slope * one - fit.offset_ns), one, bound_ns)


def _judged(far_ns: Floats, ends: Floats, bound_ns: float) -> _Pair:
    # Of few, some fall together by chance.
    near = far_ns <= bound_ns * (_NEAR_TIMES if far_ns.size >= _MANY else 1)
    common, number = int(near.size), int(near.sum())
    # A broken time lies off by more than the whole recording lasts: it says nothing of the clock.
    broken = int((far_ns > np.ptp(ends[near])).sum()) if common > number >= _PAIR else 0
    counted = common - min(broken, max(1, int(_MOST_APART * common)))
    typical_ns = float(np.median(far_ns))
    agrees = typical_ns <= bound_ns and number >= max(_PAIR, (1 - _MOST_APART) * counted)
    return _Pair(common, number, typical_ns, agrees)


def _kept(ranks: Collection[int], agreement: _Agreement) -> tuple[set[int], dict[int, str]]:
    """Returns the ranks that agree, and why each other one with enough in common does not."""
    kept: set[int] = set()
    left_out: dict[int, str] = {}
    for tied in agreement.parts(ranks, agreeing=False):
        if len(tied) < _PAIR:
            continue
        parts = agreement.parts(tied, agreeing=True)
        # Where two sets are alike, nothing tells which one is right.
        best = set() if len(parts) > 1 and len(parts[1]) == len(parts[0]) else set(parts[0])
        while True:
            # It takes more than one partner by chance.
            odd = {rank for rank in best if _mostly_disagrees(agreement.of(rank, best))}
            if not odd:
                break
            best -= odd
        if len(best) < _PAIR:
            best = set()
        kept |= best
        for rank in tied - best:
            pairs = agreement.of(rank, best or tied)
            # The one with the most in common says most.
            pair = max(pairs, key=lambda found: found.common)
            typical = float(np.median([found.typical_ns for found in pairs]))
            left_out[rank] = (
                f"its ends differ from the others' by {typical / 1000:,.0f} us (median), and "
                f"{pair.near} of {pair.common} agree; it is of another run or of other steps, or "
                "its clock was set"
            )
    return kept, left_out


def _mostly_disagrees(pairs: Sequence[_Pair]) -> bool:
    return 2 * sum(pair.agrees for pair in pairs) < len(pairs)


def _several_groups(found: _Ends, agreement: _Agreement, bound_ns: float) -> str:
    """Returns why collectives without a name cannot be those of one group of all ranks."""
    parts = agreement.parts(found.ranks, agreeing=True)
    if len(parts) > 1 and len(parts[1]) > 1:
        words = " and ".join(name_ranks(sorted(part)) for part in parts if len(part) > 1)
        why = f"{words} end together among themselves only"
    else:
        kept, _ = _kept(found.ranks, agreement)
        only = found.of(kept)
        if only is None:
            return ""
        columns = [
            _line(only.ends[:, place] - only.ends[:, 0], only.ends[:, 0])
            for place in range(len(only.ranks))
        ]
        aligned = np.stack(
            [fit.aligned(only.ends[:, place]) for place, fit in enumerate(columns)], axis=1
        )
        apart = np.ptp(aligned, axis=1) > _NEAR_TIMES * bound_ns
        if apart.sum() <= max(1, _MOST_OF_OTHER_GROUPS * apart.size):
            return ""
        why = f"{int(apart.sum())} of {apart.size} end apart on {name_ranks(only.ranks)}"
    return (
        "They name no process group, and their ends show that not all are of all ranks: "
        f"{why}. Newer versions of PyTorch record the groups."
    )


def _why_none(agreement: _Agreement, named: bool, bound_ns: float) -> str:
    """Returns why no ranks are tied."""
    if not agreement.pairs:
        return (
            "Clocks are compared by the common ends of AllReduce, AllGather and ReduceScatter: "
            f"at least {LEAST} are needed, and there are {agreement.most_common}. Broadcasts and "
            "messages do not serve: one rank may be done before another."
        )
    near = sum(pair.near for pair in agreement.pairs.values())
    common = sum(pair.common for pair in agreement.pairs.values())
    return (
        f"Ends of the same collectives differ by {(agreement.typical_ns or 0) / 1000:,.0f} us "
        f"between ranks (median; {bound_ns / 1000:.0f} us are usual at most), and {near} of "
        f"{common} agree: who waits for whom cannot be told. "
        + (
            "Are these the same steps of one run?"
            if named
            else "They name no process group, so they may be of several; or the traces are not of "
            "the same steps of one run."
        )
    )
