"""Predicts the step of a study under settings and at scales that were not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ddp_profiler.analysis.lateness import Lateness
from ddp_profiler.analysis.model import StepCosts
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.results import LevelResult, Summary
from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.predict import network
from ddp_profiler.predict.buckets import Bucket, pack
from ddp_profiler.predict.network import Curve, NetworkModel, Sample
from ddp_profiler.predict.schedule import Replay, replay
from ddp_profiler.predict.waiting import expected_wait_ms, significant

Floats = npt.NDArray[np.float64]

GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a gradient's element while it travels, by data type."""
_MB = 2**20
_AT_ONCE = {"gloo": 2, "nccl": 1}
_FARTHEST = 64
"""Times the largest dp measured; beyond it nothing is said."""
_DRAWS = 300
_SEED = 20240501
_LEAST_MODEL_ERROR = 0.012
"""Relative standard error of a replay where everything it needs was measured; docs/accuracy.md."""
_LEAST_COMPUTE_ERROR = 0.003
_CONTENTION_ERROR = 0.3
_WAIT_ERROR = 0.2
_TCP_EFFICIENCY = 0.956
"""Share of a link's rate that TCP frames leave to data."""
_ROUNDS = 4
_INTERVAL = (5, 95)
_LINK_BOUND = 0.8
"""An AllReduce that reaches this share of the link's rate is bounded by it."""


