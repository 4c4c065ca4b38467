"""Memory and speed against the micro-batch: from what was tried to the one to use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_profiler.analysis.statistics import Distribution, summarize
from ddp_profiler.schema import MicroBatchSearch, MicroBatchTrial, TrialOutcome

NEAR_BEST_FRACTION = 0.05
"""A micro-batch whose speed is below the best by no more than this share is as good."""


@dataclass(frozen=True)
class MicroBatchPoint:
    """A micro-batch that was tried.

    Attributes:
        micro_batch: Samples.
        outcome: ``fits``, ``out_of_memory``, ``over_limit`` or ``not_tried``.
        fits: Whether it fits in memory.
        peak_bytes: Most memory that a rank had in use; None where that is not known.
        micro_step_ms: A micro-step without reduction, on the rank that takes longest for it.
        samples_per_s: dp x micro_batch / median micro-step; None where it does not fit.
    """

    micro_batch: int
    outcome: str
    fits: bool
    peak_bytes: int | None
    micro_step_ms: Distribution | None
    samples_per_s: float | None


@dataclass(frozen=True)
class MicroBatchCurve:
    """Memory and speed against the micro-batch.

    Attributes:
        dp: Ranks that took part, all at once.
        points: One a micro-batch, ascending.
        efficient_micro_batch: The smallest that fits and whose speed is within 5 % of the best;
            None where none fits.
        largest_micro_batch: The largest that was seen to fit; None where none does.
        smallest_unfit_micro_batch: The smallest that does not fit; None where all did.
        bytes_per_sample: Slope of the line through the peaks of the largest that fits and of the
            largest of at most half of it; None without two such.
        fixed_bytes: That line at 0 samples: parameters, gradients, buckets, optimizer, library.
        limit_bytes: Memory that a rank may use; None if not known.
        limit_source: Where the limit comes from.
        memory_source: What ``peak_bytes`` are.
        ended: Why no larger one was tried: ``memory``, ``slower`` or ``time``.
    """

    dp: int
    points: tuple[MicroBatchPoint, ...]
    efficient_micro_batch: int | None
    largest_micro_batch: int | None
    smallest_unfit_micro_batch: int | None
    bytes_per_sample: float | None
    fixed_bytes: float | None
    limit_bytes: int | None
    limit_source: str
    memory_source: str
    ended: str

    def fits(self, micro_batch: int) -> bool | None:
        """Tells whether a micro-batch fits in memory; None between and beyond what was tried."""
        if self.largest_micro_batch is not None and micro_batch <= self.largest_micro_batch:
            return True
        unfit = self.smallest_unfit_micro_batch
        return False if unfit is not None and micro_batch >= unfit else None

    def micro_step_ms(self, micro_batch: int) -> float | None:
        """Returns the median micro-step, interpolated between sizes; None outside of them."""
        known = [p for p in self.points if p.micro_step_ms is not None]
        if not known or not known[0].micro_batch <= micro_batch <= known[-1].micro_batch:
            return None
        sizes = [p.micro_batch for p in known]
        times = [p.micro_step_ms.median for p in known if p.micro_step_ms is not None]
        return float(np.interp(micro_batch, sizes, times))


def curve(search: MicroBatchSearch | None) -> MicroBatchCurve | None:
    """Derives the curve of a search; None where there was none."""
    if search is None:
        return None
    trials = sorted(search.trials, key=lambda trial: trial.micro_batch)
    points = tuple(_point(trial, search.dp) for trial in trials)
    fitting = [point for point in points if point.fits]
    best = max((p.samples_per_s or 0.0 for p in fitting), default=0.0)
    good = [p for p in fitting if (p.samples_per_s or 0.0) >= (1 - NEAR_BEST_FRACTION) * best]
    slope, fixed = _line(fitting)
    return MicroBatchCurve(
        dp=search.dp,
        points=points,
        efficient_micro_batch=good[0].micro_batch if good else None,
        largest_micro_batch=fitting[-1].micro_batch if fitting else None,
        smallest_unfit_micro_batch=min((p.micro_batch for p in points if not p.fits), default=None),
        bytes_per_sample=slope,
        fixed_bytes=fixed,
        limit_bytes=search.limit_bytes,
        limit_source=search.limit_source,
        memory_source=search.memory_source,
        ended=search.ended,
    )


def _point(trial: MicroBatchTrial, dp: int) -> MicroBatchPoint:
    micro_step_ms = summarize(np.array(trial.micro_step_ns) / 1e6)
    return MicroBatchPoint(
        micro_batch=trial.micro_batch,
        outcome=str(trial.outcome),
        fits=trial.outcome is TrialOutcome.FITS,
        peak_bytes=trial.peak_bytes,
        micro_step_ms=micro_step_ms,
        samples_per_s=dp * trial.micro_batch / micro_step_ms.median * 1e3
        if micro_step_ms
        else None,
    )


def _line(fitting: Sequence[MicroBatchPoint]) -> tuple[float | None, float | None]:
    """Returns slope and intercept of peak memory against samples.

    Through two points far apart and not through all: at small sizes a CPU's allocator keeps tens
    of MB of what was freed, which would tilt the line.
    """
    known = [(p.micro_batch, p.peak_bytes) for p in fitting if p.peak_bytes is not None]
    if not known:
        return None, None
    large, high = known[-1]
    halves = [point for point in known if point[0] <= large / 2]
    if not halves:
        return None, None
    small, low = halves[-1]
    slope = (high - low) / (large - small)
    return slope, high - slope * large
