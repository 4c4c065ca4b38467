"""The batch identity and what becomes of an epoch, solved and explained.

global_batch = micro_batch x accumulation x dp. An epoch is rounded in this order: the sampler
pads or cuts, the loader keeps or drops the last micro-batch, the window the last step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from ddp_profiler.errors import UsageError
from ddp_profiler.naming import name_ranks


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
    global_batch: int,
    dp: int | None,
    *,
    micro_batch: int | None = None,
    accumulation: int | None = None,
) -> Batch:
    """Solves the identity for what is left open: accumulation, micro-batch or dp.

    >>> solve(32, 4, micro_batch=4)
    Batch(micro_batch=4, accumulation=2, dp=4)
    >>> solve(32, 4, accumulation=8)
    Batch(micro_batch=1, accumulation=8, dp=4)
    >>> solve(32, None, micro_batch=4, accumulation=8)
    Batch(micro_batch=4, accumulation=8, dp=1)

    Args:
        global_batch: Samples in an optimizer step.
        dp: Data-parallel replicas; None where it is open.
        micro_batch: Samples of one rank in one micro-step; None where it is open.
        accumulation: Micro-steps in a step; None where it is open.

    Raises:
        UsageError: No whole number solves it, or the given numbers contradict it. The
            message holds all numbers and the nearest settings that are legal.
        ValueError: More than one of the three is open.
    """
    given = [value for value in (micro_batch, accumulation, dp) if value is not None]
    if len(given) < 2:
        raise ValueError("give two of micro_batch, accumulation and dp")
    nearest = max(1, round(global_batch / math.prod(given)))
    found = Batch(micro_batch or nearest, accumulation or nearest, dp or nearest)
    if found.global_batch != global_batch:
        raise _illegal(global_batch, found, keeps_accumulation=micro_batch is None)
    return found


def splits(global_batch: int, dp: int) -> tuple[Batch, ...]:
    """Returns all settings that make a global batch at a dp, the largest micro-batch first.

    >>> [str(b) for b in splits(12, 2)]
    ['6 x 1 x 2 = 12', '3 x 2 x 2 = 12', '2 x 3 x 2 = 12', '1 x 6 x 2 = 12']

    Raises:
        UsageError: dp does not divide the global batch.
    """
    share, rest = divmod(global_batch, dp)
    if rest or not share:
        legal = "; ".join(str(batch) for batch in _nearest_shares(global_batch, dp))
        raise UsageError(
            f"Global batch {global_batch} is not micro-batch x accumulation x dp: dp {dp} does "
            "not divide it.",
            f"Nearest legal settings: {legal}.",
        )
    return tuple(Batch(m, share // m, dp) for m in sorted(_divisors(share), reverse=True))


def _nearest_shares(global_batch: int, dp: int) -> tuple[Batch, ...]:
    """Returns settings without accumulation: the nearest dp that divides, then other batches."""
    sizes = _divisors(global_batch)
    near = min(sizes, key=lambda n: (abs(n - dp), -n))
    share = global_batch // dp
    found = [Batch(global_batch // near, 1, near)]
    return (*found, *(Batch(m, 1, dp) for m in (share, share + 1) if m >= 1))


def _divisors(number: int) -> set[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return {*small, *(number // n for n in small)}


def nearest_legal(
    global_batch: int, asked: Batch, *, keeps_accumulation: bool = False
) -> tuple[Batch, ...]:
    """Returns settings near to what was asked that satisfy the identity.

    First those that keep the global batch and change as little as possible: another
    split at the same dp, then another dp; then the nearest global batches that keep
    micro-batch and dp, or accumulation and dp.

    >>> [str(b) for b in nearest_legal(256, Batch(2, 18, 7))]
    ['2 x 16 x 8 = 256', '2 x 18 x 7 = 252', '2 x 19 x 7 = 266']
    >>> [str(b) for b in nearest_legal(256, Batch(11, 3, 8), keeps_accumulation=True)]
    ['8 x 4 x 8 = 256', '10 x 3 x 8 = 240', '11 x 3 x 8 = 264']
    """
    found: list[Batch] = []
    if global_batch % asked.dp == 0:
        share = global_batch // asked.dp
        micro_batch = min(_divisors(share), key=lambda m: abs(m - asked.micro_batch))
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
    kept = asked.accumulation if keeps_accumulation else asked.micro_batch
    below = global_batch // (kept * asked.dp)
    for n in (below, below + 1):
        if n >= 1 and keeps_accumulation:
            found.append(Batch(n, kept, asked.dp))
        elif n >= 1:
            found.append(Batch(kept, n, asked.dp))
    return tuple(dict.fromkeys(found))


def _illegal(global_batch: int, asked: Batch, *, keeps_accumulation: bool = False) -> UsageError:
    nearest = nearest_legal(global_batch, asked, keeps_accumulation=keeps_accumulation)
    legal = "; ".join(str(batch) for batch in nearest)
    return UsageError(
        f"Global batch {global_batch} is not micro-batch x accumulation x dp: {asked}.",
        f"Nearest legal settings: {legal}.",
    )


SHORT, DROP, CARRY = "short", "drop", "carry"
"""What becomes of micro-steps that fill no window: a step of fewer, nothing, or a part of the
next epoch's first step."""


