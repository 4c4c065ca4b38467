"""Counts the exit codes of ranks that raise in mid-backward while the adapter is attached.

    python exit_codes.py MODE COUNT

MODE is ``plain`` (no adapter), ``leave`` (adapter, ended as the worker ends itself) or
``bare`` (adapter, ordinary interpreter exit). Each trial forks two ranks; rank 1 raises in
the fourth backward, after the first bucket was handed over. Prints {exit code: count} of
the rank that raised, as JSON. Forking spares the import of torch in every trial.
"""

import collections
import contextlib
import json
import os
import sys
import tempfile
import time

import torch
import torch._dynamo  # DDP imports it: once here, not in every trial
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_profiler.measure import ddp_adapter
from ddp_profiler.measure.clock import HostTimeline
from ddp_profiler.measure.leave import leave
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.schema import Variant


class Bomb(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Bomb.armed:
            raise ValueError("planted in mid-backward")
        return gradient


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x):
        return self.linear(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(*[Layer() for _ in range(4)])
        self.second = nn.Sequential(*[Layer() for _ in range(4)])

    def forward(self, x):
        return self.second(Bomb.apply(self.first(x)))


def train(rank, store, mode):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    ddp = DDP(Net(), bucket_cap_mb=0.07)
    recorder = Recorder(HostTimeline(), lambda columns: None)
    recorder.begin_block(0, 0, 0, Variant.INSTRUMENTED)
    if mode != "plain":
        ddp_adapter.DdpAdapter(ddp, recorder).attach()
    for step in range(6):
        Bomb.armed = step == 3 and rank == 1
        recorder.begin_micro_step(step, 0)
        ddp(torch.randn(16, 128)).square().mean().backward()


def child(rank, store, mode):
    """Ends the process: by ``leave`` as the worker does, or by an uncaught exception."""
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        if mode == "leave":
            try:
                train(rank, store, mode)
            except Exception:
                leave(1)
        else:
            train(rank, store, mode)


def main():
    mode, count = sys.argv[1], int(sys.argv[2])
    codes = collections.Counter()
    for trial in range(count):
        store = os.path.join(tempfile.mkdtemp(), f"store{trial}")
        pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, 1)
                os.dup2(devnull, 2)
                child(rank, store, mode)
                sys.exit(0)
            pids.append(pid)
        _, status = os.waitpid(pids[1], 0)
        codes[os.waitstatus_to_exitcode(status)] += 1
        deadline = time.monotonic() + 10
        while os.waitpid(pids[0], os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pids[0], 9)
                os.waitpid(pids[0], 0)
                break
            time.sleep(0.01)
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
