"""What a study's levels say about a setting that was not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddp_profiler.analysis.model import StepCosts
from ddp_profiler.analysis.results import LevelResult, Summary
from ddp_profiler.predict import network
from ddp_profiler.predict.buckets import Bucket, pack
from ddp_profiler.predict.network import NetworkModel, Sample
from ddp_profiler.predict.request import GRADIENT_BYTES, Request
from ddp_profiler.predict.step import Ingredients
from ddp_profiler.predict.waiting import expected_wait_ms, significant

_MB = 2**20
_AT_ONCE = {"gloo": 2, "nccl": 1}
_LEAST_OVERLAP = 0.1
"""Share of the communication beside backward from which on contention can be told."""
_MOST_PER_BUCKET_MS = 0.1
_MOST_CONTENTION_MS = 1e-6
"""For each byte that travels beside backward: what a core needs to move and add it."""
_OWN = ("data", "forward", "backward", "other")


@dataclass(frozen=True)
class Target:
    """What is predicted, complete.

    Attributes:
        dp: Number of replicas.
        nodes: Nodes that they are on.
        per_node: Ranks on a full node.
        accumulation: Micro-steps in a step.
        ranks: Global ranks that take part.
        request: What was asked for.
    """

    dp: int
    nodes: int
    per_node: int
    accumulation: int
    ranks: tuple[int, ...]
    request: Request


@dataclass(frozen=True)
class Evidence:
    """The measured levels of a study.

    Attributes:
        summary: The study.
        levels: The levels to predict from: all with costs and the same micro-batch, or fewer
            where some are held out.
    """

    summary: Summary
    levels: tuple[LevelResult, ...]
    _networks: dict[bool, NetworkModel | None] = field(default_factory=dict)

    @property
    def cap_mb(self) -> float | None:
        """The bucket cap in force when they were measured, in MB of 2**20 bytes."""
        cap = self.summary.run.settings.get("bucket_cap_mb")
        return float(cap) if isinstance(cap, (int, float)) else None

    @property
    def environment(self) -> Mapping[str, object]:
        """That of the first node."""
        return next(iter(self.summary.run.environment.values()), {})

    @property
    def backend(self) -> str:
        """``gloo`` or ``nccl``."""
        return str(self.environment.get("backend", "gloo"))

    @property
    def ranks_per_node(self) -> int:
        """Ranks on a node in the launch, the most."""
        found = [e.get("local_world_size") for e in self.summary.run.environment.values()]
        known = [n for n in found if isinstance(n, int) and n > 0]
        return max(known, default=self.summary.run.world_size)

    @property
    def together(self) -> tuple[LevelResult, ...]:
        """The levels that reduce."""
        return tuple(level for level in self.levels if communicates(level))

    @property
    def single(self) -> LevelResult | None:
        """A level with one rank."""
        return next((level for level in self.levels if level.dp == 1), None)

    @property
    def largest(self) -> LevelResult:
        """The level with the most ranks, packed where there are two; the one to start from."""
        return max(
            self.together or self.levels,
            key=lambda lv: (lv.dp, lv.placement == "packed", -lv.accumulation),
        )

    @property
    def element_bytes(self) -> float:
        """Bytes of a gradient's element."""
        return self.largest.gradient_element_bytes or 4.0

    # ------------------------------------------------------------------------------------------
    # The network

    def network(self, between_nodes: bool) -> NetworkModel | None:
        """Returns the model of AllReduce within a node or between nodes; None if unmeasured."""
        if between_nodes not in self._networks:
            samples, typical = [], []
            for level in self.together:
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
    # Which level to take a figure from

    def base(self, target: Target) -> LevelResult:
        """Returns the level that is nearest: as full nodes, then as many ranks."""
        return min(
            self.levels,
            key=lambda lv: (
                abs(math.log2(per_node(lv) / target.per_node)),
                abs(math.log2(lv.dp / target.dp)),
                abs(math.log2(lv.accumulation / target.accumulation)),
            ),
        )

    def nearest(self, target: Target) -> LevelResult:
        """Returns the level with communication that is nearest in placement and ranks."""
        return min(
            self.together,
            key=lambda lv: (
                (lv.nodes > 1) != (target.nodes > 1),
                abs(math.log2(lv.dp / target.dp)),
                abs(math.log2(lv.accumulation / target.accumulation)),
            ),
        )

    def crowding(self, per_node: int) -> float:
        """Returns how many threads there are for a core, 1 at least; 1 where a GPU computes.

        Args:
            per_node: Ranks on a node.
        """
        cores, threads = self.environment.get("cores"), self.environment.get("threads_per_rank")
        if self.environment.get("device_type") != "cpu" or not isinstance(cores, int):
            return 1.0
        # A description from elsewhere may say anything.
        return max(1.0, per_node * (threads if isinstance(threads, int) else 1) / max(1, cores))

    def slower(self, target: Target) -> float:
        """Returns by how much compute slows down against the base level for want of cores."""
        return self.crowding(target.per_node) / self.crowding(per_node(self.base(target)))

    # ------------------------------------------------------------------------------------------
    # The ingredients of a step

    def ingredients(self, target: Target) -> Ingredients:
        """Returns what a target's step is made of."""
        base = self.base(target)
        costs = _costs(base)
        missing = costs.syncs > 1 and not target.request.reduce_once
        own, late_backward = self._own(base, target)
        buckets = self.buckets(target)
        contention, unseen = self._contention_per_byte(target)
        filling, more = self._filling(target), self._more_buckets(target, buckets)
        return Ingredients(
            dp=target.dp,
            micro_steps=target.accumulation,
            syncs=float(target.accumulation) if missing else 1.0,
            own=own,
            late_backward=late_backward,
            buckets=buckets,
            copy=tuple(self._copying(target, buckets)),
            fill=filling + more,
            fill_error=abs(more),
            contention_per_byte=contention,
            contention_unseen=unseen,
            wait=self._wait(target),
            optimizer=costs.optimizer * self.slower(target) * self.plain_share(base),
            forward_comm=self._module_comm(target, "forward_comm"),
            backward_comm=self._module_comm(target, "backward_comm"),
            at_once=_AT_ONCE.get(self.backend, 1),
        )

    def buckets(self, target: Target) -> tuple[Bucket, ...]:
        """Returns a target's buckets, ready at a share of the typical local backward.

        One rank has them, too: it copies their content back.
        """
        source = self._ready_source(target)
        costs = _costs(source)
        late = sum(self._excess(source, "backward").values()) / source.dp / source.accumulation
        typical = max(costs.backward - late, 1e-9)
        known = [g for g in source.gradient_ready if g.ready_ms is not None]
        ready = [min(1.0, max(0.0, ((g.ready_ms or 0.0) - late) / typical)) for g in known]
        cap = target.request.bucket_cap_mb or self.cap_mb
        changed = cap is not None and cap != self.cap_mb
        if known and cap is not None and (changed or self.packs_as_measured):
            packed = pack([gradient.bytes for gradient in known], ready, cap * _MB)
        else:
            packed = self._spread_evenly()
        wanted = target.request.gradient_dtype
        share = 1.0 if wanted is None else GRADIENT_BYTES[wanted] / self.element_bytes
        return tuple(Bucket(round(b.nbytes * share), b.ready_ms) for b in packed)

    @property
    def measured_buckets(self) -> tuple[int, ...]:
        """Bytes of the buckets that were measured, in the order of reduction; empty if unknown."""
        allreduce = self.largest.allreduce
        return tuple(bucket.bytes for bucket in allreduce.buckets) if allreduce else ()

    @property
    def packs_as_measured(self) -> bool:
        """Whether DDP's usual rule gives the buckets that were measured."""
        known = [g for g in self.largest.gradient_ready if g.ready_ms is not None]
        measured = self.measured_buckets
        if not known or self.cap_mb is None or not measured:
            return False
        sizes = [gradient.bytes for gradient in known]
        packed = pack(sizes, [g.ready_ms or 0.0 for g in known], self.cap_mb * _MB)
        return sorted(b.nbytes for b in packed) == sorted(measured)

    def _spread_evenly(self) -> tuple[Bucket, ...]:
        """Returns the buckets that were measured, spread evenly over backward."""
        sizes = self.measured_buckets or (self.largest.comm.gradient_bytes or 0,)
        total, done, found = sum(sizes) or 1, 0, []
        for nbytes in sizes:
            done += nbytes
            found.append(Bucket(nbytes, done / total))
        return tuple(found)

    def _ready_source(self, target: Target) -> LevelResult:
        base = self.base(target)
        if base.gradient_ready:
            return base
        return next((lv for lv in self.levels if lv.gradient_ready), base)

    def _late_source(self) -> LevelResult | None:
        """Returns the largest level whose ranks' lateness is known."""
        known = [lv for lv in self.levels if lv.lateness is not None]
        return max(known, key=lambda lv: lv.dp) if known else None

    def _late(self) -> frozenset[int]:
        """Returns the ranks that are always late."""
        level = self._late_source()
        if level is None:
            return frozenset()
        step = level.step_ms.mean if level.step_ms else 0.0
        return frozenset(significant(level.lateness, step))

    def _own(self, base: LevelResult, target: Target) -> tuple[dict[str, float], float]:
        """Returns a micro-step's own work by part, and what late ranks add to its backward.

        Mean over the target's ranks. Those that are always late stay so; all others are like
        the typical one.
        """
        costs = _costs(base)
        slower, plain = self.slower(target), self.plain_share(base)
        parts, late_backward = {}, 0.0
        for part in _OWN:
            excess = self._excess(base, part)
            there = sum(excess.get(rank, 0.0) for rank in target.ranks) / target.dp
            typical = getattr(costs, part) - sum(excess.values()) / base.dp / base.accumulation
            typical *= slower if part in ("forward", "backward") else 1.0
            parts[part] = plain * (typical + there / base.accumulation)
            if part == "backward":
                late_backward = plain * there / base.accumulation
        return parts, late_backward

    @staticmethod
    def residual_ms(level: LevelResult) -> float:
        """Returns a level's mean plain step less what the step model explains of it, in ms."""
        if level.step_ms is None:
            return 0.0
        return level.step_ms.mean - _costs(level).step_ms(level.accumulation)

    def plain_share(self, level: LevelResult) -> float:
        """Returns what own work takes in plain steps over what it takes in the step model.

        Parts are of instrumented steps, and of steps without reduction; the step that is
        predicted is a plain one. The waterfall's residual is spread over all own work.
        """
        costs = _costs(level)
        own = costs.data + costs.forward + costs.backward + costs.other
        total = level.accumulation * own + costs.optimizer
        return max(0.5, 1 + self.residual_ms(level) / total) if total > 0 else 1.0

    def _excess(self, base: LevelResult, part: str) -> dict[int, float]:
        """Returns by how much each late rank exceeds the typical one in a part, in ms a step."""
        late = self._late()
        values = sorted((rank.breakdown_ms.get(part) or 0.0) for rank in base.ranks)
        if not values or not late:
            return {}
        typical = values[(len(values) - 1) // 2]
        return {
            rank.rank: max(0.0, (rank.breakdown_ms.get(part) or 0.0) - typical)
            for rank in base.ranks
            if rank.rank in late
        }

    def _filling(self, target: Target) -> float:
        """Returns what a synchronising backward takes more than another, in ms.

        That of dp = 1, where buckets are filled and nothing travels. What it takes more at the
        nearest level with communication is contention, unless hardly anything travelled beside
        backward there: then it has another cause, and is here.
        """
        alone = 0.0
        if self.single is not None:
            costs = _costs(self.single)
            alone = max(0.0, costs.sync_backward / _reductions(costs))
        if target.dp < 2 or self._hides_enough(self.nearest(target)):
            return alone
        costs = _costs(self.nearest(target))
        return max(alone, costs.sync_backward / _reductions(costs))

    @staticmethod
    def _hides_enough(level: LevelResult) -> bool:
        """Tells whether so much travelled beside backward that contention can be seen."""
        return (level.comm.overlap_fraction or 0.0) >= _LEAST_OVERLAP

    def _more_buckets(self, target: Target, buckets: Sequence[Bucket]) -> float:
        """Returns what another number of buckets takes more in backward, in ms.

        Each bucket costs the thread that hands it over. How much of filling is by bucket and how
        much by byte one packing cannot tell: half is taken, 0.1 ms a bucket at most.
        """
        measured = len(self.measured_buckets)
        if not measured or target.dp < 2:
            return 0.0
        each = min(self._filling(target) / measured, _MOST_PER_BUCKET_MS)
        return (len(buckets) - measured) * each / 2

    def _contention_per_byte(self, target: Target) -> tuple[float, bool]:
        """Returns by how much backward slows down for each byte that travels beside it, in ms.

        And whether that is a guess, as where hardly anything travelled beside backward: on the
        CPU the threads of gloo take from cores that are busy anyway. Between 0 and 1 ns a byte
        times the share of busy cores, so half of it.
        """
        if target.dp < 2:
            return 0.0, False
        level = self.nearest(target)
        costs, comm = _costs(level), level.comm
        if not comm.overlap_fraction or not comm.gradient_bytes or not self._hides_enough(level):
            if self.environment.get("device_type") != "cpu":
                return 0.0, False
            uses = [rank.machine for rank in level.ranks if rank.machine is not None]
            busy = [use.busy_fraction for use in uses if use.busy_fraction is not None]
            return (float(np.mean(busy)) if busy else 0.0) * _MOST_CONTENTION_MS / 2, True
        slower = costs.sync_backward / _reductions(costs) - self._filling(target)
        travelling = comm.gradient_bytes / _reductions(costs) * 2 * (level.dp - 1) / level.dp
        return max(0.0, slower) / (travelling * comm.overlap_fraction), False

    def _copying(self, target: Target, buckets: Sequence[Bucket]) -> list[float]:
        """Returns the time of copying each bucket to the gradients, in ms."""
        if target.request.bucket_view:
            return [0.0] * len(buckets)
        total = sum(bucket.nbytes for bucket in buckets) or 1
        if self.single is not None:
            costs = _costs(self.single)
            all_of_it = costs.exposed_copy / _reductions(costs)
            return [all_of_it * bucket.nbytes / total for bucket in buckets]
        costs = _costs(self.nearest(target))
        return [0.0] * (len(buckets) - 1) + [costs.exposed_copy / _reductions(costs)]

    def _wait(self, target: Target) -> float:
        """Returns what a rank waits for the last one at a reduction, in ms."""
        if target.dp < 2:
            return 0.0
        level = self._late_source()
        if level is None or level.lateness is None:
            costs = _costs(self.nearest(target))
            return (costs.exposed_wait or 0.0) / _reductions(costs)
        # What is late in every micro-step adds up until ranks meet; what passes, by its root.
        syncs = _costs(level).syncs
        there = level.accumulation / _reductions(_costs(level))
        here = 1.0 if syncs > 1 and not target.request.reduce_once else target.accumulation
        longer = here / there
        return expected_wait_ms(
            [math.sqrt(longer) * late for late in level.lateness.passing_ms],
            {rank: longer * late for rank, late in level.lateness.fixed_ms.items()},
            target.ranks,
        )

    def _module_comm(self, target: Target, part: str) -> float:
        """Returns communication inside forward or backward, in ms a step.

        By the logarithm of the ranks between measured levels; beyond them as in the nearest.
        """
        if target.dp < 2:
            return 0.0
        known: dict[int, list[float]] = {}
        for level in self.together:
            if (level.nodes > 1) == (target.nodes > 1):
                costs = _costs(level).at(target.accumulation)
                known.setdefault(level.dp, []).append(float(getattr(costs, part)))
        if not known:
            return float(getattr(_costs(self.nearest(target)).at(target.accumulation), part))
        sizes = sorted(known)
        values = [float(np.mean(known[dp])) for dp in sizes]
        return float(np.interp(math.log2(target.dp), np.log2(sizes), values))


def communicates(level: LevelResult) -> bool:
    """Tells whether a level reduces, and shows what that takes."""
    return level.dp > 1 and level.allreduce is not None and level.costs_ms is not None


def _costs(level: LevelResult) -> StepCosts:
    assert level.costs_ms is not None
    return level.costs_ms


def _reductions(costs: StepCosts) -> float:
    """Returns how often a step reduces, once at least."""
    return max(1.0, costs.syncs)


def per_node(level: LevelResult) -> int:
    """Returns the ranks on a full node of a level."""
    return -(-level.dp // level.nodes)