@dataclass(frozen=True)
class Epoch:
    """What becomes of the samples of an epoch.

    Attributes:
        samples: Samples of the data set.
        batch: Micro-batch, accumulation and dp.
        window: ``short``, ``drop`` or ``carry``: what becomes of micro-steps that are left
            over; None where that is not known.
        samples_per_rank: What the sampler gives each rank.
        micro_steps: Micro-steps of each rank.
        last_micro_batch: Samples of the last one.
        left_over: Micro-steps that fill no window.
        samples_repeated: Samples that the sampler gives out twice, over all ranks.
        samples_dropped_by_sampler: Samples that it leaves out.
        samples_dropped_by_loader: Samples in micro-batches that the loader drops, over all ranks.
        samples_dropped_by_window: Samples in micro-steps that no optimizer step follows.
    """

    samples: int
    batch: Batch
    window: str | None
    samples_per_rank: int
    micro_steps: int
    last_micro_batch: int
    left_over: int
    samples_repeated: int
    samples_dropped_by_sampler: int
    samples_dropped_by_loader: int
    samples_dropped_by_window: int

    @property
    def samples_dropped(self) -> int:
        """Samples that are left out on the way, of those that the sampler repeats too."""
        return (
            self.samples_dropped_by_sampler
            + self.samples_dropped_by_loader
            + self.samples_dropped_by_window
        )

    @property
    def samples_processed(self) -> int:
        """Samples that optimizer steps use, those that are repeated included, over all ranks."""
        return self.samples + self.samples_repeated - self.samples_dropped

    @property
    def optimizer_steps(self) -> Fraction | None:
        """Optimizer steps of an epoch: whole, but for windows that carry over; None if unknown."""
        if self.left_over == 0 or self.window == CARRY:
            return Fraction(self.micro_steps, self.batch.accumulation)
        full = self.micro_steps // self.batch.accumulation
        return {SHORT: Fraction(full + 1), DROP: Fraction(full)}.get(self.window or "")

    def total_optimizer_steps(self, epochs: int) -> int | None:
        """Returns the optimizer steps of several epochs; None if unknown."""
        steps = self.optimizer_steps
        return None if steps is None else math.floor(steps * epochs)

    def total_unused_micro_steps(self, epochs: int) -> int:
        """Returns the micro-steps of several epochs that run, and that no optimizer step follows.

        >>> epoch(199, Batch(1, 100, 1), window=DROP).total_unused_micro_steps(3)
        297
        >>> epoch(199, Batch(1, 100, 1), window=CARRY).total_unused_micro_steps(3)
        97
        """
        if self.window == DROP:
            return self.left_over * epochs
        if self.window == CARRY:
            return self.micro_steps * epochs % self.batch.accumulation
        return 0

    def total_samples_dropped(self, epochs: int) -> int:
        """Returns the samples that no optimizer step of several epochs uses, over all ranks.

        >>> epoch(199, Batch(1, 100, 1), window=CARRY).total_samples_dropped(3)
        97
        """
        dropped = self.samples_dropped * epochs
        if self.window != CARRY:
            return dropped
        micro = self.batch.micro_batch
        # Short epochs: what is left at the end may be more than one of them.
        whole, rest = divmod(self.total_unused_micro_steps(epochs), self.micro_steps or 1)
        of_epoch = (self.micro_steps - 1) * micro + self.last_micro_batch
        left = whole * of_epoch + ((rest - 1) * micro + self.last_micro_batch if rest else 0)
        return dropped + left * self.batch.dp

    @property
    def rounding(self) -> tuple[str, ...]:
        """Each rounding in words, in the order in which they happen; empty if all is whole."""
        dp, per_rank, micro = self.batch.dp, self.samples_per_rank, self.batch.micro_batch
        found = []
        if self.samples_repeated:
            found.append(f"the sampler repeats {self.samples_repeated} ({per_rank} a rank)")
        if self.samples_dropped_by_sampler:
            found.append(
                f"the sampler leaves {self.samples_dropped_by_sampler} out ({per_rank} a rank)"
            )
        if self.samples_dropped_by_loader:
            each = self.samples_dropped_by_loader // dp
            found.append(
                f"the loader drops {self.samples_dropped_by_loader}"
                f"{f' ({each} a rank)' if dp > 1 else ''}: too few for a micro-batch of {micro}"
            )
        elif self.micro_steps and self.last_micro_batch != micro:
            found.append(f"the last micro-batch has {self.last_micro_batch} of {micro}")
        if self.left_over:
            found.append(self._left_over())
        return tuple(found)

    def _left_over(self) -> str:
        left, window = self.left_over, self.batch.accumulation
        text = f"windows of {window} leave {left} of {self.micro_steps} micro-steps over, "
        if self.window == SHORT:
            return text + f"which make a step of {left}"
        if self.window == DROP:
            return text + f"whose {self.samples_dropped_by_window} samples no step uses"
        if self.window == CARRY:
            return text + "which the next epoch's first step takes"
        return text + "for a shorter step, the next epoch, or nothing"


