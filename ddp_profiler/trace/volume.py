"""What is reduced in a step, and how fast it travels: elements, bytes, busbw."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_profiler.trace.across import AcrossRanks
from ddp_profiler.trace.columns import Ints, distinct
from ddp_profiler.trace.kernels import KINDS, Collective
from ddp_profiler.trace.model import MOST_ELEMENTS, RankTrace
from ddp_profiler.trace.split import RankSplit
from ddp_profiler.trace.steps import StepSource

Floats = npt.NDArray[np.float64]
_Channel = tuple[Collective, str | None, int]

_LEAST_SHARE = 0.01

# "dp", "mesh_dp_shard", "DATA_PARALLEL_GROUP_WITH_CP", "replicate"; but "TENSOR_AND_DATA_PARALLEL"
# reduces other things as well.
_DATA_PARALLEL = re.compile(
    r"(?<![a-z])(dp|ddp|fsdp|hsdp|shard|replicate)(?![a-z])|data[_ -]?parallel", re.IGNORECASE
)
_MODEL_PARALLEL = re.compile(
    r"(?<![a-z])(tp|pp|mp)(?![a-z])|tensor|pipeline|model[_ -]?parallel", re.IGNORECASE
)
_OTHER_PARALLEL = re.compile(
    r"(?<![a-z])(ep|cp|sp)(?![a-z])|expert|context|sequence|embedding", re.IGNORECASE
)
_DEFAULT = re.compile(r"default_pg")
_REDUCING = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)

_TYPE_BYTES = {
    "float": 4,
    "float32": 4,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "double": 8,
    "float64": 8,
    "byte": 1,
    "uint8": 1,
    "char": 1,
    "int8": 1,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "short": 2,
    "int16": 2,
    "int": 4,
    "int32": 4,
    "long": 8,
    "long int": 8,
    "int64": 8,
    "complexfloat": 8,
    "complexdouble": 16,
}
_FLOATING = re.compile(r"float|half|double")
_EIGHT_BITS = re.compile(r"float8")


def type_bytes(dtype: str) -> int | None:
    """Returns the bytes of an element; None for a type that is not known.

    >>> type_bytes("Float"), type_bytes("c10::BFloat16"), type_bytes("Float8_e4m3fn")
    (4, 2, 1)
    """
    name = dtype.lower().removeprefix("c10::").removeprefix("torch.")
    return 1 if _EIGHT_BITS.match(name) else _TYPE_BYTES.get(name)


def is_floating(dtype: str) -> bool:
    """Returns whether a type of elements is a real floating type, as gradients are."""
    name = dtype.lower()
    return _FLOATING.search(name) is not None and "complex" not in name


def bus_factor(kind: Collective, size: int | None) -> float | None:
    """Returns busbw / algbw, as nccl-tests define it; None where it does not apply.

    2(n-1)/n for AllReduce; (n-1)/n for ReduceScatter, AllGather and AllToAll; 1 for Broadcast
    and Reduce.

    >>> bus_factor(Collective.ALL_REDUCE, 4), bus_factor(Collective.ALL_GATHER, 1)
    (1.5, None)

    Args:
        kind: The collective.
        size: n, ranks of its group; None where not known.
    """
    if size is None or size < 2:
        return None
    share = (size - 1) / size
    return {
        Collective.ALL_REDUCE: 2 * share,
        Collective.REDUCE_SCATTER: share,
        Collective.ALL_GATHER: share,
        Collective.ALL_TO_ALL: share,
        Collective.BROADCAST: 1.0,
        Collective.REDUCE: 1.0,
    }.get(kind)


def collective_bytes(split: RankSplit, place: int) -> int | None:
    """Returns the bytes of a rank's collective, the larger of in and out; None if not said."""
    elements, dtype = (
        int(split.collectives.elements[place]),
        int(split.collectives.dtype[place]),
    )
    each = type_bytes(split.trace.dtypes[dtype]) if dtype >= 0 else None
    return elements * each if 0 <= elements <= MOST_ELEMENTS and each is not None else None


