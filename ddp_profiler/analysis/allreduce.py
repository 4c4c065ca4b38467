"""AllReduce in isolation: time, algorithm and bus bandwidth by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_profiler.analysis.link import Link, ring_bound_ms
from ddp_profiler.analysis.parts import Columns, Floats
from ddp_profiler.schema import SpanKind, Variant


@dataclass(frozen=True)
class AllReduceSize:
    """AllReduces of one size, one at a time.

    An AllReduce's time is that of the rank that entered it last, the least over ranks:
    ranks that came earlier only waited.

    Attributes:
        bytes: Bytes reduced.
        count: AllReduces measured.
        time_ms: Median time.
        p10_ms: 10th percentile.
        p90_ms: 90th percentile.
        algbw_gb_per_s: bytes / time, in 10^9 bytes per s.
        busbw_gb_per_s: algbw x 2(n-1)/n: what a link carries in a ring; comparable over n.
        ring_bound_ms: The least time that the level's link allows a ring; None where the link's
            rate is not known.
    """

    bytes: int
    count: int
    time_ms: float
    p10_ms: float
    p90_ms: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    ring_bound_ms: float | None = None


@dataclass(frozen=True)
class AllReduceResult:
    """AllReduces in isolation at one level.

    Attributes:
        sizes: The sweep, by rising size.
        buckets: The model's buckets, in the order of reduction.
        buckets_total_ms: Sum of the buckets' times: what they take without any overlap.
        buckets_ring_bound_ms: Sum of their ring bounds; None where the link is not known.
        link: The link of the ring bounds; None where it was not measured.
    """

    sizes: tuple[AllReduceSize, ...]
    buckets: tuple[AllReduceSize, ...]
    buckets_total_ms: float | None
    buckets_ring_bound_ms: float | None = None
    link: Link | None = None


def isolated(
    ranks: Sequence[Columns], level: int, dp: int, link: Link | None = None
) -> AllReduceResult | None:
    """Summarizes a level's AllReduces in isolation; None where there are none.

    Args:
        ranks: The spans of the level's ranks by column.
        level: Index of the level.
        dp: Ranks of the level; bandwidths need two or more.
        link: The link of the ranks' ring; without it there are no ring bounds.
    """
    if dp < 2 or not ranks:
        return None
    sweep = _times(ranks, level, Variant.ALLREDUCE, by="bytes")
    buckets = _times(ranks, level, Variant.BUCKETS, by="index")
    if not sweep and not buckets:
        return None
    in_order = tuple(_size(nbytes, times, dp, link) for nbytes, times in buckets.values())
    return AllReduceResult(
        sizes=tuple(_size(nbytes, times, dp, link) for _, (nbytes, times) in sorted(sweep.items())),
        buckets=in_order,
        buckets_total_ms=sum(b.time_ms for b in in_order) if in_order else None,
        buckets_ring_bound_ms=ring_bound_ms(sum(b.bytes for b in in_order), dp, link)
        if in_order and link
        else None,
        link=link,
    )


def _times(
    ranks: Sequence[Columns], level: int, variant: Variant, by: str
) -> Mapping[int, tuple[int, Floats]]:
    """Returns bytes and times in ms of each AllReduce, grouped by a column."""
    lengths, keys, sizes = [], None, None
    for columns in ranks:
        chosen = (
            (columns["level"] == level)
            & (columns["variant"] == int(variant))
            & (columns["kind"] == int(SpanKind.ALLREDUCE))
        )
        lengths.append((columns["end_ns"][chosen] - columns["begin_ns"][chosen]) / 1e6)
        keys, sizes = columns[by][chosen], columns["bytes"][chosen]
    shortest = min(map(len, lengths))
    if keys is None or sizes is None or shortest == 0:
        return {}
    # All ranks do the same AllReduces in the same order; a cut record has fewer.
    least = np.min([values[:shortest] for values in lengths], axis=0)
    keys, sizes = keys[:shortest], sizes[:shortest]
    return {
        int(key): (int(sizes[keys == key][0]), least[keys == key])
        for key in np.unique(keys).tolist()
    }


def _size(nbytes: int, times_ms: Floats, dp: int, link: Link | None) -> AllReduceSize:
    p10, median, p90 = np.percentile(times_ms, [10, 50, 90])
    algbw = nbytes / (median / 1e3) / 1e9
    return AllReduceSize(
        bytes=nbytes,
        count=len(times_ms),
        time_ms=float(median),
        p10_ms=float(p10),
        p90_ms=float(p90),
        algbw_gb_per_s=float(algbw),
        busbw_gb_per_s=float(algbw * 2 * (dp - 1) / dp),
        ring_bound_ms=ring_bound_ms(nbytes, dp, link) if link else None,
    )
