"""The difference of two means of few launches, and what may be said of several at once."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ddp_profiler.analysis.statistics import Floats

Key = TypeVar("Key", bound=Hashable)
Interval = tuple[float, float]


@dataclass(frozen=True)
class Samples:
    """Two sides of one figure, with the standard errors of their means.

    Attributes:
        base_mean: Mean over the launches of one side.
        new_mean: Mean over those of the other.
        base_error: Standard error of ``base_mean``.
        new_error: Standard error of ``new_mean``.
        degrees: Degrees of freedom of the difference's error; inf where errors are given.
    """

    base_mean: float
    new_mean: float
    base_error: float
    new_error: float
    degrees: float

    @property
    def change(self) -> float:
        """The new mean less the base's."""
        return self.new_mean - self.base_mean

    @property
    def error(self) -> float:
        """Standard error of the change."""
        return math.hypot(self.base_error, self.new_error)

    def p_value(self) -> float:
        """Returns how often chance alone gives a change as large, of either sign."""
        if self.error == 0:
            return 1.0 if self.change == 0 else 0.0
        from scipy.special import ndtr, stdtr

        t = -abs(self.change) / self.error
        return 2 * float(ndtr(t) if math.isinf(self.degrees) else stdtr(self.degrees, t))

    def interval(self, alpha: float) -> Interval:
        """Returns the change's interval that misses the truth with a chance of ``alpha``."""
        half = self._quantile(1 - alpha / 2) * self.error
        return self.change - half, self.change + half

    def least_seen(self, alpha: float, power: float) -> float:
        """Returns the change that is told from 0 at ``alpha`` in a share ``power`` of trials.

        By the noncentral t: few launches do not know their own spread well, which costs more
        than the sum of two points of Student's t would say.
        """
        if math.isinf(self.degrees):
            return (self._quantile(1 - alpha / 2) + self._quantile(power)) * self.error
        from scipy.special import nctdtrinc

        limit = self._quantile(1 - alpha / 2)
        return float(nctdtrinc(self.degrees, 1 - power, limit)) * self.error

    def ratio_interval(self, alpha: float) -> Interval | None:
        """Returns the interval of new mean / base mean, by Fieller (1954) for independent sides.

        All ratios r for which new mean - r x base mean is not told from 0, so it holds 1 just
        where ``interval`` holds 0. None where the base's mean itself cannot be told from 0, and
        any ratio is possible.
        """
        squared = self._quantile(1 - alpha / 2) ** 2
        # The ratios r with a r^2 - 2 b r + c <= 0.
        a = self.base_mean**2 - squared * self.base_error**2
        b = self.base_mean * self.new_mean
        c = self.new_mean**2 - squared * self.new_error**2
        if self.base_mean <= 0 or a <= 0:
            return None
        root = math.sqrt(max(b**2 - a * c, 0.0))
        return (b - root) / a, (b + root) / a

    def _quantile(self, probability: float) -> float:
        from scipy.special import ndtri, stdtrit

        return float(
            ndtri(probability) if math.isinf(self.degrees) else stdtrit(self.degrees, probability)
        )


def samples(base: Floats, new: Floats, sd_fraction: float | None = None) -> Samples | None:
    """Returns two sides' means and errors; None where one launch a side leaves them unknown.

    With two or more launches on both sides the sides may vary differently (Welch 1947). A side
    with one launch is taken to vary as the other does.

    Args:
        base: A figure of each launch of one side.
        new: The same of the other.
        sd_fraction: Standard deviation / mean of launches of the same code, by assumption;
            used only where both sides have one launch.
    """
    base_mean, new_mean = float(base.mean()), float(new.mean())
    if len(base) > 1 and len(new) > 1:
        first, second = float(base.var(ddof=1)) / len(base), float(new.var(ddof=1)) / len(new)
        below = first**2 / (len(base) - 1) + second**2 / (len(new) - 1)
        degrees = (first + second) ** 2 / below if below > 0 else len(base) + len(new) - 2.0
        return Samples(base_mean, new_mean, first**0.5, second**0.5, degrees)
    longer = base if len(base) > len(new) else new
    if len(longer) > 1:
        sd = float(longer.std(ddof=1))
        errors = sd / len(base) ** 0.5, sd / len(new) ** 0.5
        return Samples(base_mean, new_mean, *errors, len(longer) - 1.0)
    if sd_fraction is not None:
        errors = sd_fraction * abs(base_mean), sd_fraction * abs(new_mean)
        return Samples(base_mean, new_mean, *errors, math.inf)
    return None


@dataclass(frozen=True)
class Judged:
    """What Holm's rule says of one of several questions.

    Attributes:
        adjusted: The smallest family-wise error rate at which it would be answered yes.
        alpha: The error rate that it was held to.
        told: Whether the answer is yes.
    """

    adjusted: float
    alpha: float
    told: bool


def holm(p_values: Mapping[Key, float], alpha: float) -> dict[Key, Judged]:
    """Returns which of several questions are answered yes, with one error rate for them all.

    Holm (1979): the smallest p-value is held to alpha / n, the next to alpha / (n - 1), and so
    on until one fails; whatever they have to do with each other.

    >>> [one.told for one in holm({"a": 0.001, "b": 0.03, "c": 0.02}, 0.05).values()]
    [True, True, True]
    >>> [one.told for one in holm({"a": 0.001, "b": 0.03, "c": 0.03}, 0.05).values()]
    [True, False, False]
    """
    result: dict[Key, Judged] = {}
    adjusted, left, failed_at = 0.0, len(p_values), 0
    for key in sorted(p_values, key=lambda one: p_values[one]):
        adjusted = max(adjusted, min(1.0, p_values[key] * left))
        if not failed_at and p_values[key] > alpha / left:
            failed_at = left
        result[key] = Judged(adjusted, alpha / (failed_at or left), not failed_at)
        left -= 1
    return {key: result[key] for key in p_values}


def over_launches(values: Sequence[float], confidence: float) -> Interval | None:
    """Returns Student's interval of a mean over launches; None below two."""
    array = np.array(values)
    if len(array) < 2:
        return None
    from scipy.special import stdtrit

    half = float(stdtrit(len(array) - 1, 0.5 + confidence / 2)) * float(array.std(ddof=1))
    mean = float(array.mean())
    return mean - half / len(array) ** 0.5, mean + half / len(array) ** 0.5
