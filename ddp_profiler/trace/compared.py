"""The same steps as two observers recorded them: torch.profiler's trace and a record of our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_profiler.trace.columns import Ints
from ddp_profiler.trace.gather import TraceSet
from ddp_profiler.trace.intervals import covered_ns
from ddp_profiler.trace.kernels import KINDS, Collective
from ddp_profiler.trace.split import RankSplit
from ddp_profiler.trace.steps import StepSource
from ddp_profiler.trace.volume import collective_bytes, is_floating


@dataclass(frozen=True)
class OwnSteps:
    """Steps of one rank as our record has them, shape [step] each.

    Attributes:
        in_flight_ns: Union of the times in which gradient collectives are in flight.
        collectives: Gradient collectives.
        bytes: Bytes handed to them.
        others: Collectives that modules issue, or DDP for itself.
        unnoticed: Gradient collectives whose end was never noticed; a number, of all steps.
    """

    in_flight_ns: Ints
    collectives: Ints
    bytes: Ints
    others: Ints
    unnoticed: int = 0


@dataclass(frozen=True)
class View:
    """What one observer says of the steps, all of them together.

    Attributes:
        in_flight_ns: Sum over steps of the union of the times of gradient collectives.
        collectives: Gradient collectives.
        bytes: Their bytes; None where not all are recorded.
    """

    in_flight_ns: int
    collectives: int
    bytes: int | None


@dataclass(frozen=True)
class ComparedStep:
    """One step in both records.

    Attributes:
        step: N of ``ProfilerStep#N``, and place of the step in its block of our record.
        ours: Our record.
        theirs: torch.profiler's.
    """

    step: int
    ours: View
    theirs: View


@dataclass(frozen=True)
class Compared:
    """One rank's steps in both records.

    Attributes:
        rank: Global rank.
        steps: The steps that both have, in order.
        ours: Our record of them.
        theirs: torch.profiler's; None where its trace does not tell communication.
        difference_pct: In flight, ours less theirs in per cent of theirs; None where that is 0 or
            not told, and at dp = 1, where nothing travels.
        notes: What a reader has to know.
    """

    rank: int
    steps: tuple[ComparedStep, ...]
    ours: View
    theirs: View | None
    difference_pct: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class CapturedLevel:
    """A level's steps under torch.profiler.

    Attributes:
        level: The level's id.
        found: The traces of its ranks.
        compared: Both records of these steps, of the ranks that have both.
    """

    level: str
    found: TraceSet
    compared: tuple[Compared, ...]


@dataclass(frozen=True)
class Captured:
    """What torch.profiler kept of a run.

    Attributes:
        levels: The levels that have traces, in the run's order.
        without: Ids of the others.
    """

    levels: tuple[CapturedLevel, ...]
    without: tuple[str, ...]


def compare_views(split: RankSplit, own: OwnSteps, dp: int) -> Compared:
    """Compares one rank's communication in flight, collectives and bytes in both records.

    Times of the two are on different clocks, so lengths are compared. Theirs are the AllReduces
    of floating types, or of a type that is not recorded.

    Args:
        split: The trace, split; its steps are those of ``ProfilerStep``.
        own: Our record of the block of steps from ``ProfilerStep#0`` on.
        dp: Ranks among which gradients are reduced.
    """
    notes = []
    told = split.total.comm_ns is not None and split.step_source is StepSource.PROFILER_STEP
    steps = []
    for place, found in enumerate(split.steps):
        number = found.step.number
        if told and found.step.occurrence == 1 and 0 <= number < own.collectives.size:
            steps.append(
                ComparedStep(
                    number,
                    View(
                        int(own.in_flight_ns[number]),
                        int(own.collectives[number]),
                        int(own.bytes[number]),
                    ),
                    _theirs(split, place),
                )
            )
    ours = _sum([step.ours for step in steps])
    theirs = _sum([step.theirs for step in steps]) if steps else None
    if not told:
        notes.append("the trace does not tell the communication of steps")
    elif not steps:
        notes.append("the trace and the record have no step in common")
    if any(step.ours.collectives != step.theirs.collectives for step in steps):
        more = (
            "; modules and DDP itself issue collectives too, which the trace does not tell apart"
            if any(own.others[step.step] for step in steps)
            else ""
        )
        notes.append(f"the numbers of collectives differ{more}")
    if dp == 1 and steps:
        notes.append("nothing travels at dp = 1, so what is in flight is not compared")
    if own.unnoticed:
        notes.append(
            f"{own.unnoticed} completions were not noticed here; they count until backward returns"
        )
    return Compared(
        rank=split.rank,
        steps=tuple(steps),
        ours=ours,
        theirs=theirs,
        difference_pct=(ours.in_flight_ns / theirs.in_flight_ns - 1) * 100
        if dp > 1 and theirs is not None and theirs.in_flight_ns
        else None,
        notes=tuple(notes),
    )


def _theirs(split: RankSplit, place: int) -> View:
    chosen = np.flatnonzero(_gradients(split) & (split.collectives.step == place))
    sizes = [collective_bytes(split, one) for one in chosen.tolist()]
    known = [size for size in sizes if size is not None]
    return View(
        covered_ns(split.collectives.begin_ns[chosen], split.collectives.end_ns[chosen]),
        chosen.size,
        sum(known) if len(known) == len(sizes) else None,
    )


def _gradients(split: RankSplit) -> npt.NDArray[np.bool_]:
    found = split.collectives
    floating = np.array([is_floating(name) for name in split.trace.dtypes] + [True])[found.dtype]
    chosen: npt.NDArray[np.bool_] = floating & (found.kind == KINDS.index(Collective.ALL_REDUCE))
    return chosen


def _sum(views: Sequence[View]) -> View:
    sizes = [view.bytes for view in views if view.bytes is not None]
    return View(
        sum(view.in_flight_ns for view in views),
        sum(view.collectives for view in views),
        sum(sizes) if len(sizes) == len(views) else None,
    )
