"""From a file to one rank's columns, in one pass and in bounded memory."""

from __future__ import annotations

import ctypes
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ddp_profiler.errors import InputError
from ddp_profiler.trace import kernels, times
from ddp_profiler.trace.columns import Column, Ints, Packed, constant_or, gather, in_order, narrow
from ddp_profiler.trace.document import Document
from ddp_profiler.trace.groups import configured_ranks, group_ranks
from ddp_profiler.trace.kernels import Row, Work
from ddp_profiler.trace.model import (
    NO_KIND,
    GpuWork,
    Group,
    HostCollectives,
    Launches,
    Mark,
    RankTrace,
)
from ddp_profiler.trace.notices import Notices
from ddp_profiler.trace.source import DEFAULT_LIMIT_BYTES, Source


class NoTraceError(InputError):
    """The file is sound JSON, but no trace."""


LONGEST_NS = 86_400 * 10**9
"""A day: what claims to last longer, or lies further away from all else, is no measurement."""

_LONGEST_US = LONGEST_NS / 1000
_NAMES_CACHED = 1 << 16
_TOUCHES_NS = 2000
_NO_WORK = -1
_WORK_UNIT = 1 << 8
_EMPTY = msgspec.Raw(b"")
_ONCE = (b'"ph":', b'"ts":', b'"tid":', b'"pid":')
_NO_ARGUMENTS = msgspec.Raw(b"{}")
_KIND_NUMBERS = {kind: number for number, kind in enumerate(kernels.KINDS)}


class _Event(msgspec.Struct, gc=False):
    """A row, only with what is needed. Its arguments are decoded if the row is of use."""

    cat: str = ""
    name: str = ""
    ts: int | float | None = 0
    dur: int | float | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    args: msgspec.Raw = _NO_ARGUMENTS


class _TextEvent(msgspec.Struct, gc=False):
    """A row whose times are kept as text, since no double can hold them."""

    cat: str = ""
    name: str = ""
    ts: msgspec.Raw = _EMPTY
    dur: msgspec.Raw = _EMPTY
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    args: msgspec.Raw = _NO_ARGUMENTS


class _GpuArguments(msgspec.Struct, gc=False):
    correlation: int = -1
    stream: int = -1
    device: int = -1
    collective: str = msgspec.field(default="", name="Collective name")
    elements_in: int = msgspec.field(default=-1, name="In msg nelems")
    elements_out: int = msgspec.field(default=-1, name="Out msg nelems")
    group_size: int = msgspec.field(default=-1, name="Group size")
    dtype: str = ""
    group: str = msgspec.field(default="", name="Process Group Name")
    description: str = msgspec.field(default="", name="Process Group Description")
    ranks: msgspec.Raw = msgspec.field(default=_EMPTY, name="Process Group Ranks")


class _LaunchArguments(msgspec.Struct, gc=False):
    correlation: int = -1


class _HostArguments(msgspec.Struct, gc=False):
    dimensions: list[Any] = msgspec.field(default_factory=list, name="Input Dims")
    dtypes: list[Any] = msgspec.field(default_factory=list, name="Input type")


_EVENTS = msgspec.json.Decoder(list[_Event])
_TEXT_EVENTS = msgspec.json.Decoder(list[_TextEvent])
_RAW_EVENTS = msgspec.json.Decoder(list[msgspec.Raw])
_RAW_EVENT = msgspec.json.Decoder(dict[str, msgspec.Raw])

_AnyEvent = _Event | _TextEvent
_Arguments = TypeVar("_Arguments", bound=msgspec.Struct)


class _Cache(dict[str, Any]):
    """Answers by name. Names repeat; where they do not, the cache starts anew."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self._answer = answer

    def __missing__(self, name: str) -> Any:
        if len(self) >= _NAMES_CACHED:
            self.clear()
        found = self[name] = self._answer(name)
        return found


class _Numbers(dict[Any, int]):
    """Numbers what it is asked for, in the order of asking."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number


@dataclass(slots=True)
class _Times:
    """Times of rows: those that can be used, and of these begin and duration in ns."""

    usable: npt.NDArray[np.bool_]
    begin_ns: Ints
    duration_ns: Ints
    finer: int


