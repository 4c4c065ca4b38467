"""Whether a rank is late more clearly than chance makes one of equal ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FEW_STEPS = 3
"""Steps from which on one can be compared with another."""

ERROR = 0.002
"""The chance that any of equal ranks is found late."""

ERROR_OF_FEW = 0.01
"""The same where collectives are counted, since there are too few steps."""


def later_on_average(behind_ns: Floats, rank: int) -> bool:
    """Returns whether a rank joins later than the others in step after step.

    One-sided t-test of its mean lateness in each step less that of the others; the chance that
    any of equal ranks passes is 0.2 %.

    Args:
        behind_ns: Mean time after the first to join, [step, rank]; NaN for none.
        rank: The column.
    """
    others = np.delete(behind_ns, rank, axis=1)
    both = ~np.isnan(behind_ns[:, rank]) & ~np.isnan(others).all(axis=1)
    if int(both.sum()) < FEW_STEPS:
        return False
    more = behind_ns[both, rank] - np.nanmean(others[both], axis=1)
    if float(more.mean()) <= 0:
        return False
    spread = float(more.std(ddof=1)) / float(np.sqrt(more.size))
    if not spread:
        return True
    # Imported here, as most traces need none of it.
    from scipy.special import stdtr

    p = float(stdtr(more.size - 1, -float(more.mean()) / spread))
    return bool(p <= ERROR / behind_ns.shape[1])


def more_often(times: int, of: int, share: float, ranks: int, error: float = ERROR) -> bool:
    """Returns whether a rank was the last in more of the steps or collectives than equal ones are.

    Binomial bound.

    Args:
        times: How often it was.
        of: Of how many.
        share: How often it would be by chance, 1/n of n ranks.
        ranks: Number of ranks, any of which may stand out by chance.
        error: The chance that any of equal ranks passes.
    """
    if times <= share * of:
        return False
    from scipy.special import bdtrc

    return float(bdtrc(times - 1, of, share)) <= error / ranks
