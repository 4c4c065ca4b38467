"""Results as pandas data frames, a function for each table; the only module that needs pandas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ddp_profiler.analysis.bucket_timeline import Bucket
from ddp_profiler.analysis.collectives import Collectives
from ddp_profiler.analysis.detail import LevelDetail, LevelSteps
from ddp_profiler.analysis.parts import NULL, PARTS, Floats, Ints, Steps
from ddp_profiler.analysis.results import LevelResult, RankResult, Summary
from ddp_profiler.analysis.spans import step_numbers
from ddp_profiler.errors import UsageError
from ddp_profiler.notebook.columns import ANY, NUMBER, TABLES, TEXT, WHOLE, Column
from ddp_profiler.predict.results import BackTest, Prediction
from ddp_profiler.schema import RunInfo

DataFrame: TypeAlias = Any
"""A pandas.DataFrame. Pandas need not be installed: it is imported with the first table."""

PLAIN, INSTRUMENTED, WARMUP = "plain", "instrumented", "warmup"
VARIANTS = (INSTRUMENTED, PLAIN, WARMUP)

_Row = Mapping[str, Any]


def _pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise UsageError(
            "Tables need pandas, which is not installed.",
            "Install it with: pip install 'ddp-profiler[notebook]'",
        ) from None
    return pandas


def _table(name: str, rows: Iterable[_Row]) -> DataFrame:
    """Makes a table of rows; a column that a row lacks does not apply to it."""
    given = list(rows)
    return _of_columns(name, {c.name: [row.get(c.name) for row in given] for c in TABLES[name]})


def _of_columns(name: str, values: Mapping[str, Any]) -> DataFrame:
    pandas = _pandas()
    return pandas.DataFrame({c.name: _series(pandas, c, values[c.name]) for c in TABLES[name]})


def _series(pandas: Any, column: Column, values: Any) -> Any:
    if column.kind == ANY:
        found = pandas.Series(np.empty(len(values), dtype=object))
        found[:] = values
        return found
    if column.kind == NUMBER:
        return pandas.Series(np.array(values, dtype=np.float64))
    if column.kind == WHOLE and isinstance(values, np.ndarray):
        missing = values == NULL
        return pandas.Series(pandas.arrays.IntegerArray(np.where(missing, 0, values), missing))
    if column.kind == TEXT and isinstance(values, list):
        values = [None if value is None else str(value) for value in values]
    return pandas.Series(values, dtype=column.kind)


def levels(summary: Summary, details: Sequence[LevelDetail]) -> DataFrame:
    """Returns a row a level."""
    withheld = {detail.level: detail.withheld for detail in details}
    return _table("levels", (_level(lv, withheld.get(lv.id)) for lv in summary.levels))


def _level(level: LevelResult, withheld: str | None) -> _Row:
    step, instrumented, batch = level.step_ms, level.instrumented_step_ms, level.batch_check
    row: dict[str, Any] = {
        name: getattr(level, name)
        for name in (
            *("dp", "nodes", "placement", "micro_batch", "accumulation", "global_batch"),
            *("repetitions", "steps", "samples_per_s", "tokens_per_s", "speedup", "efficiency"),
            *("reference", "mfu", "contention_ms", "wrapper_ms", "clock_uncertainty_ms"),
        )
    }
    row |= {
        "level": level.id,
        "instrumented_step_mean_ms": instrumented.mean if instrumented else None,
        "overhead_pct": level.overhead.overhead_pct if level.overhead else None,
        "bound": level.roofline.bound if level.roofline else None,
        "comm_busy_ms": level.comm.busy_ms,
        "comm_overlapped_ms": level.comm.overlapped_ms,
        "overlap_fraction": level.comm.overlap_fraction,
        "gradient_bytes": level.comm.gradient_bytes,
        "num_buckets": level.comm.num_buckets,
        "withheld": withheld,
        "batch_declared": batch.declared,
        "batch_configured": batch.configured,
        "batch_observed": batch.observed,
        "batch_ok": batch.ok,
        "gradient_max_rel_error": batch.gradient_max_rel_error,
        "ranks_agree": batch.ranks_agree,
    }
    if step is not None:
        low, high = step.ci95 or (None, None)
        row |= {
            "step_mean_ms": step.mean,
            "step_median_ms": step.median,
            "step_p10_ms": step.p10,
            "step_p90_ms": step.p90,
            "step_ci95_low_ms": low,
            "step_ci95_high_ms": high,
        }
    return row


def parts(summary: Summary) -> DataFrame:
    """Returns a row a level and part; of a level, times sum to the mean instrumented step."""

    def row(level: LevelResult, part: str) -> _Row:
        low, high = (level.breakdown_ci95_ms or {}).get(part) or (None, None)
        return {
            "level": level.id,
            "dp": level.dp,
            "part": part,
            "time_ms": level.breakdown_ms.get(part),
            "ci95_low_ms": low,
            "ci95_high_ms": high,
        }

    return _table("parts", (row(level, part) for level in summary.levels for part in PARTS))


def ranks(summary: Summary) -> DataFrame:
    """Returns a row a level and rank."""
    return _table("ranks", (_rank(lv, rank) for lv in summary.levels for rank in lv.ranks))


def _rank(level: LevelResult, rank: RankResult) -> _Row:
    machine = vars(rank.machine) if rank.machine else {}
    gpu = vars(rank.machine.gpu) if rank.machine and rank.machine.gpu else {}
    return {
        **{f"{part}_ms": rank.breakdown_ms.get(part) for part in PARTS},
        **{f"machine_{name}": value for name, value in machine.items()},
        **{f"gpu_{name}": value for name, value in gpu.items()},
        "level": level.id,
        "dp": level.dp,
        "rank": rank.rank,
        "node": rank.node,
        "hostname": rank.hostname,
        "steps": rank.steps,
        "step_ms": rank.step_ms,
    }


def steps(summary: Summary, found: Sequence[LevelSteps], variant: str) -> DataFrame:
    """Returns a row a rank and step of a variant, in order of level, rank and step."""
    sizes = {level.id: level.dp for level in summary.levels}
    pieces = []
    for level in found:
        of_variant: tuple[Steps, ...] = getattr(level, variant)
        for place, one in enumerate(of_variant):
            breakdown = level.breakdowns[place] if variant == INSTRUMENTED else None
            pieces.append(_rank_steps(level.level, sizes[level.level], variant, one, breakdown))
    return _of_columns("steps", _joined("steps", pieces))


def _rank_steps(
    level: str, dp: int, variant: str, found: Steps, breakdown: Mapping[str, Floats] | None
) -> Mapping[str, Any]:
    count = len(found)
    unknown = np.full(count, np.nan)
    marked = {
        "samples": found.samples,
        "micro_steps": found.micro_steps,
        "comm_busy_ms": found.busy_ms,
        "comm_overlapped_ms": found.overlapped_ms,
        "collectives": found.collectives,
        "gradient_bytes": found.gradient_bytes,
    }
    if variant == PLAIN:
        # Nothing but the step's begin and end was recorded: what is not seen is not 0.
        marked = {
            name: unknown if name.endswith("_ms") else np.full(count, NULL) for name in marked
        }
    return {
        "level": np.full(count, level, dtype=object),
        "dp": np.full(count, dp),
        "variant": np.full(count, variant, dtype=object),
        "rank": np.full(count, found.rank),
        "step": np.arange(count),
        "repetition": found.repetition,
        "recorded_step": step_numbers(found.key),
        "block": found.block,
        "step_ms": found.wall_ms,
        **{f"{part}_ms": unknown if breakdown is None else breakdown[part] for part in PARTS},
        **marked,
    }


def _joined(name: str, pieces: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return {
        column.name: np.concatenate([piece[column.name] for piece in pieces]) if pieces else []
        for column in TABLES[name]
    }


def collectives(found: Sequence[LevelSteps]) -> DataFrame:
    """Returns a row a gradient collective of the instrumented steps."""
    pieces = [
        _rank_collectives(level.level, steps, given)
        for level in found
        for steps, given in zip(level.instrumented, level.collectives, strict=True)
    ]
    return _of_columns("collectives", _joined("collectives", pieces))


def _rank_collectives(level: str, steps: Steps, found: Collectives) -> Mapping[str, Any]:
    order = np.argsort(steps.key, kind="stable")
    row: Ints = order[np.searchsorted(steps.key[order], found.key)]
    return {
        "level": np.full(len(found), level, dtype=object),
        "rank": np.full(len(found), steps.rank),
        "step": row,
        "repetition": steps.repetition[row],
        "recorded_step": step_numbers(found.key),
        "micro_step": found.micro_step,
        "collective": found.ordinal,
        "bytes": found.nbytes,
        "begin_ms": found.begin_ms,
        "hidden_until_ms": found.hidden_until_ms,
        "end_ms": found.end_ms,
        "hidden_ms": found.hidden_until_ms - found.begin_ms,
        "exposed_ms": found.end_ms - found.hidden_until_ms,
        "completion_noticed": found.noticed,
    }


def buckets(details: Sequence[LevelDetail]) -> DataFrame:
    """Returns a row a gradient collective of each level's typical step."""

    def row(detail: LevelDetail, bucket: Bucket, rank: int, step: int) -> _Row:
        return {
            "level": detail.level,
            "rank": rank,
            "step": step,
            "first_collective": bucket.first,
            "last_collective": bucket.last,
            "bytes": bucket.nbytes,
            "begin_ms": bucket.begin_ms,
            "hidden_until_ms": bucket.hidden_until_ms,
            "end_ms": bucket.end_ms,
            "hidden_ms": bucket.hidden_until_ms - bucket.begin_ms,
            "exposed_ms": bucket.end_ms - bucket.hidden_until_ms,
            "completion_noticed": bucket.noticed,
        }

    return _table(
        "buckets",
        (
            row(detail, bucket, detail.timeline.lanes[0].rank, detail.timeline.step)
            for detail in details
            if detail.timeline
            for bucket in detail.timeline.buckets
        ),
    )


