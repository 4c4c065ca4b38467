"""Levels of a study made by a known law, for what predicts from them."""

from ddp_profiler.analysis.allreduce import AllReduceResult, AllReduceSize
from ddp_profiler.analysis.lateness import Lateness
from ddp_profiler.analysis.link import Link
from ddp_profiler.analysis.model import StepCosts
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.results import (
    BatchCheck,
    Communication,
    GradientReady,
    LevelResult,
    RankResult,
    RunResult,
    Summary,
)
from ddp_profiler.analysis.statistics import Distribution
from ddp_profiler.predict.buckets import pack
from ddp_profiler.predict.schedule import Cost, replay

FORWARD_MS = 10.0
BACKWARD_MS = 40.0
OPTIMIZER_MS = 2.0
COPY_MS = 1.0
LAYERS = 8
LAYER_BYTES = 4 * 1_000_000
SIZES = [4096 * 4**k for k in range(8)]


def ready_ms():
    """When each layer's gradient is ready; the last layer's first."""
    return [BACKWARD_MS * (LAYERS - layer) / LAYERS for layer in range(LAYERS)]


def allreduce_ms(dp, nbytes, gbit, overhead=0.2, latency=0.05):
    """A ring's (latency, wire) in ms."""
    wire = 2 * (dp - 1) / dp * nbytes * 8 / (gbit * 1e6)
    return overhead + 2 * (dp - 1) * latency, wire


def law(
    dp, *, accumulation=1, gbit=1.0, cap_mb=25.0, at_once=2, copies=True, syncs=1, in_training=1.0
):
    """The parts of a step by the law, and its AllReduces."""
    buckets = pack([LAYER_BYTES] * LAYERS, ready_ms(), cap_mb * 2**20)
    alone = [allreduce_ms(dp, b.nbytes, gbit) for b in buckets] if dp > 1 else []
    costs = [Cost(in_training * latency, in_training * wire) for latency, wire in alone]
    copy = [COPY_MS * b.nbytes / (LAYERS * LAYER_BYTES) if copies else 0.0 for b in buckets]
    if dp > 1:
        done = replay(buckets, costs, BACKWARD_MS, at_once=at_once, copy_ms=copy)
        transfer, copying = done.exposed_transfer_ms, done.exposed_copy_ms
    else:
        done, transfer, copying = None, 0.0, COPY_MS if copies else 0.0
    parts = dict.fromkeys(PARTS, 0.0) | {
        "forward": accumulation * FORWARD_MS,
        "backward": accumulation * BACKWARD_MS,
        "exposed_transfer": syncs * transfer,
        "exposed_copy": syncs * copying,
        "optimizer": OPTIMIZER_MS,
    }
    return parts, done, buckets


def level(
    dp,
    *,
    accumulation=1,
    gbit=1.0,
    cap_mb=25.0,
    nodes=None,
    late=None,
    passing=(0.0,) * 41,
    syncs=1,
    micro_batch=8,
    in_training=1.0,
):
    """A level whose every figure follows the law; ``late`` is rank -> ms in backward."""
    nodes = dp if nodes is None else nodes
    late = late or {}
    parts, done, buckets = law(
        dp,
        accumulation=accumulation,
        gbit=gbit,
        cap_mb=cap_mb,
        syncs=syncs,
        in_training=in_training,
    )
    mean_late = sum(late.get(rank, 0.0) for rank in range(dp)) / dp
    parts["backward"] += mean_late
    worst = max([late.get(rank, 0.0) for rank in range(dp)])
    parts["exposed_wait"] = worst - mean_late if dp > 1 else 0.0
    step = sum(parts.values())
    spread = Distribution(step, step, step, step, (step * 0.999, step * 1.001))
    sizes = tuple(_size(dp, nbytes, gbit) for nbytes in SIZES) if dp > 1 else ()
    alone = tuple(_size(dp, b.nbytes, gbit) for b in buckets) if dp > 1 else ()
    return LevelResult(
        id=f"dp{dp}-acc{accumulation}",
        dp=dp,
        nodes=nodes,
        placement="packed",
        micro_batch=micro_batch,
        accumulation=accumulation,
        global_batch=micro_batch * accumulation * dp,
        steps=20,
        repetitions=1,
        warmup_steps=5,
        warmup_ms=None,
        step_ms=spread,
        instrumented_step_ms=spread,
        samples_per_s=micro_batch * accumulation * dp / step * 1e3,
        tokens_per_s=None,
        mfu=None,
        breakdown_ms=parts,
        comm=Communication(
            busy_ms=done.busy_ms if done else None,
            overlapped_ms=done.overlapped_ms if done else None,
            overlap_fraction=done.overlapped_ms / done.busy_ms if done else None,
            gradient_bytes=LAYERS * LAYER_BYTES * syncs,
            num_buckets=len(buckets),
            num_gradient_collectives_per_step=len(buckets) * syncs,
            unnoticed_completions=0,
            sources={},
        ),
        allreduce=AllReduceResult(
            sizes, alone, sum(b.time_ms for b in alone), None, Link("l", "k", gbit, "m", (0, 1))
        )
        if dp > 1
        else None,
        batch_check=BatchCheck(
            None, None, None, None, None, None, None, None, None, None, None, ()
        ),
        overhead=None,
        gradient_ready=tuple(
            GradientReady(f"{layer}.weight", LAYER_BYTES, ready + mean_late)
            for layer, ready in enumerate(ready_ms())
        ),
        costs_ms=StepCosts(
            data=0.0,
            forward=FORWARD_MS,
            backward=BACKWARD_MS + mean_late / accumulation,
            other=0.0,
            sync_backward=0.0,
            forward_comm=0.0,
            backward_comm=0.0,
            exposed_wait=parts["exposed_wait"],
            exposed_transfer=parts["exposed_transfer"],
            exposed_copy=parts["exposed_copy"],
            optimizer=OPTIMIZER_MS,
            accumulation=accumulation,
            syncs=syncs,
        ),
        contention_ms=None,
        wrapper_ms=None,
        reference=None,
        speedup=None,
        efficiency=None,
        pop=None,
        waterfall_ms=None,
        clock_uncertainty_ms=0.0,
        straggler=None,
        stragglers=(),
        ranks=tuple(
            RankResult(
                rank,
                rank * nodes // dp,
                "",
                20,
                step,
                parts | {"backward": parts["backward"] - mean_late + late.get(rank, 0.0)},
            )
            for rank in range(dp)
        ),
        notes=(),
        lateness=Lateness({rank: late.get(rank, 0.0) for rank in range(dp)}, passing)
        if dp > 1
        else None,
        gradient_element_bytes=4.0,
    )


def _size(dp, nbytes, gbit):
    time = sum(allreduce_ms(dp, nbytes, gbit))
    algbw = nbytes / time / 1e6
    return AllReduceSize(nbytes, 9, time, time, time, algbw, algbw * 2 * (dp - 1) / dp)


def summary(*levels, per_node=1, cores=64, backend="gloo", cap_mb=25.0):
    """A study of these levels."""
    environment = {
        "backend": backend,
        "local_world_size": per_node,
        "cores": cores,
        "threads_per_rank": 1,
        "device_type": "cpu",
    }
    return Summary(
        schema_version=1,
        run=RunResult(
            run_id="made",
            status="complete",
            created="",
            profiler_version="",
            world_size=max(one.dp for one in levels),
            nodes=max(one.nodes for one in levels),
            partial=False,
            settings={"bucket_cap_mb": cap_mb},
            environment={"0": environment},
            statistics_unit="",
        ),
        levels=tuple(levels),
        findings=(),
        notes=(),
    )
