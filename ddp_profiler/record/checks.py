"""What a record may hold: what a file says is believed only as far as it can be true.

A run folder may come from elsewhere, or be damaged in a way that still decodes. Whatever nothing
could have written is refused here, before numbers are used as sizes and names as paths.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ddp_profiler.errors import InputError
from ddp_profiler.schema import LevelSettings, RunInfo, SpanKind

MAX_JSON_BYTES = 256 << 20
"""Most bytes of ``run.json`` or ``summary.json`` that are read: a run of thousands of ranks has
a few MB."""
MOST_RANKS = 1 << 20
"""Most ranks that a launch can have; more is no launch."""
_MOST_NODES_IN_JSON = 1 << 24
_LARGEST = 1 << 62
_LONGEST_NS = 1 << 60
"""About 36 years: sums of a few such times still fit 64 bits."""
_LARGEST_FLOAT = 1e30
_MOST_MICRO_STEPS = 1 << 14
"""Keys of micro-steps have 14 bits for them."""
_SAFE_ID = re.compile(r"[^/\\\0]{1,200}")
_DAMAGED = "The file is damaged or was not written by ddp_profiler."
_NUMBER_SETTINGS = (
    "bucket_cap_mb",
    "link_gbps",
    "expect_global_batch",
    "global_batch",
    "tokens_per_sample",
)


def open_regular(path: Path) -> BinaryIO:
    """Opens an ordinary file; a pipe or a device might never answer, or never end.

    Raises:
        OSError: It cannot be opened.
        InputError: It is no ordinary file.
    """
    # A pipe would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InputError(
                f"{path} is no ordinary file.", "Remove it: a run folder holds files only."
            )
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_json_bytes(path: Path) -> bytes:
    """Returns a JSON file's bytes.

    Raises:
        InputError: It cannot be read, or is larger than such a file can be.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JSON_BYTES:
                raise InputError(
                    f"{path} has {size:,} bytes, and no more than {MAX_JSON_BYTES:,} are read.",
                    _DAMAGED,
                )
            return file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}.", "Look at its permissions."
        ) from None


def check_numbers(path: Path, value: Any) -> None:
    """Refuses numbers that no computation here can hold.

    Args:
        path: The file, for the error.
        value: Plain values, as JSON has them.

    Raises:
        InputError: There is such a number, or more values than any run has.
    """
    left, seen = [value], 0
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
        elif isinstance(one, float):
            if not math.isfinite(one) or abs(one) > _LARGEST_FLOAT:
                raise InputError(f"{path} holds the number {one:g}.", _DAMAGED)
        elif isinstance(one, int) and abs(one) >= (1 << 64):
            raise InputError(f"{path} holds a number of {len(str(abs(one)))} digits.", _DAMAGED)
        seen += 1
        if seen > _MOST_NODES_IN_JSON:
            raise InputError(f"{path} holds more than {_MOST_NODES_IN_JSON:,} values.", _DAMAGED)


def check_run_info(path: Path, info: RunInfo) -> None:
    """Refuses a description of what cannot have run.

    Raises:
        InputError: Something in it cannot be.
    """
    problem = next(iter(_problems(info)), None)
    if problem is not None:
        raise InputError(f"{path} cannot be right: {problem}.", _DAMAGED)


