"""The built-in multilayer perceptron."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import nn

from ddp_profiler.workload.catalog import MlpOptions
from ddp_profiler.workload.data import synthetic_classes
from ddp_profiler.workload.definition import Workload
from ddp_profiler.workload.losses import mean_cross_entropy


def build(name: str, options: MlpOptions, *, seed: int) -> Workload:
    """Builds a multilayer perceptron on synthetic features."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    layers: list[nn.Module] = []
    features = options.inputs
    for _ in range(options.depth):
        layers += [nn.Linear(features, options.width), nn.ReLU()]
        features = options.width
    layers.append(nn.Linear(features, options.classes))
    return Workload(
        name=name,
        module=nn.Sequential(*layers).to(dtype),
        dataset=synthetic_classes(
            seed, shape=(options.inputs,), classes=options.classes, dtype=dtype
        ),
        inputs=lambda batch: (batch[0],),
        loss=lambda output, batch: mean_cross_entropy(output, batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        options=asdict(options),
    )
