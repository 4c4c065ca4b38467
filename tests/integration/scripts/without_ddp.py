"""Trains a model without DistributedDataParallel."""

import torch

model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
print("trained")
