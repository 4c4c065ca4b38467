"""What the scripts of this folder share: a model, data that differ by rank, a start and an end."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

__all__ = ["DDP", "STEPS", "batches", "dist", "mlp", "nn", "run", "torch", "train"]

STEPS = 14
WIDTH = 256
MICRO_BATCH = 8


def mlp(layers=4):
    blocks = [m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*blocks)


def batches(size=MICRO_BATCH):
    """Endless batches, others on each rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    while True:
        x = torch.randn(size, WIDTH, generator=generator)
        yield x, torch.roll(x, 1, dims=1)


def train(call, optimizers, before_step=lambda: None, size=MICRO_BATCH):
    """Trains with ``call``; ``before_step`` is called between backward and the optimizers."""
    data = batches(size)
    for _ in range(STEPS):
        x, y = next(data)
        nn.functional.mse_loss(call(x), y).backward()
        before_step()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def run(main, way):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    main(way)
    dist.destroy_process_group()
