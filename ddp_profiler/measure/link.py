"""The rate of the link that a level's ring depends on: a stream between two neighbouring ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ddp_profiler.measure.clock import Timeline
from ddp_profiler.schema import LinkStreams

_STREAMS = 3
_LEAD_S = 0.08
_COUNTED_S = 0.22
"""Time of one stream: with three of them and the search for the size about 1 s in all."""
_LONG_ENOUGH_S = 0.02
"""A message that takes this long tells the rate well enough to choose sizes by."""
_FIRST_BYTES = 64 * 1024
_LEAST_BYTES = 512 * 1024
"""More than shapers and socket buffers let through at once."""
_MOST_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}


def neighbours(ranks: Sequence[int], nodes: Mapping[int, int]) -> tuple[int, int]:
    """Returns two neighbours of a ring as (sender, receiver): on different nodes where it has such.

    >>> neighbours((0, 1, 2, 3), {0: 0, 1: 0, 2: 1, 3: 1}), neighbours((4, 5), {4: 1, 5: 1})
    ((1, 2), (4, 5))

    Args:
        ranks: Two or more global ranks in the order of the ring.
        nodes: The node of each rank.
    """
    for rank, following in pairwise(ranks):
        if nodes[rank] != nodes[following]:
            return rank, following
    return ranks[0], ranks[1]


class LinkProbe:
    """Streams from one rank of a group to its neighbour; all ranks of the group call it alike.

    A stream is two messages back to back: the first takes up what a link lets through at
    once (a shaper's burst, buffers) and the start of the transport, the second is timed at
    the receiver, from the arrival of the first to its own. So neither latency nor burst is
    part of the rate.

    Args:
        group: The level's process group.
        ranks: Its global ranks, in the order of the ring.
        pair: Sender and receiver among them.
        rank: This process's global rank.
        device: Device of the rank.
        timeline: Tells when a message has arrived, on the device's stream where it is a GPU.
    """

    def __init__(
        self,
        group: Any,
        ranks: Sequence[int],
        pair: tuple[int, int],
        rank: int,
        device: torch.device,
        timeline: Timeline,
    ) -> None:
        self._group = group
        self._ranks = tuple(ranks)
        self._pair = pair
        self._rank = rank
        # Gloo's messages between two ranks take host memory only.
        self._device = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        self._timeline = timeline

    def measure(self) -> LinkStreams:
        """Measures some streams; the same result on every rank of the group.

        Takes about 1 s, more only where even the smallest messages take longer than that.
        """
        sender, receiver = self._pair
        elapsed = [0] * _STREAMS
        sizes = (_FIRST_BYTES, _FIRST_BYTES)
        if self._rank in self._pair:
            sizes = self._sizes()
            lead, counted = (self._buffer(nbytes) for nbytes in sizes)
            elapsed = [self._stream(lead, counted) for _ in range(_STREAMS)]
        # Only the pair knows the sizes, and only the receiver the times.
        found = torch.tensor([*sizes, *elapsed], dtype=torch.int64, device=self._device)
        dist.broadcast(found, src=receiver, group=self._group)
        _, nbytes, *times = found.tolist()
        return LinkStreams(sender, receiver, nbytes, tuple(times))

    def _sizes(self) -> tuple[int, int]:
        """Returns bytes of the first and of the timed message, the same on both ranks."""
        most = _MOST_BYTES[self._device.type]
        # The first message between two ranks also opens their connection.
        self._message(_FIRST_BYTES)
        nbytes, seconds = _FIRST_BYTES, self._message(_FIRST_BYTES)
        while seconds < _LONG_ENOUGH_S and nbytes < most:
            nbytes *= 4
            seconds = self._message(nbytes)
        rate = nbytes / max(seconds, 1e-9)
        lead, counted = (
            min(most, max(_LEAST_BYTES, int(rate * length) // 4096 * 4096))
            for length in (_LEAD_S, _COUNTED_S)
        )
        return lead, counted

    def _message(self, nbytes: int) -> float:
        """Sends one message and returns its time in s with an answer, the receiver's word."""
        buffer = self._buffer(nbytes)
        answer = torch.zeros(1, dtype=torch.float64, device=self._device)
        sender, receiver = self._pair
        begin = self._timeline.mark()
        if self._rank == sender:
            dist.send(buffer, receiver, group=self._group)
            dist.recv(answer, receiver, group=self._group)
            return float(answer)
        dist.recv(buffer, sender, group=self._group)
        answer.fill_(self._elapsed_ns(begin, self._timeline.mark()) / 1e9)
        dist.send(answer, sender, group=self._group)
        return float(answer)

    def _stream(self, lead: torch.Tensor, counted: torch.Tensor) -> int:
        """Sends both messages at once; returns the time of the second in ns at the receiver."""
        sender, receiver = self._pair
        if self._rank == sender:
            works = [dist.isend(part, receiver, group=self._group) for part in (lead, counted)]
            for work in works:
                _wait(work)
            return 0
        works = [dist.irecv(part, sender, group=self._group) for part in (lead, counted)]
        marks = []
        for work in works:
            _wait(work)
            marks.append(self._timeline.mark())
        return self._elapsed_ns(*marks)

    def _elapsed_ns(self, begin: Any, end: Any) -> int:
        """Returns the time between two marks in ns; waits for the device to reach them."""
        elapsed = self._timeline.time_ns(end) - self._timeline.time_ns(begin)
        self._timeline.release([begin, end])
        return elapsed

    def _buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)


def _wait(work: Any) -> None:
    """Waits for a message; None is what torch returns to ranks outside the group."""
    if work is not None:
        work.wait()
