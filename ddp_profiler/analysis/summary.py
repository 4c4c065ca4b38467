"""Puts a run's levels together: from spans of all ranks to the summary."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ddp_profiler import units
from ddp_profiler.analysis import allreduce, model, statistics
from ddp_profiler.analysis.bucket_timeline import bucket_timeline
from ddp_profiler.analysis.clocks import ClockOffset, CommonClock, offsets
from ddp_profiler.analysis.collectives import derive_collectives
from ddp_profiler.analysis.confirmation import confirmed
from ddp_profiler.analysis.detail import LevelDetail, LevelSteps, levels_in_detail
from ddp_profiler.analysis.feeding import Feeding, observe
from ddp_profiler.analysis.findings import find
from ddp_profiler.analysis.gradient_scale import scale_notes
from ddp_profiler.analysis.heatmap import heat_map
from ddp_profiler.analysis.lateness import lateness
from ddp_profiler.analysis.left_out import LeftOut, left_out
from ddp_profiler.analysis.link import Link, link_of
from ddp_profiler.analysis.machine import explain
from ddp_profiler.analysis.micro_batch import curve
from ddp_profiler.analysis.model import StepCosts
from ddp_profiler.analysis.noise_findings import noise_notes
from ddp_profiler.analysis.noise_scale import noise_scale
from ddp_profiler.analysis.parts import (
    PARTS,
    Columns,
    Floats,
    Steps,
    split_exposed,
)
from ddp_profiler.analysis.placement import with_crossing
from ddp_profiler.analysis.rank_record import RankRecord, rank_record
from ddp_profiler.analysis.reduction import Reduction, examine
from ddp_profiler.analysis.reduction_findings import reduction_notes
from ddp_profiler.analysis.results import (
    BatchCheck,
    Communication,
    GradientReady,
    LevelResult,
    Overhead,
    RankResult,
    RunResult,
    Summary,
)
from ddp_profiler.analysis.roofline import describe_hardware, roofline
from ddp_profiler.analysis.sampled import sampled_windows
from ddp_profiler.analysis.scaling import Scaling, pop, scale
from ddp_profiler.analysis.soundness import contradictions
from ddp_profiler.analysis.statistics import Distribution
from ddp_profiler.analysis.stragglers import Arrivals, Straggler, find_stragglers
from ddp_profiler.schema import SCHEMA_VERSION, LevelFacts, LevelSettings, RunInfo, Variant

_MOST_FAILURES = 8
_MOST_NAMED = 3
"""Files that a note names."""

Breakdown = Mapping[str, Floats]

_REAL_TIME_APART_MS = 50.0
"""NTP keeps hosts within a few ms of each other."""
_UNCERTAIN_SHARE = 0.1
"""Waiting and transfer are told apart where clocks are known to this share of their sum,"""
_UNCERTAIN_SHARE_OF_STEP = 0.01
"""or to this share of the step."""


def summarize_run(
    info: RunInfo, columns_by_rank: Mapping[int, Columns], incomplete: Sequence[int] = ()
) -> Summary:
    """Derives a run's summary.

    Args:
        info: The run's description.
        columns_by_rank: Each rank's spans by column; ranks whose record is lost are absent.
        incomplete: Ranks whose record was cut.
    """
    records = [rank_record(info, rank, columns) for rank, columns in columns_by_rank.items()]
    return join(info, records, incomplete)


def summarize_in_detail(
    info: RunInfo, columns_by_rank: Mapping[int, Columns], incomplete: Sequence[int] = ()
) -> tuple[Summary, tuple[LevelDetail, ...]]:
    """Derives a run's summary, and what is shown of single steps; arguments as there."""
    records = [rank_record(info, rank, columns) for rank, columns in columns_by_rank.items()]
    return join_in_detail(info, records, columns_by_rank.__getitem__, incomplete)


def join(
    info: RunInfo,
    records: Sequence[RankRecord],
    incomplete: Sequence[int] = (),
    unbegun: Sequence[str] = (),
) -> Summary:
    """Joins what the ranks give to the run's summary.

    Args:
        info: The run's description.
        records: One of each rank whose record is not lost, by rising rank.
        incomplete: Ranks whose record was cut.
        unbegun: Names of files of ranks whose record never came to hold anything.
    """
    return _summary(info, records, incomplete, unbegun, _all_measured(info, records))


def join_in_detail(
    info: RunInfo,
    records: Sequence[RankRecord],
    spans_of: Callable[[int], Columns],
    incomplete: Sequence[int] = (),
    unbegun: Sequence[str] = (),
) -> tuple[Summary, tuple[LevelDetail, ...]]:
    """Joins to the summary, and to what is shown of single steps.

    Args:
        info: As there.
        records: As there.
        spans_of: Gives the spans of a rank by column; asked of the few that are shown.
        incomplete: As there.
        unbegun: As there.
    """
    measured = _all_measured(info, records)
    summary = _summary(info, records, incomplete, unbegun, measured)
    by_id = {m.level.id: m for m in measured}
    return summary, tuple(_detail(by_id[id], spans_of) for id in levels_in_detail(summary.levels))


