"""How much ranks differ in when they are ready to reduce: fixed differences and passing ones.

They grow differently with the number of ranks: a rank that is late at every step stays the one
that all wait for, while of passing lateness the largest of more draws is larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_profiler.analysis.parts import Floats
from ddp_profiler.analysis.stragglers import Arrivals

_LEAST_CALLS = 3
_QUANTILES = np.linspace(0, 1, 41)


@dataclass(frozen=True)
class Lateness:
    """When ranks are ready to reduce gradients, against each other.

    Attributes:
        fixed_ms: By how much later than the lower median rank each rank's local backward ends,
            median over the synchronising backward calls; negative if earlier. By global rank.
        passing_ms: What is left: 41 quantiles, from the least to the largest, of a rank's
            lateness in single calls, less its fixed part and less what all ranks have in common.
    """

    fixed_ms: Mapping[int, float]
    passing_ms: tuple[float, ...]


def lateness(ranks: Sequence[Arrivals]) -> Lateness | None:
    """Separates fixed and passing lateness of a level; None with one rank or too few calls.

    With n ranks, taking away what all have in common leaves a share (n-1)/n of the variance of
    what each has for itself; the quantiles are scaled back by that.

    Args:
        ranks: Each rank's steps, the same ones, on clocks that can be compared.
    """
    if len(ranks) < 2:
        return None
    keys = [rank.steps.backwards.key for rank in ranks]
    if len(keys[0]) < _LEAST_CALLS or any(not np.array_equal(keys[0], key) for key in keys[1:]):
        return None
    ends = np.array([rank.common(rank.steps.backwards.local_end) for rank in ranks])
    # [rank, call], from the first rank's: as floats, large times would lose their ns.
    late: Floats = (ends - ends[0]) / 1e6
    low = np.sort(late, axis=0)[(len(ranks) - 1) // 2]
    fixed = np.median(late - low, axis=1)
    rest = late - fixed[:, None]
    passing = (rest - rest.mean(axis=0)) * np.sqrt(len(ranks) / (len(ranks) - 1))
    return Lateness(
        fixed_ms={rank.steps.rank: float(value) for rank, value in zip(ranks, fixed, strict=True)},
        passing_ms=tuple(float(q) for q in np.quantile(passing, _QUANTILES)),
    )
