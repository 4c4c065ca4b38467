"""How DDP packs gradients into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """A bucket of gradients.

    Attributes:
        nbytes: Its size in bytes.
        ready_ms: When the last of its gradients is ready, in ms after backward was called.
    """

    nbytes: int
    ready_ms: float


def assign(
    sizes: Sequence[int], cap_bytes: float, first_cap_bytes: float | None = None
) -> list[list[int]]:
    """Assigns gradients to buckets as DDP does when it rebuilds them after the first step.

    Gradients are taken in the order in which they are ready; a bucket is closed once it has
    reached the limit, so it can exceed it by less than one gradient. Of one data type and
    device. After torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size.

    >>> assign([4, 4, 4, 4, 4], cap_bytes=8, first_cap_bytes=4)
    [[0], [1, 2], [3, 4]]
    >>> assign([100, 1, 1], cap_bytes=8)
    [[0], [1, 2]]

    Args:
        sizes: Bytes of each gradient, in the order in which they are ready.
        cap_bytes: DDP's ``bucket_cap_mb`` in bytes.
        first_cap_bytes: Limit of the first bucket; ``cap_bytes`` where None, as DDP does where
            the user has set a cap. Its default is 1 MiB beside a cap of 25 MiB.

    Returns:
        For each bucket the places of its gradients in ``sizes``.
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    filled = 0
    limit = cap_bytes if first_cap_bytes is None else first_cap_bytes
    for place, nbytes in enumerate(sizes):
        current.append(place)
        filled += nbytes
        if filled >= limit:
            buckets.append(current)
            current, filled, limit = [], 0, cap_bytes
    if current:
        buckets.append(current)
    return buckets


def pack(
    sizes: Sequence[int],
    ready_ms: Sequence[float],
    cap_bytes: float,
    first_cap_bytes: float | None = None,
) -> tuple[Bucket, ...]:
    """Returns the buckets in the order of reduction.

    Args:
        sizes: Bytes of each gradient, in any order.
        ready_ms: When each is ready, in ms after backward was called.
        cap_bytes: As for :func:`assign`.
        first_cap_bytes: As for :func:`assign`.
    """
    order = sorted(range(len(sizes)), key=lambda place: ready_ms[place])
    return tuple(
        Bucket(
            nbytes=sum(sizes[order[place]] for place in members),
            ready_ms=max(ready_ms[order[place]] for place in members),
        )
        for members in assign([sizes[place] for place in order], cap_bytes, first_cap_bytes)
    )