def join_in_full(
    info: RunInfo,
    records: Sequence[RankRecord],
    spans_of: Callable[[int], Columns],
    incomplete: Sequence[int] = (),
    unbegun: Sequence[str] = (),
) -> tuple[Summary, tuple[LevelDetail, ...], tuple[LevelSteps, ...]]:
    """Joins to the summary, and to the single steps of every level; arguments as there.

    Details are those of levels with instrumented steps; the spans of all ranks are asked for.
    """
    measured = _all_measured(info, records)
    summary = _summary(info, records, incomplete, unbegun, measured)
    details = tuple(_detail(m, spans_of) for m in measured if m.instrumented)
    by_rank = {record.rank: spans_of(record.rank) for record in records}
    return summary, details, tuple(_steps(m, by_rank) for m in measured)


def _steps(measured: _Measured, by_rank: Mapping[int, Columns]) -> LevelSteps:
    return LevelSteps(
        level=measured.level.id,
        plain=measured.plain,
        instrumented=measured.instrumented,
        warmup=measured.warmup,
        breakdowns=measured.breakdowns,
        collectives=tuple(
            derive_collectives(by_rank[steps.rank], measured.index, Variant.INSTRUMENTED, steps.key)
            for steps in measured.instrumented
        ),
    )


def _all_measured(info: RunInfo, records: Sequence[RankRecord]) -> list[_Measured]:
    facts = {fact.id: fact for fact in info.facts}
    by_rank = {record.rank: record for record in records}
    clock = CommonClock(info)
    return [
        _measured(clock, index, level, facts.get(level.id), by_rank)
        for index, level in enumerate(info.levels)
    ]


def _detail(measured: _Measured, spans_of: Callable[[int], Columns]) -> LevelDetail:
    """Returns what is shown of a level's single steps."""
    arrivals, dp = measured.arrivals, measured.level.dp
    latest = _latest_local_end(arrivals) if measured.comparable and dp > 1 else None
    return LevelDetail(
        level=measured.level.id,
        heat_map=heat_map(measured.instrumented, measured.breakdowns),
        timeline=bucket_timeline(
            arrivals,
            spans_of,
            measured.index,
            latest,
            dp,
        ),
        withheld=measured.withheld,
    )


def _summary(
    info: RunInfo,
    records: Sequence[RankRecord],
    incomplete: Sequence[int],
    unbegun: Sequence[str],
    measured: Sequence[_Measured],
) -> Summary:
    levels = with_crossing([_level(info, m, measured) for m in measured])
    missing = sorted(set(range(info.world_size)) - {record.rank for record in records})
    partial = info.status != "complete" or bool(missing) or bool(incomplete)
    notes = _failure_notes(info)
    notes += _missing_notes(info, missing)
    if unbegun:
        more = f" and {len(unbegun) - _MOST_NAMED} more" if len(unbegun) > _MOST_NAMED else ""
        notes.append(
            f"Of the missing records a file is there that ends before anything was recorded: "
            f"{', '.join(unbegun[:_MOST_NAMED])}{more}."
        )
    if incomplete:
        notes.append(f"The record of {units.ranks(incomplete)} was cut: the run did not end.")
    # What is said first is what came first: the failure, before the records that it left out.
    reason = notes[0] if partial and notes else None
    notes += contradictions({record.rank: record.soundness for record in records})
    clocks = offsets(info)
    notes += _clock_notes(clocks)
    notes += _contention_notes(info)
    return Summary(
        schema_version=SCHEMA_VERSION,
        run=RunResult(
            run_id=info.run_id,
            status=info.status,
            created=info.created,
            profiler_version=info.profiler_version,
            world_size=info.world_size,
            nodes=len({place.node for place in info.ranks}) or 1,
            partial=partial,
            settings=info.settings,
            environment=info.environment,
            statistics_unit=_statistics_unit(levels),
            clocks=clocks,
            hardware=describe_hardware(info.facts),
            partial_reason=reason,
        ),
        levels=levels,
        findings=find(levels),
        notes=tuple(notes),
        confirmation=confirmed(info.confirmation),
        micro_batches=curve(info.micro_batches),
    )


def _statistics_unit(levels: Sequence[LevelResult]) -> str:
    most = max((level.repetitions for level in levels), default=0)
    if most > 1:
        return f"{most} repetitions of each level in one launch (t interval of their medians)"
    return "steps of one launch (moving-block bootstrap); launches differ by more"


