"""Runs for report.html: made from spans and by the law of study_levels, ordinary and hostile."""

from dataclasses import replace

from ddp_profiler.analysis.detail import LevelDetail
from ddp_profiler.analysis.heatmap import heat_map
from ddp_profiler.analysis.noise_scale import NoiseScale
from ddp_profiler.analysis.results import Finding, Overhead
from ddp_profiler.analysis.roofline import Bound, Hardware, Roofline
from ddp_profiler.analysis.stragglers import Straggler
from ddp_profiler.analysis.summary import summarize_in_detail
from ddp_profiler.load import Loaded
from ddp_profiler.predict.outlook import look_ahead
from ddp_profiler.predict.prediction import predictor_of
from ddp_profiler.schema import (
    SCHEMA_VERSION,
    LevelFacts,
    LevelSettings,
    RankPlace,
    RunInfo,
    Variant,
)
from tests.unit import study_levels
from tests.unit.span_columns import Spans

HOSTILE = "<script>alert(1)</script>\"'&amp;\x00\x1b[31m\u202e</style></svg><img src=x onerror=x>"
SOURCES = {"gradient_collectives": "process_group", "local_backward_end": "autograd_callback"}


def run_info(dp, *, buckets=2, **changes):
    values = {
        "schema_version": SCHEMA_VERSION,
        "run_id": "run-1",
        "status": "complete",
        "created": "2026-01-01T12:00:00+00:00",
        "profiler_version": "0.1.0",
        "world_size": dp,
        "settings": {"script": "train.py", "arguments": ["--lr", "3e-4"]},
        "levels": (LevelSettings("script", dp, 8, 1, "packed", tuple(range(dp))),),
        "ranks": tuple(RankPlace(r, r, 0, "host", "boot", "cpu", 17) for r in range(dp)),
        "environment": {"0": {"backend": "gloo", "device_type": "cpu", "cores": 8}},
        "facts": (LevelFacts("script", 500, 2000, buckets, (1000,) * buckets, SOURCES),),
        **changes,
    }
    return RunInfo(**values)


def rank_columns(late_ms=lambda step: 0.0, *, worst_ms=0.0, steps=20, buckets=2):
    """Steps of one rank: forward 20 ms and what it is late by, backward 40, then reduction.

    Local backward ends at 65 + late, buckets are reduced until 80 + worst of all ranks.
    """
    spans = Spans()
    worst = worst_ms if callable(worst_ms) else lambda step: worst_ms
    for i in range(steps):
        for offset, variant, block in ((0, Variant.PLAIN, 1), (10**6, Variant.INSTRUMENTED, 2)):
            at, late = offset + 1000.0 * i, late_ms(i)
            end, place = 100 + worst(i), {"variant": int(variant), "block": block, "step": i}
            spans.step(at, at + end, **place)
            if variant == Variant.PLAIN:
                continue
            local = at + 65 + late
            spans.data(at, at + 5, **place).forward(at + 5, at + 25 + late, **place)
            spans.backward(at + 25 + late, local, at + end - 15, **place)
            for bucket in range(buckets - 1):
                begin = at + 30 + late + 30 * bucket / buckets
                spans.gradient(begin, begin + 15, index=bucket, **place)
            spans.gradient(local, at + end - 20, index=buckets - 1, **place)
            spans.optimizer(at + end - 15, at + end - 5, **place)
    return spans.columns()


def script(dp=4, late_rank=2, late_ms=10.0, *, steps=20, buckets=2, **changes):
    """A script's run whose rank ``late_rank`` is late in forward at every step."""
    worst = late_ms if late_rank is not None and late_rank < dp else 0.0
    columns = {
        rank: rank_columns(
            lambda step, rank=rank: late_ms if rank == late_rank else 0.0,
            worst_ms=worst,
            steps=steps,
            buckets=buckets,
        )
        for rank in range(dp)
    }
    summary, details = summarize_in_detail(run_info(dp, buckets=buckets, **changes), columns)
    return Loaded(summary, details, look_ahead(*predictor_of(summary)))


def apart(dp):
    """Ranks on hosts whose clocks were never compared: waiting is withheld."""
    return tuple(RankPlace(r, 0, r, f"host{r}", f"boot{r}", "cpu", 17) for r in range(dp))


