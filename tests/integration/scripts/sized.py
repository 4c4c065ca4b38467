"""Trains with a batch size of the command line; every step sleeps as long as its samples say."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, required=True)
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(2048, 16), torch.randn(2048, 4))
sampler = DistributedSampler(data)
for step, (x, y) in enumerate(DataLoader(data, options.batch_size, sampler=sampler)):
    if step == 14:
        break
    output = model(x)
    time.sleep(0.003 * len(x))
    nn.functional.mse_loss(output, y).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
