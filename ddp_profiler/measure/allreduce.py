"""AllReduce in isolation, on the ranks that train: what the link gives when nothing else runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_profiler.measure.marks import Recorder
from ddp_profiler.schema import SpanKind

SWEEP_BYTES = tuple(4096 * 4**k for k in range(8))
"""4 KiB to 64 MiB, in steps of 4."""

_MIN_REPETITIONS = 5
"""Now and then one on a slow link takes 5 % longer: the median of fewer would follow it."""
_MAX_REPETITIONS = 20
_BUDGET_S = 0.5
"""Time for one size, or all buckets; what takes longer is measured the least number of times."""
_SKIP_ABOVE_S = 4.0
"""Sizes at which a single AllReduce would take longer are left out."""


class IsolatedAllReduce:
    """Times AllReduces one at a time on one group; all its ranks call each method alike.

    Args:
        recorder: Takes a span for each AllReduce.
        group: The level's process group.
        device: Device of the buffers.
        beat: Called between sizes, and between rounds of buckets.
    """

    def __init__(
        self,
        recorder: Recorder,
        group: Any,
        device: torch.device,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._beat = beat
        self._recorder = recorder
        self._group = group
        self._device = device

    def sweep(self, largest: float) -> None:
        """Times sums of fp32 numbers from 4 KiB up to ``largest`` bytes, 64 MiB at most.

        Ends early where the link is so slow that one more AllReduce would take seconds.
        """
        slowest = 0.0
        for nbytes in SWEEP_BYTES:
            if nbytes > largest or slowest * 4 > _SKIP_ABOVE_S:
                break
            slowest = self._size(nbytes)
            self._beat()
        self._recorder.flush()

    def buckets(self, sizes: tuple[int, ...]) -> None:
        """Times buckets of the given sizes in bytes, one after the other, some times over."""
        buffers = [torch.zeros(max(1, nbytes // 4), device=self._device) for nbytes in sizes]
        seconds = self._agreed(sum(self._one(buffer, None) for buffer in buffers))
        for _ in range(_repetitions(seconds)):
            self._beat()
            for index, buffer in enumerate(buffers):
                self._one(buffer, index)
        self._recorder.flush()

    def _size(self, nbytes: int) -> float:
        """Times one size and returns its time in s, the same on all ranks."""
        buffer = torch.zeros(nbytes // 4, device=self._device)
        seconds = self._agreed(self._one(buffer, None))
        if seconds < _BUDGET_S:  # else one is warm-up enough
            seconds = self._agreed(self._one(buffer, None))
        for index in range(_repetitions(seconds)):
            self._one(buffer, index)
        return seconds

    def _agreed(self, seconds: float) -> float:
        """Returns the time of the slowest rank: all ranks must do equally many."""
        agreed = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._group)
        return float(agreed)

    def _one(self, buffer: torch.Tensor, index: int | None) -> float:
        """Reduces a buffer and waits for it; records it where it has an index."""
        recorder, timeline = self._recorder, self._recorder.timeline
        begin = recorder.mark()
        dist.all_reduce(buffer, group=self._group)
        end = recorder.mark()
        if index is None:
            return (timeline.time_ns(end) - timeline.time_ns(begin)) / 1e9
        recorder.span(SpanKind.ALLREDUCE, begin, end, index=index, nbytes=buffer.nbytes)
        return 0.0


def _repetitions(seconds: float) -> int:
    """Returns how often to measure what takes this long once."""
    count = int(_BUDGET_S / max(seconds, 1e-9))
    return min(_MAX_REPETITIONS, max(_MIN_REPETITIONS, count))