def _missing_notes(info: RunInfo, missing: Sequence[int]) -> list[str]:
    """Says which ranks' records are missing, and where nodes without a shared folder kept them."""
    notes = []
    left = set(missing)
    for part in info.parts:
        there = left & set(part.ranks)
        if there:
            notes.append(
                f"The record of {units.ranks(there)} is missing here; it was written on "
                f"{part.hostname} in {part.folder}. Join both with ddp-profiler merge."
            )
            left -= there
    if left:
        notes.append(f"The record of {units.ranks(left)} is missing.")
    return notes


def _clock_notes(clocks: Sequence[ClockOffset]) -> list[str]:
    apart = [clock for clock in clocks if abs(clock.real_time_offset_ms) >= _REAL_TIME_APART_MS]
    if not apart:
        return []
    worst = max(apart, key=lambda clock: abs(clock.real_time_offset_ms))
    return [
        f"Real time on rank {worst.rank}'s host is {worst.real_time_offset_ms:+.0f} ms from that "
        "on rank 0's: their logs and traces do not line up. The figures here do not use it."
    ]


def _failure_notes(info: RunInfo) -> list[str]:
    """Says which ranks failed, the first one first, and which gave no sign of life then."""
    shown = info.failures[:_MOST_FAILURES]
    notes = [f"Rank {f.rank} failed in {f.phase}: {f.message}" for f in shown]
    left = [f.rank for f in info.failures[_MOST_FAILURES:]]
    if left:
        notes.append(f"{units.ranks(left).capitalize()} failed after that.")
    told = {failure.rank for failure in info.failures if failure.signal}
    silent = [p for p in info.phases if p.responds is False and p.rank not in told]
    notes += [
        f"Rank {p.rank} on {p.hostname} gave no sign of life when the run failed; its last phase: "
        f"{p.phase}."
        for p in silent[:_MOST_FAILURES]
    ]
    if len(silent) > _MOST_FAILURES:
        notes.append(f"Nor did {len(silent) - _MOST_FAILURES} more.")
    return notes


def _contention_notes(info: RunInfo) -> list[str]:
    notes = []
    for node, environment in info.environment.items():
        cores, ranks = environment.get("cores"), environment.get("local_world_size")
        threads = environment.get("threads_per_rank")
        on_cpu = environment.get("device_type") == "cpu"
        if (
            on_cpu
            and isinstance(cores, int)
            and isinstance(ranks, int)
            and isinstance(threads, int)
            and ranks * threads > cores
        ):
            notes.append(
                f"Node {node} has {cores} cores for {ranks} ranks x {threads} threads: ranks "
                "compete for cores, so steps at the larger dp are slower than on a machine "
                "with a core for each."
            )
    return notes


@dataclass(frozen=True)
class _Measured:
    """One level's steps by variant, one entry a rank each, and what follows from them alone."""

    index: int
    level: LevelSettings
    facts: LevelFacts | None
    ranks: tuple[int, ...]
    columns: tuple[Columns, ...]
    ready_ms: tuple[Floats, ...]
    plain: tuple[Steps, ...]
    instrumented: tuple[Steps, ...]
    warmup: tuple[Steps, ...]
    no_sync: tuple[Steps, ...]
    ready: tuple[Steps, ...]
    bare: tuple[Steps, ...]
    breakdowns: tuple[Breakdown, ...]
    arrivals: tuple[Arrivals, ...]
    clock_uncertainty_ms: float | None
    withheld: str | None
    left_out: LeftOut

    @property
    def comparable(self) -> bool:
        """Whether times of different ranks can be compared; ``withheld`` says why not."""
        return self.withheld is None

    @property
    def costs(self) -> StepCosts | None:
        """Costs of a step per micro-step and per step."""
        return model.costs(
            self.instrumented, self.breakdowns, self.no_sync, self.level.accumulation
        )


