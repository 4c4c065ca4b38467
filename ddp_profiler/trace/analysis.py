"""All that a set of traces tells beyond the split of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddp_profiler.trace.across import AcrossRanks, compare
from ddp_profiler.trace.findings import Finding, find
from ddp_profiler.trace.gather import TraceSet
from ddp_profiler.trace.idle import launched_late_fraction
from ddp_profiler.trace.volume import Bandwidth, Reductions, bandwidths, reductions


@dataclass(frozen=True)
class TraceAnalysis:
    """What the ranks tell together, what they move, and what stands out.

    Attributes:
        across: Who waits for whom.
        reductions: What each rank reduces in each step, of ranks that do.
        bandwidths: busbw by kind and group.
        launched_late: Of each rank, the share of its idle time in which nothing was launched.
        findings: What a user should know.
    """

    across: AcrossRanks
    reductions: tuple[Reductions, ...]
    bandwidths: tuple[Bandwidth, ...]
    launched_late: Mapping[int, float]
    findings: tuple[Finding, ...]


def analyse(found: TraceSet) -> TraceAnalysis:
    """Derives what a set of traces tells beyond the split of each rank.

    Args:
        found: The ranks.
    """
    across = compare(found.ranks)
    # Collectives without a name may be of several groups: then nothing tells whose they are.
    several = across.clocks is not None and bool(across.clocks.unconfirmed)
    reduced = tuple(
        one
        for split in found.ranks
        if (one := reductions(split)) is not None
        and not (several and one.group is None and one.size is None)
    )
    late = {
        split.rank: fraction
        for split in found.ranks
        if (fraction := launched_late_fraction(split)) is not None
    }
    return TraceAnalysis(
        across=across,
        reductions=reduced,
        bandwidths=bandwidths(found.ranks, across),
        launched_late=late,
        findings=find(found.ranks, found.missing, across, reduced, late),
    )
