"""Derives the parts of each step of one rank from its raw spans.

All times come out in ms as arrays of shape [step]. The definitions are those of
docs/metrics.md; this module is the only place that applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ddp_profiler.schema import SpanKind, Variant

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Columns = Mapping[str, Ints]

NULL = np.iinfo(np.int64).min
_NS_PER_MS = 1e6

PARTS = (
    "data",
    "forward",
    "forward_comm",
    "backward",
    "backward_comm",
    "exposed_wait",
    "exposed_transfer",
    "exposed_copy",
    "optimizer",
    "other",
)
"""The parts of a step, in the order in which they are shown; their sum is the step."""


@dataclass(frozen=True)
class Backwards:
    """The synchronising backward calls of one rank, shape [call] each, times in ns.

    Attributes:
        step_index: Row of the call's step in :class:`Steps`.
        key: Identifies the same call on every rank: (repetition, step, micro-step) packed.
        begin: Backward was called.
        local_end: Autograd had no local work left.
        last_collective: The call's last gradient collective had completed, clamped to
            [local_end, end]; equals local_end where there was none.
        end: Backward returned.
        module_comm: Length of the module collectives in [begin, local_end], overlaps once.
    """

    step_index: Ints
    key: Ints
    begin: Ints
    local_end: Ints
    last_collective: Ints
    end: Ints
    module_comm: Ints


@dataclass(frozen=True)
class Meetings:
    """Collectives that are issued inside forward or backward, by rank; shape [meeting] each.

    Attributes:
        step_index: Row of the step in :class:`Steps`.
        key: Identifies the same micro-step on every rank: (repetition, step, micro-step) packed.
        ordinal: Number of the collective in its micro-step, from 0; the same on every rank.
        in_forward: Whether it was issued in forward; else in backward.
        begin: The rank arrived, in ns.
        end: It could go on, in ns.
    """

    step_index: Ints
    key: Ints
    ordinal: Ints
    in_forward: npt.NDArray[np.bool_]
    begin: Ints
    end: Ints


@dataclass(frozen=True)
class Passed:
    """How much time of a kind has passed at any moment: intervals that overlap count once.

    Attributes:
        moments: Begins and ends of the intervals in turn, in ns; shape [2 x interval].
        total: Time of that kind until each of them, in ns.
    """

    moments: Ints
    total: Floats

    def until(self, times: Ints) -> Floats:
        """Returns the time that has passed until each moment, in ns."""
        if len(self.moments) == 0:
            return np.zeros(np.shape(times))
        # Counted from the first moment: as floats, large times would lose their ns.
        first = self.moments[0]
        passed: Floats = np.interp(
            (times - first).astype(float), (self.moments - first).astype(float), self.total
        )
        return passed


def passed(begin: Ints, end: Ints) -> Passed:
    """Adds up intervals, shape [interval] each in ns, in any order."""
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order]) if len(end) else end
    before = np.concatenate((begin[:1], end[:-1]))
    begin = np.maximum(begin, before)
    moments = np.stack((begin, np.maximum(end, begin)), axis=1).reshape(-1)
    total = np.cumsum(np.maximum(end - begin, 0)).astype(np.float64)
    until_begin = np.concatenate(([0.0], total[:-1])) if len(total) else total
    return Passed(moments, np.stack((until_begin, total), axis=1).reshape(-1))


@dataclass(frozen=True)
class OwnTime:
    """A part of a rank's own work: its calls, less the time in them that is another part's."""

    calls: Passed
    less: tuple[Passed, ...] = ()

    def until(self, times: Ints) -> Floats:
        """Returns the part's time until each moment, in ns."""
        own: Floats = self.calls.until(times) - sum(other.until(times) for other in self.less)
        return own


