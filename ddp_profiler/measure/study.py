"""Runs the levels of a study on one rank."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp_profiler.config import StudyConfig
from ddp_profiler.measure.allreduce import IsolatedAllReduce
from ddp_profiler.measure.clock import (
    Clock,
    DeviceTimeline,
    HostTimeline,
    Timeline,
    monotonic_clock,
)
from ddp_profiler.measure.clock_sync import ClockSync
from ddp_profiler.measure.flops import count_flops
from ddp_profiler.measure.kineto import KinetoCapture
from ddp_profiler.measure.link import LinkProbe, neighbours
from ddp_profiler.measure.loop import PRECISION_DTYPES, LevelRun, block_plan
from ddp_profiler.measure.machine import MachineWatch
from ddp_profiler.measure.marks import Columns, Recorder
from ddp_profiler.measure.nvidia import open_gpu
from ddp_profiler.measure.operations import count_operations
from ddp_profiler.measure.peaks import measure_peaks
from ddp_profiler.measure.session import Session
from ddp_profiler.naming import name_ranks
from ddp_profiler.schema import (
    ClockReading,
    DevicePeaks,
    LevelFacts,
    LevelSettings,
    LinkStreams,
    MachineUse,
    OperationCount,
    Variant,
)
from ddp_profiler.workload import Workload, build
from ddp_profiler.workload.plant import Planter, parse_plants

TRACED_BLOCK = 1_000_000
"""Number of the block under torch.profiler: above those of all others."""
_NOISE_STEPS = 6
_NOISE_SHARE = 0.3
"""Of the plain steps, where that is more: few, since these steps are no part of any time."""
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


def make_timeline(device: torch.device, clock: Clock = monotonic_clock) -> Timeline:
    """Returns the timeline of a device: host clock on CPU, events tied to it on a GPU."""
    if device.type == "cuda":
        return DeviceTimeline(lambda: torch.cuda.Event(enable_timing=True), clock)  # type: ignore[no-untyped-call]
    return HostTimeline(clock)


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
        clock: Clock of all marks.
        clock_sync: Compares the hosts' clocks before the first and after each level.
        on_facts: Told all facts known so far, in the order of levels, and all comparisons
            of clocks, after each level.
        trace_file: Where a level's trace of torch.profiler goes on this rank; none are made
            where None.
        say: Shows a line to the user.
    """

    def __init__(
        self,
        config: StudyConfig,
        levels: tuple[LevelSettings, ...],
        session: Session,
        sink: Callable[[Columns], None],
        progress: Progress,
        phase: Phase,
        clock: Clock,
        clock_sync: ClockSync,
        on_facts: Callable[[tuple[LevelFacts, ...], tuple[ClockReading, ...]], None],
        *,
        trace_file: Callable[[LevelSettings], Path] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._trace_file = trace_file
        self._say = say
        self._said: set[str] = set()
        self._on_facts = on_facts
        self._clock_sync = clock_sync
        self._clock_readings: list[ClockReading] = []
        self._config = config
        self._levels = levels
        self._session = session
        self._progress = progress
        self._phase = phase
        self._plants = parse_plants(config.plants)
        self._known_flops: tuple[int | None, DevicePeaks] | None = None
        self._known_operations: dict[int, OperationCount | None] = {}
        self._recorder = Recorder(make_timeline(session.device.device, clock), sink)
        gpu = open_gpu(session.device.device)
        self._machines = [MachineWatch(session.rank, torch.get_num_threads(), gpu) for _ in levels]

    def run(self) -> tuple[LevelFacts, ...]:
        """Measures every level ``repeat`` times in shuffled order, each time afresh.

        Returns:
            What is known of each level; the same on every rank, but for what the machine
            gave each rank, which rank 0 alone learns: at 1,000 ranks it is long.
        """
        self._phase.name = "making process groups"
        groups = self._session.make_groups(self._levels)
        facts: dict[int, LevelFacts] = {}
        order = visiting_order(len(self._levels), self._config.repeat, self._config.seed)
        self._compare_clocks("start")
        self._on_facts((), tuple(self._clock_readings))
        for number, (repetition, index) in enumerate(order):
            level = self._levels[index]
            done, heartbeat = f"done/{number}", f"beat/{number}"
            if self._session.rank in level.ranks:
                found = self._visit(number, index, repetition, groups[level.ranks], heartbeat)
                if self._session.rank == level.ranks[0]:
                    self._session.publish(done, found)
            self._phase.name = f"waiting for level {level.id}"
            learnt = self._session.learn(done, LevelFacts, heartbeat)
            first = facts.setdefault(index, learnt)
            worst = max(first.device_clock_uncertainty_ns, learnt.device_clock_uncertainty_ns)
            facts[index] = replace(first, device_clock_uncertainty_ns=worst)
            if self._session.rank == 0:
                uses = tuple(
                    self._session.learn(f"machine/{number}/{rank}", MachineUse)
                    for rank in level.ranks
                )
                facts[index] = replace(facts[index], machine=uses)
            self._compare_clocks(str(number))
            known = tuple(facts[done_level] for done_level in sorted(facts))
            self._on_facts(known, tuple(self._clock_readings))
        # Last, since a level that is measured must not run where torch.profiler has been.
        if self._trace_file is not None and self._config.kineto:
            for index, level in enumerate(self._levels):
                done, heartbeat = f"kineto/done/{index}", f"kineto/beat/{index}"
                if self._session.rank in level.ranks:
                    self._trace(index, groups[level.ranks], self._trace_file(level), heartbeat)
                    if self._session.rank == level.ranks[0]:
                        self._session.publish(done, True)
                self._phase.name = f"waiting for level {level.id}"
                self._session.learn(done, bool, heartbeat)
        return tuple(facts[index] for index in range(len(self._levels)))

    def _compare_clocks(self, moment: str) -> None:
        """Bounds the offsets of the hosts' clocks; rank 0 keeps all readings."""
        if not self._clock_sync.needed:
            return
        self._phase.name = "comparing the hosts' clocks"
        reading = self._clock_sync.compare()
        rank = self._session.rank
        if reading is not None:
            self._session.publish(f"clock/{moment}/{rank}", reading)
        if rank == 0:
            for leader in self._clock_sync.leaders[1:]:
                key = f"clock/{moment}/{leader}"
                self._clock_readings.append(self._session.learn(key, ClockReading))

    def _device_clock_uncertainty_ns(self, group: Any) -> int:
        """Returns the largest over the level's ranks; 0 where marks are made on the host."""
        timeline = self._recorder.timeline
        if not isinstance(timeline, DeviceTimeline):
            return 0
        worst = torch.tensor([timeline.uncertainty_ns], device=self._session.device.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        return int(worst)

    def _visit(
        self, number: int, index: int, repetition: int, group: Any, heartbeat: str
    ) -> LevelFacts:
        """Measures one level once."""
        config, session, recorder = self._config, self._session, self._recorder
        level, phase = self._levels[index], self._phase
        leads = session.rank == level.ranks[0]
        machine = self._machines[index]
        baselines = [Variant.NO_SYNC] + ([Variant.BARE] if level.dp == 1 else [])
        plan = [(Variant.WARMUP, config.warmup), *block_plan(config.steps, *baselines)]
        if level.dp * level.accumulation > 1:
            steps = max(_NOISE_STEPS, int(_NOISE_SHARE * config.steps))
            plan.append((Variant.NOISE, min(steps, config.steps)))
        # Last, since the batch proof estimates its time by these steps.
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

        begun = time.monotonic()
        run = self._level_run(level, group, repetition)
        start_up_ms = (time.monotonic() - begun) * 1000
        try:
            for block, (variant, steps) in enumerate(plan):
                phase.name = f"level {level.id}, {variant.name.lower()} block {block}"
                recorder.begin_block(index, repetition, block, variant)
                watched = machine if variant is Variant.INSTRUMENTED else None
                run.run_block(steps, variant, block_ended, beat, watched)
            session.publish(f"machine/{number}/{session.rank}", machine.use())
            uncertainty = self._device_clock_uncertainty_ns(group)
            facts = replace(
                run.facts(), device_clock_uncertainty_ns=uncertainty, start_up_ms=start_up_ms
            )
            session.beat(heartbeat)
            if repetition == 0:
                phase.name = f"level {level.id}, batch proof"
                facts = replace(facts, proof=run.prove_batch())
                if leads:
                    session.beat(heartbeat)
                    phase.name = f"level {level.id}, counting operations"
                    facts = self._with_hardware(facts, run.workload, level.micro_batch)
                    session.beat(heartbeat)
        finally:
            run.close()
        if level.dp > 1:
            phase.name = f"level {level.id}, AllReduce in isolation"
            isolated = IsolatedAllReduce(
                recorder, group, session.device.device, beat or (lambda: None)
            )
            recorder.begin_block(index, repetition, len(plan), Variant.ALLREDUCE)
            isolated.sweep(config.allreduce_max_mb * 2**20)
            recorder.begin_block(index, repetition, len(plan) + 1, Variant.BUCKETS)
            isolated.buckets(facts.bucket_bytes or ())
            if repetition == 0:
                session.beat(heartbeat)
                phase.name = f"level {level.id}, rate of the link"
                facts = replace(facts, link=self._link(level, group))
        block_ended()
        if leads:
            self._progress.level_ends()
        return facts

    def _level_run(self, level: LevelSettings, group: Any, repetition: int) -> LevelRun:
        config, session = self._config, self._session
        return LevelRun(
            level,
            build_workload(config, level.micro_batch),
            self._recorder,
            group,
            level.ranks.index(session.rank),
            session.device.device,
            bucket_cap_mb=config.bucket_cap_mb,
            precision=config.precision,
            seed=config.seed + repetition,
            planter=Planter(self._plants, session.rank, dp=level.dp),
        )

    def _trace(self, index: int, group: Any, target: Path, heartbeat: str) -> None:
        """Runs steps of a level under torch.profiler, after a warm-up of their own.

        All are one block. What goes wrong with torch.profiler is said and changes nothing else.
        """
        config, session, level = self._config, self._session, self._levels[index]
        leads = session.rank == level.ranks[0]
        self._phase.name = f"level {level.id}, steps under torch.profiler"
        if leads:
            number = len(self._levels) * config.repeat + index
            self._progress.level_begins(number, level, 1)
        beat = BeatEvery(_BEAT_S, lambda: session.beat(heartbeat)) if leads else None
        capture = KinetoCapture(config.warmup, config.kineto, session.device.device, target)

        def step_ended() -> None:
            capture.step()
            if beat is not None:
                beat()

        run = self._level_run(level, group, 0)
        try:
            if isinstance(self._recorder.timeline, DeviceTimeline):
                self._recorder.timeline.move_anchor()
            self._recorder.begin_block(index, 0, TRACED_BLOCK, Variant.KINETO)
            capture.begin()
            run.run_block(config.warmup + config.kineto, Variant.KINETO, beat=step_ended)
        finally:
            capture.end()
            run.close()
        session.publish(f"kineto/problem/{index}/{session.rank}", capture.problem)
        if leads:
            problems: dict[str, list[int]] = {}
            for rank in level.ranks:
                problem = session.learn(f"kineto/problem/{index}/{rank}", str)
                session.beat(heartbeat)
                if problem:
                    problems.setdefault(problem, []).append(rank)
            self._progress.block_ends()
            self._progress.level_ends()
            for problem, ranks in problems.items():
                if problem not in self._said:
                    self._said.add(problem)
                    self._say(
                        f"torch.profiler failed on {name_ranks(ranks)} at level {level.id}, which "
                        f"leaves no trace there: {problem}. The measurements are whole."
                    )

    def _link(self, level: LevelSettings, group: Any) -> LinkStreams:
        """Measures a link of the level's ring."""
        session = self._session
        nodes = {place.rank: place.node for place in session.places}
        pair = neighbours(level.ranks, nodes)
        timeline = self._recorder.timeline
        return LinkProbe(
            group, level.ranks, pair, session.rank, session.device.device, timeline
        ).measure()

    def _with_hardware(self, facts: LevelFacts, workload: Workload, micro_batch: int) -> LevelFacts:
        """Adds operations, FLOPs of a sample and the device's peaks; each is found out once."""
        device = self._session.device.device
        autocast = PRECISION_DTYPES.get(self._config.precision)
        if micro_batch not in self._known_operations:
            counted = count_operations(workload, device, micro_batch, autocast)
            self._known_operations[micro_batch] = counted
        if self._known_flops is None:
            flops = count_flops(workload, device)
            peaks = measure_peaks(device, autocast or torch.float32, self._session.rank)
            self._known_flops = flops, peaks
        flops, peaks = self._known_flops
        return replace(
            facts,
            flops_per_sample=flops,
            peak_flops_per_s=peaks.flops_per_s if flops else None,
            operations=self._known_operations[micro_batch],
            device=peaks,
        )


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
