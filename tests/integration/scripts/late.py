"""Trains a small model; rank 1's forward takes 60 ms longer than that of the others."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


class Late(nn.Linear):
    """A layer that sleeps on rank 1."""

    def forward(self, x):
        time.sleep(0.06 if dist.get_rank() == 1 else 0.0)
        return super().forward(x)


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(Late(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.ones(16 * 4, 16), batch_size=4):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
print("trained", flush=True)
dist.destroy_process_group()
