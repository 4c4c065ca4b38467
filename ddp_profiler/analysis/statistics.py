"""Medians, percentiles and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_RESAMPLES = 2000
_CONFIDENCE = 0.95
_TAILS = ((1 - _CONFIDENCE) / 2 * 100, 100 - (1 - _CONFIDENCE) / 2 * 100)
_WEIGHTS_AT_ONCE = 2**20
_SEED = 20240501
"""Fixed, so that the same record always gives the same interval."""


@dataclass(frozen=True)
class Distribution:
    """Summary of a set of times in ms.

    Attributes:
        mean: Arithmetic mean.
        median: 50th percentile.
        p10: 10th percentile.
        p90: 90th percentile.
        ci95: Interval of the median, (low, high); None with fewer than 2 values.
    """

    mean: float
    median: float
    p10: float
    p90: float
    ci95: tuple[float, float] | None


def summarize(values: Floats, repetition: Ints | None = None) -> Distribution | None:
    """Summarizes times in ms, given in their order in time; None where there are none.

    With several repetitions their medians are the unit: Student's t interval of their
    mean, moved to the median of all values. Within one, the interval is a moving-block
    bootstrap (Kuensch 1989) of the median with blocks of n^(1/3) values, since
    neighbouring steps resemble each other; it covers the variation within one launch
    only, and launches of the same code differ by more.

    Args:
        values: Times in ms, shape [n].
        repetition: The repetition of each value, shape [n]; one repetition where None.
    """
    if len(values) == 0:
        return None
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    interval: tuple[float, float] | None
    ids = np.unique(repetition) if repetition is not None else np.empty(0)
    if len(ids) > 1:
        medians = np.array([np.median(values[repetition == i]) for i in ids])
        interval = repetition_interval(medians, float(median))
    else:
        interval = block_bootstrap(values, lambda resampled: np.median(resampled, axis=-1))
    return Distribution(
        mean=float(values.mean()),
        median=float(median),
        p10=float(p10),
        p90=float(p90),
        ci95=interval,
    )


def repetition_interval(medians: Floats, center: float) -> tuple[float, float]:
    """Returns Student's 95 % interval from the medians of 2 or more repetitions.

    Taken on logarithms, since times are positive and differ by factors.
    """
    half = _student(len(medians) - 1) * float(np.log(medians).std(ddof=1)) / len(medians) ** 0.5
    return center * float(np.exp(-half)), center * float(np.exp(half))


def _student(degrees: int) -> float:
    """Returns the two-sided 95 % point of Student's t."""
    # Imported here, and not all of scipy.stats, which takes a second and 80 MB to load.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + _CONFIDENCE / 2))