class _Collector:
    """Takes events and keeps what is needed of them in columns."""

    def __init__(self, notices: Notices, *, lenient: bool = False) -> None:
        self._notices = notices
        self._lenient = lenient
        self._as_text = False
        self.num_events = 0
        self.c10d_calls = 0
        self.other_calls = 0
        # Of calls that launch GPU work; and of steps, where two processes have the same one.
        self.pids: set[str] = set()
        self.step_pids: dict[int, str] = {}
        # Steps on the CPU: begin, end, thread, number. And what each process is called.
        self.steps: list[tuple[int, int, str, int]] = []
        self.process_names: dict[str, dict[str, None]] = defaultdict(dict)
        self.marks: list[Mark] = []
        self._rows = _Cache(kernels.row)
        self._works = _Cache(lambda name: _code(*kernels.work(name)))
        self._launches = _Cache(_launch_code)
        self._uses = _Cache(_use_of_operator)
        self.names = _Numbers()
        self.groups = _Numbers()
        self.dtypes = _Numbers()
        self.gpu = {name: Column() for name in _GPU_COLUMNS}
        self.collectives = {name: Column() for name in _COLLECTIVE_COLUMNS}
        self.launches = {name: Column() for name in ("begin", "correlation", "is_kernel")}
        self.host = {
            name: Column() for name in ("begin", "duration", "kind", "thread", "elements", "dtype")
        }

    def __call__(self, text: bytes | memoryview) -> None:
        """Takes an array of events.

        Raises:
            msgspec.DecodeError: The text is no JSON.
        """
        before = self.num_events
        self._decode(text)
        if self._lenient:
            # Where text is missing, the begin of one event and the end of another may read as one:
            # it has keys twice that every event has once. Within names quotes are escaped.
            whole = bytes(text)
            most = max(whole.count(key) for key in _ONCE)
            self._notices.add("joined_events", most - (self.num_events - before))

    def _decode(self, text: bytes | memoryview) -> None:
        events: Sequence[_AnyEvent]
        if not self._as_text:
            try:
                events = _EVENTS.decode(text)
            except msgspec.ValidationError:
                self._take(_loose_events(text, self._notices), as_text=True)
                return
            try:
                self._take(events, as_text=False)
                return
            except times.NeedsTextError:
                # Its other pieces will be like this one.
                self._as_text = True
        try:
            events = _TEXT_EVENTS.decode(text)
        except msgspec.ValidationError:
            events = _loose_events(text, self._notices)
        self._take(events, as_text=True)

    def _take(self, events: Sequence[_AnyEvent], *, as_text: bool) -> None:
        by_category: dict[str, list[_AnyEvent]] = defaultdict(list)
        for event in events:
            by_category[event.cat].append(event)
        by_row: dict[Row, list[_AnyEvent]] = defaultdict(list)
        for category, found in by_category.items():
            row = self._rows[category]
            if row != Row.OTHER:
                by_row[row].extend(found)
        # First all that can fail, then what changes anything.
        read = {
            row: _times(found, as_text=as_text)
            for row, found in by_row.items()
            if row in (Row.KERNEL, Row.MEMORY, Row.LAUNCH)
        }
        operators = by_row[Row.OPERATOR] + by_row[Row.ANNOTATION] + by_row[Row.GPU_ANNOTATION]
        used = [(event, use) for event in operators if (use := self._uses[event.name])]
        used_times = _times([event for event, _ in used], as_text=as_text)

        self.num_events += len(events)
        for event in by_category.get("", ()):
            if event.name == "process_name":
                self._take_process_name(event)
        for row in (Row.KERNEL, Row.MEMORY):
            if row in read:
                self._take_gpu(by_row[row], self._usable(read[row]), is_kernel=row == Row.KERNEL)
        if Row.LAUNCH in read:
            self._take_launches(by_row[Row.LAUNCH], self._usable(read[Row.LAUNCH]))
        self._take_operators(used, self._usable(used_times))
        self._count_others(operators, as_text=as_text)
        self._notices.add("sync_rows_ignored", len(by_row[Row.SYNC]))

    def _take_process_name(self, event: _AnyEvent) -> None:
        try:
            name = _RAW_EVENT.decode(event.args).get("name")
        except msgspec.DecodeError:
            return
        if name is not None:
            self.process_names[str(event.pid)][_string(name)] = None

    def _usable(self, found: _Times) -> _Times:
        """Marks rows whose times cannot be, and counts them by what is wrong."""
        begin, duration = found.begin_ns, found.duration_ns
        given = found.usable
        none = (begin == times.UNREADABLE) | (duration == times.UNREADABLE)
        wrong = {
            "dropped_unreadable_time": none,
            "dropped_zero_time": begin <= 0,
            "dropped_negative_duration": duration < 0,
            "dropped_absurd_duration": duration > LONGEST_NS,
        }
        for code, places in wrong.items():
            self._notices.add(code, int((places & given).sum()))
            given = given & ~places
        self._notices.add("finer_than_ns", found.finer)
        found.usable = given
        return found

    def _count_others(self, rows: Sequence[_AnyEvent], *, as_text: bool) -> None:
        """Counts rows with impossible times among those that nothing is taken from."""
        looks_wrong = _text_looks_wrong if as_text else _looks_wrong
        wrong = [row for row in rows if looks_wrong(row) and not self._uses[row.name]]
        if wrong:
            self._usable(_times(wrong, as_text=as_text))

    def _take_gpu(self, rows: Sequence[_AnyEvent], found: _Times, *, is_kernel: bool) -> None:
        arguments = _arguments(rows, _GpuArguments, _GPU_ARGUMENTS)
        names = np.array([self.names[row.name] for row in rows], np.int64)
        if is_kernel:
            codes = np.array([self._works[row.name] for row in rows], np.int64)
            # What the arguments say goes before the name.
            for place, given in enumerate(arguments):
                if given.collective:
                    codes[place] = _code(*kernels.work(rows[place].name, given.collective))
        else:
            codes = np.full(len(rows), _code(Work.MEMORY, None))
        self._notices.add("sync_rows_ignored", int((found.usable & (codes == _NO_WORK)).sum()))
        keep = np.flatnonzero(found.usable & (codes != _NO_WORK))
        work, kind = np.divmod(codes, _WORK_UNIT)
        is_collective = work == Work.COMMUNICATION
        columns = {
            "begin": found.begin_ns,
            "duration": found.duration_ns,
            "work": work,
            "kind": kind,
            "name": names,
            "correlation": _integers([given.correlation for given in arguments]),
            "stream": _integers([given.stream for given in arguments]),
            "device": _integers([given.device for given in arguments]),
        }
        for name, values in columns.items():
            self.gpu[name].append(values[keep])
        self._take_collectives(
            [arguments[place] for place in np.flatnonzero(found.usable & is_collective)]
        )

    def _take_collectives(self, arguments: Sequence[_GpuArguments]) -> None:
        groups = []
        for given in arguments:
            group = (given.group, given.description, given.group_size, bytes(given.ranks))
            groups.append(self.groups[group] if any(group[:2]) else -1)
        values = {
            "elements_in": [given.elements_in for given in arguments],
            "elements_out": [given.elements_out for given in arguments],
            "group": groups,
            "dtype": [self.dtypes[given.dtype] if given.dtype else -1 for given in arguments],
        }
        for name, column in values.items():
            self.collectives[name].append(_integers(column))

    def _take_launches(self, rows: Sequence[_AnyEvent], found: _Times) -> None:
        codes = [self._launches[row.name] for row in rows]
        keep = [place for place in np.flatnonzero(found.usable).tolist() if codes[place]]
        self.pids |= {str(rows[place].pid) for place in keep}
        arguments = _arguments([rows[place] for place in keep], _LaunchArguments, _LAUNCH_ARGUMENTS)
        self.launches["begin"].append(found.begin_ns[keep])
        self.launches["correlation"].append(_integers([given.correlation for given in arguments]))
        self.launches["is_kernel"].append(_integers([codes[place] == 2 for place in keep]))

    def _take_operators(self, used: Sequence[tuple[_AnyEvent, int]], found: _Times) -> None:
        host: list[int] = []
        for place, (event, use) in enumerate(used):
            if use == _DISTRIBUTED:
                if event.name.startswith(("c10d::", "_c10d_functional::")):
                    self.c10d_calls += 1
                else:
                    self.other_calls += 1
                continue
            if not found.usable[place]:
                continue
            if use == _HOST_COLLECTIVE:
                if self._rows[event.cat] != Row.GPU_ANNOTATION:
                    host.append(place)
                continue
            begin = int(found.begin_ns[place])
            on_gpu = self._rows[event.cat] == Row.GPU_ANNOTATION
            number = kernels.step_number(event.name)
            end = begin + int(found.duration_ns[place])
            self.marks.append(Mark(event.name, number, begin, end, on_gpu))
            if number is not None and not on_gpu:
                pid = str(event.pid)
                if self.step_pids.setdefault(number, pid) != pid:
                    self.pids |= {self.step_pids[number], pid}
                self.steps.append((begin, end, str(event.tid), number))
        if not host:
            return
        rows = [used[place][0] for place in host]
        arguments = _arguments(rows, _HostArguments, _HOST_ARGUMENTS)
        kinds = [kernels.host_collective(row.name) for row in rows]
        self.host["begin"].append(found.begin_ns[host])
        self.host["duration"].append(found.duration_ns[host])
        self.host["kind"].append(_integers([_KIND_NUMBERS[kind] for kind in kinds if kind]))
        threads = [row.tid if isinstance(row.tid, int) else -1 for row in rows]
        self.host["thread"].append(_integers(threads))
        sizes = [_elements(given.dimensions) for given in arguments]
        self.host["elements"].append(_integers(sizes))
        types = [next((one for one in given.dtypes if one), "") for given in arguments]
        self.host["dtype"].append(
            _integers([self.dtypes[str(name)] if name else -1 for name in types])
        )


