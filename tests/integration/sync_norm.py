"""A stand-in for synchronised batch norm, since torch's own needs a GPU; and a workload of it.

    --model tests.integration.sync_norm:make:rank=1,forward_ms=15,backward_ms=25

One rank comes late to the collective in forward and in backward by a set time, so that the
others wait there for as long. Sleeping elsewhere (``rest_ms``, on all ranks) is no communication.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from ddp_profiler.workload import Workload

WIDTH = 256


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        layer.come("forward")
        sums = torch.stack([x.sum(0), x.square().sum(0)])
        layer.reduce(sums)
        count = len(x) * dist.get_world_size(layer.process_group)
        mean = sums[0] / count
        scale = (sums[1] / count - mean.square() + 1e-5).rsqrt()
        y = (x - mean) * scale
        ctx.layer, ctx.count = layer, count
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, upstream):
        y, scale = ctx.saved_tensors
        ctx.layer.come("backward")
        sums = torch.stack([upstream.sum(0), (upstream * y).sum(0)])
        ctx.layer.reduce(sums)
        mean, slope = sums / ctx.count
        return (upstream - mean - y * slope) * scale, None


class SyncNorm(nn.Module):
    """Normalises over all ranks' samples: all-reduces in forward and in backward."""

    def __init__(self, rank=0, forward_ms=0.0, backward_ms=0.0, rest_ms=0.0, async_op=False):
        super().__init__()
        self.process_group = None
        self.rank, self.rest_ms, self.async_op = rank, rest_ms, async_op
        self.late_ms = {"forward": forward_ms, "backward": backward_ms}

    def come(self, phase):
        time.sleep(self.rest_ms / 1000)
        if dist.get_rank(self.process_group) == self.rank:
            time.sleep(self.late_ms[phase] / 1000)

    def reduce(self, sums):
        work = dist.all_reduce(sums, group=self.process_group, async_op=self.async_op)
        if self.async_op:
            work.wait()

    def forward(self, x):
        return _Normalise.apply(x, self)


def make(settings):
    options = dict(settings.options)
    norm = SyncNorm(
        rank=int(options.get("rank", 0)),
        async_op=options.get("async") == "yes",
        **{k: float(options.get(k, 0)) for k in ("forward_ms", "backward_ms", "rest_ms")},
    )
    features = torch.randn(512, WIDTH)
    return Workload(
        name="sync-norm",
        module=nn.Sequential(
            nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        ),
        dataset=TensorDataset(features, features.sum(1, keepdim=True)),
        inputs=lambda batch: (batch[0],),
        loss=lambda output, batch: mse_loss(output, batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    )