def mean_interval(values: Floats) -> tuple[float, float] | None:
    """Returns the 95 % interval of the mean of values that resemble their neighbours.

    Student's, of the means of blocks of n^(1/3) values (batch means; Law and Kelton). Of the
    mean it says what a block bootstrap does, at a fraction of its cost.

    Args:
        values: In their order in time, shape [n].

    Returns:
        (low, high); None below 2 values.
    """
    count = len(values)
    if count < 2:
        return None
    length = int(np.ceil(count ** (1 / 3)))
    whole = max(count // length, 2)
    means = np.array([block.mean() for block in np.array_split(values, whole)])
    half = _student(whole - 1) * float(means.std(ddof=1)) / whole**0.5
    mean = float(values.mean())
    return mean - half, mean + half


def difference(a: Distribution, b: Distribution) -> tuple[float, tuple[float, float] | None]:
    """Returns the median of ``a`` less that of ``b``, and its 95 % interval.

    The interval is put together from those of the two medians, taken as independent, so its
    unit is theirs (MOVER; Zou and Donner, Statistics in Medicine 27, 2008); None where one
    of them has none.

    >>> a, b = Distribution(9, 9, 8, 10, (6, 12)), Distribution(5, 5, 4, 6, (1, 9))
    >>> difference(a, b)
    (4, (-1.0, 9.0))
    """
    gap = a.median - b.median
    if a.ci95 is None or b.ci95 is None:
        return gap, None
    below = np.hypot(a.median - a.ci95[0], b.ci95[1] - b.median)
    above = np.hypot(a.ci95[1] - a.median, b.median - b.ci95[0])
    return gap, (float(gap - below), float(gap + above))


def ratio_interval(numerators: Floats, denominators: Floats) -> tuple[float, float] | None:
    """Returns the 95 % interval of a ratio of two means that cannot be negative.

    Fieller's (1954): all ratios r for which the mean of numerator - r x denominator does not
    differ from 0 by Student's t. So it holds for few observations too, and says by itself where
    the denominator cannot be told from 0: it has no upper end then.

    >>> ratio_interval(np.array([2.0, 2, 2]), np.array([1.0, 1, 1]))
    (2.0, 2.0)

    Args:
        numerators: Independent observations, shape [n].
        denominators: Those of the same places, shape [n].

    Returns:
        (low, high), neither below 0, high inf where there is no upper end; None where any ratio
        is possible, or below 2 observations.
    """
    count = len(numerators)
    if count < 2:
        return None
    top, bottom = float(numerators.mean()), float(denominators.mean())
    t_squared = _student(count - 1) ** 2
    covariance = np.cov(numerators, denominators) / count
    # The ratios r with a r^2 - 2 b r + c <= 0.
    a = bottom**2 - t_squared * float(covariance[1, 1])
    b = top * bottom - t_squared * float(covariance[0, 1])
    c = top**2 - t_squared * float(covariance[0, 0])
    if a > 0:
        if bottom < 0:
            return None
        half = np.sqrt(max(b**2 - a * c, 0.0))
        return max(float((b - half) / a), 0.0), max(float((b + half) / a), 0.0)
    if c <= 0 or top < 0:
        return None
    # Below the negative root or above the positive one, which is c over this.
    below = b + float(np.sqrt(b**2 - a * c))
    return (c / below, float("inf")) if below > 0 else None


def block_bootstrap(
    values: Floats, statistic: Callable[[Floats], Floats], block: int | None = None
) -> tuple[float, float] | None:
    """Returns a 95 % moving-block bootstrap interval of a statistic; None below 2 values.

    Args:
        values: Observations in their order in time, shape [n] or [n, column]; a block
            takes all columns along.
        statistic: Maps resampled values of shape [resample, n] (or [resample, n, column])
            to shape [resample].
        block: Length of a block; n^(1/3) rounded up where None.
    """
    count = len(values)
    if count < 2:
        return None
    starts, length = _starts(count, block)
    results = statistic(values[_picked(starts, length, count)])
    low, high = np.percentile(results, _TAILS)
    return float(low), float(high)


def mean_bootstrap(values: Floats) -> Floats | None:
    """Returns 95 % moving-block bootstrap intervals of the means of many series at once.

    The same resamples as :func:`block_bootstrap` makes of one series, so the same intervals but
    for rounding: how often each value was picked, times the values.

    Args:
        values: Observations in their order in time, shape [n, series].

    Returns:
        Low and high ends, shape [2, series]; None below 2 values.
    """
    count = len(values)
    if count < 2:
        return None
    starts, length = _starts(count, None)
    means = np.empty((_RESAMPLES, values.shape[1]))
    at_once = max(1, _WEIGHTS_AT_ONCE // count)
    for begin in range(0, _RESAMPLES, at_once):
        some = _picked(starts[begin : begin + at_once], length, count)
        own = some + np.arange(len(some))[:, None] * count
        weights = np.bincount(own.reshape(-1), minlength=len(some) * count)
        means[begin : begin + at_once] = weights.reshape(len(some), count) @ values / count
    intervals: Floats = np.percentile(means, _TAILS, axis=0)
    return intervals


def _starts(count: int, block: int | None) -> tuple[Ints, int]:
    """Returns where the blocks of each resample of ``count`` values begin, and their length."""
    length = min(count, block or int(np.ceil(count ** (1 / 3))))
    random = np.random.default_rng(_SEED)
    starts = random.integers(0, count - length + 1, size=(_RESAMPLES, -(-count // length)))
    return starts, length


def _picked(starts: Ints, length: int, count: int) -> Ints:
    """Returns which values each resample holds, [resample, n]."""
    picked: Ints = (starts[:, :, None] + np.arange(length)).reshape(len(starts), -1)[:, :count]
    return picked