@dataclass(frozen=True)
class Steps:
    """The steps of one rank at one level and variant, shape [step] each.

    Attributes:
        rank: Global rank.
        key: Identifies the same step on every rank: (repetition, step) packed.
        block: Block of each step.
        repetition: Repetition of each step.
        begin: Begin of each step in ns.
        wall_ms: Length of the step.
        samples: Samples that entered forward; 0 where forward was not observed.
        micro_steps: Forward calls seen.
        parts_ms: Everything but the three exposed parts, by name.
        backwards: The synchronising backward calls.
        meetings: Collectives issued inside forward or backward.
        own: Data, forward, backward and optimizer as they pass, of all steps ever derived.
        busy_ms: Union of the in-flight intervals of gradient collectives.
        overlapped_ms: The part of it before the end of local backward.
        collectives: Gradient collectives of the step.
        gradient_bytes: Bytes handed to them.
        unnoticed: Gradient collectives whose completion was never noticed.
    """

    rank: int
    key: Ints
    block: Ints
    repetition: Ints
    begin: Ints
    wall_ms: Floats
    samples: Ints
    micro_steps: Ints
    parts_ms: Mapping[str, Floats]
    backwards: Backwards
    meetings: Meetings
    own: Mapping[str, OwnTime]
    busy_ms: Floats
    overlapped_ms: Floats
    collectives: Ints
    gradient_bytes: Ints
    unnoticed: int

    def __len__(self) -> int:
        return len(self.wall_ms)

    def only(self, kept: npt.NDArray[np.bool_]) -> Steps:
        """Returns the chosen steps; ``kept`` has shape [step]."""
        row = np.cumsum(kept) - 1
        calls, meetings = self.backwards, self.meetings
        inside, met = kept[calls.step_index], kept[meetings.step_index]
        return replace(
            self,
            key=self.key[kept],
            block=self.block[kept],
            repetition=self.repetition[kept],
            begin=self.begin[kept],
            wall_ms=self.wall_ms[kept],
            samples=self.samples[kept],
            micro_steps=self.micro_steps[kept],
            parts_ms={name: values[kept] for name, values in self.parts_ms.items()},
            backwards=Backwards(
                step_index=row[calls.step_index[inside]],
                key=calls.key[inside],
                begin=calls.begin[inside],
                local_end=calls.local_end[inside],
                last_collective=calls.last_collective[inside],
                end=calls.end[inside],
                module_comm=calls.module_comm[inside],
            ),
            meetings=Meetings(
                step_index=row[meetings.step_index[met]],
                key=meetings.key[met],
                ordinal=meetings.ordinal[met],
                in_forward=meetings.in_forward[met],
                begin=meetings.begin[met],
                end=meetings.end[met],
            ),
            busy_ms=self.busy_ms[kept],
            overlapped_ms=self.overlapped_ms[kept],
            collectives=self.collectives[kept],
            gradient_bytes=self.gradient_bytes[kept],
        )


