"""Trains with a loss of the wrong scale, as people do it by mistake; it knows of no profiler.

The first word says what is wrong with the loss (``right``: nothing), further words what else the
loop does. Prints its losses and a digest of its final weights.
"""

import contextlib
import hashlib
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_  # by name, where nobody sees it being called
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

MICRO_BATCH = 5
ACCUMULATION = 3


class Batch(NamedTuple):
    """A type of the script's own."""

    x: torch.Tensor
    y: torch.Tensor


def batch_of(samples):
    return Batch(*map(torch.stack, zip(*samples, strict=True)))


class Net(nn.Module):
    """Has a tied and a frozen weight, and a layer that no loss depends on."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(self.frozen(x))))))


def batches_of(steps):
    generator = torch.Generator().manual_seed(1)
    count = MICRO_BATCH * ACCUMULATION * steps * dist.get_world_size()
    x = torch.randn(count, 16, generator=generator)
    data = TensorDataset(x, torch.randint(0, 4, (count,), generator=generator))
    sampler = DistributedSampler(data)
    return DataLoader(data, batch_size=MICRO_BATCH, sampler=sampler, collate_fn=batch_of)


def loss_of(mistake, output, y):
    reduction = "sum" if mistake == "sum" else "mean"
    loss = cross_entropy(output, y, reduction=reduction)
    if mistake not in ("accumulation", "both"):
        loss = loss / ACCUMULATION
    if mistake in ("dp", "both"):
        loss = loss * dist.get_world_size()
    return loss


def train(mistake, *also, steps=11):
    torch.manual_seed(0)
    model = DDP(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled="scaler" in also)
    losses = []
    for number, (x, y) in enumerate(batches_of(steps)):
        ends = number % ACCUMULATION == ACCUMULATION - 1
        with contextlib.nullcontext() if ends else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in also):
                loss = loss_of(mistake, model(x), y)
            scaler.scale(loss).backward()
        losses.append(loss.item())
        if ends:
            if "clip" in also:
                if "scaler" in also:
                    scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model, losses


def main(words):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, losses = train(*words)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    if dist.get_rank() == 0:
        print(hashlib.sha256(weights).hexdigest(), losses, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
