"""How good the hardware is, and which roof a level's step is under.

The least time that a device needs for an operation is the largest of three: its floating-point
operations over the rate of products, its bytes over the rate of copies, and the time of the
smallest operation (Williams, Waterman, Patterson 2009, operation by operation).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ddp_profiler.analysis.data_sheets import DataSheet, find_sheet
from ddp_profiler.schema import DevicePeaks, LevelFacts, OperationGroup

NEAR_FRACTION = 0.5
"""A roof is near where the least time is at least this share of the time taken."""
_ADDED_IN_ACCUMULATION = 3
"""A micro-step after the first adds its gradients: two are read, one is written."""
_COMMUNICATION = ("forward_comm", "backward_comm", "exposed_wait", "exposed_transfer")


class Bound(StrEnum):
    """What limits a step."""

    INPUT = "input"
    COMMUNICATION = "communication"
    COMPUTE = "compute"
    MEMORY = "memory"
    NONE = "none"


@dataclass(frozen=True)
class Hardware:
    """The device of the run's first measured rank: what it reaches, and what its sheet says.

    Attributes:
        rank: Global rank that measured.
        name: The device's name.
        arithmetic: What its products compute in: ``fp32``, ``tf32``, ``bf16``, ``fp16``.
        flops_per_s: Rate of a large matrix product.
        memory_bytes_per_s: Bytes read and written in a second by the largest copy.
        ridge_flops_per_byte: flops_per_s / memory_bytes_per_s: with fewer operations a byte,
            memory is the roof.
        operation_us: Time of the smallest operation.
        data_sheet: The vendor's figures; None where no row holds for this device.
        data_sheet_reason: Why it is None, or what is not known of a device that has one; None on
            the CPU.
    """

    rank: int
    name: str
    arithmetic: str
    flops_per_s: float | None
    memory_bytes_per_s: float | None
    ridge_flops_per_byte: float | None
    operation_us: float | None
    data_sheet: DataSheet | None
    data_sheet_reason: str | None


@dataclass(frozen=True)
class Roofline:
    """What limits a level's step, with the figures that say so; a rank's mean.

    Attributes:
        bound: ``input``, ``communication``, ``compute``, ``memory``, or ``none`` where none of
            them explains the step; None where it cannot be told.
        reason: The figures in words.
        input_fraction: Share of the instrumented step that waits for data.
        communication_fraction: Share that is communication which nothing hides, waiting for other
            ranks included.
        rest_ms: The step less both.
        least_compute_ms: The least time for operations whose roof is the rate of products.
        least_memory_ms: The least time for operations whose roof is the rate of copies.
        least_start_ms: The least time for operations that are too small for either.
        roof_fraction: (least_compute_ms + least_memory_ms) / rest_ms.
        flops_per_step: Floating-point operations of a rank's step.
        bytes_per_step: Bytes that a rank's operations read and write in a step.
        operations_per_step: Their number.
        flops_per_byte: flops_per_step / bytes_per_step.
        achieved_flops_per_s: Of one rank in a plain step.
        data_sheet_flops_fraction: achieved_flops_per_s over the data sheet's for its arithmetic.
    """

    bound: Bound | None
    reason: str
    input_fraction: float | None = None
    communication_fraction: float | None = None
    rest_ms: float | None = None
    least_compute_ms: float | None = None
    least_memory_ms: float | None = None
    least_start_ms: float | None = None
    roof_fraction: float | None = None
    flops_per_step: int | None = None
    bytes_per_step: int | None = None
    operations_per_step: int | None = None
    flops_per_byte: float | None = None
    achieved_flops_per_s: float | None = None
    data_sheet_flops_fraction: float | None = None


@dataclass(frozen=True)
class LeastTimes:
    """The least time of operations in ms, by the roof that they are under."""

    compute_ms: float
    memory_ms: float
    start_ms: float


def describe_hardware(facts: Iterable[LevelFacts]) -> Hardware | None:
    """Returns the first device that was measured; None where none was."""
    for level in facts:
        if level.device is not None:
            return _hardware(level.device, level)
    return None


def _hardware(device: DevicePeaks, facts: LevelFacts) -> Hardware:
    memory = device.copies[-1].bytes_per_s if device.copies else None
    sheet, reason = None, None
    if device.device_type != "cpu":
        sheet, reason = _sheet(device, facts)
    return Hardware(
        rank=device.rank,
        name=device.name,
        arithmetic=device.arithmetic,
        flops_per_s=device.flops_per_s,
        memory_bytes_per_s=memory,
        ridge_flops_per_byte=device.flops_per_s / memory if device.flops_per_s and memory else None,
        operation_us=None if device.operation_s is None else device.operation_s * 1e6,
        data_sheet=sheet,
        data_sheet_reason=reason,
    )


def _sheet(device: DevicePeaks, facts: LevelFacts) -> tuple[DataSheet | None, str | None]:
    gpus = [use.gpu for use in facts.machine if use.rank == device.rank and use.gpu is not None]
    limit = gpus[0].power_limit_w if gpus else None
    match = find_sheet(device.name, device.memory_bytes, device.multiprocessors, limit)
    return match.sheet, match.reason


def least_times(groups: Iterable[OperationGroup], device: DevicePeaks) -> LeastTimes | None:
    """Returns the least times of operations on a device; None where its peaks are not known.

    Each group's mean operation stands for all of it. An operation of some size is given the best
    rate of the copies at or above that size, so that what fits in a cache is not held against
    the memory behind it: all times are lower bounds.

    Args:
        groups: The operations.
        device: What it reaches.
    """
    if not device.copies:
        return None
    times = {Bound.COMPUTE: 0.0, Bound.MEMORY: 0.0, Bound.NONE: 0.0}
    for group in groups:
        if group.flops and not device.flops_per_s:
            return None
        nbytes = group.nbytes / group.operations
        flops_s = group.flops / device.flops_per_s if device.flops_per_s else 0.0
        each = {
            Bound.COMPUTE: flops_s / group.operations,
            Bound.MEMORY: nbytes / _copy_rate(nbytes, device),
            Bound.NONE: device.operation_s or 0.0,
        }
        roof = max(each, key=lambda bound: each[bound])
        times[roof] += group.operations * each[roof]
    return LeastTimes(*(1e3 * seconds for seconds in times.values()))


def _copy_rate(nbytes: float, device: DevicePeaks) -> float:
    """Returns the best rate at the largest measured size that is not above this one, or above."""
    below = [copy.nbytes for copy in device.copies if copy.nbytes <= nbytes]
    floor = max(below, default=0)
    return max(copy.bytes_per_s for copy in device.copies if copy.nbytes >= floor)


def roofline(
    breakdown_ms: Mapping[str, float | None],
    step_ms: float | None,
    accumulation: int,
    facts: LevelFacts | None,
    plain_ms: float | None = None,
) -> Roofline | None:
    """Tells what limits a level's step.

    The largest of three shares of the instrumented step counts: waiting for input, communication
    that nothing hides, and the rest. Where it is the rest, the least times of its operations say
    whether products or memory are its roof, and whether that is near: below half of the rest,
    neither explains it.

    Args:
        breakdown_ms: Parts of the instrumented step, which they sum to.
        step_ms: Its mean.
        accumulation: Micro-steps of a step.
        facts: What the worker found out, with operations and peaks.
        plain_ms: Mean plain step, for the achieved rate.

    Returns:
        None where nothing was counted or measured, as in scripts.
    """
    if facts is None or step_ms is None or (facts.operations is None and facts.device is None):
        return None
    known = {part: value for part, value in breakdown_ms.items() if value is not None}
    if len(known) < len(breakdown_ms) or not step_ms:
        return None
    input_ms = known["data"]
    communication_ms = sum(known[part] for part in _COMMUNICATION)
    rest_ms = step_ms - input_ms - communication_ms
    groups = _step_groups(accumulation, facts)
    times = least_times(groups, facts.device) if groups and facts.device else None
    flops = _flops_of_step(accumulation, facts, groups)
    nbytes = sum(group.nbytes for group in groups) if groups else None
    achieved = flops / plain_ms * 1e3 if flops is not None and plain_ms else None
    bound, reason = _judge(step_ms, input_ms, communication_ms, rest_ms, known, times, groups)
    return Roofline(
        bound=bound,
        reason=reason,
        input_fraction=input_ms / step_ms,
        communication_fraction=communication_ms / step_ms,
        rest_ms=rest_ms,
        least_compute_ms=times.compute_ms if times else None,
        least_memory_ms=times.memory_ms if times else None,
        least_start_ms=times.start_ms if times else None,
        roof_fraction=_roof_fraction(times, rest_ms),
        flops_per_step=flops,
        bytes_per_step=nbytes,
        operations_per_step=sum(group.operations for group in groups) if groups else None,
        flops_per_byte=flops / nbytes if flops is not None and nbytes else None,
        achieved_flops_per_s=achieved,
        data_sheet_flops_fraction=_share_of_sheet(achieved, facts),
    )


def _step_groups(accumulation: int, facts: LevelFacts) -> list[OperationGroup]:
    """Returns the operations of a rank's step; empty where they were not counted."""
    counted = facts.operations
    if counted is None:
        return []
    groups = [
        OperationGroup(g.operations * accumulation, g.nbytes * accumulation, g.flops * accumulation)
        for g in counted.micro_step
    ]
    tensors = len(facts.reduced)
    if accumulation > 1 and tensors:
        additions = tensors * (accumulation - 1)
        nbytes = _ADDED_IN_ACCUMULATION * facts.gradient_bytes * (accumulation - 1)
        groups.append(OperationGroup(additions, nbytes, 0))
    return groups + list(counted.optimizer or ())


