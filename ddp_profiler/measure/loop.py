"""The training loop that a study measures: one level, in plain and instrumented blocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_profiler.measure import backward, ddp_adapter, gradient_norms
from ddp_profiler.measure.backward import BackwardWatch
from ddp_profiler.measure.batches import Batches, number_of_samples
from ddp_profiler.measure.machine import MachineWatch
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.proof import prove_batch
from ddp_profiler.schema import (
    BatchProof,
    LevelFacts,
    LevelSettings,
    ParameterFacts,
    SpanKind,
    Variant,
)
from ddp_profiler.workload import Workload
from ddp_profiler.workload.plant import Planter

PRECISION_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes in, by precision; fp32 runs without autocast."""
_MAX_BLOCK_STEPS = 5


def block_plan(steps: int, *baselines: Variant) -> tuple[tuple[Variant, int], ...]:
    """Plans the blocks of a level so that slow drift of the machine cancels.

    Each variant gets ``steps`` steps in blocks of at most 5. Rounds of one block of each
    variant alternate their order (plain first, then plain last).

    >>> [(v.name, n) for v, n in block_plan(2)]
    [('PLAIN', 1), ('INSTRUMENTED', 1), ('INSTRUMENTED', 1), ('PLAIN', 1)]

    Args:
        steps: Steps of each variant.
        baselines: Variants to measure beside plain and instrumented steps.
    """
    rounds = max(min(steps, 2), -(-steps // _MAX_BLOCK_STEPS))
    variants = (Variant.PLAIN, Variant.INSTRUMENTED, *baselines)
    plan: list[tuple[Variant, int]] = []
    for i in range(rounds):
        size = steps // rounds + (i < steps % rounds)
        order = variants if i % 2 == 0 else variants[::-1]
        plan += [(variant, size) for variant in order]
    return tuple(plan)


class LevelRun:
    """One level on one of its ranks: model, DDP, optimizer, data and the measured loop.

    Args:
        level: What to measure.
        workload: Freshly built; equal on all ranks of the level.
        recorder: Takes the marks.
        group: The level's process group.
        group_rank: This rank's place in it.
        device: Where the model lives.
        bucket_cap_mb: Size limit of DDP's buckets in MB of 2**20 bytes.
        precision: fp32, bf16 or fp16.
        seed: Order of the samples.
        planter: Delays planted for tests.
        bucket_view: Keep gradients in the buckets.
        reduce_once: Reduce in the last micro-step only, also where the opposite is planted.
    """

    def __init__(
        self,
        level: LevelSettings,
        workload: Workload,
        recorder: Recorder,
        group: dist.ProcessGroup,
        group_rank: int,
        device: torch.device,
        *,
        bucket_cap_mb: float,
        precision: str,
        seed: int,
        planter: Planter,
        bucket_view: bool = False,
        reduce_once: bool = False,
    ) -> None:
        self.level = level
        self.workload = workload
        self.recorder = recorder
        self.group = group
        self.device = device
        self.step = 0
        self._planter = planter
        self._always_syncs = planter.always_syncs and not reduce_once
        self._loss_divisor = level.accumulation / planter.loss_factor(level.dp, level.accumulation)
        self._micro_step_s = 0.0
        workload.module.to(device)
        for module in workload.extra_modules:
            module.to(device)
        _talk_within(group, (workload.module, *workload.extra_modules))
        self.ddp = DDP(
            workload.module,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=workload.find_unused_parameters,
            gradient_as_bucket_view=bucket_view,
        )
        self._parameters = [
            p
            for module in (workload.module, *workload.extra_modules)
            for p in module.parameters()
            if p.requires_grad
        ]
        self.optimizer = workload.optimizer(self._parameters)
        self.batches = Batches(workload, level, group_rank, seed, device)
        self.adapter = ddp_adapter.DdpAdapter(self.ddp, recorder)
        self._watch = BackwardWatch(recorder)
        self._autocast_dtype = PRECISION_DTYPES.get(precision)
        self._scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None

    def run_block(
        self,
        steps: int,
        variant: Variant,
        progress: Callable[[], None] = lambda: None,
        beat: Callable[[], None] | None = None,
        machine: MachineWatch | None = None,
    ) -> None:
        """Trains ``steps`` optimizer steps and records them as one variant.

        All ranks of the level start together. ``progress`` is called after the block,
        ``beat`` after each step. ``machine`` watches the steps alone.
        """
        one_step = {
            Variant.PLAIN: self._plain_step,
            Variant.BARE: self._bare_step,
            Variant.NO_SYNC: self._no_sync_step,
            Variant.READY: self._no_sync_step,
            Variant.NOISE: self._noise_step,
        }.get(variant, self._instrumented_step)
        hooks = self._watch_parameters() if variant is Variant.READY else []
        if one_step != self._plain_step:
            self.adapter.attach()
        self.adapter.norms.wanted = variant is Variant.NOISE
        self._meet()
        if machine is not None:
            machine.begin()
            # Again, since one may have taken longer to read.
            self._meet()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        started = time.monotonic()
        begin = self.recorder.mark()
        for _ in range(steps):
            begin = one_step(begin)
            self.step += 1
            if beat is not None:
                beat()
        if machine is not None:
            machine.end()
        if steps:
            micro_steps = steps * self.level.accumulation
            self._micro_step_s = (time.monotonic() - started) / micro_steps
        # DDP broadcasts buffers in the forward after a sync micro-step. A baseline block must not
        # take that away from the first step of the block after it.
        self.ddp.require_forward_param_sync = True
        self.adapter.norms.wanted = False
        self.adapter.detach()
        for hook in hooks:
            hook.remove()
        self.recorder.flush()
        progress()

    def _meet(self) -> None:
        if self.level.dp > 1:
            dist.barrier(group=self.group)

    def facts(self) -> LevelFacts:
        """Returns what is known of the level after it has run."""
        reduced = self._reduced()
        # A list of zeros in the shape of DDP's own buckets: a count that no observer made.
        buckets = self.ddp.reducer._get_zeros_like_grad_buckets()
        sizes = tuple(int(bucket.buffer().nbytes) for bucket in buckets)
        return LevelFacts(
            id=self.level.id,
            parameters=sum(p.numel() for _, p in reduced),
            gradient_bytes=sum(p.nbytes for _, p in reduced),
            reduced=tuple(ParameterFacts(name, p.nbytes) for name, p in reduced),
            num_buckets=len(sizes),
            bucket_bytes=sizes,
            sources={
                "local_backward_end": backward.SOURCE,
                **self.adapter.sources,
            },
            notes=self.workload.notes,
        )

    def prove_batch(self) -> BatchProof:
        """Compares a step's gradients with those of one process that sees the global batch."""
        return prove_batch(
            self.ddp,
            self.workload,
            self.batches,
            self.level,
            self.group,
            self.device,
            scale_loss=self.scale_loss,
            syncs=self._syncs,
            time_per_micro_step_s=self._micro_step_s,
        )

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The model and what is trained beside it."""
        return (self.workload.module, *self.workload.extra_modules)

    def try_micro_step(self, batch: Any, *, sync: bool = False) -> None:
        """Runs forward and backward of a micro-batch on the device; nothing is recorded.

        Without ``sync`` no collective is issued, also none for buffers, so that ranks need not
        do the same.
        """
        self.ddp.require_forward_param_sync = sync
        context = contextlib.nullcontext() if sync else self.ddp.no_sync()
        with context:
            self._backward(self._loss(self.ddp, batch, self.workload.inputs(batch)))

    def try_optimizer(self) -> None:
        """Steps the optimizer once with gradients of 0: its state is then allocated.

        Gradients stay, and weights move by no more than weight decay, alike on all ranks.
        """
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.optimizer.step()

    def _reduced(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters that DDP reduces, each once, in the order of registration."""
        return [(n, p) for n, p in self.ddp.module.named_parameters() if p.requires_grad]

    def close(self) -> None:
        """Takes the observer out of DDP and flushes what is left."""
        self.adapter.detach()
        self.recorder.flush()

    def _syncs(self, micro_step: int) -> bool:
        """Tells whether gradients are reduced in a micro-step: in the last one only."""
        return self._always_syncs or micro_step == self.level.accumulation - 1

    def _sync_context(self, micro_step: int) -> AbstractContextManager[None]:
        if self._syncs(micro_step):
            return contextlib.nullcontext()
        context: AbstractContextManager[None] = self.ddp.no_sync()
        return context

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns a micro-step's share of the step's loss: the mean over micro-steps."""
        return loss / self._loss_divisor

    def _loss(self, module: nn.Module, batch: Any, inputs: tuple[Any, ...]) -> Tensor:
        with torch.autocast(
            self.device.type, dtype=self._autocast_dtype, enabled=self._autocast_dtype is not None
        ):
            loss = self.workload.loss(module(*inputs), batch)
        return self.scale_loss(loss)

    def _backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def _optimize(self) -> None:
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad()

    def _plain_step(self, begin: Any) -> Any:
        delay, step = self._planter.delay, self.step
        for micro_step in range(self.level.accumulation):
            batch = self.batches.next()
            delay("data", step)
            with self._sync_context(micro_step):
                inputs = self.workload.inputs(batch)
                loss = self._loss(self.ddp, batch, inputs)
                delay("forward", step)
                delay("between", step)
                self._plant_in_backward(loss, self._syncs(micro_step))
                self._backward(loss)
        self._optimize()
        delay("optimizer", step)
        end = self.recorder.mark()
        self.recorder.begin_micro_step(step, -1)
        self.recorder.step_span(begin, end)
        return end

    def _instrumented_step(self, begin: Any) -> Any:
        return self._observed_step(begin, self.ddp, self._sync_context, reduces=True)

    def _bare_step(self, begin: Any) -> Any:
        """A step of the model without DDP, for dp = 1."""
        return self._observed_step(begin, self.ddp.module, lambda _: contextlib.nullcontext())

    def _no_sync_step(self, begin: Any) -> Any:
        """Micro-steps without any reduction; the optimizer does not step, or ranks would part."""
        return self._observed_step(begin, self.ddp, lambda _: self.ddp.no_sync(), optimize=False)

    def _observed_step(
        self,
        begin: Any,
        module: nn.Module,
        context: Callable[[int], AbstractContextManager[None]],
        *,
        reduces: bool = False,
        optimize: bool = True,
    ) -> Any:
        recorder, mark, step = self.recorder, self.recorder.mark, self.step
        delay = self._planter.delay
        for micro_step in range(self.level.accumulation):
            recorder.begin_micro_step(step, micro_step)
            data_begin = begin if micro_step == 0 else mark()
            batch = self.batches.next()
            delay("data", step)
            forward_begin = mark()
            recorder.phase = SpanKind.FORWARD
            with context(micro_step):
                inputs = self.workload.inputs(batch)
                loss = self._loss(module, batch, inputs)
                delay("forward", step)
                recorder.phase = None
                forward_end = mark()
                delay("between", step)
                self._plant_in_backward(loss, reduces and self._syncs(micro_step))
                self._watch.watch(loss)
                backward_begin = mark()
                recorder.phase = SpanKind.BACKWARD
                self._backward(loss)
                recorder.phase = None
            backward_end = mark()
            recorder.span(SpanKind.DATA, data_begin, forward_begin)
            samples = number_of_samples(inputs)
            recorder.span(SpanKind.FORWARD, forward_begin, forward_end, samples=samples)
            recorder.span(SpanKind.BACKWARD, backward_begin, backward_end)
        optimizer_begin = mark()
        if optimize:
            self._optimize()
            delay("optimizer", step)
        else:
            self.optimizer.zero_grad()
        end = mark()
        recorder.span(SpanKind.OPTIMIZER, optimizer_begin, end)
        recorder.step_span(begin, end)
        return end

    def _noise_step(self, begin: Any) -> Any:
        """A step that takes the norms of its gradient and leaves the parameters as they are.

        At dp = 1 the first micro-step stands for the smaller of the two batches.
        """
        level, recorder, norms = self.level, self.recorder, self.adapter.norms
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        last = level.accumulation - 1
        for micro_step in range(level.accumulation):
            recorder.begin_micro_step(self.step, micro_step)
            batch = self.batches.next()
            # Never before the last one: what is handed over then is this rank's alone.
            with contextlib.nullcontext() if micro_step == last else self.ddp.no_sync():
                loss = self._loss(self.ddp, batch, self.workload.inputs(batch))
                recorder.phase = SpanKind.BACKWARD
                self._backward(loss)
                recorder.phase = None
            if level.dp == 1 and micro_step == 0 < last:
                # Its share of the sum, made the mean that the whole one is.
                share = scale / level.accumulation
                value, nbytes = gradient_norms.of_gradients(p for _, p in self._reduced())
                gradient_norms.record(
                    recorder,
                    SpanKind.LOCAL_GRADIENT_NORM,
                    value / share**2,
                    nbytes,
                    level.micro_batch,
                )
        norms.take(
            local_samples=level.micro_batch * level.accumulation,
            reduced_samples=level.global_batch,
            divisor=scale,
            reads_local=level.dp > 1,
        )
        self.optimizer.zero_grad()
        end = recorder.mark()
        recorder.begin_micro_step(self.step, -1)
        recorder.step_span(begin, end)
        return end

    def _watch_parameters(self) -> list[Any]:
        """Marks the moment at which each parameter's gradient is ready."""

        def ready(index: int) -> Callable[[Tensor], None]:
            return lambda _: self.recorder.point(SpanKind.GRADIENT_READY, index)

        return [
            parameter.register_post_accumulate_grad_hook(ready(index))  # type: ignore[no-untyped-call]
            for index, (_, parameter) in enumerate(self._reduced())
        ]

    def _plant_in_backward(self, loss: Tensor, syncs: bool) -> None:
        """Plants delays inside backward, for tests: at its begin, and after DDP's last work."""
        step, delay = self.step, self._planter.delay
        if self._planter.ms("backward", step):
            loss.register_hook(lambda _: delay("backward", step))  # type: ignore[no-untyped-call]
        if syncs and self._planter.ms("copy", step):
            # The engine works callbacks off in order. DDP queues its own, which waits and
            # copies, at the last bucket; one queued from the first is therefore the last.
            loss.register_hook(  # type: ignore[no-untyped-call]
                lambda _: backward.queue_callback(
                    lambda: backward.queue_callback(lambda: delay("copy", step))
                )
            )


def _talk_within(group: dist.ProcessGroup, modules: Iterable[nn.Module]) -> None:
    """Tells modules that communicate themselves whom to talk to: the ranks of the level.

    Such modules, as ``nn.SyncBatchNorm``, keep their group in ``process_group``, and None
    stands for all ranks of the launch, of which those outside the level would never answer.
    """
    for module in (inner for outer in modules for inner in outer.modules()):
        if getattr(module, "process_group", group) is None:
            # Past nn.Module's own setter, which is for tensors and modules.
            module.__dict__["process_group"] = group