@dataclass(frozen=True)
class Request:
    """A setting to predict. What is None stays as it was measured.

    Attributes:
        dp: Number of replicas.
        accumulation: Micro-steps in a step.
        bucket_cap_mb: Size limit of DDP's buckets in MB of 2**20 bytes.
        bandwidth_gbps: Rate of the links that bound the AllReduce, in Gbit/s: those between
            nodes, or within the node where there is one.
        gradient_dtype: Data type in which gradients travel: fp32, bf16 or fp16.
        ranks_per_node: Ranks on a node.
        reduce_once: Whether gradients are reduced in the last micro-step only.
        bucket_view: Whether gradients live in the buckets (gradient_as_bucket_view), so that
            none are copied.
    """

    dp: int
    accumulation: int | None = None
    bucket_cap_mb: float | None = None
    bandwidth_gbps: float | None = None
    gradient_dtype: str | None = None
    ranks_per_node: int | None = None
    reduce_once: bool = False
    bucket_view: bool = False

    def __post_init__(self) -> None:
        for option, value in (
            ("--dp", self.dp),
            ("--accumulate", self.accumulation),
            ("--ranks-per-node", self.ranks_per_node),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{option} {value} is below 1.", f"Give {option} 1 or more.")
        for option, size in (
            ("--bucket-cap-mb", self.bucket_cap_mb),
            ("--bandwidth-gbps", self.bandwidth_gbps),
        ):
            if size is not None and not 0 < size < math.inf:
                raise UsageError(f"{option} {size:g} is no number above 0.", "Correct it.")
        if self.gradient_dtype is not None and self.gradient_dtype not in GRADIENT_BYTES:
            raise UsageError(
                f"--gradient-dtype {self.gradient_dtype} is unknown.",
                f"Choose one of: {', '.join(GRADIENT_BYTES)}.",
            )


@dataclass(frozen=True)
class StepInterval:
    """A predicted step time in ms: the middle of what is likely, and 90 % of it."""

    median: float
    interval90: tuple[float, float]


@dataclass(frozen=True)
class Naive:
    """What is told without replaying: all communication after backward, or all behind it."""

    no_overlap_ms: float
    perfect_overlap_ms: float


@dataclass(frozen=True)
class Prediction:
    """A step that was not measured.

    Attributes:
        dp: Number of replicas.
        nodes: Nodes that they are on.
        micro_batch: Samples of a micro-step.
        accumulation: Micro-steps of a step.
        global_batch: Samples of a step over all ranks.
        bucket_cap_mb: Size limit of buckets, in MB of 2**20 bytes; None if not known.
        bucket_bytes: The buckets, in the order of reduction.
        step_ms: The step.
        samples_per_s: Throughput of all ranks at the median.
        efficiency: Throughput over dp times that of dp = 1; None without a dp = 1 level.
        breakdown_ms: The parts of a measured step, summing to the mean step.
        overlap_fraction: Share of the time in which gradients travel that is hidden.
        allreduce_ms: All buckets reduced one after the other, nothing beside them.
        naive_ms: The two answers that need no replay.
        extrapolated: Whether it goes beyond what was measured.
        notes: Why, and what is assumed.
    """

    dp: int
    nodes: int
    micro_batch: int
    accumulation: int
    global_batch: int
    bucket_cap_mb: float | None
    bucket_bytes: tuple[int, ...]
    step_ms: StepInterval
    samples_per_s: float
    efficiency: float | None
    breakdown_ms: Mapping[str, float]
    overlap_fraction: float | None
    allreduce_ms: float
    naive_ms: Naive
    extrapolated: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class BackTest:
    """A measured level, predicted from the others.

    Attributes:
        held_out: Its id.
        predicted_ms: Its step.
        interval90: The prediction's.
        measured_ms: Its mean plain step.
        error_pct: Predicted over measured, less 1, in per cent.
    """

    held_out: str
    predicted_ms: float
    interval90: tuple[float, float]
    measured_ms: float
    error_pct: float


@dataclass(frozen=True)
class BackTests:
    """Every level that can be predicted from others; ``why_not`` says why there is none."""

    tests: tuple[BackTest, ...]
    why_not: str | None


@dataclass(frozen=True)
class Draws:
    """One step drawn many times, shape [draw] each: for differences between two settings."""

    step_ms: Floats
    prediction: Prediction


@dataclass(frozen=True)
class _Target:
    """What is predicted, complete."""

    dp: int
    nodes: int
    per_node: int
    accumulation: int
    ranks: tuple[int, ...]
    request: Request


@dataclass(frozen=True)
class _Parts:
    """A replayed step in ms, mean over ranks."""

    values: Mapping[str, float]
    syncs: float
    replay: Replay
    allreduce_ms: float

    @property
    def step_ms(self) -> float:
        return sum(self.values.values())


@dataclass(frozen=True)
class _Scatter:
    """One draw of everything that is not known exactly; factors."""

    compute: float = 1.0
    network: float = 0.0
    contention: float = 1.0
    wait: float = 1.0
    model: float = 1.0
    rival: int = 0


@dataclass(frozen=True)
class Predictor:
    """Predicts steps from the measured levels of a study.

    Attributes:
        summary: The study.
        levels: The levels to predict from; all of the study's with costs at first.
        cap_mb: The bucket cap in force when they were measured.
        model_error: Relative standard error of the replay itself.
    """

    summary: Summary
    levels: tuple[LevelResult, ...]
    cap_mb: float | None
    model_error: float = _LEAST_MODEL_ERROR
    _networks: dict[bool, NetworkModel | None] = field(default_factory=dict)

    @classmethod
    def of(cls, summary: Summary) -> Predictor:
        """Makes a predictor of a study.

        Raises:
            InputError: The run carries no prediction.
        """
        if "script" in summary.run.settings:
            raise InputError(
                "This is the run of a script. A prediction needs what only a study measures: "
                "AllReduce in isolation, and steps without reduction.",
                "Measure its model: torchrun -m ddp_profiler.run --model package.module:factory.",
            )
        usable = tuple(lv for lv in summary.levels if lv.costs_ms and lv.micro_batch and lv.step_ms)
        together = [lv for lv in usable if _communicates(lv)]
        if not together:
            raise InputError(
                "The run has no level of 2 or more ranks with steps and AllReduces: it shows "
                "nothing of the network.",
                "Measure dp 1 and 2 at least: torchrun --nproc_per_node=2 -m ddp_profiler.run.",
            )
        largest = max(together, key=lambda lv: (lv.dp, lv.placement == "packed"))
        same = tuple(lv for lv in usable if lv.micro_batch == largest.micro_batch)
        cap = summary.run.settings.get("bucket_cap_mb")
        found = cls(summary, same, float(cap) if isinstance(cap, (int, float)) else None)
        tests = found.back_test().tests
        if len(tests) < 2:
            return found
        missed = math.sqrt(sum((test.error_pct / 100) ** 2 for test in tests) / len(tests))
        return replace(found, model_error=max(_LEAST_MODEL_ERROR, missed))

    # ------------------------------------------------------------------------------------------
    # What is measured

    @property
    def backend(self) -> str:
        """``gloo`` or ``nccl``."""
        return str(next(iter(self.summary.run.environment.values()), {}).get("backend", "gloo"))

    @property
    def ranks_per_node(self) -> int:
        """Ranks on a node in the launch, the most."""
        found = [e.get("local_world_size") for e in self.summary.run.environment.values()]
        return max([n for n in found if isinstance(n, int)], default=self.summary.run.world_size)

    @property
    def largest(self) -> LevelResult:
        """The level with the most ranks, packed where there are two; the one to start from."""
        return max(
            (lv for lv in self.levels if _communicates(lv)),
            key=lambda lv: (lv.dp, lv.placement == "packed", -lv.accumulation),
        )

    def network(self, between_nodes: bool) -> NetworkModel | None:
        """Returns the model of AllReduce within a node or between nodes; None if unmeasured."""
        if between_nodes not in self._networks:
            samples, typical = [], []
            for level in self.levels:
                if level.allreduce is None or (level.nodes > 1) != between_nodes:
                    continue
                sizes = {size.bytes: size.time_ms for size in level.allreduce.sizes}
                buckets: dict[int, list[float]] = {}
                for bucket in level.allreduce.buckets:
                    buckets.setdefault(bucket.bytes, []).append(bucket.time_ms)
                sizes |= {nbytes: float(np.median(times)) for nbytes, times in buckets.items()}
                typical += list(buckets)
                samples += [Sample(level.dp, nbytes, time) for nbytes, time in sizes.items()]
            self._networks[between_nodes] = network.fit(
                samples, self.backend, between_nodes, typical
            )
        return self._networks[between_nodes]

    # ------------------------------------------------------------------------------------------
    # Predictions

    def predict(self, request: Request) -> Prediction:
        """Predicts a setting.

        Raises:
            UsageError: The data does not carry it at all.
        """
        return self.draw(request).prediction

    def draw(self, request: Request) -> Draws:
        """Predicts a setting, and draws its step many times; draws of two settings are pairs.

        Raises:
            UsageError: The data does not carry it at all.
        """
        target, notes = self._target(request)
        model, more = self._network_for(target)
        notes += more
        notes += self._notes(target, model)
        exact = self._parts(target, model, _Scatter())
        steps = np.array(
            [self._parts(target, model, s).step_ms * s.model for s in self._scatter(target, model)]
        )
        # Around the step of the parts, which are what the user sees.
        middle = exact.step_ms
        low, high = np.percentile(steps, _INTERVAL)
        micro_batch = self.largest.micro_batch or 0
        batch = micro_batch * target.accumulation * target.dp
        rate = batch / middle * 1e3
        compute = middle - sum(
            exact.values[part] for part in ("exposed_wait", "exposed_transfer", "exposed_copy")
        )
        waiting = exact.values["exposed_wait"] + exact.values["exposed_copy"]
        travel = exact.syncs * exact.allreduce_ms
        return Draws(
            step_ms=steps,
            prediction=Prediction(
                dp=target.dp,
                nodes=target.nodes,
                micro_batch=micro_batch,
                accumulation=target.accumulation,
                global_batch=batch,
                bucket_cap_mb=request.bucket_cap_mb or self.cap_mb,
                bucket_bytes=tuple(b.nbytes for b in self._buckets(target, 0.0)),
                step_ms=StepInterval(middle, (min(float(low), middle), max(float(high), middle))),
                samples_per_s=rate,
                efficiency=self._efficiency(target, rate),
                breakdown_ms=exact.values,
                overlap_fraction=exact.replay.overlapped_ms / exact.replay.busy_ms
                if exact.replay.busy_ms
                else None,
                allreduce_ms=exact.allreduce_ms,
                naive_ms=Naive(
                    no_overlap_ms=compute + waiting + travel,
                    perfect_overlap_ms=compute
                    + waiting
                    + max(0.0, travel - exact.syncs * exact.replay.local_end_ms),
                ),
                extrapolated=bool(notes),
                notes=tuple(dict.fromkeys(notes)),
            ),
        )

    def back_test(self) -> BackTests:
        """Predicts every level of 2 or more ranks from the others."""
        tests = []
        for level in self.levels:
            if not _communicates(level) or level.step_ms is None:
                continue
            rest = tuple(lv for lv in self.levels if lv is not level)
            alike = [lv for lv in rest if _communicates(lv) and (lv.nodes > 1) == (level.nodes > 1)]
            if not alike or not any(lv.dp == 1 for lv in rest):
                continue
            others = replace(self, levels=rest, _networks={})
            request = Request(
                level.dp,
                accumulation=level.accumulation,
                ranks_per_node=-(-level.dp // level.nodes),
            )
            found = others.predict(request).step_ms
            measured = level.step_ms.mean
            tests.append(
                BackTest(
                    held_out=level.id,
                    predicted_ms=found.median,
                    interval90=found.interval90,
                    measured_ms=measured,
                    error_pct=(found.median / measured - 1) * 100,
                )
            )
        if tests:
            return BackTests(tuple(tests), None)
        together = [lv for lv in self.levels if _communicates(lv)]
        if not any(lv.dp == 1 for lv in self.levels):
            why = "without a dp = 1 level nothing separates compute from what communication costs"
        elif len({lv.dp for lv in together}) < 2:
            why = (
                f"{together[0].id} is the only level with communication: nothing is left to hold "
                "out, and one number of ranks cannot tell a ring from a tree"
            )
        else:
            why = (
                "each level with communication is the only one of its kind, within a node or "
                "between nodes: nothing is left to hold out"
            )
        return BackTests((), why)

    def _target(self, request: Request) -> tuple[_Target, list[str]]:
        notes: list[str] = []
        largest = self.largest
        most = max(lv.dp for lv in self.levels)
        if request.dp > _FARTHEST * most:
            raise UsageError(
                f"dp {request.dp} is more than {_FARTHEST} times the largest that was measured, "
                f"{most}: nothing in this run carries that.",
                "Measure more ranks first.",
            )
        per_node = min(request.dp, request.ranks_per_node or self.ranks_per_node)
        nodes = -(-request.dp // per_node)
        if request.dp > most:
            notes.append(f"dp {request.dp} is beyond the largest measured, {most}.")
        accumulation = request.accumulation or largest.accumulation
        known = [lv for lv in self.levels if lv.dp == request.dp and lv.nodes == nodes]
        ranks = tuple(range(request.dp))
        if known:
            ranks = tuple(rank.rank for rank in known[0].ranks) or ranks
        return _Target(request.dp, nodes, per_node, accumulation, ranks, request), notes

    def _network_for(self, target: _Target) -> tuple[NetworkModel | None, list[str]]:
        """Returns what reduces the target's gradients, with notes of what is assumed."""
        if target.dp < 2:
            return None, []
        between = target.nodes > 1
        model, wanted = self.network(between), target.request.bandwidth_gbps
        if model is None and (within := self.network(False)) is not None and between:
            if wanted is None:
                raise UsageError(
                    f"dp {target.dp} needs {target.nodes} nodes of {target.per_node} ranks, and "
                    "this run shows nothing of the network between nodes.",
                    "Give its rate with --bandwidth-gbps, or more --ranks-per-node.",
                )
            curve = Curve(
                "ring",
                within.curve.overhead_ms,
                within.curve.latency_ms,
                max(8 / (wanted * 1e6 * _TCP_EFFICIENCY), within.curve.ms_per_byte),
            )
            model = NetworkModel(curve, (), 0.1, (), "nothing", within.ranks, True)
            return model, [
                "The network between nodes was not measured: a ring over links of "
                f"{wanted:g} Gbit/s is assumed, with the latency that was seen within a node."
            ]
        if model is None:
            where = "between nodes" if between else "within a node"
            raise UsageError(
                f"dp {target.dp} on {target.nodes} node{'s' if between else ''} needs AllReduces "
                f"{where}, and this run has none.",
                "Measure a level with such a placement.",
            )
        if wanted is None:
            return model, []
        alike = [
            lv
            for lv in self.levels
            if lv.allreduce is not None and lv.allreduce.link and (lv.nodes > 1) == between
        ]
        if not alike:
            raise UsageError(
                "--bandwidth-gbps: the rate of the measured link is not known, so nothing can be "
                "scaled.",
                "Give it when measuring, with --link-gbps.",
            )
        level = max(alike, key=lambda lv: lv.dp)
        assert level.allreduce is not None
        assert level.allreduce.link is not None
        rate = level.allreduce.link.gbit_per_s
        every = (*level.allreduce.sizes, *level.allreduce.buckets)
        used = max((size.busbw_gb_per_s for size in every), default=0.0) * 8 / rate
        notes = []
        if used < _LINK_BOUND:
            # Only what the link itself takes changes with its rate.
            wanted = rate / (1 - used + used * rate / wanted)
            notes.append(
                f"AllReduce reaches {used:.0%} of the link's {rate:.3g} Gbit/s, so something else "
                "bounds it; that stays as it is."
            )
        return model.with_bandwidth(rate, wanted), notes

    def _notes(self, target: _Target, model: NetworkModel | None) -> list[str]:
        """Says in what way a target goes beyond what was measured."""
        notes = []
        if model is not None and target.dp not in model.ranks and len(model.ranks) == 1:
            name = model.curve.form
            notes.append(
                f"AllReduce was measured on {model.ranks[0]} ranks only "
                f"{'between nodes' if model.between_nodes else 'within a node'}, which cannot "
                f"tell a ring from a tree: a {name} is assumed."
            )
        if target.request.gradient_dtype in ("bf16", "fp16"):
            notes.append(
                f"Gradients travel as {target.request.gradient_dtype}: converting them is not "
                "included."
            )
        base = self._base(target)
        if self._crowding(target) > self._crowding_of(base) > 0:
            notes.append(
                f"{target.per_node} ranks on a node share its cores: compute is taken to slow down "
                f"by {self._crowding(target) / self._crowding_of(base):.2g} against {base.id}."
            )
        if not any(lv.dp == 1 for lv in self.levels):
            notes.append("Without a dp = 1 level the cost of filling buckets is not separated.")
        if target.request.bucket_cap_mb is not None and not self._packs_as_measured():
            notes.append(
                "DDP packs this model otherwise than by its usual rule (another data type, or "
                "parameters that it treats apart): the buckets are a guess."
            )
        return notes

    def _efficiency(self, target: _Target, rate: float) -> float | None:
        single = self._single()
        if single is None or single.costs_ms is None:
            return None
        alone = single.costs_ms.step_ms(target.accumulation)
        return rate / target.dp / ((single.micro_batch or 0) * target.accumulation / alone * 1e3)

    # ------------------------------------------------------------------------------------------
    # The replayed step

    def _single(self) -> LevelResult | None:
        return next((lv for lv in self.levels if lv.dp == 1), None)

    def _base(self, target: _Target) -> LevelResult:
        """Returns the level that is nearest: as full nodes, then as many ranks."""

        def distance(level: LevelResult) -> tuple[float, float, float]:
            per_node = -(-level.dp // level.nodes)
            return (
                abs(math.log2(per_node / target.per_node)),
                abs(math.log2(level.dp / target.dp)),
                abs(math.log2(level.accumulation / target.accumulation)),
            )

        return min(self.levels, key=distance)

    def _nearest(self, target: _Target) -> LevelResult:
        """Returns the level with communication that is nearest in ranks."""
        return min(
            (lv for lv in self.levels if _communicates(lv)),
            key=lambda lv: (
                (lv.nodes > 1) != (target.nodes > 1),
                abs(math.log2(lv.dp / target.dp)),
                abs(math.log2(lv.accumulation / target.accumulation)),
            ),
        )

    def _crowding(self, target: _Target) -> float:
        return self._crowd(target.per_node)

    def _crowding_of(self, level: LevelResult) -> float:
        return self._crowd(-(-level.dp // level.nodes))

    def _crowd(self, per_node: int) -> float:
        """Returns how many threads there are for a core, 1 at least; 1 where a GPU computes."""
        environment = next(iter(self.summary.run.environment.values()), {})
        cores, threads = environment.get("cores"), environment.get("threads_per_rank")
        if environment.get("device_type") != "cpu" or not isinstance(cores, int):
            return 1.0
        return max(1.0, per_node * (threads if isinstance(threads, int) else 1) / cores)

    def _late(self, exclude_noise: bool = False) -> tuple[Lateness | None, dict[int, float]]:
        """Returns the lateness of the largest level that has it, and who is late at every step."""
        known = [lv for lv in self.levels if lv.lateness is not None]
        if not known:
            return None, {}
        level = max(known, key=lambda lv: lv.dp)
        step = level.step_ms.mean if level.step_ms else 0.0
        return level.lateness, significant(level.lateness, step)

    def _own(self, base: LevelResult, target: _Target) -> dict[str, float]:
        """Returns data, forward, backward and other of a micro-step, mean over target's ranks.

        Ranks that are late at every step stay so; all others are like the typical one.
        """
        costs = base.costs_ms
        assert costs is not None
        slower = self._crowding(target) / self._crowding_of(base)
        parts = {
            "data": costs.data,
            "forward": costs.forward * slower,
            "backward": costs.backward * slower,
            "other": costs.other,
        }
        _, late = self._late()
        for part in parts:
            excess = self._excess(base, part, late)
            there = sum(excess.get(rank, 0.0) for rank in target.ranks) / target.dp
            own = sum(excess.values()) / base.dp
            parts[part] += (there - own) / base.accumulation
        return parts

    @staticmethod
    def _excess(base: LevelResult, part: str, late: Mapping[int, float]) -> dict[int, float]:
        """Returns by how much each late rank exceeds the typical one in a part, in ms a step."""
        values = sorted((rank.breakdown_ms.get(part) or 0.0) for rank in base.ranks)
        if not values:
            return {}
        typical = values[(len(values) - 1) // 2]
        return {
            rank.rank: max(0.0, (rank.breakdown_ms.get(part) or 0.0) - typical)
            for rank in base.ranks
            if rank.rank in late
        }

    def _buckets(self, target: _Target, shift_ms: float, stretch: float = 1.0) -> list[Bucket]:
        """Returns the target's buckets, by the times at which gradients are ready."""
        if target.dp < 2:
            return []
        source = self._ready_source(target)
        known = [g for g in source.gradient_ready if g.ready_ms is not None]
        share = GRADIENT_BYTES.get(target.request.gradient_dtype or "fp32", 4) / 4
        cap = target.request.bucket_cap_mb
        sizes = [gradient.bytes for gradient in known]
        ready = [max(0.0, (g.ready_ms or 0.0) - shift_ms) * stretch for g in known]
        if known and cap is not None and not self._is_cap(cap):
            packed = pack(sizes, ready, cap * _MB)
        elif known and self._packs_as_measured():
            packed = pack(sizes, ready, (self.cap_mb or 25.0) * _MB)
        else:
            packed = self._measured_buckets(source, stretch)
        return [Bucket(round(b.nbytes * share), b.ready_ms) for b in packed]

    def _is_cap(self, cap_mb: float) -> bool:
        return self.cap_mb is not None and cap_mb == self.cap_mb

    def _ready_source(self, target: _Target) -> LevelResult:
        base = self._base(target)
        if base.gradient_ready:
            return base
        return next((lv for lv in self.levels if lv.gradient_ready), base)

    def _packs_as_measured(self) -> bool:
        """Tells whether DDP's usual rule gives the buckets that were measured."""
        level = self.largest
        known = [g for g in level.gradient_ready if g.ready_ms is not None]
        measured = [b.bytes for b in level.allreduce.buckets] if level.allreduce else []
        if not known or self.cap_mb is None or not measured:
            return False
        packed = pack(
            [g.bytes for g in known], [g.ready_ms or 0.0 for g in known], self.cap_mb * _MB
        )
        return sorted(b.nbytes for b in packed) == sorted(measured)

    def _measured_buckets(self, source: LevelResult, stretch: float) -> tuple[Bucket, ...]:
        """Returns the buckets that were measured, spread evenly over backward."""
        level = self.largest
        sizes = [b.bytes for b in level.allreduce.buckets] if level.allreduce else []
        if not sizes:
            sizes = [level.comm.gradient_bytes or 0]
        costs = source.costs_ms
        assert costs is not None
        total, done, found = sum(sizes) or 1, 0, []
        for nbytes in sizes:
            done += nbytes
            found.append(Bucket(nbytes, costs.backward * stretch * done / total))
        return tuple(found)

    def _parts(self, target: _Target, model: NetworkModel | None, drawn: _Scatter) -> _Parts:
        """Replays a step; every factor of ``drawn`` at 1 gives the expected one."""
        base = self._base(target)
        costs = base.costs_ms
        assert costs is not None
        own = {part: value * drawn.compute for part, value in self._own(base, target).items()}
        micro_steps = target.accumulation
        missing = costs.syncs > 1 and not target.request.reduce_once
        syncs = float(micro_steps) if missing else 1.0
        fill = self._filling() * drawn.compute
        done, allreduce = self._backward(target, model, own["backward"], fill, drawn)
        values = dict.fromkeys(PARTS, 0.0)
        values |= {part: micro_steps * value for part, value in own.items()}
        values["backward"] += syncs * (done.local_end_ms - own["backward"])
        values["exposed_transfer"] = syncs * done.exposed_transfer_ms
        values["exposed_copy"] = syncs * done.exposed_copy_ms
        values["exposed_wait"] = syncs * self._wait(target) * drawn.wait
        values["optimizer"] = costs.optimizer * drawn.compute
        for part in ("forward_comm", "backward_comm"):
            values[part] = self._module_comm(target, part)
        return _Parts(values, syncs, done, allreduce)

    def _backward(
        self,
        target: _Target,
        model: NetworkModel | None,
        backward_ms: float,
        fill_ms: float,
        drawn: _Scatter,
    ) -> tuple[Replay, float]:
        """Replays one synchronising backward; returns it and the sum of its AllReduces in ms."""
        if model is None:
            return self._alone(target, backward_ms, fill_ms), 0.0
        _, late = self._late()
        source = self._ready_source(target)
        late_ms = sum(self._excess(source, "backward", late).values()) / source.dp
        costs = source.costs_ms
        assert costs is not None
        typical = costs.backward - late_ms / source.accumulation
        curves = (model.curve, *model.rivals)
        curve = curves[drawn.rival % len(curves)]
        factor = math.exp(drawn.network)
        contention = 0.0
        rate = self._contention_ms_per_byte(target) * drawn.contention
        # Contention lengthens backward, which hides more communication, which contends more.
        for _ in range(_ROUNDS):
            local_end = backward_ms + fill_ms + contention
            buckets = self._buckets(
                target, late_ms / source.accumulation, local_end / typical if typical > 0 else 1.0
            )
            each = [model.cost(target.dp, bucket.nbytes, curve) for bucket in buckets]
            each = [
                replace(c, latency_ms=c.latency_ms * factor, wire_ms=c.wire_ms * factor)
                for c in each
            ]
            found = replay(
                buckets,
                each,
                local_end,
                at_once=_AT_ONCE.get(self.backend, 1),
                copy_ms=self._copying(target, buckets),
            )
            travelling = sum(bucket.nbytes for bucket in buckets) * 2 * (target.dp - 1) / target.dp
            contention = rate * travelling * found.overlapped_wire_fraction
        return found, sum(cost.latency_ms + cost.wire_ms for cost in each)

    def _alone(self, target: _Target, backward_ms: float, fill_ms: float) -> Replay:
        single = self._single() or self._base(target)
        copy = 0.0
        if single.costs_ms is not None and not target.request.bucket_view:
            copy = single.costs_ms.exposed_copy / single.costs_ms.syncs
        end = backward_ms + fill_ms
        return Replay((), (), end, end, end + copy, 0.0)

    def _filling(self) -> float:
        """Returns what a synchronising backward takes more at dp = 1: filling buckets, in ms."""
        single = self._single()
        if single is None or single.costs_ms is None:
            return 0.0
        return max(0.0, single.costs_ms.sync_backward / max(1.0, single.costs_ms.syncs))

    def _contention_ms_per_byte(self, target: _Target) -> float:
        """Returns by how much backward slows down for each byte that travels beside it, in ms."""
        level = self._nearest(target)
        costs, comm = level.costs_ms, level.comm
        assert costs is not None
        if not comm.overlap_fraction or not comm.gradient_bytes:
            return 0.0
        slower = costs.sync_backward / max(1.0, costs.syncs) - self._filling()
        travelling = comm.gradient_bytes / max(1.0, costs.syncs) * 2 * (level.dp - 1) / level.dp
        return max(0.0, slower) / (travelling * comm.overlap_fraction)

    def _copying(self, target: _Target, buckets: Sequence[Bucket]) -> list[float]:
        """Returns the time of copying each bucket to the gradients, in ms."""
        if target.request.bucket_view:
            return [0.0] * len(buckets)
        total = sum(bucket.nbytes for bucket in buckets) or 1
        single = self._single()
        if single is not None and single.costs_ms is not None:
            all_of_it = single.costs_ms.exposed_copy / max(1.0, single.costs_ms.syncs)
            return [all_of_it * bucket.nbytes / total for bucket in buckets]
        costs = self._nearest(target).costs_ms
        assert costs is not None
        last = costs.exposed_copy / max(1.0, costs.syncs)
        return [0.0] * (len(buckets) - 1) + [last]

    def _wait(self, target: _Target) -> float:
        if target.dp < 2:
            return 0.0
        found, _ = self._late()
        if found is not None:
            return expected_wait_ms(found.passing_ms, found.fixed_ms, target.ranks)
        costs = self._nearest(target).costs_ms
        assert costs is not None
        return (costs.exposed_wait or 0.0) / max(1.0, costs.syncs)

    def _module_comm(self, target: _Target, part: str) -> float:
        """Returns communication inside forward or backward, in ms a step.

        By the logarithm of the ranks between measured levels; beyond them as in the nearest.
        """
        if target.dp < 2:
            return 0.0
        known: dict[int, list[float]] = {}
        for level in self.levels:
            if _communicates(level) and (level.nodes > 1) == (target.nodes > 1):
                known.setdefault(level.dp, []).append(float(getattr(level.costs_ms, part)))
        if not known:
            return float(getattr(self._nearest(target).costs_ms, part))
        sizes = sorted(known)
        values = [float(np.mean(known[dp])) for dp in sizes]
        return float(np.interp(math.log2(target.dp), np.log2(sizes), values))

    def _scatter(self, target: _Target, model: NetworkModel | None) -> list[_Scatter]:
        """Draws what is not known exactly; the same way for every target."""
        random = np.random.default_rng(_SEED)
        base = self._base(target)
        noise = _LEAST_COMPUTE_ERROR
        if base.step_ms is not None and base.step_ms.ci95 is not None:
            low, high = base.step_ms.ci95
            noise = max(noise, (high - low) / 2 / 1.96 / base.step_ms.median)
        spread = model.uncertainty(target.dp) if model is not None else 0.0
        rivals = 1 + len(model.rivals) if model is not None else 1
        normal = random.standard_normal((_DRAWS, 5))
        pick = random.random(_DRAWS)
        return [
            _Scatter(
                compute=max(0.1, 1 + noise * z[0]),
                network=spread * z[1],
                contention=math.exp(_CONTENTION_ERROR * z[2]),
                wait=max(0.0, 1 + _WAIT_ERROR * z[3]),
                model=max(0.1, 1 + self.model_error * z[4]),
                # Half of the draws by the chosen form.
                rival=0 if u < 0.5 else int((u - 0.5) * 2 * rivals),
            )
            for z, u in zip(normal.tolist(), pick.tolist(), strict=True)
        ]


def _communicates(level: LevelResult) -> bool:
    return level.dp > 1 and level.allreduce is not None and level.costs_ms is not None


__all__ = [
    "BackTest",
    "BackTests",
    "Draws",
    "Naive",
    "Prediction",
    "Predictor",
    "Request",
    "StepCosts",
    "StepInterval",
]