_GPU_COLUMNS = (
    "begin",
    "duration",
    "work",
    "kind",
    "device",
    "stream",
    "correlation",
    "name",
)
_COLLECTIVE_COLUMNS = ("elements_in", "elements_out", "group", "dtype")

_GPU_ARGUMENTS = msgspec.json.Decoder(list[_GpuArguments])
_LAUNCH_ARGUMENTS = msgspec.json.Decoder(list[_LaunchArguments])
_HOST_ARGUMENTS = msgspec.json.Decoder(list[_HostArguments])

_MARK, _HOST_COLLECTIVE, _DISTRIBUTED = 1, 2, 3


def _code(work: Work | None, kind: kernels.Collective | None) -> int:
    """Returns work and kind as one number."""
    if work is None:
        return _NO_WORK
    return work * _WORK_UNIT + (NO_KIND if kind is None else _KIND_NUMBERS[kind])


def _use_of_operator(name: str) -> int:
    """Returns what a row of the CPU is of use for; 0 for nothing."""
    if kernels.step_number(name) is not None or kernels.is_optimizer_step(name):
        return _MARK
    if kernels.host_collective(name) is not None:
        return _HOST_COLLECTIVE
    return _DISTRIBUTED if kernels.is_distributed(name) else 0


def _launch_code(name: str) -> int:
    """Returns 2 for a call that launches kernels, 1 for one that copies or sets, else 0."""
    # A host function is put into a stream, but runs on the CPU.
    if not kernels.launches(name) or "hostfunc" in name.lower():
        return 0
    return 2 if "launch" in name.lower() else 1


