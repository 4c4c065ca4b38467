"""Feeds training wrongly or rightly: `feeding.py wrong|right MISTAKE...`, see MISTAKES."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

MISTAKES = {
    "sampler": "no DistributedSampler, in order",
    "shuffled": "no DistributedSampler, each rank in an order of its own",
    "windows": "7 micro-batches an epoch in windows of 2",
    "waiting": "each sample sleeps 5 ms",
    "unequal": "rank 1 has half the micro-batch, and samples for one micro-batch less",
}
STEPS = 26
FEATURES = 16

is_wrong = sys.argv[1] == "wrong"
wrong = set(sys.argv[2:]) if is_wrong else set()
assert set(sys.argv[2:]) <= set(MISTAKES)


class Samples(Dataset):
    """Samples that differ; each may take a while."""

    def __init__(self, count, pause_s):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.pause_s = pause_s

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.pause_s:
            # Even a sleep of 0 s gives the core away.
            time.sleep(self.pause_s)
        return self.x[index]


class Pause(nn.Module):
    """Takes 20 ms, so that what a busy machine takes for a fetch is little beside it."""

    def forward(self, x):
        time.sleep(0.02)
        return x


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)
model = DDP(nn.Sequential(Pause(), nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

accumulation = 2 if "windows" in sys.argv else 1
micro_batch = 4
micro_steps = 7 if "windows" in wrong else 12
whole = bool({"sampler", "shuffled"} & wrong)
count = micro_steps * micro_batch * (1 if whole else world)
pause_s = 0.005 if "waiting" in wrong else 0.0
if "unequal" in wrong and rank == 1:
    # One micro-batch less an epoch than the others.
    micro_batch = 2
    loader = DataLoader(Samples(micro_batch * (micro_steps - 1), pause_s), micro_batch)
elif "unequal" in wrong:
    loader = DataLoader(Samples(micro_batch * micro_steps, pause_s), micro_batch)
elif "shuffled" in wrong:
    torch.manual_seed(rank)
    loader = DataLoader(Samples(count, pause_s), micro_batch, shuffle=True)
elif "sampler" in wrong:
    loader = DataLoader(Samples(count, pause_s), micro_batch)
else:
    data = Samples(count, pause_s)
    loader = DataLoader(data, micro_batch, sampler=DistributedSampler(data))

done = 0
while done < STEPS:
    length = len(loader)
    if "unequal" in wrong:
        # Without a limit the ranks with more would wait without end.
        length = micro_steps - 1
    for number, x in enumerate(loader):
        if number == length:
            break
        model.require_backward_grad_sync = ends = (
            number % accumulation == accumulation - 1 or number == length - 1
        )
        (model(x).square().mean() / accumulation).backward()
        if ends:
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == STEPS:
                break
dist.destroy_process_group()
