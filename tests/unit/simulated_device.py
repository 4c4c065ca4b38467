"""A simulated GPU: streams, events, kernels of known length, and training steps that use them.

The host launches and runs ahead; streams work off what they are given, in order, and wait for
each other as CUDA's do. What torch does for a real GPU around the code under test (autograd's
launches, the streams of NCCL, the callbacks of its futures) is done here by hand; loop, adapter,
autograd callbacks, recorder and timeline are the product's own.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from ddp_profiler.measure import ddp_adapter
from ddp_profiler.measure.backward import queue_callback
from ddp_profiler.measure.clock import DeviceTimeline
from ddp_profiler.measure.ddp_adapter import _ObservedGroup
from ddp_profiler.measure.loop import LevelRun
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.schema import SPAN_COLUMNS, LevelSettings
from ddp_profiler.workload import Workload
from ddp_profiler.workload.plant import Planter

MS = 1_000_000
US = 1_000
RESOLUTION_NS = 500
"""Of ``elapsed_time``, as CUDA's documentation has it."""
NULL = np.iinfo(np.int64).min


class Stream:
    """Work in order; ``free_ns`` is when all that it was given is done."""

    def __init__(self):
        self.free_ns = 0


class Gpu:
    """A device with streams, and the host that drives it.

    Args:
        rate: Device time that passes in a unit of host time.
        launch_ns: What a launch costs the host.

    Attributes:
        host_ns: The host's clock.
        current: The stream that events are recorded on.
        kernels: What ran: name, begin and end in ns.
        waits: How often the host has waited for the device.
        events: Events made so far.
    """

    def __init__(self, rate=1.0, launch_ns=5 * US):
        self.host_ns = 7_000 * MS
        self.rate = rate
        self.launch_ns = launch_ns
        self.compute, self.comm = Stream(), Stream()
        self.current = self.compute
        self.kernels = []
        self.waits = 0
        self.events = 0

    def clock(self):
        return self.host_ns

    def make_event(self):
        self.events += 1
        return Event(self)

    def launch(self, name, length_ns, stream=None):
        """Puts a kernel into a stream; the host goes on at once."""
        stream = stream or self.current
        self.host_ns += self.launch_ns
        begin = max(stream.free_ns, self.host_ns)
        stream.free_ns = begin + length_ns
        self.kernels.append((name, begin, stream.free_ns))

    def wait_for(self, waiting, other):
        """What ``waiting`` is given from here on comes after what ``other`` has been given."""
        waiting.free_ns = max(waiting.free_ns, other.free_ns)

    def synchronize(self):
        self.wait_until(max(self.compute.free_ns, self.comm.free_ns))

    def wait_until(self, time_ns):
        if time_ns > self.host_ns:
            self.waits += 1
            self.host_ns = time_ns

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Event:
    """Like ``torch.cuda.Event(enable_timing=True)``."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.at_ns = None

    def record(self):
        self.gpu.host_ns += US
        self.at_ns = max(self.gpu.current.free_ns, self.gpu.host_ns)

    def query(self):
        return self.at_ns is None or self.at_ns <= self.gpu.host_ns

    def synchronize(self):
        if self.at_ns is not None:
            self.gpu.wait_until(self.at_ns)

    def elapsed_time(self, end):
        for event in (self, end):
            if event.at_ns is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if not event.query():
                raise RuntimeError("CUDA error: device not ready")
        ticks = round((end.at_ns - self.at_ns) * self.gpu.rate / RESOLUTION_NS)
        return float(np.float32(ticks * RESOLUTION_NS / MS))


@dataclass
class Plan:
    """Lengths in ns of the kernels of one micro-step.

    Attributes:
        copy_in: Copy of the batch to the device.
        forward: Of each layer.
        backward: Of each layer.
        reduce: AllReduce of each bucket, once all ranks are there.
        copy_out: Copies from buckets to gradients, after the last AllReduce.
        optimizer: The optimizer.
        peer_late: How much later than this rank the other one hands each bucket over.
    """

    copy_in: int = 1 * MS
    forward: tuple[int, ...] = (3 * MS, 4 * MS, 5 * MS)
    backward: tuple[int, ...] = (6 * MS, 7 * MS, 8 * MS)
    reduce: int = 4 * MS
    copy_out: int = 500 * US
    optimizer: int = 2 * MS
    peer_late: int = 0


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.layer, ctx.shape = layer, weight.shape
        layer.gpu.launch(f"forward {layer.number}", layer.plan.forward[layer.number])
        return x * 1.0

    @staticmethod
    def backward(ctx, upstream):
        layer = ctx.layer
        layer.gpu.launch(f"backward {layer.number}", layer.plan.backward[layer.number])
        return upstream, torch.ones(ctx.shape), None


class Layer(nn.Module):
    def __init__(self, gpu, plan, number):
        super().__init__()
        self.gpu, self.plan, self.number = gpu, plan, number
        # 1 MiB: a bucket each.
        self.weight = nn.Parameter(torch.zeros(2**18))

    def forward(self, x):
        return _Kernels.apply(x, self.weight, self)


class Samples(torch.utils.data.Dataset):
    def __init__(self, gpu, plan):
        self.gpu, self.plan = gpu, plan

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.gpu.launch("copy in", self.plan.copy_in)
        return torch.ones(2)


class Optimizer(torch.optim.SGD):
    """Launches a kernel and returns: the host does not wait for it."""

    def __init__(self, parameters, gpu, plan):
        super().__init__(parameters, lr=0.1)
        self.gpu, self.plan = gpu, plan

    def step(self, closure=None):
        self.gpu.launch("optimizer", self.plan.optimizer)


class Group:
    """What NCCL does for DDP: AllReduce on a stream of its own, which waits for compute."""

    def __init__(self, gpu, plan, buckets):
        self.gpu, self.plan, self.buckets = gpu, plan, buckets
        self.number = 0
        self.ends = []

    def rank(self):
        return 0

    def size(self):
        return 2

    def _get_backend_name(self):
        return "nccl"

    def allreduce(self, tensors, opts):
        gpu, plan = self.gpu, self.plan
        gpu.wait_for(gpu.comm, gpu.compute)
        # The kernel begins here and spins until the other rank is there.
        gpu.launch(f"reduce {self.number}", plan.peer_late + plan.reduce, gpu.comm)
        self.number += 1
        if self.number % self.buckets == 0:
            # DDP queues its own finalising one behind it.
            queue_callback(self._finish)
        done = Future()
        done.set_result(tensors)
        return _create_work_from_future(done)

    def broadcast(self, tensors, opts):
        done = Future()
        done.set_result(tensors)
        return _create_work_from_future(done)

    def _finish(self):
        """DDP waits for its collectives, on the device only, and copies gradients back."""
        self.gpu.wait_for(self.gpu.compute, self.gpu.comm)
        self.gpu.launch("copy out", self.plan.copy_out)

    def add_done_callback(self, future, callback):
        """As torch does it: at once, on a stream that waits for the collective."""
        side = Stream()
        self.gpu.wait_for(side, self.gpu.comm)
        with self.gpu.on(side):
            callback(future)


class Rank:
    """The product's loop around a model whose kernels run on a simulated device.

    Args:
        gpu: The device.
        plan: Its kernels.
        monkeypatch: Puts the device's way of calling back into the adapter.
        accumulation: Micro-steps of a step.
    """

    def __init__(self, gpu, plan, monkeypatch, accumulation=1):
        self.gpu, self.plan, self.batches = gpu, plan, []
        self.timeline = DeviceTimeline(gpu.make_event, gpu.clock)
        self.recorder = Recorder(self.timeline, self.batches.append)
        layers = nn.Sequential(*(Layer(gpu, plan, i) for i in range(len(plan.forward))))
        workload = Workload(
            name="simulated",
            module=layers,
            dataset=Samples(gpu, plan),
            inputs=lambda batch: (batch,),
            loss=self._loss,
            optimizer=lambda parameters: Optimizer(parameters, gpu, plan),
        )
        level = LevelSettings("dp1", 1, 1, accumulation, "packed", (0,))
        self.run = LevelRun(
            level,
            workload,
            self.recorder,
            dist.group.WORLD,
            0,
            torch.device("cpu"),
            bucket_cap_mb=1,
            precision="fp32",
            seed=0,
            planter=Planter((), 0),
        )
        group = Group(gpu, plan, len(plan.forward))
        adapter = self.run.adapter
        adapter._group = _ObservedGroup(group, self.recorder, adapter.norms)
        self.group = group
        self._warm_up(self.run.ddp)
        monkeypatch.setattr(ddp_adapter, "_add_done_callback", group.add_done_callback)

    def _loss(self, output, batch):
        return output.sum()

    def _warm_up(self, ddp):
        """DDP makes its buckets anew at the second step."""
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()

    def steps(self, variant, count):
        self.recorder.begin_block(0, 0, len(self.batches), variant)
        self.run.run_block(count, variant)

    def columns(self):
        return {
            name: np.array(
                [NULL if v is None else v for batch in self.batches for v in batch[name]],
                dtype=np.int64,
            )
            for name, _ in SPAN_COLUMNS
        }