def derive_steps(rank: int, columns: Columns, level: int, variant: Variant) -> Steps:
    """Derives the steps of one rank.

    Steps whose own span is missing (a run that was cut) are left out with all their spans.

    Args:
        rank: Global rank, passed through.
        columns: The rank's spans by column, shape [span] each.
        level: Index of the level.
        variant: Which steps to take.
    """
    chosen = (columns["level"] == level) & (columns["variant"] == int(variant))
    spans = {name: values[chosen].astype(np.int64) for name, values in columns.items()}
    kind = spans["kind"]
    step_key = step_keys(spans["repetition"], spans["step"])

    is_step = kind == SpanKind.STEP
    order = np.argsort(spans["begin_ns"][is_step], kind="stable")
    steps = {name: values[is_step][order] for name, values in spans.items()}
    key = step_key[is_step][order]
    position = _Lookup(key)
    row = position.find(step_key)

    def total(of: SpanKind) -> Floats:
        mask = (kind == of) & (row >= 0)
        lengths = (spans["end_ns"] - spans["begin_ns"])[mask]
        return np.bincount(row[mask], weights=lengths, minlength=len(key)) / _NS_PER_MS

    def count(of: SpanKind) -> Ints:
        return np.bincount(row[(kind == of) & (row >= 0)], minlength=len(key)).astype(np.int64)

    wall = (steps["end_ns"] - steps["begin_ns"]) / _NS_PER_MS
    backwards, gradients, in_backward = _backwards(spans, row)
    window = np.bincount(
        backwards.step_index, weights=backwards.end - backwards.local_end, minlength=len(key)
    )
    forward_comm, backward_comm = (
        _per_step(comm.length, comm.row, len(key)) / _NS_PER_MS
        for comm in (_module_comm(spans, row, SpanKind.FORWARD_COMM), in_backward)
    )
    parts = {
        "data": total(SpanKind.DATA),
        "forward": total(SpanKind.FORWARD) - forward_comm,
        "forward_comm": forward_comm,
        "backward": total(SpanKind.BACKWARD) - window / _NS_PER_MS - backward_comm,
        "backward_comm": backward_comm,
        "optimizer": total(SpanKind.OPTIMIZER),
    }
    parts["other"] = wall - sum(parts.values()) - window / _NS_PER_MS

    forwards = (kind == SpanKind.FORWARD) & (row >= 0)
    samples = np.where(spans["samples"] == NULL, 0, spans["samples"])[forwards]
    busy, overlapped = _busy(gradients)
    return Steps(
        rank=rank,
        key=key,
        block=steps["block"],
        repetition=steps["repetition"],
        begin=steps["begin_ns"],
        wall_ms=wall,
        samples=np.bincount(row[forwards], weights=samples, minlength=len(key)).astype(np.int64),
        micro_steps=count(SpanKind.FORWARD),
        parts_ms=parts,
        backwards=backwards,
        meetings=_meetings(spans, row),
        own=_own(spans, backwards),
        busy_ms=_per_step(busy, gradients.row, len(key)) / _NS_PER_MS,
        overlapped_ms=_per_step(overlapped, gradients.row, len(key)) / _NS_PER_MS,
        collectives=np.bincount(gradients.row, minlength=len(key)).astype(np.int64),
        gradient_bytes=_per_step(gradients.nbytes, gradients.row, len(key)).astype(np.int64),
        unnoticed=gradients.unnoticed,
    )


@dataclass(frozen=True)
class Collectives:
    """The gradient collectives of one rank by step and hand-over, shape [collective] each.

    Attributes:
        key: Identifies the step on every rank: (repetition, step) packed.
        ordinal: Number in its step, from 0.
        micro_step: In which it was handed over.
        nbytes: Bytes reduced; ``NULL`` where that is not known.
        begin_ms: Hand-over, in ms after the step's begin.
        hidden_until_ms: End of what is hidden: completion or the end of local backward, whichever
            is first; ``begin_ms`` where nothing is hidden.
        end_ms: Completion, or the end of backward where that is earlier or completion was never
            noticed.
        noticed: Whether completion was noticed.
    """

    key: Ints
    ordinal: Ints
    micro_step: Ints
    nbytes: Ints
    begin_ms: Floats
    hidden_until_ms: Floats
    end_ms: Floats
    noticed: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.key)


def derive_collectives(columns: Columns, level: int, variant: Variant, keys: Ints) -> Collectives:
    """Derives a rank's gradient collectives, as :func:`derive_steps` counts them.

    Args:
        columns: The rank's spans by column, shape [span] each.
        level: Index of the level.
        variant: Which steps to take.
        keys: Of the steps that count.
    """
    chosen = (columns["level"] == level) & (columns["variant"] == int(variant))
    spans = {name: values[chosen].astype(np.int64) for name, values in columns.items()}
    step_key = step_keys(spans["repetition"], spans["step"])
    is_step = (spans["kind"] == SpanKind.STEP) & np.isin(step_key, keys)
    key, step_begin = step_key[is_step], spans["begin_ns"][is_step]
    _, found, _ = _backwards(spans, _Lookup(key).find(step_key))
    order = np.lexsort((found.begin, step_begin[found.row]))
    row = found.row[order]
    first = np.searchsorted(step_begin[row], step_begin[row], "left")

    def after(times: Ints) -> Floats:
        since: Floats = (times[order] - step_begin[row]) / _NS_PER_MS
        return since

    return Collectives(
        key=key[row],
        ordinal=(np.arange(len(row)) - first).astype(np.int64),
        micro_step=found.micro_step[order],
        nbytes=found.nbytes[order],
        begin_ms=after(found.begin),
        hidden_until_ms=after(np.clip(found.local_end, found.begin, found.end)),
        end_ms=after(found.end),
        noticed=found.noticed[order],
    )


