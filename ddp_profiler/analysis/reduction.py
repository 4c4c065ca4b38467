"""What a script's record says about how its gradients and buffers are reduced.

Only figures and facts; :mod:`ddp_profiler.analysis.reduction_findings` makes sentences of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ddp_profiler.analysis.parts import NULL, Columns, Ints, Steps, passed, step_keys
from ddp_profiler.schema import (
    DdpFacts,
    LevelFacts,
    LevelSettings,
    OptimizedParameter,
    ParameterPlace,
    SpanKind,
    Variant,
)

FRAMEWORKS = frozenset(
    {
        "accelerate",
        "catalyst",
        "composer",
        "detectron2",
        "fairseq",
        "fastai",
        "ignite",
        "lightning",
        "lightning_fabric",
        "mmengine",
        "monai",
        "pytorch_lightning",
        "transformers",
        "ultralytics",
    }
)
"""Packages that build DDP for a script: how they do so is not the script's mistake."""

_NS_PER_MS = 1e6
_ALMOST_ALL = 0.99
_COMPARED_PLACES = (ParameterPlace.REDUCED, ParameterPlace.FROZEN, ParameterPlace.OUTSIDE)
_OBSERVED = (Variant.WARMUP, Variant.INSTRUMENTED)
_NOT_LOOKED_AT = (
    SpanKind.DATA,
    SpanKind.FORWARD,
    SpanKind.LOCAL_BACKWARD_END,
    SpanKind.OPTIMIZER,
)
_COLUMNS = (
    *("repetition", "variant", "step", "micro_step", "kind", "index"),
    *("begin_ns", "end_ns", "bytes", "value"),
)
"""What is looked at, of all ranks at once."""


class Cause(StrEnum):
    """Why ranks step with different gradients, as far as the record tells."""

    OUTSIDE = "outside"
    """The parameter is in no DDP."""
    FROZEN = "frozen"
    """It is in a DDP that was built while it needed no gradient."""
    NOT_REDUCED = "not_reduced"
    """Its DDP had no gradient collective in that step."""
    ADDED = "added"
    """A backward without one followed the last reduction of that step."""
    CHANGED = "changed"
    """All was reduced, so something changed the gradients afterwards."""


@dataclass(frozen=True)
class Differing:
    """A parameter that ranks step with different gradients of.

    Attributes:
        name: As the script's model or optimizer names it.
        cause: Why, as far as the record tells.
        step: The first of the compared steps in which they differed.
    """

    name: str
    cause: Cause
    step: int


@dataclass(frozen=True)
class Broadcast:
    """The buffer broadcasts of one DDP.

    Attributes:
        ddp: Its number.
        nbytes: Size of its buffers.
        changed: Whether buffers had changed between any two of the compared points, on any rank;
            None where that was not seen.
        mean_ms: What they take in a step, mean over ranks; waiting included.
        least_ms: What they take on the rank that is held up least, by the broadcast, a step; None
            where the record of a rank is missing.
        compared_steps: The first and the last step with a compared point; None without any.
    """

    ddp: int
    nbytes: int
    changed: bool | None
    mean_ms: float
    least_ms: float | None
    compared_steps: tuple[int, int] | None = None


@dataclass(frozen=True)
class Reduction:
    """How a script's gradients and buffers are reduced. Times are ms a step.

    Attributes:
        framework: The framework that has built DDP; empty where the script has.
        syncs: Micro-steps of a step in which a DDP reduces, mean over the steps in which it does;
            of the DDP that does so most often. 0 where none does.
        needless_bytes: Bytes that a DDP reduces in a step before the micro-step in which it does
            so last.
        needless_ms: Exposed communication of backwards in which all reductions are such ones, of
            each on the rank that is held up least, so without waiting; None where a rank's
            record is missing.
        never_reduced: Whether no step had any gradient collective.
        called: Whether any DDP was called at all in training.
        reduces_itself: Whether the script reduces as much as its gradients by itself.
        compared: Parameters whose gradients were compared between ranks.
        compared_steps: In which steps of the warm-up.
        differing: Those that differed.
        hooked: Whether a communication hook of the script reduces.
        unused: The most parameters that any rank held as unused in a backward; None where that
            was not seen, or only of several micro-steps together.
        searches: Whether DDP looks for unused parameters in each forward.
        search_ms: What that takes in forward, mean over ranks.
        map_ms: What reducing the map of used parameters adds to the exposed window.
        broadcasts: Of each DDP that broadcasts buffers.
        compiled_inside: Whether DDP holds a compiled module.
        first_hand_over_fraction: Which share of local backward has passed when DDP hands over its
            first bucket, median over ranks and sync micro-steps; None where it hands over none.
    """

    framework: str
    syncs: float
    needless_bytes: float
    needless_ms: float | None
    never_reduced: bool
    called: bool
    reduces_itself: bool
    compared: int
    compared_steps: tuple[int, ...]
    differing: tuple[Differing, ...]
    hooked: bool
    unused: int | None
    searches: bool
    search_ms: float
    map_ms: float
    broadcasts: tuple[Broadcast, ...]
    compiled_inside: bool
    first_hand_over_fraction: float | None


