"""Findings in plain words, each with its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddp_profiler import units
from ddp_profiler.analysis import sampled
from ddp_profiler.analysis.feeding_findings import explains_mismatch, find_feeding
from ddp_profiler.analysis.machine import find_machine
from ddp_profiler.analysis.noise_findings import find_noise
from ddp_profiler.analysis.placement import largest, packed_twin, scaling_curve
from ddp_profiler.analysis.reduction_findings import find_reduction
from ddp_profiler.analysis.results import Finding, LevelResult, RankResult
from ddp_profiler.analysis.scaling import sharpest_drop
from ddp_profiler.analysis.stragglers import LEAST_SHARE_OF_STEP, SEVERAL, Straggler

_SEVERITIES = ("error", "warning", "info")

_FACTOR_TOLERANCE = 1e-3

_EXPOSED = {
    "forward_comm": "buffers are broadcast before forward, or modules reduce in it",
    "backward_comm": "modules reduce inside backward",
    "exposed_transfer": "gradients still travel when backward is done (exposed transfer)",
    "exposed_wait": "ranks wait for the last one to finish its backward (waiting)",
}

_PLACES = {
    "forward_comm": "at a collective inside forward",
    "backward_comm": "at a collective inside backward",
    "gradient_reduction": "at the gradient reduction",
}

_TRANSFER_OR_WAIT = (
    "gradients still travel when backward is done, or ranks wait for the last one (exposed "
    "transfer, which holds waiting here)"
)

_LIMITS = {
    "compute": "forward and backward take most of the step",
    "input": "the loop waits for its next micro-batch",
    "communication": "",
    "copying": "reduced buckets are copied back to the gradients",
    "the optimizer": "its step takes most of the time",
    "what lies between the parts": "something outside data, forward, backward and optimizer",
}
"""What can limit a level, and why; communication says which kind."""

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
        *(finding for level in measured for finding in find_reduction(level)),
        *find_feeding(levels),
        *(finding for level in measured for finding in _about_stragglers(level)),
        *(finding for level in measured for finding in _about_nodes(level)),
        *(finding for level in measured for finding in _about_windows(level)),
        *_about_limits(measured),
        *_about_loss(measured),
        *_about_drop(measured),
        *_about_accumulation(measured),
        *find_machine(measured),
        *_about_crossing(measured),
        *find_noise(measured),
    ]
    return tuple(sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity)))


def _about_batch(level: LevelResult) -> Iterator[Finding]:
    check = level.batch_check
    if check.ok is False and not explains_mismatch(level):
        yield Finding(
            id="batch-mismatch",
            severity="error",
            message=f"{level.id}: the global batch is not what it should be.",
            evidence=f"declared {check.declared or 'nothing'}, "
            f"configured {check.configured or 'nothing'}, observed {check.observed}",
        )
    # Of a script, more is known than that: see find_reduction.
    if check.ranks_agree is False and level.reduction is None:
        yield Finding(
            id="ranks-disagree",
            severity="error",
            message=f"{level.id}: ranks hold different gradients after reduction.",
            evidence="reduced gradients compared bit for bit",
        )
    factor, name = check.gradient_factor, check.gradient_factor_name
    error = check.gradient_max_rel_error
    if check.gradient_unexplained:
        yield Finding(
            id="gradient-error",
            severity="error",
            message=f"{level.id}: gradients differ from those of one process that sees the whole "
            f"global batch, most in {check.gradient_worst_tensor}; no common factor explains it.",
            evidence=f"max|difference| / max|gradient| = {units.significant(error)}",
        )
    elif (
        factor is not None
        and abs(factor - 1) > _FACTOR_TOLERANCE
        and (name or check.gradient_must_match)
    ):
        yield Finding(
            id="gradient-scale",
            severity="error",
            message=f"{level.id}: gradients are {factor:.4g} times those of one process that "
            f"sees the whole global batch{f'; that is {name}' if name else ''}.",
            evidence=f"least squares over all tensors; largest error {units.significant(error)}",
        )


def _about_reductions(level: LevelResult) -> Iterator[Finding]:
    comm = level.comm
    count, buckets = comm.num_gradient_collectives_per_step, comm.num_buckets
    if level.reduction is not None:
        # Of a script, more is known than that: see find_reduction.
        return
    if level.dp < 2 or not count or not buckets or not comm.gradient_bytes:
        return
    if count > buckets * 1.01:
        wasted = comm.gradient_bytes * (1 - buckets / count)
        plural = "" if buckets == 1 else "s"
        gain = level.costs_ms.needless_ms if level.costs_ms and level.costs_ms.syncs > 1 else None
        share = gain / level.step_ms.mean if gain is not None and level.step_ms else None
        cost = f" and {units.ms(gain)} ms" if gain is not None else ""
        yield Finding(
            id="needless-reductions",
            severity="warning",
            message=f"{level.id}: {count:.4g} gradient collectives a step for {buckets} "
            f"bucket{plural}: {count / buckets:.3g} x. Gradients are reduced in more than one "
            "micro-step; wrap all but the last in no_sync().",
            evidence=f"{units.nbytes(wasted)}{cost} a step more than needed"
            + (f", {units.percent(share, 0)} of it" if share is not None else ""),
            expected_gain_ms=gain,
            expected_gain_pct=None if share is None else 100 * share,
        )


def _about_stragglers(level: LevelResult) -> Iterator[Finding]:
    hosts = {rank.rank: rank.hostname for rank in level.ranks}
    step = level.instrumented_step_ms
    for straggler in level.stragglers:
        share = units.percent(straggler.share_of_steps_fraction, 0)
        often = f"in {share} of the steps, " + (
            "a fixed straggler" if straggler.fixed else "now and then"
        )
        host = hosts.get(straggler.rank)
        where = f" ({units.printable(host)})" if host and level.nodes > 1 else ""
        others = "The other rank waits" if level.dp == 2 else "The others wait"
        yield Finding(
            id="straggler",
            severity="warning",
            message=f"{level.id}: rank {straggler.rank}{where} is late by "
            f"{units.ms(straggler.lag_ms)} ms {often}; it takes longer {_why(straggler)}. "
            f"{others} {_PLACES[straggler.at]}.",
            evidence="; ".join(
                (
                    f"{units.ms(straggler.recoverable_ms)} ms a step could be recovered",
                    *straggler.evidence,
                )
            ),
            expected_gain_ms=straggler.recoverable_ms,
            expected_gain_pct=straggler.recoverable_ms / step.mean * 100 if step else None,
        )


def _about_nodes(level: LevelResult) -> Iterator[Finding]:
    """Names a node all of whose ranks are late together.

    None of them is a straggler, since its neighbours come with it. What the node costs is the time
    from the last of all other ranks to its own first.
    """
    step = level.instrumented_step_ms
    if level.lateness is None or step is None or level.nodes < 2:
        return
    late = level.lateness.fixed_ms
    by_node: dict[int, list[RankResult]] = {}
    for rank in level.ranks:
        by_node.setdefault(rank.node, []).append(rank)
    for node, ranks in by_node.items():
        mine = [late[rank.rank] for rank in ranks]
        others = [late[rank.rank] for rank in level.ranks if rank.node != node]
        gap = min(mine) - max(others)
        surely = gap > 2 * (level.clock_uncertainty_ms or 0.0)
        if len(ranks) < 2 or not surely or gap < LEAST_SHARE_OF_STEP * step.mean:
            continue
        beyond = {part: _beyond_others(level, node, part) for part in _OWN_WORK}
        if sum(beyond.values()) < gap / 2:
            # It works no longer than others: a slow link gives it each reduction's end later.
            continue
        part, excess = max(beyond.items(), key=lambda pair: pair[1])
        most = f"; most of it in {part}, {units.ms(excess)} ms" if excess >= gap / 2 else ""
        name = units.printable(ranks[0].hostname) or f"node {node}"
        yield Finding(
            id="slow-node",
            severity="warning",
            message=f"{level.id}: all {len(ranks)} ranks of {name} are late together, by "
            f"{units.ms(gap)} ms in the typical step; all others wait where gradients are reduced. "
            "Look at that node: clocks, cooling, other work, its storage.",
            evidence=f"{units.ms(gap)} ms a step could be recovered: from the last rank of the "
            f"other nodes to the first of this one{most}",
            expected_gain_ms=gap,
            expected_gain_pct=gap / step.mean * 100,
        )


_OWN_WORK = ("data", "forward", "backward", "optimizer", "other")


def _beyond_others(level: LevelResult, node: int, part: str) -> float:
    """Returns by how much a part is longer on a node than on the others, mean over ranks, in ms."""
    mine, others = (
        [rank.breakdown_ms.get(part) or 0.0 for rank in level.ranks if (rank.node == node) is here]
        for here in (True, False)
    )
    return sum(mine) / len(mine) - sum(others) / len(others)


def _about_windows(level: LevelResult) -> Iterator[Finding]:
    """Names who is late in some windows only, so that the figures of all hardly show it."""
    known = {straggler.rank for straggler in level.stragglers}
    for rank, windows in sampled.passing(level.windows):
        if rank in known:
            continue
        worst = max(
            (late for window in windows for late in window.stragglers if late.rank == rank),
            key=lambda late: late.recoverable_ms,
        )
        yield Finding(
            id="passing-straggler",
            severity="warning",
            message=f"{level.id}: rank {rank} is late in {len(windows)} of {len(level.windows)} "
            f"windows, by up to {units.ms(worst.lag_ms)} ms, {_why(worst)}.",
            evidence=f"windows that begin at {sampled.named(windows)}; in the worst one "
            f"{units.ms(worst.recoverable_ms)} ms a step could be recovered",
        )


def _why(straggler: Straggler) -> str:
    if straggler.cause == "other":
        return "outside data, forward, backward and optimizer"
    if straggler.cause == SEVERAL:
        largest = sorted(straggler.parts_ms, key=lambda part: -straggler.parts_ms[part])[:3]
        parts = ", ".join(f"{part} {units.ms(straggler.parts_ms[part])} ms" for part in largest)
        return f"in several parts: {parts}"
    return f"in {straggler.cause}"


def _about_limits(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    for level in levels:
        step = level.instrumented_step_ms
        if step is None:
            continue
        parts = {name: value or 0.0 for name, value in level.breakdown_ms.items()}
        groups = {
            "compute": parts["forward"] + parts["backward"],
            "input": parts["data"],
            "communication": sum(parts[name] for name in _EXPOSED),
            "copying": parts["exposed_copy"],
            "the optimizer": parts["optimizer"],
            "what lies between the parts": parts["other"],
        }
        first, second = sorted(groups, key=lambda name: -groups[name])[:2]
        kind = max(_EXPOSED, key=lambda name: parts[name])
        why = _LIMITS[first] or _EXPOSED[kind]
        if not _LIMITS[first] and kind == "exposed_transfer" and _holds_waiting(level):
            why = _TRANSFER_OR_WAIT
        yield Finding(
            id="limit",
            severity="info",
            message=f"{level.id} is limited by {first}: {why}.",
            evidence=f"{units.ms(groups[first])} of {units.ms(step.mean)} ms; next is {second} "
            f"with {units.ms(groups[second])} ms",
        )


def _holds_waiting(level: LevelResult) -> bool:
    """Tells whether exposed_transfer holds waiting too, since wait was withheld."""
    return level.dp > 1 and level.breakdown_ms["exposed_wait"] is None


def _about_loss(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    """Names what dominates the loss at the largest dp."""
    level = largest([lv for lv in levels if lv.waterfall_ms is not None and lv.dp > 1])
    if level is None or level.waterfall_ms is None:
        return
    terms = {name: level.waterfall_ms[name] or 0.0 for name in _LOSSES}
    name = max(terms, key=lambda term: terms[term])
    lost = (level.waterfall_ms["measured"] or 0.0) - (level.waterfall_ms["bare"] or 0.0)
    residual = level.waterfall_ms["residual"] or 0.0
    if terms[name] <= 0 or lost <= 0:
        return
    if abs(residual) > terms[name] / 2:
        yield Finding(
            id="dominant-loss",
            severity="info",
            message=f"At {level.id} no single loss stands out from the residual of the step "
            "model. Measure more steps, or on a quieter machine.",
            evidence=f"residual {units.ms(residual)} ms, largest term {_LOSSES[name]} "
            f"{units.ms(terms[name])} ms",
        )
        return
    known = level.speedup is not None and level.reference is not None
    speedup = f" you get {level.speedup:.2f}x and" if known else ""
    yield Finding(
        id="dominant-loss",
        severity="info",
        message=f"At {level.id}{speedup} a step takes {units.ms(lost)} ms more than the bare "
        f"model alone; the largest share is {_LOSSES[name]}"
        f"{', or waiting' if name == 'exposed_transfer' and _holds_waiting(level) else ''}.",
        evidence=f"{units.ms(terms[name])} ms, "
        f"{units.percent(terms[name] / (level.waterfall_ms['measured'] or 1.0), 0)} of the step; "
        f"residual {units.ms(residual)} ms",
    )


def _about_drop(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    """Names the neighbouring dp between which efficiency falls most."""
    curve = scaling_curve(levels)
    by_dp = {lv.dp: lv for lv in sorted(curve, key=lambda lv: -lv.accumulation)}
    pair = sharpest_drop({dp: lv.efficiency for dp, lv in by_dp.items()})
    if pair is None:
        return
    before, after = by_dp[pair[0]], by_dp[pair[1]]
    fall = (before.efficiency or 0.0) - (after.efficiency or 0.0)
    if fall < 0.05 or not _differ(_per_sample(before), _per_sample(after)):
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
    shares = [_loss_shares(level) for level in (before, after)]
    if not shares[0] or not shares[1]:
        return ""
    grown = {name: shares[1][name] - shares[0][name] for name in shares[1]}
    name = max(grown, key=lambda term: grown[term])
    return f", mostly by {name} ({_points(grown[name])})" if grown[name] > 0 else ""


def _loss_shares(level: LevelResult) -> dict[str, float]:
    """Returns each loss as a share of the step: at another accumulation ms cannot be compared."""
    falls, step = level.waterfall_ms, level.instrumented_step_ms
    if falls is None or step is None or not falls["measured"]:
        return {}
    shares = {
        text: (falls[name] or 0.0) / falls["measured"]
        for name, text in _LOSSES.items()
        if name != "optimizer"
    }
    # Whole, and not less dp = 1: work per step that more ranks do not divide.
    optimizer = (level.breakdown_ms["optimizer"] or 0.0) / step.mean
    return {**shares, "the optimizer step, which more ranks do not divide": optimizer}


def _points(share: float) -> str:
    return f"{share * 100:+.0f} points of the step"


def _per_sample(level: LevelResult) -> tuple[float, float] | None:
    """Returns the interval of a device's time for a sample in ms; None without one."""
    if level.step_ms is None or level.step_ms.ci95 is None or level.micro_batch is None:
        return None
    low, high = level.step_ms.ci95
    each = level.micro_batch * level.accumulation
    return low / each, high / each