def split_exposed(steps: Steps, latest_local_end: Ints | None, peers: int) -> dict[str, Floats]:
    """Splits the exposed window of each step into wait, transfer and copy, in ms.

    exposed_wait = (latest end of local backward over ranks - own end), clipped to the
    window; exposed_transfer: from then until the last gradient collective completed;
    exposed_copy: the rest. Without peers there is nobody to wait for and nothing to
    transfer, so the window is copy. Where the ranks' clocks cannot be compared
    (``latest_local_end`` is None) wait is NaN and transfer holds both.

    Args:
        steps: One rank's steps.
        latest_local_end: For each of ``steps.backwards``, the latest end of local
            backward over the ranks, in ns on this rank's clock.
        peers: dp of the level.

    Returns:
        ``exposed_wait``, ``exposed_transfer``, ``exposed_copy``, shape [step] each.
    """
    calls = steps.backwards
    if peers < 2:
        reached = done = calls.local_end
    else:
        latest = calls.local_end if latest_local_end is None else latest_local_end
        reached = np.clip(latest, calls.local_end, calls.end)
        done = np.maximum(calls.last_collective, reached)

    def per_step(lengths: Ints) -> Floats:
        return _per_step(lengths, calls.step_index, len(steps)) / _NS_PER_MS

    wait = per_step(reached - calls.local_end)
    if peers > 1 and latest_local_end is None:
        wait = np.full(len(steps), np.nan)
    return {
        "exposed_wait": wait,
        "exposed_transfer": per_step(done - reached),
        "exposed_copy": per_step(calls.end - done),
    }


def ready_times(columns: Columns, level: int, parameters: int) -> Floats:
    """Returns when each parameter's gradient is ready, in ms after backward was called.

    Mean over the micro-steps of the level's READY steps, shape [parameter]; NaN for a
    parameter that got no gradient.
    """
    chosen = (columns["level"] == level) & (columns["variant"] == int(Variant.READY))
    spans = {name: values[chosen].astype(np.int64) for name, values in columns.items()}
    key = _call_key(step_keys(spans["repetition"], spans["step"]), spans["micro_step"])
    is_call = spans["kind"] == SpanKind.BACKWARD
    is_ready = (spans["kind"] == SpanKind.GRADIENT_READY) & (spans["index"] < parameters)
    begin = spans["begin_ns"][is_call]
    call = _Lookup(key[is_call]).find(key[is_ready])
    index = spans["index"][is_ready][call >= 0]
    after = spans["begin_ns"][is_ready][call >= 0] - begin[call[call >= 0]]
    total = _per_step(after, index, parameters)
    count = np.bincount(index, minlength=parameters)
    with np.errstate(invalid="ignore"):
        return total / count / _NS_PER_MS


@dataclass(frozen=True)
class _Gradients:
    """Gradient collectives sorted by begin, shape [collective]; row is the step's."""

    row: Ints
    begin: Ints
    end: Ints
    local_end: Ints
    nbytes: Ints
    micro_step: Ints
    noticed: npt.NDArray[np.bool_]

    @property
    def unnoticed(self) -> int:
        """How many of them were never noticed to complete."""
        return int((~self.noticed).sum())


@dataclass(frozen=True)
class _ModuleComm:
    """Collectives of modules, shape [collective]: the step's row and the own share of the time."""

    row: Ints
    call: Ints
    length: Ints


