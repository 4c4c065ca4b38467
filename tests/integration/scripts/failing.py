"""Trains, and fails on rank 1 in step 6: HOW is raise, exit or sigterm."""

import os
import signal
import sys

import torch
import torch.distributed as dist
import train
from torch.nn.parallel import DistributedDataParallel as DDP


def after(step):
    if step != 5 or dist.get_rank() != 1:
        return
    if sys.argv[1] == "raise":
        raise ValueError("planted")
    if sys.argv[1] == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGTERM)


torch.set_num_threads(1)
dist.init_process_group("gloo")
train.simple_loop(DDP(train.mlp()), after=after)
