"""Why a GPU idles: because nothing had been launched, or although something had."""

from __future__ import annotations

import numpy as np

from ddp_profiler.trace.split import RankSplit
from ddp_profiler.trace.unions import union

_ENOUGH = 0.9


def launched_late_fraction(split: RankSplit) -> float | None:
    """Returns the share of a rank's idle time in which its next work had not been launched.

    Of every gap between GPU work, that is the part before the CPU called for what ends the gap.
    Near 1 the GPU waits for the CPU (launch bound, or for data); near 0 it waits for something
    that the work itself depends on.

    Args:
        split: The rank.

    Returns:
        The share; None where there are no gaps, or the launches of more than a tenth are not
        in the trace.
    """
    gpu, launches = split.trace.gpu, split.trace.launches
    busy = union(gpu.begin_ns, gpu.end_ns)
    if busy.begin_ns.size < 2 or not launches.correlation.size:
        return None
    since, until = busy.end_ns[:-1], busy.begin_ns[1:]
    ends = np.searchsorted(gpu.begin_ns, until)
    wanted = gpu.correlation[ends].astype(np.int64)
    numbers = launches.correlation.astype(np.int64)
    place = np.searchsorted(numbers, wanted, "right") - 1
    known = (place >= 0) & (wanted > 0)
    known &= numbers[np.maximum(place, 0)] == wanted
    gap = until - since
    told = int(gap[known].sum())
    if not told or told < _ENOUGH * gap.sum():
        return None
    launched = launches.begin_ns[place[known]]
    late = np.clip(launched - since[known], 0, gap[known])
    return float(late.sum() / told)
