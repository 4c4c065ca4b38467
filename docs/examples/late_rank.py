"""Trains while rank 0 reports the loss of each step to a server, at once or in the background.

The example "straggler" of docs/reading-a-report.md. The server takes 40 ms to answer, by
sleeping, as one at the other end of a network might.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ANSWER_S = 0.040


def report(loss: float) -> None:
    """Sends a loss to the server and waits for its answer."""
    time.sleep(ANSWER_S)


def main() -> None:
    """Trains for two epochs of 40 steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-background", action="store_true")
    in_background = parser.parse_args().in_background
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)),
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    x = torch.randn(5120, 256)
    data = TensorDataset(x, x.mean(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    with ThreadPoolExecutor(max_workers=1) as background:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                loss = mse_loss(ddp(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if dist.get_rank() == 0 and in_background:
                    background.submit(report, loss.item())
                elif dist.get_rank() == 0:
                    report(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
