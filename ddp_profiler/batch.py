"""The batch identity: global_batch = micro_batch x accumulation x dp, solved and explained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddp_profiler.errors import UsageError


@dataclass(frozen=True)
class Batch:
    """Settings that make one global batch, all in samples or counts.

    Attributes:
        micro_batch: Samples that one rank passes through forward in one micro-step.
        accumulation: Micro-steps in an optimizer step.
        dp: Number of data-parallel replicas.
    """

    micro_batch: int
    accumulation: int
    dp: int

    @property
    def global_batch(self) -> int:
        """micro_batch x accumulation x dp, in samples."""
        return self.micro_batch * self.accumulation * self.dp

    def __str__(self) -> str:
        return f"{self.micro_batch} x {self.accumulation} x {self.dp} = {self.global_batch}"


def solve(
    global_batch: int, dp: int, *, micro_batch: int | None = None, accumulation: int | None = None
) -> Batch:
    """Solves the identity for what is left open: accumulation, or else micro-batch.

    >>> solve(32, 4, micro_batch=4)
    Batch(micro_batch=4, accumulation=2, dp=4)
    >>> solve(32, 4, accumulation=8)
    Batch(micro_batch=1, accumulation=8, dp=4)

    Raises:
        UsageError: No whole number solves it, or the given numbers contradict it. The
            message holds all numbers and the nearest settings that are legal.
    """
    if micro_batch is not None and accumulation is not None:
        found = Batch(micro_batch, accumulation, dp)
        if found.global_batch != global_batch:
            raise _illegal(global_batch, found)
        return found
    if micro_batch is not None:
        each = micro_batch * dp
        nearest = max(1, round(global_batch / each))
        found = Batch(micro_batch, nearest, dp)
    elif accumulation is not None:
        nearest = max(1, round(global_batch / (accumulation * dp)))
        found = Batch(nearest, accumulation, dp)
    else:
        raise ValueError("give micro_batch or accumulation")
    if found.global_batch != global_batch:
        raise _illegal(global_batch, found)
    return found


def nearest_legal(global_batch: int, asked: Batch) -> tuple[Batch, ...]:
    """Returns settings near to what was asked that satisfy the identity.

    First those that keep the global batch and change as little as possible: another
    split at the same dp, then another dp; then the nearest global batches that keep
    micro-batch and dp.

    >>> [str(b) for b in nearest_legal(256, Batch(2, 18, 7))]
    ['2 x 16 x 8 = 256', '2 x 18 x 7 = 252', '2 x 19 x 7 = 266']
    """
    found: list[Batch] = []
    if global_batch % asked.dp == 0:
        share = global_batch // asked.dp
        small = [m for m in range(1, math.isqrt(share) + 1) if share % m == 0]
        splits = {*small, *(share // m for m in small)}
        micro_batch = min(splits, key=lambda m: abs(m - asked.micro_batch))
        found.append(Batch(micro_batch, share // micro_batch, asked.dp))
    else:
        sizes = [
            dp
            for dp in range(1, min(global_batch, 4 * asked.dp) + 1)
            if global_batch % (dp * asked.micro_batch) == 0
        ]
        if sizes:
            dp = min(sizes, key=lambda n: (abs(n - asked.dp), -n))
            found.append(Batch(asked.micro_batch, global_batch // (dp * asked.micro_batch), dp))
    each = asked.micro_batch * asked.dp
    below = global_batch // each
    found += [Batch(asked.micro_batch, k, asked.dp) for k in (below, below + 1) if k >= 1]
    return tuple(dict.fromkeys(found))


def _illegal(global_batch: int, asked: Batch) -> UsageError:
    legal = "; ".join(str(batch) for batch in nearest_legal(global_batch, asked))
    return UsageError(
        f"Global batch {global_batch} is not micro-batch x accumulation x dp: {asked}.",
        f"Nearest legal settings: {legal}.",
    )