def _differ(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool:
    """Tells whether two intervals lie apart; an unknown one is taken for a point."""
    if a is None or b is None:
        return True
    return a[1] < b[0] or b[1] < a[0]


def _about_accumulation(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    """Compares splits of one global batch into micro-batch and accumulation at equal dp."""
    groups: dict[tuple[int, int, str], list[LevelResult]] = {}
    for level in levels:
        if level.global_batch is not None:
            groups.setdefault((level.dp, level.global_batch, level.placement), []).append(level)
    for (dp, total, placement), members in groups.items():
        where = f"dp {dp}{' spread over nodes' if placement == 'spread' else ''}"
        timed = [lv for lv in members if lv.step_ms is not None]
        if len({lv.accumulation for lv in timed}) < 2:
            continue
        per_sample = {lv.id: lv.step_ms.mean / total for lv in timed if lv.step_ms}
        best = min(timed, key=lambda lv: per_sample[lv.id])
        worst = max(timed, key=lambda lv: per_sample[lv.id])
        evidence = (
            f"{units.ms(per_sample[best.id])} and {units.ms(per_sample[worst.id])} ms a sample"
        )
        message = (
            f"At {where} and global batch {total}, micro-batch {best.micro_batch} x "
            f"accumulation {best.accumulation} is the cheapest split; {worst.micro_batch} x "
            f"{worst.accumulation} costs "
            f"{units.percent(per_sample[worst.id] / per_sample[best.id] - 1, 0)} more per sample."
        )
        if not _differ(_per_sample(best), _per_sample(worst)):
            message = (
                f"At {where} and global batch {total}, splits into micro-batch and accumulation "
                "show no measurable difference per sample."
            )
            evidence += "; their intervals overlap"
        yield Finding(id="accumulation-cost", severity="info", message=message, evidence=evidence)


def _about_crossing(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    """Says what crossing nodes costs where a level was measured packed and spread."""
    for level in levels:
        packed = packed_twin(level, levels)
        if packed is None or level.crossing_ms is None:
            continue
        interval = level.crossing_ci95_ms
        where = f"dp {level.dp}"
        if sum(lv.dp == level.dp and lv.placement == "spread" for lv in levels) > 1:
            where += f" with micro-batch {level.micro_batch} x accumulation {level.accumulation}"
        message = f"Crossing nodes makes no measurable difference at {where}."
        if interval is None or not interval[0] <= 0 <= interval[1]:
            faster = level.crossing_ms < 0
            message = (
                f"Crossing nodes {'saves' if faster else 'costs'} "
                f"{units.ms(abs(level.crossing_ms))} ms a step "
                f"({units.percent(abs(level.crossing_fraction or 0.0))} of it) at {where}."
            )
        transfers = [lv.breakdown_ms["exposed_transfer"] for lv in (packed, level)]
        evidence = (
            f"plain step on {packed.nodes} node{'s' if packed.nodes > 1 else ''} "
            f"{units.ms(packed.step_ms.median if packed.step_ms else None)} ms, on {level.nodes} "
            f"{units.ms(level.step_ms.median if level.step_ms else None)} ms; exposed transfer "
            f"{units.ms(transfers[0])} and {units.ms(transfers[1])} ms"
        )
        if interval is not None:
            evidence += f"; interval {units.ms(interval[0])} to {units.ms(interval[1])} ms"
        yield Finding(id="node-crossing", severity="info", message=message, evidence=evidence)
