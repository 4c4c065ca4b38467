"""Tells times of all ranks on one clock, with an uncertainty that covers the truth.

The record holds, for each host with a clock of its own, bounds of its offset from rank 0's
clock at some moments. Between two moments its offset is taken to lie between the straight
lines through the lower and through the upper bounds, opened by `RATE_CHANGE` for each ns to
the nearer moment; before the first and after the last they open by `MAX_DRIFT`. The bounds
at the moments are certain, the two allowances are assumptions about how clocks are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_profiler.analysis.parts import Floats, Ints
from ddp_profiler.schema import ClockReading, RunInfo

MAX_DRIFT = 1000e-6
"""By how much two hosts' clocks drift apart at most: each slewed by NTP's usual limit of
500 ppm, in opposite directions."""
RATE_CHANGE = 20e-6
"""By how much a rate may differ, within minutes, from the mean rate between two comparisons:
corrections of a clock that NTP keeps, and changes of its temperature, are smaller."""

_NS_PER_MS = 1e6


@dataclass(frozen=True)
class HostClock:
    """A host's monotonic clock against rank 0's, shape [reading] each; one reading or more.

    Attributes:
        at: When, in ns on this clock.
        low: Lower bound of own clock - rank 0's clock, in ns.
        high: Upper bound of it, in ns.
    """

    at: Ints
    low: Ints
    high: Ints

    def bounds(self, times: Ints) -> tuple[Floats, Floats]:
        """Returns lower and upper bound of the offset in ns at times on this clock."""
        # Counted from the first reading: as floats, large times would lose their ns.
        at, now = (self.at - self.at[0]).astype(float), (times - self.at[0]).astype(float)
        opened = MAX_DRIFT * (np.maximum(at[0] - now, 0) + np.maximum(now - at[-1], 0))
        after = np.searchsorted(at, now)
        inside = (after > 0) & (after < len(at))
        before_ns = now[inside] - at[after[inside] - 1]
        opened[inside] = RATE_CHANGE * np.minimum(before_ns, at[after[inside]] - now[inside])
        low = np.interp(now, at, (self.low - self.low[0]).astype(float)) - opened
        high = np.interp(now, at, (self.high - self.low[0]).astype(float)) + opened
        return low, high

    def to_reference(self, times: Ints) -> Ints:
        """Returns times on this clock as times on rank 0's: less the middle of the bounds."""
        low, high = self.bounds(times)
        middle: Ints = np.round((low + high) / 2).astype(np.int64)
        reference: Ints = times - self.low[0] - middle
        return reference

    def uncertainty_ns(self, times: Ints) -> float:
        """Returns the largest error of :meth:`to_reference` at these times, in ns."""
        if len(times) == 0:
            return 0.0
        low, high = self.bounds(times)
        return float((high - low).max() / 2)


@dataclass(frozen=True)
class ClockOffset:
    """A host's clock against rank 0's, for the report.

    Attributes:
        rank: The first rank that reads it.
        node: That rank's node.
        offset_ms: Own clock - rank 0's, at the first comparison.
        uncertainty_ms: The true offset lies within offset_ms +- this.
        drift_ppm: By how many millionths it runs fast; None with a single comparison.
        drift_uncertainty_ppm: The true rate lies within drift_ppm +- this.
        real_time_offset_ms: Real time there less that of rank 0's host, at the first
            comparison: by so much timestamps of logs and traces are apart.
    """

    rank: int
    node: int
    offset_ms: float
    uncertainty_ms: float
    drift_ppm: float | None
    drift_uncertainty_ppm: float | None
    real_time_offset_ms: float


