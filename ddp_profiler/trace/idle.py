"""Why a GPU idles: because nothing had been launched, or although something had."""

from __future__ import annotations

import numpy as np

from ddp_profiler.trace.columns import Ints
from ddp_profiler.trace.model import Launches
from ddp_profiler.trace.split import RankSplit

_ENOUGH = 0.9
_BLOCK = 1 << 15


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
    if not len(gpu) or not launches.correlation.size:
        return None
    reach = int(gpu.begin_ns[0])
    gap_ns = told_ns = late_ns = 0
    # In order of the begin: a gap is where one begins after all before it have ended.
    for first in range(0, len(gpu), _BLOCK):
        block = slice(first, first + _BLOCK)
        begin = gpu.begin_ns[block]
        reached = np.maximum(np.maximum.accumulate(gpu.end_ns[block]), reach)
        since = np.concatenate(([reach], reached[:-1]))
        reach = int(reached[-1])
        ends = np.flatnonzero(begin > since)
        gap = begin[ends] - since[ends]
        gap_ns += int(gap.sum())
        launched, known = _launched(launches, gpu.correlation[block][ends])
        told_ns += int(gap[known].sum())
        late_ns += int(np.clip(launched - since[ends][known], 0, gap[known]).sum())
    if not told_ns or told_ns < _ENOUGH * gap_ns:
        return None
    return late_ns / told_ns


def _launched(
    launches: Launches, wanted: Ints
) -> tuple[Ints, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    """Returns when work was launched, of that whose launch is known, and which that is."""
    # Of one type, or numpy would convert all of them for each block.
    kind = launches.correlation.dtype
    known = (wanted > 0) & (wanted <= np.iinfo(kind).max)
    sought = np.where(known, wanted, 0).astype(kind)
    place = np.maximum(np.searchsorted(launches.correlation, sought, "right") - 1, 0)
    known &= launches.correlation[place] == sought
    return launches.begin_ns[place[known]], known
