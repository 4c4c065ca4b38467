"""Replays the communication of one synchronising backward: which bucket travels when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_profiler.predict.buckets import Bucket


@dataclass(frozen=True)
class Cost:
    """What one AllReduce takes when nothing else travels.

    Attributes:
        latency_ms: What does not depend on who else uses the link.
        wire_ms: What the link takes; AllReduces in flight at once share it.
    """

    latency_ms: float
    wire_ms: float


@dataclass(frozen=True)
class Replay:
    """The end of a synchronising backward, in ms after it was called.

    Attributes:
        begins: When each bucket was handed over to be reduced.
        ends: When its reduction had completed.
        local_end_ms: Local backward ended.
        last_end_ms: The last reduction had completed, or local backward ended if later.
        end_ms: Gradients were copied out of their buckets; backward returns.
        overlapped_wire_fraction: Share of the wire time before the end of local backward.
    """

    begins: tuple[float, ...]
    ends: tuple[float, ...]
    local_end_ms: float
    last_end_ms: float
    end_ms: float
    overlapped_wire_fraction: float

    @property
    def exposed_transfer_ms(self) -> float:
        """From the end of local backward until the last reduction has completed."""
        return self.last_end_ms - self.local_end_ms

    @property
    def exposed_copy_ms(self) -> float:
        """From then until backward returns."""
        return self.end_ms - self.last_end_ms

    @property
    def busy_ms(self) -> float:
        """Union of the in-flight intervals."""
        total, reached = 0.0, float("-inf")
        for begin, end in sorted(zip(self.begins, self.ends, strict=True)):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total

    @property
    def overlapped_ms(self) -> float:
        """The part of :attr:`busy_ms` before the end of local backward."""
        cut = self.local_end_ms
        inside = [(b, min(e, cut)) for b, e in zip(self.begins, self.ends, strict=True) if b < cut]
        total, reached = 0.0, float("-inf")
        for begin, end in sorted(inside):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total


def replay(
    buckets: Sequence[Bucket],
    costs: Sequence[Cost],
    local_end_ms: float,
    *,
    at_once: int,
    copy_ms: Sequence[float] | None = None,
) -> Replay:
    """Replays the reductions of one backward.

    Buckets are handed over in their order, each when its last gradient is ready and those
    before it have been handed over. ``at_once`` of them are in flight: under NCCL one, on its
    stream; under gloo two, on its two threads. Latencies run side by side; the link is shared
    evenly by those that are past theirs. When local backward has ended, DDP waits for the
    buckets in turn and copies each one's content to the gradients, so that the copying of early
    ones may hide behind the transfer of late ones.

    >>> two = [Bucket(1, ready_ms=10.0), Bucket(1, ready_ms=20.0)]
    >>> found = replay(two, [Cost(0, 15)] * 2, 22.0, at_once=1)
    >>> found.ends, found.exposed_transfer_ms
    ((25.0, 40.0), 18.0)
    >>> replay(two, [Cost(0, 15)] * 2, 22.0, at_once=2).ends
    (30.0, 40.0)

    Args:
        buckets: In the order of reduction.
        costs: Of each bucket.
        local_end_ms: When local backward ends, in ms after it was called.
        at_once: Reductions in flight at most.
        copy_ms: Copying each bucket's content to the gradients; none where None.
    """
    handed: list[float] = []
    for bucket in buckets:
        handed.append(max(bucket.ready_ms, handed[-1]) if handed else bucket.ready_ms)
    ends, overlapped, total = _transfer(handed, costs, local_end_ms, at_once)
    last = max([local_end_ms, *ends])
    now = local_end_ms
    for place, done in enumerate(ends):
        now = max(now, done) + (copy_ms[place] if copy_ms else 0.0)
    return Replay(
        begins=tuple(handed),
        ends=tuple(ends),
        local_end_ms=local_end_ms,
        last_end_ms=last,
        end_ms=max(now, last),
        overlapped_wire_fraction=overlapped / total if total else 0.0,
    )


@dataclass
class _Flight:
    place: int
    latency_ms: float
    wire_ms: float


def _transfer(
    handed: Sequence[float], costs: Sequence[Cost], cut_ms: float, at_once: int
) -> tuple[list[float], float, float]:
    """Returns when each bucket is through, the wire time before ``cut_ms``, and all of it."""
    ends = [0.0] * len(handed)
    flights: list[_Flight] = []
    now, following, overlapped = 0.0, 0, 0.0
    while following < len(handed) or flights:
        if not flights:
            now = max(now, handed[following])
        while following < len(handed) and len(flights) < at_once and handed[following] <= now:
            flights.append(
                _Flight(following, costs[following].latency_ms, costs[following].wire_ms)
            )
            following += 1
        sharing = [flight for flight in flights if flight.latency_ms <= 0]
        # Until something ends, or joins.
        span = min(
            [flight.latency_ms for flight in flights if flight.latency_ms > 0]
            + [flight.wire_ms * len(sharing) for flight in sharing]
        )
        if following < len(handed) and len(flights) < at_once:
            span = min(span, handed[following] - now)
        if now < cut_ms and sharing:
            overlapped += min(span, cut_ms - now)
        for flight in flights:
            if flight.latency_ms > 0:
                flight.latency_ms = _less(flight.latency_ms, span)
            else:
                flight.wire_ms = _less(flight.wire_ms, span / len(sharing))
        now += span
        for flight in [f for f in flights if f.latency_ms <= 0 and f.wire_ms <= 0]:
            ends[flight.place] = now
            flights.remove(flight)
    return ends, overlapped, sum(cost.wire_ms for cost in costs)


def _less(left: float, span: float) -> float:
    """Takes away; what rounding leaves counts as nothing."""
    rest = left - span
    return 0.0 if rest < 1e-12 * max(1.0, left) else rest
