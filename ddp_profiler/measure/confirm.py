"""Measures a proposed change against the setting as it is, in turns, on the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ddp_profiler.config import StudyConfig
from ddp_profiler.errors import DdpProfilerError
from ddp_profiler.measure.batches import check_data
from ddp_profiler.measure.clock import Clock, DeviceTimeline
from ddp_profiler.measure.loop import LevelRun
from ddp_profiler.measure.marks import Columns, Recorder
from ddp_profiler.measure.session import Session
from ddp_profiler.measure.study import BeatEvery, Phase, Progress, build_workload, make_timeline
from ddp_profiler.schema import Change, Confirmation, LevelSettings, SpanKind, Variant
from ddp_profiler.workload.plant import Planter, parse_plants

CONFIRM_HEARTBEAT = "confirm/beat"
_PAIRS = 8
_LEAST_STEPS = 3
_BEAT_S = 0.5


class _Lengths:
    """Keeps the lengths of steps, in ms, of what a recorder hands over."""

    def __init__(self) -> None:
        self._steps: list[float] = []

    def take(self, columns: Columns) -> None:
        """Takes a block's spans."""
        self._steps += [
            (end - begin) / 1e6
            for kind, begin, end in zip(
                columns["kind"], columns["begin_ns"], columns["end_ns"], strict=True
            )
            if kind == int(SpanKind.STEP) and begin is not None and end is not None
        ]

    def mean(self) -> float:
        """Returns the mean of the steps since the last call."""
        steps, self._steps = self._steps, []
        return sum(steps) / len(steps) if steps else float("nan")


def confirm(
    config: StudyConfig,
    level: LevelSettings,
    change: Change,
    group: Any,
    session: Session,
    clock: Clock,
    progress: Progress,
    phase: Phase,
    number: int,
) -> Confirmation:
    """Trains with and without a change in blocks that alternate; all ranks of the level call it.

    Both models, with their DDP and optimizer, are in memory at once. Only whole steps are
    timed, on this rank; all ranks end their steps together.

    Args:
        config: Settings of the study.
        level: The level that the change is about.
        change: What to change.
        group: The level's process group.
        session: This rank's part in the launch.
        clock: Clock of all marks.
        progress: Told on the level's first rank how it goes.
        phase: Kept up to date for error messages.
        number: Of this among all that is measured, for progress.

    Returns:
        Mean step of each block, before and after, on this rank.

    Raises:
        DdpProfilerError: The change cannot be measured with this data.
    """
    leads = session.rank == level.ranks[0]
    accumulation = change.accumulation or level.accumulation
    changed = replace(level, id=f"{level.id} changed", accumulation=accumulation)
    check_data(build_workload(config, level.micro_batch), changed)
    lengths = _Lengths()
    recorder = Recorder(make_timeline(session.device.device, clock), lengths.take)
    beat = BeatEvery(_BEAT_S, lambda: session.beat(CONFIRM_HEARTBEAT)) if leads else None
    plants = parse_plants(config.plants)
    phase.name = f"confirming a change at level {level.id}"
    if leads:
        progress.level_begins(number, replace(level, id=f"{level.id}, confirming"), 2 * _PAIRS)

    def build(settings: LevelSettings, applied: Change) -> LevelRun:
        return LevelRun(
            settings,
            build_workload(config, level.micro_batch),
            recorder,
            group,
            level.ranks.index(session.rank),
            session.device.device,
            bucket_cap_mb=applied.bucket_cap_mb or config.bucket_cap_mb,
            precision=config.precision,
            seed=config.seed,
            planter=Planter(plants, session.rank, dp=level.dp),
            bucket_view=applied.bucket_view,
            reduce_once=applied.reduce_once,
        )

    runs = [build(level, Change()), build(changed, change)]
    steps = max(_LEAST_STEPS, -(-config.steps // 4))
    blocks: tuple[list[float], list[float]] = ([], [])
    try:
        for run in runs:
            recorder.begin_block(0, 0, 0, Variant.PLAIN)
            run.run_block(config.warmup, Variant.PLAIN, beat=beat)
            lengths.mean()
        for pair in range(_PAIRS):
            for place in (0, 1) if pair % 2 == 0 else (1, 0):
                if isinstance(recorder.timeline, DeviceTimeline):
                    recorder.timeline.move_anchor()
                recorder.begin_block(0, 0, pair, Variant.PLAIN)
                runs[place].run_block(steps, Variant.PLAIN, beat=beat)
                blocks[place].append(lengths.mean())
                if leads:
                    progress.block_ends()
    finally:
        for run in runs:
            run.close()
        if leads:
            progress.level_ends()
    share = level.accumulation / accumulation
    return Confirmation(
        level=level.id,
        change=change,
        before_ms=tuple(blocks[0]),
        after_ms=tuple(share * value for value in blocks[1]),
        steps=steps,
    )


def confirm_if_proposed(
    proposed: Callable[[], Confirmation | None],
    config: StudyConfig,
    levels: tuple[LevelSettings, ...],
    session: Session,
    clock: Clock,
    progress: Progress,
    phase: Phase,
    number: int,
) -> Confirmation | None:
    """Confirms what rank 0 proposes; ranks outside the level wait. All ranks call it.

    Args:
        proposed: Asked on rank 0: the proposal, without what is measured; None for none.
        config: Settings of the study.
        levels: Its levels.
        session: This rank's part in the launch.
        clock: Clock of all marks.
        progress: Told on the level's first rank how it goes.
        phase: Kept up to date for error messages.
        number: Of this among all that is measured, for progress.

    Returns:
        The proposal with what was measured, on rank 0; None elsewhere or without a proposal.
    """
    phase.name = "looking for a change to confirm"
    if session.rank == 0:
        session.publish("confirm/proposal", proposed())
    proposal: Confirmation | None = session.learn(
        "confirm/proposal", Confirmation | None, CONFIRM_HEARTBEAT
    )
    if proposal is None:
        return None
    level = next(level for level in levels if level.id == proposal.level)
    groups = session.make_groups((level,))
    if session.rank in level.ranks:
        try:
            found: Confirmation | None = confirm(
                config,
                level,
                proposal.change,
                groups[level.ranks],
                session,
                clock,
                progress,
                phase,
                number,
            )
        except DdpProfilerError as error:
            # The same on all ranks: nothing has been trained yet.
            found = replace(proposal, problem=error.message)
        if session.rank == level.ranks[0]:
            session.publish("confirm/done", found)
    phase.name = "waiting for a change to be confirmed"
    done: Confirmation = session.learn("confirm/done", Confirmation, CONFIRM_HEARTBEAT)
    if session.rank != 0:
        return None
    return replace(
        proposal,
        before_ms=done.before_ms,
        after_ms=done.after_ms,
        steps=done.steps,
        problem=done.problem,
    )
