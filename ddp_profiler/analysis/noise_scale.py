"""The gradient noise scale of a level: up to which global batch a larger one pays.

After McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training"
(arXiv:1812.06162, 2018), appendix A.1, from the squared norms of a step's gradient on each rank
(b samples) and of that of all ranks (B samples):

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)
    tr(S) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)
    noise scale = mean of tr(S) over steps / mean of |G|^2 over steps

S is the covariance of one sample's gradient. Both estimates are unbiased where the samples are
independent draws; their ratio in a single step is not, so means are taken first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_profiler.analysis.parts import NULL, Columns, Floats, Ints, step_keys
from ddp_profiler.analysis.statistics import ratio_interval
from ddp_profiler.schema import LevelFacts, LevelSettings, SpanKind

_MOST_NORM_SQ = 1e100
"""More than 10^20 parameters of float32 can have: a damaged record. NaN and infinity are above."""
_LEAST_STEPS = 2
_SOURCE = "gradient_collectives"
_OWN_SOURCES = ("process_group", "comm_hook", None)
"""Mechanisms with which DDP reduces as it does by itself; another is a hook of the user's."""


@dataclass(frozen=True)
class NoiseScale:
    """Global batch above which a larger one buys ever less progress a step.

    Attributes:
        samples: The noise scale in samples; None where only a bound is known, or nothing.
        ci95: Its 95 % interval, the upper end None where the gradient cannot be told from 0
            beside the noise; None where nothing can be said.
        reason: Why ``samples`` is None.
        gradient_norm_sq: |G|^2, estimated; negative at times where the noise is much larger.
        noise_trace: tr(S), estimated: the variance of one sample's gradient, all elements
            together. Both in the square of the loss's unit over the parameters'.
        steps: Steps that both are means over.
        small_batch: Samples in the gradient of a rank, b.
        large_batch: Samples in that of all ranks, B; the global batch.
        doubling_gain: How many of these steps one with twice the global batch is worth, between
            1 and 2: 2 (B + noise scale) / (2 B + noise scale).
        doubling_gain_ci95: Its interval, from that of the noise scale.
    """

    samples: float | None
    ci95: tuple[float, float | None] | None
    reason: str | None
    gradient_norm_sq: float | None = None
    noise_trace: float | None = None
    steps: int = 0
    small_batch: int | None = None
    large_batch: int | None = None
    doubling_gain: float | None = None
    doubling_gain_ci95: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Norms:
    """What one rank recorded of the steps that can be used, shape [step] each, by their keys."""

    key: Ints
    local: Floats
    reduced: Floats
    small: Ints
    large: Ints


def noise_scale(
    columns: Mapping[int, Columns], index: int, level: LevelSettings, facts: LevelFacts | None
) -> NoiseScale:
    """Returns the noise scale of a level, or why it cannot be told.

    Args:
        columns: Spans by rank and column; some of the level's ranks are enough.
        index: Index of the level.
        level: Its settings.
        facts: What the worker found out.
    """
    if level.dp * level.accumulation == 1:
        return _unknown("dp is 1 and a step has one micro-step: two batch sizes are needed")
    spans = [_points(rank, index) for rank in columns.values()]
    if not any(len(rank["kind"]) for rank in spans):
        return _unknown(_why_no_norms(level, facts))
    if facts is not None and any(ddp.group_size != level.dp for ddp in facts.ddps):
        return _unknown("a DDP reduces over some of the ranks")
    if any(len(np.unique(rank["index"])) > 1 for rank in spans):
        return _unknown("several DDPs are trained, each with a gradient of its own")
    found = [
        _norms(rank, _samples(columns_of, index), level.dp)
        for rank, columns_of in zip(spans, columns.values(), strict=True)
    ]
    if not any(len(rank.key) for rank in found):
        return _unknown(
            "no step has one reduction and a known number of samples: with several reductions, "
            "what is handed over is no longer one rank's gradient alone"
        )
    return _estimate(found)


def estimate(
    small_norm_sq: Floats, large_norm_sq: Floats, small_batch: int, large_batch: int
) -> NoiseScale:
    """Returns the noise scale from squared norms of gradients of two batch sizes.

    Args:
        small_norm_sq: Of the mean gradient over ``small_batch`` samples, the mean over ranks,
            shape [step].
        large_norm_sq: Of that over ``large_batch`` samples, shape [step].
        small_batch: Samples, b.
        large_batch: Samples, B; more than b.
    """
    steps = len(small_norm_sq)
    if steps < _LEAST_STEPS:
        return _unknown(f"{steps} step has the norms; an interval needs {_LEAST_STEPS}")
    signal = (large_batch * large_norm_sq - small_batch * small_norm_sq) / (
        large_batch - small_batch
    )
    noise = (small_norm_sq - large_norm_sq) / (1 / small_batch - 1 / large_batch)
    interval = ratio_interval(noise, signal)
    samples: float | None = None
    ci95: tuple[float, float | None] | None = None
    reason: str | None = None
    if not small_norm_sq.any():
        reason = "the gradients are 0"
    elif interval is None:
        reason = f"neither gradient nor noise can be told from 0 in {steps} steps"
    elif np.isinf(interval[1]):
        ci95 = interval[0], None
        reason = f"beside the noise the gradient cannot be told from 0 in {steps} steps"
    else:
        ci95 = interval
        samples = max(float(noise.mean() / signal.mean()), 0.0)
    return NoiseScale(
        samples=samples,
        ci95=ci95,
        reason=reason,
        gradient_norm_sq=float(signal.mean()),
        noise_trace=float(noise.mean()),
        steps=steps,
        small_batch=small_batch,
        large_batch=large_batch,
        doubling_gain=None if samples is None else _doubling_gain(large_batch, samples),
        doubling_gain_ci95=None
        if ci95 is None
        else (_doubling_gain(large_batch, ci95[0]), _doubling_gain(large_batch, ci95[1])),
    )