def examine(
    columns: Mapping[int, Columns],
    index: int,
    level: LevelSettings,
    facts: LevelFacts | None,
    instrumented: Sequence[Steps],
) -> Reduction | None:
    """Examines the reductions of a script; None for a study, at dp = 1, or without steps.

    Args:
        columns: Each rank's spans by column; ranks whose record is lost are absent.
        index: Index of the level.
        level: The level.
        facts: What is known of it.
        instrumented: Each rank's instrumented steps that figures are made of.
    """
    if facts is None or not facts.ddps or level.dp < 2 or not instrumented:
        return None
    spans = {rank: _of_level(columns[rank], index) for rank in columns}
    measured = {s.rank: _of_steps(spans[s.rank], s) for s in instrumented if s.rank in spans}
    complete = len(instrumented) == len(level.ranks)
    known = facts.sources.get("gradient_collectives") is not None
    needless = [_needless(measured[s.rank], s) for s in instrumented]
    least = _least([one.windows for one in needless]) if complete else None
    buffers = {rank: _buffer_digests(columns[rank], index) for rank in columns}
    whole_world = level.dp == len(level.ranks)
    differing, compared, compared_steps = (
        _compare(spans, facts) if whole_world and known else ((), 0, ())
    )
    return Reduction(
        framework=facts.built_by if facts.built_by in FRAMEWORKS else "",
        syncs=max(one.syncs for one in needless),
        needless_bytes=float(np.mean([one.nbytes for one in needless])),
        needless_ms=None if least is None else least / len(instrumented[0]) / _NS_PER_MS,
        never_reduced=known
        and not any((s["kind"] == SpanKind.GRADIENT).any() for s in spans.values()),
        called=any(_called(of_rank, index) for of_rank in columns.values()),
        reduces_itself=_reduces_itself(spans, facts),
        compared=compared,
        compared_steps=compared_steps,
        differing=differing,
        hooked=facts.sources.get("gradient_collectives") == "user_hook",
        unused=_unused(spans, instrumented),
        searches=any(_searches(ddp) for ddp in facts.ddps),
        search_ms=_search(measured, instrumented),
        map_ms=float(np.mean([_map(measured[s.rank], s) for s in instrumented])),
        broadcasts=tuple(
            _broadcast(
                place if ddp.number < 0 else ddp.number,
                ddp,
                buffers,
                len(level.ranks),
                measured,
                instrumented,
                complete,
            )
            for place, ddp in enumerate(facts.ddps)
            if ddp.broadcast_buffers and ddp.buffer_bytes and ddp.group_size > 1
        ),
        compiled_inside=any(ddp.compiled_inside for ddp in facts.ddps),
        first_hand_over_fraction=_first_hand_over(measured, instrumented),
    )


def _of_level(columns: Columns, index: int) -> dict[str, Ints]:
    chosen = (columns["level"] == index) & np.isin(columns["variant"], _OBSERVED)
    chosen &= ~np.isin(columns["kind"], _NOT_LOOKED_AT)
    return {name: columns[name][chosen].astype(np.int64) for name in _COLUMNS}


def _called(columns: Columns, index: int) -> bool:
    called = (columns["level"] == index) & (columns["kind"] == SpanKind.FORWARD)
    return bool((called & np.isin(columns["variant"], _OBSERVED)).any())


def _of_steps(spans: Columns, steps: Steps) -> dict[str, Ints]:
    chosen = (spans["variant"] == Variant.INSTRUMENTED) & np.isin(
        step_keys(spans["repetition"], spans["step"]), steps.key
    )
    return {name: values[chosen] for name, values in spans.items()}


def _searches(ddp: DdpFacts) -> bool:
    return ddp.find_unused_parameters and not ddp.static_graph


def _least(by_rank: Sequence[Ints]) -> int | None:
    """Adds up, over meetings, the time of the rank that spent least; None if they do not pair.

    Shape [meeting] each, in ns and in the same order. Who comes last to a meeting has not
    waited there.
    """
    if len({len(lengths) for lengths in by_rank}) != 1:
        return None
    return int(np.min(np.stack(by_rank), axis=0).sum())


@dataclass(frozen=True)
class _Needless:
    """One rank's reductions before the last one of a step; ``windows`` are ns, shape [call]."""

    syncs: float
    nbytes: float
    windows: Ints