def _backwards(spans: Columns, row: Ints) -> tuple[Backwards, _Gradients, _ModuleComm]:
    """Finds the synchronising backward calls and assigns gradient collectives to them.

    A call is synchronising if gradient collectives were handed over in it. A collective
    belongs to the micro-step in which it was handed over; completions are noticed late,
    so ends are clamped to the end of the call. Also returns the collectives that modules
    issued in any backward.
    """
    kind = spans["kind"]
    call_key = _call_key(step_keys(spans["repetition"], spans["step"]), spans["micro_step"])
    known = row >= 0
    is_gradient = (kind == SpanKind.GRADIENT) & known
    is_call = (kind == SpanKind.BACKWARD) & known & np.isin(call_key, call_key[is_gradient])
    order = np.argsort(spans["begin_ns"][is_call], kind="stable")
    key = call_key[is_call][order]
    begin, end = spans["begin_ns"][is_call][order], spans["end_ns"][is_call][order]
    position = _Lookup(key)

    is_point = (kind == SpanKind.LOCAL_BACKWARD_END) & known
    local_end = _local_end(
        begin,
        end,
        (position.find(call_key[is_point]), spans["begin_ns"][is_point]),
        (position.find(call_key[is_gradient]), spans["begin_ns"][is_gradient]),
    )

    call = position.find(call_key[is_gradient])
    inside = call >= 0
    call = call[inside]
    g_begin = spans["begin_ns"][is_gradient][inside]
    g_end = spans["end_ns"][is_gradient][inside]
    unnoticed = g_end == NULL
    g_begin = np.minimum(g_begin, end[call])
    g_end = np.clip(np.where(unnoticed, end[call], g_end), g_begin, end[call])
    last = local_end.copy()
    np.maximum.at(last, call, g_end)

    by_begin = np.argsort(g_begin, kind="stable")
    gradients = _Gradients(
        row=row[is_gradient][inside][by_begin],
        begin=g_begin[by_begin],
        end=g_end[by_begin],
        local_end=local_end[call][by_begin],
        nbytes=spans["bytes"][is_gradient][inside][by_begin],
        micro_step=spans["micro_step"][is_gradient][inside][by_begin],
        noticed=~unnoticed[by_begin],
    )
    comm = _module_comm(
        spans, row, SpanKind.BACKWARD_COMM, position.find(call_key), np.append(local_end, 0)
    )
    synced = comm.call >= 0
    calls = Backwards(
        step_index=row[is_call][order],
        key=key,
        begin=begin,
        local_end=local_end,
        last_collective=last,
        end=end,
        module_comm=_per_step(comm.length[synced], comm.call[synced], len(key)).astype(np.int64),
    )
    return calls, gradients, comm


def _module_comm(
    spans: Columns, row: Ints, kind: SpanKind, call: Ints | None = None, limits: Ints | None = None
) -> _ModuleComm:
    """Finds the collectives of modules and each one's own share of the union of their times.

    Args:
        spans: The rank's spans.
        row: Row of each span's step, -1 for none.
        kind: In forward or in backward.
        call: Synchronising backward call of each span, -1 for none.
        limits: Where each call's local backward ends: what lies behind is in the exposed
            window, and counted there.
    """
    chosen = np.flatnonzero((spans["kind"] == kind) & (row >= 0) & (spans["end_ns"] != NULL))
    chosen = chosen[np.argsort(spans["begin_ns"][chosen], kind="stable")]
    begin, end = spans["begin_ns"][chosen], spans["end_ns"][chosen]
    calls = np.full(len(chosen), -1) if call is None else call[chosen]
    if limits is not None:
        end = np.where(calls >= 0, np.minimum(end, limits[calls]), end)
    share = np.maximum(end - _own_start(begin, end), 0)
    return _ModuleComm(row=row[chosen], call=calls, length=share)


def _meetings(spans: Columns, row: Ints) -> Meetings:
    """Finds the collectives issued inside forward and backward, in order of time."""
    kind = spans["kind"]
    inside = (kind == SpanKind.FORWARD_COMM) | (kind == SpanKind.BACKWARD_COMM)
    chosen = np.flatnonzero(inside & (row >= 0))
    chosen = chosen[np.argsort(spans["begin_ns"][chosen], kind="stable")]
    call = _call_key(step_keys(spans["repetition"], spans["step"]), spans["micro_step"])[chosen]
    # Ranks issue the same ones in the same order: the ordinal within the micro-step pairs them.
    # One rank's micro-steps do not overlap, so its collectives stand together.
    _, first, inverse = np.unique(call, return_index=True, return_inverse=True)
    in_forward = kind[chosen] == SpanKind.FORWARD_COMM
    begin, end = spans["begin_ns"][chosen], spans["end_ns"][chosen]
    return Meetings(
        step_index=row[chosen],
        key=call,
        ordinal=(np.arange(len(call)) - first[inverse]).astype(np.int64),
        in_forward=in_forward,
        begin=begin,
        end=end,
    )


