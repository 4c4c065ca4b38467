"""Starts its ranks itself, without a launcher; they observe themselves by a line."""

import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_profiler


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(train.mlp())
    # Once to its end, and once to that of the process.
    with ddp_profiler.profile(steps=4, warmup=2, out=Path(folder) / "block", show=False) as run:
        train.simple_loop(model)
    assert (run.summary is None) == (rank == 1)
    assert run.folder == Path(folder) / "block"
    ddp_profiler.attach(steps=4, warmup=2, out=Path(folder) / "line")
    train.simple_loop(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    mp.spawn(work, (sys.argv[1],), nprocs=2)
    print("trained")