def _measured(
    clock: CommonClock,
    index: int,
    level: LevelSettings,
    facts: LevelFacts | None,
    by_rank: Mapping[int, RankRecord],
) -> _Measured:
    records = [by_rank[rank] for rank in level.ranks if rank in by_rank]
    ranks = [record.rank for record in records]
    columns = {record.rank: record.columns for record in records}

    out = left_out([columns[rank] for rank in ranks], index)

    def steps_of(variant: Variant) -> tuple[Steps, ...]:
        there = (record.steps_of(index, variant) for record in records)
        found = [steps for steps in there if steps is not None]
        if len(out.keys):
            found = [steps.only(~np.isin(steps.key, out.keys)) for steps in found]
        return _common([steps for steps in found if len(steps)])

    instrumented = steps_of(Variant.INSTRUMENTED)
    uncertainty_ms = None
    if clock.compares(level.ranks):
        by_rank_ns = {record.rank: record.clock_uncertainty_ns[index] for record in records}
        # Two devices, each tied to its host.
        of_devices = 2 * facts.device_clock_uncertainty_ns / 1e6 if facts else 0.0
        uncertainty_ms = clock.joint_uncertainty_ms(by_rank_ns) + of_devices
    arrivals = tuple(Arrivals(steps, clock.common(steps.rank)) for steps in instrumented)
    breakdowns, withheld = _split(arrivals, level.dp, uncertainty_ms)
    return _Measured(
        index=index,
        level=level,
        facts=facts,
        ranks=tuple(ranks),
        columns=tuple(columns.values()),
        ready_ms=tuple(r.ready[index] for r in records if index in r.ready),
        plain=steps_of(Variant.PLAIN),
        instrumented=instrumented,
        warmup=steps_of(Variant.WARMUP),
        no_sync=steps_of(Variant.NO_SYNC),
        ready=steps_of(Variant.READY),
        bare=steps_of(Variant.BARE),
        breakdowns=breakdowns,
        arrivals=arrivals,
        clock_uncertainty_ms=uncertainty_ms,
        withheld=withheld,
        left_out=out,
    )


def _split(
    arrivals: Sequence[Arrivals], dp: int, uncertainty_ms: float | None
) -> tuple[tuple[Breakdown, ...], str | None]:
    """Splits exposed communication into wait and transfer where the record carries that.

    Returns:
        Each rank's parts, and why they do not tell wait from transfer; None if they do.
    """
    ranks = [arrival.steps for arrival in arrivals]
    together = tuple(_breakdowns(arrivals, dp, comparable=False))
    if dp == 1 or not ranks or not len(ranks[0]):
        return together, None
    if len(ranks) < dp:
        return together, "the record of a rank is missing"
    if uncertainty_ms is None:
        return together, "the ranks' hosts have clocks of their own, and they were not compared"
    # Without other ranks' clocks: exposed_transfer holds both here.
    exposed_ms = float(np.mean([b["exposed_transfer"].mean() for b in together]))
    step_ms = float(np.mean([steps.wall_ms.mean() for steps in ranks]))
    if uncertainty_ms > max(_UNCERTAIN_SHARE * exposed_ms, _UNCERTAIN_SHARE_OF_STEP * step_ms):
        return together, (
            f"the hosts' clocks are known to {uncertainty_ms:.2g} ms, and exposed communication "
            f"is {exposed_ms:.2g} ms"
        )
    return tuple(_breakdowns(arrivals, dp, comparable=True)), None


def _common(ranks: Sequence[Steps]) -> tuple[Steps, ...]:
    """Keeps the steps that all ranks have: of a run that was cut, some lack the last ones."""
    keys = [steps.key for steps in ranks]
    shared = functools.reduce(np.intersect1d, keys) if keys else np.empty(0)
    if not len(shared):
        # Of a damaged record: it is as if there were none.
        return ()
    return tuple(
        steps if len(steps) == len(shared) else steps.only(np.isin(steps.key, shared))
        for steps in ranks
    )


@dataclass(frozen=True)
class _Reference:
    """The dp = 1 level that a level is compared with, and what that comparison allows."""

    measured: _Measured
    same_work: bool
    same_micro_batch: bool


def _reference(
    info: RunInfo, measured: _Measured, all_levels: Sequence[_Measured]
) -> _Reference | None:
    """Finds the dp = 1 level to compare with; the same one for everything.

    In this order: same micro-batch and accumulation (weak scaling); same micro-batch and
    global batch (strong scaling); same global batch (throughputs can be compared, costs
    of a micro-step cannot); same micro-batch, nearest accumulation (the other way round).
    None where samples were not seen, so that it is not known what is the same, and of a script
    that was launched once.
    """
    own = measured.level
    if not own.micro_batch or _is_lone_script(info):
        return None
    singles = [m for m in all_levels if m.level.dp == 1 and m.plain]
    ranked = sorted(singles, key=lambda m: abs(m.level.accumulation - own.accumulation))
    same_micro = [m for m in ranked if m.level.micro_batch == own.micro_batch]
    for candidates, same_work, same_micro_batch in (
        ([m for m in same_micro if m.level.accumulation == own.accumulation], True, True),
        ([m for m in same_micro if m.level.global_batch == own.global_batch], True, True),
        ([m for m in ranked if m.level.global_batch == own.global_batch], True, False),
        (same_micro, False, True),
    ):
        if candidates:
            return _Reference(candidates[0], same_work, same_micro_batch)
    return None


def _is_lone_script(info: RunInfo) -> bool:
    """Tells whether a run is one launch of a script: one level, with nothing to compare it to."""
    return "script" in info.settings and len(info.levels) == 1


