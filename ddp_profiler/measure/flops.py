"""Floating-point operations of a model, and the rate that a device reaches in large products."""

from __future__ import annotations

import math
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from ddp_profiler.measure.batches import number_of_samples, to_device
from ddp_profiler.measure.isolation import alone, state_kept
from ddp_profiler.workload import Workload

_CPU_CALL_S = 0.03
_CPU_LARGEST = 8192
_CUDA_SIZE = {torch.float32: 4096, torch.float64: 4096}
_CUDA_SIZE_HALF = 8192
_MIN_REPETITIONS = 3


def count_flops(workload: Workload, device: torch.device, samples: int = 2) -> int | None:
    """Counts the floating-point operations of forward, loss and backward for one sample.

    As torch counts them: 2 for each multiplication with its addition, in matrix products,
    convolutions and attention only. Attention is counted without the recomputation of fused
    kernels and without leaving out masked places. Modules outside DDP count where inputs run
    through them. On one rank alone; parameters, buffers, random numbers and the absence of
    gradients are as before. Source: torch.utils.flop_counter.

    Args:
        workload: Whose module is on the device.
        device: Where to compute.
        samples: How many to count at once. Batch norm needs 2.

    Returns:
        The count for one sample; None if nothing was counted, or if the model cannot be run
        with so many samples, or not on one rank alone.
    """
    modules = (workload.module, *workload.extra_modules)
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    items = range(min(samples, len(workload.dataset)))  # type: ignore[arg-type]
    counter = FlopCounterMode(display=False)
    try:
        with state_kept(modules, device), alone(modules), sdpa_kernel(SDPBackend.MATH), counter:
            batch = to_device(default_collate([workload.dataset[i] for i in items]), device)
            inputs = workload.inputs(batch)
            loss = workload.loss(workload.module(*inputs), batch)
            torch.autograd.grad(loss, parameters, allow_unused=True)
    except Exception:
        # A figure beside the others: a model that refuses it still has a study.
        return None
    counted = number_of_samples(inputs) or len(items)
    return round(counter.get_total_flops() / counted) or None


def measure_peak_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Measures the rate in FLOP/s of a large matrix product, with the threads in force.

    The rate is 2 n**3 / time for square matrices of n rows; the best of several repetitions
    counts, since whatever disturbs makes it slower. fp32 follows torch's setting of tf32.

    Args:
        device: Where to compute.
        dtype: Type of the matrices.
        seconds: How long to repeat, in s; at least 3 times.
    """
    if device.type == "cuda":
        n = _CUDA_SIZE.get(dtype, _CUDA_SIZE_HALF)
        one = _cuda_product
    else:
        n = _cpu_size(dtype)
        one = _cpu_product
    a = torch.ones((n, n), dtype=dtype, device=device)
    b = torch.ones((n, n), dtype=dtype, device=device)
    out = torch.empty((n, n), dtype=dtype, device=device)
    one(a, b, out)
    best = one(a, b, out)
    end = time.monotonic() + seconds
    repetitions = 1
    while repetitions < _MIN_REPETITIONS or time.monotonic() < end:
        best = min(best, one(a, b, out))
        repetitions += 1
    return 2.0 * n**3 / best


def _cpu_size(dtype: torch.dtype) -> int:
    """Returns the number of rows, in steps of 64, for which a product takes about 30 ms."""
    n, seconds = 128, 0.0
    while n < _CPU_LARGEST:
        a = torch.ones((n, n), dtype=dtype)
        out = torch.empty_like(a)
        # The first one starts threads and touches new memory.
        _cpu_product(a, a, out)
        seconds = min(_cpu_product(a, a, out) for _ in range(3))
        if seconds > _CPU_CALL_S / 8:
            break
        n *= 2
    rows = n * math.pow(_CPU_CALL_S / max(seconds, 1e-9), 1 / 3)
    return max(64, min(_CPU_LARGEST, 64 * round(rows / 64)))


def _cpu_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    begin = time.perf_counter()
    torch.mm(a, b, out=out)
    return time.perf_counter() - begin


def _cuda_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    torch.mm(a, b, out=out)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