def _looks_wrong(row: Any) -> bool:
    """Returns whether a row's times are not those of a measurement."""
    return row.dur is not None and not ((row.ts or 0) > 0 and 0 <= row.dur <= _LONGEST_US)


def _text_looks_wrong(row: Any) -> bool:
    """Returns the same for a row whose times are text."""
    if not row.dur:
        return False
    try:
        return not (float(row.ts) > 0 and 0 <= float(row.dur) <= _LONGEST_US)
    except ValueError:
        return True


def _times(rows: Sequence[_AnyEvent], *, as_text: bool) -> _Times:
    """Returns the times of rows; rows without a duration are not usable, and no mistake."""
    if as_text:
        begin, finer = times.from_texts([bytes(row.ts) for row in rows])  # type: ignore[arg-type]
        texts = [bytes(row.dur) for row in rows]  # type: ignore[arg-type]
        given = np.array([bool(text) for text in texts], bool)
        duration, more = times.from_texts([text or b"0" for text in texts])
    else:
        begin, finer = times.from_numbers([row.ts for row in rows])  # type: ignore[misc]
        durations = [row.dur for row in rows]
        given = np.array([value is not None for value in durations], bool)
        duration, more = times.from_numbers(durations)  # type: ignore[arg-type]
    return _Times(given, begin, duration, finer + more)