def _own(spans: Columns, backwards: Backwards) -> dict[str, OwnTime]:
    """Returns the parts of a rank's own work as they pass."""

    def of(*kinds: SpanKind) -> Passed:
        chosen = np.isin(spans["kind"], [int(kind) for kind in kinds])
        return passed(spans["begin_ns"][chosen], spans["end_ns"][chosen])

    exposed = passed(backwards.local_end, backwards.end)
    return {
        "data": OwnTime(of(SpanKind.DATA)),
        "forward": OwnTime(of(SpanKind.FORWARD), (of(SpanKind.FORWARD_COMM),)),
        "backward": OwnTime(of(SpanKind.BACKWARD), (of(SpanKind.BACKWARD_COMM), exposed)),
        "optimizer": OwnTime(of(SpanKind.OPTIMIZER)),
    }


def _local_end(
    begin: Ints, end: Ints, points: tuple[Ints, Ints], hand_overs: tuple[Ints, Ints]
) -> Ints:
    """Finds the end of local backward of each call, shape [call].

    Reentrant checkpoints end passes inside the pass, so there can be several marks: the
    first one after the last hand-over counts, else the last one. Where there is none the
    window is empty.

    Args:
        begin: Begin of each call.
        end: End of each call.
        points: Call (-1 for none) and time of each mark.
        hand_overs: Call (-1 for none) and time of each hand-over of a gradient collective.
    """
    call, time = (values[points[0] >= 0] for values in points)
    given, handed = (values[hand_overs[0] >= 0] for values in hand_overs)
    last_hand_over = begin.copy()
    np.maximum.at(last_hand_over, given, handed)
    never, unseen = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    first_after, last = np.full(len(begin), never), np.full(len(begin), unseen)
    after = time >= last_hand_over[call]
    np.minimum.at(first_after, call[after], time[after])
    np.maximum.at(last, call, time)
    found = np.where(first_after < never, first_after, np.where(last > unseen, last, end))
    return np.clip(found, begin, end)


def _busy(gradients: _Gradients) -> tuple[Ints, Ints]:
    """Returns each collective's own share of the union of intervals, whole and overlapped.

    Calls of one rank do not overlap in time, so one sweep over all intervals sorted by
    begin is exact: an interval adds what lies beyond the latest end before it.
    """
    start = _own_start(gradients.begin, gradients.end)
    busy = np.maximum(gradients.end - start, 0)
    overlapped = np.clip(np.minimum(gradients.end, gradients.local_end) - start, 0, None)
    return busy, np.minimum(overlapped, busy)


def _own_start(begin: Ints, end: Ints) -> Ints:
    """Returns where each interval, sorted by begin, goes beyond all before it."""
    if len(begin) == 0:
        return begin
    reached = np.maximum.accumulate(end)
    start: Ints = np.maximum(begin, np.append(np.iinfo(np.int64).min, reached[:-1]))
    return start


def _per_step(values: Ints, row: Ints, count: int) -> Floats:
    sums: Floats = np.bincount(row, weights=values, minlength=count).astype(np.float64)
    return sums


def step_keys(repetition: Ints, step: Ints) -> Ints:
    """Returns the keys of steps: (repetition, step) packed, shape as given."""
    return (repetition << 32) | step


def step_numbers(keys: Ints) -> Ints:
    """Returns the number of each step in its repetition, as it was recorded; shape as given."""
    return keys & 0xFFFFFFFF


def _call_key(step_key: Ints, micro_step: Ints) -> Ints:
    return (step_key << 14) | (micro_step + 1)


class _Lookup:
    """Finds the row of a key among unique keys."""

    def __init__(self, keys: Ints) -> None:
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]

    def find(self, keys: Ints) -> Ints:
        """Returns the row of each key, -1 where there is none."""
        if len(self._sorted) == 0:
            return np.full(len(keys), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        return np.where(self._sorted[at] == keys, self._order[at], -1).astype(np.int64)
