"""Trains small models with and without the adapter, in one launch; prints a JSON line per case.

Run by test_adapter_safety.py: torchrun --nproc_per_node=N adapter_cases.py [CASE...]
"""

import contextlib
import copy
import hashlib
import json
import pickle
import struct
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from ddp_profiler.measure import collectives, ddp_adapter
from ddp_profiler.measure.backward import BackwardWatch
from ddp_profiler.measure.clock import HostTimeline
from ddp_profiler.measure.leave import leave
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.schema import SpanKind, Variant
from tests.integration.sync_norm import SyncNorm

STEPS = 6


class Net(nn.Module):
    def __init__(self, *, batch_norm=False, unused=False, norm=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norm = norm or (nn.BatchNorm1d(64) if batch_norm else nn.Identity())
        self.spare = nn.Linear(64, 64) if unused else None

    def forward(self, x, use_spare=False):
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if i == 2:
                x = self.norm(x)
        return self.spare(x) if use_spare else x


def build(**options):
    torch.manual_seed(1)
    names = ("batch_norm", "unused", "norm")
    net = Net(**{k: options.pop(k) for k in names if k in options})
    return DDP(net, bucket_cap_mb=0.02, **options)


def digest(module):
    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        found.update(name.encode())
        found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class Observed:
    """Attaches to a DDP for a `with` block, or does nothing."""

    def __init__(self, mechanism):
        self.columns = []
        self.recorder = Recorder(HostTimeline(), self.columns.append)
        self.mechanism = mechanism
        self.watch = BackwardWatch(self.recorder) if mechanism else None
        self.adapter = None
        self.norms = []

    @contextlib.contextmanager
    def __call__(self, ddp):
        if self.mechanism is None:
            yield
            return
        self.adapter = adapter = ddp_adapter.DdpAdapter(ddp, self.recorder, self.mechanism)
        # As dear as it gets: reading the gradients changes nothing either.
        adapter.norms.wanted = True
        self.recorder.begin_block(0, 0, 0, Variant.INSTRUMENTED)
        adapter.attach()
        try:
            yield
        finally:
            self.adapter = None
            adapter.detach()
            self.recorder.flush()

    def take_norms(self, ddp):
        """Keeps by how much the norm of the reduced gradient is off what DDP has left."""
        if self.adapter is None:
            return
        before = len(self.recorder._spans)
        self.adapter.norms.take()
        taken = {span[2]: span[8] for span in self.recorder._spans[before:]}
        if taken:
            bits = struct.pack("<q", taken[SpanKind.REDUCED_GRADIENT_NORM])
            there = sum(
                p.grad.double().square().sum() for p in ddp.parameters() if p.grad is not None
            )
            self.norms.append(abs(struct.unpack("<d", bits)[0] / float(there) - 1))

    def kinds(self):
        return [kind for columns in self.columns for kind in columns["kind"]]


def train(
    ddp,
    observed,
    *,
    steps=STEPS,
    uneven=False,
    no_sync=False,
    use_spare=None,
    call=None,
):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    call = ddp if call is None else call
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps + 2 * dist.get_rank() * uneven):
        for micro in range(2 if no_sync else 1):
            x = torch.randn(8, 64, generator=generator)
            quiet = no_sync and micro == 0
            with ddp.no_sync() if quiet else contextlib.nullcontext():
                observed.recorder.begin_micro_step(step, micro)
                observed.recorder.phase = SpanKind.FORWARD
                y = call(x) if use_spare is None else call(x, use_spare=use_spare(step))
                loss = y.square().mean()
                if observed.watch:
                    observed.watch.watch(loss)
                observed.recorder.phase = SpanKind.BACKWARD
                loss.backward()
                observed.recorder.phase = None
                observed.take_norms(ddp)
        if not uneven:
            # Outside forward and backward: of no interest.
            dist.all_reduce(torch.zeros(1))
        optimizer.step()
        optimizer.zero_grad()


def simple(observed, *, no_sync=False, use_spare=None, **options):
    ddp = build(**options)
    with observed(ddp):
        train(ddp, observed, no_sync=no_sync, use_spare=use_spare)
    return ddp


def with_hook(observed, state, hook, **options):
    with ddp_adapter.installed() if observed.mechanism else contextlib.nullcontext():
        ddp = build(**options)
        ddp.register_comm_hook(state, hook)
        with observed(ddp):
            train(ddp, observed)
    return ddp


def fp16_compress(observed):
    return with_hook(observed, None, default_hooks.fp16_compress_hook)


def power_sgd(observed):
    # One bucket: with several, PowerSGD itself deadlocks gloo.
    torch.manual_seed(3)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, warm_start=True
    )
    ddp = None
    with ddp_adapter.installed() if observed.mechanism else contextlib.nullcontext():
        torch.manual_seed(1)
        ddp = DDP(Net(), bucket_cap_mb=100)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        with observed(ddp):
            train(ddp, observed)
    return ddp


def reentrant(observed):
    """Checkpoints that run backward inside backward; DDP finishes in an inner pass."""
    torch.manual_seed(1)
    net = Net()
    layers = list(net.layers)

    def forward(x):
        x = layers[0](x)
        for layer in layers[1:]:
            x = checkpoint(lambda v, layer=layer: torch.relu(layer(v)), x, use_reentrant=True)
        return x

    net.forward = forward
    ddp = DDP(net, bucket_cap_mb=0.02)
    with observed(ddp):
        train(ddp, observed)
    return ddp


class GatherNorm(nn.Module):
    """Gathers in forward only, as torch's own on gloo; and pickles a function."""

    def forward(self, x):
        assert pickle.loads(pickle.dumps(dist.all_gather)) is dist.all_gather
        means = [torch.empty(x.shape[1]) for _ in range(dist.get_world_size())]
        dist.all_gather(means, x.detach().mean(0))
        return x - torch.stack(means).mean(0)


