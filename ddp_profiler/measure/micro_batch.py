"""Finds out how memory and speed depend on the micro-batch, on all ranks of a level at once.

At the level's own dp and not at 1, since that is how it will train: ranks of a host share its
memory and cores, and DDP's buckets and the backend's buffers take memory of their own. What is
tried is forward and backward of a micro-step that reduces nothing (under ``no_sync``), and an
optimizer step: the buckets are allocated all the same, and no collective is under way, so that a
rank that runs out of memory leaves nobody waiting. The ranks then agree on what became of it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from ddp_profiler.config import StudyConfig
from ddp_profiler.errors import InputError
from ddp_profiler.measure.batches import to_device
from ddp_profiler.measure.isolation import alone, norms_alone, random_kept
from ddp_profiler.measure.loop import LevelRun
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.memory import (
    Allowance,
    MemoryMeter,
    allowance,
    held_to,
    is_out_of_memory,
    open_meter,
    release,
)
from ddp_profiler.measure.session import Session
from ddp_profiler.measure.study import Phase, build_workload, make_timeline
from ddp_profiler.schema import LevelSettings, MicroBatchSearch, MicroBatchTrial, TrialOutcome
from ddp_profiler.workload.plant import Planter

MEMORY, SLOWER, TIME = "memory", "slower", "time"
"""Why no larger micro-batch is tried."""

_CLEARLY_SLOWER = 0.8
"""One size below this share of the best speed ends the search,"""
_SLOWER = 0.95
"""or two in a row below this one: a single one may be chance."""
_LONGEST_S = 60.0
_TIMED_S = 0.25
_LEAST_TIMED, _MOST_TIMED = 3, 20
_FINENESS = 8
"""Between what fits and what does not, sizes are halved down to this part of what fits."""
_LARGEST = 2**20
_TAKES = 2 * (3 + _LEAST_TIMED)
"""Micro-steps of the last size that the next one, of twice as many samples, takes at least."""

_FITS, _NO_MEMORY, _REFUSED = 0.0, 1.0, 2.0


class Trials(Protocol):
    """Tries micro-batches; what it returns is the same on every rank."""

    elapsed_s: float
    """Since the begin, as of the last trial."""

    def begin(self) -> int:
        """Returns the smallest micro-batch that the model takes."""
        ...

    def measure(self, micro_batch: int) -> MicroBatchTrial:
        """Tries one."""
        ...


def search(
    trials: Trials, limit: Allowance, *, tried: Callable[[MicroBatchTrial], None] = lambda _: None
) -> tuple[tuple[MicroBatchTrial, ...], str]:
    """Doubles the micro-batch until memory is used up, or it gets slower per sample.

    A size at which it got slower is measured twice. Between the largest that fits and the
    smallest that does not, sizes are then halved.
    Where the limit is soft, a size is not tried that would go beyond it by what those before let
    expect.

    Args:
        trials: Measures.
        limit: Memory that a rank may use.
        tried: Told each trial.

    Returns:
        The trials in their order, and why no larger one was tried.
    """
    done: list[MicroBatchTrial] = []

    def attempt(micro_batch: int) -> bool:
        expected = expected_bytes(done, micro_batch)
        if limit.soft and expected is not None and expected > limit.nbytes:
            found = MicroBatchTrial(micro_batch, TrialOutcome.NOT_TRIED, None, expected)
        else:
            found = replace(trials.measure(micro_batch), expected_bytes=expected)
        if found.outcome is TrialOutcome.FITS and (found.peak_bytes or 0) > limit.nbytes:
            found = replace(found, outcome=TrialOutcome.OVER_LIMIT, micro_step_ns=())
        done.append(found)
        tried(found)
        return found.outcome is TrialOutcome.FITS

    micro_batch = trials.begin()
    ended = TIME
    while micro_batch <= _LARGEST and trials.elapsed_s < _LONGEST_S:
        if not attempt(micro_batch):
            ended = MEMORY
            break
        if is_slower(done):
            # What else the machine does may have fallen on this size.
            again = trials.measure(micro_batch)
            if again.outcome is TrialOutcome.FITS and _median_ns(again) < _median_ns(done[-1]):
                done[-1] = replace(done[-1], micro_step_ns=again.micro_step_ns)
        if is_slower(done):
            ended = SLOWER
            break
        if trials.elapsed_s + _TAKES * _median_ns(done[-1]) / 1e9 > _LONGEST_S:
            break
        micro_batch *= 2
    if ended == MEMORY and len(done) > 1:
        low, high = micro_batch // 2, micro_batch
        while high - low > max(1, low // _FINENESS) and trials.elapsed_s < _LONGEST_S:
            middle = (low + high) // 2
            low, high = (middle, high) if attempt(middle) else (low, middle)
    return tuple(done), ended


def expected_bytes(trials: Sequence[MicroBatchTrial], micro_batch: int) -> int | None:
    """Returns the peak that the trials so far let expect of a larger size; None below two.

    By the line through the largest that fits and the largest of at most half of it, and not
    more than in proportion. Not by all: small sizes scatter by what the allocator keeps.
    """
    known = sorted(
        (trial.micro_batch, trial.peak_bytes)
        for trial in trials
        if trial.outcome is TrialOutcome.FITS and trial.peak_bytes is not None
    )
    if not known:
        return None
    large, high = known[-1]
    halves = [point for point in known if point[0] <= large / 2]
    if not halves:
        return None
    small, low = halves[-1]
    line = high + max(0, high - low) * (micro_batch - large) / (large - small)
    return round(min(line, high * micro_batch / large))


def _median_ns(trial: MicroBatchTrial) -> float:
    return statistics.median(trial.micro_step_ns)


def is_slower(trials: Sequence[MicroBatchTrial]) -> bool:
    """Tells whether the last ones are slower per sample than the best."""
    speeds = [t.micro_batch / _median_ns(t) for t in trials if t.micro_step_ns]
    if not speeds:
        return False
    best = max(speeds)
    last = speeds[-2:]
    return speeds[-1] < _CLEARLY_SLOWER * best or (
        len(last) == 2 and max(last) < _SLOWER * best and len(speeds) > 2
    )


@dataclass(frozen=True)
class Company:
    """The ranks of a level that search together.

    Attributes:
        dp: How many.
        most: Takes numbers from each rank and returns the largest of each; all ranks call it.
    """

    dp: int
    most: Callable[[Sequence[float]], list[float]]


def company(dp: int, group: Any, device: torch.device) -> Company:
    """Returns the ranks of a process group."""

    def most(values: Sequence[float]) -> list[float]:
        if dp == 1:
            return list(values)
        where = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        numbers = torch.tensor(values, dtype=torch.float64, device=where)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        return [float(number) for number in numbers.tolist()]

    return Company(dp, most)


class MeasuredTrials:
    """Tries micro-batches of a model on this rank, together with the other ranks of its level.

    Args:
        run: Model, DDP and optimizer.
        ranks: Those that try together.
        memory: Reads the peak memory of this rank.
        device: Where the model lives.
        clock: Monotonic time in ns.
    """

    def __init__(
        self,
        run: LevelRun,
        ranks: Company,
        memory: MemoryMeter,
        device: torch.device,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._run = run
        self._ranks = ranks
        self._memory = memory
        self._device = device
        self._clock = clock
        self._begun_ns = clock()
        self.elapsed_s = 0.0

    def begin(self) -> int:
        """Returns the smallest micro-batch that the model takes: 1, or 2 as for batch norm.

        Also runs two steps with their reductions, after which DDP's buckets and the backend's
        buffers are what they stay.

        Raises:
            InputError: The model issues collectives of its own.
        """
        smallest = 1
        self._check_alone(smallest)
        state, _ = self._attempt(lambda: self._probe(smallest), may_refuse=True)
        if state == _REFUSED:
            smallest = 2
            state, _ = self._attempt(lambda: self._probe(smallest))
        if state == _FITS:
            for _ in range(2):
                self._run.try_micro_step(self._batch(smallest), sync=True)
            self._run.try_optimizer()
        self._note_time()
        return smallest

    def measure(self, micro_batch: int) -> MicroBatchTrial:
        """Tries one: forward, backward and optimizer for memory, then timed micro-steps."""
        self._memory.begin()
        batch: list[Any] = []

        def first() -> float:
            batch.append(self._batch(micro_batch))
            self._run.try_micro_step(batch[0])
            self._run.try_optimizer()
            # Gradients are there already, as in all micro-steps of a window but the first.
            self._run.try_micro_step(batch[0])
            return self._timed(batch[0])

        state, slowest_ns = self._attempt(first)
        times: list[float] = []
        if state == _FITS:
            count = int(_TIMED_S * 1e9 / max(1.0, slowest_ns))
            count = min(_MOST_TIMED, max(_LEAST_TIMED, count))
            own: list[float] = []

            def timed() -> float:
                own.extend(self._timed(batch[0]) for _ in range(count))
                return 0.0

            state, _ = self._attempt(timed)
            own += [0.0] * (count - len(own))
            times = self._ranks.most(own)
        peak = self._ranks.most([float(self._memory.peak_bytes())])[0]
        batch.clear()
        self._run.optimizer.zero_grad()
        self._note_time()
        fits = state == _FITS
        return MicroBatchTrial(
            micro_batch,
            TrialOutcome.FITS if fits else TrialOutcome.OUT_OF_MEMORY,
            # What was in use when an allocation failed says nothing about what was needed.
            int(peak) if fits else None,
            micro_step_ns=tuple(int(t) for t in times) if fits else (),
        )

    def _attempt(
        self, call: Callable[[], float], *, may_refuse: bool = False
    ) -> tuple[float, float]:
        """Calls something on all ranks; returns what became of it on the worst, and its figure."""
        state, figure = _FITS, 0.0
        try:
            figure = call()
        except Exception as error:
            if is_out_of_memory(error):
                state = _NO_MEMORY
            elif may_refuse:
                state = _REFUSED
            else:
                raise
        if state != _FITS:
            # Outside the handler, which would hold on to what was allocated.
            self._run.optimizer.zero_grad()
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        worst, most = self._ranks.most([state, figure])
        return worst, most

    def _probe(self, micro_batch: int) -> float:
        self._run.try_micro_step(self._batch(micro_batch))
        self._run.try_optimizer()
        return 0.0

    def _check_alone(self, micro_batch: int) -> None:
        """Refuses models that talk to other ranks: one that runs out of memory would not answer."""
        modules = self._run.modules
        try:
            with alone(modules):
                self._run.try_micro_step(self._batch(micro_batch))
        except RuntimeError as error:
            if "collective of its own" in str(error):
                raise InputError(
                    f"--find-micro-batch cannot be used: {error}, and would wait for ever where "
                    "only one rank runs out of memory.",
                    "Leave it out and compare runs with --micro-batch.",
                ) from None
        except Exception:
            # Found out, and told, by the trials.
            pass
        self._run.optimizer.zero_grad()

    def _batch(self, samples: int) -> Any:
        """Returns a micro-batch on the device; a data set that is too short is begun anew."""
        dataset = self._run.workload.dataset
        length = len(dataset)  # type: ignore[arg-type]
        return to_device(
            default_collate([dataset[i % length] for i in range(samples)]), self._device
        )

    def _timed(self, batch: Any) -> float:
        self._synchronize()
        begin = self._clock()
        self._run.try_micro_step(batch)
        self._synchronize()
        return float(self._clock() - begin)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _note_time(self) -> None:
        self.elapsed_s = self._ranks.most([(self._clock() - self._begun_ns) / 1e9])[0]


def find_micro_batch(
    run: LevelRun,
    ranks: Company,
    memory: MemoryMeter,
    limit: Allowance,
    device: torch.device,
    tried: Callable[[MicroBatchTrial], None],
) -> MicroBatchSearch:
    """Measures memory and speed against the micro-batch; all ranks of a level call it together.

    Args:
        run: Model, DDP and optimizer; its gradients and its optimizer's state are used up.
        ranks: Those that try together.
        memory: Reads the peak memory of this rank, from before the model was built.
        limit: Memory that this rank may use; the least of all ranks counts.
        device: Where the model lives.
        tried: Told each trial.

    Returns:
        What was found, the same on all ranks.

    Raises:
        InputError: The model issues collectives of its own.
    """
    least = -ranks.most([-float(limit.nbytes)])[0]
    limit = replace(limit, nbytes=int(least))
    with held_to(limit, device), random_kept(device), norms_alone(run.modules):
        done, ended = search(MeasuredTrials(run, ranks, memory, device), limit, tried=tried)
    return MicroBatchSearch(
        dp=ranks.dp,
        ended=ended,
        limit_bytes=limit.nbytes,
        limit_source=limit.source,
        memory_source=memory.source,
        trials=done,
    )


def search_on_level(
    config: StudyConfig,
    level: LevelSettings,
    session: Session,
    phase: Phase,
    say: Callable[[str], None],
) -> MicroBatchSearch:
    """Searches on the ranks of a level, while the others of the launch wait; all call it.

    Args:
        config: The settings.
        level: Whose ranks search; its micro-batch and accumulation do not matter.
        session: This rank's part in the launch.
        phase: Kept up to date for error messages.
        say: Shows a line to the user.

    Returns:
        What was found, the same on every rank of the launch.

    Raises:
        InputError: The model issues collectives of its own.
    """
    key, heartbeat = "micro-batch", "beat/micro-batch"
    device = session.device.device
    phase.name = "finding the micro-batch"
    group: Any = session.make_groups((level,))[level.ranks]
    leads = session.rank == level.ranks[0]
    if session.rank in level.ranks:
        memory = open_meter(device)
        limit = allowance(device, session.topology.local_world_size, config.memory_limit_gb)

        def tried(trial: MicroBatchTrial) -> None:
            phase.name = f"finding the micro-batch, after {trial.micro_batch}"
            if leads:
                session.beat(heartbeat)

        found = _search(config, level, session.rank, group, device, memory, limit, tried)
        if leads:
            session.publish(key, found)
        release(device)
        dist.destroy_process_group(group)
    learnt: MicroBatchSearch = session.learn(key, MicroBatchSearch, heartbeat)
    return learnt


def _search(
    config: StudyConfig,
    level: LevelSettings,
    rank: int,
    group: Any,
    device: torch.device,
    memory: MemoryMeter,
    limit: Allowance,
    tried: Callable[[MicroBatchTrial], None],
) -> MicroBatchSearch:
    """Builds model and DDP, searches, and takes both down again."""
    run = LevelRun(
        replace(level, micro_batch=1, accumulation=1),
        build_workload(config, 1),
        # Nothing of this belongs to the record.
        Recorder(make_timeline(device), lambda _: None),
        group,
        level.ranks.index(rank),
        device,
        bucket_cap_mb=config.bucket_cap_mb,
        precision=config.precision,
        seed=config.seed,
        planter=Planter((), rank, dp=level.dp),
    )
    try:
        return find_micro_batch(run, company(level.dp, group, device), memory, limit, device, tried)
    finally:
        run.close()
