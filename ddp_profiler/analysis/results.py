"""Frozen results of the analysis: the content of ``summary.json``, field by field.

Names are the contract's. What does not apply is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddp_profiler.analysis.allreduce import AllReduceResult
from ddp_profiler.analysis.clocks import ClockOffset
from ddp_profiler.analysis.confirmation import ConfirmedGain
from ddp_profiler.analysis.feeding import Feeding
from ddp_profiler.analysis.lateness import Lateness
from ddp_profiler.analysis.micro_batch import MicroBatchCurve
from ddp_profiler.analysis.model import StepCosts
from ddp_profiler.analysis.noise_scale import NoiseScale
from ddp_profiler.analysis.reduction import Reduction
from ddp_profiler.analysis.roofline import Hardware, Roofline
from ddp_profiler.analysis.sampled import SampledWindow
from ddp_profiler.analysis.scaling import Pop
from ddp_profiler.analysis.statistics import Distribution
from ddp_profiler.analysis.stragglers import Straggler
from ddp_profiler.schema import MachineUse

__all__ = [
    "BatchCheck",
    "ClockOffset",
    "Communication",
    "ConfirmedGain",
    "Distribution",
    "Feeding",
    "Finding",
    "Lateness",
    "LevelResult",
    "NoiseScale",
    "Overhead",
    "RankResult",
    "RunResult",
    "SampledWindow",
    "Straggler",
    "Summary",
]


@dataclass(frozen=True)
class Communication:
    """Gradient communication of a level.

    Attributes:
        busy_ms: Union of the in-flight intervals of gradient collectives, a step,
            mean over ranks and steps.
        overlapped_ms: The part of it before the end of local backward.
        overlap_fraction: overlapped_ms / busy_ms; None where there is no communication.
        gradient_bytes: Bytes handed to gradient collectives in a step.
        num_buckets: DDP's buckets, as DDP itself reports them.
        num_gradient_collectives_per_step: Gradient collectives seen in a step, mean.
        unnoticed_completions: Collectives whose completion was never noticed; their end
            is taken as the end of backward.
        sources: Which mechanism gave each figure.
    """

    busy_ms: float | None
    overlapped_ms: float | None
    overlap_fraction: float | None
    gradient_bytes: int | None
    num_buckets: int | None
    num_gradient_collectives_per_step: float | None
    unnoticed_completions: int
    sources: Mapping[str, str | None]


@dataclass(frozen=True)
class BatchCheck:
    """Global batch in samples: declared by the user, configured by the settings, observed.

    Attributes:
        declared: The user's word; None if not given.
        configured: micro_batch x accumulation x dp; None where a script's samples were not seen.
        observed: Samples that entered forward in a step, summed over ranks; None where
            steps differ.
        ok: Whether all known values agree; None where nothing was observed.
        gradient_max_rel_error: Against one process that sees the whole global batch: largest
            over tensors of max|difference| / max|gradient|; None if not run.
        gradient_worst_tensor: The tensor with that error.
        gradient_factor: The number by which the gradients are too large; about 1 if right.
        gradient_factor_name: What that number is, such as ``dp``; None where it is 1.
        gradient_unexplained: Whether they differ by more than rounding and no factor explains
            it, though they had to match; None if not run.
        gradient_must_match: Whether the gradients had to be those of one process; false where
            samples influence each other or are dropped at random; None if not run.
        ranks_agree: Whether gradients were equal on all ranks; None if not checked.
        notes: What a reader has to know.
    """

    declared: int | None
    configured: int | None
    observed: int | None
    ok: bool | None
    gradient_max_rel_error: float | None
    gradient_worst_tensor: str | None
    gradient_factor: float | None
    gradient_factor_name: str | None
    gradient_unexplained: bool | None
    gradient_must_match: bool | None
    ranks_agree: bool | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Overhead:
    """What the instrumentation costs at this level, from alternating blocks.

    Attributes:
        plain_ms: Median plain step.
        instrumented_ms: Median instrumented step.
        overhead_pct: Median over block pairs of (instrumented - plain) / plain, in per cent.
        ci95_pct: Bootstrap interval over block pairs; None with fewer than 2 pairs.
    """

    plain_ms: float
    instrumented_ms: float
    overhead_pct: float
    ci95_pct: tuple[float, float] | None


@dataclass(frozen=True)
class GradientReady:
    """When a parameter's gradient is ready, in ms after backward was called (no_sync)."""

    name: str
    bytes: int
    ready_ms: float | None