def _needless(spans: Columns, steps: Steps) -> _Needless:
    chosen = spans["kind"] == SpanKind.GRADIENT
    step = step_keys(spans["repetition"], spans["step"])[chosen]
    micro_step, ddp = spans["micro_step"][chosen], spans["value"][chosen]
    begin, nbytes = spans["begin_ns"][chosen], spans["bytes"][chosen]
    if not len(step):
        return _Needless(0.0, 0.0, np.empty(0, dtype=np.int64))
    turns, turn = np.unique(np.stack((ddp, step)), axis=1, return_inverse=True)
    turn = turn.reshape(-1)
    last = np.full(turns.shape[1], -1, dtype=np.int64)
    np.maximum.at(last, turn, micro_step)
    early = micro_step < last[turn]
    reductions = np.unique(np.stack((turn, micro_step)), axis=1)[0]
    often = np.bincount(reductions)
    syncs = max(float(often[turns[0] == one].mean()) for one in np.unique(ddp))
    # A backward counts where it reduces nothing that has to be.
    calls = steps.backwards
    call = np.searchsorted(calls.begin, begin, side="right") - 1
    needed = np.bincount(call[~early & (call >= 0)], minlength=len(calls.key)) > 0
    return _Needless(
        syncs=syncs,
        nbytes=float(nbytes[early].sum()) / len(steps),
        windows=(calls.last_collective - calls.local_end)[~needed],
    )


def _reduces_itself(spans: Mapping[int, Columns], facts: LevelFacts) -> bool:
    """Tells whether a script reduces as many bytes in a step by itself as its gradients have."""
    most = 0.0
    for rank in spans.values():
        steps = max(int((rank["kind"] == SpanKind.STEP).sum()), 1)
        in_backward = (rank["kind"] == SpanKind.BACKWARD_COMM) & (rank["bytes"] != NULL)
        # Bytes outside of backward were counted on rank 0, in all observed steps together.
        own = max(facts.reduced_outside_bytes, int(rank["bytes"][in_backward].sum()))
        most = max(most, own / steps)
    return most >= max(_ALMOST_ALL * facts.gradient_bytes, 1)


def _compare(
    spans: Mapping[int, Columns], facts: LevelFacts
) -> tuple[tuple[Differing, ...], int, tuple[int, ...]]:
    """Compares the digests of gradients over ranks.

    A parameter is compared where at least two ranks have a digest of it, of equal size: an
    optimizer may hold a part of the parameters on each rank.
    """
    found: dict[int, Differing] = {}
    compared: set[int] = set()
    tables = [_digests(rank) for rank in spans.values()]
    steps = sorted({step for table in tables for step, _ in table})
    for step in steps:
        for ordinal, parameter in enumerate(facts.optimized):
            seen = [table[step, ordinal] for table in tables if (step, ordinal) in table]
            sizes = {size for size, _ in seen}
            if parameter.place not in _COMPARED_PLACES or len(seen) < 2 or len(sizes) > 1:
                continue
            compared.add(ordinal)
            if len({value for _, value in seen}) > 1 and ordinal not in found:
                causes = [_cause(parameter, rank, step) for rank in spans.values()]
                found[ordinal] = Differing(parameter.name, min(causes, key=list(Cause).index), step)
    ordered = tuple(found[ordinal] for ordinal in sorted(found))
    return ordered, len(compared), tuple(steps)


