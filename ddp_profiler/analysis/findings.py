"""Findings in plain words, each with its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ddp_profiler import units
from ddp_profiler.analysis.results import Finding, LevelResult

_SEVERITIES = ("error", "warning", "info")

_LIMITING = 0.25
"""A part below this share of the step is not called its limit; then compute is."""

_FACTOR_TOLERANCE = 1e-3
_ERROR = 1e-2
"""Largest error of a gradient that rounding may explain in any precision."""

_LIMITS = {
    "data": ("input", "the loop waits for its next micro-batch"),
    "forward_comm": ("communication in forward", "buffers are broadcast before forward"),
    "backward_comm": ("communication in backward", "modules reduce inside backward"),
    "exposed_transfer": ("exposed transfer", "gradients still travel when backward is done"),
    "exposed_wait": ("waiting", "ranks wait for the last one to finish its backward"),
    "exposed_copy": ("copying", "reduced buckets are copied back to the gradients"),
}

_LOSSES = {
    "wrapper": "DDP's own work (wrapper)",
    "slower_compute": "slower forward and backward",
    "contention": "backward slowed by communication beside it (contention)",
    "forward_comm": "communication in forward",
    "backward_comm": "communication in backward",
    "exposed_copy": "copying buckets to gradients",
    "data": "waiting for data",
    "optimizer": "a slower optimizer step",
    "other": "time between the parts",
    "exposed_transfer": "exposed transfer",
    "exposed_wait": "waiting for the last rank",
}


def find(levels: Sequence[LevelResult]) -> tuple[Finding, ...]:
    """Returns what a user should know about the levels, the most severe first."""
    measured = [level for level in levels if level.step_ms is not None]
    found = [
        *(finding for level in measured for finding in _about_batch(level)),
        *(finding for level in measured for finding in _about_reductions(level)),
        *_about_limits(measured),
        *_about_loss(measured),
        *_about_drop(measured),
        *_about_accumulation(measured),
    ]
    return tuple(sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity)))


def _about_batch(level: LevelResult) -> Iterator[Finding]:
    check = level.batch_check
    if check.ok is False:
        yield Finding(
            id="batch-mismatch",
            severity="error",
            message=f"{level.id}: the global batch is not what it should be.",
            evidence=f"declared {check.declared or 'nothing'}, configured {check.configured}, "
            f"observed {check.observed}",
        )
    if check.ranks_agree is False:
        yield Finding(
            id="ranks-disagree",
            severity="error",
            message=f"{level.id}: ranks hold different gradients after reduction.",
            evidence="reduced gradients compared bit for bit",
        )
    factor, name = check.gradient_factor, check.gradient_factor_name
    error = check.gradient_max_rel_error
    scaled = factor is not None and abs(factor - 1) > _FACTOR_TOLERANCE
    if factor is not None and scaled and (name or check.gradient_must_match):
        yield Finding(
            id="gradient-scale",
            severity="error",
            message=f"{level.id}: gradients are {factor:.4g} times those of one process that "
            f"sees the whole global batch{f'; that is {name}' if name else ''}.",
            evidence=f"least squares over all tensors; largest error {units.significant(error)}",
        )
    elif not scaled and error is not None and error > _ERROR and check.gradient_must_match:
        yield Finding(
            id="gradient-error",
            severity="warning",
            message=f"{level.id}: gradients differ from those of one process that sees the whole "
            f"global batch, most in {check.gradient_worst_tensor}.",
            evidence=f"max|difference| / max|gradient| = {units.significant(error)}",
        )


def _about_reductions(level: LevelResult) -> Iterator[Finding]:
    comm = level.comm
    count, buckets = comm.num_gradient_collectives_per_step, comm.num_buckets
    if level.dp < 2 or not count or not buckets or not comm.gradient_bytes:
        return
    if count > buckets * 1.01:
        wasted = comm.gradient_bytes * (1 - buckets / count)
        yield Finding(
            id="needless-reductions",
            severity="warning",
            message=f"{level.id}: gradients are reduced in more than one micro-step of a step; "
            "wrap all micro-steps but the last in no_sync().",
            evidence=f"{count:g} gradient collectives a step for {buckets} buckets; "
            f"{units.nbytes(wasted)} a step more than needed",
        )


def _about_limits(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    for level in levels:
        step = level.instrumented_step_ms
        if step is None:
            continue
        shares = {part: (level.breakdown_ms[part] or 0.0) / step.mean for part in _LIMITS}
        part = max(shares, key=lambda name: shares[name])
        if shares[part] >= _LIMITING:
            limit, why = _LIMITS[part]
            evidence = f"{units.ms(level.breakdown_ms[part])} of {units.ms(step.mean)} ms"
            message = f"{level.id} is limited by {limit}: {why}."
        else:
            compute = sum(level.breakdown_ms[p] or 0.0 for p in ("forward", "backward"))
            evidence = (
                f"forward and backward {units.ms(compute)} of {units.ms(step.mean)} ms; next is "
                f"{_LIMITS[part][0]} with {units.ms(level.breakdown_ms[part])} ms"
            )
            message = f"{level.id} is limited by compute."
        yield Finding(id="limit", severity="info", message=message, evidence=evidence)


def _about_loss(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    """Names what dominates the loss at the largest dp."""
    level = max(
        (lv for lv in levels if lv.waterfall_ms is not None and lv.dp > 1),
        key=lambda lv: lv.dp,
        default=None,
    )
    if level is None or level.waterfall_ms is None:
        return
    terms = {name: level.waterfall_ms[name] or 0.0 for name in _LOSSES}
    name = max(terms, key=lambda term: terms[term])
    lost = (level.waterfall_ms["measured"] or 0.0) - (level.waterfall_ms["bare"] or 0.0)
    residual = level.waterfall_ms["residual"] or 0.0
    if terms[name] <= 0 or lost <= 0:
        return
    if abs(residual) > terms[name]:
        yield Finding(
            id="dominant-loss",
            severity="info",
            message=f"At {level.id} no single loss stands out: the residual of the step model is "
            "larger than every term. Measure more steps, or on a quieter machine.",
            evidence=f"residual {units.ms(residual)} ms, largest term {_LOSSES[name]} "
            f"{units.ms(terms[name])} ms",
        )
        return
    speedup = "" if level.speedup is None else f" you get {level.speedup:.2f}x and"
    yield Finding(
        id="dominant-loss",
        severity="info",
        message=f"At {level.id}{speedup} a step takes {units.ms(lost)} ms more than the bare "
        f"model alone; the largest share is {_LOSSES[name]}.",
        evidence=f"{units.ms(terms[name])} ms, "
        f"{units.percent(terms[name] / (level.waterfall_ms['measured'] or 1.0), 0)} of the step; "
        f"residual {units.ms(residual)} ms",
    )


def _about_drop(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    """Names the neighbouring dp between which efficiency falls most."""
    by_dp = {lv.dp: lv for lv in sorted(levels, key=lambda lv: -lv.accumulation)}
    rising = [by_dp[dp] for dp in sorted(by_dp) if by_dp[dp].efficiency is not None]
    falls = [(a, b, (a.efficiency or 0.0) - (b.efficiency or 0.0)) for a, b in pairwise(rising)]
    if not falls:
        return
    before, after, fall = max(falls, key=lambda item: item[2])
    if fall < 0.05:
        return
    yield Finding(
        id="efficiency-drop",
        severity="warning" if fall >= 0.15 else "info",
        message=f"Efficiency drops most from dp {before.dp} to dp {after.dp}"
        f"{_reason(before, after)}.",
        evidence=f"{units.percent(before.efficiency)} to {units.percent(after.efficiency)}",
    )


def _reason(before: LevelResult, after: LevelResult) -> str:
    if before.nodes < after.nodes:
        return (
            f", where the ranks no longer fit on {before.nodes} node"
            f"{'s' if before.nodes > 1 else ''}: gradients cross the network between nodes"
        )
    if before.waterfall_ms is None or after.waterfall_ms is None:
        return ""
    grown = {
        name: (after.waterfall_ms[name] or 0.0) - (before.waterfall_ms[name] or 0.0)
        for name in _LOSSES
    }
    name = max(grown, key=lambda term: grown[term])
    return f", mostly by {_LOSSES[name]} (+{units.ms(grown[name])} ms)" if grown[name] > 0 else ""


def _about_accumulation(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    """Compares splits of one global batch into micro-batch and accumulation at equal dp."""
    groups: dict[tuple[int, int], list[LevelResult]] = {}
    for level in levels:
        groups.setdefault((level.dp, level.global_batch), []).append(level)
    for (dp, total), members in groups.items():
        timed = [lv for lv in members if lv.step_ms is not None]
        if len({lv.accumulation for lv in timed}) < 2:
            continue
        per_sample = {lv.id: lv.step_ms.mean / total for lv in timed if lv.step_ms}
        best = min(timed, key=lambda lv: per_sample[lv.id])
        worst = max(timed, key=lambda lv: per_sample[lv.id])
        more = per_sample[worst.id] / per_sample[best.id] - 1
        yield Finding(
            id="accumulation-cost",
            severity="info",
            message=f"At dp {dp} and global batch {total}, micro-batch {best.micro_batch} x "
            f"accumulation {best.accumulation} is the cheapest split; {worst.micro_batch} x "
            f"{worst.accumulation} costs {units.percent(more)} more per sample.",
            evidence=f"{units.ms(per_sample[best.id])} and {units.ms(per_sample[worst.id])} ms "
            "a sample",
        )
