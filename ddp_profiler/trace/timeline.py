"""The parts of all ranks on one clock, as a trace that opens in Perfetto."""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.trace.across import AcrossRanks, waits_of
from ddp_profiler.trace.columns import Ints
from ddp_profiler.trace.kernels import KINDS, Work
from ddp_profiler.trace.split import RankSplit
from ddp_profiler.trace.unions import Intervals, coarser, union, without

MOST_EVENTS = 1_000_000
"""Most events of a timeline over all ranks, unless there are more than 500 of these."""

_LEAST_OF_RANK = 2000
# Steps, compute, three of exposed communication, memory, idling, and collectives in two pieces.
_SHARES = 9
_WRITTEN_AT_ONCE = 4096
_SUFFIXES = (".json", ".json.gz")

# Below each other in this order.
_STEPS, _COMPUTE, _EXPOSED, _MEMORY, _IDLE, _COMMUNICATION = 1, 2, 3, 4, 5, 10
_NAMES = {
    _STEPS: "steps",
    _COMPUTE: "compute",
    _EXPOSED: "exposed communication",
    _MEMORY: "memory",
    _IDLE: "idle",
}


@dataclass(frozen=True)
class Timeline:
    """What was written.

    Attributes:
        path: The file.
        events: Its events, those that name tracks left aside.
        left_out: Collectives left out, the shortest, so that it stays small.
        closed_gap_ns: The longest gap between pieces of one part that was closed likewise.
        zero_ns: Time 0 of the file, in ns since 1970 where the traces say.
    """

    path: Path
    events: int
    left_out: int
    closed_gap_ns: int
    zero_ns: int


def check_target(path: Path, inputs: Sequence[Path]) -> None:
    """Checks that a timeline can be written there, before the long work begins.

    Args:
        path: The file.
        inputs: The files and folders that are read.

    Raises:
        UsageError: Its name ends otherwise, it exists, its folder does not, or it would be read
            as a trace the next time.
    """
    if not path.name.lower().endswith(_SUFFIXES):
        raise UsageError(
            f"A timeline is a .json or .json.gz, which {path} is not.",
            "Give --timeline a name such as timeline.json.gz.",
        )
    if path.exists():
        raise UsageError(f"{path} exists; it is not overwritten.", "Remove it, or name another.")
    if not path.parent.is_dir():
        raise UsageError(f"The folder {path.parent} does not exist.", "Make it first.")
    for folder in inputs:
        if folder.is_dir() and folder.resolve() == path.parent.resolve():
            raise UsageError(
                f"{path} would lie among the traces of {folder} and be read as one next time.",
                "Name a file elsewhere.",
            )


