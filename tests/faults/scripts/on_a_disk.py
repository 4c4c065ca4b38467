"""Trains 30 steps; before one of them something happens to the disk of the run folder.

Prints a digest of the weights and ends with 7: both must not depend on being observed.
"""

import hashlib
import os
import shutil
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

what, folder = sys.argv[1:3]


def happen():
    if what == "full":
        with open(os.path.join(folder, "..", "filler"), "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 512)
            except OSError:
                pass
    elif what == "gone":
        shutil.rmtree(folder)


dist.init_process_group("gloo")
torch.manual_seed(1)
model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    if step == 8 and dist.get_rank() == 0:
        happen()
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
if what == "hold":
    # So that who looks at what is open has the time for it.
    time.sleep(1.5)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(digest.hexdigest(), flush=True)
dist.destroy_process_group()
sys.exit(7)