def _arguments(
    rows: Sequence[_AnyEvent],
    kind: type[_Arguments],
    decoder: msgspec.json.Decoder[list[_Arguments]],
) -> list[_Arguments]:
    """Decodes the arguments of rows; what is of another type than expected counts as absent."""
    texts = [row.args for row in rows]
    try:
        return decoder.decode(b"[" + b",".join(texts) + b"]")
    except msgspec.DecodeError:
        return [_loose_arguments(bytes(text), kind) for text in texts]


def _loose_arguments(text: bytes, kind: type[_Arguments]) -> _Arguments:
    try:
        given = _RAW_EVENT.decode(text)
    except msgspec.DecodeError:
        return kind()
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        raw = given.get(field.encode_name)
        if raw is None:
            continue
        try:
            values[field.name] = msgspec.json.decode(raw, type=field.type, strict=False)
        except msgspec.DecodeError:
            continue
    return kind(**values)


def _loose_events(text: bytes | memoryview, notices: Notices) -> list[_TextEvent]:
    """Decodes events of which some have fields of unusual types, one by one."""
    events = []
    for raw in _RAW_EVENTS.decode(text):
        try:
            given = _RAW_EVENT.decode(raw)
        except msgspec.ValidationError:
            notices.add("dropped_unreadable")
            continue
        event = _TextEvent(
            cat=_string(given.get("cat")),
            name=_string(given.get("name")),
            ts=given.get("ts", _EMPTY),
            pid=_scalar(given.get("pid")),
            tid=_scalar(given.get("tid")),
        )
        if bytes(given.get("dur", _EMPTY)) != b"null":
            event.dur = given.get("dur", _EMPTY)
        if bytes(given.get("args", _EMPTY))[:1] == b"{":
            event.args = given["args"]
        events.append(event)
    return events


def _string(raw: msgspec.Raw | None) -> str:
    value = _scalar(raw)
    return value if isinstance(value, str) else ""


def _scalar(raw: msgspec.Raw | None) -> int | str | float | None:
    if raw is None:
        return None
    value = msgspec.json.decode(raw)
    return value if isinstance(value, int | str | float) else None


def _integers(values: Sequence[int]) -> Ints:
    """Returns an array; numbers beyond 64 bits, which stand for no number, become -1."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([value if -(2**63) <= value < 2**63 else -1 for value in values], np.int64)


def _elements(dimensions: Sequence[Any]) -> int:
    """Returns the number of elements of all tensors in ``Input Dims``; -1 where it has none."""
    found = [
        math.prod(shape)
        for shape in dimensions
        if isinstance(shape, list) and shape and all(isinstance(size, int) for size in shape)
    ]
    return sum(found) if found else -1


# ----------------------------------------------------------------------------------------------


def read_trace(
    path: Path,
    *,
    lenient: bool = False,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    progress: Callable[[int], None] | None = None,
) -> RankTrace:
    """Reads the trace of one rank, in memory that does not grow with what is not needed.

    Args:
        path: A trace as torch.profiler exports it, plain or gzip.
        lenient: Repair what is safe instead of refusing it; each kind is counted.
        limit_bytes: Most bytes that a compressed file may unpack to.
        progress: Called with the bytes of the file that have been read.

    Returns:
        Work of the GPUs, collectives, launches and steps. The rank is None where the file's
        metadata has none.

    Raises:
        InputError: The file is no trace, is broken, or holds several processes.
    """
    notices = Notices()
    collector = _Collector(notices, lenient=lenient)
    source = Source(path, limit_bytes=limit_bytes, progress=progress)
    pieces = iter(source)
    document = Document(
        pieces, str(path), collector, notices, lenient=lenient, unpacked=source.compressed
    )
    try:
        document.read()
    except InputError as error:
        _raise_damage(pieces, source)
        if document.cut and source.cut_at is not None:
            raise _cut_gzip(path, source.cut_at) from error
        raise
    if source.cut_at is not None and not lenient:
        raise _cut_gzip(path, source.cut_at)
    if not document.has_events:
        if document.cut:
            raise InputError(f"{path} is cut before its first event.", "Export it again.")
        raise NoTraceError(
            f"{path} is JSON, but holds no traceEvents.",
            "Give a trace that torch.profiler exported, as .json or .json.gz.",
        )
    if document.is_list and not collector.num_events:
        raise NoTraceError(
            f"{path} is a JSON list, but not of events.",
            "Give a trace that torch.profiler exported, as .json or .json.gz.",
        )
    _refuse_several_processes(path, collector, notices)
    _give_back()
    found = _rank_trace(path, document, collector, notices)
    _give_back()
    return found


def _give_back() -> None:
    """Hands memory that was freed back to the system, where the C library (glibc) can.

    It keeps what decoding and sorting used, in holes that columns of a long trace do not fit into.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return
    trim(0)


