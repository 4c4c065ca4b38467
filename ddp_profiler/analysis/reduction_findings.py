"""Mistakes of reduction in scripts, in plain words: each with evidence, cost and remedy."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_profiler import units
from ddp_profiler.analysis.reduction import Broadcast, Cause, Differing, Reduction
from ddp_profiler.analysis.results import Finding, LevelResult

_NAMES_SHOWN = 3
_WORTH = 0.01
"""What takes less than this share of a step is worth knowing, and no warning."""
_LATE = 0.5
"""DDP hands over the first of several buckets later than at this share of backward only where
their gradients come late, or all together."""
_MORE_THAN_ONCE = 1.01

_CAUSES = {
    Cause.OUTSIDE: (
        "in no DDP, so nobody reduces it",
        "Put it into the module that DDP wraps, or reduce its gradient. It is right only where "
        "each rank owns a part of its own.",
    ),
    Cause.FROZEN: (
        "frozen when DDP was built, so DDP does not reduce it",
        "Build DDP after requires_grad is set.",
    ),
    Cause.NOT_REDUCED: (
        "there was no gradient collective of its DDP in that step",
        "Call DDP itself, not its .module, and leave the last micro-step of each step, forward "
        "and backward, outside of no_sync().",
    ),
    Cause.ADDED: (
        "a backward after the last reduction of that step has added to them",
        "Reduce in the last micro-step of each step and keep the others, not it, under no_sync().",
    ),
    Cause.CHANGED: (
        "they differ though they were reduced: something changed them after the reduction",
        "Look for what depends on the rank between backward and optimizer.step.",
    ),
}


def find_reduction(level: LevelResult) -> Iterator[Finding]:
    """Returns what is wrong with the reductions of a level; nothing for a study's levels."""
    reduction = level.reduction
    if reduction is None:
        return
    yield from _about_needless(level, reduction)
    yield from _about_missing(level, reduction)
    yield from _about_differing(level, reduction)
    if not reduction.framework:
        yield from _about_search(level, reduction)
        yield from _about_broadcasts(level, reduction)
        yield from _about_compiled(level, reduction)


def reduction_notes(reduction: Reduction | None) -> list[str]:
    """Says what is no mistake of the script's, or cannot be told."""
    if reduction is None:
        return []
    notes = []
    cost = f"{units.ms(_search_ms(reduction))} ms a step"
    if reduction.searches and reduction.framework:
        notes.append(
            f"{reduction.framework} has built DDP with find_unused_parameters, which costs {cost}."
        )
    elif reduction.searches and reduction.unused is None:
        notes.append(
            f"find_unused_parameters costs {cost}; whether each backward uses all parameters is "
            "not seen here."
        )
    for broadcast in _needless_broadcasts(reduction):
        if reduction.framework:
            notes.append(
                f"{reduction.framework} has built DDP so that it broadcasts buffers which do not "
                f"change{_steps_compared(broadcast)}; that costs {units.ms(broadcast.mean_ms)} ms "
                "a step, waiting included."
            )
    return notes


def _about_needless(level: LevelResult, reduction: Reduction) -> Iterator[Finding]:
    if reduction.syncs <= _MORE_THAN_ONCE:
        return
    gain, step = reduction.needless_ms, level.instrumented_step_ms
    cost = ""
    if gain is not None and step is not None:
        cost = (
            f" and at least {units.ms(gain)} ms of it exposed, {units.percent(gain / step.mean)} "
            "of the step; a slower backward and copies come on top"
        )
    count, buckets = level.comm.num_gradient_collectives_per_step, level.comm.num_buckets
    held = f"{buckets or 'unknown'} bucket{'' if buckets == 1 else 's'}"
    yield Finding(
        id="needless-reductions",
        severity="warning",
        message=f"{level.id}: gradients are reduced in {reduction.syncs:.3g} micro-steps of a step "
        "instead of one. Wrap all but the last in no_sync() of the same DDP, forward and backward.",
        evidence=f"{count or 0:.4g} gradient collectives a step, {held}; "
        f"{units.nbytes(reduction.needless_bytes)} a step reduced too early{cost}",
        expected_gain_ms=gain,
        expected_gain_pct=_percent(level, gain),
    )


def _about_missing(level: LevelResult, reduction: Reduction) -> Iterator[Finding]:
    if not reduction.never_reduced or (reduction.reduces_itself and not reduction.differing):
        return
    if reduction.called:
        why = "every micro-step ran under no_sync()"
        remedy = "Leave the last micro-step of each step, forward and backward, outside of it."
    else:
        why = "the model was called past DDP"
        remedy = "Call the DDP itself in training, not its .module or the bare model."
    differing = len(reduction.differing)
    evidence = "no gradient collective in any observed step of any rank"
    if reduction.compared:
        evidence += (
            f"; gradients of {differing} of {reduction.compared} parameters differ between ranks"
            if differing
            else f"; gradients of all {reduction.compared} parameters are equal nevertheless, as "
            "on equal data"
        )
    yield Finding(
        id="never-reduced",
        severity="warning" if reduction.reduces_itself else "error",
        message=f"{level.id}: gradients are never reduced: {why}. {remedy}",
        evidence=evidence + _itself(reduction),
    )


