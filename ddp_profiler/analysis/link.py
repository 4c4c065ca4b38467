"""The link that bounds a ring, and the bound that it sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ddp_profiler.schema import LinkStreams, RankPlace


@dataclass(frozen=True)
class Link:
    """A link of a level's ring.

    Attributes:
        name: Such as ``node0-node1`` or ``within node0``; numbers are indexes of nodes.
        kind: ``between_nodes`` or ``within_node``.
        gbit_per_s: Its rate, one way, in 10^9 bit per s.
        source: ``measured`` (a stream between two ranks) or ``declared`` (the user's word).
        ranks: The two ranks at its ends.
    """

    name: str
    kind: str
    gbit_per_s: float
    source: str
    ranks: tuple[int, int]


def link_of(
    streams: LinkStreams | None,
    places: Mapping[int, RankPlace],
    declared_gbit_per_s: float | None = None,
) -> Link | None:
    """Derives a link's rate from its streams: bytes over their median time; None without any.

    Args:
        streams: What was measured.
        places: Where each rank ran.
        declared_gbit_per_s: Rate between nodes by the user's word; goes before the measured one.
    """
    if streams is None:
        return None
    ends = (streams.sender, streams.receiver)
    first, second = (places[rank].node if rank in places else 0 for rank in ends)
    between = first != second
    name = f"node{first}-node{second}" if between else f"within node{first}"
    kind = "between_nodes" if between else "within_node"
    if between and declared_gbit_per_s is not None:
        return Link(name, kind, declared_gbit_per_s, "declared", ends)
    times = [elapsed for elapsed in streams.elapsed_ns if elapsed > 0]
    if not times or streams.nbytes <= 0:
        return None
    return Link(name, kind, streams.nbytes * 8 / float(np.median(times)), "measured", ends)


def ring_bound_ms(nbytes: int, dp: int, link: Link) -> float:
    """Returns the least time of a ring AllReduce in ms: 2(n-1)/n x S / B.

    Each rank sends 2(n-1) pieces of S/n bytes; the ring is as fast as its slowest link.
    It neglects latency and the sums. Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009).

    Args:
        nbytes: S, bytes reduced.
        dp: n, ranks of the ring.
        link: Gives B.
    """
    return 2 * (dp - 1) / dp * nbytes * 8 / (link.gbit_per_s * 1e9) * 1e3