def _raise_damage(pieces: Iterator[bytes], source: Source) -> None:
    """Raises what is wrong with the gzip data, if that is what broke the text."""
    if source.compressed:
        for _ in pieces:
            pass


def _cut_gzip(path: Path, at: int) -> InputError:
    return InputError(
        f"{path} is cut: its gzip data ends at byte {at:,} of the file, in the middle of a stream.",
        "Copy it again, or export it again; --lenient uses what is there.",
    )


def _refuse_several_processes(path: Path, collector: _Collector, notices: Notices) -> None:
    if len(collector.pids) > 1:
        pids = ", ".join(sorted(collector.pids)[:4])
        raise InputError(
            f"{path} holds {len(collector.pids)} processes that launch GPU work or have steps "
            f"(pids {pids}).",
            "Give one file a rank, as each process exports it.",
        )
    for pid in sorted(collector.pids | set(collector.step_pids.values())):
        names = collector.process_names.get(pid, {})
        if len(names) > 1:
            shown = " and ".join(list(names)[:2])
            raise _merged(path, f"pid {pid} has the names {shown}")
    steps = sorted(collector.steps)
    for one, other in pairwise(steps):
        shorter_ns = min(one[1] - one[0], other[1] - other[0])
        # A thread is in one step at a time, and so is a process.
        if one[2] != other[2] and 2 * (one[1] - other[0]) > shorter_ns:
            raise _merged(
                path,
                f"threads {one[2]} and {other[2]} are in ProfilerStep#{one[3]} and "
                f"ProfilerStep#{other[3]} at once",
            )
    latest: dict[str, tuple[int, int, str, int]] = {}
    for step in sorted(steps, key=lambda one: (one[0], -one[1])):
        _, end, thread, number = step
        before = latest.setdefault(thread, step)
        # An annotation ends before another of its thread begins, or lies within it whole; then it
        # may be the same one, twice in the file. Rounded times touch.
        same = number == before[3] and end <= before[1]
        if step is not before and before[1] - step[0] > _TOUCHES_NS and not same:
            raise _merged(
                path,
                f"thread {thread} is in ProfilerStep#{before[3]} and ProfilerStep#{number} at once",
            )
        latest[thread] = max(before, step, key=lambda one: one[1])
    numbers = Counter(number for *_, number in steps)
    again = [number for number, count in numbers.items() if count > 1]
    notices.add(
        "repeated_step",
        len(steps) - len(numbers),
        f"The first: ProfilerStep#{again[0]}, {numbers[again[0]]} times." if again else "",
    )


def _merged(path: Path, evidence: str) -> InputError:
    return InputError(
        f"{path} holds several processes with the same pid, as files merged from several hosts "
        f"do: {evidence}.",
        "Give one file a rank, as each process exports it.",
    )


def _rank_trace(
    path: Path, document: Document, collector: _Collector, notices: Notices
) -> RankTrace:
    rank, world_size, backend = _distributed_info(document.metadata.get("distributedInfo"))
    # One after the other, so that few columns are held twice.
    launches = _launches_in_order(collector)
    begin, places = in_order(collector.gpu["begin"].take())
    host = {name: column.take() for name, column in collector.host.items()}
    host["begin"], host_places = in_order(host["begin"])
    middle = _middle(begin, host["begin"], collector.marks)
    near = _near(begin, middle, notices)
    packed, places = Packed(begin[near]), places[near]
    del begin
    gpu = _gpu_work(collector, packed, places)
    near = _near(host["begin"], middle, notices)
    host_begin = host.pop("begin")[near]
    host = {name: column[host_places[near]] for name, column in host.items()}
    config = configured_ranks(document.metadata.get("distributedInfo"))
    kept = [mark for mark in collector.marks if abs(mark.begin_ns - middle) <= LONGEST_NS]
    notices.add("dropped_absurd_time", len(collector.marks) - len(kept))
    return RankTrace(
        path=path,
        rank=rank,
        world_size=world_size,
        backend=backend,
        base_time_ns=_integer(document.metadata.get("baseTimeNanoseconds")),
        gpu=gpu,
        host_collectives=HostCollectives(
            begin_ns=host_begin,
            end_ns=host_begin + host["duration"],
            kind=host["kind"].astype(np.uint8),
            thread=host["thread"],
            elements=host["elements"],
            dtype=host["dtype"].astype(np.int32),
        ),
        launches=launches,
        marks=tuple(sorted(kept, key=lambda mark: (mark.begin_ns, mark.end_ns))),
        names=tuple(collector.names),
        groups=tuple(
            Group(name, text, size if size >= 0 else None, group_ranks(given, size, config, name))
            for name, text, size, given in collector.groups
        ),
        dtypes=tuple(collector.dtypes),
        distributed_calls=collector.c10d_calls or collector.other_calls,
        num_events=collector.num_events,
        cut=document.cut,
        warnings=notices.all(),
    )


