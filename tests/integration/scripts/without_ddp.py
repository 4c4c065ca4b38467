"""Trains a model without DistributedDataParallel: ``plain``, ``fully_shard`` or ``nothing``."""

import sys

import torch
import torch.distributed as dist

model = torch.nn.Sequential(torch.nn.Linear(2, 2))
if "fully_shard" in sys.argv:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(0 if "nothing" in sys.argv else 3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
if dist.is_initialized():
    dist.destroy_process_group()
