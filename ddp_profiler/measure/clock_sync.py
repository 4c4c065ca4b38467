"""How far the clocks of hosts are apart, bounded by message round trips.

A rank notes its time, sends a message to the reference rank, which notes its own time and
answers, and notes its time again. The answer was given between the two, whatever way the
messages took: with offset = own clock - reference clock,

    sent - answered <= offset <= received - answered

holds for certain, also where one direction is slower than the other (the bounds of Cristian,
"Probabilistic clock synchronization", 1989). Of several round trips the tightest one counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_profiler.measure import kernel
from ddp_profiler.measure.clock import Clock, monotonic_clock
from ddp_profiler.measure.session import Session
from ddp_profiler.schema import ClockReading, RankPlace
from ddp_profiler.workload.plant import PlantedClock

_ROUND_TRIPS = 24
_LONGEST_MEETING = timedelta(seconds=60)
"""For gloo beside NCCL, which may know no way between the hosts."""
_WARMUP = 4
"""The first messages open connections and wake the other side up."""


@dataclass(frozen=True)
class LocalClock:
    """The clocks that a rank reads.

    Attributes:
        monotonic: Clock of all marks, in ns.
        real: Time since 1970 in ns, as in traces and logs.
        domain: Equal for ranks that read the same monotonic clock.
    """

    monotonic: Clock
    real: Clock
    domain: str


def local_clock(planted: PlantedClock | None = None) -> LocalClock:
    """Returns this rank's clocks: the host's, or for tests the host's made wrong on purpose."""
    domain = kernel.shared("time")
    if planted is None:
        return LocalClock(monotonic_clock, time.time_ns, domain)
    offset_ns, real_ns = round(planted.offset_ms * 1e6), round(planted.real_ms * 1e6)
    parts_per_1e9 = round(planted.ppm * 1e3)

    def monotonic() -> int:
        now = monotonic_clock()
        # In whole numbers: a float has no ns left after some days.
        return now + offset_ns + now * parts_per_1e9 // 10**9

    return LocalClock(
        monotonic, lambda: time.time_ns() + real_ns, f"{domain} planted {planted.rank}"
    )


def leaders(places: Sequence[RankPlace]) -> tuple[int, ...]:
    """Returns the first rank of each clock domain; rank 0, whose clock is the reference, first."""
    first: dict[str, int] = {}
    for place in sorted(places, key=lambda place: place.rank):
        first.setdefault(place.clock_domain, place.rank)
    return tuple(first.values())


class ClockSync:
    """Compares the clocks of a run's hosts with that of rank 0.

    All ranks of the run make one, and the leaders call :meth:`compare` together. Where their
    hosts cannot talk over gloo, which gradients over NCCL do not need, all ranks agree to go on
    without: clocks are then not compared.

    Args:
        places: Where each rank runs.
        clock: This rank's clocks.
        session: This rank's part in the launch.

    Attributes:
        leaders: The first rank of each clock domain.
        problem: Why clocks cannot be compared, the same on all ranks; empty if they can.
    """

    def __init__(self, places: Sequence[RankPlace], clock: LocalClock, session: Session) -> None:
        self.leaders = leaders(places)
        self.problem = ""
        self._rank = session.rank
        self._clock = clock
        # Messages of the CPU, also where gradients travel over NCCL.
        self._group: Any = None
        if len(self.leaders) > 1:
            self.problem = session.side_problem or self._make_group(session, len(places))

    def _make_group(self, session: Session, world_size: int) -> str:
        """Makes the group, as all ranks must; returns why not all could."""
        timeout = min(session.timeout, _LONGEST_MEETING)
        own = ""
        try:
            self._group = dist.new_group(list(self.leaders), backend="gloo", timeout=timeout)
        except RuntimeError as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            own = f"gloo cannot connect rank {self._rank} to other hosts: {text}"
        session.publish(f"clock group/{self._rank}", own)
        if self._rank == 0:
            # Ranks that come to know of it late wait as long as the group's making.
            found = [session.learn(f"clock group/{rank}", str) for rank in range(world_size)]
            session.publish("clock groups", next((problem for problem in found if problem), ""))
        agreed: str = session.learn(
            "clock groups", str, patience_s=_LONGEST_MEETING.total_seconds()
        )
        return agreed

    @property
    def needed(self) -> bool:
        """Whether there is more than one clock, and they can be compared."""
        return len(self.leaders) > 1 and not self.problem

    def compare(self) -> ClockReading | None:
        """Exchanges messages with the reference rank.

        Returns:
            This rank's reading; None on the reference rank and on ranks that lead no domain.
        """
        if not self.needed or self._rank not in self.leaders:
            return None
        if self._rank == self.leaders[0]:
            for leader in self.leaders[1:]:
                self._answer(leader)
            return None
        return self._ask(self.leaders[0])

    def _answer(self, other: int) -> None:
        clock, request = self._clock, torch.zeros(1, dtype=torch.int64)
        for _ in range(_WARMUP + _ROUND_TRIPS):
            dist.recv(request, src=other, group=self._group)
            answer = torch.tensor([clock.monotonic(), clock.real()], dtype=torch.int64)
            dist.send(answer, dst=other, group=self._group)

    def _ask(self, reference: int) -> ClockReading:
        request = torch.zeros(1, dtype=torch.int64)
        answer = torch.zeros(2, dtype=torch.int64)

        def exchange() -> tuple[int, int]:
            dist.send(request, dst=reference, group=self._group)
            dist.recv(answer, src=reference, group=self._group)
            there, real = answer.tolist()
            return there, real

        return compared(self._rank, self._clock, exchange)


def compared(rank: int, clock: LocalClock, exchange: Callable[[], tuple[int, int]]) -> ClockReading:
    """Compares a clock with the reference by some round trips; the tightest counts.

    Args:
        rank: Whose clock it is.
        clock: Its clocks.
        exchange: Makes one round trip; returns what the reference's monotonic clock and its
            real time were on the way, in ns.
    """
    best: ClockReading | None = None
    for number in range(_WARMUP + _ROUND_TRIPS):
        real = clock.real()
        sent = clock.monotonic()
        answered, real_there = exchange()
        received = clock.monotonic()
        low, high = sent - answered, received - answered
        if number >= _WARMUP and (best is None or high - low < best.high_ns - best.low_ns):
            best = ClockReading(
                rank=rank,
                at_ns=(sent + received) // 2,
                low_ns=low,
                high_ns=high,
                real_offset_ns=real + (received - sent) // 2 - real_there,
            )
    assert best is not None
    return best
