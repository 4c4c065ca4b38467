"""Parts of a step on one rank: computation, communication, their overlap, memory and idling.

All from one rank's trace: waiting for other ranks and transfer cannot be told apart here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ddp_profiler.trace import kernels
from ddp_profiler.trace.columns import Ints, distinct, median
from ddp_profiler.trace.intervals import Cover, CoverBefore
from ddp_profiler.trace.kernels import Collective, Work
from ddp_profiler.trace.model import MOST_ELEMENTS, Narrow, RankTrace
from ddp_profiler.trace.notices import Notices, TraceWarning
from ddp_profiler.trace.steps import Step, Steps, StepSource, find_steps

_BLOCK = 1 << 13
_KIND_UNIT = 1 << 32
_TOUCHES_NS = 100_000
_LONGER_THAN_STEPS = 3
_LONG_NS = 1_000_000
_MANY_AT_ONCE = 0.2
_ENOUGH_AT_ONCE = 20
_ENOUGH_WORK = 8
_ENOUGH_STEPS = 3
_MUCH_OF_OTHERS = 0.01


@dataclass(frozen=True)
class CommShare:
    """Communication of one kind within one process group.

    Attributes:
        kind: The collective.
        group: The process group's name; None where the trace does not say.
        count: How many collectives.
        elements: Elements of all of them on this rank, the larger of what goes in and comes
            out; None where not all say.
        comm_ns: Union of their times.
        sum_ns: Sum of their times.
        exposed_ns: The part of ``comm_ns`` in which nothing computes; None without a GPU.
    """

    kind: Collective
    group: str | None
    count: int
    elements: int | None
    comm_ns: int
    sum_ns: int
    exposed_ns: int | None


@dataclass(frozen=True)
class Parts:
    """Where the time of a step, or of the whole recording, went.

    window + outside_window = compute + exposed_comm + exposed_memory + other_steps + idle.

    Attributes:
        window_ns: From the step's begin, or the end of the window before if that is later, to
            the end of the step or of its GPU work, whichever is later. Windows do not overlap.
        compute_ns: Union of the times of kernels that are not communication; None where the
            trace has no GPU work.
        comm_ns: Union of the times of collectives; None where it does not apply or is unknown.
        comm_sum_ns: Sum of their times.
        overlap_ns: Time in which both compute and communication run.
        exposed_comm_ns: comm - overlap.
        memory_ns: Union of the times of copies and sets.
        exposed_memory_ns: The part of it in which neither of the others runs.
        idle_ns: Time of the window in which the GPU does nothing, for whatever step.
        overlap_fraction: overlap / comm; None where there is no communication.
        by_kind: Communication by kind and process group, the longest first.
        other_steps_ns: Time of the window in which only work of other steps, or of none, runs; of
            the whole recording 0.
        outside_window_ns: Time in which work of this step runs outside of its window, such as
            a copy for it while the step before still runs; of the whole recording 0.
    """

    window_ns: int
    compute_ns: int | None
    comm_ns: int | None
    comm_sum_ns: int | None
    overlap_ns: int | None
    exposed_comm_ns: int | None
    memory_ns: int | None
    exposed_memory_ns: int | None
    idle_ns: int | None
    overlap_fraction: float | None
    by_kind: tuple[CommShare, ...]
    other_steps_ns: int | None = 0
    outside_window_ns: int | None = 0


@dataclass(frozen=True)
class StepParts:
    """One step with its parts.

    Attributes:
        step: The step.
        window_begin_ns: Begin of its window.
        parts: Where its time went.
    """

    step: Step
    window_begin_ns: int
    parts: Parts


@dataclass(frozen=True)
class Collectives:
    """Every collective of one rank, in order of their begin; all arrays are [collective].

    Attributes:
        begin_ns: Begin, as the file has it.
        end_ns: End.
        kind: Number of the kind in ``kernels.KINDS``.
        group: Place in ``RankTrace.groups``; -1 where not said.
        index: Place among the collectives of the same kind and group, from 0.
        elements: The larger of what goes in and comes out on this rank; -1 where not said.
        dtype: Place in ``RankTrace.dtypes``; -1 where not said.
        stream: Stream of the GPU, or thread of the CPU; -1 where not said.
        step: Place of the step; -1 for none.
    """

    begin_ns: Ints
    end_ns: Ints
    kind: npt.NDArray[np.uint8]
    group: npt.NDArray[np.int32]
    index: Ints
    elements: Ints
    dtype: npt.NDArray[np.int32]
    stream: Ints
    step: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return int(self.begin_ns.size)


@dataclass(frozen=True)
class RankSplit:
    """One rank's trace, split.

    Attributes:
        rank: The rank.
        trace: What was read.
        step_source: What told the steps apart.
        on_gpu: Whether communication are kernels; false where it runs on the CPU.
        steps: The steps with their parts.
        total: The whole recording, work outside of steps included.
        collectives: Every collective.
        warnings: What was left out, repaired or cannot be told.
    """

    rank: int
    trace: RankTrace
    step_source: StepSource
    on_gpu: bool
    steps: tuple[StepParts, ...]
    total: Parts
    collectives: Collectives
    warnings: tuple[TraceWarning, ...]


@dataclass(frozen=True)
class _Block:
    """Some of the work, in order of its begin; all arrays are [work].

    Attributes:
        begin_ns: Begin.
        end_ns: End.
        work: ``kernels.Work``.
        share: Which kind and group a collective is of; -1 for other work.
        elements: Elements of a collective; -1 where not said.
    """

    begin_ns: Ints
    end_ns: Ints
    work: npt.NDArray[np.uint8]
    share: Ints
    elements: Ints


@dataclass
class _Share:
    """Adds up the collectives of one kind and group."""

    beside_compute: Cover
    alone: Cover = field(default_factory=Cover)
    count: int = 0
    sum_ns: int = 0
    elements: int = 0
    all_say: bool = True


class _Sum:
    """Adds up blocks of work to the figures of a step, or of the whole."""

    def __init__(self) -> None:
        self.compute, self.comm, self.memory = Cover(), Cover(), Cover()
        self.kernels, self.everything = Cover(), Cover()
        self.comm_sum_ns = 0
        self.shares: dict[int, _Share] = {}

    def add(self, block: _Block) -> None:
        """Adds a block that begins after those before it."""
        begin, end = block.begin_ns, block.end_ns
        is_compute = block.work == Work.COMPUTE
        is_comm = block.work == Work.COMMUNICATION
        self._add_shares(block, is_compute)
        for cover, chosen in (
            (self.compute, is_compute),
            (self.comm, is_comm),
            (self.memory, block.work == Work.MEMORY),
            (self.kernels, is_compute | is_comm),
        ):
            cover.add(begin[chosen], end[chosen])
        self.everything.add(begin, end)
        self.comm_sum_ns += int((end[is_comm] - begin[is_comm]).sum())

    def _add_shares(self, block: _Block, is_compute: npt.NDArray[np.bool_]) -> None:
        new = set(distinct(block.share)) - {-1} - set(self.shares)
        for share in new:
            # Until now it has none, so what computes is all there is.
            self.shares[share] = _Share(beside_compute=replace(self.compute))
        for share, found in self.shares.items():
            chosen = block.share == share
            both = chosen | is_compute
            found.beside_compute.add(block.begin_ns[both], block.end_ns[both])
            begin, end = block.begin_ns[chosen], block.end_ns[chosen]
            found.alone.add(begin, end)
            found.count += int(begin.size)
            found.sum_ns += int((end - begin).sum())
            elements = block.elements[chosen]
            # Larger ones are wrong, and their sum might not fit into 64 bits.
            known = (elements >= 0) & (elements <= MOST_ELEMENTS)
            found.elements += int(elements[known].sum())
            found.all_say &= bool(known.all())


def split(trace: RankTrace, rank: int) -> RankSplit:
    """Derives where the time of a rank's steps went.

    Args:
        trace: What was read.
        rank: The rank, from the trace or from the user.
    """
    notices = Notices()
    steps = find_steps(trace, notices)
    collectives, on_gpu = _collectives(trace, steps)
    told = _communication_told(trace, collectives, notices)
    windows = _windows(trace, steps)
    _flag_stretched(trace, windows, notices)
    summed = _Sum()
    busy = CoverBefore(np.array(windows, np.int64).ravel())
    for block in _blocks(trace, collectives, on_gpu):
        summed.add(block)
        busy.add(block.begin_ns, block.end_ns)
    begin, end = _whole(trace, collectives, windows)
    total = _parts(trace, summed, end - begin, told)
    parts = []
    busy_in = np.diff(busy.covered_ns.reshape(-1, 2)).ravel().tolist()
    work_of = _by_step(steps.of_work, len(steps.steps))
    comm_of = _by_step(collectives.step, len(steps.steps))
    per_step = zip(steps.steps, work_of, comm_of, strict=True)
    for place, (step, work, comm) in enumerate(per_step):
        block = _block(trace, collectives, on_gpu, work, comm)
        summed = _Sum()
        summed.add(block)
        window = windows[place]
        own = CoverBefore(np.array(window, np.int64))
        own.add(block.begin_ns, block.end_ns)
        own_in = int(own.covered_ns[1] - own.covered_ns[0])
        found = _parts(trace, summed, window[1] - window[0], told)
        if found.idle_ns is not None:
            found = replace(
                found,
                idle_ns=found.window_ns - busy_in[place],
                other_steps_ns=busy_in[place] - own_in,
                outside_window_ns=summed.everything.covered_ns - own_in,
            )
        parts.append(StepParts(step, window[0], found))
    _note_others(parts, notices)
    return RankSplit(
        rank=rank,
        trace=trace,
        step_source=steps.source,
        on_gpu=on_gpu,
        steps=tuple(parts),
        total=total,
        collectives=collectives,
        warnings=(*trace.warnings, *notices.all()),
    )


def _collectives(trace: RankTrace, steps: Steps) -> tuple[Collectives, bool]:
    """Returns the collectives, and whether they are kernels.

    Where both the GPU and the CPU have some, those of the CPU are small ones that keep ranks
    together, and the GPU's count.
    """
    gpu, host = trace.gpu, trace.host_collectives
    places = np.flatnonzero(gpu.work == Work.COMMUNICATION)
    if places.size or not len(host):
        group, kind = gpu.group, gpu.kind[places]
        return (
            Collectives(
                begin_ns=gpu.begin_ns[places],
                end_ns=gpu.end_ns[places],
                kind=kind,
                group=group,
                index=_order(kind, group),
                elements=np.maximum(gpu.elements_in, gpu.elements_out),
                dtype=gpu.dtype,
                stream=gpu.stream[places].astype(np.int64),
                step=steps.of_work[places].astype(np.int32),
            ),
            True,
        )
    nowhere = np.full(len(host), -1, np.int32)
    return (
        Collectives(
            begin_ns=host.begin_ns,
            end_ns=host.end_ns,
            kind=host.kind,
            group=nowhere,
            index=_order(host.kind, nowhere),
            elements=host.elements,
            dtype=host.dtype,
            stream=host.thread,
            step=steps.of_host,
        ),
        False,
    )


def _order(kind: npt.NDArray[np.uint8], group: npt.NDArray[np.int32]) -> Ints:
    """Returns the place of each collective among those of the same kind and group."""
    result = np.zeros(kind.size, np.int64)
    both = kind.astype(np.int64) * 2**32 + group
    for one in distinct(both):
        places = np.flatnonzero(both == one)
        result[places] = np.arange(places.size)
    return result


def _communication_told(trace: RankTrace, collectives: Collectives, notices: Notices) -> bool:
    """Returns whether the trace tells what communication took, and says so where not."""
    unknown = kernels.KINDS.index(Collective.UNKNOWN)
    notices.add("unknown_collective", int((collectives.kind == unknown).sum()))
    if len(collectives):
        return True
    if trace.world_size == 1:
        notices.add("single_process", 1)
        return False
    if trace.distributed_calls:
        notices.add("collectives_without_kernels", trace.distributed_calls)
        return False
    if not len(trace.gpu):
        return False
    if trace.world_size is None:
        # Nothing speaks of other ranks. Where the CPU is recorded, it would have.
        return trace.launches.begin_ns.size > 0
    alike = [name for name in trace.names if kernels.looks_like_collective(name)]
    shown = ", ".join(name.partition("(")[0][:60] for name in alike[:3])
    notices.add(
        "no_collectives", 1, f"By their names, these may be some: {shown}." if alike else ""
    )
    return False


def _flag_stretched(trace: RankTrace, windows: Sequence[tuple[int, int]], notices: Notices) -> None:
    """Counts kernels whose times cannot be: work of one stream runs one after the other."""
    gpu = trace.gpu
    longest_ns = np.iinfo(np.int64).max
    # The last one on its stream overlaps nothing, but then it lasts longer than all there is.
    if len(gpu) >= _ENOUGH_WORK:
        longest_ns = max(int(gpu.begin_ns[-1] - gpu.begin_ns[0]), _LONG_NS)
    if len(windows) >= _ENOUGH_STEPS:
        usual_ns = int(median([end - begin for begin, end in windows]))
        longest_ns = min(longest_ns, max(_LONGER_THAN_STEPS * usual_ns, _LONG_NS))
    count, worst = 0, (0, -1)
    at_once = followed = 0
    before: dict[int, int] = {}
    for first in range(0, len(gpu), _BLOCK):
        block = slice(first, first + _BLOCK)
        streams = gpu.device[block].astype(np.int64) * _KIND_UNIT + gpu.stream[block]
        duration = gpu.end_ns[block] - gpu.begin_ns[block]
        flagged = set((np.flatnonzero(duration > longest_ns) + first).tolist())
        for stream in distinct(streams[gpu.stream[block] >= 0]):
            places = np.flatnonzero(streams == stream) + first
            if stream in before:
                places = np.concatenate(([before[stream]], places))
            before[stream] = int(places[-1])
            over = gpu.end_ns[places[:-1]] - gpu.begin_ns[places[1:]]
            lasted = gpu.end_ns[places[:-1]] - gpu.begin_ns[places[:-1]]
            # Rounded times touch, and kernels may begin while the one before them ends.
            overlaps = (over > _TOUCHES_NS) & (2 * over > lasted)
            at_once += int(((over > 0) & (2 * over > lasted)).sum())
            followed += over.size
            flagged |= set(places[:-1][overlaps].tolist())
        # The last of the block before may have been counted with it.
        count += len(flagged)
        worst = max([worst, *((int(gpu.end_ns[at] - gpu.begin_ns[at]), at) for at in flagged)])
    if at_once > _MANY_AT_ONCE * followed and at_once >= _ENOUGH_AT_ONCE:
        notices.add("streams_overlap", at_once, f"They are {at_once / followed:.0%} of all.")
    if count:
        lasted_ns, place = worst
        name = trace.names[gpu.name[place]].partition("(")[0][:60]
        notices.add(
            "stretched_kernel",
            count,
            f"The longest: {name}, {lasted_ns / 1e6:.1f} ms on stream {gpu.stream[place]}.",
        )


def _windows(trace: RankTrace, steps: Steps) -> list[tuple[int, int]]:
    """Returns begin and end of each step's window on the GPU; none overlaps another."""
    windows: list[tuple[int, int]] = []
    order = _by_step(steps.of_work, len(steps.steps))
    for step, places in zip(steps.steps, order, strict=True):
        begin, end = step.begin_ns, step.end_ns
        if places.size:
            begin = min(begin, int(trace.gpu.begin_ns[places].min()))
            end = max(end, int(trace.gpu.end_ns[places].max()))
        if windows:
            # What runs for it earlier, such as a copy on another stream, does not open it.
            begin = max(begin, windows[-1][1])
        windows.append((begin, max(begin, end)))
    return windows


