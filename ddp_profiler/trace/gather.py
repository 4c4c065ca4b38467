"""From files and folders to the split of every rank, in parallel where there are cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.naming import name_ranks
from ddp_profiler.trace.identity import resolve_rank
from ddp_profiler.trace.model import RankTrace
from ddp_profiler.trace.notices import Notices, TraceWarning
from ddp_profiler.trace.processes import map_in_processes
from ddp_profiler.trace.reader import NoTraceError, read_trace
from ddp_profiler.trace.source import DEFAULT_LIMIT_BYTES
from ddp_profiler.trace.split import RankSplit, split

_SUFFIXES = (".json", ".json.gz")
_IMPOSSIBLE = (
    "dropped_zero_time",
    "dropped_negative_duration",
    "dropped_absurd_duration",
    "dropped_absurd_time",
    "dropped_unreadable_time",
)
_APART_NS = 3_600 * 10**9
_PARALLEL_FROM_BYTES = 8 << 20
_TOLD_EVERY_S = 0.2

Progress = Callable[[int, int], None]
"""Takes the bytes read of all files, and their sum."""


@dataclass(frozen=True)
class TraceSet:
    """All ranks that were given.

    Attributes:
        ranks: The ranks, in order.
        world_size: Number of ranks of the job; None where not said.
        warnings: What concerns the set; the ranks have their own.
        missing: Ranks of the job that were not given, where several were.
    """

    ranks: tuple[RankSplit, ...]
    world_size: int | None
    warnings: tuple[TraceWarning, ...]
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Settings:
    lenient: bool
    limit_bytes: int


def read_ranks(
    paths: Sequence[Path],
    *,
    rank: int | None = None,
    lenient: bool = False,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    jobs: int = 1,
    progress: Progress | None = None,
    expected: Sequence[int] | None = None,
) -> TraceSet:
    """Reads and splits the traces of one job.

    Args:
        paths: Files, and folders whose ``*.json`` and ``*.json.gz`` are read.
        rank: The rank of the only file, where its metadata has none.
        lenient: Repair what is safe instead of refusing it.
        limit_bytes: Most bytes that a compressed file may unpack to.
        jobs: Most processes at once. Others than the first are started anew, so a script that
            asks for several needs the usual ``if __name__ == "__main__"``.
        progress: Called with the bytes read and the sum, from time to time.
        expected: The ranks that took part; all of the launch that the files name where None.

    Raises:
        InputError: A file cannot be used, or the files are not of one job.
        UsageError: A rank was stated for several files.
    """
    notices = Notices()
    files = _files(paths)
    if rank is not None and len(files) > 1:
        raise UsageError(
            f"--rank states the rank of one file, but there are {len(files)}.",
            "Put each rank into its file's name, such as rank0.json.",
        )
    settings = _Settings(lenient, limit_bytes)
    traces = _read_all(list(files), settings, jobs, progress)
    kept: list[tuple[RankTrace, int]] = []
    for (path, from_folder), trace in zip(files.items(), traces, strict=True):
        if isinstance(trace, InputError):
            if from_folder and isinstance(trace, NoTraceError) and len(files) > 1:
                notices.add("not_a_trace", 1, f"The first: {path.name}.")
                continue
            raise trace
        found, by_name = resolve_rank(path, trace.rank, rank)
        if by_name:
            notices.add("rank_from_name", 1)
        kept.append((trace, found))
    if not kept:
        raise InputError(f"{paths[0]} holds no trace.", "Give traces that torch.profiler exported.")
    _refuse_mixture(kept)
    kept.sort(key=lambda pair: pair[1])
    for trace, _ in kept:
        _refuse_nothing(trace)
    sizes = [trace.world_size for trace, _ in kept if trace.world_size is not None]
    world_size = sizes[0] if sizes else None
    if expected is not None:
        world_size = len(expected)
    elif world_size is not None:
        expected = range(world_size)
    splits = tuple(split(trace, found) for trace, found in kept)
    missing = _note_missing(splits, world_size, expected or (), notices)
    return TraceSet(splits, world_size, notices.all(), missing)


# ----------------------------------------------------------------------------------------------
# Files


def _files(paths: Sequence[Path]) -> dict[Path, bool]:
    """Returns the files in the order given, and whether each was found in a folder."""
    found: dict[Path, bool] = {}
    seen: set[Path] = set()
    for path in paths:
        if path.is_dir():
            inside = sorted(
                file
                for file in path.iterdir()
                if file.name.lower().endswith(_SUFFIXES)
                and not file.name.startswith(".")
                and file.is_file()
            )
            if not inside:
                raise InputError(
                    f"{path} holds no *.json or *.json.gz.",
                    "Give the folder that the traces lie in; folders within it are not read.",
                )
            files = [(file, True) for file in inside]
        else:
            files = [(path, False)]
        for file, from_folder in files:
            resolved = file.resolve()
            if resolved not in seen:
                seen.add(resolved)
                found[file] = from_folder
    return found


def _read_all(
    files: Sequence[Path], settings: _Settings, jobs: int, progress: Progress | None
) -> list[RankTrace | InputError]:
    sizes = [_size(file) for file in files]
    meter = _Meter(sizes, progress)
    workers = min(jobs, len(files))
    # Starting a process takes longer than reading small files.
    if workers > 1 and sum(sizes) >= _PARALLEL_FROM_BYTES:
        return map_in_processes(partial(_read, settings), files, workers, meter.tell)
    return [_read(settings, file, partial(meter.tell, place)) for place, file in enumerate(files)]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        # Reading it says what is wrong.
        return 0


def _read(settings: _Settings, file: Path, tell: Callable[[int], None]) -> RankTrace | InputError:
    try:
        return read_trace(
            file, lenient=settings.lenient, limit_bytes=settings.limit_bytes, progress=tell
        )
    except InputError as error:
        # Without what led to it, so that it can go to another process.
        return type(error)(error.message, error.remedy)


class _Meter:
    """Adds up what was read of all files and tells it, not too often."""

    def __init__(self, sizes: Sequence[int], progress: Progress | None) -> None:
        self._sum = sum(sizes)
        self._read = [0] * len(sizes)
        self._progress = progress
        self._told = float("-inf")

    def tell(self, place: int, read: int) -> None:
        """Takes how much of a file has been read."""
        self._read[place] = read
        now = time.monotonic()
        if self._progress is not None and now - self._told >= _TOLD_EVERY_S:
            self._told = now
            self._progress(sum(self._read), self._sum)


# ----------------------------------------------------------------------------------------------
# Whether they belong together


def _refuse_nothing(trace: RankTrace) -> None:
    if len(trace.gpu) or len(trace.host_collectives):
        return
    dropped = [one for one in trace.warnings if one.code in _IMPOSSIBLE]
    if dropped:
        number = sum(one.count for one in dropped)
        raise InputError(
            f"{trace.path} holds no GPU work or collectives with usable times: {number:,} rows "
            f"were left out, the first reason: {dropped[0].message}",
            "Record and export it again; a profiler or clock that is broken writes such times.",
        )
    raise InputError(
        f"{trace.path} holds neither GPU work nor collectives of gloo: there is nothing to split.",
        "Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
    )


def _refuse_mixture(traces: Sequence[tuple[RankTrace, int]]) -> None:
    """Refuses traces that are not those of one recording of one job."""
    first = traces[0][0]
    by_rank: dict[int, RankTrace] = {}
    for trace, rank in traces:
        if rank in by_rank:
            raise InputError(
                f"Rank {rank} is in two files: {by_rank[rank].path} and {trace.path}.",
                "Give one file a rank, all of one recording.",
            )
        by_rank[rank] = trace
    for trace, rank in traces:
        if trace.world_size is not None and rank >= trace.world_size:
            raise InputError(
                f"{trace.path} is of rank {rank}, but its world size is {trace.world_size}.",
                "Check --rank or the file's name.",
            )
    for trace, _ in traces[1:]:
        both = f"{first.path} and {trace.path}"
        for what, one, other in (
            ("world sizes", first.world_size, trace.world_size),
            ("backends", first.backend, trace.backend),
        ):
            if one is not None and other is not None and one != other:
                raise InputError(
                    f"{both} are of different runs: their {what} are {one} and {other}.",
                    "Give the traces of one job only.",
                )
        if (first.base_time_ns is None) != (trace.base_time_ns is None):
            with_base = trace.path if first.base_time_ns is None else first.path
            raise InputError(
                f"{both} have different clocks: only {with_base} has baseTimeNanoseconds.",
                "Give traces of one run, exported by the same version of PyTorch.",
            )
    _refuse_other_times(traces)
    numbered = [
        (trace, {mark.number for mark in trace.marks if mark.number is not None})
        for trace, _ in traces
    ]
    numbered = [(trace, steps) for trace, steps in numbered if steps]
    for trace, steps in numbered[1:]:
        if not steps & numbered[0][1]:
            raise InputError(
                f"{numbered[0][0].path} and {trace.path} have no step in common: they are of "
                "different recordings.",
                "Give the traces of the same steps.",
            )


def _refuse_other_times(traces: Sequence[tuple[RankTrace, int]]) -> None:
    """Refuses recordings more than an hour apart; clocks of hosts are off by far less."""
    middles = []
    for trace, _ in traces:
        begins = trace.gpu.begin_ns if len(trace.gpu) else trace.host_collectives.begin_ns
        if begins.size:
            middle = int(begins[begins.size // 2]) + (trace.base_time_ns or 0)
            middles.append((middle, trace.path))
    if len(middles) < 2:
        return
    least, most = min(middles), max(middles)
    if most[0] - least[0] > _APART_NS:
        raise InputError(
            f"{least[1]} and {most[1]} are of different runs: they were recorded "
            f"{(most[0] - least[0]) / 3.6e12:.1f} hours apart.",
            "Give the traces of one recording.",
        )


def _note_missing(
    splits: Sequence[RankSplit],
    world_size: int | None,
    expected: Sequence[int],
    notices: Notices,
) -> tuple[int, ...]:
    if len(splits) == 1:
        if world_size != 1 and splits[0].total.comm_ns:
            of = f" of {world_size}" if world_size else ""
            notices.add("single_rank", 1, f"This is rank {splits[0].rank}{of}.")
        return ()
    missing = tuple(sorted(set(expected) - {found.rank for found in splits}))
    if missing:
        words = name_ranks(missing)
        notices.add("missing_ranks", len(missing), f"{words[0].upper()}{words[1:]}.")
    return missing