class CommonClock:
    """Rank 0's clock, on which times of all ranks are told.

    Args:
        info: Gives the ranks' clock domains and the comparisons of clocks.
    """

    def __init__(self, info: RunInfo) -> None:
        self._domains = {place.rank: place.clock_domain for place in info.ranks}
        self._clocks: dict[str, HostClock | None] = {}
        if 0 in self._domains:
            self._clocks[self._domains[0]] = None
        for rank, readings in _by_rank(info.clocks).items():
            if rank in self._domains and self._domains[rank] not in self._clocks:
                self._clocks[self._domains[rank]] = HostClock(
                    at=np.array([r.at_ns for r in readings], dtype=np.int64),
                    low=np.array([r.low_ns for r in readings], dtype=np.int64),
                    high=np.array([r.high_ns for r in readings], dtype=np.int64),
                )

    def compares(self, ranks: Sequence[int]) -> bool:
        """Tells whether times of these ranks can be told on one clock."""
        domains = self._of(ranks)
        return len(domains) <= 1 or domains <= set(self._clocks)

    def common(self, rank: int) -> Callable[[Ints], Ints]:
        """Returns what tells times of a rank, in ns, on the common clock.

        For moments only: lengths of one rank are right on its own clock.
        """
        clock = self._clocks.get(self._domains.get(rank, ""))
        return _unchanged if clock is None else clock.to_reference

    def uncertainty_ns(self, rank: int, times: Ints) -> float:
        """Returns by how much a rank's times on the common clock may be off, in ns.

        Args:
            rank: Global rank.
            times: In ns on its own clock.
        """
        clock = self._clocks.get(self._domains.get(rank, ""))
        return 0.0 if clock is None else clock.uncertainty_ns(times)

    def uncertainty_ms(self, times: Mapping[int, Ints]) -> float:
        """Returns by how much times of two ranks may be apart that are told as equal, in ms.

        Args:
            times: By rank, in ns on its own clock.
        """
        return self.joint_uncertainty_ms(
            {rank: self.uncertainty_ns(rank, values) for rank, values in times.items()}
        )

    def joint_uncertainty_ms(self, by_rank_ns: Mapping[int, float]) -> float:
        """Returns what :meth:`uncertainty_ms` does, from what is known of each rank.

        That of the two clocks which are known least; 0 where all ranks read one clock.

        Args:
            by_rank_ns: What :meth:`uncertainty_ns` says of each rank.
        """
        if len(self._of(list(by_rank_ns))) <= 1:
            return 0.0
        worst: dict[str, float] = {}
        for rank, found in by_rank_ns.items():
            domain = self._domains.get(rank, "")
            worst[domain] = max(worst.get(domain, 0.0), found)
        return sum(sorted(worst.values())[-2:]) / _NS_PER_MS

    def _of(self, ranks: Sequence[int]) -> set[str]:
        return {self._domains[rank] for rank in ranks if rank in self._domains}


def _unchanged(times: Ints) -> Ints:
    return times


def offsets(info: RunInfo) -> tuple[ClockOffset, ...]:
    """Returns how far each compared clock was from rank 0's, and how fast it ran."""
    nodes = {place.rank: place.node for place in info.ranks}
    return tuple(
        _offset(rank, nodes.get(rank, 0), readings)
        for rank, readings in sorted(_by_rank(info.clocks).items())
    )


def _offset(rank: int, node: int, readings: Sequence[ClockReading]) -> ClockOffset:
    first, last = readings[0], readings[-1]
    passed = last.at_ns - first.at_ns
    # The slowest and the fastest line between the bounds at both ends.
    slowest, fastest = last.low_ns - first.high_ns, last.high_ns - first.low_ns
    return ClockOffset(
        rank=rank,
        node=node,
        offset_ms=(first.low_ns + first.high_ns) / 2 / _NS_PER_MS,
        uncertainty_ms=(first.high_ns - first.low_ns) / 2 / _NS_PER_MS,
        drift_ppm=(slowest + fastest) / 2 / passed * 1e6 if passed > 0 else None,
        drift_uncertainty_ppm=(fastest - slowest) / 2 / passed * 1e6 if passed > 0 else None,
        real_time_offset_ms=first.real_offset_ns / _NS_PER_MS,
    )


def _by_rank(readings: Sequence[ClockReading]) -> Mapping[int, list[ClockReading]]:
    """Groups readings by rank, each in order of time and each moment once."""
    found: dict[int, dict[int, ClockReading]] = {}
    for reading in readings:
        found.setdefault(reading.rank, {})[reading.at_ns] = reading
    return {rank: [known[at] for at in sorted(known)] for rank, known in found.items()}