def _flops_of_step(
    accumulation: int, facts: LevelFacts, groups: Sequence[OperationGroup]
) -> int | None:
    counted = facts.operations
    if counted is None:
        return None
    if facts.flops_per_sample:
        return facts.flops_per_sample * counted.micro_batch * accumulation
    return sum(group.flops for group in groups)


def _share_of_sheet(achieved: float | None, facts: LevelFacts) -> float | None:
    device = facts.device
    if achieved is None or device is None or device.device_type == "cpu":
        return None
    sheet, _ = _sheet(device, facts)
    peak = sheet.flops_per_s.get(device.arithmetic) if sheet else None
    return achieved / peak if peak else None


def _roof_fraction(times: LeastTimes | None, rest_ms: float) -> float | None:
    if times is None or rest_ms <= 0:
        return None
    return (times.compute_ms + times.memory_ms) / rest_ms


def _judge(
    step_ms: float,
    input_ms: float,
    communication_ms: float,
    rest_ms: float,
    parts: Mapping[str, float],
    times: LeastTimes | None,
    groups: Sequence[OperationGroup],
) -> tuple[Bound | None, str]:
    """Returns the verdict and its figures in words."""
    if input_ms > max(communication_ms, rest_ms):
        return Bound.INPUT, (
            f"{_percent(input_ms, step_ms)} of the step waits for data ({input_ms:.3g} of "
            f"{step_ms:.3g} ms)"
        )
    if communication_ms > rest_ms:
        wait_ms = parts["exposed_wait"]
        waits = f", {wait_ms:.3g} ms of it waiting for other ranks" if wait_ms else ""
        return Bound.COMMUNICATION, (
            f"{_percent(communication_ms, step_ms)} of the step is communication that nothing "
            f"hides ({communication_ms:.3g} of {step_ms:.3g} ms{waits})"
        )
    if times is None or rest_ms <= 0:
        return None, "operations were not counted, or the device's peaks not measured"
    least = (
        f"of {rest_ms:.3g} ms, products need at least {times.compute_ms:.3g} ms and memory "
        f"{times.memory_ms:.3g} ms"
    )
    if times.compute_ms + times.memory_ms < NEAR_FRACTION * rest_ms:
        operations = sum(group.operations for group in groups)
        return Bound.NONE, (
            f"neither roof is near: {least}; the smallest of {operations} operations take "
            f"{times.start_ms:.3g} ms to start"
        )
    if times.compute_ms >= times.memory_ms:
        return Bound.COMPUTE, f"near the roof of products: {least}"
    return Bound.MEMORY, f"near the roof of memory: {least}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"