def _doubling_gain(batch: int, scale: float | None) -> float:
    """Returns what a step of twice the batch is worth; of a scale without bound if None.

    A step's progress is in proportion to 1 / (1 + noise scale / batch).
    """
    return 2.0 if scale is None else 2 * (batch + scale) / (2 * batch + scale)


def _unknown(reason: str) -> NoiseScale:
    return NoiseScale(None, None, reason)


def _why_no_norms(level: LevelSettings, facts: LevelFacts | None) -> str:
    if level.dp == 1 and level.micro_batch == 0:
        return "dp is 1: two batch sizes are needed"
    if facts is not None and facts.sources.get(_SOURCE) not in _OWN_SOURCES:
        return "a communication hook reduces the gradients, whose norms are not seen"
    return "the record holds no norms of gradients"


def _points(columns: Columns, index: int) -> dict[str, Ints]:
    chosen = (columns["level"] == index) & np.isin(
        columns["kind"], (SpanKind.LOCAL_GRADIENT_NORM, SpanKind.REDUCED_GRADIENT_NORM)
    )
    return {name: values[chosen].astype(np.int64) for name, values in columns.items()}


def _samples(columns: Columns, index: int) -> dict[int, int]:
    """Returns the samples of a script's steps on one rank, by key; 0 where they were not seen."""
    chosen = (columns["level"] == index) & (columns["kind"] == SpanKind.STEP)
    keys = step_keys(
        columns["repetition"][chosen].astype(np.int64), columns["step"][chosen].astype(np.int64)
    )
    samples = columns["samples"][chosen]
    return {
        int(key): 0 if number == NULL else int(number)
        for key, number in zip(keys, samples, strict=True)
    }


def _norms(spans: Columns, step_samples: Mapping[int, int], dp: int) -> _Norms:
    """Returns a rank's steps with one norm of each kind, both finite, and known samples."""
    keys = step_keys(spans["repetition"], spans["step"])
    rows = []
    for key in np.unique(keys):
        local, reduced = (
            np.flatnonzero((keys == key) & (spans["kind"] == kind))
            for kind in (SpanKind.LOCAL_GRADIENT_NORM, SpanKind.REDUCED_GRADIENT_NORM)
        )
        if len(local) != 1 or len(reduced) != 1:
            continue
        small, large = (int(spans["samples"][row[0]]) for row in (local, reduced))
        if small == NULL or large == NULL:
            small = step_samples.get(int(key), 0)
            large = small * dp
        rows.append((int(key), local[0], reduced[0], small, large))
    values = np.ascontiguousarray(spans["value"]).view(np.float64)
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    norms = _Norms(table[:, 0], values[table[:, 1]], values[table[:, 2]], table[:, 3], table[:, 4])
    with np.errstate(invalid="ignore"):
        usable = np.maximum(norms.local, norms.reduced) < _MOST_NORM_SQ
    usable &= norms.large > norms.small
    return _only(norms, usable & (norms.small > 0))


def _only(norms: _Norms, kept: npt.NDArray[np.bool_]) -> _Norms:
    return _Norms(
        norms.key[kept],
        norms.local[kept],
        norms.reduced[kept],
        norms.small[kept],
        norms.large[kept],
    )


def _estimate(ranks: list[_Norms]) -> NoiseScale:
    """Returns the estimate from the steps that all ranks have, with their usual batch."""
    shared = ranks[0].key
    for rank in ranks[1:]:
        shared = np.intersect1d(shared, rank.key)
    ranks = [_only(rank, np.isin(rank.key, shared)) for rank in ranks]
    batches = [tuple(zip(rank.small.tolist(), rank.large.tolist(), strict=True)) for rank in ranks]
    alike = [len(set(of_step)) == 1 for of_step in zip(*batches, strict=True)]
    if not any(alike):
        return _unknown("ranks have different numbers of samples in a step")
    counted = Counter(batch for batch, same in zip(batches[0], alike, strict=True) if same)
    usual = counted.most_common(1)[0][0]
    kept = np.array(
        [same and batch == usual for batch, same in zip(batches[0], alike, strict=True)]
    )
    return estimate(
        np.mean([rank.local[kept] for rank in ranks], axis=0), ranks[0].reduced[kept], *usual
    )
