"""A model whose gradient noise scale is known: the gradient of a sample is the sample itself."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_profiler.workload import Workload, WorkloadSettings

SIZE, SCALE, SAMPLES = 1000, 40.0, 16384


def samples():
    """Samples x = mean + noise, with trace of the covariance / |mean|^2 = SCALE or so."""
    generator = torch.Generator().manual_seed(7)
    mean = torch.randn(SIZE, generator=generator)
    noise = torch.randn(SAMPLES, SIZE, generator=generator)
    return mean + noise * (SCALE * float(mean.square().mean())) ** 0.5


def truth():
    """The noise scale of drawing from these samples."""
    x = samples().double()
    return float(x.var(0).sum() / x.mean(0).square().sum())


class Dot(nn.Module):
    """w . x, so that its gradient is x whatever w is; in two buckets."""

    def __init__(self):
        super().__init__()
        self.halves = nn.ParameterList(nn.Parameter(torch.zeros(SIZE // 2)) for _ in range(2))

    def forward(self, x):
        return x @ torch.cat(list(self.halves))


def make(settings: WorkloadSettings) -> Workload:
    return Workload(
        name="noise",
        module=Dot(),
        dataset=TensorDataset(samples()),
        inputs=lambda batch: (batch[0],),
        loss=lambda output, batch: output.mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )
