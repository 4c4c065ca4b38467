"""The `train.py` of the documents: plain DDP; it knows nothing of a profiler."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS = 130
"""More than any of the documents' commands observes."""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)

    torch.manual_seed(0)
    x = torch.randn(options.batch_size * dist.get_world_size() * STEPS, 64)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    loader = DataLoader(data, batch_size=options.batch_size, sampler=DistributedSampler(data))
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