def phases(details: Sequence[LevelDetail]) -> DataFrame:
    """Returns a row a phase of each level's typical step, on the ranks that are shown."""
    return _table(
        "phases",
        (
            {
                "level": detail.level,
                "rank": lane.rank,
                "step": detail.timeline.step,
                "part": phase.part,
                "begin_ms": phase.begin_ms,
                "end_ms": phase.end_ms,
            }
            for detail in details
            if detail.timeline
            for lane in detail.timeline.lanes
            for phase in lane.phases
        ),
    )


def rank_heat_map(details: Sequence[LevelDetail]) -> DataFrame:
    """Returns a row a cell: ranks against each other, step by step."""

    def rows(detail: LevelDetail) -> Iterable[_Row]:
        found = detail.heat_map
        if found is None:
            return
        begins = found.column_begins
        for ranks, cells in zip(found.rows, found.excess_ms, strict=True):
            ends = (*begins[1:], found.steps)
            for begin, end, excess in zip(begins, ends, cells, strict=True):
                yield {
                    "level": detail.level,
                    "first_rank": ranks[0],
                    "last_rank": ranks[-1],
                    "first_step": begin,
                    "last_step": end - 1,
                    "excess_ms": excess,
                }

    return _table("rank_heat_map", (row for detail in details for row in rows(detail)))