def _reference_note(info: RunInfo, level: LevelSettings, reference: _Reference | None) -> list[str]:
    if level.dp == 1 or "script" in info.settings:
        # A launch of a script is one level; others of a study are beside it.
        return []
    if reference is None and any(other.dp == 1 for other in info.levels):
        return ["The dp = 1 level has no steps here: no efficiency and no waterfall."]
    if reference is None:
        return ["There is no dp = 1 level to compare with: no efficiency and no waterfall."]
    name = reference.measured.level.id
    if not reference.same_micro_batch:
        return [
            f"Efficiency is against {name}, of the same global batch and another micro-batch; "
            f"a waterfall needs a dp = 1 level with micro-batch {level.micro_batch}."
        ]
    if not reference.same_work:
        return [f"The waterfall is against {name}, re-expressed; efficiency needs equal batches."]
    return []


def _level(info: RunInfo, measured: _Measured, all_levels: Sequence[_Measured]) -> LevelResult:
    level, facts = measured.level, measured.facts
    places = {place.rank: place for place in info.ranks}
    machines = {use.rank: use for use in facts.machine} if facts else {}
    notes = list(facts.notes) if facts else []
    if measured.withheld is not None and measured.instrumented:
        both = measured.clock_uncertainty_ms is None or len(measured.instrumented) < level.dp
        what = "exposed_wait and stragglers are" if both else "exposed_wait is"
        notes.append(
            f"{what} withheld: {measured.withheld}; exposed_transfer holds waiting and transfer "
            "together."
        )
    notes += measured.left_out.notes
    reduction = examine(
        dict(zip(measured.ranks, measured.columns, strict=True)),
        measured.index,
        level,
        facts,
        measured.instrumented,
    )
    notes += reduction_notes(reduction)
    notes += _subset_note(measured)
    step_ms, instrumented_ms = _summarize(measured.plain), _summarize(measured.instrumented)
    breakdown_ms = _mean_breakdown(measured.breakdowns)
    noise = noise_scale(
        dict(zip(measured.ranks, measured.columns, strict=True)), measured.index, level, facts
    )
    notes += noise_notes(noise)
    observed, micro_steps = _observed(measured.instrumented, level)
    samples_per_s = _throughput(step_ms, observed or level.global_batch or None)
    feeding = observe(
        dict(zip(measured.ranks, measured.columns, strict=True)),
        measured.index,
        level,
        facts,
        measured.left_out,
    )
    costs, reference = measured.costs, _reference(info, measured, all_levels)
    notes += _reference_note(info, level, reference) if measured.ranks else []
    base = reference.measured if reference and reference.same_micro_batch else None
    single = base.costs if base else None
    bare = model.bare_costs(base.bare, base.level.accumulation) if base else None
    falls = (
        model.waterfall(costs, single, bare, level.accumulation, step_ms.mean)
        if costs and single and bare and step_ms
        else None
    )
    scaling = _scaling(level, samples_per_s, reference)
    stragglers = _stragglers(measured)
    return LevelResult(
        id=level.id,
        dp=level.dp,
        nodes=len({places[r].node for r in level.ranks if r in places}) or 1,
        placement=level.placement,
        micro_batch=level.micro_batch or None,
        accumulation=level.accumulation,
        global_batch=level.global_batch or None,
        steps=max((len(steps) for steps in measured.plain), default=0),
        repetitions=_repetitions(measured.plain),
        warmup_steps=max((len(steps) for steps in measured.warmup), default=0),
        warmup_ms=float(np.mean([s.wall_ms.sum() for s in measured.warmup]))
        if measured.warmup
        else None,
        step_ms=step_ms,
        instrumented_step_ms=instrumented_ms,
        samples_per_s=samples_per_s,
        tokens_per_s=_tokens_per_s(info, samples_per_s, step_ms, feeding),
        mfu=_mfu(samples_per_s, level.dp, facts),
        breakdown_ms=breakdown_ms,
        comm=_communication(measured.instrumented, level, facts),
        # Its time is that of the last rank to enter it, which may be the one that is missing.
        allreduce=allreduce.isolated(measured.columns, measured.index, level.dp, _link(info, facts))
        if len(measured.columns) == level.dp
        else None,
        batch_check=_batch_check(
            level,
            observed,
            micro_steps,
            facts,
            _declared(info, level),
            feeding,
            reduction,
            scale_notes(info, level, facts),
        ),
        overhead=_overhead(measured.plain, measured.instrumented),
        gradient_ready=_gradient_ready(measured),
        costs_ms=costs,
        contention_ms=costs.sync_backward - single.at(level.accumulation).sync_backward
        if costs and single
        else None,
        wrapper_ms=falls["wrapper"] if falls else None,
        speedup=scaling.speedup if scaling else None,
        efficiency=scaling.efficiency if scaling else None,
        pop=pop(measured.instrumented, measured.breakdowns, single, level.accumulation)
        if measured.comparable or level.dp == 1
        else None,
        reference=reference.measured.level.id if reference else None,
        waterfall_ms=falls,
        clock_uncertainty_ms=measured.clock_uncertainty_ms,
        straggler=stragglers[0] if stragglers else None,
        stragglers=stragglers,
        ranks=tuple(
            RankResult(
                rank=steps.rank,
                node=places[steps.rank].node if steps.rank in places else 0,
                hostname=places[steps.rank].hostname if steps.rank in places else "",
                steps=len(steps),
                step_ms=float(steps.wall_ms.mean()),
                breakdown_ms=_finite({part: float(b[part].mean()) for part in PARTS}),
                machine=machines.get(steps.rank),
            )
            for steps, b in zip(measured.instrumented, measured.breakdowns, strict=True)
        ),
        notes=tuple(notes),
        feeding=feeding,
        windows=sampled_windows(
            measured.columns,
            measured.index,
            measured.plain,
            measured.arrivals,
            measured.clock_uncertainty_ms if len(measured.instrumented) == level.dp else None,
        ),
        reduction=reduction,
        lateness=lateness(measured.arrivals)
        if measured.comparable and len(measured.instrumented) == level.dp
        else None,
        gradient_element_bytes=facts.gradient_bytes / facts.parameters
        if facts and facts.parameters
        else None,
        roofline=roofline(
            breakdown_ms,
            instrumented_ms.mean if instrumented_ms else None,
            level.accumulation,
            facts,
            step_ms.mean if step_ms else None,
        ),
        noise_scale=noise,
        breakdown_ci95_ms=_breakdown_intervals(measured.breakdowns),
    )


