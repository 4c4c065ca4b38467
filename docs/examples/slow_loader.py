"""Trains on images that come one by one from a slow storage, with or without loader workers.

The example "input-bound" of docs/reading-a-report.md. A read takes 4 ms here, by sleeping, as
one from a network drive would.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

READ_S = 0.004


class Images(Dataset[tuple[Tensor, int]]):
    """Noise in ten classes; each image is read when it is asked for."""

    def __len__(self) -> int:
        """Returns the number of images."""
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Reads an image and its class."""
        time.sleep(READ_S)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=generator), index % 10


def main() -> None:
    """Trains for 80 steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    workers = parser.parse_args().workers
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    images = Images()
    loader = DataLoader(
        images,
        batch_size=8,
        sampler=DistributedSampler(images),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    for step, (x, y) in enumerate(loader):
        if step == 80:
            break
        loss = cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
