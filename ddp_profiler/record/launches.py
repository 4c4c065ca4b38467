"""Joins the records of several launches of one script into one run of several levels."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ddp_profiler.errors import InputError
from ddp_profiler.record import reader, writer
from ddp_profiler.schema import SCHEMA_VERSION, LevelFacts, LevelSettings, RunInfo


def read_launch(folder: Path) -> RunInfo:
    """Reads the description of one launch.

    Raises:
        InputError: It holds no run of one level.
    """
    info = reader.read_run_info(folder)
    if len(info.levels) != 1:
        raise InputError(
            f"{folder} holds {len(info.levels)} levels; a launch of a script has one.",
            "Its log says how it ended.",
        )
    return info


def join_launches(
    launches: Sequence[Path], out: Path, settings: Mapping[str, Any], now: datetime
) -> RunInfo:
    """Writes a run whose levels are those of the launches, in their order.

    A level keeps its launch's spans. Its id is that of its dp, with the accumulation where a
    script changes it between launches. Ranks and nodes are those of the largest launch.

    Args:
        launches: Run folders of one level each.
        out: The folder to write to; it exists and is claimed by the caller.
        settings: The settings in force, for ``run.json``.
        now: When the study began.

    Raises:
        InputError: A folder holds no run of one level.
    """
    infos = [read_launch(folder) for folder in launches]
    levels = _levels([info.levels[0] for info in infos])
    largest = max(infos, key=lambda info: info.world_size)
    joined = RunInfo(
        schema_version=SCHEMA_VERSION,
        run_id=f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}",
        status="complete" if all(info.status == "complete" for info in infos) else "failed",
        created=now.isoformat(timespec="seconds"),
        profiler_version=largest.profiler_version,
        world_size=largest.world_size,
        settings={**largest.settings, **settings},
        levels=levels,
        ranks=largest.ranks,
        environment=largest.environment,
        facts=tuple(
            _renamed(info, level) for info, level in zip(infos, levels, strict=True) if info.facts
        ),
        failures=tuple(failure for info in infos for failure in info.failures),
    )
    begun = [reader.begun_records(folder)[0] for folder in launches]
    for rank in range(largest.world_size):
        stream = writer.SpanWriter(out, rank, joined.run_id)
        try:
            for index, (folder, info) in enumerate(zip(launches, infos, strict=True)):
                if rank in begun[index]:
                    columns = reader.read_rank_of(folder, rank, info.run_id).columns
                    stream.write_columns({**columns, "level": 0 * columns["level"] + index})
        finally:
            stream.close()
    writer.write_run_info(out, joined)
    return joined


def _levels(levels: Sequence[LevelSettings]) -> tuple[LevelSettings, ...]:
    several = len({level.accumulation for level in levels}) > 1
    return tuple(
        replace(
            level,
            id=f"dp{level.dp}" + (f"-acc{level.accumulation}" if several else ""),
        )
        for level in levels
    )


def _renamed(info: RunInfo, level: LevelSettings) -> LevelFacts:
    return replace(info.facts[0], id=level.id)