def epoch(
    samples: int,
    batch: Batch,
    *,
    sampler_drops: bool = False,
    loader_drops: bool = False,
    window: str | None = SHORT,
) -> Epoch:
    """Computes what becomes of the samples of an epoch.

    The sampler is torch's DistributedSampler: it pads with the first samples, or cuts.

    >>> found = epoch(1000, Batch(10, 1, 1))
    >>> found.micro_steps, int(found.optimizer_steps)
    (100, 100)
    >>> found = epoch(1000, Batch(5, 2, 1))
    >>> found.micro_steps, int(found.optimizer_steps)
    (200, 100)
    >>> "; ".join(epoch(1000, Batch(4, 1, 3)).rounding)
    'the sampler repeats 2 (334 a rank); the last micro-batch has 2 of 4'

    Args:
        samples: Samples of the data set.
        batch: Micro-batch, accumulation and dp.
        sampler_drops: Whether the sampler cuts what dp does not divide; else it pads.
        loader_drops: Whether the loader drops a last, smaller micro-batch.
        window: ``short``, ``drop`` or ``carry``; None if not known.
    """
    dp, micro, accumulation = batch.dp, batch.micro_batch, batch.accumulation
    per_rank = samples // dp if sampler_drops else -(-samples // dp)
    full, rest = divmod(per_rank, micro)
    micro_steps = full if loader_drops or not rest else full + 1
    last = rest if micro_steps > full else micro if full else 0
    left_over = micro_steps % accumulation
    unused = (left_over - 1) * micro + last if left_over and window == DROP else 0
    return Epoch(
        samples=samples,
        batch=batch,
        window=window,
        samples_per_rank=per_rank,
        micro_steps=micro_steps,
        last_micro_batch=last,
        left_over=left_over,
        samples_repeated=max(0, per_rank * dp - samples),
        samples_dropped_by_sampler=max(0, samples - per_rank * dp),
        samples_dropped_by_loader=rest * dp if loader_drops else 0,
        samples_dropped_by_window=unused * dp,
    )


def dealt_epoch(
    samples: int, batch: Batch, *, drops: bool = False, window: str | None = SHORT
) -> Epoch:
    """Computes an epoch whose micro-batches are made first and dealt out to ranks then.

    So does Accelerate: what does not fill a micro-batch on every rank is filled up with the
    first samples, or dropped.

    >>> dealt_epoch(1000, Batch(16, 1, 3)).samples_repeated
    8

    Args:
        samples: Samples of the data set.
        batch: Micro-batch, accumulation and dp.
        drops: Whether what is too little is dropped.
        window: ``short``, ``drop`` or ``carry``; None if not known.
    """
    each = batch.micro_batch * batch.dp
    micro_steps = samples // each if drops else -(-samples // each)
    left_over = micro_steps % batch.accumulation
    return Epoch(
        samples=samples,
        batch=batch,
        window=window,
        samples_per_rank=micro_steps * batch.micro_batch,
        micro_steps=micro_steps,
        last_micro_batch=batch.micro_batch if micro_steps else 0,
        left_over=left_over,
        samples_repeated=max(0, micro_steps * each - samples),
        samples_dropped_by_sampler=max(0, samples - micro_steps * each),
        samples_dropped_by_loader=0,
        samples_dropped_by_window=left_over * each if window == DROP else 0,
    )


def unequal(counts: Mapping[int, int | None]) -> dict[int, int]:
    """Returns a count of each rank if they are all known and not all the same; else nothing.

    >>> unequal({0: 12, 1: 11}), unequal({0: 12, 1: None}), unequal({0: 12, 1: 12})
    ({0: 12, 1: 11}, {}, {})
    """
    known = {rank: count for rank, count in counts.items() if count is not None}
    return known if len(known) == len(counts) and len(set(known.values())) > 1 else {}


def by_value(counts: Mapping[int, int]) -> str:
    """Returns counts in words, with the ranks that have them.

    >>> by_value({0: 12, 1: 11, 2: 12})
    '11 on rank 1, 12 on ranks 0, 2'
    """
    ranks: dict[int, list[int]] = {}
    for rank, count in counts.items():
        ranks.setdefault(count, []).append(rank)
    return ", ".join(f"{count} on {name_ranks(ranks[count])}" for count in sorted(ranks))