def _stragglers(measured: _Measured) -> tuple[Straggler, ...]:
    """Returns who is late, with what the machine shows about them.

    Also where waiting and transfer are not told apart: a lag may be far larger than the
    clocks' uncertainty though exposed communication is not.
    """
    uncertainty_ms = measured.clock_uncertainty_ms
    if uncertainty_ms is None or len(measured.instrumented) < measured.level.dp:
        return ()
    found = find_stragglers(measured.arrivals, uncertainty_ms)
    uses = measured.facts.machine if measured.facts else ()
    return tuple(replace(late, evidence=explain(late.rank, uses)) for late in found)


def _subset_note(measured: _Measured) -> list[str]:
    """Says of which ranks the figures are, where records are missing."""
    level, there = measured.level, measured.ranks
    if len(there) == level.dp:
        return []
    if not there:
        return [f"No step of this level is recorded here: it ran on {units.ranks(level.ranks)}."]
    return [
        f"Figures are means over {units.ranks(there)} of this level's {level.dp}; AllReduce in "
        "isolation is left out, since it needs all ranks."
    ]


def _link(info: RunInfo, facts: LevelFacts | None) -> Link | None:
    declared = info.settings.get("link_gbps")
    return link_of(
        facts.link if facts else None,
        {place.rank: place for place in info.ranks},
        declared if isinstance(declared, (int, float)) else None,
    )


def _declared(info: RunInfo, level: LevelSettings) -> int | None:
    """Returns the global batch that the user expects of this level, if any.

    Under weak scaling the global batch grows with dp: the word is about the largest, and
    there about the accumulation that gives it, if one does.
    """
    expected = info.settings.get("expect_global_batch")
    if not isinstance(expected, int):
        return None
    if info.settings.get("global_batch") is not None:
        return expected
    largest = max(other.dp for other in info.levels)
    held = [other for other in info.levels if other.dp == largest]
    held = [other for other in held if other.global_batch == expected] or held
    return expected if level in held else None


def _throughput(step_ms: Distribution | None, samples: int | None) -> float | None:
    return samples / step_ms.mean * 1e3 if step_ms and samples else None


def _tokens_per_s(
    info: RunInfo,
    samples_per_s: float | None,
    step_ms: Distribution | None,
    feeding: Feeding | None,
) -> float | None:
    """Returns the tokens of plain steps, seen or by the model's settings, over their time."""
    if feeding is not None and feeding.tokens is not None:
        mean = feeding.tokens.step_mean
        return mean / step_ms.mean * 1e3 if mean is not None and step_ms else None
    tokens = info.settings.get("tokens_per_sample")
    if samples_per_s is None or not isinstance(tokens, int):
        return None
    return samples_per_s * tokens


