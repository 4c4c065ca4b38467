"""A model whose memory and time a sample takes are known, and which fails on one rank alone."""

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_profiler.workload import Workload, WorkloadSettings

ELEMENTS = 500_000
"""Kept by forward for each sample; as many are made once more in forward, and in backward."""
MOST_ON_RANK_1 = 11


class Hungry(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ELEMENTS))
        # Broadcast at forward in steps that reduce, and in no others.
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        samples = len(x)
        time.sleep(0.03 + 0.005 * samples)
        if os.environ["RANK"] == "1" and samples > MOST_ON_RANK_1:
            torch.empty(1 << 46, dtype=torch.uint8)
        return (torch.ones(samples, ELEMENTS) * self.weight).mean(dim=1) + x


def make(settings: WorkloadSettings) -> Workload:
    return Workload(
        name="hungry",
        module=Hungry(),
        dataset=TensorDataset(torch.randn(64)),
        inputs=lambda batch: (batch[0],),
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )
