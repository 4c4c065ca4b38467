"""One step replayed from its ingredients: the step model with a replayed backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.predict.buckets import Bucket
from ddp_profiler.predict.network import NetworkModel
from ddp_profiler.predict.schedule import Cost, Replay, replay

_ROUNDS = 3
"""Contention lengthens backward, which hides more communication, which contends more."""


@dataclass(frozen=True)
class Ingredients:
    """All that a step is replayed from. Times in ms, mean over ranks where they differ.

    Attributes:
        dp: Ranks that reduce together.
        micro_steps: Micro-steps in a step.
        syncs: Synchronising micro-steps in a step.
        own: Data, forward, backward and other of a micro-step, without communication.
        late_backward: What ranks that are always late add to the mean backward in ``own``.
        buckets: In the order of reduction; ready at a share of the typical local backward,
            from 0 to 1.
        copy: Copying each bucket to the gradients.
        fill: What a synchronising backward takes more than another, without communication.
        fill_error: Standard error of it, where other buckets were measured.
        contention_per_byte: By how much backward slows down for a byte that travels beside it.
        contention_unseen: Whether that is half of the most that it may be, since nothing showed.
        wait: Waiting for the last rank at a reduction.
        optimizer: Per step.
        forward_comm: Per step.
        backward_comm: Per step.
        at_once: Reductions in flight at most.
    """

    dp: int
    micro_steps: int
    syncs: float
    own: Mapping[str, float]
    late_backward: float
    buckets: tuple[Bucket, ...]
    copy: tuple[float, ...]
    fill: float
    fill_error: float
    contention_per_byte: float
    contention_unseen: bool
    wait: float
    optimizer: float
    forward_comm: float
    backward_comm: float
    at_once: int


@dataclass(frozen=True)
class Scatter:
    """One draw of what is not known exactly: factors, but for ``network``, a logarithm.

    Attributes:
        compute: Of all that a rank does by itself.
        network: Of all AllReduces.
        fill: Standard errors of what filling buckets takes; no factor.
        contention: Of contention that was seen.
        unseen: Of contention that was not: from 0 to 2.
        wait: Of waiting.
        model: Of the whole step.
        rival: Which of the network model's forms: 0 for the chosen one.
    """

    compute: float = 1.0
    network: float = 0.0
    fill: float = 0.0
    contention: float = 1.0
    unseen: float = 1.0
    wait: float = 1.0
    model: float = 1.0
    rival: int = 0


EXPECTED = Scatter()
"""Everything as expected."""


@dataclass(frozen=True)
class ReplayedStep:
    """A replayed step.

    Attributes:
        parts_ms: The parts of a step, in ms, mean over ranks; the step is their sum.
        backward: Its last synchronising backward, on the last rank.
        allreduce_ms: All its buckets handed over at once, nothing beside them.
    """

    parts_ms: Mapping[str, float]
    backward: Replay
    allreduce_ms: float

    @property
    def step_ms(self) -> float:
        """The step in ms."""
        return sum(self.parts_ms.values())


def replay_step(
    given: Ingredients, model: NetworkModel | None, drawn: Scatter = EXPECTED
) -> ReplayedStep:
    """Replays a step.

    step = micro_steps x (data + forward + backward + other) + syncs x (fill + contention +
    exposed_wait + exposed_transfer + exposed_copy) + optimizer + forward_comm + backward_comm,
    as in the step model of the analysis; the exposed parts and contention come from replaying
    a backward on the rank that is last, since no bucket travels before it has handed it over.

    Args:
        given: What the step is made of.
        model: What reduces; None for one rank.
        drawn: Factors.
    """
    own = {part: value * drawn.compute for part, value in given.own.items()}
    fill = max(0.0, given.fill * drawn.compute + drawn.fill * given.fill_error)
    share = drawn.unseen if given.contention_unseen else drawn.contention
    typical = own["backward"] - given.late_backward * drawn.compute
    costs = _costs(given, model, drawn)
    # Each rank sends and receives so many bytes for each byte of a bucket.
    passes = 2 * (given.dp - 1) / given.dp
    travelling = passes * sum(bucket.nbytes for bucket in given.buckets)
    contention = 0.0
    for _ in range(_ROUNDS if given.contention_per_byte else 1):
        local_end = typical + fill + contention
        done = replay(
            [Bucket(bucket.nbytes, bucket.ready_ms * local_end) for bucket in given.buckets],
            costs,
            local_end,
            at_once=given.at_once,
            copy_ms=given.copy,
        )
        slowed = given.contention_per_byte * share * travelling
        # What travels takes at most all of the time in which it does.
        contention = min(slowed * done.overlapped_wire_fraction, done.overlapped_ms)
    parts = dict.fromkeys(PARTS, 0.0)
    parts |= {part: given.micro_steps * value for part, value in own.items()}
    parts["backward"] += given.syncs * (done.local_end_ms - typical)
    parts["exposed_wait"] = given.syncs * given.wait * drawn.wait
    parts["exposed_transfer"] = given.syncs * done.exposed_transfer_ms
    parts["exposed_copy"] = given.syncs * done.exposed_copy_ms
    parts["optimizer"] = given.optimizer * drawn.compute
    parts["forward_comm"] = given.forward_comm
    parts["backward_comm"] = given.backward_comm
    at_once = [Bucket(bucket.nbytes, 0.0) for bucket in given.buckets]
    alone = replay(at_once, costs, 0.0, at_once=given.at_once)
    return ReplayedStep(parts, done, alone.last_end_ms)


def _costs(given: Ingredients, model: NetworkModel | None, drawn: Scatter) -> Sequence[Cost]:
    if model is None:
        return [Cost(0.0, 0.0)] * len(given.buckets)
    curves = (model.curve, *model.rivals)
    factor = math.exp(drawn.network)
    found = [
        model.cost(given.dp, bucket.nbytes, curves[drawn.rival % len(curves)])
        for bucket in given.buckets
    ]
    return [Cost(cost.latency_ms * factor, cost.wire_ms * factor) for cost in found]
