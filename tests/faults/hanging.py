"""A model of which rank 1 stops to take part in step 6, in the way that HANG names."""

import os
import time

import torch
import torch.distributed as dist

from ddp_profiler.workload import Workload

HOW = os.environ["HANG"]


class Model(torch.nn.Module):
    """Two layers; on rank 1 something happens in the backward of step 6."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        self.calls = 0

    def forward(self, x):
        out = self.layers(x)
        self.calls += 1
        if self.calls == 6 and os.environ["RANK"] == "1":
            if HOW == "skip":
                raise_late = out.detach().requires_grad_()
                return raise_late * 1.0
            out.register_hook(endless if HOW == "loop" else unequal)
        return out


def endless(_gradient):
    while True:
        time.sleep(0.01)


def unequal(_gradient):
    dist.all_reduce(torch.ones(1000))


def make(settings):
    return Workload(
        name="hanging",
        module=Model(),
        dataset=torch.utils.data.TensorDataset(torch.randn(256, 8)),
        inputs=lambda batch: (batch[0],),
        loss=lambda out, batch: out.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