def _digests(spans: Columns) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns (bytes, digest) by (step, ordinal of the parameter)."""
    chosen = spans["kind"] == SpanKind.GRADIENT_DIGEST
    columns = (spans[name][chosen].tolist() for name in ("step", "index", "bytes", "value"))
    return {
        (step, ordinal): (nbytes, value)
        for step, ordinal, nbytes, value in zip(*columns, strict=True)
    }


def _cause(parameter: OptimizedParameter, spans: Columns, step: int) -> Cause:
    """Returns why a gradient may differ in a step, by what one rank did in it."""
    if parameter.place is ParameterPlace.OUTSIDE:
        return Cause.OUTSIDE
    if parameter.place is ParameterPlace.FROZEN:
        return Cause.FROZEN
    here = spans["step"] == step
    own = here & (spans["kind"] == SpanKind.GRADIENT) & (spans["value"] == parameter.ddp)
    if not own.any():
        return Cause.NOT_REDUCED
    backwards = spans["micro_step"][here & (spans["kind"] == SpanKind.BACKWARD)]
    later = backwards.max(initial=-1) > spans["micro_step"][own].max()
    return Cause.ADDED if later else Cause.CHANGED


def _unused(spans: Mapping[int, Columns], instrumented: Sequence[Steps]) -> int | None:
    values: list[int] = []
    for rank in spans.values():
        is_map = (rank["kind"] == SpanKind.BOOKKEEPING) & (rank["value"] != NULL)
        values += rank["value"][is_map].tolist()
    if not values:
        return None
    most = max(values)
    if most:
        return most
    # Under no_sync DDP adds a parameter's use up over the window: one map is of many backwards.
    for steps in instrumented:
        rank = spans[steps.rank]
        is_step = (rank["kind"] == SpanKind.STEP) & (rank["variant"] == Variant.INSTRUMENTED)
        kept = is_step & np.isin(step_keys(rank["repetition"], rank["step"]), steps.key)
        if rank["index"][kept].sum() > len(steps.backwards.key):
            return None
    return 0


def _search(measured: Mapping[int, Columns], instrumented: Sequence[Steps]) -> float:
    each = []
    for steps in instrumented:
        rank = measured[steps.rank]
        is_search = rank["kind"] == SpanKind.GRAPH_SEARCH
        length = (rank["end_ns"] - rank["begin_ns"])[is_search].sum()
        each.append(length / len(steps) / _NS_PER_MS)
    return float(np.mean(each))


def _map(spans: Columns, steps: Steps) -> float:
    """Returns for how long only DDP's own collectives are in flight in the exposed window."""
    calls = steps.backwards
    if not len(calls.key):
        return 0.0
    chosen = spans["kind"] == SpanKind.BOOKKEEPING
    begin, end = spans["begin_ns"][chosen], spans["end_ns"][chosen]
    call = np.searchsorted(calls.begin, begin, side="right") - 1
    inside = (call >= 0) & (begin <= calls.end[call])
    call, begin, end = call[inside], begin[inside], end[inside]
    end = np.where(end == NULL, calls.end[call], np.minimum(end, calls.end[call]))
    begin = np.maximum(begin, calls.last_collective[call])
    total = passed(begin, np.maximum(begin, end)).total
    return float(total[-1]) / len(steps) / _NS_PER_MS if len(total) else 0.0


def _broadcast(
    number: int,
    ddp: DdpFacts,
    digests: Mapping[int, Columns],
    world: int,
    measured: Mapping[int, Columns],
    instrumented: Sequence[Steps],
    complete: bool,
) -> Broadcast:
    lengths = []
    for steps in instrumented:
        rank = measured[steps.rank]
        own = (rank["kind"] == SpanKind.FORWARD_COMM) & (rank["index"] == number)
        order = np.argsort(rank["begin_ns"][own], kind="stable")
        lengths.append((rank["end_ns"] - rank["begin_ns"])[own][order])
    least = _least(lengths) if complete else None
    steps_seen = len(instrumented[0])
    changed, compared_steps = _changed(number, digests, together=ddp.group_size == world)
    return Broadcast(
        ddp=number,
        nbytes=ddp.buffer_bytes,
        changed=changed,
        mean_ms=float(np.mean([values.sum() for values in lengths])) / steps_seen / _NS_PER_MS,
        least_ms=None if least is None else least / steps_seen / _NS_PER_MS,
        compared_steps=compared_steps,
    )


def _buffer_digests(columns: Columns, index: int) -> dict[str, Ints]:
    # Also those of plain blocks: they are taken before the first step.
    chosen = (columns["level"] == index) & (columns["kind"] == SpanKind.BUFFER_DIGEST)
    return {name: columns[name][chosen].astype(np.int64) for name in ("step", "index", "value")}


def _changed(
    number: int, digests: Mapping[int, Columns], *, together: bool
) -> tuple[bool | None, tuple[int, int] | None]:
    """Tells whether a DDP's buffers changed, and in which steps the first and last points lie.

    Args:
        number: The number of the DDP.
        digests: Each rank's points.
        together: Whether all ranks broadcast to each other: buffers that then differ between
            two ranks have changed on one of them, even if its own are always the same.
    """
    steps: set[int] = set()
    values: dict[int, set[int]] = {}
    seen = True
    for rank, points in digests.items():
        own = points["index"] == number
        seen &= int(own.sum()) > 1
        steps.update(points["step"][own].tolist())
        values.setdefault(0 if together else rank, set()).update(points["value"][own].tolist())
    changed = any(len(different) > 1 for different in values.values())
    return changed if seen else None, (min(steps), max(steps)) if steps else None


def _first_hand_over(
    measured: Mapping[int, Columns], instrumented: Sequence[Steps]
) -> float | None:
    shares: list[float] = []
    for steps in instrumented:
        rank, calls = measured[steps.rank], steps.backwards
        begin = np.sort(rank["begin_ns"][rank["kind"] == SpanKind.GRADIENT])
        if not len(begin) or not len(calls.key):
            continue
        # Each of these calls hands over at least one.
        first = begin[np.minimum(np.searchsorted(begin, calls.begin), len(begin) - 1)]
        length = calls.local_end - calls.begin
        known = length > 0
        shares += np.clip((first - calls.begin)[known] / length[known], 0, 1).tolist()
    return float(np.median(shares)) if shares else None
