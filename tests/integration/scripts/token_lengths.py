"""Trains on sequences of known lengths: micro-step m of rank r has LENGTHS[m % 3] + 2 r places.

A mask says that the second sample has half as many tokens as places.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LENGTHS = (4, 8, 12)
STEPS = 10


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids, mask_name=None, labels=None, attention_mask=None):
        return self.head(self.embedding(ids)).sum(dim=1)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(Words())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
masked = "mask" in sys.argv
for step in range(STEPS):
    length = LENGTHS[step % 3] + 2 * dist.get_rank()
    ids = torch.randint(0, 16, (2, length))
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    named = {"attention_mask": mask} if masked else {}
    model(ids, labels=ids, **named).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
