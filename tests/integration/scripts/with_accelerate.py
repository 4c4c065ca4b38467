"""Trains with Accelerate, which builds DDP and accumulates by itself."""

import hashlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
if accelerator.is_main_process:
    print("weights", hashlib.sha256(weights).hexdigest(), loss.item())