def _problems(info: RunInfo) -> Iterable[str]:
    if not 1 <= info.world_size <= MOST_RANKS:
        yield f"world_size is {info.world_size}"
        return
    yield from _of_settings(info.settings)
    if len(info.levels) > 1 << 15:
        yield f"it has {len(info.levels)} levels"
        return
    ids = [level.id for level in info.levels]
    if len(set(ids)) < len(ids):
        yield "two levels have the same id"
    for level in info.levels:
        yield from _of_level(level, info.world_size)
    ranks = [place.rank for place in info.ranks]
    if len(set(ranks)) < len(ranks):
        yield "a rank is described twice"
    named = [*ranks, info.keeper, *(p.keeper for p in info.parts)]
    named += [rank for part in info.parts for rank in part.ranks]
    named += [failure.rank for failure in info.failures] + [one.rank for one in info.phases]
    named += [reading.rank for reading in info.clocks]
    named += [use.rank for fact in info.facts for use in fact.machine]
    named += [feed.rank for fact in info.facts for feed in fact.feeds]
    named += [r for fact in info.facts if fact.link for r in (fact.link.sender, fact.link.receiver)]
    wrong = [rank for rank in named if not 0 <= rank < info.world_size]
    if wrong:
        yield f"it names rank {wrong[0]} of {info.world_size}"
    if any(not 0 <= place.node < info.world_size for place in info.ranks):
        yield "a node's number is not that of a node"
    times = [abs(t) for c in info.clocks for t in (c.at_ns, c.low_ns, c.high_ns, c.real_offset_ns)]
    if any(time >= _LARGEST for time in times) or any(c.high_ns < c.low_ns for c in info.clocks):
        yield "a comparison of clocks has impossible times"
    yield from _of_facts(info)


def _of_settings(settings: Mapping[str, Any]) -> Iterable[str]:
    for name in _NUMBER_SETTINGS:
        value = settings.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            yield f"the setting {name} is no number above 0"


def _of_level(level: LevelSettings, world_size: int) -> Iterable[str]:
    # An id is part of the path of a level's traces.
    if not _SAFE_ID.fullmatch(level.id) or set(level.id) <= {"."}:
        yield "a level's id is no name of a folder"
        return
    if not 1 <= level.dp <= world_size or len(level.ranks) != level.dp:
        yield f"level {level.id} has dp {level.dp} and {len(level.ranks)} ranks of {world_size}"
    elif len(set(level.ranks)) < level.dp or not all(0 <= r < world_size for r in level.ranks):
        yield f"level {level.id} has ranks that are none, or one of them twice"
    if not 0 <= level.micro_batch < 1 << 40 or not 1 <= level.accumulation < _MOST_MICRO_STEPS:
        yield f"level {level.id} has micro-batch {level.micro_batch} x {level.accumulation}"


def _of_facts(info: RunInfo) -> Iterable[str]:
    ids = [fact.id for fact in info.facts]
    if len(set(ids)) < len(ids):
        yield "it describes a level twice"
    for fact in info.facts:
        sizes = [
            fact.parameters,
            fact.gradient_bytes,
            fact.num_buckets or 0,
            *(fact.bucket_bytes or ()),
            *(parameter.nbytes for parameter in fact.reduced),
            fact.flops_per_sample or 0,
            fact.peak_flops_per_s or 0,
            fact.device_clock_uncertainty_ns,
            fact.reduced_outside_bytes,
        ]
        sizes += [ddp.group_size for ddp in fact.ddps] + [ddp.buffer_bytes for ddp in fact.ddps]
        if fact.link is not None:
            sizes += [fact.link.nbytes, *fact.link.elapsed_ns]
        for use in fact.machine:
            sizes += [use.wall_ms, use.user_ms or 0, use.system_ms or 0, use.run_delay_ms or 0]
            sizes += [use.preemptions or 0, use.major_faults or 0, use.throttled_ms or 0]
        if fact.operations is not None:
            counted = (*fact.operations.micro_step, *(fact.operations.optimizer or ()))
            sizes.append(fact.operations.micro_batch)
            sizes += [n for one in counted for n in (one.nbytes, one.flops)]
            # A group of none is none.
            sizes += [one.operations - 1 for one in counted]
        if fact.device is not None:
            sizes += [fact.device.flops_per_s or 0, fact.device.operation_s or 0]
            sizes += [n for one in fact.device.copies for n in (one.nbytes, one.bytes_per_s)]
        if any(not 0 <= size < _LARGEST for size in sizes):
            yield f"a size or rate of level {fact.id} is negative or beyond all that there is"


def check_columns(path: Path, columns: Mapping[str, npt.NDArray[np.int64]], null: int) -> None:
    """Refuses spans that nothing could have recorded.

    Kinds and variants that this version does not know are none of these: a later one may add
    some, and they are counted nowhere.

    Args:
        path: The file, for the error.
        columns: A rank's spans.
        null: What stands for null.

    Raises:
        InputError: There are such spans.
    """
    problem = next(iter(_of_columns(columns, null)), None)
    if problem is not None:
        at, what = problem
        raise InputError(f"{path} cannot be right: span {at:,} {what}.", _DAMAGED)


