"""The plan of a training run: its batch, what becomes of each epoch, steps, and time.

Pure arithmetic on :mod:`ddp_profiler.batch`. Where step times come from is the caller's choice,
see :mod:`ddp_profiler.predict.step_time`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from ddp_profiler.analysis.results import Summary
from ddp_profiler.batch import CARRY, DROP, SHORT, Batch, Epoch, dealt_epoch, epoch, solve, splits
from ddp_profiler.errors import UsageError
from ddp_profiler.predict.parallel import Parallel, solve_parallel
from ddp_profiler.predict.step_time import (
    StepTime,
    StepTimes,
    first_of,
    given,
    measured,
    measured_sizes,
    re_expressed,
    unknown,
)

WINDOWS = (SHORT, DROP, CARRY)
NOTHING_DROPPED, SAMPLER_DROPS, LOADER_DROPS, BOTH_DROP = "none", "sampler", "loader", "both"
DROPS = (NOTHING_DROPPED, SAMPLER_DROPS, LOADER_DROPS, BOTH_DROP)
BY_SAMPLES, BY_BATCHES = "samples", "batches"
SHARDS = (BY_SAMPLES, BY_BATCHES)
_MOST_OTHER_DP = 12
"""Other dp that are looked at where dp is open: each may cost predictions."""
_FARTHEST = 8
"""Times the largest dp measured, up to which others are looked at."""


@dataclass(frozen=True)
class PlanRequest:
    """What a user knows of a run; what is left open is None.

    Attributes:
        samples: Samples of the data set.
        epochs: How often they are gone through.
        global_batch: Samples in an optimizer step.
        micro_batch: Samples of one rank in one micro-step.
        accumulation: Micro-steps in an optimizer step.
        dp: Data-parallel replicas.
        world_size: dp x tp x pp.
        tp: Devices of a tensor-parallel group.
        pp: Stages of a pipeline.
        drop_last: Who drops what is too little: ``none``, ``sampler``, ``loader`` or ``both``.
        shard: What is dealt out to ranks: ``samples`` (DistributedSampler) or whole ``batches``
            (as by Accelerate).
        window: What becomes of micro-steps that fill no step: ``short``, ``drop``, ``carry``.
        startup_s: Time before the first step.
        evaluation_s: Time of an evaluation.
        evaluate_every: Optimizer steps between evaluations; one an epoch where None.
        checkpoint_s: Time of a checkpoint.
        checkpoint_every: Optimizer steps between checkpoints; one an epoch where None.

    Raises:
        UsageError: A number is out of its range, or an option has nothing to act on.
    """

    samples: int
    epochs: int
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    dp: int | None = None
    world_size: int | None = None
    tp: int | None = None
    pp: int | None = None
    drop_last: str = NOTHING_DROPPED
    shard: str = BY_SAMPLES
    window: str = SHORT
    startup_s: float = 0.0
    evaluation_s: float = 0.0
    evaluate_every: int | None = None
    checkpoint_s: float = 0.0
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            option = _option(field.name)
            if isinstance(value, int) and value < 1:
                raise UsageError(f"{option} {value} is below 1.", f"Give {option} 1 or more.")
            if isinstance(value, float) and not 0 <= value < math.inf:
                raise UsageError(
                    f"{option} {value:g} is no time of 0 or more.", "It is a time in seconds."
                )
        for value, known, option in (
            (self.drop_last, DROPS, "--drop-last"),
            (self.shard, SHARDS, "--shard"),
            (self.window, WINDOWS, "--window"),
        ):
            if value not in known:
                raise UsageError(
                    f"{option} {value} is unknown.", f"Choose one of: {', '.join(known)}."
                )
        if self.shard == BY_BATCHES and self.drop_last == SAMPLER_DROPS:
            raise UsageError(
                "--drop-last sampler has nothing to act on with --shard batches, which deals out "
                "whole micro-batches.",
                "Give --drop-last loader, or leave --shard out.",
            )
        for every, each, option, other in (
            (self.evaluate_every, self.evaluation_s, "--evaluate-every", "--evaluation-s"),
            (self.checkpoint_every, self.checkpoint_s, "--checkpoint-every", "--checkpoint-s"),
        ):
            if every is not None and not each:
                raise UsageError(
                    f"{option} {every} says how often, and not how long one takes.",
                    f"Add {other} SECONDS.",
                )


def _option(name: str) -> str:
    """Returns the option of a field."""
    return {"accumulation": "--accumulate"}.get(name, "--" + name.replace("_", "-"))


def _not_known(_: int) -> bool | None:
    return None


@dataclass(frozen=True)
class RunKnowledge:
    """What a measured run adds to what the user says.

    Attributes:
        name: What to call it.
        step_times: Source of step times.
        sizes: The dp that it has measured, the largest first.
        micro_batch: The micro-batch to use where none is asked for; None if not known.
        fits: Whether a micro-batch fits in memory; None where it does not know.
    """

    name: str = ""
    step_times: StepTimes = unknown
    sizes: Sequence[int] = ()
    micro_batch: int | None = None
    fits: Callable[[int], bool | None] = _not_known


@dataclass(frozen=True)
class Alternative:
    """Other settings of the same global batch.

    Attributes:
        micro_batch: Samples of one rank in one micro-step.
        accumulation: Micro-steps in a step.
        dp: Data-parallel replicas.
        total_optimizer_steps: Of all epochs.
        fits: Whether the micro-batch fits in memory; None if not known.
        step_ms: Expected step; None if not known.
        training_time_s: As in the plan; None if not known.
        training_time_interval_s: Its interval; None if not known.
        source: Where the step time comes from; None without one.
    """

    micro_batch: int
    accumulation: int
    dp: int
    total_optimizer_steps: int
    fits: bool | None
    step_ms: float | None
    training_time_s: float | None
    training_time_interval_s: tuple[float, float] | None
    source: str | None


@dataclass(frozen=True)
class Plan:
    """A run, planned: the content of ``plan --json``.

    Attributes:
        samples: Samples of the data set.
        epochs: How often they are gone through.
        global_batch: Samples in an optimizer step.
        micro_batch: Samples of one rank in one micro-step.
        accumulation: Micro-steps in an optimizer step.
        dp: Data-parallel replicas.
        tp: Devices of a tensor-parallel group.
        pp: Stages of a pipeline.
        world_size: dp x tp x pp.
        samples_per_rank: What the sampler gives each rank in an epoch.
        samples_processed: Samples of an epoch that optimizer steps use, repeated ones included;
            with ``carry`` also those that the next epoch's first step uses.
        samples_repeated: Samples of an epoch that come twice.
        samples_dropped: Samples of an epoch that no step uses, of those that are repeated too.
        micro_steps_per_epoch: Micro-steps of each rank.
        optimizer_steps_per_epoch: Whole, but for windows that carry over.
        total_optimizer_steps: Of all epochs.
        total_samples_processed: As ``samples_processed``, of all epochs, without what the end of
            the last one leaves where windows carry over.
        total_samples_dropped: Samples of all epochs that no step uses.
        total_unused_micro_steps: Micro-steps of each rank in all epochs that run, and that no
            step follows.
        rounding: Each rounding in words, in their order; empty if all is whole.
        step_time: Expected step; None if not known.
        training_time_s: Steps, unused micro-steps, start-up, evaluations and checkpoints; None
            without a step time.
        training_time_interval_s: The same with the interval of the step time; None without one.
        training_time_terms_s: ``steps``, ``unused_micro_steps``, ``startup``, ``evaluation`` and
            ``checkpoint``.
        fits: Whether the micro-batch fits in memory; None if not known.
        alternatives: Other settings of the same global batch, the best first: by training time
            where it is known; then those that fit, the largest micro-batch first.
        notes: What was assumed.
    """

    samples: int
    epochs: int
    global_batch: int
    micro_batch: int
    accumulation: int
    dp: int
    tp: int
    pp: int
    world_size: int
    samples_per_rank: int
    samples_processed: int
    samples_repeated: int
    samples_dropped: int
    micro_steps_per_epoch: int
    optimizer_steps_per_epoch: int | float
    total_optimizer_steps: int
    total_samples_processed: int
    total_samples_dropped: int
    total_unused_micro_steps: int
    rounding: tuple[str, ...]
    step_time: StepTime | None
    training_time_s: float | None
    training_time_interval_s: tuple[float, float] | None
    training_time_terms_s: dict[str, float | None]
    fits: bool | None
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]


def make_plan(
    request: PlanRequest, run: RunKnowledge | None = None, step_ms: float | None = None
) -> Plan:
    """Plans a run.

    >>> plan = make_plan(PlanRequest(1000, 1, global_batch=10, accumulation=2))
    >>> plan.micro_batch, plan.micro_steps_per_epoch, plan.optimizer_steps_per_epoch
    (5, 200, 100)

    Args:
        request: What the user says.
        run: What a measured run knows; None without.
        step_ms: Time of a step of the plan in ms, by the user's word; None without.

    Raises:
        UsageError: No whole numbers make the batch or the world, too little is said, or an
            epoch has no step.
    """
    if step_ms is not None and not 0 < step_ms < math.inf:
        raise UsageError(f"--step-ms {step_ms:g} is no time above 0.", "It is a time in ms.")
    known = run or RunKnowledge()
    # A prediction is dear, and the same batch is asked for more than once.
    known = replace(known, step_times=functools.cache(known.step_times))
    batch, sizes, notes = _solved(request, known)
    word = unknown if step_ms is None else given(step_ms, batch)
    ahead = _Ahead(request, first_of(word, known.step_times))
    found = ahead.epoch(batch)
    steps = found.optimizer_steps
    total = found.total_optimizer_steps(request.epochs)
    assert steps is not None
    assert total is not None
    if not total:
        why = "; ".join(found.rounding)
        raise UsageError(
            f"{request.epochs} epoch{'s' if request.epochs > 1 else ''} of {request.samples} "
            f"samples make no optimizer step at {batch}{f': {why}' if why else ''}.",
            "Lower the batch, or leave --drop-last or --window drop out.",
        )
    dropped = found.total_samples_dropped(request.epochs)
    step = ahead.step_times(batch)
    time, interval, terms = ahead.training_time(batch)
    return Plan(
        samples=request.samples,
        epochs=request.epochs,
        global_batch=batch.global_batch,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        dp=batch.dp,
        tp=sizes.tp,
        pp=sizes.pp,
        world_size=sizes.world_size,
        samples_per_rank=found.samples_per_rank,
        samples_processed=found.samples_processed,
        samples_repeated=found.samples_repeated,
        samples_dropped=found.samples_dropped,
        micro_steps_per_epoch=found.micro_steps,
        optimizer_steps_per_epoch=int(steps) if steps.denominator == 1 else float(steps),
        total_optimizer_steps=total,
        total_samples_processed=(found.samples + found.samples_repeated) * request.epochs - dropped,
        total_samples_dropped=dropped,
        total_unused_micro_steps=found.total_unused_micro_steps(request.epochs),
        rounding=(*found.rounding, *_end_of_run(found, request)),
        step_time=step,
        training_time_s=time,
        training_time_interval_s=interval,
        training_time_terms_s=terms,
        fits=known.fits(batch.micro_batch),
        alternatives=tuple(
            ahead.alternative(other, known)
            for other in _ranked(_others(batch, sizes.dp, ahead, known), ahead, known)
        ),
        notes=(*notes, *_time_notes(ahead, found, run)),
    )


def _solved(request: PlanRequest, run: RunKnowledge) -> tuple[Batch, Parallel, list[str]]:
    """Solves both identities; returns also what was assumed."""
    notes: list[str] = []
    total, micro, accumulation = request.global_batch, request.micro_batch, request.accumulation
    sizes = solve_parallel(request.world_size, request.dp, request.tp, request.pp)
    dp = sizes.dp if sizes else None
    if total is None:
        if micro is None:
            micro = run.micro_batch
            if micro is None:
                raise UsageError(
                    "Neither --global-batch nor --micro-batch is given: there is no batch to plan.",
                    "Give one of them, such as --global-batch 256.",
                )
            notes.append(f"micro-batch {micro} is that of {run.name}")
        if dp is None:
            dp = run.sizes[0] if run.sizes else 1
            notes.append(f"dp {dp} is assumed" + (f": that of {run.name}" if run.sizes else ""))
        if accumulation is None:
            accumulation = 1
            notes.append("accumulation 1 is assumed")
        batch = Batch(micro, accumulation, dp)
    elif dp is None and micro is not None and accumulation is not None:
        batch = solve(total, None, micro_batch=micro, accumulation=accumulation)
    else:
        if dp is None:
            each = (micro or 1) * (accumulation or 1)
            candidates = [*run.sizes, 1]
            dp = next((n for n in candidates if total % (n * each) == 0), candidates[0])
            notes.append(f"dp {dp} is assumed" + (f": that of {run.name}" if run.sizes else ""))
        if micro is None and accumulation is None:
            possible = splits(total, dp)
            ahead = _Ahead(request, run.step_times)
            batch = _ranked(possible, ahead, run)[0]
            notes.append(_why_chosen(batch, possible, ahead, run))
        else:
            batch = solve(total, dp, micro_batch=micro, accumulation=accumulation)
    if sizes is None:
        sizes = solve_parallel(None, batch.dp, request.tp, request.pp)
        assert sizes is not None
    return batch, sizes, notes


def _why_chosen(batch: Batch, possible: Sequence[Batch], ahead: _Ahead, run: RunKnowledge) -> str:
    what = f"micro-batch {batch.micro_batch} and accumulation {batch.accumulation} are chosen: "
    if len(possible) == 1:
        return what + "nothing else makes this global batch"
    if ahead.step_times(batch) is not None:
        return what + "the shortest training time of those that are known"
    if run.fits(batch.micro_batch):
        return what + f"the largest micro-batch that fits in memory, as {run.name} found"
    return what + "the largest micro-batch; whether it fits in memory is not known here"


def _others(batch: Batch, replicas: int, ahead: _Ahead, run: RunKnowledge) -> list[Batch]:
    """Returns other settings of the same global batch: other splits, and other dp if open.

    Args:
        batch: The plan's.
        replicas: Those that the plan's devices hold.
        ahead: Looks ahead at each.
        run: What a measured run knows.
    """
    request, total = ahead.request, batch.global_batch
    found = list(splits(total, batch.dp))
    if request.dp is None:
        most = min(total, request.samples)
        if run.sizes:
            most = min(most, _FARTHEST * max(run.sizes))
        if request.world_size is not None:
            most = min(most, replicas)
        for dp in _other_sizes(total, most, run.sizes):
            there = splits(total, dp)
            if request.world_size is not None:
                # Fewer replicas leave devices unused: only worth a word where that is faster.
                there = tuple(other for other in there if ahead.step_times(other) is not None)
            found += there
    left = dict.fromkeys(other for other in found if other != batch)
    return [other for other in left if ahead.epoch(other).total_optimizer_steps(request.epochs)]


def _other_sizes(global_batch: int, most: int, measured: Sequence[int]) -> list[int]:
    """Returns dp that divide a global batch: those measured, powers of two, then others.

    >>> _other_sizes(240, 16, [3])
    [3, 1, 2, 4, 8, 16, 5, 6, 10, 12, 15]
    """
    # What divides it at dp 1 as a micro-batch, divides it as a dp.
    sizes = [other.micro_batch for other in splits(global_batch, 1) if other.micro_batch <= most]
    sizes.sort(key=lambda dp: (dp not in measured, dp & (dp - 1) != 0, dp))
    return sizes[:_MOST_OTHER_DP]


def _ranked(batches: Sequence[Batch], ahead: _Ahead, run: RunKnowledge) -> list[Batch]:
    """Sorts by training time where it is known; then by whether it fits, the largest first.

    Of the same micro-batch those with less accumulation, on more replicas, come first.
    """

    def weight(batch: Batch) -> tuple[bool, bool, float, bool, int, int]:
        fits = run.fits(batch.micro_batch)
        time, _, _ = ahead.training_time(batch)
        return (
            fits is False,
            time is None,
            time or 0.0,
            not fits,
            -batch.micro_batch,
            -batch.dp,
        )

    return sorted(batches, key=weight)


@dataclass(frozen=True)
class _Ahead:
    """Looks ahead at a run of any batch."""

    request: PlanRequest
    step_times: StepTimes

    def epoch(self, batch: Batch) -> Epoch:
        """Returns what becomes of an epoch."""
        request = self.request
        by_loader = request.drop_last in (LOADER_DROPS, BOTH_DROP)
        if request.shard == BY_BATCHES:
            return dealt_epoch(request.samples, batch, drops=by_loader, window=request.window)
        return epoch(
            request.samples,
            batch,
            sampler_drops=request.drop_last in (SAMPLER_DROPS, BOTH_DROP),
            loader_drops=by_loader,
            window=request.window,
        )

    def training_time(
        self, batch: Batch
    ) -> tuple[float | None, tuple[float, float] | None, dict[str, float | None]]:
        """Returns the training time in s, its interval, and its terms.

        A step of fewer micro-steps, at the end of an epoch, takes what the source says of one,
        else as long as a full one; a smaller last micro-batch counts as a full one. Micro-steps
        that no step follows take what they add to a step, else their share of one.
        """
        request, found = self.request, self.epoch(batch)
        total = found.total_optimizer_steps(request.epochs) or 0

        def times(each: float, every: int | None) -> float:
            return each * (total // every if every else request.epochs)

        terms: dict[str, float | None] = {
            "steps": None,
            "unused_micro_steps": None,
            "startup": request.startup_s,
            "evaluation": times(request.evaluation_s, request.evaluate_every),
            "checkpoint": times(request.checkpoint_s, request.checkpoint_every),
        }
        step = self.step_times(batch)
        if step is None or not total:
            return None, None, terms
        short_steps = request.epochs if found.left_over and request.window == SHORT else 0
        last = (self.short_step(found) if short_steps else None) or step

        def in_all(of_step: float, of_short: float) -> float:
            return ((total - short_steps) * of_step + short_steps * of_short) / 1e3

        unused = found.total_unused_micro_steps(request.epochs)
        share, _ = self.share_of_micro_step(found) if unused else (0.0, True)
        terms["steps"] = in_all(step.ms, last.ms)
        terms["unused_micro_steps"] = unused * share * step.ms / 1e3
        time = sum(value or 0.0 for value in terms.values())
        interval = None
        if step.interval_ms is not None:
            ends = last.interval_ms or (last.ms, last.ms)
            fixed = sum(terms[name] or 0.0 for name in ("startup", "evaluation", "checkpoint"))
            low, high = (
                in_all(of_step, of_short) + unused * share * of_step / 1e3 + fixed
                for of_step, of_short in zip(step.interval_ms, ends, strict=True)
            )
            interval = (low, high)
        return time, interval, terms

    def share_of_micro_step(self, found: Epoch) -> tuple[float, bool]:
        """Returns what a micro-step that no step follows takes, as a share of a step.

        A micro-step adds (step - step without accumulation) / (accumulation - 1): it neither
        reduces nor updates. Where that is not known, or is more than an equal share of the step
        with its reduction and update, it is that equal share.

        Returns:
            The share, and whether it is what a micro-step adds.
        """
        batch = found.batch
        step, single = (
            self.step_times(replace(batch, accumulation=n)) for n in (batch.accumulation, 1)
        )
        equal = 1 / batch.accumulation
        if step is not None and single is not None and batch.accumulation > 1:
            added = (1 - single.ms / step.ms) / (batch.accumulation - 1)
            if 0 < added <= equal:
                return added, True
        return equal, False

    def short_step(self, found: Epoch) -> StepTime | None:
        """Returns the time of the step of fewer micro-steps that ends an epoch, if it is known."""
        batch = found.batch
        return self.step_times(Batch(batch.micro_batch, found.left_over, batch.dp))

    def alternative(self, batch: Batch, run: RunKnowledge) -> Alternative:
        """Returns a batch as an alternative."""
        step = self.step_times(batch)
        time, interval, _ = self.training_time(batch)
        return Alternative(
            micro_batch=batch.micro_batch,
            accumulation=batch.accumulation,
            dp=batch.dp,
            total_optimizer_steps=self.epoch(batch).total_optimizer_steps(self.request.epochs) or 0,
            fits=run.fits(batch.micro_batch),
            step_ms=step.ms if step else None,
            training_time_s=time,
            training_time_interval_s=interval,
            source=step.source if step else None,
        )


def _end_of_run(found: Epoch, request: PlanRequest) -> list[str]:
    """Names what the end of the last epoch leaves where windows carry over."""
    if request.window != CARRY:
        return []
    left = found.total_unused_micro_steps(request.epochs)
    if not left:
        return []
    samples = found.total_samples_dropped(request.epochs) - found.samples_dropped * request.epochs
    return [
        f"the end of the run leaves {left} micro-step{'s' if left > 1 else ''} that no step "
        f"takes, of {samples} samples"
    ]


def _time_notes(ahead: _Ahead, found: Epoch, run: RunKnowledge | None) -> list[str]:
    if ahead.step_times(found.batch) is None:
        if run is None:
            return ["the training time is not known: give --step-ms X, or --run RUN"]
        sizes = ", ".join(map(str, sorted(run.sizes))) or "no"
        return [
            f"the training time is not known: {run.name}, which has measured dp {sizes}, does not "
            f"tell a step at {found.batch}; --step-ms X gives one"
        ]
    if found.left_over and found.window == SHORT and ahead.short_step(found) is None:
        return ["the shorter step at the end of an epoch counts as a full one in the time"]
    if found.total_unused_micro_steps(ahead.request.epochs):
        _, known = ahead.share_of_micro_step(found)
        if not known:
            return [
                "a micro-step that no step takes counts as 1 / "
                f"{found.batch.accumulation} of a step in the time"
            ]
    return []


def knowledge_of(summary: Summary, name: str, more: StepTimes = unknown) -> RunKnowledge:
    """Returns what a run adds to a plan.

    Args:
        summary: The run's.
        name: What to call it.
        more: Asked for step times that were not measured.
    """
    sizes = measured_sizes(summary)
    largest = [lv for lv in summary.levels if lv.step_ms and sizes and lv.dp == sizes[0]]
    curve = summary.micro_batches
    return RunKnowledge(
        name=name,
        step_times=first_of(measured(summary), more, re_expressed(summary)),
        sizes=sizes,
        micro_batch=largest[0].micro_batch if largest else None,
        fits=curve.fits if curve is not None else _not_known,
    )
