"""Between ranks: who waits for whom, and what transfer takes once all have joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_profiler.naming import name_ranks
from ddp_profiler.trace import chance
from ddp_profiler.trace.alignment import (
    ENDS_TOGETHER,
    Clocks,
    align,
    ends_apart,
    name_not_tied,
    since_zero,
)
from ddp_profiler.trace.columns import Ints
from ddp_profiler.trace.intervals import covered_ns
from ddp_profiler.trace.kernels import KINDS, Collective, Work
from ddp_profiler.trace.matching import Bools, GroupMatch, match, only_of
from ddp_profiler.trace.model import MOST_ELEMENTS, Narrow
from ddp_profiler.trace.notices import Notices, TraceWarning
from ddp_profiler.trace.split import RankSplit
from ddp_profiler.trace.steps import find_steps

_ALL_MEET = np.array(
    [
        kind
        in (
            Collective.ALL_REDUCE,
            Collective.ALL_GATHER,
            Collective.REDUCE_SCATTER,
            Collective.BARRIER,
        )
        for kind in KINDS
    ]
)

_PAIR = 2
_MOST_APART = 0.5
_OUTLIER = 5
_ENOUGH_LAGS = 5


@dataclass(frozen=True)
class Meetings:
    """Collectives of one group that were compared; times in ns since ``Clocks.zero_ns``.

    All times are on one clock, that of the group's reference. Begin is when a kernel starts on
    its stream: what it queued for before is not in it.

    Attributes:
        match: Which collectives these are.
        begin_ns: Begin, [collective, rank].
        end_ns: End, [collective, rank].
        wait_ns: From the own begin to that of the last to join, or to the own end where that
            is earlier, [collective, rank].
        last: Place in ``match.ranks`` of the last to join, [collective].
        lag_ns: By how much it came after the second to last, [collective].
        transfer_ns: From its begin to its end, [collective].
        meets: Whether nobody was done before the last had joined, so that the others had to
            wait for it, [collective].
        clear: Whether the lag is more than twice the clocks' uncertainty, since the ends of both
            ranks may be off by it, [collective].
        told: Whether ends agree as they should, so that the collective counts, [collective].
        whole: Whether all ranks of the group are here. Without, a wait is that for those given,
            and what follows may be waiting for one that is missing.
        step: ``Step.key`` of its step on the first rank; -1 for none, [collective].
    """

    match: GroupMatch
    begin_ns: Ints
    end_ns: Ints
    wait_ns: Ints
    last: Ints
    lag_ns: Ints
    transfer_ns: Ints
    meets: Bools
    clear: Bools
    told: Bools
    step: Ints
    whole: bool = True


@dataclass(frozen=True)
class Waiting:
    """Exposed communication of a rank, divided; all in ns.

    exposed_wait + exposed_transfer + exposed_untold = exposed communication. Where there are
    collectives, but none of them was compared, only the last of these is known. Where of none all
    ranks of the group were compared, transfer is not known, and waiting is that for the others.

    Attributes:
        wait_ns: Sum of its waits.
        transfer_ns: Sum of what its collectives last once all have joined.
        exposed_wait_ns: Time in which nothing computes and no collective transfers.
        exposed_transfer_ns: Time in which nothing computes and one transfers.
        exposed_untold_ns: Time of collectives that could not be compared, or after the last of
            those given has joined where ranks of the group are missing, as far as neither of the
            two runs.
    """

    wait_ns: int | None
    transfer_ns: int | None
    exposed_wait_ns: int | None
    exposed_transfer_ns: int | None
    exposed_untold_ns: int


@dataclass(frozen=True)
class Lateness:
    """How often others waited for a rank.

    Attributes:
        rank: The rank.
        joined: Meetings that it took part in.
        last: How many of them it joined last, by more than clocks may be off.
        caused_ns: Sum of the lags to the second to last: what the others would gain.
        lag_ns: Median of these lags; None without any.
        behind_ns: Mean time after the first to join, over all meetings; None without any.
        steps: Steps that have meetings.
        steps_worst: In how many of them no rank caused more.
        excess_ns: How much more it caused than the others on average; not below 0.
        clearly: Whether it is late more clearly than chance makes one of equal ranks: in step
            after step, or, with fewer than 3 steps, in collectives.
        later: Whether it joins later than the others do on average, in step after step.
        outliers: Meetings in which its lag was more than 5 times the largest of the others.
        outlier_ns: Sum of these lags.
    """

    rank: int
    joined: int
    last: int
    caused_ns: int
    lag_ns: int | None
    behind_ns: int | None
    steps: int
    steps_worst: int
    excess_ns: int = 0
    clearly: bool = False
    later: bool = False
    outliers: int = 0
    outlier_ns: int = 0


@dataclass(frozen=True)
class AcrossRanks:
    """What several ranks' traces tell together.

    Attributes:
        matches: Collectives that belong together, also where nothing more can be told.
        clocks: The ranks' clocks, or why they cannot be compared; None with one rank.
        meetings: Collectives compared; empty where refused.
        waiting: Of each rank and step, by the step's place; and of the whole.
        waiting_total: The whole recording of each rank.
        lateness: Of each rank compared, the one that cost most first.
        warnings: What was left out or refused.
    """

    matches: tuple[GroupMatch, ...]
    clocks: Clocks | None
    meetings: tuple[Meetings, ...]
    waiting: Mapping[int, tuple[Waiting, ...]]
    waiting_total: Mapping[int, Waiting]
    lateness: tuple[Lateness, ...]
    warnings: tuple[TraceWarning, ...]

    @property
    def refused(self) -> str:
        """Why ranks are not compared; empty where they are."""
        if self.clocks is None:
            return "There is one rank only."
        return self.clocks.refused


def compare(ranks: Sequence[RankSplit]) -> AcrossRanks:
    """Matches the collectives of ranks, ties their clocks and tells waiting from transfer.

    Args:
        ranks: All ranks that were given, in order.
    """
    notices = Notices()
    absurd = sum(int((split.collectives.elements > MOST_ELEMENTS).sum()) for split in ranks)
    notices.add("absurd_elements", absurd)
    if len(ranks) < 2:
        return AcrossRanks((), None, (), {}, {}, (), notices.all())
    matches = match(ranks, notices)
    clocks = align(ranks, matches)
    meetings: tuple[Meetings, ...] = ()
    waiting: dict[int, tuple[Waiting, ...]] = {}
    total: dict[int, Waiting] = {}
    lateness: tuple[Lateness, ...] = ()
    if not clocks.refused:
        if clocks.not_tied:
            notices.add("rank_not_aligned", len(clocks.not_tied), name_not_tied(clocks))
        if clocks.unconfirmed:
            notices.add("group_not_confirmed", 1, clocks.unconfirmed)
        if clocks.drift_ppm:
            fastest = max(clocks.drift_ppm, key=lambda rank: abs(clocks.drift_ppm[rank]))
            notices.add(
                "clock_drift",
                len(clocks.drift_ppm),
                f"The largest: rank {fastest}, {clocks.drift_ppm[fastest]:+.2f} ppm.",
            )
        by_rank = {split.rank: split for split in ranks}
        matches = tuple(
            only_of(one, clocks.reference) if not _left_alone(one, clocks) else one
            for one in matches
        )
        tied = [one for one in matches if not _left_alone(one, clocks)]
        tied = [one for one in tied if len({clocks.reference[r] for r in one.ranks}) == 1]
        meetings = tuple(_meetings(one, by_rank, clocks, notices) for one in tied)
        if why := _mostly_untold(meetings):
            clocks, meetings = replace(clocks, refused=why), ()
    if clocks.refused:
        notices.add("across_ranks_refused", 1, clocks.refused)
    else:
        for split in ranks:
            if split.rank in clocks.reference:
                waiting[split.rank], total[split.rank] = _waiting(split, meetings)
        lateness = lateness_of(meetings)
    return AcrossRanks(matches, clocks, meetings, waiting, total, lateness, notices.all())


def _mostly_untold(meetings: Sequence[Meetings]) -> str:
    """Returns why nothing can be told where most collectives that should end together do not."""
    number = apart = 0
    for found in meetings:
        together = ENDS_TOGETHER[found.match.kind]
        number += int(together.sum())
        apart += int((together & ~found.told).sum())
    if apart <= _MOST_APART * number:
        return ""
    return (
        f"{apart} of {number} collectives that should end together on all ranks do not: who waits "
        "for whom cannot be told. Are these the same steps of one run?"
    )


def _left_alone(found: GroupMatch, clocks: Clocks) -> bool:
    """Returns whether collectives are not compared: too few ranks, or whose they are is unknown."""
    tied = sum(rank in clocks.reference for rank in found.ranks)
    nameless = found.label is None and len(found.ranks) > _PAIR
    return tied < _PAIR or (nameless and bool(clocks.unconfirmed))


def _meetings(
    found: GroupMatch, by_rank: Mapping[int, RankSplit], clocks: Clocks, notices: Notices
) -> Meetings:
    begin = np.empty(found.places.shape, np.int64)
    end = np.empty(found.places.shape, np.int64)
    for column, rank in enumerate(found.ranks):
        split = by_rank[rank]
        for times, target in ((split.collectives.begin_ns, begin), (split.collectives.end_ns, end)):
            own = since_zero(split, times[found.places[:, column]], clocks.zero_ns)
            target[:, column] = clocks.aligned(rank, own)
    order = np.sort(begin, axis=1)
    last_begin, second = order[:, -1], order[:, -2]
    last = begin.argmax(axis=1)
    rows = np.arange(len(found))
    uncertain = clocks.uncertainty_ns or 0.0
    meets = _ALL_MEET[found.kind] | (end.min(axis=1) >= last_begin - uncertain)
    told = ~(ENDS_TOGETHER[found.kind] & ends_apart(clocks, end))
    if not told.all():
        worst = int(np.argmax(np.where(told, 0, np.ptp(end, axis=1))))
        kind, index = KINDS[found.kind[worst]].value, int(found.places[worst, 0])
        index = int(by_rank[found.ranks[0]].collectives.index[index])
        notices.add(
            "ends_apart",
            int((~told).sum()),
            f"The worst: {kind} {index}, by {np.ptp(end[worst]) / 1e6:.1f} ms between "
            f"{name_ranks([found.ranks[end[worst].argmin()], found.ranks[end[worst].argmax()]])}.",
        )
    split = by_rank[found.ranks[0]]
    of = np.array([step.step.key for step in split.steps] + [-1], np.int64)
    return Meetings(
        match=found,
        begin_ns=begin,
        end_ns=end,
        wait_ns=np.clip(np.minimum(last_begin[:, None], end) - begin, 0, None),
        last=last,
        lag_ns=last_begin - second,
        transfer_ns=end[rows, last] - last_begin,
        meets=meets & told,
        clear=meets & told & (last_begin - second > 2 * uncertain),
        told=told,
        step=of[split.collectives.step[found.places[:, 0]]],
        whole=_all_here(found, split.trace.world_size),
    )


def _all_here(found: GroupMatch, world_size: int | None) -> bool:
    """Returns whether all ranks of a group are compared, as far as the traces tell its size."""
    size = found.size if found.size is not None else world_size
    return size is None or len(found.ranks) >= size


# ----------------------------------------------------------------------------------------------
# What a rank's waiting costs it


def waits_of(split: RankSplit, meetings: Sequence[Meetings]) -> tuple[Ints, Bools, Bools]:
    """Returns how long each collective of a rank waits, and what of it is known, [collective] each.

    Args:
        split: The rank.
        meetings: What was compared.

    Returns:
        The wait in ns, 0 where it is not known; whether it is; and whether all that follows it
        is transfer.
    """
    wait_ns = np.zeros(len(split.collectives), np.int64)
    told, whole = np.zeros(len(split.collectives), bool), np.zeros(len(split.collectives), bool)
    for found in meetings:
        if split.rank not in found.match.ranks:
            continue
        column = found.match.ranks.index(split.rank)
        places = found.match.places[found.told, column]
        wait_ns[places] = found.wait_ns[found.told, column]
        told[places] = True
        whole[places] = found.whole
    # Rounding of a drift could exceed the whole by a ns.
    longest_ns = split.collectives.end_ns - split.collectives.begin_ns
    return np.minimum(wait_ns, longest_ns), told, whole


def _waiting(split: RankSplit, meetings: Sequence[Meetings]) -> tuple[tuple[Waiting, ...], Waiting]:
    wait_ns, told, whole = waits_of(split, meetings)
    gpu, comm = split.trace.gpu, split.collectives
    of_work = find_steps(split.trace, Notices()).of_work
    computes = np.flatnonzero(gpu.work == Work.COMPUTE)
    joined = comm.begin_ns + wait_ns

    def divided(work: Ints, chosen: Ints) -> Waiting:
        begin, end = gpu.begin_ns[work], gpu.end_ns[work]
        covered = [covered_ns(begin, end)]
        # Each wider than the one before: what it adds is what only it has.
        # Where nothing is told, the wait is 0 and all of it is the rest.
        moved, rest = chosen[whole[chosen]], chosen[~whole[chosen]]
        for more_begin, more_end in (
            (joined[moved], comm.end_ns[moved]),
            (joined[rest], comm.end_ns[rest]),
            (comm.begin_ns[chosen], joined[chosen]),
        ):
            begin, end = np.concatenate((begin, more_begin)), np.concatenate((end, more_end))
            covered.append(covered_ns(begin, end))
        transfer, untold, wait = np.diff(covered).tolist()
        waits = not chosen.size or bool(told[chosen].any())
        moves = not chosen.size or moved.size > 0
        return Waiting(
            wait_ns=int(wait_ns[chosen].sum()) if waits else None,
            transfer_ns=int((comm.end_ns - joined)[moved].sum()) if moves else None,
            exposed_wait_ns=wait if waits else None,
            exposed_transfer_ns=transfer if moves else None,
            exposed_untold_ns=untold,
        )

    number = len(split.steps)
    work_of = _by_step(of_work[computes], number)
    comm_of = _by_step(comm.step, number)
    steps = [divided(computes[work_of[place]], comm_of[place]) for place in range(number)]
    return tuple(steps), divided(computes, np.arange(len(comm)))


def _by_step(step: Narrow, number: int) -> list[Ints]:
    """Returns the places of what each step has, [step]."""
    order = np.argsort(step, kind="stable")
    edges = np.searchsorted(step[order], np.arange(number + 1))
    return [order[edges[place] : edges[place + 1]] for place in range(number)]


def lateness_of(meetings: Sequence[Meetings]) -> tuple[Lateness, ...]:
    """Returns how often others waited for each rank, the one that cost most first.

    Args:
        meetings: What was compared.
    """
    joined: dict[int, int] = defaultdict(int)
    behind: dict[int, int] = defaultdict(int)
    lags: dict[int, list[int]] = defaultdict(list)
    every_lag: dict[int, list[int]] = defaultdict(list)
    expected: dict[int, float] = defaultdict(float)
    by_step: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    behind_of: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for found in meetings:
        met = found.begin_ns[found.meets]
        after = met - met.min(axis=1, keepdims=True)
        step = found.step[found.meets]
        for column, rank in enumerate(found.match.ranks):
            joined[rank] += len(met)
            behind[rank] += int(after[:, column].sum())
            expected[rank] += len(met) / len(found.match.ranks)
            for at, ns in zip(step.tolist(), after[:, column].tolist(), strict=True):
                if at >= 0:
                    behind_of[at][rank].append(ns)
        for place in np.flatnonzero(found.meets).tolist():
            rank, lag = found.match.ranks[found.last[place]], int(found.lag_ns[place])
            every_lag[rank].append(lag)
            if not found.clear[place]:
                continue
            lags[rank].append(lag)
            if found.step[place] >= 0:
                by_step[int(found.step[place])][rank] += lag
    worst: dict[int, int] = defaultdict(int)
    for caused in by_step.values():
        worst[max(caused, key=lambda rank: (caused[rank], -rank))] += 1
    ranks = sorted(joined)
    means = np.full((len(behind_of), len(ranks)), np.nan)
    for row, of_rank in enumerate(behind_of.values()):
        for rank, values in of_rank.items():
            means[row, ranks.index(rank)] = sum(values) / len(values)
    result = []
    for column, rank in enumerate(ranks):
        caused_ns = sum(lags[rank])
        others_ns = [sum(lags[other]) for other in ranks if other != rank]
        steps = sum(rank in of_rank for of_rank in behind_of.values())
        latest = all(
            behind[rank] * joined[other] > behind[other] * joined[rank]
            for other in ranks
            if other != rank and joined[other]
        )
        # Only where others were last often enough to show what is usual.
        usual = [lag for other in ranks if other != rank for lag in every_lag[other]]
        most = max(usual, default=0)
        far = [lag for lag in lags[rank] if lag > _OUTLIER * most]
        far = far if len(usual) >= _ENOUGH_LAGS else []
        later = chance.later_on_average(means, column)
        if steps >= chance.FEW_STEPS:
            often = chance.more_often(worst[rank], steps, 1 / len(ranks), len(ranks))
            clearly = often or later
        else:
            share = expected[rank] / joined[rank] if joined[rank] else 1.0
            clearly = chance.more_often(
                len(lags[rank]), joined[rank], share, len(ranks), chance.ERROR_OF_FEW
            )
        result.append(
            Lateness(
                rank=rank,
                joined=joined[rank],
                last=len(lags[rank]),
                caused_ns=caused_ns,
                lag_ns=round(float(np.median(lags[rank]))) if lags[rank] else None,
                behind_ns=behind[rank] // joined[rank] if joined[rank] else None,
                steps=steps,
                steps_worst=worst[rank],
                excess_ns=max(0, caused_ns - sum(others_ns) // max(1, len(others_ns))),
                clearly=clearly and latest,
                later=later,
                outliers=len(far),
                outlier_ns=sum(far),
            )
        )
    return tuple(sorted(result, key=lambda one: (-one.caused_ns, one.rank)))