def _note_others(parts: Sequence[StepParts], notices: Notices) -> None:
    """Says so where the parts of the table do not add up to the windows."""
    window_ns = sum(one.parts.window_ns for one in parts)
    other_ns = sum(one.parts.other_steps_ns or 0 for one in parts)
    outside_ns = sum(one.parts.outside_window_ns or 0 for one in parts)
    if max(other_ns, outside_ns) > _MUCH_OF_OTHERS * window_ns:
        notices.add(
            "steps_interleave",
            sum(bool(one.parts.other_steps_ns or one.parts.outside_window_ns) for one in parts),
            f"Windows hold {other_ns / 1e6:.2f} ms of others' work alone; {outside_ns / 1e6:.2f} "
            "ms of steps' own work run outside of their windows.",
        )


def _whole(
    trace: RankTrace, collectives: Collectives, windows: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Returns begin and end of all that was recorded."""
    gpu = trace.gpu
    begins = [window[0] for window in windows]
    ends = [window[1] for window in windows]
    for begin, end in ((gpu.begin_ns, gpu.end_ns), (collectives.begin_ns, collectives.end_ns)):
        if begin.size:
            begins.append(int(begin.min()))
            ends.append(int(end.max()))
    return (min(begins), max(ends)) if begins else (0, 0)


def _by_step(step: Narrow, number: int) -> Iterator[Ints]:
    """Yields the places of each step's work, [step]: work of a step lies mostly together."""
    first, last = np.full(number, step.size), np.zeros(number, np.int64)
    for at in range(0, step.size, _BLOCK):
        block = step[at : at + _BLOCK]
        for one in distinct(block[block >= 0]):
            places = np.flatnonzero(block == one) + at
            first[one], last[one] = min(first[one], places[0]), places[-1] + 1
    for one in range(number):
        yield np.flatnonzero(step[first[one] : last[one]] == one) + first[one]


def _blocks(trace: RankTrace, collectives: Collectives, on_gpu: bool) -> Iterator[_Block]:
    """Yields all work in order, a block at a time."""
    if not on_gpu:
        # Few enough.
        yield _block(
            trace, collectives, on_gpu, np.arange(len(trace.gpu)), np.arange(len(collectives))
        )
        return
    done = 0
    for first in range(0, len(trace.gpu), _BLOCK):
        places = slice(first, first + _BLOCK)
        number = int((trace.gpu.work[places] == Work.COMMUNICATION).sum())
        yield _block(trace, collectives, on_gpu, places, slice(done, done + number))
        done += number


def _block(
    trace: RankTrace,
    collectives: Collectives,
    on_gpu: bool,
    places: Ints | slice,
    comm_places: Ints | slice,
) -> _Block:
    """Returns work of the GPU with the collectives, which may run on the CPU."""
    gpu = trace.gpu
    begin, end, work = gpu.begin_ns[places], gpu.end_ns[places], gpu.work[places]
    share, elements = np.full(begin.size, -1, np.int64), np.full(begin.size, -1, np.int64)
    kind = collectives.kind[comm_places].astype(np.int64)
    comm_share = kind * _KIND_UNIT + collectives.group[comm_places] + 1
    comm_elements = collectives.elements[comm_places]
    if on_gpu:
        is_comm = work == Work.COMMUNICATION
        share[is_comm] = comm_share
        elements[is_comm] = comm_elements
        return _Block(begin, end, work, share, elements)
    begin = np.concatenate((begin, collectives.begin_ns[comm_places]))
    order = np.argsort(begin, kind="stable")
    communication = np.full(comm_share.size, Work.COMMUNICATION, np.uint8)
    return _Block(
        begin[order],
        np.concatenate((end, collectives.end_ns[comm_places]))[order],
        np.concatenate((work, communication))[order],
        np.concatenate((share, comm_share))[order],
        np.concatenate((elements, comm_elements))[order],
    )


def _parts(trace: RankTrace, summed: _Sum, window_ns: int, told: bool) -> Parts:
    """Returns the figures; what both of two kinds cover is what they cover alone, less together."""
    has_gpu = len(trace.gpu) > 0
    comm_ns = summed.comm.covered_ns if told else None
    overlap_ns = exposed_ns = None
    if comm_ns is not None and has_gpu:
        overlap_ns = comm_ns + summed.compute.covered_ns - summed.kernels.covered_ns
        exposed_ns = comm_ns - overlap_ns
    busy_ns = summed.everything.covered_ns
    return Parts(
        window_ns=window_ns,
        compute_ns=summed.compute.covered_ns if has_gpu else None,
        comm_ns=comm_ns,
        comm_sum_ns=summed.comm_sum_ns if told else None,
        overlap_ns=overlap_ns,
        exposed_comm_ns=exposed_ns,
        memory_ns=summed.memory.covered_ns if has_gpu else None,
        exposed_memory_ns=busy_ns - summed.kernels.covered_ns if has_gpu else None,
        idle_ns=window_ns - busy_ns if has_gpu else None,
        overlap_fraction=overlap_ns / comm_ns if comm_ns and overlap_ns is not None else None,
        by_kind=_shares(trace, summed, has_gpu),
        other_steps_ns=0 if has_gpu else None,
        outside_window_ns=0 if has_gpu else None,
    )


def _shares(trace: RankTrace, summed: _Sum, has_gpu: bool) -> tuple[CommShare, ...]:
    shares = []
    for number, found in summed.shares.items():
        kind, group = divmod(number, _KIND_UNIT)
        exposed_ns = found.beside_compute.covered_ns - summed.compute.covered_ns
        shares.append(
            CommShare(
                kind=kernels.KINDS[kind],
                group=trace.groups[group - 1].label if group else None,
                count=found.count,
                elements=found.elements if found.all_say else None,
                comm_ns=found.alone.covered_ns,
                sum_ns=found.sum_ns,
                exposed_ns=exposed_ns if has_gpu else None,
            )
        )
    return tuple(sorted(shares, key=lambda share: (-share.comm_ns, share.kind, share.group or "")))
