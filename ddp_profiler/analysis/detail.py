"""What a report shows of single steps, beyond the means of the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_profiler.analysis.bucket_timeline import BucketTimeline
from ddp_profiler.analysis.collectives import Collectives
from ddp_profiler.analysis.heatmap import HeatMap
from ddp_profiler.analysis.parts import Floats, Steps
from ddp_profiler.analysis.placement import largest
from ddp_profiler.analysis.results import LevelResult

MOST_LEVELS = 3


@dataclass(frozen=True)
class LevelDetail:
    """Single steps of a level; bounded in size however long the run was.

    Attributes:
        level: Its id.
        heat_map: Ranks against each other, step by step; None for a single rank.
        timeline: A typical step; None where nothing was reduced.
        withheld: Why waiting and transfer are not told apart; None if they are.
    """

    level: str
    heat_map: HeatMap | None
    timeline: BucketTimeline | None
    withheld: str | None = None


@dataclass(frozen=True)
class LevelSteps:
    """Every step of a level that its figures are means of; one entry a rank in each tuple.

    Attributes:
        level: Its id.
        plain: Steps without instrumentation; nothing but their length is known.
        instrumented: Steps with all marks.
        warmup: Steps before steady state, which no figure holds.
        breakdowns: All parts of the instrumented steps in ms, [step] each; NaN where a part
            cannot be told.
        collectives: Gradient collectives of the instrumented steps.
    """

    level: str
    plain: tuple[Steps, ...]
    instrumented: tuple[Steps, ...]
    warmup: tuple[Steps, ...]
    breakdowns: tuple[Mapping[str, Floats], ...]
    collectives: tuple[Collectives, ...]


def levels_in_detail(levels: Sequence[LevelResult]) -> tuple[str, ...]:
    """Returns the ids of the levels worth a look at single steps, at most 3.

    The largest one with instrumented steps, and those where a straggler costs most.
    """
    measured = [level for level in levels if level.instrumented_step_ms is not None]
    most = largest(measured)
    late = sorted(
        (level for level in measured if level.straggler and level is not most),
        key=lambda level: -(level.straggler.recoverable_ms if level.straggler else 0.0),
    )
    chosen = ([most] if most else []) + late
    return tuple(level.id for level in chosen[:MOST_LEVELS])
