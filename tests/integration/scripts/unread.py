"""Trains, closes stderr in the middle of it, and ends with a code of its own."""

import sys

import torch
import torch.distributed as dist
import train
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model, losses = train.simple_loop(
    DDP(train.mlp()), after=lambda step: sys.stderr.close() if step == 7 else None
)
print(train.digest(model), losses, flush=True)
dist.destroy_process_group()
sys.exit(3)
