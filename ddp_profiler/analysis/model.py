"""One step model: what a step costs per micro-step and per step.

The waterfall, the POP factors and every prediction come from this model, so that they
cannot contradict each other. A step at accumulation K takes

    K x (data + forward + backward + other)                     per micro-step
    + contention + forward_comm + backward_comm
    + exposed_wait + exposed_transfer + exposed_copy + optimizer  per step

where forward and backward are those of a no_sync micro-step and contention is what the
backward of a synchronising micro-step takes beyond that (bucket filling included). A step
has one synchronising micro-step, or, where no_sync is missing, K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_profiler.analysis.parts import Floats, Steps

Breakdown = Mapping[str, Floats]


@dataclass(frozen=True)
class StepCosts:
    """Costs of one level in ms, mean over ranks and steps.

    Attributes:
        data: Waiting for a micro-batch, per micro-step.
        forward: Forward without communication, per no_sync micro-step.
        backward: Backward, per no_sync micro-step.
        other: What no part covers, per micro-step.
        sync_backward: Backward of a synchronising micro-step less that of a no_sync one; per
            step, so times ``syncs``.
        forward_comm: Per step.
        backward_comm: Per step.
        exposed_wait: Per step; None where clocks cannot be compared.
        exposed_transfer: Per step.
        exposed_copy: Per step.
        optimizer: Per step.
        accumulation: Micro-steps in a step.
        syncs: Synchronising micro-steps in a step; more than 1 where no_sync is missing.
    """

    data: float
    forward: float
    backward: float
    other: float
    sync_backward: float
    forward_comm: float
    backward_comm: float
    exposed_wait: float | None
    exposed_transfer: float
    exposed_copy: float
    optimizer: float
    accumulation: int = 1
    syncs: float = 1.0

    def step_ms(self, accumulation: int) -> float:
        """Returns the step time in ms at an accumulation."""
        per_micro_step = self.data + self.forward + self.backward + self.other
        there = self.at(accumulation)
        return (
            accumulation * per_micro_step
            + there.sync_backward
            + there.forward_comm
            + there.backward_comm
            + (there.exposed_wait or 0.0)
            + there.exposed_transfer
            + there.exposed_copy
            + there.optimizer
        )

    def at(self, accumulation: int) -> StepCosts:
        """Returns the costs at another accumulation.

        Where no_sync is missing a step reduces as often as it has micro-steps, and costs per
        reduction grow with that. So does communication of modules, such as synchronised batch
        norm, which is in every micro-step; DDP's broadcast of buffers is once a step.
        """
        more = accumulation / self.accumulation
        if more == 1:
            return self
        # Only modules communicate in backward; those that do, do so in forward as well.
        costs = self
        if self.backward_comm > 0:
            costs = replace(
                self,
                forward_comm=more * self.forward_comm,
                backward_comm=more * self.backward_comm,
                accumulation=accumulation,
            )
        if self.syncs <= 1:
            return costs
        return replace(
            costs,
            sync_backward=more * self.sync_backward,
            exposed_wait=None if self.exposed_wait is None else more * self.exposed_wait,
            exposed_transfer=more * self.exposed_transfer,
            exposed_copy=more * self.exposed_copy,
            accumulation=accumulation,
            syncs=more * self.syncs,
        )

    @property
    def needless_ms(self) -> float | None:
        """What a step would save in ms by reducing in its last micro-step only.

        All but one of ``syncs`` transfers, copies and slower backwards. Not the waiting: a
        rank that is late in every micro-step would be so by the sum at the one meeting. None
        where waiting is withheld, since exposed_transfer holds it then.
        """
        if self.syncs <= 1:
            return 0.0
        if self.exposed_wait is None:
            return None
        each = (self.sync_backward + self.exposed_transfer + self.exposed_copy) / self.syncs
        return (self.syncs - 1) * each

    def useful_ms(self, accumulation: int) -> float:
        """Returns the step time in ms less all communication and less data."""
        alone = replace(
            self, data=0, forward_comm=0, backward_comm=0, exposed_wait=0, exposed_transfer=0
        )
        return alone.step_ms(accumulation)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def costs(
    instrumented: Sequence[Steps],
    breakdowns: Sequence[Breakdown],
    no_sync: Sequence[Steps],
    accumulation: int,
) -> StepCosts | None:
    """Derives a level's costs; None where its steps or its no_sync baseline are missing.

    Args:
        instrumented: Each rank's instrumented steps.
        breakdowns: All parts of them, in the same order.
        no_sync: Each rank's no_sync steps.
        accumulation: Micro-steps in a step.
    """
    if not instrumented or not no_sync:
        return None

    def per_step(part: str) -> float:
        return _mean([float(b[part].mean()) for b in breakdowns])

    def per_micro_step(part: str) -> float:
        return _mean([float(s.parts_ms[part].mean()) for s in no_sync]) / accumulation

    calls = [s.backwards for s in instrumented]
    # Module collectives inside backward are a term of their own.
    local = [
        float((c.local_end - c.begin - c.module_comm).mean()) / 1e6 for c in calls if len(c.begin)
    ]
    syncs = _mean([len(s.backwards.begin) / len(s) for s in instrumented])
    backward = per_micro_step("backward")
    wait = per_step("exposed_wait")
    return StepCosts(
        data=per_step("data") / accumulation,
        forward=per_micro_step("forward"),
        backward=backward,
        other=per_step("other") / accumulation,
        sync_backward=syncs * (_mean(local) - backward) if local else 0.0,
        forward_comm=per_step("forward_comm"),
        backward_comm=per_step("backward_comm"),
        exposed_wait=None if np.isnan(wait) else wait,
        exposed_transfer=per_step("exposed_transfer"),
        exposed_copy=per_step("exposed_copy"),
        optimizer=per_step("optimizer"),
        accumulation=accumulation,
        syncs=syncs,
    )


def bare_costs(bare: Sequence[Steps], accumulation: int) -> StepCosts | None:
    """Derives the costs of the model without DDP at dp = 1; None where it was not measured."""
    if not bare:
        return None

    def mean(part: str) -> float:
        return _mean([float(s.parts_ms[part].mean()) for s in bare])

    return StepCosts(
        data=mean("data") / accumulation,
        forward=mean("forward") / accumulation,
        backward=mean("backward") / accumulation,
        other=mean("other") / accumulation,
        sync_backward=0.0,
        forward_comm=0.0,
        backward_comm=0.0,
        exposed_wait=0.0,
        exposed_transfer=0.0,
        exposed_copy=0.0,
        optimizer=mean("optimizer"),
        accumulation=accumulation,
    )


def waterfall(
    level: StepCosts,
    single: StepCosts,
    bare: StepCosts,
    accumulation: int,
    measured_ms: float,
) -> dict[str, float | None]:
    """Leads from the bare model at dp = 1 to the measured step of a level, in ms.

    Every term but the first, exposed_transfer and exposed_wait is the level less dp = 1,
    re-expressed at the level's accumulation. The terms sum to ``measured``.

    Args:
        level: The level's costs.
        single: Costs of DDP at dp = 1.
        bare: Costs of the bare model at dp = 1.
        accumulation: The level's micro-steps in a step.
        measured_ms: The level's mean plain step.
    """
    single = single.at(accumulation)
    compute = level.forward + level.backward - single.forward - single.backward
    # Without peers there is nothing to slow down or to wait for: the wrapper holds it all.
    at_one = single.step_ms(accumulation)
    terms: dict[str, float | None] = {
        "bare": bare.step_ms(accumulation),
        "wrapper": at_one - bare.step_ms(accumulation),
        "slower_compute": accumulation * compute,
        "contention": level.sync_backward - single.sync_backward,
        "forward_comm": level.forward_comm - single.forward_comm,
        "backward_comm": level.backward_comm - single.backward_comm,
        "exposed_copy": level.exposed_copy - single.exposed_copy,
        "data": accumulation * (level.data - single.data),
        "optimizer": level.optimizer - single.optimizer,
        "other": accumulation * (level.other - single.other),
        "exposed_transfer": level.exposed_transfer,
        "exposed_wait": level.exposed_wait,
    }
    explained = sum(value or 0.0 for value in terms.values())
    return {**terms, "residual": measured_ms - explained, "measured": measured_ms}
