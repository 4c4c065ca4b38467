"""Puts a run's levels together: from spans of all ranks to the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ddp_profiler.analysis import statistics
from ddp_profiler.analysis.parts import PARTS, Columns, Floats, Steps, derive_steps, split_exposed
from ddp_profiler.analysis.results import (
    BatchCheck,
    Communication,
    LevelResult,
    Overhead,
    RankResult,
    RunResult,
    Summary,
)
from ddp_profiler.schema import SCHEMA_VERSION, LevelFacts, LevelSettings, RunInfo, Variant

Breakdown = Mapping[str, Floats]


def summarize_run(
    info: RunInfo, columns_by_rank: Mapping[int, Columns], incomplete: Sequence[int] = ()
) -> Summary:
    """Derives a run's summary.

    Args:
        info: The run's description.
        columns_by_rank: Each rank's spans by column; ranks whose record is lost are absent.
        incomplete: Ranks whose record was cut.
    """
    facts = {fact.id: fact for fact in info.facts}
    levels = tuple(
        _level(info, index, level, facts.get(level.id), columns_by_rank)
        for index, level in enumerate(info.levels)
    )
    missing = sorted(set(range(info.world_size)) - set(columns_by_rank))
    partial = info.status != "complete" or bool(missing) or bool(incomplete)
    notes = [f"Rank {f.rank} failed in {f.phase}: {f.message}" for f in info.failures]
    if missing:
        notes.append(f"The record of rank {_some(missing)} is missing.")
    if incomplete:
        notes.append(f"The record of rank {_some(incomplete)} was cut: the run did not end.")
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
            statistics_unit="steps of one launch (moving-block bootstrap)",
        ),
        levels=levels,
        findings=(),
        notes=tuple(notes),
    )


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


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


def _level(
    info: RunInfo,
    index: int,
    level: LevelSettings,
    facts: LevelFacts | None,
    columns_by_rank: Mapping[int, Columns],
) -> LevelResult:
    def steps_of(variant: Variant) -> list[Steps]:
        found = [
            derive_steps(rank, columns_by_rank[rank], index, variant)
            for rank in level.ranks
            if rank in columns_by_rank
        ]
        return [steps for steps in found if len(steps)]

    plain = steps_of(Variant.PLAIN)
    instrumented = steps_of(Variant.INSTRUMENTED)
    warmup = steps_of(Variant.WARMUP)
    places = {place.rank: place for place in info.ranks}
    domains = {places[r].clock_domain for r in level.ranks if r in places}
    notes = list(facts.notes) if facts else []
    comparable = len(domains) <= 1
    if not comparable and level.dp > 1:
        notes.append(
            "exposed_wait is withheld: the ranks' hosts have clocks of their own; "
            "exposed_transfer holds waiting and transfer together."
        )
    breakdowns = _breakdowns(instrumented, level.dp, comparable)
    step_ms = statistics.summarize(_mean_over_ranks(plain))
    breakdown = _mean_breakdown(breakdowns)
    observed, micro_steps = _observed(instrumented, level)
    seconds = step_ms.mean / 1e3 if step_ms else None
    samples_per_s = (observed or level.global_batch) / seconds if seconds else None
    tokens = info.settings.get("tokens_per_sample")
    return LevelResult(
        id=level.id,
        dp=level.dp,
        nodes=len({places[r].node for r in level.ranks if r in places}) or 1,
        placement=level.placement,
        micro_batch=level.micro_batch,
        accumulation=level.accumulation,
        global_batch=level.global_batch,
        steps=max((len(steps) for steps in plain), default=0),
        warmup_steps=max((len(steps) for steps in warmup), default=0),
        warmup_ms=float(np.mean([s.wall_ms.sum() for s in warmup])) if warmup else None,
        step_ms=step_ms,
        instrumented_step_ms=statistics.summarize(_mean_over_ranks(instrumented)),
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens
        if samples_per_s is not None and isinstance(tokens, int)
        else None,
        breakdown_ms=breakdown,
        comm=_communication(instrumented, level, facts),
        batch_check=_batch_check(level, observed, micro_steps),
        overhead=_overhead(plain, instrumented),
        ranks=tuple(
            RankResult(
                rank=steps.rank,
                node=places[steps.rank].node if steps.rank in places else 0,
                hostname=places[steps.rank].hostname if steps.rank in places else "",
                steps=len(steps),
                step_ms=float(steps.wall_ms.mean()),
                breakdown_ms=_finite({part: float(b[part].mean()) for part in PARTS}),
            )
            for steps, b in zip(instrumented, breakdowns, strict=True)
        ),
        notes=tuple(notes),
    )


def _breakdowns(ranks: Sequence[Steps], dp: int, comparable: bool) -> list[Breakdown]:
    """Returns all parts of each step of each rank, in ms, [step] each."""
    latest = _latest_local_end(ranks) if comparable and dp > 1 else None
    result: list[Breakdown] = []
    for i, steps in enumerate(ranks):
        exposed = split_exposed(steps, None if latest is None else latest[i], dp)
        result.append({**steps.parts_ms, **exposed})
    return result


def _latest_local_end(ranks: Sequence[Steps]) -> list[npt.NDArray[np.int64]]:
    """Returns, for each rank's backward calls, the latest end of local backward of all ranks."""
    keys = np.concatenate([steps.backwards.key for steps in ranks])
    ends = np.concatenate([steps.backwards.local_end for steps in ranks])
    unique, inverse = np.unique(keys, return_inverse=True)
    latest = np.full(len(unique), np.iinfo(np.int64).min)
    np.maximum.at(latest, inverse, ends)
    return [latest[np.searchsorted(unique, steps.backwards.key)] for steps in ranks]