def stragglers(summary: Summary) -> DataFrame:
    """Returns a row a level and rank that comes late, the dearest first."""
    return _table(
        "stragglers",
        (
            {**vars(one), "level": level.id, "evidence": "\n".join(one.evidence)}
            for level in summary.levels
            for one in level.stragglers
        ),
    )


def allreduce(summary: Summary) -> DataFrame:
    """Returns a row a level and message size or bucket: AllReduce in isolation."""

    def rows(level: LevelResult) -> Iterable[_Row]:
        found = level.allreduce
        if found is None:
            return
        of_all: dict[str, Any] = {"level": level.id, "dp": level.dp}
        if found.link is not None:
            of_all |= {
                "link": found.link.name,
                "link_gbit_per_s": found.link.gbit_per_s,
                "link_source": found.link.source,
            }
        for size in found.sizes:
            yield {**of_all, **vars(size), "kind": "sweep"}
        for number, size in enumerate(found.buckets):
            yield {**of_all, **vars(size), "kind": "bucket", "bucket": number}

    return _table("allreduce", (row for level in summary.levels for row in rows(level)))


def waterfall(summary: Summary) -> DataFrame:
    """Returns a row a level and term; of a level, ``measured`` is the sum of all before it."""
    return _table(
        "waterfall",
        (
            {"level": level.id, "dp": level.dp, "term": term, "time_ms": time}
            for level in summary.levels
            for term, time in (level.waterfall_ms or {}).items()
        ),
    )


def findings(summary: Summary) -> DataFrame:
    """Returns a row a finding, in the order of a report."""
    return _table("findings", map(vars, summary.findings))


def predictions(found: Sequence[Prediction]) -> DataFrame:
    """Returns a row a setting that is predicted."""

    def row(one: Prediction) -> _Row:
        low, high = one.step_ms.interval90
        return {
            **vars(one),
            **{f"{part}_ms": one.breakdown_ms.get(part) for part in PARTS},
            "step_ms": one.step_ms.median,
            "step_interval90_low_ms": low,
            "step_interval90_high_ms": high,
            "no_overlap_ms": one.naive_ms.no_overlap_ms,
            "perfect_overlap_ms": one.naive_ms.perfect_overlap_ms,
            "notes": "\n".join(one.notes),
        }

    return _table("predictions", map(row, found))


def back_test(found: Sequence[BackTest]) -> DataFrame:
    """Returns a row a measured level, predicted from the others."""
    return _table(
        "back_test",
        (
            {
                **vars(one),
                "interval90_low_ms": one.interval90[0],
                "interval90_high_ms": one.interval90[1],
            }
            for one in found
        ),
    )


def environment(summary: Summary) -> DataFrame:
    """Returns a row a node and fact of its software and hardware."""
    return _table(
        "environment",
        (
            {"node": node, "name": name, "value": value}
            for node, facts in summary.run.environment.items()
            for name, value in facts.items()
        ),
    )


def settings(summary: Summary) -> DataFrame:
    """Returns a row a setting in force."""
    return _table("settings", ({"name": k, "value": v} for k, v in summary.run.settings.items()))


def failures(info: RunInfo) -> DataFrame:
    """Returns a row a failure, the first one first."""
    return _table("failures", map(vars, info.failures))


def rank_states(info: RunInfo) -> DataFrame:
    """Returns a row a rank: what it was doing when the run failed."""
    return _table("rank_states", map(vars, info.phases))


def only(frame: DataFrame, level: str | None) -> DataFrame:
    """Returns the rows of a level, numbered afresh; all of them where None."""
    if level is None:
        return frame
    return frame[frame["level"] == level].reset_index(drop=True)