def known_elements(split: RankSplit) -> Ints:
    """Returns elements of a rank's collectives; -1 where not said, or more than can be."""
    elements = split.collectives.elements.astype(np.int64)
    elements[elements > MOST_ELEMENTS] = -1
    return elements


def group_size(trace: RankTrace, number: int) -> int | None:
    """Returns the number of ranks of a group; None where it is not known.

    Args:
        trace: The rank's trace.
        number: Place in ``trace.groups``; -1 where the collective names none. Of two ranks
            there is but one such group.
    """
    if number < 0:
        return trace.world_size if trace.world_size in (1, 2) else None
    group = trace.groups[number]
    return group.size if group.size is not None else (len(group.ranks) if group.ranks else None)


# ----------------------------------------------------------------------------------------------
# Reductions of a step


@dataclass(frozen=True)
class StepReductions:
    """Reductions of gradients in one step.

    Attributes:
        step: Number of the step.
        complete: Whether it is recorded in full.
        count: How many.
        elements: Their elements; None where sizes are not recorded.
        bytes: Their bytes; None likewise.
        repeats: How often the same sequence of sizes comes in a row; 1 where it does not, or
            where all have one size, which says nothing.
        occurrence: Which of the steps of this number it is, from 1.
    """

    step: int
    complete: bool
    count: int
    elements: int | None
    bytes: int | None
    repeats: int
    occurrence: int = 1


@dataclass(frozen=True)
class Reductions:
    """Reductions of gradients on one rank.

    Attributes:
        rank: The rank.
        counted: What was counted, in words.
        kind: AllReduce or ReduceScatter.
        group: The process group; None where not said.
        size: Number of its ranks; None where not said.
        steps: Each step.
        told_steps: Whether steps are those that the script or its optimizer marks.
    """

    rank: int
    counted: str
    kind: Collective
    group: str | None
    size: int | None
    steps: tuple[StepReductions, ...]
    told_steps: bool


@dataclass(frozen=True)
class GroupVolume:
    """What a rank reduces in one process group over the whole recording.

    Attributes:
        kind: AllReduce or ReduceScatter.
        group: The process group; None where not said.
        number: Its place in the trace's groups; -1 where not said.
        size: Number of its ranks; 0 where not said.
        count: How many reductions of floating types.
        elements: Their elements, of those whose size is known.
    """

    kind: Collective
    group: str | None
    number: int
    size: int
    count: int
    elements: int


def volumes(split: RankSplit) -> tuple[GroupVolume, ...]:
    """Returns what a rank reduces, by kind and process group, of floating types where recorded.

    Args:
        split: The rank.
    """
    found, trace = split.collectives, split.trace
    floating, elements = _floating(split), known_elements(split)
    result = []
    for kind in _REDUCING:
        of_kind = (found.kind == KINDS.index(kind)) & floating
        for group in distinct(found.group[of_kind]):
            chosen = of_kind & (found.group == group)
            result.append(
                GroupVolume(
                    kind=kind,
                    group=trace.groups[group].label if group >= 0 else None,
                    number=group,
                    size=group_size(trace, group) or 0,
                    count=int(chosen.sum()),
                    elements=int(np.maximum(elements[chosen], 0).sum()),
                )
            )
    return tuple(result)


def of_gradients(split: RankSplit) -> GroupVolume | None:
    """Returns which of a rank's reductions are those of gradients; None where that is not told.

    These are the ones in groups whose name says that they are data-parallel. Without such a
    name, those in the only group that reduces, if it is of all ranks: groups whose names say
    something else, and those with less than a hundredth of the most elements, such as that of an
    averaged loss, do not count. Of several the group with the most ranks is taken, then the kind
    and group with the most elements; other reductions, such as those of shards between replicas,
    are of the same gradients.

    Args:
        split: The rank.
    """
    found = volumes(split)
    told = [one for one in found if one.group and _is_data_parallel(one.group)]
    if not told:
        told = [one for one in found if not (one.group and _is_other(one.group))]
        told = _much(told)
        if len({one.number for one in told}) != 1:
            return None
        (number,) = {one.number for one in told}
        default = number >= 0 and _DEFAULT.search(told[0].group or "")
        if number >= 0 and not default and told[0].size != split.trace.world_size:
            return None
    return max(_much(told), key=lambda one: (one.size, one.elements, one.count), default=None)


