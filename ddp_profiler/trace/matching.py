"""Which collective of one rank is which of another: by process group, kind, order and size.

Ranks call the collectives of a process group in the same order, or they would hang. What differs
between their traces is where the recording begins and ends. So sequences are paired within steps
of the same number where all ranks have such, and by shifting them against each other elsewhere.
Where a pairing is not certain there is none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddp_profiler.naming import name_ranks
from ddp_profiler.trace.columns import Ints, median
from ddp_profiler.trace.kernels import KINDS, Collective
from ddp_profiler.trace.notices import Notices
from ddp_profiler.trace.split import RankSplit
from ddp_profiler.trace.steps import StepSource, label_of

Bools = npt.NDArray[np.bool_]

SEND_RECV = KINDS.index(Collective.SEND_RECV)

_NUMBERED = (StepSource.PROFILER_STEP, StepSource.GPU_ANNOTATION)

# Their sizes differ between the ranks of one collective: the root has more, or shares are unequal.
_UNEQUAL = np.array(
    [
        kind
        in (
            Collective.ALL_TO_ALL,
            Collective.GATHER,
            Collective.SCATTER,
            Collective.SEND_RECV,
            Collective.UNKNOWN,
        )
        for kind in KINDS
    ]
)

_AFTER_ALL = np.iinfo(np.int64).max
_MOST_SHIFT = 2000
_LEAST_OVERLAP = 3
_SAMPLED = 64
_MOST_SCATTERED = 2000
_CLEARLY = 4
_ALIKE_NS = 1000
_PAIR = 2
_MOSTLY = 0.75


@dataclass(frozen=True)
class GroupMatch:
    """Collectives of one process group, each found on all of its ranks that were given.

    Attributes:
        label: The group's name; None where the traces name none.
        size: Number of its ranks; None where not said.
        ranks: Those that were given, [rank].
        places: Place in each rank's ``Collectives``, [collective, rank].
        kind: Number of the kind in ``kernels.KINDS``, [collective].
        elements: The largest of the ranks; -1 where not said, [collective].
        point_to_point: Whether these are messages (SendRecv): paired by order, but a rank may
            be done with one before another has begun it.
    """

    label: str | None
    size: int | None
    ranks: tuple[int, ...]
    places: Ints
    kind: npt.NDArray[np.uint8]
    elements: Ints
    point_to_point: bool

    def __len__(self) -> int:
        return int(self.places.shape[0])


@dataclass(frozen=True)
class Calls:
    """The collectives of one group on one rank, in order; all arrays are [collective].

    Attributes:
        place: Place in the rank's ``Collectives``.
        kind: Number of the kind in ``kernels.KINDS``.
        elements: Elements; -1 where not said.
        index: Place among the rank's collectives of this kind and group.
        end_ns: End, in ns since 1970 where the trace says.
        step: ``Step.key`` of the step, or of the next one for what lies between; None where steps
            have no numbers that other ranks know.
        inside: Whether it is within a step.
    """

    place: Ints
    kind: Ints
    elements: Ints
    index: Ints
    end_ns: Ints
    step: Ints | None
    inside: Bools

    def take(self, chosen: Ints | slice) -> Calls:
        """Returns some of them; those of a slice are not copied."""
        return Calls(
            self.place[chosen],
            self.kind[chosen],
            self.elements[chosen],
            self.index[chosen],
            self.end_ns[chosen],
            None if self.step is None else self.step[chosen],
            self.inside[chosen],
        )

    def __len__(self) -> int:
        return int(self.place.size)


@dataclass(frozen=True)
class Pairing:
    """What belongs together in two sequences.

    Attributes:
        first: Places in the first, [pair].
        second: Places in the second, [pair].
        differs: What does not agree: kind, size, count, order; empty where all does.
        at: The first place at which it does not.
        count: How many are concerned.
    """

    first: Ints
    second: Ints
    differs: str = ""
    at: int = 0
    count: int = 0


def match(ranks: Sequence[RankSplit], notices: Notices) -> tuple[GroupMatch, ...]:
    """Pairs the collectives of the ranks' traces.

    Args:
        ranks: The ranks, in order.
        notices: Takes what could not be paired, with the ranks and the first place.
    """
    by_rank = {split.rank: split for split in ranks}
    numbered = all(split.step_source in _NUMBERED for split in ranks)
    found = []
    for key, members in _groups(ranks, notices).items():
        if key.label is None and by_rank[next(iter(members))].trace.world_size != _PAIR:
            notices.add("group_not_named", 1)
        for point_to_point in (False, True):
            sequences = {
                rank: _sequence(by_rank[rank], numbers, numbered, point_to_point)
                for rank, numbers in members.items()
            }
            if not any(map(len, sequences.values())):
                continue
            columns = _paired(sequences, numbered, point_to_point, key, notices)
            matched = _group_match(key, by_rank, sequences, columns, point_to_point)
            if len(matched):
                found.append(matched)
    return tuple(found)


def only_of(found: GroupMatch, ranks: Collection[int]) -> GroupMatch:
    """Returns what some of the ranks have, as if only they were given.

    Args:
        found: Collectives that belong together.
        ranks: Those to keep.
    """
    columns = [place for place, rank in enumerate(found.ranks) if rank in ranks]
    if len(columns) == len(found.ranks):
        return found
    return replace(
        found,
        ranks=tuple(found.ranks[place] for place in columns),
        places=found.places[:, columns],
    )


# ----------------------------------------------------------------------------------------------
# Groups and their sequences


class _Key(NamedTuple):
    name: str
    description: str
    size: int | None
    ranks: tuple[int, ...] | None
    label: str | None


def _groups(ranks: Sequence[RankSplit], notices: Notices) -> dict[_Key, dict[int, tuple[int, ...]]]:
    """Returns the groups with at least two ranks, and their numbers in each rank's trace.

    Ranks of a group that a trace was given of but that have nothing of it have no number.
    """
    found: dict[_Key, dict[int, list[int]]] = {}
    nameless = _Key("", "", None, None, None)
    for split in ranks:
        used = set(np.unique(split.collectives.group).tolist())
        for number in sorted(used):
            key = nameless
            if number >= 0:
                group = split.trace.groups[number]
                key = _Key(group.name, group.description, group.size, group.ranks, group.label)
            found.setdefault(key, {}).setdefault(split.rank, []).append(number)
    given = {split.rank for split in ranks}
    result = {}
    for key, members in found.items():
        for rank in set(key.ranks or ()) & given:
            members.setdefault(rank, [])
        if key.size is not None and len(members) > key.size:
            notices.add(
                "group_is_several",
                len(members),
                f"{key.label} has {key.size} ranks, but {name_ranks(members)} have it.",
            )
            continue
        if len(members) >= 2:
            result[key] = {rank: tuple(members[rank]) for rank in sorted(members)}
    return result


def _sequence(
    split: RankSplit, numbers: Sequence[int], numbered: bool, point_to_point: bool
) -> Calls:
    found = split.collectives
    chosen = np.isin(found.group, numbers) & ((found.kind == SEND_RECV) == point_to_point)
    places = np.flatnonzero(chosen)
    of_step = found.step[places]
    inside = of_step >= 0
    step = None
    if numbered:
        of = np.array([one.step.key for one in split.steps], np.int64)
        step = np.full(places.size, _AFTER_ALL, np.int64)
        step[inside] = of[of_step[inside]]
        # What lies between steps goes with the next one.
        for place in np.flatnonzero(~inside)[::-1].tolist():
            if place + 1 < places.size:
                step[place] = step[place + 1]
    return Calls(
        place=places,
        kind=found.kind[places].astype(np.int64),
        elements=found.elements[places].astype(np.int64),
        index=found.index[places],
        end_ns=found.end_ns[places] + (split.trace.base_time_ns or 0),
        step=step,
        inside=inside,
    )


# ----------------------------------------------------------------------------------------------
# Pairing


def _paired(
    sequences: Mapping[int, Calls],
    numbered: bool,
    point_to_point: bool,
    key: _Key,
    notices: Notices,
) -> dict[int, Ints]:
    """Returns for each rank the places in its sequence of what all ranks have, [collective]."""
    parts: list[dict[int, Ints]] = []
    if numbered:
        for members, edges in _segments(sequences):
            parts.append(_paired_parts(sequences, members, edges, point_to_point, key, notices))
    else:
        everything = {rank: np.arange(len(found)) for rank, found in sequences.items()}
        parts.append(_paired_parts(sequences, everything, None, point_to_point, key, notices))
    result = {
        rank: np.concatenate([part[rank] for part in parts] or [np.zeros(0, np.int64)])
        for rank in sequences
    }
    first = next(iter(sequences))
    missing = sum(len(found) - result[rank].size for rank, found in sequences.items())
    code = "messages_not_paired" if point_to_point else "collectives_not_matched"
    worst = max(sequences, key=lambda rank: len(sequences[rank]) - result[rank].size)
    of = f"in group {key.label}" if key.label else "without a named group"
    notices.add(
        code,
        missing,
        f"{result[first].size} of {len(sequences[worst])} on rank {worst} {of} were matched.",
    )
    return result


def _segments(
    sequences: Mapping[int, Calls],
) -> Iterable[tuple[dict[int, Ints], dict[int, tuple[bool, bool]]]]:
    """Yields each step, and what lies before it, of all ranks, with who begins or ends there.

    Yields:
        Places in each rank's sequence; and of each rank whether its recording begins in it, and
        whether it ends in it.
    """
    by_rank: dict[int, dict[tuple[int, bool], Ints]] = {}
    for rank, found in sequences.items():
        if found.step is None:
            raise ValueError("steps have no numbers")
        order = np.lexsort((found.inside, found.step))
        step, inside = found.step[order], found.inside[order]
        new = np.flatnonzero((np.diff(step) != 0) | (np.diff(inside) != 0)) + 1
        cuts = [0, *new.tolist(), order.size]
        by_rank[rank] = {
            (int(step[first]), bool(inside[first])): np.sort(order[first:last])
            for first, last in pairwise(cuts)
            if last > first
        }
    inner = {rank: [step for step, inside in parts if inside] for rank, parts in by_rank.items()}
    none = np.zeros(0, np.int64)
    for segment in sorted({part for parts in by_rank.values() for part in parts}):
        yield (
            {rank: parts.get(segment, none) for rank, parts in by_rank.items()},
            {
                rank: (
                    segment[0] <= min(steps, default=_AFTER_ALL),
                    segment[0] >= max(steps, default=0),
                )
                for rank, steps in inner.items()
            },
        )


def _paired_parts(
    sequences: Mapping[int, Calls],
    members: Mapping[int, Ints],
    edges: Mapping[int, tuple[bool, bool]] | None,
    point_to_point: bool,
    key: _Key,
    notices: Notices,
) -> dict[int, Ints]:
    """Pairs one stretch of the sequences: each with that which most ranks have."""
    parts = {rank: sequences[rank].take(places) for rank, places in members.items()}
    nothing = {rank: np.zeros(0, np.int64) for rank in parts}
    if point_to_point:
        # Ranks send to different ones: without the same number nothing tells what belongs together.
        same = len({len(part) for part in parts.values()}) == 1
        return dict(members) if same else nothing
    first = _usual(parts, longest=edges is None)
    reference = parts[first]
    kept = np.ones(len(reference), bool)
    partner = {first: np.arange(len(reference))}
    for rank, part in parts.items():
        if rank == first:
            continue
        if edges is None:
            pairing = pair_shifted(reference, part)
        else:
            either = [edges[first][side] or edges[rank][side] for side in (0, 1)]
            pairing = pair_anchored(reference, part, begins=either[0], ends=either[1])
        if pairing.count:
            _note_difference(pairing, first, reference, rank, part, key, notices)
        partner[rank] = np.full(len(reference), -1, np.int64)
        partner[rank][pairing.first] = pairing.second
        kept &= partner[rank] >= 0
    return {rank: members[rank][partner[rank][kept]] for rank in parts}


def _usual(parts: Mapping[int, Calls], *, longest: bool) -> int:
    """Returns the rank whose sequence most ranks have, or the first one with the longest."""
    if longest:
        return max(parts, key=lambda rank: (len(parts[rank]), -rank))
    texts = {
        rank: (part.kind.tobytes(), np.where(_UNEQUAL[part.kind], -1, part.elements).tobytes())
        for rank, part in parts.items()
    }
    counts = Counter(texts.values())
    return max(parts, key=lambda rank: (counts[texts[rank]], -rank))


def fits(one: Calls, other: Calls) -> Bools:
    """Returns of two sequences of one length whether kinds and sizes agree, [collective]."""
    sizes = (one.elements == other.elements) | (one.elements < 0) | (other.elements < 0)
    agree: Bools = (one.kind == other.kind) & (sizes | _UNEQUAL[one.kind])
    return agree


def pair_anchored(one: Calls, other: Calls, *, begins: bool, ends: bool) -> Pairing:
    """Pairs two sequences of the same step.

    Args:
        one: The first.
        other: The second.
        begins: Whether a recording begins in it, so that the first ones may be missing.
        ends: Whether a recording ends in it, so that the last ones may be missing.
    """
    if len(one) == len(other):
        good = fits(one, other)
        bad = np.flatnonzero(~good)
        if not bad.size:
            return _all(one, other)
        if begins and ends and len(shifts := _fitting_shifts(one, other)) == 1:
            return _shifted(one, other, shifts[0])
        if (one.kind == other.kind).all():
            good_places = np.flatnonzero(good)
            return Pairing(good_places, good_places, "size", int(bad[0]), int(bad.size))
        # What lies between the first and the last that differ may have moved.
        whole = np.arange(len(one))
        kept = np.concatenate((whole[: bad[0]], whole[bad[-1] + 1 :]))
        return Pairing(kept, kept, "kind", int(bad[0]), int(bad[-1] - bad[0] + 1))
    short = min(len(one), len(other))
    prefix, suffix = _common(one, other, short), _common(_turned(one), _turned(other), short)
    # A whole fit at one side only is what a recording that begins or ends within it leaves.
    if begins and suffix == short and not (ends and prefix == short):
        return _ends_of(one, other, 0, short)
    if ends and prefix == short and not (begins and suffix == short):
        return _ends_of(one, other, short, 0)
    if begins and ends and short and len(shifts := _fitting_shifts(one, other)) == 1:
        return _shifted(one, other, shifts[0])
    # Otherwise something is missing within: certain are those that are equal on either side,
    # wherever it is missing.
    if prefix + suffix > short:
        prefix, suffix = short - suffix, short - prefix
    found = _ends_of(one, other, prefix, suffix)
    if (begins or ends) and short == 0:
        return found
    return replace(
        found, differs="count", at=prefix, count=max(len(one), len(other)) - prefix - suffix
    )


def pair_shifted(one: Calls, other: Calls) -> Pairing:
    """Pairs two sequences of which nothing is known but that both are part of one.

    The shift must fit everywhere. Where several do, the ends decide: those of the right one
    keep their distance.
    """
    n, m = len(one), len(other)
    shifts = _fitting_shifts(one, other)
    if not shifts:
        found = pair_anchored(one, other, begins=False, ends=False)
        return found if found.count else replace(found, differs="count", at=0, count=max(n, m))
    best = shifts[0]
    if len(shifts) > 1:
        apart = sorted((_scatter_ns(one, other, shift), abs(shift), shift) for shift in shifts)
        clear = apart[1][0] > max(_CLEARLY * apart[0][0], _ALIKE_NS)
        if not clear:
            # Not even as many on both are the same ones: each may have lost one at another end.
            none = np.zeros(0, np.int64)
            return Pairing(none, none, "order", 0, max(n, m))
        best = apart[0][2]
    return _shifted(one, other, best)


def _shifted(one: Calls, other: Calls, shift: int) -> Pairing:
    first = np.arange(max(0, -shift), min(len(one), len(other) - shift))
    return Pairing(first, first + shift)


def _fitting_shifts(one: Calls, other: Calls) -> list[int]:
    """Returns the shifts with which all of what overlaps agrees; zero first if it does."""
    n, m = len(one), len(other)
    least = max(_LEAST_OVERLAP, (min(n, m) + 1) // 2)
    low, high = max(least - n, -_MOST_SHIFT), min(m - least, _MOST_SHIFT)
    found = []
    for shift in sorted(range(low, high + 1), key=abs):
        begin, end = max(0, -shift), min(n, m - shift)
        if end <= begin:
            continue
        # A few first: most shifts fail at once.
        for last in (min(end, begin + _SAMPLED), end):
            first, second = slice(begin, last), slice(begin + shift, last + shift)
            if not fits(one.take(first), other.take(second)).all():
                break
        else:
            found.append(shift)
    if not found and n == m and n and fits(one, other).all():
        return [0]
    return found


def _scatter_ns(one: Calls, other: Calls, shift: int) -> float:
    """Returns by how much the distance of the ends scatters: what 3 of 4 do not exceed."""
    begin, end = max(0, -shift), min(len(one), len(other) - shift)
    every = max(1, (end - begin) // _MOST_SCATTERED)
    apart = other.end_ns[begin + shift : end + shift : every] - one.end_ns[begin:end:every]
    apart = apart - apart[0]
    far = np.sort(np.abs(apart - median(apart)))
    return float(far[math.ceil(_MOSTLY * (far.size - 1))])


def _all(one: Calls, other: Calls) -> Pairing:
    places = np.arange(min(len(one), len(other)))
    return Pairing(places, places)


def _ends_of(one: Calls, other: Calls, prefix: int, suffix: int) -> Pairing:
    begin, tail = np.arange(prefix), np.arange(suffix)
    return Pairing(
        np.concatenate((begin, tail + len(one) - suffix)),
        np.concatenate((begin, tail + len(other) - suffix)),
    )


def _turned(found: Calls) -> Calls:
    return found.take(np.arange(len(found))[::-1])


def _common(one: Calls, other: Calls, short: int) -> int:
    """Returns how many agree from the begin on."""
    places = np.arange(short)
    bad = np.flatnonzero(~fits(one.take(places), other.take(places)))
    return int(bad[0]) if bad.size else short


# ----------------------------------------------------------------------------------------------
# What is said


def _note_difference(
    pairing: Pairing,
    first: int,
    reference: Calls,
    rank: int,
    part: Calls,
    key: _Key,
    notices: Notices,
) -> None:
    group = f" of group {key.label}" if key.label else ""
    ours, theirs = (_said(found, pairing.at) for found in (part, reference))
    where = f"The first{group}: rank {rank} has {ours}, rank {first} has {theirs}."
    if pairing.differs == "count":
        step = _step_of(part, pairing.at) or _step_of(reference, pairing.at)
        where = (
            f"The first{group}{step}: rank {rank} has {len(part)} of them, rank {first} has "
            f"{len(reference)}; they differ from {ours} of rank {rank} on."
        )
    elif pairing.differs == "order":
        where = (
            f"Group{group.removeprefix(' of group') or ' without a name'}: {len(part)} of rank "
            f"{rank} fit {len(reference)} of rank {first} in several ways."
        )
    notices.add(f"collectives_differ_in_{pairing.differs}", pairing.count, where)


def _said(found: Calls, at: int) -> str:
    if at >= len(found):
        return "nothing more"
    kind, elements = KINDS[int(found.kind[at])].value, int(found.elements[at])
    size = f" ({elements} elements)" if elements >= 0 else ""
    return f"{kind} {int(found.index[at])}{size}"


def _step_of(found: Calls, at: int) -> str:
    if found.step is None or at >= len(found) or not found.inside[at]:
        return ""
    return f" in step {label_of(int(found.step[at]))}"


def _group_match(
    key: _Key,
    by_rank: Mapping[int, RankSplit],
    sequences: Mapping[int, Calls],
    columns: Mapping[int, Ints],
    point_to_point: bool,
) -> GroupMatch:
    ranks = tuple(sequences)
    parts = {rank: sequences[rank].take(columns[rank]) for rank in ranks}
    places = np.stack([parts[rank].place for rank in ranks], axis=1)
    order = np.argsort(places[:, 0], kind="stable")
    elements = np.stack([parts[rank].elements for rank in ranks], axis=1).max(axis=1)
    size = key.size
    if size is None and key.ranks is not None:
        size = len(key.ranks)
    return GroupMatch(
        label=key.label,
        size=size,
        ranks=ranks,
        places=places[order],
        kind=parts[ranks[0]].kind[order].astype(np.uint8),
        elements=elements[order],
        point_to_point=point_to_point,
    )
