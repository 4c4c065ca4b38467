"""Frozen results of predictions. Names are the contract's; what does not apply is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StepInterval:
    """A predicted step time in ms: the middle of what is likely, and 90 % of it."""

    median: float
    interval90: tuple[float, float]


@dataclass(frozen=True)
class Naive:
    """What is told without replaying: all communication after backward, or all behind it."""

    no_overlap_ms: float
    perfect_overlap_ms: float


@dataclass(frozen=True)
class Prediction:
    """A step that was not measured.

    Attributes:
        dp: Number of replicas.
        nodes: Nodes that they are on.
        micro_batch: Samples of a micro-step.
        accumulation: Micro-steps of a step.
        global_batch: Samples of a step over all ranks.
        bucket_cap_mb: Size limit of buckets, in MB of 2**20 bytes; None if not known.
        bucket_bytes: The buckets, in the order of reduction.
        step_ms: The step: mean over steps and ranks, as the parts are; 90 % of what it may be.
        measured_ms: The mean plain step where this setting was measured, else None.
        samples_per_s: Throughput of all ranks at the median.
        efficiency: Throughput over dp times that of dp = 1; None without a dp = 1 level.
        breakdown_ms: The parts of a measured step, summing to the mean step.
        overlap_fraction: Share of the time in which gradients travel that is hidden.
        allreduce_ms: All buckets handed over at once, nothing beside them.
        naive_ms: The two answers that need no replay.
        extrapolated: Whether it goes beyond what was measured.
        notes: Why, and what is assumed.
    """

    dp: int
    nodes: int
    micro_batch: int
    accumulation: int
    global_batch: int
    bucket_cap_mb: float | None
    bucket_bytes: tuple[int, ...]
    step_ms: StepInterval
    measured_ms: float | None
    samples_per_s: float
    efficiency: float | None
    breakdown_ms: Mapping[str, float]
    overlap_fraction: float | None
    allreduce_ms: float
    naive_ms: Naive
    extrapolated: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class BackTest:
    """A measured level, predicted from the others.

    Attributes:
        held_out: Its id.
        predicted_ms: Its step.
        interval90: The prediction's.
        measured_ms: Its mean plain step.
        error_pct: Predicted over measured, less 1, in per cent.
    """

    held_out: str
    predicted_ms: float
    interval90: tuple[float, float]
    measured_ms: float
    error_pct: float


@dataclass(frozen=True)
class BackTests:
    """Every level that can be predicted from others.

    Attributes:
        tests: One for each of them.
        why_not: Why there is none; None where there is one.
        left_out: The ids of levels of 2 or more ranks that could not be held out.
    """

    tests: tuple[BackTest, ...]
    why_not: str | None
    left_out: tuple[str, ...] = ()