def _much(found: Sequence[GroupVolume]) -> list[GroupVolume]:
    most = max((one.elements for one in found), default=0)
    return [one for one in found if one.elements >= _LEAST_SHARE * most]


def _is_data_parallel(label: str) -> bool:
    return bool(_DATA_PARALLEL.search(label)) and not _MODEL_PARALLEL.search(label)


def _is_other(label: str) -> bool:
    return bool(_MODEL_PARALLEL.search(label) or _OTHER_PARALLEL.search(label))


def _floating(split: RankSplit) -> npt.NDArray[np.bool_]:
    names = split.trace.dtypes
    return np.array([is_floating(name) for name in names] + [True])[split.collectives.dtype]


def reductions(split: RankSplit) -> Reductions | None:
    """Counts the gradients that a rank reduces in each step; None where none are told.

    Counted is one kind (AllReduce or ReduceScatter) in one process group, with elements of
    floating types where types are recorded: see ``of_gradients``.

    Args:
        split: The rank.
    """
    found, trace = split.collectives, split.trace
    one = of_gradients(split)
    if one is None:
        return None
    chosen = (found.kind == KINDS.index(one.kind)) & _floating(split) & (found.group == one.number)
    types = sorted({trace.dtypes[dtype] for dtype in found.dtype[chosen].tolist() if dtype >= 0})
    where = f"in group {one.group}" if one.group else "of an unnamed group"
    return Reductions(
        rank=split.rank,
        counted=f"{one.kind.value} of {' and '.join(types) or 'elements of unknown type'} {where}",
        kind=one.kind,
        group=one.group,
        size=group_size(trace, one.number),
        steps=tuple(
            _step_reductions(split, place, np.flatnonzero(chosen & (found.step == place)).tolist())
            for place in range(len(split.steps))
        ),
        told_steps=split.step_source
        in (StepSource.PROFILER_STEP, StepSource.GPU_ANNOTATION, StepSource.OPTIMIZER_STEP),
    )


def _step_reductions(split: RankSplit, place: int, chosen: Sequence[int]) -> StepReductions:
    step = split.steps[place].step
    elements = known_elements(split)[chosen].tolist()
    sizes = [collective_bytes(split, one) for one in chosen]
    known = [size for size in sizes if size is not None]
    told = all(one >= 0 for one in elements)
    return StepReductions(
        step=step.number,
        complete=not step.incomplete,
        count=len(chosen),
        elements=sum(elements) if told else None,
        bytes=sum(known) if len(known) == len(sizes) else None,
        repeats=repeats(elements) if told else 1,
        occurrence=step.occurrence,
    )


def repeats(sizes: Sequence[int]) -> int:
    """Returns how often the same sequence comes in a row, if that is all there is.

    Sequences of one size only do not count: equal layers look like that.

    >>> repeats([5, 3, 5, 3, 5, 3]), repeats([5, 3, 5]), repeats([4, 4, 4, 4])
    (3, 1, 1)
    """
    if len(set(sizes)) < 2:
        return 1
    # The longest begin that is an end as well, of every begin (Knuth, Morris, Pratt).
    border = [0] * len(sizes)
    for place in range(1, len(sizes)):
        length = border[place - 1]
        while length and sizes[place] != sizes[length]:
            length = border[length - 1]
        border[place] = length + (sizes[place] == sizes[length])
    period = len(sizes) - border[-1]
    return len(sizes) // period if len(sizes) % period == 0 else 1


