"""Speedup, efficiency and the POP factors of a level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ddp_profiler.analysis.model import StepCosts
from ddp_profiler.analysis.parts import Floats, Steps


@dataclass(frozen=True)
class Pop:
    """Factors after the POP Centre of Excellence, adapted to data-parallel training.

    useful = wall less all communication less data, per rank, mean over steps.

    Attributes:
        load_balance: mean / max useful over ranks.
        communication_efficiency: max useful / (wall less data).
        input_efficiency: (wall less data) / wall.
        computation_efficiency: useful at dp = 1, re-expressed at the level's accumulation,
            / mean useful.
        global_efficiency: useful at dp = 1 / wall; the product of the four.
    """

    load_balance: float
    communication_efficiency: float
    input_efficiency: float
    computation_efficiency: float
    global_efficiency: float


def pop(
    instrumented: Sequence[Steps],
    breakdowns: Sequence[Mapping[str, Floats]],
    single: StepCosts | None,
    accumulation: int,
) -> Pop | None:
    """Computes the POP factors; None without steps or without a dp = 1 level."""
    if not instrumented or single is None:
        return None
    communication = ("forward_comm", "backward_comm", "exposed_wait", "exposed_transfer")
    useful, walls, inputs = [], [], []
    for steps, parts in zip(instrumented, breakdowns, strict=True):
        wall, data = float(steps.wall_ms.mean()), float(parts["data"].mean())
        lost = sum(float(np.nan_to_num(parts[part]).mean()) for part in communication)
        useful.append(wall - lost - data)
        walls.append(wall)
        inputs.append(data)
    wall, data = float(np.mean(walls)), float(np.mean(inputs))
    alone = single.useful_ms(accumulation)
    if min(max(useful), float(np.mean(useful)), wall - data, wall) <= 0:
        # Of a record whose parts are longer than their steps.
        return None
    return Pop(
        load_balance=float(np.mean(useful)) / max(useful),
        communication_efficiency=max(useful) / (wall - data),
        input_efficiency=(wall - data) / wall,
        computation_efficiency=alone / float(np.mean(useful)),
        global_efficiency=alone / wall,
    )


@dataclass(frozen=True)
class Scaling:
    """Throughput of one level against dp = 1.

    Attributes:
        dp: Data-parallel size.
        samples_per_s: Throughput of all ranks together.
        speedup: throughput(n) / throughput(1); None without dp = 1.
        efficiency: speedup / n; None without dp = 1.
    """

    dp: int
    samples_per_s: float
    speedup: float | None
    efficiency: float | None


def scale(throughput: Mapping[int, float]) -> tuple[Scaling, ...]:
    """Compares throughputs at several dp with that at dp = 1, by rising dp.

    >>> [round(s.efficiency, 3) for s in scale({1: 122, 2: 2 * 115, 16: 16 * 80})]
    [1.0, 0.943, 0.656]

    Args:
        throughput: Samples per s of all ranks together, by dp.
    """
    single = throughput.get(1)
    return tuple(
        Scaling(
            dp=dp,
            samples_per_s=rate,
            speedup=rate / single if single else None,
            efficiency=rate / single / dp if single else None,
        )
        for dp, rate in sorted(throughput.items())
    )


def sharpest_drop(efficiency: Mapping[int, float | None]) -> tuple[int, int] | None:
    """Returns the neighbouring dp between which efficiency falls most; None if nowhere.

    >>> sharpest_drop({1: 1.0, 2: 0.94, 4: 0.91, 8: 0.90, 16: 0.66})
    (8, 16)

    Args:
        efficiency: By dp; levels without one are passed over.
    """
    known = {dp: value for dp, value in sorted(efficiency.items()) if value is not None}
    falls = [(known[a] - known[b], a, b) for a, b in pairwise(known) if known[b] < known[a]]
    if not falls:
        return None
    _, before, after = max(falls)
    return before, after
