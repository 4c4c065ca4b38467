"""What is asked of a prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddp_profiler.errors import UsageError

GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a gradient's element while it travels, by data type."""


@dataclass(frozen=True)
class Request:
    """A setting to predict. What is None stays as it was measured.

    Attributes:
        dp: Number of replicas.
        accumulation: Micro-steps in a step.
        bucket_cap_mb: Size limit of DDP's buckets in MB of 2**20 bytes.
        bandwidth_gbps: Rate of the links that bound the AllReduce, in Gbit/s: those between
            nodes, or within the node where there is one.
        gradient_dtype: Data type in which gradients travel: fp32, bf16 or fp16.
        ranks_per_node: Ranks on a node.
        reduce_once: Whether gradients are reduced in the last micro-step only.
        bucket_view: Whether gradients live in the buckets (gradient_as_bucket_view), so that
            none are copied.
    """

    dp: int
    accumulation: int | None = None
    bucket_cap_mb: float | None = None
    bandwidth_gbps: float | None = None
    gradient_dtype: str | None = None
    ranks_per_node: int | None = None
    reduce_once: bool = False
    bucket_view: bool = False

    def __post_init__(self) -> None:
        for option, value in (
            ("--dp", self.dp),
            ("--accumulate", self.accumulation),
            ("--ranks-per-node", self.ranks_per_node),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{option} {value} is below 1.", f"Give {option} 1 or more.")
        for option, size in (
            ("--bucket-cap-mb", self.bucket_cap_mb),
            ("--bandwidth-gbps", self.bandwidth_gbps),
        ):
            if size is not None and not 0 < size < math.inf:
                raise UsageError(f"{option} {size:g} is no number above 0.", "Correct it.")
        if self.gradient_dtype is not None and self.gradient_dtype not in GRADIENT_BYTES:
            raise UsageError(
                f"--gradient-dtype {self.gradient_dtype} is unknown.",
                f"Choose one of: {', '.join(GRADIENT_BYTES)}.",
            )
