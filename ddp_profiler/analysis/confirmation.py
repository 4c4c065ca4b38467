"""A proposed change that was measured: predicted against real gain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_profiler.analysis import statistics
from ddp_profiler.schema import Confirmation


@dataclass(frozen=True)
class ConfirmedGain:
    """What a change was predicted to gain, and what it gained.

    Attributes:
        level: The id of the level.
        setting: What was changed.
        text: The change in words.
        predicted_gain_ms: By replay, for as many samples as a step of the level has.
        predicted_interval90_ms: 90 % of what it might have been.
        before_ms: Median of the blocks' mean steps without the change.
        after_ms: With it, for as many samples.
        gain_ms: Median over pairs of neighbouring blocks of before less after; None where it
            could not be measured.
        ci95_ms: Bootstrap interval over pairs.
        error_pct: Predicted over real gain, less 1, in per cent; None where the interval of the
            real gain holds 0.
        problem: Why it could not be measured; empty if it was.
    """

    level: str
    setting: str
    text: str
    predicted_gain_ms: float
    predicted_interval90_ms: tuple[float, float]
    before_ms: float | None
    after_ms: float | None
    gain_ms: float | None
    ci95_ms: tuple[float, float] | None
    error_pct: float | None
    problem: str


def confirmed(found: Confirmation | None) -> ConfirmedGain | None:
    """Derives the real gain from the blocks; None where nothing was confirmed.

    Args:
        found: The content of ``run.json``.
    """
    if found is None:
        return None
    before, after = np.array(found.before_ms), np.array(found.after_ms)
    gain, interval = None, None
    if len(before) and len(before) == len(after):
        pairs = before - after
        gain = float(np.median(pairs))
        interval = statistics.block_bootstrap(pairs, lambda v: np.median(v, axis=-1), block=1)
    return ConfirmedGain(
        level=found.level,
        setting=found.setting,
        text=found.text,
        predicted_gain_ms=found.predicted_gain_ms,
        predicted_interval90_ms=found.predicted_interval90_ms,
        before_ms=float(np.median(before)) if len(before) else None,
        after_ms=float(np.median(after)) if len(after) else None,
        gain_ms=gain,
        ci95_ms=interval,
        error_pct=(found.predicted_gain_ms / gain - 1) * 100
        if gain and interval and not interval[0] <= 0 <= interval[1]
        else None,
        problem=found.problem,
    )
