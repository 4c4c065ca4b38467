"""Writes run folders of many ranks, with planted stragglers, without any training.

    python benchmarks/synthetic_runs.py /tmp/synthetic --ranks 1024 --steps 1000

A folder is what the recorder would have left: the real writer, one batch a block, blocks of plain
and instrumented steps in turns. Its times follow from a simple simulation of data parallelism:
each rank works by itself until its local backward ends, bucket b is reduced when all ranks have
handed it over and the bucket before it is done, and all ranks leave the last reduction together.
So what was planted is known, and so is what follows from it (who waits, for how long): it is kept
beside the record in ``truth.json``. The same seed gives the same folder, byte for byte.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchkit import at_least

from ddp_profiler._version import __version__
from ddp_profiler.record.writer import NULL, SpanWriter, write_run_info
from ddp_profiler.schema import (
    SCHEMA_VERSION,
    SPAN_COLUMNS,
    ClockReading,
    DdpFacts,
    LevelFacts,
    LevelSettings,
    ParameterFacts,
    RankPlace,
    RunInfo,
    SpanKind,
    Variant,
)

TRUTH_FILE = "truth.json"
RANKS_PER_NODE = 8
BLOCK_STEPS = 5
"""Steps of a block, as the recorder has them."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MS = 1_000_000
_START_NS = 10_000 * 1_000_000_000
"""The clock does not begin at 0: arithmetic that loses ns of large times shows."""
_BUCKET_BYTES = 4 * 2**20
_MICRO_BATCH = 8


