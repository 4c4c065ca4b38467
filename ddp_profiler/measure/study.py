"""Runs the levels of a study on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ddp_profiler.config import StudyConfig
from ddp_profiler.measure.clock import DeviceTimeline, HostTimeline, Timeline
from ddp_profiler.measure.loop import LevelRun, block_plan
from ddp_profiler.measure.marks import Columns, Recorder
from ddp_profiler.measure.session import Session
from ddp_profiler.schema import LevelFacts, LevelSettings, Variant
from ddp_profiler.workload import Workload, build
from ddp_profiler.workload.plant import Plant, Planter, parse_plants


class Progress(Protocol):
    """Is told how a study goes."""

    def level_begins(self, number: int, level: LevelSettings, blocks: int) -> None:
        """A level begins with its warm-up."""
        ...

    def block_ends(self) -> None:
        """A block of the current level has ended."""
        ...

    def level_ends(self) -> None:
        """The current level has ended."""
        ...


@dataclass
class Phase:
    """What this rank is doing now, for error messages."""

    name: str = "start-up"


def make_timeline(device: torch.device) -> Timeline:
    """Returns the timeline of a device: host clock on CPU, events on a GPU."""
    if device.type == "cuda":
        return DeviceTimeline(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
    return HostTimeline()


def build_workload(config: StudyConfig) -> Workload:
    """Builds the workload of a study: same parameters on every call and rank."""
    return build(config.model, seed=config.seed, micro_batch=config.micro_batch, data=config.data)


def run_levels(
    config: StudyConfig,
    levels: tuple[LevelSettings, ...],
    session: Session,
    sink: Callable[[Columns], None],
    progress: Progress,
    phase: Phase,
) -> tuple[LevelFacts, ...]:
    """Measures all levels in order; ranks outside a level wait without cost.

    Args:
        config: The settings.
        levels: What to measure.
        session: This rank's part in the launch.
        sink: Takes this rank's spans.
        progress: Told on the level's first rank how it goes.
        phase: Kept up to date for error messages.

    Returns:
        What is known of each level; the same on every rank.
    """
    phase.name = "making process groups"
    groups = session.make_groups(levels)
    timeline = make_timeline(session.device.device)
    recorder = Recorder(timeline, sink)
    plants = parse_plants(config.plants)
    facts = []
    for index, level in enumerate(levels):
        done, heartbeat = f"done/{index}", f"beat/{index}"
        if session.rank in level.ranks:
            found = _run_level(
                config, index, level, session, recorder, plants, groups, progress, phase, heartbeat
            )
            if session.rank == level.ranks[0]:
                session.publish(done, found)
        phase.name = f"waiting for level {level.id}"
        facts.append(session.learn(done, LevelFacts, heartbeat))
    return tuple(facts)


def _run_level(
    config: StudyConfig,
    index: int,
    level: LevelSettings,
    session: Session,
    recorder: Recorder,
    plants: tuple[Plant, ...],
    groups: dict[tuple[int, ...], Any],
    progress: Progress,
    phase: Phase,
    heartbeat: str,
) -> LevelFacts:
    plan = block_plan(config.steps)
    leads = session.rank == level.ranks[0]
    phase.name = f"level {level.id}, building the model"
    if leads:
        progress.level_begins(index, level, len(plan) + 1)

    def block_ended() -> None:
        if leads:
            session.beat(heartbeat)
            progress.block_ends()

    run = LevelRun(
        level,
        build_workload(config),
        recorder,
        groups[level.ranks],
        level.ranks.index(session.rank),
        session.device.device,
        bucket_cap_mb=config.bucket_cap_mb,
        precision=config.precision,
        seed=config.seed,
        planter=Planter(plants, session.rank, dp=level.dp),
    )
    try:
        phase.name = f"level {level.id}, warm-up"
        recorder.begin_block(index, 0, 0, Variant.WARMUP)
        run.run_block(config.warmup, Variant.WARMUP, block_ended)
        for block, (variant, steps) in enumerate(plan, start=1):
            phase.name = f"level {level.id}, block {block} of {len(plan)}"
            recorder.begin_block(index, 0, block, variant)
            run.run_block(steps, variant, block_ended)
            if isinstance(recorder.timeline, DeviceTimeline):
                recorder.timeline.move_anchor()
        facts = run.facts()
    finally:
        run.close()
    if leads:
        progress.level_ends()
    return facts
