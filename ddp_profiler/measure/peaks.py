"""What a device is, and what it reaches at its best."""

from __future__ import annotations

import time
from typing import Any

import torch

from ddp_profiler.measure.environment import cpu_model
from ddp_profiler.measure.flops import measure_peak_flops
from ddp_profiler.schema import CopyRate, DevicePeaks

_SMALLEST_COPY = 2**16
_GROWTH = 4
_LARGEST_COPY = {"cuda": 2**30}
_LARGEST_COPY_CPU = 2**28
_COPY_S = 0.03
_LEAST_COPIES = 3
_AT_ONCE_BYTES = 2**25
"""Small copies are timed many at once, since a single one is shorter than starting a clock."""
_SMALL_OPERATIONS = 300
_ROUNDS = 5
_ARITHMETIC = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def measure_peaks(device: torch.device, dtype: torch.dtype, rank: int) -> DevicePeaks:
    """Measures what this rank's device reaches in products, copies and the smallest operations.

    Takes about a second, of one rank while the others wait. What fails for want of memory stays
    None or is left out.

    Args:
        device: Where to compute.
        dtype: What the run computes in.
        rank: This process.
    """
    properties: Any = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
    return DevicePeaks(
        rank=rank,
        name=torch.cuda.get_device_name(device) if properties is not None else cpu_model(),
        device_type=device.type,
        arithmetic=arithmetic(device, dtype),
        memory_bytes=None if properties is None else int(properties.total_memory),
        multiprocessors=None if properties is None else int(properties.multi_processor_count),
        flops_per_s=_peak_flops(device, dtype),
        copies=measure_copies(device),
        operation_s=measure_operation_s(device),
    )


def arithmetic(device: torch.device, dtype: torch.dtype) -> str:
    """Returns what matrix products of a type are computed in: fp32 may be tf32 by a setting.

    Args:
        device: Where they are computed.
        dtype: Type of the matrices.
    """
    backends: Any = torch.backends
    if dtype is torch.float32:
        settings = backends.cuda if device.type == "cuda" else backends.mkldnn
        precision = settings.matmul.fp32_precision
        return precision if precision in ("tf32", "bf16") else "fp32"
    return _ARITHMETIC[dtype]


def measure_copies(
    device: torch.device, largest: int | None = None, seconds: float = _COPY_S
) -> tuple[CopyRate, ...]:
    """Measures how fast the device copies within its memory, at sizes from caches' to beyond.

    A rate is 2 x bytes of the source / time, since each byte is read and written (as STREAM
    counts); the best of several repetitions counts.

    Args:
        device: Whose memory.
        largest: Bytes of source and destination together in the last copy; by default more than
            caches hold.
        seconds: How long to repeat each size, in s; at least 3 times.
    """
    if largest is None:
        largest = _LARGEST_COPY.get(device.type, _LARGEST_COPY_CPU)
    rates: list[CopyRate] = []
    try:
        source = torch.ones(largest // 2, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        nbytes = _SMALLEST_COPY
        while nbytes <= largest:
            a, b = source[: nbytes // 2], target[: nbytes // 2]
            at_once = max(1, _AT_ONCE_BYTES // nbytes)
            best = _best_time(device, lambda a=a, b=b: b.copy_(a), at_once, seconds)
            rates.append(CopyRate(nbytes, nbytes / best))
            nbytes *= _GROWTH
    except RuntimeError:
        # Out of memory; a figure beside the others.
        pass
    return tuple(rates)


def measure_operation_s(device: torch.device) -> float:
    """Measures the time of the smallest operation in s, as the best of several rounds.

    On a GPU that is the time to start a kernel, since they are handed over one after the other
    and waited for once.

    Args:
        device: Where to compute.
    """
    x = torch.ones(1, device=device)
    return _best_time(device, lambda: x.add_(1), _SMALL_OPERATIONS, 0.0, _ROUNDS)


def _peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    try:
        return measure_peak_flops(device, dtype)
    except RuntimeError:
        return None


def _best_time(
    device: torch.device,
    run: Any,
    at_once: int,
    seconds: float,
    rounds: int = _LEAST_COPIES,
) -> float:
    """Returns the shortest time of one call in s, timed so many at once, after a first round."""
    end = time.perf_counter() + seconds
    best = float("inf")
    done = -1
    while done < rounds or time.perf_counter() < end:
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(at_once):
            run()
        _synchronize(device)
        elapsed = time.perf_counter() - begin
        if done >= 0:
            best = min(best, elapsed)
        done += 1
    return best / at_once


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
