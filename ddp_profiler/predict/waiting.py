"""How long ranks wait for the last one, at numbers of ranks that were not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ddp_profiler.analysis.lateness import Lateness

_DRAWS = 4000
_MOST_AT_ONCE = 2_000_000
_SEED = 20240501
_SIGNIFICANT_FRACTION = 0.02
"""A fixed difference below this share of the step is not told from none."""


def expected_wait_ms(
    passing_ms: Sequence[float], fixed_ms: Mapping[int, float], ranks: Sequence[int]
) -> float:
    """Returns what a rank waits for the last one in the mean: E[max(f + e)] - mean(f).

    f are the fixed differences, 0 for ranks that were not measured; e are passing ones, drawn
    for each rank by itself from what was seen, so that their largest grows with the number of
    ranks, up to the largest that was ever seen.

    Args:
        passing_ms: Quantiles of passing lateness, at equal distances from 0 to 1.
        fixed_ms: By global rank.
        ranks: The ranks that take part.
    """
    fixed = np.array([fixed_ms.get(rank, 0.0) for rank in ranks])
    if len(ranks) < 2:
        return 0.0
    quantiles = np.asarray(passing_ms, dtype=float)
    at = np.linspace(0, 1, len(quantiles))
    random = np.random.default_rng(_SEED)
    rows = max(1, min(_DRAWS, _MOST_AT_ONCE // len(ranks)))
    largest: list[npt.NDArray[np.float64]] = []
    for _ in range(-(-_DRAWS // rows)):
        drawn = np.interp(random.random((rows, len(ranks))), at, quantiles)
        largest.append((drawn + fixed).max(axis=1) - drawn.mean(axis=1))
    return max(0.0, float(np.concatenate(largest).mean()) - float(fixed.mean()))


def significant(lateness: Lateness | None, step_ms: float) -> dict[int, float]:
    """Returns the ranks that are late at every step, with by how much in ms.

    Args:
        lateness: Of a level.
        step_ms: Its step; a difference below 2 % of it is not told from none.
    """
    if lateness is None:
        return {}
    spread = float(np.subtract(*np.quantile(lateness.passing_ms, [0.9, 0.1])))
    least = max(_SIGNIFICANT_FRACTION * step_ms, spread)
    return {rank: late for rank, late in lateness.fixed_ms.items() if late > least}
