"""Runs the levels of a study on one rank."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from ddp_profiler.config import StudyConfig
from ddp_profiler.measure.allreduce import IsolatedAllReduce
from ddp_profiler.measure.clock import DeviceTimeline, HostTimeline, Timeline
from ddp_profiler.measure.flops import count_flops, measure_peak_flops
from ddp_profiler.measure.loop import PRECISION_DTYPES, LevelRun, block_plan
from ddp_profiler.measure.marks import Columns, Recorder
from ddp_profiler.measure.session import Session
from ddp_profiler.schema import LevelFacts, LevelSettings, Variant
from ddp_profiler.workload import Workload, build
from ddp_profiler.workload.plant import Planter, parse_plants

_BEAT_S = 0.5
"""Steps shorter than this are not interrupted by telling idle ranks that things move."""


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


class Phase:
    """What this rank is doing now, for error messages.

    Args:
        name: The first phase.
    """

    def __init__(self, name: str = "start-up") -> None:
        self._name = name
        self.on_change: Callable[[str], None] = lambda _: None
        """Told each new name, outside measured steps."""

    @property
    def name(self) -> str:
        """What this rank is doing."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        if name != self._name:
            self._name = name
            self.on_change(name)


def make_timeline(device: torch.device) -> Timeline:
    """Returns the timeline of a device: host clock on CPU, events on a GPU."""
    if device.type == "cuda":
        return DeviceTimeline(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
    return HostTimeline()


def build_workload(config: StudyConfig, micro_batch: int) -> Workload:
    """Builds the workload of a study: same parameters on every call and rank."""
    return build(config.model, seed=config.seed, micro_batch=micro_batch, data=config.data)


class Study:
    """All levels of a study on one rank; ranks outside a level wait without cost.

    Args:
        config: The settings.
        levels: What to measure.
        session: This rank's part in the launch.
        sink: Takes this rank's spans.
        progress: Told on a level's first rank how it goes.
        phase: Kept up to date for error messages.
        on_facts: Told all facts known so far, in the order of levels, after each level.
    """

    def __init__(
        self,
        config: StudyConfig,
        levels: tuple[LevelSettings, ...],
        session: Session,
        sink: Callable[[Columns], None],
        progress: Progress,
        phase: Phase,
        on_facts: Callable[[tuple[LevelFacts, ...]], None] = lambda _: None,
    ) -> None:
        self._on_facts = on_facts
        self._config = config
        self._levels = levels
        self._session = session
        self._progress = progress
        self._phase = phase
        self._plants = parse_plants(config.plants)
        self._known_flops: tuple[int | None, float | None] | None = None
        self._recorder = Recorder(make_timeline(session.device.device), sink)

    def run(self) -> tuple[LevelFacts, ...]:
        """Measures every level ``repeat`` times in shuffled order, each time afresh.

        Returns:
            What is known of each level; the same on every rank.
        """
        self._phase.name = "making process groups"
        groups = self._session.make_groups(self._levels)
        facts: dict[int, LevelFacts] = {}
        order = visiting_order(len(self._levels), self._config.repeat, self._config.seed)
        for number, (repetition, index) in enumerate(order):
            level = self._levels[index]
            done, heartbeat = f"done/{number}", f"beat/{number}"
            if self._session.rank in level.ranks:
                found = self._visit(number, index, repetition, groups[level.ranks], heartbeat)
                if self._session.rank == level.ranks[0]:
                    self._session.publish(done, found)
            self._phase.name = f"waiting for level {level.id}"
            learnt = self._session.learn(done, LevelFacts, heartbeat)
            facts.setdefault(index, learnt)
            self._on_facts(tuple(facts[known] for known in sorted(facts)))
        return tuple(facts[index] for index in range(len(self._levels)))

    def _visit(
        self, number: int, index: int, repetition: int, group: Any, heartbeat: str
    ) -> LevelFacts:
        """Measures one level once."""
        config, session, recorder = self._config, self._session, self._recorder
        level, phase = self._levels[index], self._phase
        leads = session.rank == level.ranks[0]
        baselines = [Variant.NO_SYNC] + ([Variant.BARE] if level.dp == 1 else [])
        plan = [(Variant.WARMUP, config.warmup), *block_plan(config.steps, *baselines)]
        plan.append((Variant.READY, min(3, config.steps)))
        phase.name = f"level {level.id}, building the model"
        if leads:
            self._progress.level_begins(number, level, len(plan) + 1)

        beat = BeatEvery(_BEAT_S, lambda: session.beat(heartbeat)) if leads else None

        def block_ended() -> None:
            if isinstance(recorder.timeline, DeviceTimeline):
                recorder.timeline.move_anchor()
            if leads:
                session.beat(heartbeat)
                self._progress.block_ends()

        run = LevelRun(
            level,
            build_workload(config, level.micro_batch),
            recorder,
            group,
            level.ranks.index(session.rank),
            session.device.device,
            bucket_cap_mb=config.bucket_cap_mb,
            precision=config.precision,
            seed=config.seed + repetition,
            planter=Planter(self._plants, session.rank, dp=level.dp),
        )
        try:
            for block, (variant, steps) in enumerate(plan):
                phase.name = f"level {level.id}, {variant.name.lower()} block {block}"
                recorder.begin_block(index, repetition, block, variant)
                run.run_block(steps, variant, block_ended, beat)
            facts = run.facts()
            session.beat(heartbeat)
            if repetition == 0:
                phase.name = f"level {level.id}, batch proof"
                facts = replace(facts, proof=run.prove_batch())
                if leads:
                    phase.name = f"level {level.id}, counting FLOPs"
                    flops, peak = self._flops(run.workload)
                    facts = replace(facts, flops_per_sample=flops, peak_flops_per_s=peak)
        finally:
            run.close()
        if level.dp > 1:
            phase.name = f"level {level.id}, AllReduce in isolation"
            isolated = IsolatedAllReduce(recorder, group, session.device.device)
            recorder.begin_block(index, repetition, len(plan), Variant.ALLREDUCE)
            isolated.sweep(config.allreduce_max_mb * 2**20)
            recorder.begin_block(index, repetition, len(plan) + 1, Variant.BUCKETS)
            isolated.buckets(facts.bucket_bytes or ())
        block_ended()
        if leads:
            self._progress.level_ends()
        return facts

    def _flops(self, workload: Workload) -> tuple[int | None, float | None]:
        """Returns FLOPs of a sample and the device's peak rate; found out once."""
        if self._known_flops is None:
            device = self._session.device.device
            dtype = PRECISION_DTYPES.get(self._config.precision, torch.float32)
            flops = count_flops(workload, device)
            self._known_flops = flops, measure_peak_flops(device, dtype) if flops else None
        return self._known_flops


class BeatEvery:
    """Calls a function when it is called itself, but not more often than every so often.

    Args:
        seconds: Shortest time between calls.
        beat: What to call.
        clock: Monotonic time in s.
    """

    def __init__(
        self,
        seconds: float,
        beat: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._beat = beat
        self._clock = clock
        self._last = clock()

    def __call__(self) -> None:
        """Beats if the last beat is long enough ago."""
        now = self._clock()
        if now - self._last >= self._seconds:
            self._last = now
            self._beat()


def visiting_order(levels: int, repeat: int, seed: int) -> list[tuple[int, int]]:
    """Returns (repetition, level) pairs in the order in which they are measured.

    A single repetition keeps the order of the levels; several are shuffled, each anew,
    so that a slow drift of the machine falls on all levels alike.

    >>> visiting_order(3, 1, 0)
    [(0, 0), (0, 1), (0, 2)]
    >>> sorted(visiting_order(2, 2, 0))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    shuffle = random.Random(seed)
    order = []
    for repetition in range(repeat):
        indexes = list(range(levels))
        if repeat > 1:
            shuffle.shuffle(indexes)
        order += [(repetition, index) for index in indexes]
    return order
