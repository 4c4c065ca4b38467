"""From a run folder to torch.profiler's traces of its levels, beside our record of their steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ddp_profiler.analysis.parts import Columns, derive_steps
from ddp_profiler.errors import InputError
from ddp_profiler.record import paths, reader
from ddp_profiler.schema import LevelSettings, SpanKind, Variant
from ddp_profiler.trace.compared import Captured, CapturedLevel, OwnSteps, compare_views
from ddp_profiler.trace.gather import Progress, TraceSet, read_ranks
from ddp_profiler.trace.source import DEFAULT_LIMIT_BYTES

_NS_PER_MS = 1e6


def levels_with_traces(folder: Path) -> tuple[str, ...]:
    """Returns the ids of a run's levels of which there are traces; reads none of these.

    Args:
        folder: The run folder.

    Raises:
        InputError: It is no run that can be read.
    """
    levels = reader.read_run_info(folder).levels
    return tuple(level.id for level in levels if paths.kineto_files(folder, level.id))


def read_captured(
    folder: Path,
    *,
    lenient: bool = False,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Captured:
    """Reads the traces of a run's levels and compares them with the run's own record.

    Args:
        folder: The run folder.
        lenient: As for :func:`ddp_profiler.trace.gather.read_ranks`.
        limit_bytes: Likewise.
        jobs: Likewise.
        progress: Likewise.

    Raises:
        InputError: The run has no traces, or a file cannot be used.
    """
    info = reader.read_run_info(folder)
    begun, _ = reader.begun_records(folder)
    records: dict[int, Columns] = {}
    levels, without = [], []
    for index, level in enumerate(info.levels):
        files = paths.kineto_files(folder, level.id)
        if not files:
            without.append(level.id)
            continue
        found = read_ranks(
            files,
            lenient=lenient,
            limit_bytes=limit_bytes,
            jobs=jobs,
            progress=progress,
            expected=level.ranks,
        )
        _refuse_strangers(found, level, folder)
        compared = []
        for split in found.ranks:
            if split.rank not in records and split.rank in begun:
                spans = reader.read_rank_of(folder, split.rank, info.run_id)
                records[split.rank] = spans.columns
            if split.rank in records:
                own = own_steps(split.rank, records[split.rank], index)
                if own.collectives.size:
                    compared.append(compare_views(split, own, level.dp))
        levels.append(CapturedLevel(level.id, found, tuple(compared)))
    if not levels:
        raise InputError(
            f"{folder} holds no traces of torch.profiler.",
            "Run the study with --kineto N, or see ddp-profiler analyze for what was measured.",
        )
    return Captured(tuple(levels), tuple(without))


def _refuse_strangers(found: TraceSet, level: LevelSettings, folder: Path) -> None:
    for split in found.ranks:
        if split.rank not in level.ranks:
            raise InputError(
                f"{split.trace.path} is of rank {split.rank}, which is not one of level "
                f"{level.id} of {folder}.",
                "Keep the traces where the run has written them.",
            )


def own_steps(rank: int, columns: Columns, level: int) -> OwnSteps:
    """Returns a level's steps under torch.profiler as our record has them, warm-up included.

    Args:
        rank: Global rank.
        columns: Its spans by column, shape [span] each.
        level: Index of the level.
    """
    steps = derive_steps(rank, columns, level, Variant.KINETO)
    chosen = (columns["level"] == level) & (columns["variant"] == int(Variant.KINETO))
    chosen &= np.isin(
        columns["kind"], (SpanKind.FORWARD_COMM, SpanKind.BACKWARD_COMM, SpanKind.BOOKKEEPING)
    )
    # A block of its own model: its steps count from 0.
    others = np.bincount(columns["step"][chosen], minlength=len(steps))
    return OwnSteps(
        in_flight_ns=np.rint(steps.busy_ms * _NS_PER_MS).astype(np.int64),
        collectives=steps.collectives,
        bytes=steps.gradient_bytes,
        others=others,
        unnoticed=steps.unnoticed,
    )