def write_timeline(
    path: Path, ranks: Sequence[RankSplit], across: AcrossRanks, *, most: int = MOST_EVENTS
) -> Timeline:
    """Writes a trace with a process for each rank and a track for each part.

    Times are us since the first event of all ranks, on the reference's clock where clocks could
    be tied, else as each rank's trace has them. It is written as it is made: memory does not
    grow with it.

    Args:
        path: The file, ``.json`` or ``.json.gz``.
        ranks: All ranks that were given.
        across: What they tell together.
        most: About how many events at most, over all ranks. Where a rank has more, the shortest
            gaps within a part are closed, and the shortest collectives left out.

    Raises:
        InputError: It cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with _opened(partial, compressed=path.name.lower().endswith(".gz")) as file:
            made = _write(file, ranks, across, max(_LEAST_OF_RANK, most // len(ranks)))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(
            f"Cannot write {path}: {error.strerror or error}.", "Give --timeline another place."
        ) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return Timeline(path, made.events, made.left_out, made.closed_gap_ns, made.zero_ns)


def _opened(path: Path, *, compressed: bool) -> BinaryIO:
    if compressed:
        # The time of writing is not put into it: equal timelines are equal files.
        return gzip.GzipFile(path, "wb", compresslevel=5, mtime=0)  # type: ignore[return-value]
    return path.open("wb")


@dataclass
class _Made:
    zero_ns: int
    events: int = 0
    left_out: int = 0
    closed_gap_ns: int = 0


class _Clock:
    """Brings a rank's times to the file's."""

    def __init__(self, split: RankSplit, across: AcrossRanks) -> None:
        clocks = across.clocks
        self._tied = clocks is not None and not clocks.refused and split.rank in clocks.offset_ns
        self._clocks, self._rank = clocks, split.rank
        self._base_ns = split.trace.base_time_ns or 0
        self.zero_ns = 0

    def __call__(self, times_ns: Ints) -> Ints:
        absolute = times_ns + self._base_ns
        if self._tied and self._clocks is not None:
            start = self._clocks.zero_ns
            absolute = self._clocks.aligned(self._rank, absolute - start) + start
        return absolute - self.zero_ns


def _write(file: BinaryIO, ranks: Sequence[RankSplit], across: AcrossRanks, most: int) -> _Made:
    clocks = {split.rank: _Clock(split, across) for split in ranks}
    begins = [
        clocks[split.rank](np.array([begin], np.int64))[0]
        for split in ranks
        for begin in _begins(split)
    ]
    made = _Made(zero_ns=int(min(begins, default=0)))
    for clock in clocks.values():
        clock.zero_ns = made.zero_ns
    told = across.clocks is not None and not across.clocks.refused
    head = {
        "displayTimeUnit": "ms",
        "otherData": {
            "made_by": "ddp-profiler trace --timeline",
            "zero_ns": str(made.zero_ns),
            "clocks": "aligned by common ends of collectives" if told else "as each trace has them",
        },
    }
    file.write(json.dumps(head)[:-1].encode() + b', "traceEvents": [\n')
    first = True
    pending: list[str] = []
    for split in ranks:
        for event in _events(split, across, clocks[split.rank], most, made):
            pending.append(event)
            if len(pending) >= _WRITTEN_AT_ONCE:
                file.write((("" if first else ",\n") + ",\n".join(pending)).encode("ascii"))
                first = False
                pending.clear()
    if pending:
        file.write((("" if first else ",\n") + ",\n".join(pending)).encode("ascii"))
    file.write(b"\n]}\n")
    return made


def _begins(split: RankSplit) -> Iterator[int]:
    yield from (step.step.begin_ns for step in split.steps[:1])
    for found in (split.trace.gpu.begin_ns, split.collectives.begin_ns):
        if found.size:
            yield int(found.min())


def _events(
    split: RankSplit, across: AcrossRanks, clock: _Clock, most: int, made: _Made
) -> Iterator[str]:
    """Yields the events of a rank as JSON."""
    rank = split.rank
    yield _meta(rank, 0, "process_name", {"name": f"rank {rank}"})
    yield _meta(rank, 0, "process_sort_index", {"sort_index": rank})
    named: set[int] = set()

    def name_track(track: int, name: str) -> Iterator[str]:
        if track not in named:
            named.add(track)
            yield _meta(rank, track, "thread_name", {"name": name})
            yield _meta(rank, track, "thread_sort_index", {"sort_index": track})

    together = -(-len(split.steps) // max(1, most // _SHARES))
    for place in range(0, len(split.steps), together or 1):
        yield from name_track(_STEPS, _NAMES[_STEPS])
        steps = [one.step for one in split.steps[place : place + together]]
        name = f"step {steps[0].label}" + (" (incomplete)" if steps[0].incomplete else "")
        if len(steps) > 1:
            name = f"steps {steps[0].label} to {steps[-1].label}"
        until = max(step.end_ns for step in steps)
        if place + together < len(split.steps):
            # Work belongs to the step that began last; slices of a track must not overlap.
            until = min(until, split.steps[place + together].step.begin_ns)
        begin, end = clock(np.array([steps[0].begin_ns, until], np.int64)).tolist()
        made.events += 1
        yield _slice(rank, _STEPS, name, begin, end, {})
    for track, found in _parts(split, across):
        names = list(found)
        fewer, gap_ns = coarser(list(found.values()), len(names) * max(1, most // _SHARES))
        made.closed_gap_ns = max(made.closed_gap_ns, gap_ns)
        if fewer.begin_ns.size:
            yield from name_track(track, _NAMES[track])
        times = zip(clock(fewer.begin_ns).tolist(), clock(fewer.end_ns).tolist(), strict=True)
        for place, (begin, end) in enumerate(times):
            made.events += 1
            part = int(fewer.part[place])
            if part >= 0:
                yield _slice(rank, track, names[part], begin, end, {})
                continue
            lasted = zip(names, fewer.part_ns[place].tolist(), strict=True)
            each = {f"{name.replace(' ', '_')}_us": ns / 1000 for name, ns in lasted if ns}
            yield _slice(rank, track, _NAMES[track], begin, end, each)
    for track, track_name, name, begin, end, arguments in _collectives(
        split, across, clock, most, made
    ):
        yield from name_track(track, track_name)
        made.events += 1
        yield _slice(rank, track, name, begin, end, arguments)


def _parts(split: RankSplit, across: AcrossRanks) -> Iterator[tuple[int, dict[str, Intervals]]]:
    """Yields tracks, each with the names and times of its parts, which do not overlap."""
    gpu, comm = split.trace.gpu, split.collectives

    def work(kind: Work) -> Intervals:
        return union(gpu.begin_ns[gpu.work == kind], gpu.end_ns[gpu.work == kind])

    if not len(gpu):
        return
    compute = work(Work.COMPUTE)
    yield _COMPUTE, {"compute": compute}
    wait_ns, _, whole = waits_of(split, across.meetings)
    joined = comm.begin_ns + wait_ns
    transfer = union(joined[whole], comm.end_ns[whole])
    untold = union(joined[~whole], comm.end_ns[~whole])
    waits = union(comm.begin_ns, joined)
    yield (
        _EXPOSED,
        {
            "exposed transfer": without(transfer, compute),
            "exposed communication": without(without(untold, transfer), compute),
            "exposed wait": without(without(without(waits, transfer), untold), compute),
        },
    )
    yield _MEMORY, {"memory": work(Work.MEMORY)}
    busy = union(
        np.concatenate((gpu.begin_ns, comm.begin_ns)), np.concatenate((gpu.end_ns, comm.end_ns))
    )
    # As in the parts of the whole: from the first step or work to the last.
    first = [step.window_begin_ns for step in split.steps[:1]]
    begin = np.array([min([*first, int(busy.begin_ns[0])])]) if busy.begin_ns.size else gpu.begin_ns
    recorded = union(begin[:1], begin[:1] + split.total.window_ns)
    yield _IDLE, {"idle": without(recorded, busy)}


def _collectives(
    split: RankSplit, across: AcrossRanks, clock: _Clock, most: int, made: _Made
) -> Iterator[tuple[int, str, str, int, int, dict[str, Any]]]:
    """Yields track, its name, name, begin, end and arguments of waits and transfers."""
    found, trace = split.collectives, split.trace
    wait_ns, _, whole = waits_of(split, across.meetings)
    last = _last_ranks(split, across)
    places = np.arange(len(found))
    keep = max(1, most // _SHARES)
    if places.size > keep:
        lasted = found.end_ns - found.begin_ns
        places = np.sort(np.argsort(-lasted, kind="stable")[:keep])
        made.left_out += len(found) - keep
    begin, end = clock(found.begin_ns).tolist(), clock(found.end_ns).tolist()
    joined = np.minimum(clock(found.begin_ns + wait_ns), clock(found.end_ns)).tolist()
    lanes: dict[int, list[tuple[int, int]]] = {}
    tracks: dict[tuple[int, int], int] = {}
    for place in places.tolist():
        code = int(found.kind[place])
        kind = KINDS[code].value
        lane = _lane(lanes.setdefault(code, []), begin[place], end[place])
        track = tracks.setdefault((code, lane), _COMMUNICATION + len(tracks))
        track_name = kind if lane == 0 else f"{kind} {lane + 1}"
        group, elements = int(found.group[place]), int(found.elements[place])
        step = int(found.step[place])
        arguments: dict[str, Any] = {"index": int(found.index[place])}
        if elements >= 0:
            arguments["elements"] = elements
        if group >= 0:
            arguments["group"] = trace.groups[group].label
        if step >= 0:
            one = split.steps[step].step
            arguments["step"] = one.number if one.occurrence == 1 else one.label
        if place in last:
            arguments["last_rank"] = last[place]
        if joined[place] > begin[place]:
            yield track, track_name, f"{kind} wait", begin[place], joined[place], arguments
        if end[place] > joined[place] or joined[place] == begin[place]:
            name = f"{kind} transfer" if whole[place] else kind
            yield track, track_name, name, joined[place], end[place], arguments


def _last_ranks(split: RankSplit, across: AcrossRanks) -> Mapping[int, int]:
    """Returns who joined each of a rank's collectives last, by its place."""
    result: dict[int, int] = {}
    for found in across.meetings:
        if split.rank in found.match.ranks:
            places = found.match.places[:, found.match.ranks.index(split.rank)]
            for row in np.flatnonzero(found.meets).tolist():
                result[int(places[row])] = found.match.ranks[int(found.last[row])]
    return result


def _lane(free: list[tuple[int, int]], begin: int, end: int) -> int:
    """Returns the first lane that is free by then: slices of a track must not overlap.

    Args:
        free: Heap of (when it is free, lane); changed.
        begin: Begin of the slice.
        end: Its end.
    """
    if free and free[0][0] <= begin:
        _, lane = heapq.heapreplace(free, (end, free[0][1]))
        return lane
    lane = len(free)
    heapq.heappush(free, (end, lane))
    return lane


def _meta(rank: int, track: int, name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"ph": "M", "name": name, "pid": rank, "tid": track, "args": arguments})


def _slice(
    rank: int, track: int, name: str, begin: int, end: int, arguments: Mapping[str, Any]
) -> str:
    more = f', "args": {json.dumps(arguments)}' if arguments else ""
    return (
        f'{{"ph": "X", "name": {json.dumps(name)}, "cat": "ddp_profiler", "pid": {rank}, '
        f'"tid": {track}, "ts": {_us(begin)}, "dur": {_us(max(0, end - begin))}{more}}}'
    )


def _us(ns: int) -> str:
    """Returns a time in us with all its digits."""
    sign, ns = ("-" if ns < 0 else ""), abs(ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"