def _of_columns(
    columns: Mapping[str, npt.NDArray[np.int64]], null: int
) -> Iterable[tuple[int, str]]:
    begin, end = columns["begin_ns"], columns["end_ns"]
    never = end == null
    # abs() of the least number is negative.
    far = (begin > _LONGEST_NS) | (begin < -_LONGEST_NS)
    far |= ~never & ((end > _LONGEST_NS) | (end < -_LONGEST_NS))
    yield from _first(far, "lies more than 30 years away")
    yield from _first(~never & (end < begin), "ends before it begins")
    yield from _first((columns["kind"] == SpanKind.STEP) & never, "is a step without an end")
    for name in ("level", "repetition", "block", "step"):
        yield from _first(columns[name] < 0, f"has a negative {name}")
    micro_step = columns["micro_step"]
    odd = (micro_step < -1) | (micro_step >= _MOST_MICRO_STEPS - 1)
    yield from _first(odd, "has an impossible micro_step")
    yield from _twice(columns)
    for name in ("bytes", "samples"):
        values = columns[name]
        wrong = (values != null) & ((values < 0) | (values > _LARGEST))
        yield from _first(wrong, f"has impossible {name}")
    for name in ("collectives", "busy_ns", "overlapped_ns", "unnoticed"):
        if name in columns:  # of a condensed record
            wrong = (columns[name] < 0) | (columns[name] > _LONGEST_NS)
            yield from _first(wrong, f"has impossible {name}")


def _twice(columns: Mapping[str, npt.NDArray[np.int64]]) -> Iterable[tuple[int, str]]:
    """Finds a step that the rank claims to have made twice."""
    steps = np.flatnonzero(columns["kind"] == SpanKind.STEP)
    names = ("level", "variant", "repetition", "step")
    keys = np.stack([columns[name][steps].astype(np.int64) for name in names])
    order = np.lexsort(keys[::-1])
    again = (np.diff(keys[:, order], axis=1) == 0).all(axis=0)
    if again.any():
        yield int(steps[order[1:][again][0]]), "is a step that is there already"


def _first(wrong: npt.NDArray[np.bool_], what: str) -> Iterable[tuple[int, str]]:
    if wrong.any():
        yield int(np.argmax(wrong)), what


def unpacked_bytes(message: bytes, body: memoryview) -> int | None:
    """Tells what a record batch of an Arrow stream says that it unpacks to.

    Arrow believes it when it reads the batch, so it is asked before.

    Args:
        message: The message's metadata, a flatbuffer.
        body: What it describes.

    Returns:
        Bytes; None if it is not compressed.

    Raises:
        struct.error: It is no such message.
    """
    root = struct.unpack_from("<I", message, 0)[0]
    header = _field(message, root, 2)
    if header is None:
        return None
    batch = header + struct.unpack_from("<I", message, header)[0]
    if _field(message, batch, 3) is None:
        return None
    buffers = _field(message, batch, 2)
    if buffers is None:
        return 0
    vector = buffers + struct.unpack_from("<I", message, buffers)[0]
    count = struct.unpack_from("<I", message, vector)[0]
    total = 0
    for number in range(count):
        offset, length = struct.unpack_from("<qq", message, vector + 4 + 16 * number)
        if length >= 8:
            if offset < 0 or offset + 8 > len(body):
                raise struct.error("outside of the body")
            # -1: left as it is.
            said = struct.unpack_from("<q", body, offset)[0]
            total += length if said == -1 else said if said >= 0 else _LARGEST
    return total


def _field(data: bytes, table: int, number: int) -> int | None:
    """Returns the place of a field of a flatbuffer's table; None where it is not there."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise struct.error("outside of the message")
    if struct.unpack_from("<H", data, vtable)[0] < 4 + 2 * (number + 1):
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
    return table + offset if offset else None