class RaisingNorm(nn.Module):
    """Issues a collective that raises."""

    def forward(self, x):
        try:
            dist.all_reduce("no tensor")
        except TypeError:
            return x
        raise AssertionError("an error was swallowed")


def fp16_with_norm(observed):
    return with_hook(observed, None, default_hooks.fp16_compress_hook, norm=SyncNorm())


def hooked_before(observed):
    """A hook that the adapter never saw: its collectives cannot be told from a module's."""
    ddp = build(norm=SyncNorm())
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with observed(ddp):
        train(ddp, observed)
    return ddp


def compile_norm(observed):
    """Compiled as a whole: a graph break at a collective would raise."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    ddp = DDP(torch.compile(Net(norm=CompiledNorm()), backend="aot_eager", fullgraph=True))
    with observed(ddp):
        train(ddp, observed)
    return ddp


class CompiledNorm(nn.Module):
    """Issues a collective that Dynamo knows how to compile."""

    def forward(self, x):
        with torch.no_grad():
            total = x.mean(0)
            dist.all_reduce(total)
        return x - total / dist.get_world_size()


def join(observed):
    ddp = build()
    with observed(ddp), ddp.join():
        train(ddp, observed, uneven=True)
    return ddp


def deep_copy(observed):
    ddp = build()
    with observed(ddp):
        train(ddp, observed, steps=3)
        twin = copy.deepcopy(ddp)
        seen = len(observed.recorder._open)
        train(twin, Observed(None), steps=3)
        assert len(observed.recorder._open) == seen, "a copy reports to the original's recorder"
        train(ddp, observed, steps=3)
    return nn.ModuleList([ddp, twin])


def device_mesh(observed):
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ddp = DDP(Net(), bucket_cap_mb=0.02, device_mesh=mesh)
    with observed(ddp):
        train(ddp, observed)
    return ddp


def compile_ddp(observed):
    torch._dynamo.reset()
    torch.manual_seed(1)
    # Dynamo refuses caps below DDP's first bucket of 1 MB.
    ddp = DDP(Net(batch_norm=True))
    with observed(ddp):
        train(ddp, observed, call=torch.compile(ddp, backend="aot_eager"))
    return ddp


def compile_module(observed):
    torch._dynamo.reset()
    torch.manual_seed(1)
    ddp = DDP(torch.compile(Net(), backend="aot_eager"))
    with observed(ddp):
        train(ddp, observed)
    return ddp


CASES = {
    "plain": simple,
    "no_sync": lambda o: simple(o, no_sync=True),
    "static_graph": lambda o: simple(o, static_graph=True),
    "find_unused_parameters": lambda o: simple(
        o, unused=True, find_unused_parameters=True, use_spare=lambda step: step % 2 == 0
    ),
    "gradient_as_bucket_view": lambda o: simple(o, gradient_as_bucket_view=True),
    "batch_norm": lambda o: simple(o, batch_norm=True),
    "fp16_compress": fp16_compress,
    "power_sgd": power_sgd,
    "checkpoint_reentrant": reentrant,
    "join": join,
    "deepcopy": deep_copy,
    "device_mesh": device_mesh,
    "compile_ddp": compile_ddp,
    "compile_module": compile_module,
    "sync_norm": lambda o: simple(o, norm=SyncNorm(), no_sync=True),
    "sync_norm_async": lambda o: simple(o, norm=SyncNorm(async_op=True)),
    "gather_norm": lambda o: simple(o, norm=GatherNorm()),
    "raising_norm": lambda o: simple(o, norm=RaisingNorm()),
    "fp16_with_norm": fp16_with_norm,
    "hooked_before": hooked_before,
    "compile_norm": compile_norm,
}
OWN_HOOK = {"fp16_compress", "power_sgd", "fp16_with_norm", "hooked_before"}


def functions():
    """What the adapter may replace, as torch has it."""
    owned = [(DDP, "_sync_buffers"), (DDP, "register_comm_hook"), (dist.Work, "wait")]
    owned += [(dist, name) for name in collectives.FUNCTIONS]
    return [owner.__dict__[name] for owner, name in owned]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    original = functions()
    for name in sys.argv[1:] or CASES:
        without = digest(CASES[name](Observed(None)))
        for mechanism in ddp_adapter.probe():
            if mechanism == ddp_adapter.COMM_HOOK and name in OWN_HOOK:
                continue
            observed = Observed(mechanism)
            trained = CASES[name](observed)
            kinds = observed.kinds()
            seen = len(kinds)
            parts = list(trained) if isinstance(trained, nn.ModuleList) else [trained]
            weights = digest(trained)
            train(parts[0], Observed(None), steps=1)
            observed.recorder.flush()
            result = {
                "case": name,
                "mechanism": mechanism,
                "rank": dist.get_rank(),
                "identical": weights == without,
                "gradients": kinds.count(SpanKind.GRADIENT),
                "broadcasts": kinds.count(SpanKind.FORWARD_COMM),
                "in_backward": kinds.count(SpanKind.BACKWARD_COMM),
                "bookkeeping": kinds.count(SpanKind.BOOKKEEPING),
                "local_ends": kinds.count(SpanKind.LOCAL_BACKWARD_END),
                "buckets": len(parts[0].reducer._get_zeros_like_grad_buckets()),
                "restored": functions() == original and not ddp_adapter.is_installed(),
                "silent_after": len(observed.kinds()) == seen,
                "norms": observed.norms,
            }
            # One write: lines of several ranks must not mix.
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
            dist.barrier()
    dist.destroy_process_group()
    leave(0)  # Torch's own threads could abort the interpreter's end.


if __name__ == "__main__":
    main()