def _about_differing(level: LevelResult, reduction: Reduction) -> Iterator[Finding]:
    for cause, (why, remedy) in _CAUSES.items():
        found = [one for one in reduction.differing if one.cause is cause]
        if not found or (cause is Cause.NOT_REDUCED and reduction.never_reduced):
            continue
        hooked = reduction.hooked and cause is Cause.CHANGED
        suspect = reduction.reduces_itself or hooked
        yield Finding(
            id="gradients-differ",
            severity="warning" if suspect else "error",
            message=f"{level.id}: ranks step with different gradients of {_listed(found)}: {why}. "
            f"{remedy}",
            evidence=f"{len(found)} of {reduction.compared} compared parameters differ bit for "
            f"bit, first in warm-up step {min(one.step for one in found)}"
            + ("; a communication hook of the script reduces them" if hooked else "")
            + _itself(reduction),
        )


def _listed(found: list[Differing]) -> str:
    shown = ", ".join(units.printable(one.name) for one in found[:_NAMES_SHOWN])
    more = len(found) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _itself(reduction: Reduction) -> str:
    if not reduction.reduces_itself:
        return ""
    return "; the script reduces as many bytes by itself, which may be weights"


def _search_ms(reduction: Reduction) -> float:
    return reduction.search_ms + reduction.map_ms


def _about_search(level: LevelResult, reduction: Reduction) -> Iterator[Finding]:
    if not reduction.searches or reduction.unused != 0:
        return
    cost = _search_ms(reduction)
    yield Finding(
        id="needless-unused-search",
        severity=_severity(level, cost),
        message=f"{level.id}: find_unused_parameters is set for nothing: all parameters are used "
        "in every observed backward, on all ranks. Build DDP without it.",
        evidence=f"searching the graph {units.ms(reduction.search_ms)} ms, reducing the map of "
        f"used parameters {units.ms(reduction.map_ms)} ms after the gradients",
        expected_gain_ms=cost,
        expected_gain_pct=_percent(level, cost),
    )


def _needless_broadcasts(reduction: Reduction) -> list[Broadcast]:
    return [b for b in reduction.broadcasts if b.changed is False and b.mean_ms > 0]


def _steps_compared(broadcast: Broadcast) -> str:
    steps = broadcast.compared_steps
    return "" if steps is None else f" from step {steps[0]} to step {steps[1]}"


def _about_broadcasts(level: LevelResult, reduction: Reduction) -> Iterator[Finding]:
    for broadcast in _needless_broadcasts(reduction):
        gain = broadcast.least_ms
        least = f", at least {units.ms(gain)} ms of it no waiting" if gain is not None else ""
        yield Finding(
            id="needless-buffer-broadcast",
            severity=_severity(level, broadcast.mean_ms),
            message=f"{level.id}: buffers are broadcast for nothing: they do not change"
            f"{_steps_compared(broadcast)}. Build DDP with broadcast_buffers=False.",
            evidence=f"{units.nbytes(broadcast.nbytes)} of buffers, equal at all compared points; "
            f"{units.ms(broadcast.mean_ms)} ms a step{least}",
            expected_gain_ms=gain,
            expected_gain_pct=_percent(level, gain),
        )


def _about_compiled(level: LevelResult, reduction: Reduction) -> Iterator[Finding]:
    comm, parts = level.comm, level.breakdown_ms
    first = reduction.first_hand_over_fraction
    exposed, backward = parts["exposed_transfer"], parts["backward"]
    if not reduction.compiled_inside or (comm.num_buckets or 0) < 2 or first is None:
        return
    if first < _LATE or exposed is None or backward is None:
        return
    most = min(exposed, backward)
    yield Finding(
        id="compiled-inside-ddp",
        severity=_severity(level, most),
        message=f"{level.id}: DDP wraps a compiled module, whose backward hands over all gradients "
        "at its end: little is hidden by backward. Compile the DDP instead, "
        "torch.compile(DDP(model)), so that its graph is split at the buckets, and call nothing of "
        "it before.",
        evidence=f"the first of {comm.num_buckets} buckets is handed over when "
        f"{units.percent(first, 0)} of backward has passed; overlap could hide at most "
        f"{units.ms(most)} ms, the smaller of exposed transfer and backward",
        expected_gain_ms=most,
        expected_gain_pct=_percent(level, most),
    )


def _percent(level: LevelResult, gain_ms: float | None) -> float | None:
    step = level.instrumented_step_ms
    return None if gain_ms is None or step is None else 100 * gain_ms / step.mean


def _severity(level: LevelResult, cost_ms: float) -> str:
    return "warning" if (_percent(level, cost_ms) or 0.0) >= 100 * _WORTH else "info"