def _middle(gpu: Ints, host: Ints, marks: Sequence[Mark]) -> int:
    """Returns the median of the begins, in ns: a time within the recording.

    Args:
        gpu: Begins of the GPU's work, in order.
        host: Begins of collectives on the CPU, in order.
        marks: Annotations of steps.
    """
    for found in (gpu, host, np.sort(np.array([mark.begin_ns for mark in marks], np.int64))):
        if found.size:
            return int(found[found.size // 2])
    return 0


def _near(begin_ns: Ints, middle: int, notices: Notices) -> slice:
    """Returns the part of begins in order that is not absurdly far from all else."""
    first = int(np.searchsorted(begin_ns, middle - LONGEST_NS))
    last = int(np.searchsorted(begin_ns, middle + LONGEST_NS, "right"))
    notices.add("dropped_absurd_time", begin_ns.size - (last - first))
    return slice(first, last)


def _gpu_work(collector: _Collector, begin: Packed, places: npt.NDArray[np.int32]) -> GpuWork:
    """Returns the work in order. One column after the other, so that few are held twice."""
    columns = collector.gpu
    duration = Packed(columns["duration"].take_narrow(), places)
    work = columns["work"].take(np.uint8)
    # Which of the collectives each one is, to put what only these have into the same order.
    ordinals = np.cumsum(work == Work.COMMUNICATION, dtype=np.int32) - 1
    of_collectives = gather(ordinals, places)
    work = gather(work, places)
    of_collectives = of_collectives[work == Work.COMMUNICATION]
    del ordinals
    collectives = {
        name: column.take()[of_collectives] for name, column in collector.collectives.items()
    }
    return GpuWork(
        begin_ns=begin,
        duration_ns=duration,
        work=work,
        kind=gather(columns["kind"].take(np.uint8), places),
        device=constant_or(gather(columns["device"].take_narrow(), places)),
        stream=gather(columns["stream"].take_narrow(), places),
        correlation=Packed(columns["correlation"].take_narrow(), places),
        name=gather(columns["name"].take_narrow(), places),
        elements_in=constant_or(collectives["elements_in"]),
        elements_out=constant_or(collectives["elements_out"]),
        group=collectives["group"].astype(np.int32),
        dtype=collectives["dtype"].astype(np.int32),
    )


def _launches_in_order(collector: _Collector) -> Launches:
    columns = collector.launches
    found, places = in_order(columns["correlation"].take())
    correlation = narrow(found)
    del found
    begin = columns["begin"].take()
    same = np.flatnonzero(correlation[1:] == correlation[:-1])
    if (begin[places[same + 1]] < begin[places[same]]).any():
        # Equal ones are as the file has them, which is nearly always the order of their begin.
        correlation = correlation[np.argsort(places)]
        places = np.lexsort((begin, correlation)).astype(np.int32)
        correlation = correlation[places]
    return Launches(
        Packed(begin, places), correlation, gather(columns["is_kernel"].take(np.bool_), places)
    )


def _distributed_info(text: bytes | None) -> tuple[int | None, int | None, str | None]:
    """Returns rank, world size and backend as the metadata has them."""
    try:
        given = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return None, None, None
    rank, world_size, backend = (given.get(name) for name in ("rank", "world_size", "backend"))
    return (
        rank if type(rank) is int and rank >= 0 else None,
        world_size if type(world_size) is int and world_size > 0 else None,
        backend if isinstance(backend, str) else None,
    )


def _integer(text: bytes | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None
