"""Rank 1 is late in steps 30 to 39 only; then everybody is killed in mid-training."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import train
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = int(sys.argv[1])
LATE_S = 0.1

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(train.mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = train.forever(train.loader())
for step in range(STEPS):
    x, y = next(batches)
    # Steps of some length, so that noise of the machine is small beside it.
    time.sleep(0.02 + LATE_S * (dist.get_rank() == 1 and 30 <= step < 40))
    train.loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
os.kill(os.getpid(), signal.SIGKILL)