@dataclass(frozen=True)
class RankResult:
    """One rank at one level: mean over its instrumented steps, and what its machine gave it."""

    rank: int
    node: int
    hostname: str
    steps: int
    step_ms: float
    breakdown_ms: Mapping[str, float | None]
    machine: MachineUse | None = None


@dataclass(frozen=True)
class LevelResult:
    """One level of a study. ``breakdown_ms`` sums to ``instrumented_step_ms.mean``.

    Times are means over ranks and steps. ``micro_batch``, ``global_batch`` and ``samples_per_s``
    are None where samples of a script were not seen. ``mfu`` is achieved over peak FLOP/s;
    ``costs_ms`` is the level in the step model; ``contention_ms``, ``wrapper_ms`` and
    ``waterfall_ms`` compare it with the dp = 1 level named by ``reference``. What needs one is
    None without.
    ``straggler`` is the first of ``stragglers``, which are sorted by what they cost; times of
    two ranks may be apart by ``clock_uncertainty_ms`` that are told as equal (0 on one host,
    None where their clocks cannot be compared).
    ``crossing_ms`` is what a plain step of a level spread over nodes takes more than that of
    the packed level of the same setting, with its interval and its share of the step.
    ``feeding`` is what entered a script's training; None in studies.
    ``windows`` are those of a script that was observed again and again; empty where only once.
    ``reduction`` is what a script's record says about how it reduces; None for a study.
    ``lateness`` is when ranks are ready to reduce, against each other; None where their clocks
    cannot be compared.
    ``gradient_element_bytes`` is the size of a gradient's element, mean over all.
    ``roofline`` is what limits the step; None where operations were not counted (scripts).
    ``noise_scale`` tells whether a larger global batch pays, or why that is not known.
    ``breakdown_ci95_ms`` has the intervals of the parts' means over steps; None without steps.
    """

    id: str
    dp: int
    nodes: int
    placement: str
    micro_batch: int | None
    accumulation: int
    global_batch: int | None
    steps: int
    repetitions: int
    warmup_steps: int
    warmup_ms: float | None
    step_ms: Distribution | None
    instrumented_step_ms: Distribution | None
    samples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    breakdown_ms: Mapping[str, float | None]
    comm: Communication
    allreduce: AllReduceResult | None
    batch_check: BatchCheck
    overhead: Overhead | None
    gradient_ready: tuple[GradientReady, ...]
    costs_ms: StepCosts | None
    contention_ms: float | None
    wrapper_ms: float | None
    reference: str | None
    speedup: float | None
    efficiency: float | None
    pop: Pop | None
    waterfall_ms: Mapping[str, float | None] | None
    clock_uncertainty_ms: float | None
    straggler: Straggler | None
    stragglers: tuple[Straggler, ...]
    ranks: tuple[RankResult, ...]
    notes: tuple[str, ...]
    crossing_ms: float | None = None
    crossing_ci95_ms: tuple[float, float] | None = None
    crossing_fraction: float | None = None
    feeding: Feeding | None = None
    windows: tuple[SampledWindow, ...] = ()
    reduction: Reduction | None = None
    lateness: Lateness | None = None
    gradient_element_bytes: float | None = None
    roofline: Roofline | None = None
    noise_scale: NoiseScale | None = None
    breakdown_ci95_ms: Mapping[str, tuple[float, float] | None] | None = None


@dataclass(frozen=True)
class Finding:
    """Something a user should know, with its evidence."""

    id: str
    severity: str
    message: str
    evidence: str
    expected_gain_ms: float | None = None
    expected_gain_pct: float | None = None


@dataclass(frozen=True)
class RunResult:
    """What the numbers belong to.

    ``hardware`` is None where it was not measured (scripts); ``partial_reason`` says why the run
    is partial, None where it is whole or where no reason was recorded.
    """

    run_id: str
    status: str
    created: str
    profiler_version: str
    world_size: int
    nodes: int
    partial: bool
    settings: Mapping[str, object]
    environment: Mapping[str, Mapping[str, object]]
    statistics_unit: str
    clocks: tuple[ClockOffset, ...] = ()
    hardware: Hardware | None = None
    partial_reason: str | None = None


@dataclass(frozen=True)
class Summary:
    """The content of ``summary.json``; ``micro_batches`` is None without a search for one."""

    schema_version: int
    run: RunResult
    levels: tuple[LevelResult, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    confirmation: ConfirmedGain | None = None
    micro_batches: MicroBatchCurve | None = None