def _mfu(samples_per_s: float | None, dp: int, facts: LevelFacts | None) -> float | None:
    """Returns achieved over peak FLOP/s of the level's devices; None where either is unknown."""
    if samples_per_s is None or facts is None:
        return None
    if not facts.flops_per_sample or not facts.peak_flops_per_s:
        return None
    return samples_per_s * facts.flops_per_sample / (dp * facts.peak_flops_per_s)


def _scaling(
    level: LevelSettings, samples_per_s: float | None, reference: _Reference | None
) -> Scaling | None:
    """Compares a level's throughput with that of its dp = 1 level."""
    if reference is None or not reference.same_work or samples_per_s is None:
        return None
    single = reference.measured
    observed, _ = _observed(single.instrumented, single.level)
    rate = _throughput(_summarize(single.plain), observed or single.level.global_batch)
    if rate is None:
        return None
    return scale({1: rate, level.dp: samples_per_s})[-1]


def _repetitions(ranks: Sequence[Steps]) -> int:
    return max((len(np.unique(steps.repetition)) for steps in ranks), default=0)


def _summarize(ranks: Sequence[Steps]) -> Distribution | None:
    """Summarizes the mean over ranks of each step; repetitions are the unit where there are any."""
    return statistics.summarize(_mean_over_ranks(ranks), ranks[0].repetition if ranks else None)


def _gradient_ready(measured: _Measured) -> tuple[GradientReady, ...]:
    """Returns when each parameter's gradient is ready in backward, mean over ranks and steps."""
    if measured.facts is None or not measured.ready:
        return ()
    with warnings.catch_warnings():
        # A parameter without any gradient is NaN on every rank.
        warnings.simplefilter("ignore", RuntimeWarning)
        mean = np.nanmean(measured.ready_ms, axis=0)
    return tuple(
        GradientReady(
            name=parameter.name,
            bytes=parameter.nbytes,
            ready_ms=float(time) if np.isfinite(time) else None,
        )
        for parameter, time in zip(measured.facts.reduced, mean, strict=True)
    )


def _breakdowns(arrivals: Sequence[Arrivals], dp: int, comparable: bool) -> list[Breakdown]:
    """Returns all parts of each step of each rank, in ms, [step] each."""
    latest = _latest_local_end(arrivals) if comparable and dp > 1 else None
    result: list[Breakdown] = []
    for i, arrival in enumerate(arrivals):
        exposed = split_exposed(arrival.steps, None if latest is None else latest[i], dp)
        result.append({**arrival.steps.parts_ms, **exposed})
    return result


def _latest_local_end(arrivals: Sequence[Arrivals]) -> list[npt.NDArray[np.int64]]:
    """Returns, for each rank's backward calls, the latest end of local backward of all ranks.

    On the rank's own clock: only the distance to its own end comes from the common one.
    """
    if not arrivals:
        return []
    own = [arrival.steps.backwards.local_end for arrival in arrivals]
    common = [arrival.common(ends) for arrival, ends in zip(arrivals, own, strict=True)]
    by_rank = [arrival.steps.backwards.key for arrival in arrivals]
    unique, inverse = np.unique(np.concatenate(by_rank), return_inverse=True)
    latest = np.full(len(unique), np.iinfo(np.int64).min)
    np.maximum.at(latest, inverse, np.concatenate(common))
    return [
        ends + latest[np.searchsorted(unique, key)] - told
        for key, ends, told in zip(by_rank, own, common, strict=True)
    ]


def _mean_over_ranks(ranks: Sequence[Steps]) -> Floats:
    """Returns the mean wall time over ranks of each step, in order."""
    if not ranks:
        return np.empty(0)
    mean: Floats = np.mean([steps.wall_ms for steps in ranks], axis=0)
    return mean


def _mean_breakdown(breakdowns: Sequence[Breakdown]) -> Mapping[str, float | None]:
    if not breakdowns:
        return dict.fromkeys(PARTS, None)
    return _finite({part: float(np.mean([b[part].mean() for b in breakdowns])) for part in PARTS})


def _breakdown_intervals(
    breakdowns: Sequence[Breakdown],
) -> Mapping[str, tuple[float, float] | None] | None:
    """Returns the interval of each part's mean, from the means over ranks of each step."""
    if not breakdowns:
        return None
    found = {}
    for part in PARTS:
        values: Floats = np.mean([b[part] for b in breakdowns], axis=0)
        found[part] = statistics.mean_interval(values) if np.isfinite(values).all() else None
    return found


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if np.isfinite(value) else None for name, value in values.items()}


def _observed(ranks: Sequence[Steps], level: LevelSettings) -> tuple[int | None, float | None]:
    """Returns samples a step summed over ranks (None where steps differ), and micro-steps."""
    if len(ranks) < level.dp:
        return None, None
    micro = float(np.mean([steps.micro_steps.mean() for steps in ranks]))
    totals = np.sum([steps.samples for steps in ranks], axis=0)
    unseen = any(not steps.samples.any() for steps in ranks)
    if unseen or len(set(totals.tolist())) != 1:
        return None, micro
    return int(totals[0]), micro