# ----------------------------------------------------------------------------------------------
# Bandwidth


@dataclass(frozen=True)
class Bandwidth:
    """busbw of the collectives of one kind and group, in GB/s (10^9 bytes a second).

    Attributes:
        kind: The collective.
        group: The process group; None where not said.
        size: Number of its ranks.
        count: Collectives of known size on the ranks given, each rank's counted.
        bytes: Sum of their bytes.
        own_gb_per_s: Median of busbw by each rank's own time, which holds waiting.
        transfer_gb_per_s: Median by the time from the last one's begin; None where ranks were
            not compared.
        compared: How many collectives the latter is the median of.
    """

    kind: Collective
    group: str | None
    size: int
    count: int
    bytes: int
    own_gb_per_s: float
    transfer_gb_per_s: float | None
    compared: int


def bandwidths(ranks: Sequence[RankSplit], across: AcrossRanks) -> tuple[Bandwidth, ...]:
    """Returns busbw by kind and group, where sizes and numbers of ranks are recorded.

    Args:
        ranks: All ranks that were given.
        across: What they tell together.
    """
    own: dict[_Channel, list[Floats]] = {}
    moved: dict[_Channel, int] = {}
    for split in ranks:
        found = split.collectives
        lasted = found.end_ns - found.begin_ns
        each = np.array([type_bytes(name) or 0 for name in split.trace.dtypes] + [0], np.int64)
        nbytes = np.maximum(known_elements(split), 0) * each[found.dtype]
        for number in distinct(found.group):
            size = group_size(split.trace, number)
            label = split.trace.groups[number].label if number >= 0 else None
            for code in distinct(found.kind[found.group == number]):
                factor = bus_factor(KINDS[code], size)
                chosen = (found.group == number) & (found.kind == code)
                chosen &= (nbytes > 0) & (lasted > 0)
                if size is None or factor is None or not chosen.any():
                    continue
                channel = KINDS[code], label, size
                own.setdefault(channel, []).append(nbytes[chosen] * factor / lasted[chosen])
                moved[channel] = moved.get(channel, 0) + int(nbytes[chosen].sum())
    by_rank = {split.rank: split for split in ranks}
    transfer: dict[_Channel, list[float]] = {}
    for meeting in across.meetings:
        if not meeting.whole:
            continue
        first = by_rank[meeting.match.ranks[0]]
        for place in np.flatnonzero(meeting.meets & (meeting.transfer_ns > 0)).tolist():
            rate = transfer_rate(first, meeting.match.places[place, 0], meeting.transfer_ns[place])
            if rate is not None:
                number = int(first.collectives.group[meeting.match.places[place, 0]])
                kind = KINDS[meeting.match.kind[place]]
                size = group_size(first.trace, number)
                if size is not None:
                    transfer.setdefault((kind, meeting.match.label, size), []).append(rate)
    return tuple(
        Bandwidth(
            kind=key[0],
            group=key[1],
            size=key[2],
            count=sum(part.size for part in rates),
            bytes=moved[key],
            own_gb_per_s=float(np.median(np.concatenate(rates))),
            transfer_gb_per_s=float(np.median(transfer[key])) if key in transfer else None,
            compared=len(transfer.get(key, ())),
        )
        for key, rates in sorted(own.items(), key=lambda item: -moved[item[0]])
    )


def transfer_rate(split: RankSplit, place: int, time_ns: int) -> float | None:
    """Returns busbw in GB/s of a collective that takes so long; None where it is not known.

    Args:
        split: A rank that has it.
        place: Its place there.
        time_ns: The time.
    """
    found = split.collectives
    factor = bus_factor(KINDS[found.kind[place]], group_size(split.trace, int(found.group[place])))
    nbytes = collective_bytes(split, int(place))
    if factor is None or not nbytes or time_ns <= 0:
        return None
    return nbytes * factor / float(time_ns)