def _mean_over_ranks(ranks: Sequence[Steps]) -> Floats:
    """Returns the mean wall time over ranks of each step that all ranks have, in order."""
    if not ranks:
        return np.empty(0)
    keys = ranks[0].key
    for steps in ranks[1:]:
        keys = np.intersect1d(keys, steps.key)
    walls = [steps.wall_ms[np.isin(steps.key, keys)] for steps in ranks]
    mean: Floats = np.mean(walls, axis=0)
    return mean


def _mean_breakdown(breakdowns: Sequence[Breakdown]) -> Mapping[str, float | None]:
    if not breakdowns:
        return dict.fromkeys(PARTS, None)
    return _finite({part: float(np.mean([b[part].mean() for b in breakdowns])) for part in PARTS})


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if np.isfinite(value) else None for name, value in values.items()}


def _observed(ranks: Sequence[Steps], level: LevelSettings) -> tuple[int | None, float | None]:
    """Returns samples a step summed over ranks (None where steps differ), and micro-steps."""
    if len(ranks) < level.dp:
        return None, None
    samples = {int(value) for steps in ranks for value in np.unique(steps.samples)}
    micro = float(np.mean([steps.micro_steps.mean() for steps in ranks]))
    totals = np.sum([steps.samples[: min(map(len, ranks))] for steps in ranks], axis=0)
    if samples == {0} or len(set(totals.tolist())) != 1:
        return None, micro
    return int(totals[0]), micro


def _batch_check(
    level: LevelSettings, observed: int | None, micro_steps: float | None
) -> BatchCheck:
    notes = []
    if observed is None:
        notes.append("Samples were not observed on every rank, or differed between steps.")
    elif observed != level.global_batch:
        notes.append(
            f"Observed {observed} samples a step, configured {level.micro_batch} x "
            f"{level.accumulation} x {level.dp} = {level.global_batch}."
        )
    if micro_steps is not None and micro_steps != level.accumulation:
        notes.append(f"{micro_steps:g} forward calls a step and rank, not {level.accumulation}.")
    return BatchCheck(
        declared=None,
        configured=level.global_batch,
        observed=observed,
        ok=None if observed is None else observed == level.global_batch,
        gradient_max_rel_error=None,
        ranks_agree=None,
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
    """Compares neighbouring plain and instrumented blocks, on the mean over ranks."""
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
