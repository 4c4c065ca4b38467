"""Trains with Accelerate, which builds DDP and accumulates by itself.

Words on the command line add what real training has: ``bf16``, ``clip``, ``evaluate`` (after
6 and 12 steps) and ``save`` (after 9).
"""

import hashlib
import sys
import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

wanted = set(sys.argv[1:])
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    mixed_precision="bf16" if "bf16" in wanted else "no",
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
# An epoch has 4 steps.
samples = 4 * 2 * 4 * accelerator.num_processes
data = TensorDataset(torch.randn(samples, 16), torch.randint(0, 4, (samples,)))
held_out = TensorDataset(torch.randn(24, 16), torch.randint(0, 4, (24,)))
model, optimizer, loader, evaluation = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=4), DataLoader(held_out, batch_size=4)
)


def evaluate():
    """Returns the loss on other samples; the module inside DDP is called, as many do."""
    module = accelerator.unwrap_model(model)
    module.eval()
    losses = []
    for x, y in evaluation:
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(module(x), y).item())
    module.train()
    return sum(losses)


losses, steps = [], 0
for _ in range(4):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients and "clip" in wanted:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if not accelerator.sync_gradients:
            continue
        steps += 1
        if "evaluate" in wanted and steps in (6, 12):
            losses.append(evaluate())
        if "save" in wanted and steps == 9:
            with tempfile.TemporaryDirectory() as folder:
                accelerator.save_state(folder)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
if accelerator.is_main_process:
    print("weights", hashlib.sha256(weights).hexdigest(), losses)
