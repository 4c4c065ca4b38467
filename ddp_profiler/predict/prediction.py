"""Predicts the step of a study under settings and at scales that were not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

from ddp_profiler import units
from ddp_profiler.analysis.results import LevelResult, Summary
from ddp_profiler.errors import DdpProfilerError, InputError, UsageError
from ddp_profiler.predict.buckets import Bucket
from ddp_profiler.predict.evidence import Evidence, Target, communicates, per_node
from ddp_profiler.predict.network import Curve, NetworkModel
from ddp_profiler.predict.request import Request
from ddp_profiler.predict.results import BackTest, BackTests, Naive, Prediction, StepInterval
from ddp_profiler.predict.step import Scatter, replay_step

Floats = npt.NDArray[np.float64]

_FARTHEST = 64
"""Times the largest dp measured; beyond it nothing is said."""
_DRAWS = 120
_SEED = 20240501
_LEAST_MODEL_ERROR = 0.018
"""Relative standard error of a replay where everything it needs was measured; docs/accuracy.md."""
_LEAST_COMPUTE_ERROR = 0.003
_BETWEEN_LAUNCHES = 0.3
"""By how much launches are taken to differ, as a share of how steps of one differ."""
_CONTENTION_ERROR = 0.3
_CROWDING_ERROR = 0.5
"""Relative standard error of what cores that are shared cost."""
_FAR = 4.0
"""A setting beyond so many times what was measured, or below that part of it, is marked."""
_WAIT_ERROR = 0.2
_TCP_EFFICIENCY = 0.956
"""Share of a link's rate that TCP frames leave to data."""
_IN_TRAINING = (0.7, 2.0)
"""By how much AllReduces in training may differ from those in isolation."""
_SHOWS_FRACTION = 0.02
"""Share of the step that transfer must be exposed to show how long it takes."""
_INTERVAL = (5, 95)
_LINK_BOUND = 0.8
"""An AllReduce that reaches this share of the link's rate is bounded by it."""


@dataclass(frozen=True)
class Draws:
    """One step drawn many times, shape [draw] each: for differences between two settings."""

    step_ms: Floats
    prediction: Prediction