def _batch_check(
    level: LevelSettings,
    observed: int | None,
    micro_steps: float | None,
    facts: LevelFacts | None,
    declared: int | None,
    feeding: Feeding | None,
    reduction: Reduction | None,
    more_notes: Sequence[str],
) -> BatchCheck:
    notes = []
    if not level.micro_batch:
        notes.append("Samples were not seen: the batch and samples/s are not known.")
    elif observed is None:
        notes.append("Samples were not observed on every rank, or differed between steps.")
    elif observed != level.global_batch:
        notes.append(
            f"Observed {observed} samples a step, configured {level.micro_batch} x "
            f"{level.accumulation} x {level.dp} = {level.global_batch}."
        )
    if declared is not None and observed is not None and declared != observed:
        notes.append(f"Expected {declared} samples a step, observed {observed}.")
    if micro_steps is not None and micro_steps != level.accumulation:
        notes.append(f"{micro_steps:g} forward calls a step and rank, not {level.accumulation}.")
    if feeding is not None:
        notes += feeding.notes
    proof = facts.proof if facts else None
    ranks_agree = proof.ranks_agree if proof else None
    if reduction is not None and reduction.compared:
        ranks_agree = not reduction.differing
    if proof is not None:
        notes += proof.notes
    notes += more_notes
    configured = level.global_batch or None
    known = {configured, observed, declared} - {None}
    return BatchCheck(
        declared=declared,
        configured=configured,
        observed=observed,
        ok=None if observed is None else len(known) == 1,
        gradient_max_rel_error=proof.max_rel_error if proof else None,
        gradient_worst_tensor=proof.worst_tensor if proof else None,
        gradient_factor=proof.factor if proof else None,
        gradient_factor_name=proof.factor_name if proof else None,
        gradient_unexplained=proof.unexplained if proof else None,
        gradient_must_match=proof.must_be_equal if proof else None,
        ranks_agree=ranks_agree,
        notes=tuple(notes),
    )


def _communication(
    ranks: Sequence[Steps], level: LevelSettings, facts: LevelFacts | None
) -> Communication:
    sources = facts.sources if facts else {}
    seen = bool(ranks) and sources.get("gradient_collectives") is not None
    busy = float(np.mean([s.busy_ms.mean() for s in ranks])) if seen else None
    overlapped = float(np.mean([s.overlapped_ms.mean() for s in ranks])) if seen else None
    communicates = level.dp > 1 and busy is not None and busy > 0
    return Communication(
        busy_ms=busy if communicates else None,
        overlapped_ms=overlapped if communicates else None,
        overlap_fraction=overlapped / busy
        if communicates and busy and overlapped is not None
        else None,
        gradient_bytes=round(float(np.mean([s.gradient_bytes.mean() for s in ranks])))
        if seen
        else None,
        num_buckets=facts.num_buckets if facts else None,
        num_gradient_collectives_per_step=float(np.mean([s.collectives.mean() for s in ranks]))
        if seen
        else None,
        unnoticed_completions=sum(s.unnoticed for s in ranks),
        sources=sources,
    )


def _overhead(plain: Sequence[Steps], instrumented: Sequence[Steps]) -> Overhead | None:
    """Compares the medians of neighbouring plain and instrumented blocks, all ranks together."""
    plain_blocks, instrumented_blocks = _block_medians(plain), _block_medians(instrumented)
    pairs = [
        (plain_blocks[p], instrumented_blocks[i])
        for p, i in zip(sorted(plain_blocks), sorted(instrumented_blocks), strict=False)
    ]
    if not pairs:
        return None
    table = np.array(pairs)
    ratios = (table[:, 1] / table[:, 0] - 1) * 100
    return Overhead(
        plain_ms=float(np.median(np.concatenate([s.wall_ms for s in plain]))),
        instrumented_ms=float(np.median(np.concatenate([s.wall_ms for s in instrumented]))),
        overhead_pct=float(np.median(ratios)),
        ci95_pct=statistics.block_bootstrap(ratios, lambda v: np.median(v, axis=-1), block=1),
    )


def _block_medians(ranks: Sequence[Steps]) -> dict[tuple[int, int], float]:
    values: dict[tuple[int, int], list[Floats]] = {}
    for steps in ranks:
        for place in set(zip(steps.repetition.tolist(), steps.block.tolist(), strict=True)):
            mask = (steps.repetition == place[0]) & (steps.block == place[1])
            values.setdefault(place, []).append(steps.wall_ms[mask])
    return {place: float(np.median(np.concatenate(walls))) for place, walls in values.items()}
