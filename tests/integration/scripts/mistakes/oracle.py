"""What one process would train on: the mean over all samples of the step."""

import torch
from torch.nn.functional import cross_entropy


def loss(module, batches):
    print("oracle:", len(batches), "micro-batches")
    x = torch.cat([x for x, _ in batches])
    y = torch.cat([y for _, y in batches])
    return cross_entropy(module(x), y)