@dataclass(frozen=True)
class Late:
    """A planted delay of one rank, or of all ranks of a node.

    Attributes:
        part: Where: ``data``, ``forward``, ``backward`` or ``other``.
        delay_ms: By how much.
        rank: The late rank; None where ``node`` is.
        node: The slow node.
        share: Share of the steps in which it is late; those are spread by the seed.
    """

    part: str
    delay_ms: float
    rank: int | None = None
    node: int | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Plan:
    """What to write.

    Attributes:
        ranks: Ranks of the only level.
        steps: Steps of each variant, plain and instrumented.
        buckets: Buckets of a step.
        late: The planted delays.
        data_ms: Waiting for data on every rank.
        forward_ms: Forward.
        backward_ms: Local backward.
        transfer_ms: Reducing the last bucket, once all have come; the exposed transfer.
        copy_ms: From the last completion until backward returns.
        optimizer_ms: The optimizer.
        other_ms: What no part covers, at the end of a step.
        jitter_ms: Standard deviation of each rank's local work from step to step.
        script: As the record of an unmodified script, else of a study.
        clocks: Nodes have clocks of their own, far apart, compared to within 20 us.
        seed: Of all that is random.
    """

    ranks: int
    steps: int
    buckets: int = 25
    late: tuple[Late, ...] = ()
    data_ms: float = 1.0
    forward_ms: float = 30.0
    backward_ms: float = 60.0
    transfer_ms: float = 5.0
    copy_ms: float = 0.5
    optimizer_ms: float = 3.0
    other_ms: float = 0.2
    jitter_ms: float = 0.2
    script: bool = False
    clocks: bool = False
    seed: int = 0

    @property
    def nodes(self) -> int:
        """Nodes of :data:`RANKS_PER_NODE` ranks."""
        return -(-self.ranks // RANKS_PER_NODE)


def planted(ranks: int, steps: int, passing_share: float = 0.1, **more: Any) -> Plan:
    """Returns a plan with one rank late in each backward and one now and then in data.

    The second one is later, so it is the last one of the steps in which it is late. In few steps
    a small ``passing_share`` is too few of them for anybody to be named.
    """
    late = (
        Late("backward", 8.0, rank=ranks // 3),
        Late("data", 40.0, rank=2 * ranks // 3, share=passing_share),
    )
    return Plan(ranks, steps, late=late, **more)


def slow_node(ranks: int, steps: int, **more: Any) -> Plan:
    """Returns a plan with all ranks of one node late in forward; of two nodes or more."""
    late = (Late("forward", 12.0, node=ranks // RANKS_PER_NODE // 2),)
    return Plan(ranks, steps, late=late, **more)


@dataclass(frozen=True)
class _Block:
    """Neighbouring steps of one variant; ``first`` is the number of the first in all steps."""

    number: int
    variant: Variant
    first: int
    steps: int


def _blocks(plan: Plan) -> list[_Block]:
    """Returns the blocks as the recorder makes them: plain first, then plain last, in turns."""
    sizes: list[tuple[Variant, int]] = [(Variant.WARMUP, BLOCK_STEPS)]
    left, turn = plan.steps, 0
    while left:
        size = min(left, BLOCK_STEPS)
        pair = [(Variant.PLAIN, size), (Variant.INSTRUMENTED, size)]
        sizes += pair if turn % 2 == 0 else pair[::-1]
        left, turn = left - size, turn + 1
    found, first = [], 0
    for number, (variant, size) in enumerate(sizes):
        found.append(_Block(number, variant, first, size))
        first += size
    return found


@dataclass(frozen=True)
class _Times:
    """When things happened on the common clock, in ns from the begin; [rank, step] or [step].

    Attributes:
        begin: Begin of each step, [rank, step].
        data: Length of waiting for data.
        forward: Length of forward.
        backward: Length of local backward.
        meet: When the last rank's local backward ended, [step].
        done: When each bucket was reduced, [step, bucket].
        copy: From the last completion until backward returns, [rank, step].
        optimizer: Length of the optimizer.
        other: What follows it.
    """

    begin: Ints
    data: Ints
    forward: Ints
    backward: Ints
    meet: Ints
    done: Ints
    copy: Ints
    optimizer: Ints
    other: Ints

    @property
    def local_end(self) -> Ints:
        """When each rank's local backward ended, [rank, step]."""
        return self.begin + self.data + self.forward + self.backward


def _simulate(plan: Plan, count: int) -> tuple[_Times, dict[int, Ints]]:
    """Returns all times, and the steps in which each planted delay was there, by its place."""
    random = np.random.default_rng(plan.seed)
    shape = (plan.ranks, count)

    def lengths(mean_ms: float, jitter_ms: float) -> Ints:
        noise = random.normal(0.0, 1.0, size=shape)
        return np.round(np.maximum(mean_ms + jitter_ms * noise, 0.05 * mean_ms) * _MS).astype(
            np.int64
        )

    parts = {
        "data": lengths(plan.data_ms, 0.02),
        "forward": lengths(plan.forward_ms, plan.jitter_ms),
        "backward": lengths(plan.backward_ms, plan.jitter_ms),
        "optimizer": lengths(plan.optimizer_ms, 0.02),
        "other": lengths(plan.other_ms, 0.01),
        "copy": lengths(plan.copy_ms, 0.01),
    }
    when: dict[int, Ints] = {}
    for place, late in enumerate(plan.late):
        steps = np.flatnonzero(random.random(count) < late.share)
        when[place] = steps
        if late.node is not None:
            first = late.node * RANKS_PER_NODE
            rows = np.arange(first, min(first + RANKS_PER_NODE, plan.ranks))
        else:
            rows = np.array([late.rank])
        parts[late.part][np.ix_(rows, steps)] += round(late.delay_ms * _MS)

    begin = np.zeros(shape, dtype=np.int64)
    meet = np.zeros(count, dtype=np.int64)
    done = np.zeros((count, plan.buckets), dtype=np.int64)
    transfer = round(plan.transfer_ms * _MS)
    # The others are reduced faster than they come: only the last one is exposed.
    each = min(transfer, round(0.8 * plan.backward_ms / plan.buckets * _MS))
    now = np.full(plan.ranks, _START_NS, dtype=np.int64)
    share = (np.arange(plan.buckets) + 1) / plan.buckets
    for step in range(count):
        begin[:, step] = now
        start = now + parts["data"][:, step] + parts["forward"][:, step]
        length = parts["backward"][:, step]
        meet[step] = (start + length).max()
        done_before = np.iinfo(np.int64).min
        for bucket in range(plan.buckets):
            last = bucket == plan.buckets - 1
            given = (start + (length * share[bucket]).astype(np.int64)).max()
            done_before = max(int(given), done_before) + (transfer if last else each)
            done[step, bucket] = done_before
        now = done_before + parts["copy"][:, step] + parts["optimizer"][:, step]
        now = now + parts["other"][:, step]
    return _Times(begin=begin, meet=meet, done=done, **parts), when


_MARKED = (
    (SpanKind.DATA, 0),
    (SpanKind.FORWARD, 0),
    (SpanKind.LOCAL_BACKWARD_END, 0),
    (SpanKind.BACKWARD, 0),
    (SpanKind.OPTIMIZER, -1),
    (SpanKind.STEP, -1),
)
"""Spans of a step with all marks, and their micro-step; gradient collectives come on top."""


@dataclass(frozen=True)
class _Layout:
    """Where spans stand in a rank's record, and all of it that is the same on every rank.

    Attributes:
        columns: All columns; times are filled in for each rank.
        ends: Where each block ends, in rows.
        plain: Rows of the ``STEP`` spans of plain steps, and those steps.
        marked: Rows of the spans of marked steps, [step, span], and those steps.
        gradients: Rows of the gradient collectives of marked steps, [step, bucket].
    """

    columns: dict[str, Ints]
    ends: list[int]
    plain: tuple[Ints, Ints]
    marked: tuple[Ints, Ints]
    gradients: Ints


def _layout(plan: Plan) -> _Layout:
    """Lays out the spans in the order in which the recorder writes them, collectives last."""
    blocks = _blocks(plan)
    plain: list[tuple[int, int]] = []
    marked: list[tuple[int, int, int]] = []
    ends, at = [], 0
    for block in blocks:
        if block.variant is Variant.PLAIN:
            plain += [(at + i, block.first + i) for i in range(block.steps)]
            at += block.steps
        else:
            own = len(_MARKED)
            marked += [
                (at + i * own, at + block.steps * own + i * plan.buckets, block.first + i)
                for i in range(block.steps)
            ]
            at += block.steps * (own + plan.buckets)
        ends.append(at)
    plain_rows, plain_steps = np.array(plain, dtype=np.int64).T
    first, first_gradient, steps = np.array(marked, dtype=np.int64).T
    rows = first[:, None] + np.arange(len(_MARKED))
    gradients = first_gradient[:, None] + np.arange(plan.buckets)

    columns = {name: np.full(at, NULL, dtype=np.int64) for name, _ in SPAN_COLUMNS}
    lengths = np.diff([0, *ends])
    columns["block"] = np.repeat([block.number for block in blocks], lengths)
    columns["variant"] = np.repeat([int(block.variant) for block in blocks], lengths)
    for name, value in (("level", 0), ("repetition", 0), ("micro_step", 0), ("index", -1)):
        columns[name][:] = value
    step_spans = np.concatenate((plain_rows, rows[:, -1]))
    columns["step"][plain_rows] = plain_steps
    columns["step"][rows] = steps[:, None]
    columns["step"][gradients] = steps[:, None]
    columns["kind"][gradients] = int(SpanKind.GRADIENT)
    columns["index"][gradients] = np.arange(plan.buckets)
    columns["bytes"][gradients] = _BUCKET_BYTES
    for place, (kind, micro_step) in enumerate(_MARKED):
        columns["kind"][rows[:, place]] = int(kind)
        columns["micro_step"][rows[:, place]] = micro_step
        if kind is SpanKind.FORWARD:
            columns["samples"][rows[:, place]] = _MICRO_BATCH
    columns["kind"][step_spans] = int(SpanKind.STEP)
    columns["micro_step"][step_spans] = -1
    if plan.script:
        columns["index"][step_spans] = 1
        columns["samples"][step_spans] = _MICRO_BATCH
        columns["value"][gradients] = 0
    return _Layout(columns, ends, (plain_rows, plain_steps), (rows, steps), gradients)


def _fill(plan: Plan, layout: _Layout, rank: int, times: _Times, offset: int) -> None:
    """Fills in one rank's times, on a clock that is ahead by ``offset``."""
    begin = times.begin[rank] + offset
    end_data = begin + times.data[rank]
    end_forward = end_data + times.forward[rank]
    local_end = end_forward + times.backward[rank]
    end_backward = times.done[:, -1] + offset + times.copy[rank]
    end_optimizer = end_backward + times.optimizer[rank]
    end = end_optimizer + times.other[rank]
    begins, ends = layout.columns["begin_ns"], layout.columns["end_ns"]
    rows, steps = layout.plain
    begins[rows], ends[rows] = begin[steps], end[steps]
    rows, steps = layout.marked
    pairs = (
        (begin, end_data),
        (end_data, end_forward),
        (local_end, local_end),
        (end_forward, end_backward),
        (end_backward, end_optimizer),
        (begin, end),
    )
    for place, (first, last) in enumerate(pairs):
        begins[rows[:, place]], ends[rows[:, place]] = first[steps], last[steps]
    share = (np.arange(plan.buckets) + 1) / plan.buckets
    length = times.backward[rank, steps][:, None]
    begins[layout.gradients] = end_forward[steps][:, None] + (length * share).astype(np.int64)
    ends[layout.gradients] = times.done[steps] + offset


def _clock_offsets(plan: Plan) -> Ints:
    """Returns each node's clock less the first one's, in ns."""
    random = np.random.default_rng((plan.seed, 1))
    offsets = random.integers(-3600, 3600, size=plan.nodes) * 1_000_000_000
    offsets[0] = 0
    return offsets if plan.clocks else np.zeros_like(offsets)


def describe(plan: Plan, times: _Times) -> RunInfo:
    """Returns the ``run.json`` of a plan."""
    name = "script" if plan.script else f"dp{plan.ranks}"
    level = LevelSettings(name, plan.ranks, _MICRO_BATCH, 1, "packed", tuple(range(plan.ranks)))
    nbytes = plan.buckets * _BUCKET_BYTES
    facts = LevelFacts(
        id=level.id,
        parameters=nbytes // 4,
        gradient_bytes=nbytes,
        num_buckets=plan.buckets,
        bucket_bytes=(_BUCKET_BYTES,) * plan.buckets,
        sources={
            "local_backward_end": "autograd_callback",
            "gradient_collectives": "process_group",
        },
        reduced=tuple(ParameterFacts(f"{i}.weight", _BUCKET_BYTES) for i in range(plan.buckets)),
        built_by="__main__" if plan.script else "",
        ddps=(DdpFacts(False, False, True, 0, False, plan.ranks, "__main__", 0),)
        if plan.script
        else (),
    )
    places = tuple(
        RankPlace(
            rank=rank,
            local_rank=rank % RANKS_PER_NODE,
            node=rank // RANKS_PER_NODE,
            hostname=f"node{rank // RANKS_PER_NODE}",
            clock_domain=f"clock{rank // RANKS_PER_NODE if plan.clocks else 0}",
            device="cpu",
            pid=1000 + rank,
        )
        for rank in range(plan.ranks)
    )
    settings: dict[str, Any] = {"steps": plan.steps, "warmup": BLOCK_STEPS, "model": "synthetic"}
    if plan.script:
        settings["script"] = "synthetic.py"
    return RunInfo(
        schema_version=SCHEMA_VERSION,
        run_id=f"synthetic-{plan.ranks}x{plan.steps}x{plan.buckets}-{plan.seed}",
        status="complete",
        created="2026-01-01T00:00:00+00:00",
        profiler_version=__version__,
        world_size=plan.ranks,
        settings=settings,
        levels=(level,),
        ranks=places,
        facts=(facts,),
        clocks=_readings(plan, times) if plan.clocks else (),
    )


def _readings(plan: Plan, times: _Times) -> tuple[ClockReading, ...]:
    offsets, error = _clock_offsets(plan), 20_000
    moments = (int(times.begin.min()) - _MS, int(times.done.max()) + 10 * _MS)
    return tuple(
        ClockReading(
            rank=node * RANKS_PER_NODE,
            at_ns=int(moment + offsets[node]),
            low_ns=int(offsets[node] - error),
            high_ns=int(offsets[node] + error),
            real_offset_ns=0,
        )
        for node in range(1, plan.nodes)
        for moment in moments
    )


def _truth(plan: Plan, times: _Times, when: Mapping[int, Ints]) -> dict[str, Any]:
    """Returns what was planted and what follows, over the instrumented steps."""
    blocks = [block for block in _blocks(plan) if block.variant is Variant.INSTRUMENTED]
    steps = np.concatenate([np.arange(b.first, b.first + b.steps) for b in blocks])
    local_end = times.local_end[:, steps]
    wait_ms = (times.meet[steps] - local_end) / _MS
    transfer_ms = (times.done[steps, -1] - times.meet[steps]) / _MS
    return {
        "plan": asdict(plan),
        "late": [
            {**asdict(late), "steps": int(np.isin(steps, when[place]).sum())}
            for place, late in enumerate(plan.late)
        ],
        "exposed_wait_ms": float(wait_ms.mean()),
        "exposed_transfer_ms": float(transfer_ms.mean()),
        "data_ms": float(times.data[:, steps].mean() / _MS),
        "forward_ms": float(times.forward[:, steps].mean() / _MS),
        "backward_ms": float(times.backward[:, steps].mean() / _MS),
        "optimizer_ms": float(times.optimizer[:, steps].mean() / _MS),
        "exposed_copy_ms": float(times.copy[:, steps].mean() / _MS),
    }


def write_run(folder: Path, plan: Plan) -> dict[str, Any]:
    """Writes a run folder; returns its truth, which is also kept in it.

    Args:
        folder: Where; it must not exist.
        plan: What to write.
    """
    folder.mkdir(parents=True)
    blocks = _blocks(plan)
    times, when = _simulate(plan, blocks[-1].first + blocks[-1].steps)
    info = describe(plan, times)
    write_run_info(folder, info)
    offsets, layout = _clock_offsets(plan), _layout(plan)
    for rank in range(plan.ranks):
        _fill(plan, layout, rank, times, int(offsets[rank // RANKS_PER_NODE]))
        writer = SpanWriter(folder, rank, info.run_id)
        for begin, end in itertools.pairwise([0, *layout.ends]):
            writer.write_columns({n: values[begin:end] for n, values in layout.columns.items()})
        writer.close()
    truth = _truth(plan, times, when)
    (folder / TRUTH_FILE).write_text(json.dumps(truth, indent=2) + "\n")
    return truth


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder to make")
    parser.add_argument("--ranks", type=at_least(2), default=1024)
    parser.add_argument("--steps", type=at_least(5), default=1000, help="of each variant")
    parser.add_argument("--buckets", type=at_least(1), default=25)
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--script", action="store_true", help="as the record of a script")
    parser.add_argument("--clocks", action="store_true", help="a clock of its own on each node")
    parser.add_argument("--slow-node", action="store_true", help="plant a slow node instead")
    parser.add_argument("--replace", action="store_true", help="remove the folder first")
    options = parser.parse_args()
    if options.replace:
        shutil.rmtree(options.folder, ignore_errors=True)
    elif options.folder.exists():
        parser.error(f"{options.folder} is there already; --replace removes it first")
    plan = (slow_node if options.slow_node else planted)(options.ranks, options.steps)
    plan = replace(
        plan,
        buckets=options.buckets,
        seed=options.seed,
        script=options.script,
        clocks=options.clocks,
    )
    write_run(options.folder, plan)
    size = sum(path.stat().st_size for path in options.folder.glob("rank-*.arrows"))
    print(f"{options.folder}: {size / 1e6:.0f} MB, truth in {options.folder / TRUTH_FILE}")


if __name__ == "__main__":
    main()