@dataclass(frozen=True)
class Predictor:
    """Predicts steps from the measured levels of a study.

    Attributes:
        evidence: The levels to predict from.
        model_error: Relative standard error of the replay itself.
    """

    evidence: Evidence
    model_error: float = _LEAST_MODEL_ERROR

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
        usable = [lv for lv in summary.levels if lv.costs_ms and lv.micro_batch and lv.step_ms]
        together = [lv for lv in usable if communicates(lv)]
        if not together and summary.run.partial:
            why = f" {summary.notes[0]}" if summary.notes else ""
            raise InputError(
                f"The run is partial, and no level of 2 or more ranks is whole.{why}",
                "Bring its parts together (ddp-profiler merge), or measure again.",
            )
        if not together:
            raise InputError(
                "The run has no level of 2 or more ranks with steps and AllReduces: it shows "
                "nothing of the network.",
                "Measure dp 1 and 2 at least: torchrun --nproc_per_node=2 -m ddp_profiler.run.",
            )
        largest = max(together, key=lambda lv: (lv.dp, lv.placement == "packed"))
        same = tuple(lv for lv in usable if lv.micro_batch == largest.micro_batch)
        found = cls(Evidence(summary, same))
        tests = found.back_test().tests
        if len(tests) < 2:
            return found
        missed = math.sqrt(sum((test.error_pct / 100) ** 2 for test in tests) / len(tests))
        return replace(found, model_error=max(_LEAST_MODEL_ERROR, missed))

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
        given = self.evidence.ingredients(target)
        notes += self._notes(target, model, given.buckets)
        in_training = math.log(self._in_training(target))
        exact = replay_step(given, model, Scatter(network=in_training))
        steps = np.array(
            [
                replay_step(given, model, drawn).step_ms * drawn.model
                for drawn in self._scatter(target, model, in_training)
            ]
        )
        # Around the step of the parts, which are what the user sees.
        middle = exact.step_ms
        low, high = np.percentile(steps, _INTERVAL)
        micro_batch = self.evidence.largest.micro_batch or 0
        batch = micro_batch * target.accumulation * target.dp
        rate = batch / middle * 1e3
        alone = middle - exact.parts_ms["exposed_transfer"]
        travel = given.syncs * exact.allreduce_ms
        hiding = given.syncs * exact.backward.local_end_ms
        known = self._measured(target)
        return Draws(
            step_ms=steps,
            prediction=Prediction(
                dp=target.dp,
                nodes=target.nodes,
                micro_batch=micro_batch,
                accumulation=target.accumulation,
                global_batch=batch,
                bucket_cap_mb=request.bucket_cap_mb or self.evidence.cap_mb,
                bucket_bytes=tuple(bucket.nbytes for bucket in given.buckets),
                step_ms=StepInterval(middle, (min(float(low), middle), max(float(high), middle))),
                measured_ms=known.step_ms.mean if known and known.step_ms else None,
                samples_per_s=rate,
                efficiency=self._efficiency(target, rate),
                breakdown_ms=exact.parts_ms,
                overlap_fraction=exact.backward.overlapped_ms / exact.backward.busy_ms
                if model is not None and exact.backward.busy_ms
                else None,
                allreduce_ms=exact.allreduce_ms,
                naive_ms=Naive(
                    no_overlap_ms=alone + travel,
                    perfect_overlap_ms=alone + max(0.0, travel - hiding),
                ),
                extrapolated=bool(notes),
                notes=tuple(dict.fromkeys(notes)),
            ),
        )

    def back_test(self) -> BackTests:
        """Predicts every level of 2 or more ranks from the others."""
        tests = []
        evidence = self.evidence
        for level in evidence.together:
            rest = Evidence(
                evidence.summary, tuple(lv for lv in evidence.levels if lv is not level)
            )
            alike = [lv for lv in rest.together if (lv.nodes > 1) == (level.nodes > 1)]
            if not alike or rest.single is None or level.step_ms is None:
                continue
            others = Predictor(rest, self.model_error)
            request = Request(
                level.dp,
                accumulation=level.accumulation,
                ranks_per_node=per_node(level),
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
        together = evidence.together
        tested = {test.held_out for test in tests}
        left_out = tuple(level.id for level in together if level.id not in tested)
        if tests:
            return BackTests(tuple(tests), None, left_out)
        if evidence.single is None:
            why = "without a dp = 1 level nothing separates compute from what communication costs"
        elif len(together) < 2:
            why = (
                f"{together[0].id} is the only level with communication: nothing is left to hold "
                "out, and one number of ranks cannot tell a ring from a tree"
            )
        else:
            why = (
                f"{' and '.join(lv.id for lv in together)} are each the only level of their "
                "kind, within a node or between nodes: nothing is left to hold out"
            )
        return BackTests((), why, left_out)

    def _target(self, request: Request) -> tuple[Target, list[str]]:
        notes: list[str] = []
        largest = self.evidence.largest
        most = max(lv.dp for lv in self.evidence.levels)
        if request.dp > _FARTHEST * most:
            raise UsageError(
                f"dp {request.dp} is more than {_FARTHEST} times the largest that was measured, "
                f"{most}: nothing in this run carries that.",
                "Measure more ranks first.",
            )
        fullest = min(request.dp, request.ranks_per_node or self.evidence.ranks_per_node)
        nodes = -(-request.dp // fullest)
        if request.dp > most:
            notes.append(f"More ranks than were measured; the most were {most}.")
        accumulation = request.accumulation or largest.accumulation
        known = [lv for lv in self.evidence.levels if lv.dp == request.dp and lv.nodes == nodes]
        ranks = tuple(range(request.dp))
        if known:
            ranks = tuple(rank.rank for rank in known[0].ranks) or ranks
        return Target(request.dp, nodes, fullest, accumulation, ranks, request), notes

    def _network_for(self, target: Target) -> tuple[NetworkModel | None, list[str]]:
        """Returns what reduces the target's gradients, with notes of what is assumed."""
        if target.dp < 2:
            return None, []
        between = target.nodes > 1
        model, wanted = self.evidence.network(between), target.request.bandwidth_gbps
        if model is None and (within := self.evidence.network(False)) is not None and between:
            if wanted is None:
                raise UsageError(
                    f"dp {target.dp} needs {target.nodes} nodes of {target.per_node} ranks, and "
                    "this run shows nothing of the network between nodes.",
                    "Give ddp-profiler predict its rate with --bandwidth-gbps, or more "
                    "--ranks-per-node.",
                )
            curve = Curve(
                "ring",
                within.curve.overhead_ms,
                within.curve.latency_ms,
                max(8 / (wanted * 1e6 * _TCP_EFFICIENCY), within.curve.ms_per_byte),
            )
            # No sizes: none were measured there.
            model = NetworkModel(curve, (), 0.1, (), "nothing", within.ranks, (0, 0), True)
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
            for lv in self.evidence.levels
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
        notes = []
        if not rate / _FAR <= wanted <= rate * _FAR:
            notes.append(
                f"{wanted:g} Gbit/s is far from the {rate:.3g} that were measured: what else "
                "bounds an AllReduce did not show."
            )
        every = (*level.allreduce.sizes, *level.allreduce.buckets)
        used = max((size.busbw_gb_per_s for size in every), default=0.0) * 8 / rate
        if used < _LINK_BOUND:
            # Only what the link itself takes changes with its rate.
            wanted = rate / (1 - used + used * rate / wanted)
            notes.append(
                f"AllReduce reaches {used:.0%} of the link's {rate:.3g} Gbit/s, so something else "
                "bounds it; that stays as it is."
            )
        return model.with_bandwidth(rate, wanted), notes

    def _measured(self, target: Target) -> LevelResult | None:
        """Returns the level that has measured just this; None where it was not."""
        if replace(target.request, dp=1, accumulation=None, ranks_per_node=None) != Request(1):
            return None
        return next(
            (
                lv
                for lv in self.evidence.levels
                if (lv.dp, lv.nodes, lv.accumulation)
                == (target.dp, target.nodes, target.accumulation)
            ),
            None,
        )

    def _notes(
        self, target: Target, model: NetworkModel | None, buckets: Sequence[Bucket]
    ) -> list[str]:
        """Says in what way a target goes beyond what was measured."""
        notes = []
        most = max(level.accumulation for level in self.evidence.levels)
        if target.accumulation > _FAR * most:
            notes.append(f"More micro-steps than were measured; the most were {most}.")
        if model is not None and model.sizes != (0, 0):
            low, high = min(b.nbytes for b in buckets), max(b.nbytes for b in buckets)
            if low < model.sizes[0] or high > model.sizes[1]:
                notes.append(
                    f"Buckets of {units.nbytes(low)} to {units.nbytes(high)}; AllReduces of "
                    f"{units.nbytes(model.sizes[0])} to {units.nbytes(model.sizes[1])} were "
                    "measured."
                )
            there = len(self.evidence.measured_buckets)
            if there and len(buckets) > _FAR * there:
                notes.append(
                    f"{len(buckets)} buckets, and {there} when measured: what each costs beside "
                    "its AllReduce is a guess."
                )
        if model is not None and model.sizes != (0, 0) and not model.held_out:
            notes.append(
                "Too few sizes of AllReduce were measured to hold any out (--allreduce-max-mb)."
            )
        if model is not None and target.dp not in model.ranks and len(model.ranks) == 1:
            name = model.curve.form
            notes.append(
                f"AllReduce was measured on {model.ranks[0]} ranks only "
                f"{'between nodes' if model.between_nodes else 'within a node'}, which cannot "
                f"tell a ring from a tree, nor what a hop costs: a {name} is assumed, and half of "
                "the latency in hops."
            )
        if target.request.gradient_dtype in ("bf16", "fp16"):
            notes.append(
                f"Gradients travel as {target.request.gradient_dtype}: converting them is not "
                "included."
            )
        slower = self.evidence.slower(target)
        if slower > 1:
            notes.append(
                f"{target.per_node} ranks on a node share its cores: compute is taken to slow down "
                f"by {slower:.2g} against {self.evidence.base(target).id}."
            )
        if self.evidence.single is None:
            notes.append("Without a dp = 1 level the cost of filling buckets is not separated.")
        if target.request.bucket_cap_mb is not None and not self.evidence.packs_as_measured:
            notes.append(
                "DDP packs this model otherwise than by its usual rule (another data type, or "
                "parameters that it treats apart): the buckets are a guess."
            )
        return notes

    def _efficiency(self, target: Target, rate: float) -> float | None:
        single = self.evidence.single
        if single is None or single.costs_ms is None:
            return None
        alone = single.costs_ms.step_ms(target.accumulation)
        alone += self.evidence.residual_ms(single) * target.accumulation / single.accumulation
        return rate / target.dp / ((single.micro_batch or 0) * target.accumulation / alone * 1e3)

    def _in_training(self, target: Target) -> float:
        """Returns how much longer AllReduces take in training than in isolation.

        The factor with which the nearest level's replay gives the exposed transfer that was
        measured there; 1 where its communication is hidden, so that nothing shows it.
        """
        if target.dp < 2:
            return 1.0
        level = self.evidence.nearest(target)
        model = self.evidence.network(level.nodes > 1)
        measured, step = level.breakdown_ms["exposed_transfer"], level.step_ms
        if model is None or step is None or measured is None or level.lateness is None:
            return 1.0
        as_it_was = self.evidence.ingredients(
            Target(
                level.dp,
                level.nodes,
                per_node(level),
                level.accumulation,
                tuple(rank.rank for rank in level.ranks),
                Request(level.dp),
            )
        )

        def exposed(factor: float) -> float:
            done = replay_step(as_it_was, model, Scatter(network=math.log(factor)))
            return done.parts_ms["exposed_transfer"]

        if min(measured, exposed(1.0)) < _SHOWS_FRACTION * step.mean:
            return 1.0
        low, high = _IN_TRAINING
        if measured <= exposed(low):
            return low
        if measured >= exposed(high):
            return high
        return float(brentq(lambda factor: exposed(factor) - measured, low, high, xtol=1e-4))

    def _scatter(
        self, target: Target, model: NetworkModel | None, in_training: float
    ) -> list[Scatter]:
        """Draws what is not known exactly; the same way for every target."""
        random = np.random.default_rng(_SEED)
        base = self.evidence.base(target)
        noise, step = _LEAST_COMPUTE_ERROR, base.step_ms
        if step is not None:
            noise = max(noise, _BETWEEN_LAUNCHES * (step.p90 - step.p10) / 2.56 / step.median)
            if step.ci95 is not None:
                noise = max(noise, (step.ci95[1] - step.ci95[0]) / 2 / 1.96 / step.median)
        spread = model.uncertainty(target.dp) if model is not None else 0.0
        rivals = 1 + len(model.rivals) if model is not None else 1
        residual = self.evidence.residual_ms(base)
        if step is not None:
            noise = max(noise, abs(residual) / 2 / step.mean)
        if (slower := self.evidence.slower(target)) > 1:
            noise = math.hypot(noise, _CROWDING_ERROR * (1 - 1 / slower))
        normal = random.standard_normal((_DRAWS, 6))
        unseen = random.random(_DRAWS)
        pick = random.random(_DRAWS)
        return [
            Scatter(
                compute=max(0.1, 1 + noise * z[0]),
                network=in_training + spread * z[1],
                fill=z[5],
                contention=math.exp(_CONTENTION_ERROR * z[2]),
                unseen=2 * v,
                wait=max(0.0, 1 + _WAIT_ERROR * z[3]),
                model=max(0.1, 1 + self.model_error * z[4]),
                # Half of the draws by the chosen form.
                rival=0 if u < 0.5 else int((u - 0.5) * 2 * rivals),
            )
            for z, u, v in zip(normal.tolist(), pick.tolist(), unseen.tolist(), strict=True)
        ]


def predictor_of(summary: Summary) -> tuple[Predictor | None, str]:
    """Returns a run's predictor, or None and why the run carries no prediction."""
    try:
        return Predictor.of(summary), ""
    except DdpProfilerError as error:
        return None, error.message