def _scaled(level, single):
    """A level with what compares it to dp = 1."""
    step, speedup = level.step_ms.mean, level.samples_per_s / single.samples_per_s
    terms = dict.fromkeys(
        ("wrapper", "slower_compute", "contention", "forward_comm", "backward_comm", "data"), 0.0
    )
    bare = single.step_ms.mean - 1.0
    terms |= {"wrapper": 1.0, "slower_compute": -0.5, "exposed_copy": 0.0, "optimizer": 0.0}
    parts = level.breakdown_ms
    terms |= {"other": 0.0, "exposed_transfer": parts["exposed_transfer"]}
    terms |= {"exposed_wait": parts["exposed_wait"]}
    rest = step - bare - sum(terms.values())
    return replace(
        level,
        speedup=speedup,
        efficiency=speedup / level.dp,
        reference=single.id,
        waterfall_ms={"bare": bare, **terms, "residual": rest, "measured": step},
        overhead=Overhead(step, step * 1.01, 1.0, (0.5, 1.5)),
        batch_check=replace(
            level.batch_check,
            configured=level.global_batch,
            observed=level.global_batch,
            ok=True,
            ranks_agree=True,
            gradient_max_rel_error=1e-6,
            gradient_factor=1.0,
        ),
        roofline=Roofline(Bound.COMPUTE, "made by hand", 0.0, 0.1, 50.0, 30.0, 5.0, 1.0, 0.7),
        noise_scale=NoiseScale(120.0, (90.0, 180.0), None, 1.0, 2.0, 9, 8, 16, 1.5, (1.4, 1.6)),
    )


def study(dps=(1, 2, 4, 8), late=None):
    """A study of all figures that there are, its times by the law of study_levels."""
    levels = [
        study_levels.level(dp, gbit=4.0, cap_mb=8.0, late=late if dp == dps[-1] else None)
        for dp in dps
    ]
    levels = [_scaled(level, levels[0]) for level in levels]
    summary = study_levels.summary(*levels, cap_mb=8.0)
    summary = replace(
        summary,
        run=replace(
            summary.run,
            hardware=Hardware(0, "A device", "fp32", 1e11, 2e10, 5.0, 3.0, None, "unknown"),
        ),
        findings=(
            Finding("loss", "warning", "Something is slow.", "9 of 60 ms", 9.0, 15.0),
            Finding("limit", "info", "Limited by compute.", "40 of 60 ms"),
        ),
        notes=("A note.",),
    )
    # Single steps of the largest level are made from spans.
    detail = replace(script(dps[-1], 2).details[0], level=levels[-1].id)
    return Loaded(summary, (detail,), look_ahead(*predictor_of(summary)))


def hostile():
    """A study in which every text that can come from outside is an attack."""
    found = study((1, 2, 4))
    summary = found.summary
    late = Straggler(1, 9.0, 1.0, True, HOSTILE, {}, HOSTILE, 9.0, 0.0, (HOSTILE,))
    levels = tuple(
        replace(
            level,
            id=f"{level.id}{HOSTILE}",
            placement=HOSTILE,
            reference=HOSTILE,
            notes=(HOSTILE,),
            stragglers=(late,),
            straggler=late,
            batch_check=replace(level.batch_check, notes=(HOSTILE,)),
            roofline=replace(level.roofline, reason=HOSTILE),
            noise_scale=replace(level.noise_scale, reason=HOSTILE),
            allreduce=level.allreduce
            and replace(
                level.allreduce, link=replace(level.allreduce.link, name=HOSTILE, source=HOSTILE)
            ),
            ranks=tuple(replace(rank, hostname=HOSTILE) for rank in level.ranks),
        )
        for level in summary.levels
    )
    run = replace(
        summary.run,
        run_id=HOSTILE,
        status=HOSTILE,
        created=HOSTILE,
        profiler_version=HOSTILE,
        settings={"model": HOSTILE, HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE, "\ud800"]}},
        environment={"0": {"backend": HOSTILE, "device_type": HOSTILE, HOSTILE: HOSTILE}},
        statistics_unit=HOSTILE,
        hardware=replace(summary.run.hardware, name=HOSTILE, data_sheet_reason=HOSTILE),
        partial_reason=HOSTILE,
    )
    findings = (Finding(HOSTILE, "error", HOSTILE, HOSTILE, 1.0, 1.0),)
    details = tuple(
        replace(detail, level=levels[-1].id, withheld=HOSTILE) for detail in found.details
    )
    return Loaded(
        replace(summary, run=run, levels=levels, findings=findings, notes=(HOSTILE,)),
        details,
        found.outlook,
    )


class Walls:
    """What the heat map needs of one rank's steps."""

    def __init__(self, rank, wall_ms):
        self.rank, self.wall_ms = rank, wall_ms

    def __len__(self):
        return len(self.wall_ms)


def many(own_ms):
    """A study's report with a heat map of these works in ms, [rank, step]."""
    found = study((1, 2, 4))
    walls = own_ms.max(axis=0) + 10.0
    zero = own_ms[0] * 0.0
    parts = ("data", "backward", "exposed_copy", "optimizer", "other")
    mapped = heat_map(
        [Walls(rank, walls) for rank in range(len(own_ms))],
        [{**dict.fromkeys(parts, zero), "forward": own} for own in own_ms],
    )
    detail = LevelDetail(found.summary.levels[-1].id, mapped, found.details[0].timeline)
    return Loaded(found.summary, (detail,), found.outlook)
